"""The heads of transformers' classes ``…ForSequenceClassification``."""

from collections.abc import Callable

from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.pooling import DenseSpec, Pooling, PoolingSpec, Squash
from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader, show

_SUFFIX = "ForSequenceClassification"
_MAX_LABELS = 2**16

# The pooling of an encoder's classifier, and the layers before the last one.
_Before = tuple[Pooling, tuple[DenseSpec, ...]]


def is_classifier(config: ConfigReader) -> bool:
    """Whether the checkpoint is one of a classifier, by the name of its class."""
    return any(name.endswith(_SUFFIX) for name in config.texts("architectures") or ())


def classifier_of(config: ConfigReader, spec: ModelSpec) -> PoolingSpec | None:
    """The head of a checkpoint of a classifier; ``None`` for other checkpoints."""
    if not is_classifier(config):
        return None
    num_labels = _num_labels(config)
    if spec.model_type in _HEADS:
        pooling, layers = _HEADS[spec.model_type](config, spec.hidden_size)
        last = "classifier.out_proj" if "roberta" in spec.model_type else "classifier"
        return _classifier(pooling, (*layers, _linear(last, num_labels)), num_labels)
    if kv_groups(spec):  # decoders: the last token's hidden state, times one matrix
        layers = (_linear("score", num_labels, has_bias=False),)
        return _classifier(Pooling.LAST, layers, num_labels)
    return PoolingSpec(is_declared=True, refusal=f"a classifier of type {show(spec.model_type)}")


def _num_labels(config: ConfigReader) -> int:
    labels = config.section("id2label").names() if "id2label" in config else ()
    return config.integer("num_labels", maximum=_MAX_LABELS, default=len(labels) or 2)


def _classifier(pooling: Pooling, layers: tuple[DenseSpec, ...], num_labels: int) -> PoolingSpec:
    return PoolingSpec(
        pooling=pooling, layers=layers, normalize=False, num_labels=num_labels, is_declared=True
    )


def _linear(
    module: str, width: int, *, has_bias: bool = True, squash: Squash = Squash.IDENTITY
) -> DenseSpec:
    return DenseSpec(
        path="",
        weight=(f"{module}.weight",),
        bias=(f"{module}.bias",) if has_bias else None,
        width=width,
        squash=squash,
    )


def _bert(_: ConfigReader, hidden_size: int) -> _Before:
    return Pooling.CLS, (_linear("bert.pooler.dense", hidden_size, squash=Squash.TANH),)


def _roberta(_: ConfigReader, hidden_size: int) -> _Before:
    return Pooling.CLS, (_linear("classifier.dense", hidden_size, squash=Squash.TANH),)


def _modernbert(config: ConfigReader, hidden_size: int) -> _Before:
    config.refuse("classifier_pooling", unless=("cls", "mean"))
    config.refuse("classifier_activation", unless=tuple(Squash))
    dense = DenseSpec(
        path="",
        weight=("head.dense.weight",),
        bias=("head.dense.bias",) if config.boolean("classifier_bias", default=False) else None,
        width=hidden_size,
        squash=Squash(config.text("classifier_activation", default="gelu")),
        norm=("head.norm.weight", "head.norm.bias")
        if config.boolean("norm_bias", default=False)
        else ("head.norm.weight",),
        norm_eps=config.number("norm_eps", minimum=1e-15, maximum=1.0, default=1e-5),
    )
    return Pooling(config.text("classifier_pooling", default="cls")), (dense,)


_HEADS: dict[str, Callable[[ConfigReader, int], _Before]] = {
    "bert": _bert,
    "modernbert": _modernbert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
}

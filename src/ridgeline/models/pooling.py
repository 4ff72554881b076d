"""What a checkpoint says of embeddings and scores: sentence-transformers' files, or its class.

``modules.json`` lists what hidden states go through; a classifier's head follows from the name of
its class in ``config.json`` (transformers' ``…ForSequenceClassification``).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.errors import CorruptFileError
from ridgeline.core.pooling import DenseSpec, Pooling, PoolingSpec, Squash
from ridgeline.core.spec import ModelSpec
from ridgeline.models.classifiers import classifier_of
from ridgeline.models.config import MAX_CONFIG_BYTES, ConfigReader, read_config, show

_MAX_WIDTH = 2**22
_MAX_TOKENS = 2**24  # beyond it a tokenizer's limit means none
_LIMITS = (
    ("sentence_bert_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
_SQUASHES = {
    "Identity": Squash.IDENTITY,
    "Tanh": Squash.TANH,
    "GELU": Squash.GELU,
    "ReLU": Squash.RELU,
    "Sigmoid": Squash.SIGMOID,
}
# What `PoolingHead` computes: modules in another order would be another vector.
_ORDER = re.compile(r"Transformer (Pooling (Dense )*(Normalize )?|LogitScore )")
_OLD_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "pooling_mode_lasttoken": Pooling.LAST,
}


def read_pooling(folder: Path | None, spec: ModelSpec) -> PoolingSpec:
    """What a model makes of hidden states.

    Without files that say it an encoder pools by the mean, as sentence-transformers does, and a
    decoder gives its last token's hidden state; both of length 1. What is not supported is in
    `PoolingSpec.refusal`: the model may be used for other things.

    Raises:
        CorruptFileError: a file contradicts itself.
    """
    encodes = not kv_groups(spec)
    plain = PoolingSpec(
        pooling=Pooling.MEAN if encodes else Pooling.LAST, is_declared=not spec.has_head
    )
    if folder is None or not folder.is_dir():
        return plain
    config = read_config(folder)
    found = classifier_of(ConfigReader(config), spec)
    if found is not None:
        return replace(_scored(folder, config, found), **_prompts(folder))
    if (folder / "modules.json").is_file():
        found = replace(_of_modules(folder, spec), is_declared=True)
    elif (folder / "1_Pooling" / "config.json").is_file():
        found = replace(_pooled(PoolingSpec(), folder / "1_Pooling"), is_declared=True)
    else:
        found = plain
    if found.is_declared:
        found = replace(found, **_prompts(folder))
    if found.refusal is None and found.pooling.needs_all and not encodes:
        return replace(
            found,
            refusal=f"{found.pooling} pooling of a decoder's tokens",
        )
    return found


def _of_modules(folder: Path, spec: ModelSpec) -> PoolingSpec:
    """What the modules after the transformer do."""
    found, kinds = PoolingSpec(normalize=False), []
    for module in _read_list(folder / "modules.json"):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        path = str(module.get("path", ""))
        if not _is_inside(path):
            raise CorruptFileError(f"modules.json names {show(path)}, which is not below it.")
        kinds.append(kind)
        if len(kinds) == 1:
            if kind != "Transformer" or path not in ("", "0_Transformer"):
                return replace(found, refusal=f"a model that begins with {show(kind)}")
            continue
        match kind:
            case "Pooling":
                found = _pooled(found, folder / path)
            case "Dense":
                found = _dense(found, folder, path)
            case "Normalize":
                found = replace(found, normalize=True)
            case "LogitScore":
                found = _logit_score(found, folder / path, spec)
            case _:
                found = replace(found, refusal=f"modules.json asks for {show(kind)}")
        if found.refusal is not None:
            return found
    if not _ORDER.fullmatch("".join(f"{kind} " for kind in kinds)):
        return replace(found, refusal=f"modules in the order {', '.join(kinds) or 'of none'}")
    return found


def _pooled(found: PoolingSpec, folder: Path) -> PoolingSpec:
    """With the pooling of ``1_Pooling/config.json``, in its old spelling or the new one."""
    config = read_config(folder)
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        names = [modes] if isinstance(modes, str) else modes
        if not isinstance(names, list):
            raise CorruptFileError(f"{folder.name} gives pooling_mode as {show(modes)}.")
        by_name = {pooling.value: pooling for pooling in Pooling}
    else:
        names = [
            name for name, on in config.items() if name.startswith("pooling_mode_") and on is True
        ]
        by_name = _OLD_MODES
    known = [by_name.get(name) for name in names if isinstance(name, str)]
    if len(known) != 1 or known[0] is None or len(names) != 1:
        said = "+".join(str(name).removeprefix("pooling_mode_") for name in names) or "no"
        return replace(found, refusal=f"{said[:80]} pooling")
    if config.get("include_prompt", True) is not True:
        return replace(found, refusal="pooling without the prompt (include_prompt)")
    return replace(found, pooling=known[0])


def _dense(found: PoolingSpec, folder: Path, path: str) -> PoolingSpec:
    config = ConfigReader(read_config(folder / path))
    name = config.text("activation_function", default="torch.nn.modules.activation.Tanh")
    squash = _SQUASHES.get(name.rsplit(".", 1)[-1])
    for key in ("module_input_name", "module_output_name"):
        if config.text(key, default="sentence_embedding") != "sentence_embedding":
            return replace(found, refusal=f"a Dense module with another {key}")
    if squash is None:
        return replace(found, refusal=f"a Dense module with {show(name)}")
    layer = DenseSpec(
        path=path,
        weight=("linear.weight",),
        bias=("linear.bias",) if config.boolean("bias", default=True) else None,
        width=config.integer("out_features", maximum=_MAX_WIDTH),
        squash=squash,
    )
    return replace(found, layers=(*found.layers, layer))


def _logit_score(found: PoolingSpec, folder: Path, spec: ModelSpec) -> PoolingSpec:
    """A reranker that is a language model: the logit of one token less that of another."""
    config = ConfigReader(read_config(folder))
    if not spec.has_head or spec.head_bias or spec.logit_scale != 1 or spec.logit_softcap:
        return replace(found, refusal="a LogitScore of logits that are more than a product")
    names = ("true_token_id", "false_token_id")
    rows = tuple(
        config.integer(name, minimum=0, maximum=spec.vocab_size - 1)
        for name in names
        if name in config
    )
    if not rows or names[0] not in config:
        raise CorruptFileError(f"{folder.name} gives no true_token_id.")
    layer = DenseSpec(
        path="",
        weight=("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight"),
        bias=None,
        width=1,
        rows=rows,
    )
    return replace(found, pooling=Pooling.LAST, layers=(layer,), num_labels=1)


def _scored(folder: Path, config: Mapping[str, object], found: PoolingSpec) -> PoolingSpec:
    """With what makes a relevance of the score: of one label the sigmoid, unless a file names
    another.

    sentence-transformers has kept it in three places.
    """
    named = config.get("sbert_ce_default_activation_function")
    section = config.get("sentence_transformers")
    if isinstance(section, Mapping):
        named = section.get("activation_fn", named)
    named = _sentence_transformers(folder).get("activation_fn", named)
    if not isinstance(named, str):
        return replace(found, score=Squash.SIGMOID if found.num_labels == 1 else Squash.IDENTITY)
    score = _SQUASHES.get(named.rsplit(".", 1)[-1])
    if score is None:
        return replace(found, refusal=f"scores that go through {show(named)}")
    return replace(found, score=score)


def _prompts(folder: Path) -> dict[str, Any]:
    """The texts before inputs, and how long these may be."""
    config = _sentence_transformers(folder)
    prompts, default = config.get("prompts"), config.get("default_prompt_name")
    texts = prompts if isinstance(prompts, Mapping) else {}
    if not all(isinstance(text, str) for text in texts.values()):
        raise CorruptFileError("config_sentence_transformers.json has a prompt that is no text.")
    if default is not None and default not in texts:
        raise CorruptFileError(
            f"config_sentence_transformers.json has no prompt {show(default)}, its default."
        )
    limits = []
    for file, key in _LIMITS:
        if (folder / file).is_file():
            limit = read_config(folder / file).get(key)
            if isinstance(limit, int) and 0 < limit < _MAX_TOKENS:
                limits.append(limit)
    return {
        "prompts": dict(texts),
        "default_prompt": default,
        "max_tokens": min(limits, default=None),
        "lower_case": _optional(folder / "sentence_bert_config.json").get("do_lower_case") is True,
        "pairs_by_template": "message" in _modalities(folder),
    }


def _modalities(folder: Path) -> Mapping[str, object]:
    """What inputs may be: text, or messages for a chat template."""
    found = _optional(folder / "sentence_bert_config.json").get("modality_config")
    return found if isinstance(found, Mapping) else {}


def _sentence_transformers(folder: Path) -> dict[str, object]:
    return _optional(folder / "config_sentence_transformers.json")


def _optional(path: Path) -> dict[str, object]:
    return read_config(path) if path.is_file() else {}


def _read_list(path: Path) -> list[dict[str, object]]:
    """A JSON file that holds a list of objects."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} cannot be read as JSON.") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise CorruptFileError(f"{path} holds no list of modules.")
    return values


def _is_inside(path: str) -> bool:
    return not Path(path).is_absolute() and ".." not in Path(path).parts

"""What a model family declares: how to read its config, and where its tensors are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ridgeline.core.arrays import Array
from ridgeline.core.spec import ModelSpec, ShortConvSpec
from ridgeline.core.weight_uses import op_weights
from ridgeline.models.config import ConfigReader
from ridgeline.models.lower import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Where a weight lies in a checkpoint: in the tensor ``name``, whole unless ``rows`` are given.

    ``other_names`` are what the tensor is called in some checkpoints; the first that is there
    counts. ``transpose``: it is stored ``[in, out]``; with ``either_way`` only if its last axis is
    not the weight's. ``rows`` is the half-open range of its
    outputs (rows, once it is transposed; those of each matrix of a stack) that are this weight.
    ``every_other``: of the elements of its last axis, as stored, those from 0 or from 1 on in steps
    of two are this weight. ``row_vector``: it may be stored as a matrix of one row. ``squeeze``: it
    is stored with a second axis of one element. ``of_each`` is (n, start, stop): of each n rows
    those from start to stop are this weight. ``copies`` are tensors that may be there too, if they
    hold the same values. ``experts`` is the half-open range of a stack's matrices that are wanted;
    families declare none.

    In a family's declaration ``{i}`` stands for the layer, and ``rows`` and ``of_each`` are left
    out: they follow from `Family.fused` and `Family.fused_heads`. ``{e}`` stands for the expert:
    the weight is one tensor for each expert, stacked along a new first axis.
    """

    name: str
    other_names: tuple[str, ...] = ()
    transpose: bool = False
    either_way: bool = False
    rows: tuple[int, int] | None = None
    every_other: int | None = None
    row_vector: bool = False
    squeeze: bool = False
    of_each: tuple[int, int, int] | None = None
    copies: tuple[str, ...] = ()
    experts: tuple[int, int] | None = None

    def stored_rows(self, num_rows: int) -> int:
        """Rows that a tensor has at the least to hold so many of this weight."""
        if self.of_each is not None:
            period, start, stop = self.of_each
            return num_rows // (stop - start) * period
        return num_rows if self.rows is None else self.rows[1]

    def select_rows(self, tensor: Array) -> Array:
        """This weight's rows of all of a tensor's."""
        if self.of_each is not None:
            period, start, stop = self.of_each
            groups = tensor.reshape(-1, period, *tensor.shape[1:])
            return groups[:, start:stop].reshape(-1, *tensor.shape[1:])
        return tensor if self.rows is None else tensor[slice(*self.rows)]

    def in_layer(self, index: int) -> "TensorSource":
        """The source with the layer filled in."""
        return self.renamed("{i}", str(index))

    def of_expert(self, index: int) -> "TensorSource":
        """The source of one expert's part of a stacked weight."""
        return self.renamed("{e}", str(index))

    def renamed(self, part: str, other: str) -> "TensorSource":
        """The source with another part of its names."""

        def fill(name: str) -> str:
            return name.replace(part, other)

        others = tuple(fill(name) for name in self.other_names)
        return replace(self, name=fill(self.name), other_names=others)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPTensors:
    """Where the layer lies that predicts one token more; as DeepSeek-V3 has it, if nothing else is
    said.

    All are templates in ``{n}``, the number of the model's layers. ``layer`` is what the names of
    its own modules begin with. ``features_first`` is `MTPSpec`'s.
    """

    layer: str = "model.layers.{n}."
    token_norm: str = "model.layers.{n}.enorm.weight"
    hidden_norm: str = "model.layers.{n}.hnorm.weight"
    fc: str = "model.layers.{n}.eh_proj.weight"
    final_norm: str = "model.layers.{n}.shared_head.norm.weight"
    features_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that is particular to one ``model_type``.

    Attributes:
        model_type: as ``config.json`` says it.
        build: turns the config into a spec.
        tensors: canonical weight name (see `lower`) to its place in a checkpoint; both sides are
            templates in ``{i}``. Names that a spec does not need do no harm.
        fused: name of a tensor that holds several weights, to these weights in order, each below
            the one before; both sides are templates in ``{i}``.
        fused_heads: the same of a tensor that holds some rows of each of these weights by turns,
            for each head of the layer.
        ignored: regular expressions for the full names of tensors that may be left over.
        computes: config keys that change the output and that most families refuse
            (`known_keys`), but not this one.
        mtp: where the layer that predicts one token more lies, in checkpoints that have it.
    """

    model_type: str
    build: Callable[[ConfigReader], ModelSpec]
    tensors: Mapping[str, TensorSource]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    computes: frozenset[str] = frozenset()
    mtp: MTPTensors = MTPTensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefinition:
    """A checkpoint's config, understood.

    ``dtype`` is the number format that the config declares for the weights, float32 if it declares
    none; ``quantization`` is its ``quantization_config``, as `quant.read_scheme` takes it. So many
    layers behind the last predict further tokens.
    """

    spec: ModelSpec
    family: Family
    dtype: str
    quantization: Mapping[str, object] | None = None
    num_mtp_layers: int = 0

    @property
    def sources(self) -> dict[str, TensorSource]:
        """Where each weight lies, by canonical name with the layers filled in."""
        sources: dict[str, TensorSource] = {}
        for template, source in self.family.tensors.items():
            indices = range(len(self.spec.layers)) if "{i}" in template else range(1)
            for index in indices:
                name = template.replace("{i}", str(index))
                sources[name] = _with_bare_names(source.in_layer(index))
        if self.spec.tie_embeddings:
            head = sources["head"]
            sources["embed"] = replace(sources["embed"], copies=(head.name, *head.other_names))
        return sources | self._fused_sources(sources)

    def _fused_sources(self, sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """The sources of weights that share a tensor, with their rows."""
        if not (self.family.fused or self.family.fused_heads):
            return {}
        heights = {
            weight.name: weight.shape[-2:][0]
            for op in lower(self.spec)
            for weight in op_weights(op)
        }
        fused: dict[str, TensorSource] = {}
        for index in range(len(self.spec.layers)):
            for templates in self.family.fused.values():
                start = 0
                for name in (template.replace("{i}", str(index)) for template in templates):
                    if name in heights:
                        stop = start + heights[name]
                        fused[name] = replace(sources[name], rows=(start, stop))
                        start = stop
            for templates in self.family.fused_heads.values():
                names = [template.replace("{i}", str(index)) for template in templates]
                if names[0] in heights:
                    attention = self.spec.layers[index].attention
                    assert attention is not None
                    assert not isinstance(attention, ShortConvSpec), "it has no heads"
                    heads = attention.num_heads
                    stops = list(accumulate(heights[name] // heads for name in names))
                    for name, start, stop in zip(names, [0, *stops], stops, strict=False):
                        place = (stops[-1], start, stop)
                        fused[name] = replace(sources[name], of_each=place)
        return fused

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions for the full names of tensors that may be left over."""
        first = len(self.spec.layers)
        ahead = range(first, first + self.num_mtp_layers)
        ignored = (*self.family.ignored, *(rf"model\.layers\.{layer}\..*" for layer in ahead))
        if self.spec.has_head:
            return ignored
        return (*ignored, r"score\.weight")  # of a classifier, read apart


def _with_bare_names(source: TensorSource) -> TensorSource:
    """``source`` with its names in checkpoints of models without a head: they lack the prefix."""
    prefix = "model."
    names = (source.name, *source.other_names)
    bare = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return replace(source, other_names=(*source.other_names, *bare))

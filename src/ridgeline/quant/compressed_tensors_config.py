"""The ``quantization_config`` of compressed-tensors: groups of modules and how each is stored."""

from dataclasses import dataclass

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.config import ConfigReader, show
from ridgeline.quant.fp8 import read_block
from ridgeline.quant.patterns import name_matcher

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_MAX_GROUPS = 64
_MAX_PATTERNS = 32
_INERT_ARGS = "dynamic observer observer_kwargs actorder scale_dtype zp_dtype"
_INERT = "global_compression_ratio quantization_status run_compressed version"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightArgs:
    """How the weights of a group of modules are stored.

    ``format`` is one of `FORMATS`; ``group_size`` and ``block`` are set where the strategy is
    ``group`` (or ``tensor_group``) and ``block``.
    """

    format: str
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules by exact name, pattern (``re:…``) or class, and their weights."""

    targets: tuple[str, ...]
    weights: WeightArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All groups, the modules that none of them concerns, and what is not applied here."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    quantizes_activations: bool
    quantizes_cache: bool

    def find(self, module: str) -> Group | None:
        """The group of a module: by name before pattern, by pattern before class."""
        if len(self.groups) == 1:  # names may have changed since; there is no other
            return self.groups[0]
        for group in self.groups:
            if module in group.targets:
                return group
        for group in self.groups:
            patterns = (target for target in group.targets if target.startswith("re:"))
            if any(name_matcher(pattern)(module) for pattern in patterns):
                return group
        # A module that has quantized parts is a linear layer, whatever its class is called.
        classes = (g for g in self.groups if any(_is_class(target) for target in g.targets))
        return next(classes, None)

    def ignores(self, module: str) -> bool:
        return any(name_matcher(target)(module) for target in self.ignore)


def _is_class(target: str) -> bool:
    return "." not in target and target[:1].isupper()


def read_groups(config: ConfigReader) -> Groups:
    """Read the config.

    Raises:
        UnsupportedModelError, CorruptFileError: it asks for what cannot be done, or cannot be.
    """
    for name in _INERT.split():
        config.ignore(name)
    config.refuse("transform_config", unless=({},))
    sparsity = config.section("sparsity_config")
    sparsity.refuse("format", unless=("dense",))
    for name in ("registry_requires_subclass", "sparsity_structure", "global_sparsity", "targets"):
        sparsity.ignore(name)
    sparsity.ignore("ignore")
    default = config.text("format", default="dense")
    section = config.section("config_groups")
    names = section.names()
    if not 0 < len(names) <= _MAX_GROUPS:
        raise CorruptFileError(f"quantization_config has {len(names)} config_groups.")
    groups, activations = [], False
    for name in names:
        group = section.section(name)
        targets = group.texts("targets")
        if not targets:
            raise CorruptFileError("A group of quantization_config has no targets.")
        if "output_activations" in group or "input_activations" in group:
            activations = True
        group.ignore("input_activations")
        group.ignore("output_activations")
        if "weights" in group:
            form = group.text("format", default=default)
            groups.append(Group(targets=targets, weights=_weights(group.section("weights"), form)))
        else:
            group.ignore("format")
    ignore = config.texts("ignore") or ()
    patterns = [t for t in (*ignore, *(t for g in groups for t in g.targets)) if t[:3] == "re:"]
    if len(patterns) > _MAX_PATTERNS:
        raise UnsupportedModelError(f"quantization_config has {len(patterns)} patterns of names.")
    for pattern in patterns:
        name_matcher(pattern)
    cache = "kv_cache_scheme" in config
    config.ignore("kv_cache_scheme")
    return Groups(
        groups=tuple(groups),
        ignore=ignore,
        quantizes_activations=activations,
        quantizes_cache=cache,
    )


def _weights(args: ConfigReader, form: str) -> WeightArgs:
    if form not in FORMATS:
        raise UnsupportedModelError(
            f"compressed-tensors weights in the format {show(form)} are not supported; supported "
            f"are {', '.join(FORMATS)}; load the unquantized checkpoint instead."
        )
    for name in _INERT_ARGS.split():
        args.ignore(name)
    size = args.optional_integer("group_size", minimum=-1, default=None)
    block = read_block(args, "block_structure")
    strategy = args.text("strategy", default=_default_strategy(size))
    if strategy not in _STRATEGIES:
        raise UnsupportedModelError(f"Weights quantized by {show(strategy)} are not supported.")
    if strategy in ("group", "tensor_group") and (size is None or size < 1):
        raise CorruptFileError("quantization_config asks for groups and gives no group_size.")
    if strategy == "block" and block is None:
        raise CorruptFileError("quantization_config asks for blocks and gives no block_structure.")
    kind = args.text("type", default="int")
    if kind not in ("int", "float"):
        raise UnsupportedModelError(f"Weights of the type {show(kind)} are not supported.")
    bits = args.integer("num_bits", maximum=64, default=8)
    if bits > 8:
        raise UnsupportedModelError(f"Weights quantized to {bits} bits are not supported.")
    return WeightArgs(
        format=form,
        bits=bits,
        is_float=kind == "float",
        symmetric=args.boolean("symmetric", default=True),
        strategy=strategy,
        group_size=size if strategy in ("group", "tensor_group") else None,
        block=block if strategy == "block" else None,
    )


def _default_strategy(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"

"""Engine configuration: what the user wrote, and the pure function that completes it."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from types import UnionType

from ridgeline.core.checks import check_int
from ridgeline.core.errors import OutOfMemoryError, SettingsError
from ridgeline.core.formats import float_format, full_name, on_load_format
from ridgeline.core.plan import MAX_IN_FLIGHT
from ridgeline.core.sampling_params import MAX_SEED, MAX_TOKENS
from ridgeline.core.spec import ModelSpec, kv_groups
from ridgeline.core.spelling import suggestion

DEFAULT_KV_SHARE = 0.4  # of the memory that is free once the weights are loaded
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8", "fp8")
SCHEDULING_POLICIES = ("fcfs", "priority", "edf", "fair")
BATCHING_MODES = ("continuous", "dynamic", "static")
SPECULATION = ("off", "ngram", "suffix", "draft", "combined", "adaptive")
DRAFT_MODEL_SPECULATION = ("draft", "combined", "adaptive")  # those that use a draft model
VERIFICATION = ("exact", "rejection")
ATTENTION_BACKENDS = ("auto", "triton", "flash-attn")
MAX_SPECULATIVE_TOKENS = 64

_MAX_BYTES = 2**62
_PATHS = (  # that may be os.PathLike
    "model", "draft_model", "chat_template", "kv_disk_tier_path", "encryption_key_file",
    "packed_cache_path", "tuning_cache_path",
)  # fmt: skip
_KINDS: Sequence[tuple[type | UnionType, str, Sequence[str]]] = (
    (bool, "be true or false", ("enable_prefix_caching", "reuse_kv", "offline", "strict")),
    (
        str,
        "be text",
        (
            "executor",
            "dtype",
            "kv_cache_dtype",
            "draft_quantization",
            "packed_cache_path",
            "tuning_cache_path",
        ),
    ),
    (
        str | None,
        "be text",
        (
            "model",
            "quantization",
            "revision",
            "chat_template",
            "draft_model",
            "kv_disk_tier_path",
            "encryption_key_file",
        ),
    ),
    (Mapping, "map names to folders", ("adapters",)),
    (Mapping, "map names to numbers", ("tenant_weights",)),
)
_BOUNDS = {  # of whole numbers
    "max_model_len": (1, MAX_TOKENS),
    "max_num_seqs": (1, MAX_TOKENS),
    "max_num_batched_tokens": (1, MAX_TOKENS),
    "block_tokens": (1, MAX_TOKENS),
    "max_num_waiting": (1, MAX_TOKENS),
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "seed": (0, MAX_SEED),
    "kv_cache_memory_bytes": (1, _MAX_BYTES),
    "kv_ram_tier_bytes": (0, _MAX_BYTES),
    "kv_disk_tier_bytes": (1, _MAX_BYTES),
    "packed_cache_bytes": (1, _MAX_BYTES),
}
_POSITIVE: Mapping[str, Sequence[object]] = {  # numbers above 0, and what else each may be
    "gpu_memory_utilization": (None,),
    "batch_window_s": (),
    "tpot_slo_s": (None,),
    "decode_replay_s": (0,),
    "kv_ttl_s": (None,),
}
_CHOICES = {
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "load_format": LOAD_FORMATS,
    "scheduling_policy": SCHEDULING_POLICIES,
    "batching": BATCHING_MODES,
    "speculation": SPECULATION,
    "verification": VERIFICATION,
    "attention_backend": ATTENTION_BACKENDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` or ``auto`` lets `resolve` choose.

    Attributes:
        model: a folder, a hub name, or ``None`` for the embedded model.
        executor: which executor runs it.
        dtype: float64, float32, bfloat16, float16, or auto for the checkpoint's own.
        quantization: what matrices are quantized to as they are loaded: int8, int4 (a scale for
            each 32 columns), int4-g64, int4-g128, or on a GPU fp8; the checkpoint's own format
            with none, or without it.
        kv_cache_dtype: float32, float16, bfloat16, int8, on a GPU fp8, or auto for the weights'
            own.
        max_model_len: longest sequence, prompt and output together, in tokens.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step.
        block_tokens: tokens in one KV block.
        enable_prefix_caching: reuse the KV of prefixes that were computed before.
        reuse_kv: off, for comparison only, each token computes K and V of its whole context again,
            and no prefix is cached.
        kv_cache_memory_bytes: size of the KV pool.
        gpu_memory_utilization: share of a GPU's memory that weights, KV and steps may take; 0.9
            without it.
        attention_backend: what attends on a GPU: triton (our kernels), flash-attn (FlashAttention,
            for all of a model or not at all), or auto: the faster one where it is installed,
            chosen at start for each kind of layer.
        seed: source of the seeds of requests that have none; the same commands give the same text.
        load_format: auto, or dummy for random weights of the config's shapes.
        revision: branch, tag or commit of a hub name.
        offline: never use the network.
        chat_template: a template, or the path of a file that holds one, instead of the model's own.
        strict: an unknown config key is an error, not a warning.
        adapters: LoRA adapters by name, each a folder in PEFT's layout; a request chooses one.
        speculation: how next tokens are guessed and verified together: off, ngram (looks in the
            prompt and output), suffix (and in earlier outputs), draft (a draft model), combined
            (ngram, else draft) or adaptive (what pays). It changes no output.
        verification: how guesses are verified: exact, or rejection (Leviathan, Chen), which accepts
            more of a draft model's. Outputs are then distributed as without speculation, but they
            are not the same ones, and a request's own seed is refused.
        num_speculative_tokens: tokens that are guessed at once, at the most.
        draft_model: a smaller model with the same vocabulary; the embedded model has its own.
        draft_quantization: what a draft model's matrices are quantized to as they are loaded, none,
            or auto for quantization. Coarser ones cost accepted drafts, and no quality.
        scheduling_policy: who runs first: fcfs, priority, edf (earliest deadline), or fair (share
            of service between tenants, as among equal priorities).
        tenant_weights: a tenant's share under fair or priority, relative to others'; default 1.
        batching: continuous; static (nobody joins a batch that runs); or dynamic (the same, and a
            batch starts when it is full or batch_window_s after its first request).
        batch_window_s: how long dynamic batching waits for a batch to fill.
        max_num_waiting: samples that may wait (a request has n); more are refused, with the seconds
            to stay away.
        tpot_slo_s: prompts get only as many tokens per step as keep it within these seconds.
        decode_replay_s: decode steps that together take no longer are run in one go, while nobody
            waits; 0 returns after each. `LLM.generate`, whose caller sees no token before the end,
            takes up to 0.05 s if that is more.
        kv_ttl_s: cached KV that was not used for these seconds is forgotten, in every tier.
        kv_ram_tier_bytes: keep KV that the pool has no room for in this much of the memory.
        kv_disk_tier_path: keep it in this folder as well, where it survives a restart.
        kv_disk_tier_bytes: the most that the folder may hold.
        encryption_key_file: file of a key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            with which that folder is encrypted, and a server's data folder as well.
        packed_cache_path: folder in which the cpu executor keeps the packed weights of large
            checkpoints for the next start; auto for the user's cache folder, off for none. A folder
            that is named here keeps random weights, too.
        packed_cache_bytes: the most that it may hold; what was used longest ago goes first. A model
            that takes more is packed at every start, with a warning.
        tuning_cache_path: folder in which the cuda executor keeps the tiles of products that it
            timed at start, for up to 20 s a model; auto for the user's cache folder, off for no
            timing and tiles that are guesses.
    """

    model: str | None = None
    executor: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_tokens: int = 16
    enable_prefix_caching: bool = True
    reuse_kv: bool = True
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    attention_backend: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    revision: str | None = None
    offline: bool = False
    chat_template: str | None = None
    strict: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    speculation: str = "off"
    verification: str = "exact"
    num_speculative_tokens: int = 4
    draft_model: str | None = None
    draft_quantization: str = "auto"
    scheduling_policy: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    batching: str = "continuous"
    batch_window_s: float = 0.05
    max_num_waiting: int | None = None
    tpot_slo_s: float | None = None
    decode_replay_s: float = 0.008
    kv_ttl_s: float | None = None
    kv_ram_tier_bytes: int = 0
    kv_disk_tier_path: str | None = None
    kv_disk_tier_bytes: int = 10 * 2**30
    encryption_key_file: str | None = None
    packed_cache_path: str = "auto"
    packed_cache_bytes: int = 50 * 2**30
    tuning_cache_path: str = "auto"

    def __post_init__(self) -> None:
        for name in _PATHS:
            if isinstance(path := getattr(self, name), PathLike):
                object.__setattr__(self, name, fspath(path))
        _check_values(self)
        for name, value in _normal_values(self).items():
            object.__setattr__(self, name, value)
        _check_choices(self)
        _check_effects(self)


def _check_values(config: EngineConfig) -> None:
    """Raise SettingsError for a value of the wrong type, or a whole number out of bounds."""
    for kind, must, names in _KINDS:
        for name in names:
            if not isinstance(getattr(config, name), kind):
                raise SettingsError(f"{name} must {must}.")
    for each in fields(config):
        if each.name in _BOUNDS:
            low, high = _BOUNDS[each.name]
            value, optional = getattr(config, each.name), each.default is None
            check_int(each.name, value, low, high, optional=optional, error=SettingsError)


def _normal_values(config: EngineConfig) -> dict[str, object]:
    """Fields that may be written in several ways, in one; SettingsError if one cannot be read."""
    positive = {
        name: _positive(name, value)
        for name, as_it_is in _POSITIVE.items()
        if (value := getattr(config, name)) not in as_it_is
    }
    weights = {
        name: _positive(f"tenant_weights of {name!r}", weight)
        for name, weight in config.tenant_weights.items()
    }
    for name, folder in config.adapters.items():
        if not isinstance(name, str) or not isinstance(folder, str | PathLike):
            raise SettingsError("adapters must map names to folders.")
    quantization = None if config.quantization == "none" else config.quantization
    return positive | {
        "tenant_weights": weights,
        "adapters": {name: fspath(folder) for name, folder in config.adapters.items()},
        "quantization": quantization,
        "kv_cache_dtype": full_name(config.kv_cache_dtype),
    }


def _check_choices(config: EngineConfig) -> None:
    """Raise SettingsError for a name that there is not."""
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise SettingsError(f"{name} must be one of {', '.join(choices)}.")
    if (config.gpu_memory_utilization or 0) > 1:
        raise SettingsError("gpu_memory_utilization must be at most 1.")
    if config.dtype != "auto":
        float_format(config.dtype)
    on_load_format(config.quantization)
    if config.draft_quantization not in ("auto", "none"):
        on_load_format(config.draft_quantization)


def _check_effects(config: EngineConfig) -> None:
    """Raise SettingsError for a setting that another leaves without effect."""
    drafts = config.speculation in DRAFT_MODEL_SPECULATION
    on_disk = config.kv_disk_tier_path is not None
    guesses, drafting = "speculation", f"speculation {' or '.join(DRAFT_MODEL_SPECULATION)}"
    prefixes = "enable_prefix_caching"
    defaults = EngineConfig.__dataclass_fields__
    for name, needed, is_there in (
        ("verification", guesses, config.speculation != "off"),
        ("num_speculative_tokens", guesses, config.speculation != "off"),
        ("draft_model", drafting, drafts),
        ("draft_quantization", drafting, drafts),
        ("kv_ram_tier_bytes", prefixes, config.enable_prefix_caching),
        ("kv_disk_tier_path", prefixes, config.enable_prefix_caching),
        ("kv_disk_tier_bytes", "kv_disk_tier_path", on_disk),
        ("encryption_key_file", "kv_disk_tier_path", on_disk),
        ("packed_cache_bytes", "packed_cache_path", config.packed_cache_path != "off"),
        ("speculation", "reuse_kv", config.reuse_kv),
        ("batching", "reuse_kv", config.reuse_kv),
        ("kv_ram_tier_bytes", "reuse_kv", config.reuse_kv),
        ("kv_disk_tier_path", "reuse_kv", config.reuse_kv),
        ("batch_window_s", "batching dynamic", config.batching == "dynamic"),
    ):
        if not is_there and getattr(config, name) != defaults[name].default:
            raise SettingsError(f"{name} has no effect without {needed}.")
    if config.tenant_weights and config.scheduling_policy not in ("fair", "priority"):
        raise SettingsError(
            "tenant_weights has no effect without scheduling_policy fair or priority."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every choice made.

    ``num_blocks[g]`` is the size of the pool of KV group g, ``num_draft_blocks[g]`` of the draft
    model's, which is empty without one.
    """

    executor: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    enable_prefix_caching: bool
    num_blocks: tuple[int, ...]
    num_draft_blocks: tuple[int, ...] = ()
    kv_cache_bytes: int
    seed: int
    verification: str = "exact"
    scheduling_policy: str = "fcfs"


def resolve(
    config: EngineConfig,
    *,
    spec: ModelSpec,
    executor: str,
    dtype: str,
    block_bytes: tuple[int, ...],
    free_bytes: int,
    kv_bytes: int | None = None,
    draft_spec: ModelSpec | None = None,
    draft_block_bytes: tuple[int, ...] = (),
) -> ResolvedConfig:
    """Complete a configuration for one model on one machine; a pure function.

    The context defaults to the checkpoint's own, clipped to what the KV pool holds. The pool
    defaults to ``kv_bytes``, where the executor says what its device has for it, else to a share of
    ``free_bytes``, and never exceeds what ``max_num_seqs`` sequences of full length can use. A
    draft model's KV comes out of the same budget.

    Raises:
        SettingsError: ``max_model_len`` is beyond the checkpoint's positions.
        OutOfMemoryError: the pool cannot hold one sequence of ``max_model_len``.
    """
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise SettingsError(
            f"max_model_len {config.max_model_len} is beyond the model's {spec.max_position} "
            "positions."
        )
    length = config.max_model_len or spec.max_position
    default = int(free_bytes * DEFAULT_KV_SHARE) if kv_bytes is None else kv_bytes
    budget = config.kv_cache_memory_bytes or default
    more = "kv_cache_memory_bytes" + ("" if kv_bytes is None else " or gpu_memory_utilization")
    groups = [*kv_groups(spec), *(kv_groups(draft_spec) if draft_spec else ())]
    windows = tuple(group.window for group in groups)
    block_bytes += draft_block_bytes

    def needed(length: int) -> tuple[int, ...]:
        return tuple(
            blocks_per_sequence(length, window, block_tokens=config.block_tokens)
            for window in windows
        )

    def num_bytes(blocks: tuple[int, ...]) -> int:
        return sum(n * size for n, size in zip(blocks, block_bytes, strict=True))

    if num_bytes(needed(length)) > budget:
        if config.max_model_len is not None or num_bytes(needed(1)) > budget:
            raise OutOfMemoryError(
                f"A sequence of {length} tokens needs {num_bytes(needed(length)):,} bytes of KV "
                f"cache, and {budget:,} are given to it; lower max_model_len or raise {more}."
            )
        length = bisect_right(range(1, length), budget, key=lambda n: num_bytes(needed(n)))
    per_sequence = needed(length)
    share = min(config.max_num_seqs, budget / num_bytes(per_sequence))
    num_blocks = tuple(int(n * share) for n in per_sequence)
    return ResolvedConfig(
        executor=executor,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_tokens=config.block_tokens,
        enable_prefix_caching=config.enable_prefix_caching and config.reuse_kv,
        num_blocks=num_blocks[: len(kv_groups(spec))],
        num_draft_blocks=num_blocks[len(kv_groups(spec)) :],
        kv_cache_bytes=sum(n * size for n, size in zip(num_blocks, block_bytes, strict=True)),
        seed=config.seed,
        verification=config.verification,
        scheduling_policy=config.scheduling_policy,
    )


def blocks_per_sequence(length: int, window: int | None, *, block_tokens: int) -> int:
    """Blocks of one KV group with which a sequence of ``length`` tokens runs, whatever others hold.

    With a window, these are the window's and those of the tokens in flight, an eighth of the
    window or two blocks: nothing behind the window is given up before a step's result is there.
    Longer steps take blocks that no other sequence needs (`BlockTables.clip_to_windows`).
    """
    if window is not None:
        in_flight = max(window // 8, MAX_IN_FLIGHT * block_tokens)
        length = min(length, window + in_flight + block_tokens)
    return -(-length // block_tokens)


def with_overrides(config: EngineConfig, **changes: object) -> EngineConfig:
    """A copy with some fields changed.

    Raises:
        SettingsError: there is no such field.
    """
    known = EngineConfig.__dataclass_fields__
    for name in changes:
        if name not in known:
            raise SettingsError(f"There is no setting {name!r}{suggestion(name, known)}")
    return replace(config, **changes)  # type: ignore[arg-type]


def _positive(name: str, value: object) -> float:
    """The number, which may come as text from the command line."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} must be a number.") from error
    if not 0 < number < float("inf"):
        raise SettingsError(f"{name} must be greater than 0.")
    return number

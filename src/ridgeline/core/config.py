"""Engine configuration: what the user wrote, and the pure function that completes it."""

from dataclasses import dataclass, replace

from ridgeline.core.errors import InvalidRequestError, OutOfMemoryError
from ridgeline.core.formats import float_format
from ridgeline.core.spec import ModelSpec, kv_groups

DEFAULT_KV_SHARE = 0.4  # of the memory that is free once the weights are loaded
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` or ``auto`` lets `resolve` choose.

    Attributes:
        model: a folder, a hub name, or ``None`` for the embedded model.
        executor: which executor runs it.
        dtype: float64, float32, bfloat16, float16, or auto for the checkpoint's own.
        max_model_len: longest sequence, prompt and output together, in tokens.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step.
        block_tokens: tokens in one KV block.
        kv_cache_memory_bytes: size of the KV pool.
        seed: from which requests without a seed of their own draw theirs.
        load_format: auto, or dummy for random weights of the config's shapes.
        revision: branch, tag or commit of a hub name.
        offline: never use the network.
        chat_template: a template, or the path of a file that holds one, instead of the model's own.
        strict: an unknown config key is an error, not a warning.
    """

    model: str | None = None
    executor: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_tokens: int = 16
    kv_cache_memory_bytes: int | None = None
    seed: int = 0
    load_format: str = "auto"
    revision: str | None = None
    offline: bool = False
    chat_template: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be positive.")
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be positive.")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequestError("seed must be between 0 and 2^64 − 1.")
        if self.load_format not in LOAD_FORMATS:
            raise InvalidRequestError(f"load_format must be one of {', '.join(LOAD_FORMATS)}.")
        if self.dtype != "auto":
            float_format(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every choice made.

    ``num_blocks[g]`` is the size of the pool of KV group g.
    """

    executor: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    num_blocks: tuple[int, ...]
    kv_cache_bytes: int
    seed: int


def resolve(
    config: EngineConfig,
    *,
    spec: ModelSpec,
    executor: str,
    dtype: str,
    block_bytes: tuple[int, ...],
    free_bytes: int,
) -> ResolvedConfig:
    """Complete a configuration for one model on one machine; a pure function.

    The context defaults to the checkpoint's own, clipped to what the KV pool holds. The pool
    defaults to a share of ``free_bytes``, and never exceeds what ``max_num_seqs`` sequences of full
    length can use.

    Raises:
        InvalidRequestError: ``max_model_len`` is beyond the checkpoint's positions.
        OutOfMemoryError: the pool cannot hold one sequence of ``max_model_len``.
    """
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise InvalidRequestError(
            f"max_model_len {config.max_model_len} is beyond the model's {spec.max_position} "
            "positions."
        )
    length = config.max_model_len or spec.max_position
    budget = config.kv_cache_memory_bytes or int(free_bytes * DEFAULT_KV_SHARE)
    bytes_per_column = sum(block_bytes)  # one block of every group
    columns = budget // bytes_per_column
    wanted_columns = _ceil_div(length, config.block_tokens)
    if columns < wanted_columns:
        if config.max_model_len is not None or columns < 1:
            raise OutOfMemoryError(
                f"A sequence of {length} tokens needs {wanted_columns * bytes_per_column:,} bytes "
                f"of KV cache, and {budget:,} are given to it; lower max_model_len or raise "
                "kv_cache_memory_bytes."
            )
        length = columns * config.block_tokens
    # One more block per sequence: a fork copies its last block before the original is released.
    columns = min(columns, config.max_num_seqs * (_ceil_div(length, config.block_tokens) + 1))
    return ResolvedConfig(
        executor=executor,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_tokens=config.block_tokens,
        num_blocks=(columns,) * len(kv_groups(spec)),
        kv_cache_bytes=columns * bytes_per_column,
        seed=config.seed,
    )


def with_overrides(config: EngineConfig, **changes: object) -> EngineConfig:
    """A copy with some fields changed.

    Raises:
        InvalidRequestError: there is no such field.
    """
    unknown = sorted(set(changes) - set(EngineConfig.__dataclass_fields__))
    if unknown:
        raise InvalidRequestError(f"Unknown setting {', '.join(unknown)}.")
    return replace(config, **changes)  # type: ignore[arg-type]


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)

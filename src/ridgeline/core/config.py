"""Engine configuration: what the user wrote, and the pure function that completes it."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.core.cache_groups import StateGroup, cache_groups
from ridgeline.core.context_ranks import context_blocks
from ridgeline.core.errors import OutOfMemoryError, SettingsError
from ridgeline.core.rounding import ceil_div
from ridgeline.core.settings.executors import CPUSettings, CUDASettings
from ridgeline.core.settings.kv import STATE_CHECKPOINT_TOKENS, KVSettings
from ridgeline.core.settings.model import ModelSettings
from ridgeline.core.settings.parallel import ParallelSettings
from ridgeline.core.settings.reading import read_settings
from ridgeline.core.settings.scheduling import SchedulingSettings
from ridgeline.core.settings.speculation import SpeculationSettings, takes_predictions
from ridgeline.core.spec import ModelSpec
from ridgeline.core.spelling import suggestion

BLOCKS_IN_FLIGHT = 2  # at the least, for tokens whose results are still to come
MIN_STATES = 2  # of a sequence: the one that runs, and the checkpoint that it starts from
DEFAULT_KV_SHARE = 0.4  # of the memory that is free once the weights are loaded


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    ModelSettings,
    SchedulingSettings,
    KVSettings,
    SpeculationSettings,
    ParallelSettings,
    CPUSettings,
    CUDASettings,
):
    """Settings of one engine; ``None`` or ``auto`` lets `resolve` choose.

    Attributes:
        executor: which executor runs the model.
    """

    executor: str = "auto"

    def __post_init__(self) -> None:
        read_settings(self)

    @property
    def sources(self) -> tuple[str, ...]:
        """The models and adapters that these settings name."""
        names = (self.model, self.draft_model, *self.adapters.values())
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every choice made.

    ``num_blocks[g]`` is the size of the pool of group g (`core.spec.cache_groups`),
    ``num_draft_blocks[g]`` of the draft model's, which is empty without one. ``num_ranks``
    processes have a part of the model each, and ``context_ranks`` of them of each sequence's KV.
    ``takes_predictions``: outputs that callers predict are drafted.
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
    takes_predictions: bool = False
    scheduling_policy: str = "fcfs"
    num_ranks: int = 1
    context_ranks: int = 1
    enable_segment_reuse: bool = False


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
    pools = _Pools(config, spec, draft_spec, block_bytes + draft_block_bytes)
    length = config.max_model_len or spec.max_position
    default = int(free_bytes * DEFAULT_KV_SHARE) if kv_bytes is None else kv_bytes
    budget = config.kv_cache_memory_bytes or default
    if (needed := pools.sequence_bytes(length)) > budget:
        if config.max_model_len is not None or pools.sequence_bytes(1) > budget:
            more = "" if kv_bytes is None else " or gpu_memory_utilization"
            raise OutOfMemoryError(
                f"A sequence of {length} tokens needs {needed:,} bytes of KV cache, and {budget:,} "
                f"are given to it; lower max_model_len or raise kv_cache_memory_bytes{more}."
            )
        length = bisect_right(range(1, length), budget, key=pools.sequence_bytes)
    num_blocks = pools.blocks_within(budget, length)
    return ResolvedConfig(
        executor=executor,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_tokens=config.block_tokens,
        enable_prefix_caching=bool(num_blocks) and config.enable_prefix_caching and config.reuse_kv,
        num_blocks=num_blocks[: pools.num_own],
        num_draft_blocks=num_blocks[pools.num_own :],
        kv_cache_bytes=pools.num_bytes(num_blocks),
        seed=config.seed,
        verification=config.verification,
        takes_predictions=takes_predictions(config.speculation),
        scheduling_policy=config.scheduling_policy,
        num_ranks=config.num_ranks,
        context_ranks=config.context_parallel_size,
        enable_segment_reuse=config.enable_segment_reuse,
    )


class _Pools:
    """The groups of a model's KV and states, and then those of its draft model."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        draft_spec: ModelSpec | None,
        block_bytes: tuple[int, ...],
    ) -> None:
        self._config, self._block_bytes = config, block_bytes
        own, drafts = cache_groups(spec), cache_groups(draft_spec) if draft_spec else ()
        self.num_own = len(own)
        self._groups = (*own, *drafts)
        # A draft model's contexts are not shared.
        self._ranks = (*[config.context_parallel_size] * len(own), *[1] * len(drafts))

    def num_bytes(self, blocks: Sequence[int]) -> int:
        """Of so many blocks of each group."""
        return sum(n * size for n, size in zip(blocks, self._block_bytes, strict=True))

    def sequence_bytes(self, length: int) -> int:
        """Of a sequence of ``length`` tokens."""
        return self.num_bytes(self._of_sequence(length))

    def blocks_within(self, budget: int, length: int) -> tuple[int, ...]:
        """Blocks of each group for as many sequences of ``length`` as a budget of bytes holds, at
        most ``max_num_seqs``."""
        per_sequence = self._of_sequence(length)
        share: float = self._config.max_num_seqs
        if self._groups:
            share = min(share, budget / self.num_bytes(per_sequence))
        return tuple(
            int(n * share) // ranks * ranks
            for n, ranks in zip(per_sequence, self._ranks, strict=True)
        )

    def _of_sequence(self, length: int) -> tuple[int, ...]:
        config = self._config
        return tuple(
            states_per_sequence(length, every=config.state_checkpoint_tokens)
            if isinstance(group, StateGroup)
            else context_blocks(
                blocks_per_sequence(length, group.window, block_tokens=config.block_tokens),
                num_ranks,
                config.block_tokens,
            )
            for group, num_ranks in zip(self._groups, self._ranks, strict=True)
        )


def blocks_per_sequence(length: int, window: int | None, *, block_tokens: int) -> int:
    """Blocks of one KV group with which a sequence of ``length`` tokens runs, whatever others hold.

    With a window, these are the window's and those of the tokens in flight, an eighth of the
    window or `BLOCKS_IN_FLIGHT`: nothing behind the window is given up before a step's result is
    there. Longer steps take blocks that no other sequence needs (`SequenceKV.clip_to_windows`).
    """
    if window is not None:
        in_flight = max(window // 8, BLOCKS_IN_FLIGHT * block_tokens)
        length = min(length, window + in_flight + block_tokens)
    return ceil_div(length, block_tokens)


def states_per_sequence(length: int, *, every: int = STATE_CHECKPOINT_TOKENS) -> int:
    """Blocks in the pool of states for a sequence of ``length`` tokens.

    That in which its state runs, one for each of the prompt's end, the output's last checkpoint and
    the next, and those ``every`` so many tokens. It runs with `MIN_STATES`, and finds less cached.
    """
    return 4 + length // every


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

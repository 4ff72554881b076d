"""What a scheduler is told of the engine that it plans for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.core.config import (
    BLOCKS_IN_FLIGHT,
    MIN_STATES,
    EngineConfig,
    ResolvedConfig,
    blocks_per_sequence,
)
from ridgeline.core.context_ranks import context_blocks
from ridgeline.core.settings.kv import STATE_CHECKPOINT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits: sequences at once, tokens in a step, tokens of a sequence, blocks per group.

    ``windows[g]`` is the attention window of KV group g in tokens, ``None`` without one; each pool
    holds at least a sequence of full length. One pool more than windows is that of states, which
    are saved every ``state_tokens``. ``max_in_flight`` plans may be given out before the
    result of the first is there; ``num_stages`` of them are computed at once, as of a pipeline. The
    other settings are those of `EngineConfig`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: tuple[int, ...]
    windows: tuple[int | None, ...]
    block_tokens: int
    scheduling_policy: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    batching: str = "continuous"
    batch_window_s: float = 0.0
    max_num_waiting: int | None = None
    tpot_slo_s: float | None = None
    replay_s: float = 0.0
    kv_ttl_s: float | None = None
    state_tokens: int = STATE_CHECKPOINT_TOKENS
    verification: str = "exact"
    reuse_kv: bool = True
    max_in_flight: int = 2
    num_stages: int = 1
    context_ranks: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.max_in_flight <= BLOCKS_IN_FLIGHT * self.block_tokens
        assert len(self.num_blocks) - len(self.windows) in (0, 1)
        for window, num_blocks in zip(self.windows, self.num_blocks, strict=False):
            columns = blocks_per_sequence(
                self.max_model_len, window, block_tokens=self.block_tokens
            )
            needed = context_blocks(columns, self.context_ranks, self.block_tokens)
            assert needed <= num_blocks, "a pool does not hold one sequence of full length"
        if len(self.num_blocks) > len(self.windows):
            assert self.num_blocks[-1] >= MIN_STATES, "a sequence cannot start from a checkpoint"

    @classmethod
    def of_engine(
        cls,
        config: EngineConfig,
        resolved: ResolvedConfig,
        *,
        windows: tuple[int | None, ...],
        max_in_flight: int = 2,
    ) -> "SchedulerConfig":
        """The part of an engine's configuration that concerns the scheduler.

        ``max_in_flight`` is the executor's.
        """
        return cls(
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            num_blocks=resolved.num_blocks,
            windows=windows,
            block_tokens=resolved.block_tokens,
            scheduling_policy=config.scheduling_policy,
            tenant_weights=config.tenant_weights,
            batching=config.batching,
            batch_window_s=config.batch_window_s,
            max_num_waiting=config.max_num_waiting,
            tpot_slo_s=config.tpot_slo_s,
            replay_s=config.decode_replay_s if config.reuse_kv else 0.0,
            kv_ttl_s=config.kv_ttl_s,
            state_tokens=config.state_checkpoint_tokens,
            verification=config.verification,
            reuse_kv=config.reuse_kv,
            max_in_flight=max_in_flight,
            num_stages=config.pipeline_parallel_size,
            context_ranks=config.context_parallel_size,
        )

"""Whether this model's KV can be taken over elsewhere: asked on load, of the executor itself."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.config import EngineConfig, ResolvedConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import number_format
from ridgeline.core.kv_compression import KVWindow
from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.ops import Op
from ridgeline.core.plan import Admission, BlockTableUpdate, Outputs, Pass, Segment, StepPlan
from ridgeline.core.protocols import Executor
from ridgeline.core.result import StepResult
from ridgeline.core.rounding import round_up
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.settings.speculation import (
    DRAFT_MODEL_SPECULATION,
    EXIT_SPECULATION,
    HEAD_SPECULATION,
)
from ridgeline.executors.kv_reuse import why_not_moved
from ridgeline.executors.registry import executor_traits

Logits = npt.NDArray[np.float32]

_DOCUMENT = 16  # tokens, or one block
# Of the logits' spread, how far those behind a document that was moved may be from those behind one
# that was computed in its place: keys are rounded once more. By bits of a stored element.
_MOST_OFF = {64: 1e-4, 32: 1e-3, 16: 0.05, 8: 0.25, 4: 0.75}


def check_segment_reuse(
    executor: Executor, ops: Sequence[Op], config: EngineConfig, resolved: ResolvedConfig
) -> None:
    """Take a document over to its own position and to another, and compare what follows it.

    At its own position every bit has to be that of a plain run. At another it has to be what tokens
    give that are computed there one by one and see no others, but for rounding.

    Raises:
        SettingsError: something of model or settings keeps KV where it is, or the comparison fails.
    """
    with_model = {*DRAFT_MODEL_SPECULATION, *EXIT_SPECULATION, *HEAD_SPECULATION}
    traits = executor_traits(resolved.executor)
    reasons = {
        f"executor {resolved.executor}": not traits.moves_kv,
        f"speculation {config.speculation}": config.speculation in with_model,
        "several ranks": resolved.num_ranks > 1,
    }
    reason = next((name for name, is_so in reasons.items() if is_so), None) or why_not_moved(ops)
    if reason is not None:
        raise SettingsError(f"enable_segment_reuse does not work with {reason}; leave it out.")
    trial = _Trial(executor, resolved)
    if trial.num_blocks > min(resolved.num_blocks):
        raise SettingsError(
            f"enable_segment_reuse needs {trial.num_blocks} KV blocks for its check, and the pool "
            f"has {min(resolved.num_blocks)}: give a larger kv_cache_memory_bytes."
        )
    trial.run(_MOST_OFF[int(number_format(resolved.kv_cache_dtype).bits)])


class _Trial:
    """Two sequences of one document and a token behind it, in blocks of their own."""

    def __init__(self, executor: Executor, resolved: ResolvedConfig) -> None:
        self._executor = executor
        self._size = size = resolved.block_tokens
        self._length = round_up(_DOCUMENT, size)
        self._moved_to = size + 3
        self._num_columns = (self._moved_to + self._length) // size + 1
        self._num_steps = 0
        self._started = set[int]()
        rng = np.random.default_rng(0)
        shape = 2, self._length + 1
        self._tokens, self._others = rng.integers(executor.spec().vocab_size, size=shape).tolist()

    @property
    def num_blocks(self) -> int:
        return 2 * self._num_columns

    def run(self, most_off: float) -> None:
        """
        Raises:
            SettingsError: what follows the document is not what it should be.
        """
        length, at = self._length, self._moved_to
        self._start(0)
        self._compute(0, 0, length)
        plain = self._compute(0, length, length + 1)
        self._start(1)
        self._compute(1, 0, length, of_others=True)  # which are seen where nothing is copied
        copied = self._compute(1, length, length + 1, reused_at=0)
        if not np.array_equal(plain, copied):
            raise SettingsError(
                "enable_segment_reuse: behind a document that was taken over where it stood logits "
                "are not the same, so this model cannot have it; leave it out."
            )
        self._start(1, at)
        for token in range(length):
            self._compute(1, token, token + 1, at)
        there = self._compute(1, length, length + 1, at)
        self._start(1, at)
        self._compute(1, 0, length, at, of_others=True)
        moved = self._compute(1, length, length + 1, at, reused_at=at)
        self._submit(releases=(0, 1))
        off = float(np.abs(moved - there).max() / there.std())
        if not off <= most_off:
            raise SettingsError(
                f"enable_segment_reuse: behind a document that was moved logits are {off:.3g} of "
                f"their spread off, and rounding would be {most_off:g}, so this model cannot have "
                "it; leave it out."
            )

    def _start(self, slot: int, at: int = 0) -> None:
        """Let a sequence know the document behind ``at`` other tokens."""
        admission = Admission(
            slot=slot,
            token_ids=(*[0] * at, *self._tokens),
            num_prompt_tokens=at + len(self._tokens),
            params=SamplingParams(),
            seed=0,
        )
        self._submit(releases=(slot,) if slot in self._started else (), admissions=(admission,))
        self._started.add(slot)

    def _compute(
        self,
        slot: int,
        start: int,
        stop: int,
        at: int = 0,
        *,
        reused_at: int | None = None,
        of_others: bool = False,
    ) -> Logits:
        """Logits of the last of these tokens, which see the document's alone, behind ``at``."""
        tokens = self._others if of_others else self._tokens
        first = slot * self._num_columns
        blocks = tuple(range(first, first + self._num_columns))
        groups = range(len(self._executor.kv_layout().groups))
        reuses: tuple[KVReuse, ...] = ()
        if reused_at is not None:
            source = (tuple(range(self._length // self._size)),) * len(groups)
            reuses = (KVReuse(reused_at, reused_at, reused_at + self._length, source),)
        segment = Segment(
            slot=slot,
            start=at + start,
            stop=at + stop,
            token_ids=tuple(tokens[start:stop]),
            block_updates=tuple(
                BlockTableUpdate(group=group, first=0, blocks=blocks) for group in groups
            ),
            outputs=Outputs(logits=True),
            window=KVWindow(0, stop) if at else None,
            reuses=reuses,
        )
        result = self._submit(passes=(Pass(segments=(segment,)),))
        logits_TV = result.passes[0][0].logits
        assert logits_TV is not None
        last: Logits = logits_TV[-1]
        return last

    def _submit(
        self,
        *,
        passes: tuple[Pass, ...] = (),
        admissions: tuple[Admission, ...] = (),
        releases: tuple[int, ...] = (),
    ) -> StepResult:
        self._num_steps += 1
        plan = StepPlan(
            step_id=self._num_steps, passes=passes, admissions=admissions, releases=releases
        )
        return self._executor.submit(plan).result()

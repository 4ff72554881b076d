"""Executors that answer with recorded texts: one computes everything first, one only the time.

With random weights a draft model is right about nothing, and looked-up drafts find no repetition.
Here the tokens of both models are replaced by recorded ones after they were drawn. So drafters see
real text, drafts are accepted as they were recorded, and every pass runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.bench.ladder.texts import RecordedText
from ridgeline.core.plan import Admission, ModelRole, Segment, is_earlier_pass
from ridgeline.core.result import SegmentResult
from ridgeline.executors.cpu.batch import CPUBatch
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.handle import Handle, Mask
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.outputs import num_sampled_rows
from ridgeline.executors.runner import Clock
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor


class _Script:
    """What each model says at each position of a recorded text."""

    def __init__(self, texts: Sequence[RecordedText]) -> None:
        self._texts = {text.prompt: text for text in texts}

    def token(self, admission: Admission, role: ModelRole, position: int) -> int:
        """The recorded token; after the end of the record its last one, again and again."""
        prompt = admission.token_ids[: admission.num_prompt_tokens]
        text = self._texts[prompt]
        said = text.output if role is ModelRole.TARGET else text.draft
        return said[min(position - len(prompt), len(said) - 1)]


class ReplayExecutor(CPUExecutor):
    """The cpu executor, whose drawn tokens are replaced by recorded ones.

    ``texts`` have different prompts; other requests are not possible.
    """

    def __init__(
        self,
        models: Mapping[ModelRole, ExecutorModel],
        block_tokens: int,
        *,
        texts: Sequence[RecordedText],
        **options: Any,
    ) -> None:
        super().__init__(models, block_tokens, **options)
        self._script = _Script(texts)

    def replay(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        num_steps: int,
        handle: Handle,
        clock: Clock,
    ) -> list[tuple[SegmentResult, ...]] | None:
        steps = super().replay(segments, role, num_steps, handle, clock)
        if steps is None:
            return None
        said = (
            [
                self._script.token(self.states[segment.slot].admission, role, segment.stop + step)
                for segment in segments
            ]
            for step in range(len(steps))
        )
        return self.replayed(segments, role, said)

    def draw_tokens(
        self, batch: CPUBatch, logits_NV: Any, masks: Sequence[Mask | None]
    ) -> list[list[int] | None]:
        drawn = super().draw_tokens(batch, logits_NV, masks)
        for number, item in enumerate(batch.items):
            if drawn[number] is None:
                continue
            first = item.segment.stop - item.segment.num_drafts
            drawn[number] = [
                self._script.token(item.state.admission, batch.role, first + row)
                for row in range(num_sampled_rows(item.segment))
            ]
        return drawn


class ReplaySimulation(SimulatedExecutor):
    """The same on a virtual clock, at the predicted speed."""

    def __init__(
        self,
        models: Mapping[ModelRole, PricedModel],
        calibration: Calibration,
        clock: VirtualClock,
        *,
        texts: Sequence[RecordedText],
    ) -> None:
        super().__init__(
            models,
            StepPredictor(models, calibration),
            clock,
            host_step_s=calibration.host_step_s,
            host_segment_s=calibration.host_segment_s,
        )
        self._script = _Script(texts)

    def token(self, admission: Admission, position: int) -> int:
        return self._script.token(admission, ModelRole.TARGET, position)

    def accepted(self, admission: Admission, segment: Segment) -> tuple[int, ...]:
        first = segment.stop - segment.num_drafts
        drafts = segment.token_ids[segment.num_tokens - segment.num_drafts :]
        count = 0
        for position, draft in enumerate(drafts, start=first):
            guess = draft
            if is_earlier_pass(draft):
                guess = self._script.token(admission, ModelRole.DRAFT, position)
            if guess != self.token(admission, position):
                break
            count += 1
        return tuple(range(count))

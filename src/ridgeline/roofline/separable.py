"""Predicted seconds of very many steps: what they are made of is computed once for each size."""

from collections.abc import Mapping
from functools import cached_property

from ridgeline.core.ops import Attend
from ridgeline.core.plan import ModelRole, Pass, StepPlan
from ridgeline.roofline.batch import NO_ADAPTERS, BatchShape, make_batch
from ridgeline.roofline.features import (
    SEGMENT,
    SEQUENCE,
    Overlap,
    attention_overlap,
    product_terms,
)
from ridgeline.roofline.fitting import overlap_seconds, predict, weighted
from ridgeline.roofline.predict import StepPredictor

_FEW_TOKENS = 8  # of a segment that attention treats as decode


class SeparablePredictor(StepPredictor):
    """The seconds of `StepPredictor`, but for rounding, at a tenth of its processor time.

    Those of ops on single tokens depend on how many tokens and rows of logits there are; those of
    decodes' attention are of amounts linear in how many there are and in their contexts. Where that
    is not so (latent attention, windows, states, adapters, contexts over ranks, several levels of
    memory, drafts), steps are priced as they are there.
    """

    def seconds(self, plan: StepPlan, adapters: Mapping[int, int] = NO_ADAPTERS) -> float:
        if self._is_separable and len(plan.passes) == 1 and not adapters:
            seconds = self._pass_s(plan.passes[0])
            if seconds is not None:
                return self.calibration.level * seconds
        return super().seconds(plan, adapters)

    @cached_property
    def _is_separable(self) -> bool:
        model = self.models[ModelRole.TARGET]
        return (
            len(self.calibration.ceilings.levels) == 1
            and model.layout.context == 1
            and not model.state_ops
            and all(isinstance(op, Attend) and op.window is None for op, _ in model.attention_ops)
        )

    def _pass_s(self, a_pass: Pass) -> float | None:
        """``None`` if it is not one of decodes and prompts alone."""
        if a_pass.num_nodes or a_pass.role is not ModelRole.TARGET:
            return None
        decodes = context = rows = num_tokens = 0
        prompts: list[tuple[int, int]] = []
        for segment in a_pass.segments:
            start, stop = segment.start, segment.stop
            num_tokens += stop - start
            if segment.outputs.sample:
                rows += 1
            if stop - start == 1:
                decodes += 1
                context += stop
            elif stop - start > _FEW_TOKENS and not segment.num_drafts:
                prompts.append((start, stop))
            else:
                return None
            if segment.window or segment.reuses or segment.outputs.every_position:
                return None
        total = self._step_s(num_tokens, rows, len(a_pass.segments))
        if prompts:
            total += self._attention_s(prompts)
        if decodes:
            total += self._decode_s(decodes, context)
        for step in range(1, a_pass.num_steps):
            total += self._step_s(decodes, decodes, decodes)
            total += self._decode_s(decodes, context + step * decodes)
        return total

    def _step_s(self, num_tokens: int, rows: int, segments: int) -> float:
        """Of everything but attention. Products of as many rows of logits as of tokens are one."""
        if num_tokens == rows:
            seconds = self._rows_s(rows, rows)
        else:
            seconds = self._rows_s(num_tokens, 0) + self._rows_s(0, rows) - self._rows_s(0, 0)
        return seconds + segments * self._segment_s

    def _rows_s(self, num_tokens: int, rows: int) -> float:
        found = self._seconds_of_rows.get((num_tokens, rows))
        if found is None:
            batch = make_batch([(0, num_tokens)], logit_rows=rows)
            model, ceilings = self.models[ModelRole.TARGET], self.calibration.ceilings
            terms = product_terms(model, batch, ceilings)
            found = predict(self.calibration.coefficients, terms)
            self._seconds_of_rows[num_tokens, rows] = found
        return found

    @cached_property
    def _seconds_of_rows(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _segment_s(self) -> float:
        count = sum(n for _, n in self.models[ModelRole.TARGET].attention_ops)
        return weighted(self.calibration.coefficients, {SEQUENCE: 1.0, SEGMENT: float(count)})

    def _attention_s(self, bounds: list[tuple[int, int]]) -> float:
        return overlap_seconds(self.calibration.coefficients, self._attention(make_batch(bounds)))

    def _attention(self, batch: BatchShape) -> Overlap:
        model, ceilings = self.models[ModelRole.TARGET], self.calibration.ceilings
        return attention_overlap(model, batch, ceilings, ceilings.memory.bytes_per_s, {})

    def _decode_s(self, count: int, context: int) -> float:
        """Attention of single tokens of ``count`` sequences, over ``context`` tokens together."""
        fixed, of_sequence, of_token, arithmetic = self._decode_amounts
        read = fixed + of_sequence * count + of_token * context
        overlap = Overlap(
            "attention",
            {"attention/read": read},
            {name: seconds * context for name, seconds in arithmetic.items()},
        )
        return overlap_seconds(self.calibration.coefficients, overlap)

    @cached_property
    def _decode_amounts(self) -> tuple[float, float, float, dict[str, float]]:
        """Seconds at the roof: read once, for each sequence, for each token of its context; and
        computed for each token of context."""
        one, longer, two = (
            self._attention(make_batch(bounds)) for bounds in ([(0, 1)], [(1, 2)], [(0, 1), (0, 1)])
        )
        first, second, third = (each.memory["attention/read"] for each in (one, longer, two))
        of_token = second - first
        of_sequence = third - second
        return first - of_token - of_sequence, of_sequence, of_token, dict(one.arithmetic)

"""`SimulatedExecutor`: answers plans with made-up tokens after the predicted time.

The tokens depend on the sequence's seed and the position alone, and never end an output by
themselves: outputs end at their length. A drafted token is accepted with a given probability, drawn
from the same noise, whatever else is in the batch.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import (
    GROWN,
    Admission,
    ModelRole,
    Pass,
    Segment,
    StepPlan,
    is_reference,
    num_outputs,
    plans_back,
    referenced_output,
)
from ridgeline.core.protocols import Executor, KVLayout, StepTimePredictor
from ridgeline.core.result import SegmentResult, StepResult, StepTimings
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.simulated.clock import VirtualClock
from ridgeline.roofline import PricedModel

_NOT_YIELDED = -1
_UNIT = 2**32
_SIBLING = 0.7  # how likely a tree's next token in a place is, beside the one before


class _Handle:
    """A step whose outcome is known, and which is done at ``done_s`` of the virtual clock."""

    def __init__(self, result: StepResult, clock: VirtualClock, done_s: float) -> None:
        self._result, self._clock, self._done_s = result, clock, done_s

    def set_masks(self, masks: object) -> None:
        """Masks change no simulated token."""

    def abort(self) -> None:
        """A simulated step is already computed."""

    def done(self) -> bool:
        return self._clock() >= self._done_s

    def result(self) -> StepResult:
        self._clock.advance_to(self._done_s)
        return self._result


class SimulatedExecutor(Executor):
    """See `ridgeline.core.protocols.Executor` for the contract.

    Args:
        models: what is priced, by role.
        predictor: predicted seconds of a plan.
        clock: advanced by the wait for a result, and by what the host does between steps.
        host_step_s: seconds of scheduling and output handling for each step.
        host_segment_s: the same for each segment.
        acceptance: probability that a drafted token is accepted if those before it are.
    """

    name = "simulated"
    max_in_flight = 2

    def __init__(
        self,
        models: Mapping[ModelRole, PricedModel],
        predictor: StepTimePredictor,
        clock: VirtualClock,
        *,
        block_tokens: int = 16,
        host_step_s: float = 0.0,
        host_segment_s: float = 0.0,
        acceptance: float = 0.6,
    ) -> None:
        self._models = dict(models)
        self._vocab_size = models[ModelRole.TARGET].spec.vocab_size
        self._predictor = predictor
        self._clock = clock
        self._block_tokens = block_tokens
        self._host_step_s, self._host_segment_s = host_step_s, host_segment_s
        self._acceptance = acceptance
        self.free_s = 0.0  # when the steps in flight will be done
        self._admissions: dict[int, Admission] = {}
        self._grown: dict[int, tuple[int, ...]] = {}  # parents of the latest trees, by slot
        # Of the latest plans, by output number, that of the plan that runs first.
        self._outputs: deque[list[int]] = deque(maxlen=self.max_in_flight)
        self.num_steps = 0  # those that were replayed, too

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return self._models[role].spec

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        model = self._models[role]
        sizes = tuple(
            int(len(group.layers) * model.kv_token_bytes(group) * self._block_tokens)
            for group in model.groups
        )
        if model.states is not None:
            sizes += (model.state_bytes,)
        return KVLayout(
            block_tokens=self._block_tokens,
            groups=model.groups,
            block_bytes=sizes,
            digest=f"simulated/{self._block_tokens}",
            states=model.states,
        )

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        """Nothing is allocated."""

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        raise EngineError("The simulated executor has no KV to export.")

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        raise EngineError("The simulated executor has no KV to write to.")

    def close(self) -> None:
        self._admissions.clear()

    def submit(self, plan: StepPlan) -> _Handle:
        self.num_steps += max((a_pass.num_steps for a_pass in plan.passes), default=1)
        for slot in plan.releases:
            del self._admissions[slot]
        for admission in plan.admissions:
            self._admissions[admission.slot] = admission
        self._outputs.appendleft([])
        passes = tuple(self._run(a_pass) for a_pass in plan.passes)
        num_segments = sum(len(a_pass.segments) for a_pass in plan.passes)
        self._clock.advance(self._host_step_s + num_segments * self._host_segment_s)
        seconds = self._predictor.seconds(plan)
        self.free_s = max(self.free_s, self._clock()) + seconds
        timings = StepTimings(forward_s=seconds, total_s=seconds)
        result = StepResult(step_id=plan.step_id, passes=passes, timings=timings)
        return _Handle(result, self._clock, self.free_s)

    def _run(self, a_pass: Pass) -> tuple[SegmentResult, ...]:
        if a_pass.num_nodes:
            results = tuple(self._tree(segment, a_pass) for segment in a_pass.segments)
        else:
            results = tuple(self._outcome(segment, a_pass.num_steps) for segment in a_pass.segments)
        for segment, result in zip(a_pass.segments, results, strict=True):
            missing = num_outputs(segment, a_pass) - len(result.token_ids)
            self._outputs[0].extend([*result.token_ids, *[_NOT_YIELDED] * missing])
        return results

    def _tree(self, segment: Segment, a_pass: Pass) -> SegmentResult:
        """A chain as long as it may be, and a second token in each place as far as there are."""
        count, depth = a_pass.num_nodes, a_pass.num_steps
        parents = tuple(node - 1 if node < depth else node % depth - 1 for node in range(count))
        self._grown[segment.slot] = parents
        token = self.token(self._admissions[segment.slot], segment.stop)
        return SegmentResult(token_ids=(token,) * count, parents=parents)

    def _outcome(self, segment: Segment, num_steps: int) -> SegmentResult:
        outputs = segment.outputs
        if outputs.logits or outputs.pooled or outputs.prompt_logprobs:
            raise EngineError("The simulated executor has no logits and no hidden states.")
        if not outputs.sample or self._is_void(segment):
            return SegmentResult()
        admission = self._admissions[segment.slot]
        if num_steps == 1 and not segment.num_drafts:
            return SegmentResult(token_ids=(self.token(admission, segment.stop),))
        accepted = self.accepted(admission, segment)
        first = segment.stop - segment.num_drafts
        drafts = segment.token_ids[segment.num_tokens - segment.num_drafts :]
        kept = [self._resolved(drafts[node]) for node in accepted]
        drawn = [self.token(admission, first + len(accepted) + step) for step in range(num_steps)]
        return SegmentResult(token_ids=(*kept, *drawn), accepted=accepted)

    def accepted(self, admission: Admission, segment: Segment) -> tuple[int, ...]:
        """Indices of the accepted drafts, the children of each in their order."""
        parents = segment.parents or tuple(range(-1, segment.num_drafts - 1))
        if parents[:1] == (GROWN,):
            parents = self._grown[segment.slot]
        path: list[int] = []
        node, position = -1, segment.stop - segment.num_drafts
        while node in parents:
            noise, missed, share = self._noise(admission, position + len(path), 1), 1.0, 1.0
            for child in (child for child, parent in enumerate(parents) if parent == node):
                missed *= 1.0 - share * self._acceptance
                share *= _SIBLING
                if noise < 1.0 - missed:
                    path.append(child)
                    break
            else:
                break
            node = path[-1]
        return tuple(path)

    def _is_void(self, segment: Segment) -> bool:
        tokens = segment.token_ids
        if len(tokens) > 1 and not is_reference(min(tokens)):
            return False
        return any(self._resolved(token) == _NOT_YIELDED for token in tokens)

    def _resolved(self, token: int) -> int:
        if not is_reference(token):
            return token
        return self._outputs[plans_back(token)][referenced_output(token)]

    def token(self, admission: Admission, position: int) -> int:
        """Any token but those that end the output."""
        token = int(self._noise(admission, position, 0) * self._vocab_size)
        while token in admission.eos_token_ids or token in admission.params.stop_token_ids:
            token = (token + 1) % self._vocab_size
        return token

    def _noise(self, admission: Admission, position: int, purpose: int) -> float:
        """Uniform in [0, 1), a function of seed, sample and position (a multiplicative hash)."""
        value = (admission.seed * 0x9E3779B97F4A7C15 + admission.sample_index * 0x85EBCA6B) ^ (
            (position * 2 + purpose) * 0xC2B2AE3D27D4EB4F
        )
        value &= 0xFFFFFFFFFFFFFFFF
        value ^= value >> 29
        value = value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        return ((value >> 32) & (_UNIT - 1)) / _UNIT

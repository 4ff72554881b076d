"""Which steps the device can run without the host looking at their results."""

from collections.abc import Callable, Mapping, Sequence

from ridgeline.core.plan import (
    ModelRole,
    Outputs,
    Pass,
    Segment,
    StepPlan,
    is_earlier_pass,
    is_reference,
)
from ridgeline.executors.cuda.graphs import MAX_STEPS
from ridgeline.executors.cuda.kernels import Draw
from ridgeline.executors.state import SequenceState

_SAMPLE, _NOTHING = Outputs(sample=True), Outputs()

States = Mapping[int, SequenceState]


def is_deferrable(
    plan: StepPlan,
    states: States,
    *,
    decodes: Callable[[Pass], bool],
    fits: Callable[[int], bool],
) -> bool:
    """Whether a plan has one pass that wants tokens and nothing else, drawn as the device draws.

    ``decodes`` says whether the pass can be a decode step, which is what is repeated; ``fits``
    whether the device has all that changes the logits of a slot's sequence.
    """
    if len(plan.passes) != 1:
        return False
    (a_pass,) = plan.passes
    if a_pass.num_nodes or (a_pass.num_steps > 1 and not decodes(a_pass)):
        return False
    return all(
        _is_deferrable_segment(segment, a_pass.role, states[segment.slot], fits)
        for segment in a_pass.segments
    )


def can_decode(segments: Sequence[Segment], num_steps: int) -> bool:
    """Whether every segment is one token that is followed by another."""
    return num_steps <= MAX_STEPS and all(
        segment.num_tokens == 1 and segment.outputs.sample for segment in segments
    )


def is_adjusted(state: SequenceState, position: int) -> bool:
    """Whether logits change before the token at ``position`` is drawn from them."""
    admission, params = state.admission, state.admission.params
    ends = (*admission.eos_token_ids, *params.stop_token_ids)
    is_barred = bool(ends) and position - admission.num_prompt_tokens < params.min_tokens
    return params.has_penalties or bool(params.logit_bias) or is_barred


def by_rejection(state: SequenceState, role: ModelRole) -> bool:
    """Whether tokens are drafts that are verified by rejection, from the whole distribution."""
    return role is ModelRole.DRAFT and state.verifies_by_rejection


def draw_of(state: SequenceState) -> Draw:
    """How a sequence's tokens are drawn."""
    params = state.admission.params
    if params.is_greedy:
        return Draw.BEST
    truncates = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return Draw.TRUNCATED if truncates else Draw.NOISE


def _is_deferrable_segment(
    segment: Segment, role: ModelRole, state: SequenceState, fits: Callable[[int], bool]
) -> bool:
    if segment.num_drafts or segment.outputs not in (_SAMPLE, _NOTHING):
        return False
    if any(map(is_reference, segment.token_ids[:-1])) or is_earlier_pass(segment.token_ids[-1]):
        return False
    if not segment.outputs.sample:
        return True
    if state.admission.params.logprobs is not None or by_rejection(state, role):
        return False
    if is_adjusted(state, segment.stop):
        return role is ModelRole.TARGET and fits(segment.slot)
    return True

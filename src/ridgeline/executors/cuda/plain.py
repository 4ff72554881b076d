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
from ridgeline.executors.cuda.decode import MAX_STEPS
from ridgeline.executors.cuda.kernels import Draw
from ridgeline.executors.state import SequenceState

_SAMPLE, _NOTHING = Outputs(sample=True), Outputs()

States = Mapping[int, SequenceState]


def is_plain(plan: StepPlan, states: States, *, decodes: Callable[[Pass], bool]) -> bool:
    """Whether a plan has one pass that wants tokens and nothing else, drawn as the device draws.

    ``decodes`` says whether the pass can be a decode step, which is what is repeated.
    """
    if len(plan.passes) != 1:
        return False
    (a_pass,) = plan.passes
    if a_pass.num_steps > 1 and not decodes(a_pass):
        return False
    return all(
        _is_plain_segment(segment, a_pass.role, states[segment.slot]) for segment in a_pass.segments
    )


def can_decode(segments: Sequence[Segment], num_steps: int) -> bool:
    """Whether every segment is one token that is followed by another."""
    return num_steps <= MAX_STEPS and all(
        segment.num_tokens == 1 and segment.outputs.sample for segment in segments
    )


def draws_plainly(state: SequenceState, position: int, role: ModelRole) -> bool:
    """Whether the token at ``position`` is drawn from the logits as they are."""
    admission, params = state.admission, state.admission.params
    ends = (*admission.eos_token_ids, *params.stop_token_ids)
    is_barred = bool(ends) and position - admission.num_prompt_tokens < params.min_tokens
    is_changed = params.has_penalties or bool(params.logit_bias) or is_barred
    by_rejection = role is ModelRole.DRAFT and state.verifies_by_rejection
    return not is_changed and not by_rejection


def draw_of(state: SequenceState) -> Draw:
    """How a sequence's tokens are drawn."""
    params = state.admission.params
    if params.is_greedy:
        return Draw.BEST
    truncates = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return Draw.TRUNCATED if truncates else Draw.NOISE


def _is_plain_segment(segment: Segment, role: ModelRole, state: SequenceState) -> bool:
    if segment.num_drafts or segment.outputs not in (_SAMPLE, _NOTHING):
        return False
    if any(map(is_reference, segment.token_ids[:-1])) or is_earlier_pass(segment.token_ids[-1]):
        return False
    if not segment.outputs.sample:
        return True
    is_told = state.admission.params.logprobs is not None
    return not is_told and draws_plainly(state, segment.stop, role)

"""Steps that decode drafts, and seconds that are made up for them."""

from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan


class MadeUpSeconds:
    """Verifying one more token costs ``token_s``; a draft pass ``draft_s``; a step at least 1."""

    def __init__(self, *, token_s: float, draft_s: float) -> None:
        self.token_s, self.draft_s = token_s, draft_s
        self.num_asked = 0

    def seconds(self, plan):
        self.num_asked += 1
        return sum(
            self.draft_s * a_pass.num_steps
            if a_pass.role is ModelRole.DRAFT
            else 1.0 + self.token_s * a_pass.num_tokens
            for a_pass in plan.passes
        )

    def segment_seconds(self, num_tokens, context):
        return self.token_s * num_tokens


def plan_of(drafted):
    """A step in which each slot verifies so many tokens of a draft model."""
    target = tuple(
        Segment(slot=slot, start=100, stop=101 + n, token_ids=(1,) * (1 + n), num_drafts=n)
        for slot, n in enumerate(drafted)
    )
    draft = Segment(slot=0, start=100, stop=101, token_ids=(1,))
    target_pass = Pass(segments=target)
    if not any(drafted):
        return StepPlan(step_id=0, passes=(target_pass,))
    chain = Pass(segments=(draft,), role=ModelRole.DRAFT, num_steps=max(drafted))
    return StepPlan(step_id=0, passes=(chain, target_pass))

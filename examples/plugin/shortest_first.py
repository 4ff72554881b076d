"""``--scheduling-policy shortest-first``: who needs the fewest tokens runs first."""

from collections.abc import Mapping

from ridgeline.scheduler.policies import FirstComeFirstServed, Rank
from ridgeline.scheduler.sequence import Sequence


class ShortestFirst(FirstComeFirstServed):
    """By prompt and longest output together; of equals, the first to come. Long ones may starve."""

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        del tenant_weights  # everybody's are the same

    def rank(self, sequence: Sequence) -> Rank:
        request = sequence.request
        tokens = len(request.prompt_token_ids) + (request.params.max_tokens or 0)
        return (tokens, *super().rank(sequence))

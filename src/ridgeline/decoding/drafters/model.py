"""A smaller model of the same vocabulary as a drafter (Leviathan et al. 2023)."""

from collections.abc import Sequence

from ridgeline.core.protocols import Draft, Drafter


class ModelDrafter(Drafter):
    """Asks for the draft model's pass in the same plan.

    The executor draws its tokens with the target's settings and the target's noise, so that both
    models choose alike where their distributions are close.
    """

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
    ) -> None: ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def propose(self, slot: int, max_tokens: int) -> Draft:
        return Draft(num_model_tokens=max_tokens)

    def finish(self, slot: int) -> None: ...

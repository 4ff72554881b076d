"""A smaller model of the same vocabulary as a drafter (Leviathan et al. 2023)."""

from collections.abc import Sequence

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw


class ModelDrafter(Drafter):
    """Asks for the draft model's pass in the same plan.

    The executor draws its tokens with the target's settings and the target's noise, so that both
    models choose alike where their distributions are close.
    """

    def __init__(self, *, is_tree: bool = False) -> None:
        self._is_tree = is_tree

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None: ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def propose(self, slot: int, max_tokens: int) -> Draft:
        return Draft(num_model_tokens=max_tokens, is_tree=self._is_tree)

    def finish(self, slot: int) -> None: ...

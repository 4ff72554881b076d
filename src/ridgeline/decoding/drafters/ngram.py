"""Prompt lookup: what followed the last tokens when they occurred before (Saxena 2023)."""

from collections.abc import Sequence

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw
from ridgeline.decoding.drafters.hash_chains import HashChains
from ridgeline.decoding.drafters.lookup_tree import continuations, lookup_tree


class NgramDrafter(Drafter):
    """Looks in the sequence's own prompt and output; ``is_tree``: for several continuations."""

    def __init__(self, *, is_tree: bool = False) -> None:
        self._is_tree = is_tree
        self._texts: dict[int, HashChains] = {}
        self._draws: dict[int, TokenDraw] = {}

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        self._texts[slot], self._draws[slot] = HashChains(), draw
        self.extend(slot, token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._texts[slot].extend(token_ids)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        text = self._texts[slot]
        if self._is_tree:
            found = continuations(text, text.own_ends())
            return lookup_tree(
                found, position=len(text), num_nodes=max_tokens, draw=self._draws[slot]
            )
        return Draft(token_ids=text.continuation(text.find_own_end(), max_tokens))

    def finish(self, slot: int) -> None:
        del self._texts[slot], self._draws[slot]

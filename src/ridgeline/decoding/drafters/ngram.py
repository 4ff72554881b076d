"""Prompt lookup: what followed the last tokens when they occurred before (Saxena 2023)."""

from collections.abc import Sequence

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw
from ridgeline.decoding.drafters.hash_chains import MAX_MATCH, HashChains
from ridgeline.decoding.drafters.lookup_tree import continuations, lookup_tree


class NgramDrafter(Drafter):
    """Looks in the sequence's own prompt and output, and in what its caller expects of that;
    ``is_tree``: for several continuations.
    """

    def __init__(self, *, is_tree: bool = False) -> None:
        self._is_tree = is_tree
        self._texts: dict[int, HashChains] = {}
        self._draws: dict[int, TokenDraw] = {}
        self._expected: dict[int, HashChains] = {}

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

    def expect(self, slot: int, token_ids: Sequence[int]) -> None:
        self._expected[slot] = expected = HashChains()
        expected.extend(token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._texts[slot].extend(token_ids)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        text, expected = self._texts[slot], self._expected.get(slot)
        others = [] if expected is None else [expected]
        if self._is_tree:
            found = continuations(text, text.own_ends())
            for other in others:
                found += continuations(other, other.ends_of(text.tokens[-MAX_MATCH:]), end=-1)
            return lookup_tree(
                found, position=len(text), num_nodes=max_tokens, draw=self._draws[slot]
            )
        return Draft(token_ids=text.best_following(others, max_tokens))

    def finish(self, slot: int) -> None:
        del self._texts[slot], self._draws[slot]
        self._expected.pop(slot, None)

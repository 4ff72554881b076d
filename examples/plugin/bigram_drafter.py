"""``--speculation bigram``: after each token comes what came after it last time."""

from collections.abc import Sequence

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw


class BigramDrafter(Drafter):
    """Keeps, for each sequence, the latest follower of every token seen in it."""

    def __init__(self) -> None:
        self._followers: dict[int, dict[int, int]] = {}
        self._last: dict[int, int] = {}

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        self._followers[slot] = {}
        self._last[slot] = token_ids[0]
        self.extend(slot, token_ids[1:])

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        followers = self._followers[slot]
        for token in token_ids:
            followers[self._last[slot]] = token
            self._last[slot] = token

    def propose(self, slot: int, max_tokens: int) -> Draft:
        followers, token = self._followers[slot], self._last[slot]
        chain: list[int] = []
        while len(chain) < max_tokens and token in followers:
            token = followers[token]
            chain.append(token)
        return Draft(token_ids=tuple(chain))

    def finish(self, slot: int) -> None:
        del self._followers[slot], self._last[slot]

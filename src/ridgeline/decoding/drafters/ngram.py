"""Prompt lookup: what followed the last tokens when they occurred before (Saxena 2023)."""

from collections.abc import Sequence

from ridgeline.core.protocols import Draft, Drafter
from ridgeline.decoding.drafters.hash_chains import HashChains


class NgramDrafter(Drafter):
    """Looks in the sequence's own prompt and output."""

    def __init__(self) -> None:
        self._texts: dict[int, HashChains] = {}

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
    ) -> None:
        self._texts[slot] = HashChains()
        self.extend(slot, token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._texts[slot].extend(token_ids)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        text = self._texts[slot]
        return Draft(token_ids=text.continuation(text.find_own_end(), max_tokens))

    def finish(self, slot: int) -> None:
        del self._texts[slot]

"""Several drafters, in order of preference."""

from collections.abc import Mapping, Sequence

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw


class FirstOf(Drafter):
    """Takes the first proposal that is not empty, and tells its drafter what came of it."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._asked: dict[int, Drafter] = {}

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        for drafter in self._drafters:
            drafter.start(slot, token_ids, namespace, tenant=tenant, draw=draw)

    def expect(self, slot: int, token_ids: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.expect(slot, token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(slot, token_ids)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        draft = Draft()
        for drafter in self._drafters:
            draft = drafter.propose(slot, max_tokens)
            if draft.token_ids or draft.num_model_tokens:
                self._asked[slot] = drafter
                break
        return draft

    def finish(self, slot: int) -> None:
        self._asked.pop(slot, None)
        for drafter in self._drafters:
            drafter.finish(slot)

    def delete_tenant(self, tenant: str) -> None:
        for drafter in self._drafters:
            drafter.delete_tenant(tenant)

    def begin_step(self, lengths: Mapping[int, int]) -> None:
        for drafter in self._drafters:
            drafter.begin_step(lengths)

    def verified(self, slot: int, draft: Draft, accepted: Sequence[int]) -> None:
        self._asked[slot].verified(slot, draft, accepted)

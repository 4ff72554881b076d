"""Token recycling: what was likely after a token before may follow it again.

Luo et al. 2024, arXiv 2408.08696: the target's likeliest tokens in each place that it has verified
are kept by the token before them, and a draft follows these links from the last token on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw
from ridgeline.core.result import TokenLogprobs
from ridgeline.decoding.trees import Children, DraftTree, drawn_scores, ranked

NUM_CANDIDATES = 8
DEFAULT_MAX_TOKENS = 1 << 16  # about 20 MB

_Top = tuple[tuple[int, float], ...]  # token ids and log-probabilities, the likeliest first


@dataclass(slots=True)
class _Links:
    """The likely tokens after each token, of a namespace or of one sequence alone."""

    after: OrderedDict[int, _Top] = field(default_factory=OrderedDict)
    tenants: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Slot:
    links: str | int  # the namespace, or the slot
    tenant: str
    draw: TokenDraw
    length: int
    last: int


class RecyclingDrafter(Drafter):
    """Follows the latest links of the sequence's namespace; as a tree if ``is_tree``.

    Memory is bounded: ``max_tokens`` tokens with links over all namespaces, of which the least
    recently used goes first, and of the last that is left the tokens that were seen longest ago.
    """

    num_candidates = NUM_CANDIDATES

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS, *, is_tree: bool = False) -> None:
        self._max_tokens = max_tokens
        self._width = NUM_CANDIDATES if is_tree else 1
        self._slots: dict[int, _Slot] = {}
        self._links: OrderedDict[str | int, _Links] = OrderedDict()
        self._num_remembered = 0

    @property
    def num_remembered(self) -> int:
        """Tokens with links, of all namespaces."""
        return self._num_remembered

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        links = slot if namespace is None else namespace
        self._slots[slot] = _Slot(links, tenant, draw, len(token_ids), token_ids[-1])

    def see(self, slot: int, candidates: Sequence[TokenLogprobs]) -> None:
        if not candidates:
            return
        state = self._slots[slot]
        links = self._links.setdefault(state.links, _Links())
        self._links.move_to_end(state.links)
        links.tenants.add(state.tenant)
        self._num_remembered -= len(links.after)
        last = state.last
        for each in candidates:
            links.after[last] = each.top
            links.after.move_to_end(last)
            last = each.token_id
        self._num_remembered += len(links.after)
        while self._num_remembered > self._max_tokens:
            self._forget()

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        if token_ids:
            state = self._slots[slot]
            state.length, state.last = state.length + len(token_ids), token_ids[-1]

    def propose(self, slot: int, max_tokens: int) -> Draft:
        state = self._slots[slot]
        links = self._links.get(state.links, _Links()).after
        tree, new = DraftTree(max_tokens), [-1]
        while new:
            path = tree.path(new[0])
            top = links.get(path[-1] if path else state.last, ())
            tree.add(new[0], self._children(top, state.length + len(path), state.draw))
            new = tree.leaves(1)
        tokens, parents = tree.best()
        return Draft(token_ids=tokens, parents=parents if self._width > 1 else ())

    def finish(self, slot: int) -> None:
        del self._slots[slot]
        self._drop(slot)

    def delete_tenant(self, tenant: str) -> None:
        for name in [name for name, links in self._links.items() if tenant in links.tenants]:
            self._drop(name)

    def _forget(self) -> None:
        name, links = next(iter(self._links.items()))
        if len(self._links) > 1:
            self._drop(name)
        else:
            links.after.popitem(last=False)
            self._num_remembered -= 1

    def _drop(self, name: str | int) -> None:
        links = self._links.pop(name, None)
        if links is not None:
            self._num_remembered -= len(links.after)

    def _children(self, top: _Top, position: int, draw: TokenDraw) -> Children:
        if not top:
            return Children([], [])
        ids, logprobs = [token for token, _ in top], np.array([each for _, each in top])
        scores = drawn_scores(draw, np.array(ids), logprobs, position)
        return ranked(ids, scores, self._width, rest=max(0.0, 1.0 - float(np.exp(logprobs).sum())))

"""Lookahead decoding: n-grams that the model makes itself, ahead of what it says.

Fu et al. 2024, arXiv 2402.02057. Beside the drafts that are verified, each step refines a window of
guesses by one Jacobi iteration: its rows are those of the last n - 1 iterations, a column's guess
stands one place later in each. What the target draws after a column ends an n-gram, and n-grams
that begin with the last known token are the drafts. As a tree the window is a chain, its first row,
with the rest of a column behind each link.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw

_MAX_FIRST = 1 << 14  # tokens that n-grams of a sequence begin with, the latest
_MAX_AFTER = 7  # n-grams after each
_LONG_FROM = 12  # drafts, from which on n-grams have four tokens in place of three


@dataclass(slots=True)
class _Slot:
    """``rows[j][i]`` is the guess at position ``origin + i + j``; row 0 begins with the last of
    ``length`` known tokens, of which ``latest`` are a few.

    ``ends``: the last node of each column in the latest proposal, none if the window was left out.
    ``after``: by their first token, what follows in n-grams, the latest last.
    """

    latest: deque[int]
    rows: list[list[int]]
    origin: int = 0
    length: int = 0
    ends: list[int] = field(default_factory=list)
    after: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)


class _Nodes:
    """Tokens of a tree; of equal ones after the same node there is one."""

    def __init__(self) -> None:
        self.parents: dict[tuple[int, int], int] = {}

    def place(self, parent: int, token: int) -> int:
        return self.parents.setdefault((parent, token), len(self.parents))

    def draft(self) -> Draft:
        return Draft(
            token_ids=tuple(token for _, token in self.parents),
            parents=tuple(parent for parent, _ in self.parents),
        )


class LookaheadDrafter(Drafter):
    """Up to half of ``max_tokens`` are for the window, but one at the least; the rest are for
    n-grams: of those that fit, the latest one, or as many as there is room for if ``is_tree``."""

    wants_drawn = True

    def __init__(self, max_tokens: int, *, is_tree: bool = False) -> None:
        self._n = 4 if max_tokens >= _LONG_FROM else 3
        self._columns = max(1, (max_tokens // 2 + 1) // (self._n - 1))
        self._window_tokens = self._columns * (self._n - 1) - 1
        self._most = _MAX_AFTER if is_tree else 1
        self._slots: dict[int, _Slot] = {}

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        latest: deque[int] = deque(maxlen=self._columns + self._n)
        self._slots[slot] = _Slot(latest, rows=[[] for _ in range(self._n - 1)])
        self.extend(slot, token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._go_on(self._slots[slot], token_ids)

    def see_drawn(self, slot: int, draft: Draft, drawn: Sequence[int]) -> None:
        state = self._slots[slot]
        if not state.ends:
            return
        last = state.rows[-1]
        new = [drawn[end + 1] for end in state.ends]
        for column, token in enumerate(new):
            if token >= 0:
                _note(state, (*(row[column] for row in state.rows), token))
            else:  # its grammar cut the column off
                new[column] = last[column]
        state.rows = [*state.rows[1:], new]
        state.origin += 1
        state.ends = []

    def propose(self, slot: int, max_tokens: int) -> Draft:
        state, nodes = self._slots[slot], _Nodes()
        has_window = max_tokens >= self._window_tokens
        room = max_tokens - (self._window_tokens if has_window else 0)
        for tail in list(reversed(state.after.get(state.latest[-1], ())))[: self._most]:
            node = -1
            for token in tail:
                if len(nodes.parents) == room and (node, token) not in nodes.parents:
                    break
                node = nodes.place(node, token)
        state.ends = []
        if has_window:
            chain = accumulate(state.rows[0][1:], nodes.place, initial=-1)
            for node, *guesses in zip(chain, *state.rows[1:], strict=True):
                state.ends.append(reduce(nodes.place, guesses, node))
        return nodes.draft()

    def finish(self, slot: int) -> None:
        del self._slots[slot]

    def _go_on(self, state: _Slot, token_ids: Sequence[int]) -> None:
        """Note the n-grams that these tokens end, and begin the window with the last of them."""
        known = [*state.latest, *token_ids][-(len(token_ids) + self._n - 1) :]
        for begin in range(len(known) - self._n + 1):
            _note(state, tuple(known[begin : begin + self._n]))
        state.latest.extend(token_ids)
        state.length += len(token_ids)
        passed = max(0, state.length - 1 - state.origin)
        state.origin += passed
        for row in state.rows:
            del row[:passed]
            # What nobody has guessed yet is as good as anything else: what was said lately.
            row += [state.latest[i % len(state.latest)] for i in range(len(row), self._columns)]
        state.rows[0][0] = state.latest[-1]


def _note(state: _Slot, ngram: tuple[int, ...]) -> None:
    first, *rest = ngram
    tails = state.after.setdefault(first, OrderedDict())
    state.after.move_to_end(first)
    tails[tuple(rest)] = None
    tails.move_to_end(tuple(rest))
    if len(tails) > _MAX_AFTER:
        tails.popitem(last=False)
    if len(state.after) > _MAX_FIRST:
        state.after.popitem(last=False)

"""A memory of what earlier outputs said, beside the sequence's own text (SuffixDecoding)."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw
from ridgeline.decoding.drafters.hash_chains import KEY_TOKENS, MAX_MATCH, HashChains
from ridgeline.decoding.drafters.lookup_tree import continuations, lookup_tree

DEFAULT_MAX_TOKENS = 1 << 18  # about 40 MB
_END = -1  # between texts; matches no token, and is not proposed


@dataclass(slots=True)
class _Running:
    """A sequence, whose output begins at token ``start`` of its text."""

    namespace: str | None
    tenant: str
    start: int


class _Output(NamedTuple):
    """What a sequence said, and for whom."""

    namespace: str | None
    tenant: str
    tokens: "array[int]"


class _Memory:
    """The ended outputs of a namespace, oldest first, as one text to look in."""

    def __init__(self, outputs: Iterable[_Output] = ()) -> None:
        self.outputs: deque[_Output] = deque()
        self.text = HashChains()
        for output in outputs:
            self.add(output)

    def add(self, output: _Output) -> None:
        self.outputs.append(output)
        self.text.extend([*output.tokens, _END])


class SuffixDrafter(Drafter):
    """Looks in the sequence's own text, in what its caller expects of it, and in the outputs of its
    namespace, and takes the longest.

    Memory is bounded: ``max_tokens`` of outputs over all namespaces. The least recently used
    namespace goes first, and the last that is left forgets its older half. ``is_tree``: it proposes
    several continuations, from both.
    """

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS, *, is_tree: bool = False) -> None:
        self._max_tokens = max_tokens
        self._is_tree = is_tree
        self._draws: dict[int, TokenDraw] = {}
        self._texts: dict[int, HashChains] = {}
        self._running: dict[int, _Running] = {}
        self._expected: dict[int, HashChains] = {}
        self._memories: OrderedDict[str, _Memory] = OrderedDict()
        self._num_remembered = 0

    @property
    def num_remembered(self) -> int:
        """Tokens of outputs that are kept."""
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
        self._texts[slot], self._draws[slot] = HashChains(), draw
        self._texts[slot].extend(token_ids)
        self._running[slot] = _Running(namespace, tenant, len(token_ids))

    def expect(self, slot: int, token_ids: Sequence[int]) -> None:
        self._expected[slot] = expected = HashChains()
        expected.extend([*token_ids, _END])

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._texts[slot].extend(token_ids)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        text, namespace = self._texts[slot], self._running[slot].namespace
        memory = self._memories.get(namespace) if namespace is not None else None
        others = [self._expected[slot]] if slot in self._expected else []
        others += [memory.text] if memory is not None else []
        if self._is_tree:
            found = continuations(text, text.own_ends())
            for other in others:
                found += continuations(other, other.ends_of(text.tokens[-MAX_MATCH:]), end=_END)
            return lookup_tree(
                found, position=len(text), num_nodes=max_tokens, draw=self._draws[slot]
            )
        following = text.best_following(others, max_tokens)
        count = following.index(_END) if _END in following else len(following)
        return Draft(token_ids=following[:count])

    def finish(self, slot: int) -> None:
        text, running = self._texts.pop(slot), self._running.pop(slot)
        del self._draws[slot]
        self._expected.pop(slot, None)
        namespace, tokens = running.namespace, text.tokens[running.start :]
        if namespace is None or len(tokens) <= KEY_TOKENS:  # nothing would follow a match
            return
        del tokens[: -self._max_tokens // 2]
        memory = self._memories.setdefault(namespace, _Memory())
        self._memories.move_to_end(namespace)
        memory.add(_Output(namespace, running.tenant, tokens))
        self._num_remembered += len(tokens) + 1
        while self._num_remembered > self._max_tokens:
            self._forget()

    def delete_tenant(self, tenant: str) -> None:
        for slot, running in self._running.items():
            if running.tenant == tenant:
                running.start = len(self._texts[slot])
        for name, memory in list(self._memories.items()):
            kept = [output for output in memory.outputs if output.tenant != tenant]
            if len(kept) < len(memory.outputs):
                self._keep(name, kept)

    def _forget(self) -> None:
        name, memory = next(iter(self._memories.items()))
        kept, num_kept = memory.outputs, len(memory.text)
        if len(self._memories) > 1:
            kept.clear()
        while len(kept) > 1 and num_kept > self._max_tokens // 2:
            num_kept -= len(kept.popleft().tokens) + 1
        self._keep(name, kept)

    def _keep(self, name: str, outputs: Sequence[_Output]) -> None:
        """Forget the other outputs of a namespace."""
        old, new = self._memories[name], _Memory(outputs)
        self._num_remembered += len(new.text) - len(old.text)
        self._memories[name] = new
        if not outputs:
            del self._memories[name]

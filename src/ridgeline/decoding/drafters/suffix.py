"""A memory of what earlier outputs said, beside the sequence's own text (SuffixDecoding)."""

from collections import OrderedDict
from collections.abc import Sequence

from ridgeline.core.protocols import Draft, Drafter
from ridgeline.decoding.drafters.hash_chains import MAX_MATCH, NO_MATCH, HashChains

DEFAULT_MAX_TOKENS = 1 << 18  # about 40 MB
_END = -1  # between texts; matches no token, and is not proposed


class SuffixDrafter(Drafter):
    """Looks in the sequence's own text and in the outputs of its namespace, and takes the longer.

    Memory is bounded: ``max_tokens`` of outputs over all namespaces. The least recently used
    namespace goes first, and the last that is left forgets its older half.
    """

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._texts: dict[int, HashChains] = {}
        self._new: dict[int, tuple[str | None, list[int]]] = {}
        self._outputs: OrderedDict[str, HashChains] = OrderedDict()
        self._num_remembered = 0

    @property
    def num_remembered(self) -> int:
        """Tokens of outputs that are kept."""
        return self._num_remembered

    def start(self, slot: int, token_ids: Sequence[int], namespace: str | None = None) -> None:
        self._texts[slot] = HashChains()
        self._texts[slot].extend(token_ids)
        self._new[slot] = (namespace, [])

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._texts[slot].extend(token_ids)
        self._new[slot][1].extend(token_ids)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        text, namespace = self._texts[slot], self._new[slot][0]
        own = text.find_own_end()
        others = self._outputs.get(namespace) if namespace is not None else None
        other = others.find(text.tokens[-MAX_MATCH:]) if others is not None else NO_MATCH
        if others is None or other.length <= own.length:
            return Draft(token_ids=text.continuation(max_tokens))
        following = others.following(other, max_tokens)
        count = following.index(_END) if _END in following else len(following)
        return Draft(token_ids=following[:count])

    def finish(self, slot: int) -> None:
        del self._texts[slot]
        namespace, tokens = self._new.pop(slot)
        if namespace is None or not tokens:
            return
        tokens = tokens[-self._max_tokens // 2 :]
        outputs = self._outputs.setdefault(namespace, HashChains())
        self._outputs.move_to_end(namespace)
        outputs.extend([*tokens, _END])
        self._num_remembered += len(tokens) + 1
        while self._num_remembered > self._max_tokens:
            self._forget()

    def _forget(self) -> None:
        name, outputs = self._outputs.popitem(last=False)
        self._num_remembered -= len(outputs)
        if not self._outputs:
            kept = outputs.tokens[-self._max_tokens // 2 :]
            self._outputs[name] = HashChains()
            self._outputs[name].extend(kept)
            self._num_remembered = len(kept)

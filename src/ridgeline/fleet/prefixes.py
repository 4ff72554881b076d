"""Which prompts an engine should have cached, by what was sent to it."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 256
BYTES_PER_TOKEN = 4  # about, of text in JSON
_KEY_BYTES = 8


def prefix_blocks(prompt: bytes, salt: bytes) -> list[bytes]:
    """A key for each whole block of a prompt, which depends on all before it and the salt.

    ``salt``: what separates cached prefixes beside the text: whose key it is, the model.
    """
    state = hashlib.blake2b(salt, digest_size=_KEY_BYTES)
    blocks = []
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        state.update(prompt[start : start + BLOCK_BYTES])
        blocks.append(state.copy().digest())
    return blocks


class PrefixView:
    """The blocks that an engine was sent last, as many as its cache holds.

    The engine tells nothing of what it evicts. So this may be wrong in either direction, which
    costs seconds and never a token. It is forgotten when another process answers (``epoch``).
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = 0
        self._epoch = ""

    def renew(self, epoch: str, capacity_tokens: int) -> None:
        """The engine has told who it is, and how many tokens of KV it holds."""
        if epoch != self._epoch:
            self._blocks.clear()
        self._epoch = epoch
        self._capacity = capacity_tokens * BYTES_PER_TOKEN // BLOCK_BYTES
        self._trim()

    def cached_tokens(self, blocks: Sequence[bytes]) -> int:
        """How many tokens at the beginning of a prompt should be there."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK_BYTES // BYTES_PER_TOKEN

    def add(self, blocks: Sequence[bytes]) -> None:
        """A prompt was sent."""
        for block in reversed(blocks):  # the beginning is evicted last
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self._trim()

    def _trim(self) -> None:
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

"""A process that tries grammars, so that one that takes for ever can be stopped.

llguidance counts most of its work against limits, but not all: the intersection of some hundred
patterns runs for hours, and a native call cannot be interrupted in a thread. Here a timer on CPU
time, kept by the kernel, ends the process.

Reads and writes frames: a 32-bit little-endian length, then JSON. The file is run by its path and
imports nothing of Ridgeline, which keeps the start short.
"""

import ctypes
import json
import signal
import sys
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

TRIED_TOKENS = 8


class Bytes:
    """A tokenizer of single bytes, and of the special tokens that a grammar may name."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special: list[str]) -> None:
        self.tokens = [bytes([value]) for value in range(256)]
        self.tokens += [b"</s>", *(name.encode() for name in special)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        """The bytes themselves."""
        return list(text)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int | None:
    """What the C library has handed out; None where it does not say."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # macOS, musl, Windows
        return None
    mallinfo2.restype = _MallocInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def tried(vocabulary: LLTokenizer, grammar: str, limits: LLParserLimits) -> tuple[str, int | None]:
    """What is wrong with a grammar, empty if nothing is, and the bytes that it takes; its first
    tokens are tried, too."""
    before = allocated_bytes()
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    for _ in range(TRIED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        matcher.compute_ff_tokens()
        byte = next((i for i, bits in enumerate(mask) if bits), None)
        if byte is None:
            break
        matcher.consume_token(8 * byte + mask[byte].bit_length() - 1)
    after = allocated_bytes()
    num_bytes = None if before is None or after is None else after - before
    return (matcher.get_error() if matcher.is_error() else ""), num_bytes


def serve(requests: BinaryIO, replies: BinaryIO, *, cpu_seconds: float) -> None:
    """Answer requests until there are no more."""
    vocabulary: LLTokenizer | None = None
    while len(header := requests.read(4)) == 4:
        request = json.loads(requests.read(int.from_bytes(header, "little")))
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        if vocabulary is None:
            vocabulary = LLTokenizer(TokenizerWrapper(Bytes(request["special"])))
        limits = LLParserLimits(**request["limits"])
        problem, num_bytes = tried(vocabulary, request["grammar"], limits)
        reply = json.dumps({"problem": problem, "num_bytes": num_bytes}).encode()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(len(reply).to_bytes(4, "little") + reply)
        replies.flush()


def limit_memory(num_bytes: int) -> None:
    """Cap the address space where the system can, and write no core files."""
    try:
        import resource
    except ImportError:  # Windows: the caller's deadline remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer, cpu_seconds=float(sys.argv[2]))

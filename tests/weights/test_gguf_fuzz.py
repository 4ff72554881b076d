"""Damaged GGUF files: never a crash, a hang or a heap of memory; an error of ours, or a load."""

import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tests.weights.gguf_export import export, write_checkpoint
from tests.weights.test_fuzz import CLOCK_LIMIT_S, LIMIT_S, MUTATIONS, SPARE_BYTES, Watched
from tokenizers.pre_tokenizers import ByteLevel

WORKER = Path(__file__).parent / "gguf_fuzz_worker.py"
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
BYTE_LEVEL = [*sorted(ByteLevel.alphabet()), "ab", "abc", "<|x|>", "[PAD259]"]
SENTENCEPIECE = ["<unk>", "<|x|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁h"]
EDGES = [0, 1, 2, 7, 8, 9, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63,
         2**64 - 8, 2**64 - 1]  # fmt: skip


def models(folder: Path) -> list[bytes]:
    """A Llama with byte-level BPE in Q8_0, and a Gemma 3 with SentencePiece's in F16."""
    byte_level = {
        "ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.tokens": BYTE_LEVEL,
        "ggml.token_type": [1] * 258 + [3, 5], "ggml.merges": ["a b", "ab c"],
        "ggml.eos_token_id": 258, "ggml.add_bos_token": False, "chat_template": "{{ x }}",
    }  # fmt: skip
    sentencepiece = {
        "ggml.model": "llama", "ggml.tokens": SENTENCEPIECE,
        "ggml.token_type": [2, 3] + [6] * 256 + [1, 1],
        "ggml.scores": [float(-index) for index in range(260)],
        "ggml.bos_token_id": 1, "ggml.unknown_token_id": 0,
    }  # fmt: skip
    kinds = gguf.GGMLQuantizationType
    found = []
    for config, architecture, tokenizer, kind in (
        ({"model_type": "llama"}, "llama", byte_level, kinds.Q8_0),
        ({"model_type": "gemma3_text", "sliding_window": 8}, "gemma3", sentencepiece, kinds.F16),
    ):
        write_checkpoint(SIZES | config, folder / architecture)
        path = folder / f"{architecture}.gguf"
        export(folder / architecture, path, architecture, matrices=kind, tokenizer=tokenizer)
        found.append(path.read_bytes())
    return found


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(
    *keys: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:  # fmt: skip
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    start = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    return start + b"".join(keys) + b"".join(tensors)


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def array(kind: int, length: int, data: bytes = b"", name: bytes = b"a") -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, length) + data


def crafted() -> dict[str, bytes]:
    """Files that are wrong in one particular way each."""
    deep = text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    alignment = text(b"general.alignment")
    pad = bytes(4096)
    return {
        "empty": b"",
        "magic-only": b"GGUF",
        "magic-wrong": b"GGML" + bytes(100),
        "version-1": header(version=1) + pad,
        "version-4": header(version=4) + pad,
        "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "nothing": header() + pad,
        "keys-2-64": header(counts=(0, 2**64 - 1)) + pad,
        "keys-many": header(counts=(0, 60_000)) + pad,
        "tensors-2-64": header(counts=(2**64 - 1, 0)) + pad,
        "tensors-many": header(counts=(100_000, 0)) + pad,
        "key-length-2-64": header(struct.pack("<Q", 2**64 - 1)) + pad,
        "key-length-over-file": header(struct.pack("<Q", 60_000)) + pad,
        "key-empty": header(text(b"") + struct.pack("<IB", 0, 1)) + pad,
        "key-not-utf8": header(text(b"\xff\xfe") + struct.pack("<IB", 0, 1)) + pad,
        "key-twice": header(*[text(b"a") + struct.pack("<IB", 0, 1)] * 2) + pad,
        "type-unknown": header(text(b"a") + struct.pack("<I", 13)) + pad,
        "bool-2": header(text(b"a") + struct.pack("<IB", 7, 2)) + pad,
        "string-2-63": header(text(b"a") + struct.pack("<IQ", 8, 2**63)) + pad,
        "string-1-gib": header(text(b"a") + struct.pack("<IQ", 8, 2**30)) + pad,
        "array-2-64": header(array(4, 2**64 - 1)) + pad,
        "array-wraps": header(array(10, 2**61 + 1)) + pad,
        "array-over-file": header(array(0, 2**30)) + pad,
        "array-of-strings-2-40": header(array(8, 2**40)) + pad,
        "array-of-empty-strings": header(array(8, 500_000)) + bytes(4_000_000) + pad,
        "array-of-arrays": header(array(9, 2**40)) + pad,
        "array-of-empty-arrays": header(array(9, 300_000)) + bytes(12 * 300_000) + pad,
        "array-type-unknown": header(array(99, 1)) + pad,
        "array-deep": header(deep) + pad,
        "alignment-0": header(alignment + struct.pack("<II", 4, 0)) + pad,
        "alignment-3": header(alignment + struct.pack("<II", 4, 3)) + pad,
        "alignment-2-31": header(alignment + struct.pack("<II", 4, 2**31)) + pad,
        "alignment-string": header(alignment + struct.pack("<I", 8) + text(b"32")) + pad,
        "tensor-name-long": header(tensors=(tensor(b"n" * 5000, (4,)),)) + bytes(9000),
        "tensor-name-twice": header(tensors=(tensor(b"a", (4,)), tensor(b"a", (4,), 0, 32))) + pad,
        "tensor-no-dimensions": header(tensors=(tensor(b"a", ()),)) + pad,
        "tensor-five-dimensions": header(tensors=(tensor(b"a", (1,) * 5),)) + pad,
        "tensor-2-32-dimensions": header(
            tensors=(text(b"a") + struct.pack("<I", 2**32 - 1),), counts=(1, 0)
        ) + pad,
        "tensor-empty": header(tensors=(tensor(b"a", (0, 4)),)) + pad,
        "tensor-overflows": header(tensors=(tensor(b"a", (2**32, 2**32)),)) + pad,
        "tensor-overflows-to-fit": header(tensors=(tensor(b"a", (2**62 + 4, 4)),)) + pad,
        "tensor-beyond-file": header(tensors=(tensor(b"a", (10**6,)),)) + pad,
        "tensor-huge": header(tensors=(tensor(b"a", (2**40,)),)) + pad,
        "tensor-offset-2-64": header(tensors=(tensor(b"a", (4,), 0, 2**64 - 32),)) + pad,
        "tensor-offset-not-aligned": header(tensors=(tensor(b"a", (4,), 0, 4),)) + pad,
        "tensor-part-of-a-block": header(tensors=(tensor(b"a", (33,), 8),)) + pad,
        "tensor-format-unknown": header(tensors=(tensor(b"a", (32,), 1000),)) + pad,
        "tensor-format-given-up": header(tensors=(tensor(b"a", (32,), 4),)) + pad,
        "tensor-format-not-read": header(tensors=(tensor(b"a", (256,), 19),)) + pad,
        "tensors-overlap": header(tensors=(tensor(b"a", (32,)), tensor(b"b", (8,), 0, 32))) + pad,
    }  # fmt: skip


def mutated(good: bytes, head: int, rng: random.Random) -> bytes:
    """``good`` with one to three random changes, most of them in its first ``head`` bytes."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) if rng.random() < 0.15 else min(head, len(data)))
        rng.choice(KINDS)(data, at, rng)
        if not data:
            break
    return bytes(data)


def _flip(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _number(data: bytearray, at: int, rng: random.Random) -> None:
    width = rng.choice([4, 8])
    data[at : at + width] = (rng.choice(EDGES) % 256**width).to_bytes(width, "little")


def _after_name(data: bytearray, at: int, rng: random.Random) -> None:
    """Change the value of a key, or a tensor's shape, format or offset."""
    found = rng.choice([b"_count", b"_length", b"_kv", b"_base", b".tokens", b"_type", b"weight",
                        b"epsilon", b"merges", b"scores", b"model", b"_id", b"window"])  # fmt: skip
    start = data.find(found, at)
    start = data.find(found) if start < 0 else start
    if start >= 0:
        _number(data, min(start + len(found) + rng.choice([0, 4, 4, 8, 12, 20, 24]), len(data) - 1),
                rng)  # fmt: skip


def _cut(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at : at + rng.choice([1, 2, 8, 64, len(data)])]


def _insert(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = rng.choice([rng.randbytes(8), bytes(8), b"\xff" * 8, data[at : at + 32]])


KINDS: list[Callable[[bytearray, int, random.Random], None]] = [
    _flip, _flip, _number, _number, _after_name, _after_name, _after_name, _cut, _insert,
]  # fmt: skip


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_damaged_files(tmp_path: Path, mutations: int, counted: Callable[[int], None]) -> None:
    rng = random.Random(2024)
    good = models(tmp_path)
    heads = [gguf.GGUFReader(path).data_offset for path in sorted(tmp_path.glob("*.gguf"))][::-1]
    cases = {f"good-{index}": data for index, data in enumerate(good)} | crafted()
    for index in range(mutations):
        data = good[index % 2]
        cases[f"mutation-{index}"] = mutated(data, heads[index % 2], rng)
    worker = Watched([sys.executable, str(WORKER)], CLOCK_LIMIT_S)
    bad: dict[str, object] = {}
    tally: Counter[str] = Counter()
    outcomes: dict[str, str] = {}
    path = tmp_path / "case.gguf"
    for name, data in cases.items():
        path.write_bytes(data)
        verdict = worker.run(path)
        outcomes[name] = verdict.outcome
        tally[verdict.outcome] += 1
        if verdict.outcome.startswith(("BROKEN", "CRASH", "HANG")):
            bad[name] = verdict.outcome
        elif verdict.cpu_s > LIMIT_S:
            bad[name] = f"{verdict.cpu_s:.1f} s"
        elif verdict.peak_bytes > 2 * len(data) + SPARE_BYTES:
            bad[name] = f"{verdict.peak_bytes >> 20} MiB for {len(data)} bytes"
    worker.stop()
    print(tally)
    assert not bad, bad
    assert {outcomes["good-0"], outcomes["good-1"]} == {"loaded"}
    fine = {name for name in crafted() if outcomes[name] == "loaded"}
    assert fine == set(), fine
    assert tally["loaded"] > 20, tally
    assert tally["CorruptFileError"] > 150, tally
    counted(len(cases))

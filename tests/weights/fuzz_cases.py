"""Damaged model folders: random mutations of good files, and headers made to hurt."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Header = dict[str, object]
NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    1.5,
    1e308,
]
INDEX = "model.safetensors.index.json"


def pack(header: bytes | Header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return (size % 2**64).to_bytes(8, "little") + text + data


def entry(start: object, stop: object, shape: object = None, dtype: object = "F32") -> Header:
    if shape is None:
        shape = [(stop - start) // 4]  # type: ignore[operator]
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def crafted_files() -> dict[str, bytes]:
    """Files that are wrong in one particular way each (a few are right, at the edge)."""
    good, eight = entry(0, 8), bytes(8)
    one = pack({"w": good}, eight)
    raw = json.dumps(good).encode()
    wrong_entries: dict[str, object] = {
        "offsets-reversed": entry(8, 0, [2]),
        "offsets-out-of-range": entry(0, 16),
        "offsets-far-out": entry(2**62, 2**62 + 8, [2]),
        "offsets-negative": entry(-8, 0, [2]),
        "offsets-floats": entry(0.0, 8.0, [2]),
        "offsets-huge": entry(0, 10**40, [2]),
        "offsets-strings": entry("0", "8", [2]),
        "offsets-bools": entry(False, True, [2]),
        "offsets-three": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]},
        "offsets-none": {"dtype": "F32", "shape": [2], "data_offsets": None},
        "shape-overflows": entry(0, 8, [2**32, 2**32, 2]),
        "shape-overflows-to-fit": entry(0, 8, [2**61 + 1, 2]),
        "shape-negative": entry(0, 8, [-1, -2]),
        "shape-too-small": entry(0, 8, [1]),
        "shape-nested": entry(0, 8, [[2]]),
        "shape-missing": {"dtype": "F32", "data_offsets": [0, 8]},
        "shape-a-million-ones": entry(0, 8, [2] + [1] * 1_000_000),
        "dtype-unknown": entry(0, 8, [2], "Q7"),
        "dtype-number": entry(0, 8, [2], 32),
        "dtype-long": entry(0, 8, [2], "F" * 100_000),
        "dtype-f8": entry(0, 8, [8], "F8_E4M3"),
        "key-extra": entry(0, 8) | {"more": 1},
        "entry-null": None,
        "entry-list": [],
        "entry-text": "F32",
    }
    cases = {name: pack({"w": value}, eight) for name, value in wrong_entries.items()}
    return cases | {
        "shape-empty-but-huge": pack({"w": entry(0, 0, [0, 2**62, 2**62])}),
        "shape-wraps-to-zero": pack({"w": entry(0, 0, [2**62, 4])}),
        "empty-file": b"",
        "seven-bytes": bytes(7),
        "only-a-length": (100).to_bytes(8, "little"),
        "length-zero": bytes(8),
        "length-zero-and-data": bytes(64),
        "length-2-63": pack({"w": good}, eight, 2**63),
        "length-2-64-less-1": pack({"w": good}, eight, 2**64 - 1),
        "length-2-63-less-8": pack({"w": good}, eight, 2**63 - 8),
        "length-over-file": pack({"w": good}, eight, len(one)),
        "length-one-more": pack({"w": good}, eight, len(one) - 15),
        "length-one-less": pack({"w": good}, eight, len(one) - 17),
        "header-not-object": pack(b"[1, 2]"),
        "header-only-space": pack(b" " * 100),
        "header-empty-object": pack(b"{}"),
        "header-empty-object-and-data": pack(b"{}", eight),
        "header-not-utf8": pack(b'{"\xff\xfe":' + raw + b"}", eight),
        "header-nan": pack(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', eight),
        "header-deep-lists": pack(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "header-deep-objects": pack(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "header-unclosed-deep": pack(b'{"w":' + b"[" * 1_000_000),
        "header-number-of-a-million-digits": pack(
            b'{"w":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,8]}}', eight
        ),
        "header-trailing-text": pack(b'{"w":' + raw + b"} {}", eight),
        "header-trailing-spaces": pack(b'{"w":' + raw + b"}      ", eight),
        "header-many-lists": pack(b'{"w":[' + b"[]," * 300_000 + b"[]]}"),
        "header-many-fields": pack(b"{" + b'"a":1,' * 200_000 + b'"b":1}'),
        "header-many-objects": pack(b"{" + b'"a":{},' * 800_000 + b'"b":{}}'),
        "header-many-empty-tensors": pack({f"{i}": entry(0, 0) for i in range(20_000)}),
        "duplicate-names": pack(b'{"w":' + raw + b',"w":' + raw + b"}", eight),
        "duplicate-names-other-shape": pack(
            b'{"w":' + raw + b',"w":' + raw.replace(b"[2]", b"[1, 2]") + b"}", eight
        ),
        "duplicate-fields": pack(b'{"w":' + raw[:-1] + b',"dtype":"F32"}}', eight),
        "overlap-whole": pack({"v": good, "w": good}, eight),
        "overlap-part": pack({"v": entry(0, 8), "w": entry(4, 12)}, bytes(12)),
        "gap": pack({"v": entry(0, 4), "w": entry(8, 12)}, bytes(12)),
        "gap-at-start": pack({"w": entry(4, 12)}, bytes(12)),
        "trailing-garbage": pack({"w": good}, eight + b"x"),
        "truncated-data": pack({"w": good}, bytes(7)),
        "zero-size": pack({"v": entry(0, 0, [0, 3]), "w": good, "x": entry(8, 8, [0])}, eight),
        "scalar": pack({"w": entry(0, 4, [])}, bytes(4)),
        "name-nul": pack({"a\0b": good}, eight),
        "name-newline-escape": pack({"a\n\x1b[31mb": good}, eight),
        "name-half-character": pack(b'{"\\ud800":' + raw + b"}", eight),
        "name-empty": pack({"": good}, eight),
        "name-of-a-megabyte": pack({"n" * 1_000_000: good}, eight),
        "metadata-list": pack({"__metadata__": [1], "w": good}, eight),
        "metadata-number-value": pack({"__metadata__": {"a": 1}, "w": good}, eight),
        "metadata-null": pack({"__metadata__": None, "w": good}, eight),
        "metadata-is-a-tensor": pack({"__metadata__": good}, eight),
        "metadata-fine": pack({"__metadata__": {"a": "b"}, "w": good}, eight),
        "metadata-twice": pack(b'{"__metadata__":{},"__metadata__":{},"w":' + raw + b"}", eight),
    }  # fmt: skip


def crafted_indexes() -> dict[str, bytes]:
    """Indexes that are wrong in one particular way each."""
    return {
        "index-empty": b"",
        "index-not-utf8": b'{"weight_map":{"\xff":"a.safetensors"}}',
        "index-list": b"[]",
        "index-no-map": b"{}",
        "index-map-list": b'{"weight_map":[]}',
        "index-map-empty": b'{"weight_map":{}}',
        "index-shard-number": b'{"weight_map":{"a":1}}',
        "index-shard-up": b'{"weight_map":{"a":"../a.safetensors"}}',
        "index-shard-nul": b'{"weight_map":{"a":"a\\u0000.safetensors"}}',
        "index-shard-half": b'{"weight_map":{"a":"\\ud800.safetensors"}}',
        "index-shard-missing": b'{"weight_map":{"a":"nothing.safetensors"}}',
        "index-shard-is-itself": b'{"weight_map":{"a":"model.safetensors.index.json"}}',
        "index-twice": b'{"weight_map":{"a":"a.safetensors"},"weight_map":{}}',
        "index-deep": b'{"weight_map":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "index-many-shards": json.dumps(
            {"weight_map": {f"{i}": f"{i}.safetensors" for i in range(20_000)}}
        ).encode(),
    }


def mutated(good: bytes, head: int, rng: random.Random) -> bytes:
    """``good`` with one to three random changes, most of them in its first ``head`` bytes."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) if rng.random() < 0.2 or len(data) < head else head)
        rng.choice(MUTATIONS)(data, at, rng)
        if not data:
            break
    return bytes(data)


def _number(data: bytearray, at: int, rng: random.Random) -> None:
    """Replace the next number in the text."""
    start = next((i for i in range(at, len(data)) if data[i : i + 1].isdigit()), at)
    stop = start
    while data[stop : stop + 1].isdigit():
        stop += 1
    data[start:stop] = str(rng.choice(NUMBERS)).encode()


def _length(data: bytearray, at: int, rng: random.Random) -> None:
    value = rng.choice([*range(-4, 5), 2**31, 2**63, 2**64 - 1]) + int.from_bytes(
        data[:8], "little"
    )
    data[:8] = (value % 2**64).to_bytes(8, "little")


def _flip(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _replace(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] = rng.choice(b'\x00\xff{}[]",: 0-9eE\\' + bytes([rng.randrange(256)]))


def _insert(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = rng.choice([b"{", b"}", b"[", b",", b'"', b"0", b"\\u0000", rng.randbytes(8)])


def _cut(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at : at + rng.choice([1, 2, 8, 64, len(data)])]


def _double(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = data[at : at + rng.choice([1, 8, 64])]


def _swap_names(data: bytearray, at: int, rng: random.Random) -> None:
    old, new = rng.sample([b"F32", b"F16", b"BF16", b"I64", b"U8", b"F8_E4M3", b"shape", b"a.0"], 2)
    data[:] = data.replace(old, new, 1)


MUTATIONS: list[Callable[[bytearray, int, random.Random], None]] = [
    _number, _number, _length, _flip, _flip, _replace, _insert, _cut, _double, _swap_names,
]  # fmt: skip


def write_cases(
    folder: Path, single: bytes, sharded: dict[str, bytes], count: int, seed: int
) -> Iterator[tuple[str, Path]]:
    """Write all cases below ``folder``; yields the name and the folder of each."""
    rng = random.Random(seed)
    head = 8 + int.from_bytes(single[:8], "little")
    files = {f"mutation-{i}": mutated(single, head, rng) for i in range(count)}
    for name, data in (crafted_files() | files).items():
        yield name, _write(folder / name, {"model.safetensors": data})
    index = sharded[INDEX]
    indexes = {f"index-mutation-{i}": mutated(index, len(index), rng) for i in range(count // 4)}
    for name, data in (crafted_indexes() | indexes).items():
        yield name, _write(folder / name, sharded | {INDEX: data})


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder

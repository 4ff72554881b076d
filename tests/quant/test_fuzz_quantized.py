"""Damaged quantized checkpoints: never a crash, a hang or a heap of memory; an error of ours, or a
load of the model's shapes.

Of each format: fields of the config, shapes and dtypes of parts, parts that are missing or called
otherwise, values (zero, all ones, at random) in codes, scales, group indices and states, and bytes
of the header.
"""

import copy
import json
import random
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.weights import fuzz_cases
from tests.weights.test_fuzz import Watched

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "quantized"
FORMATS = (
    "awq-gemm", "bnb-int8", "bnb-nf4-double", "ct-fp8-block", "ct-int4-group-asym", "ct-nvfp4",
    "ct-w8a8", "fp8-block", "gptq-int4-act-order", "mxfp4-gpt-oss",
)  # fmt: skip
SPARE_BYTES = 64 << 20
LIMIT_S = 5.0
VALUES: list[Any] = [
    None, -1, 0, 1, 3, 5, 7, 2**31, 2**64, 10**30, 1.5, 1e308, "", "x", "gptq", "float", "group",
    "re:(a*)*$", [], [0], [1, 1], ["re:.*"], {}, {"a": 1}, True, False,
]  # fmt: skip
SUFFIXES = (".weight", ".weight_scale", ".qweight", ".g_idx", "_blocks", ".SCB", ".weight_shape")
SAME_SIZE = [("I32", "F32"), ("U8", "I8", "F8_E4M3", "F8_E5M2", "BOOL"), ("F16", "BF16", "I16")]

Parts = dict[str, tuple[str, list[int], bytes]]


def read(folder: Path) -> tuple[dict[str, Any], Parts]:
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    parts = {}
    for name, entry in header.items():
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        parts[name] = (entry["dtype"], entry["shape"], data[start:stop])
    return json.loads((folder / "config.json").read_text()), parts


def build(parts: Parts) -> bytes:
    header, offset = {}, 0
    for name, (dtype, shape, data) in parts.items():
        offsets = [offset, offset + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in parts.values())


def mutate_config(config: dict[str, Any], rng: random.Random) -> None:
    place = config["quantization_config"]
    while True:
        key = rng.choice(sorted(place))
        inner = place[key]
        if isinstance(inner, dict) and inner and rng.random() < 0.9:
            place = inner
            continue
        break
    change = rng.random()
    if change < 0.15:
        del place[key]
    elif change < 0.25:
        place[key + "x"] = place.pop(key)
    else:
        place[key] = rng.choice(VALUES)


def mutate_parts(parts: Parts, rng: random.Random) -> None:
    plain = ("embed", "norm", "lm_head")
    names = [name for name in parts if not any(word in name for word in plain)]
    name = rng.choice(names)
    dtype, shape, data = parts[name]
    change = rng.randrange(8)
    if change == 0:
        del parts[name]
    elif change == 1:
        parts[name + "x" if rng.random() < 0.5 else name + rng.choice(SUFFIXES)] = parts.pop(name)
    elif change == 2:
        kinds = next((kinds for kinds in SAME_SIZE if dtype in kinds), (dtype,))
        parts[name] = rng.choice(kinds), shape, data
    elif change == 3:  # the same elements in another shape
        count = 1
        for extent in shape:
            count *= extent
        parts[name] = dtype, rng.choice([[count], shape[::-1], [1, *shape], [count, 1]]), data
    elif change == 4 and shape and shape[0] > 1:  # fewer rows
        kept = rng.randrange(shape[0])
        parts[name] = dtype, [kept, *shape[1:]], data[: len(data) // shape[0] * kept]
    elif change == 5:
        parts[name] = dtype, shape, rng.choice([b"\0", b"\xff", b"\x7f", b"9"]) * len(data)
    else:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        parts[name] = dtype, shape, bytes(changed)


def write_case(folder: Path, config: dict[str, Any], parts: Parts, rng: random.Random) -> None:
    config, parts = copy.deepcopy(config), dict(parts)
    kind = rng.random()
    for _ in range(rng.randint(1, 2)):
        if kind < 0.35:
            mutate_config(config, rng)
        elif kind < 0.85:
            mutate_parts(parts, rng)
    data = build(parts)
    if kind >= 0.85:  # among others, sizes beyond the file
        data = fuzz_cases.mutated(data, 8 + int.from_bytes(data[:8], "little"), rng)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(data)


def check(name: str, count: int, tmp_path: Path) -> None:
    config, parts = read(DATA / name)
    worker = Watched([sys.executable, str(HERE / "fuzz_worker.py")], 60.0)
    rng, bad, tally = random.Random(f"{name} 7"), {}, Counter[str]()
    try:
        for index in range(count):
            folder = tmp_path / str(index)
            write_case(folder, config, parts, rng)
            verdict = worker.run(folder)
            tally[verdict.outcome] += 1
            if verdict.outcome.startswith(("BROKEN", "CRASH", "HANG")):
                bad[index] = verdict.outcome
            elif verdict.peak_bytes > SPARE_BYTES or verdict.cpu_s > LIMIT_S:
                bad[index] = f"{verdict.peak_bytes:,} bytes, {verdict.cpu_s:.1f} s"
    finally:
        worker.stop()
    assert not bad, bad
    assert tally["loaded"] > 0.05 * count, tally
    assert tally["loaded"] < 0.7 * count, tally


@pytest.mark.parametrize("name", ["gptq-int4-act-order", "ct-int4-group-asym", "bnb-nf4-double"])
def test_a_few_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    check(name, 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_300_damaged_checkpoints_of_each_format(name: str, tmp_path: Path) -> None:
    check(name, 300, tmp_path)

"""The memory that attention works in: its bound, and the bits of what has to be done in waves."""

import ctypes

import numpy as np
import pytest
from tests.kernels.cpu.native import LEVELS, Cache, Part

from ridgeline.kernels.cpu.library import load_library
from ridgeline.kernels.cpu.structs import SEQUENCE, RlAttention, RlBatch, RlFormat, RlKVGroup

LENGTH = 131_072
CHUNKS = (1, 2, 8, 47, 180, 333, 700, 1023, 2048)
PARTIALS, ROWS = 40, 48  # ridgeline_cpu.h: of each thread
COUNTERS = 8  # of each thread: blocks whose splits are shared out
SEQUENCE_BYTES = 128


def grouped() -> tuple[RlKVGroup, RlAttention]:
    """Llama-3.1-8B's."""
    group = RlKVGroup(
        format=RlFormat.BF16, block_tokens=16, num_layers=1, num_kv_heads=8, k_width=128,
        v_width=128,
    )  # fmt: skip
    return group, RlAttention(num_heads=32, out_width=128, scale=0.1)


def latent() -> tuple[RlKVGroup, RlAttention]:
    """DeepSeek-V3's."""
    group = RlKVGroup(
        format=RlFormat.BF16, block_tokens=16, num_layers=1, num_kv_heads=1, k_width=576, v_width=0
    )
    return group, RlAttention(num_heads=128, out_width=512, scale=0.1)


def scratch_bytes(shape: tuple[RlKVGroup, RlAttention], parts: list[Part], num_threads: int) -> int:
    group, attention = shape
    library = load_library()
    library.rl_kv_group_sizes(ctypes.byref(group))
    sequences = np.zeros(len(parts), SEQUENCE)
    ancestors = []
    for entry, part in zip(sequences, parts, strict=True):
        entry["num_tokens"], entry["start"] = part.num_tokens, part.start
        entry["num_drafts"] = part.num_drafts
        if part.ancestors:
            ancestors.append(np.array(part.ancestors, np.uint64))
            entry["ancestors"] = ancestors[-1].ctypes.data
    batch = RlBatch(
        num_tokens=sum(part.num_tokens for part in parts),
        num_sequences=len(parts),
        sequences=sequences.ctypes.data,
    )
    return library.rl_attend_scratch_bytes(
        ctypes.byref(group), ctypes.byref(attention), ctypes.byref(batch), num_threads
    )


def part(start: int, num_tokens: int, **drafts: object) -> Part:
    return Part(sequence=0, start=start, num_tokens=num_tokens, **drafts)


def batches() -> list[list[Part]]:
    last_chunks = [[part(LENGTH - chunk, chunk)] for chunk in CHUNKS]
    tree = part(LENGTH - 21, 21, num_drafts=20, ancestors=(0, *(1 << i for i in range(20))))
    mixed = [[part(LENGTH, 1), part(LENGTH // 2, 5), part(LENGTH // 3, chunk)] for chunk in CHUNKS]
    many = [part(LENGTH - 1, 1)] * 100
    return [*last_chunks, [tree], *mixed, many]


@pytest.mark.parametrize("shape", [grouped, latent])
@pytest.mark.parametrize("num_threads", [2, 3, 16, 32, 64])
def test_scratch_is_bounded(shape, num_threads):
    width = shape()[1].out_width
    working = scratch_bytes(shape(), [part(0, 1)], num_threads)
    for parts in batches():
        kept = PARTIALS * ROWS * (width + 2) * 4 + COUNTERS * 4
        bound = working + num_threads * kept + len(parts) * SEQUENCE_BYTES
        assert scratch_bytes(shape(), parts, num_threads) <= bound
    assert bound < num_threads * (8 << 20)


# With two threads 64 partial results of 48 rows are kept, with three 96. Rows are heads x tokens.
IN_WAVES = {
    "one": [part(3000, 600)],  # 13 blocks of 8 splits
    "window": [part(9000, 400)],  # 9 blocks of 9 or 10 splits
    "of different lengths": [
        Part(sequence=0, start=7000, num_tokens=288),  # 6 blocks of 15 splits
        Part(sequence=1, start=4500, num_tokens=288),  # 6 blocks of 10 splits
        Part(sequence=2, start=600, num_tokens=3),
    ],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("number_format", ["f32", "int8"])
@pytest.mark.parametrize("name", IN_WAVES)
def test_waves_have_the_bits_of_one_thread(level, number_format, name):
    parts, window = IN_WAVES[name], 4300 if name == "window" else 0
    lengths = [part.start + part.num_tokens for part in parts]
    kv = Cache(
        level=level, format=number_format, num_kv_heads=1, k_width=16, v_width=16, lengths=lengths
    )
    rng = np.random.default_rng(5)
    count = sum(lengths)
    everything = [Part(sequence=i, start=0, num_tokens=length) for i, length in enumerate(lengths)]
    kv.write(everything, *rng.standard_normal((2, count, 1, 16), np.float32))
    rows = sum(part.num_tokens for part in parts)
    q = rng.standard_normal((rows, 1, 16), np.float32)
    settings = {"scale": 0.5, "window": window}
    alone = kv.attend(parts, q, **settings, num_threads=1)
    for num_threads in (2, 3):
        shared = kv.attend(parts, q, **settings, num_threads=num_threads)
        np.testing.assert_array_equal(shared, alone)

"""Native attention against the reference in float64, and bit for bit against itself.

The reference sees K and V as the cache holds them, so that what is bounded is the arithmetic:
float32 sums, whatever the format. What formats lose is bounded in ``test_formats_lose_little``.
"""

import numpy as np
import pytest
import torch
from tests.kernels.cpu.native import FORMATS, LEVELS, Cache, Part

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.reference.attention import attend, visible

pytestmark = pytest.mark.parametrize("level", LEVELS)

ARITHMETIC = 2e-5  # of the largest value of V, at most some 1,000 slots and scores of a few units
ARITHMETIC_OF_WORDS = 2e-4  # where softmax weights are words of 15 bits
CHUNKS_AND_THREADS = ((1, 1), (1, 2), (7, 2), (64, 3), (100, 1), (513, 2), (600, 1))


def whole(length: int, sequence: int = 0) -> Part:
    return Part(sequence=sequence, start=0, num_tokens=length)


def chunked(length: int, size: int) -> list[Part]:
    return [
        Part(sequence=0, start=start, num_tokens=min(size, length - start))
        for start in range(0, length, size)
    ]


def filled(seed: int = 0, **settings: object) -> Cache:
    kv = Cache(**settings, seed=seed)
    rng = np.random.default_rng(seed + 100)
    count = sum(kv.lengths)
    parts = [whole(length, i) for i, length in enumerate(kv.lengths)]
    shape = (count, kv.num_kv_heads)
    k, v = rng.standard_normal((*shape, kv.k_width)), rng.standard_normal((*shape, kv.v_width))
    kv.write(parts, k, v)
    return kv


def queries(parts: list[Part], num_heads: int, width: int, seed: int = 7) -> np.ndarray:
    count = sum(part.num_tokens for part in parts)
    return np.random.default_rng(seed).standard_normal((count, num_heads, width), np.float32)


def depth_positions(part: Part) -> torch.Tensor:
    """Positions of the slots up to the part's end; drafts in a tree stand at their depth."""
    stop = part.start + part.num_tokens
    positions = torch.arange(stop)
    if part.ancestors:
        first = stop - part.num_drafts
        depths = [bits.bit_count() for bits in part.ancestors[-part.num_drafts :]]
        positions[first:] = first - 1 + torch.tensor(depths)
    return positions


def as_bytes(q: np.ndarray) -> np.ndarray:
    """Queries as int8 K is multiplied with: in 127 steps of each row's largest magnitude."""
    step = np.abs(q).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(q * (np.float32(1) / step)) * step.astype(np.float64)


def rotated(x: np.ndarray) -> np.ndarray:
    """Times the normalised Hadamard matrix."""
    width = x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return x @ (matrix / width**0.5)


def reference(kv, parts, q, *, scale, out_width=0, softcap=0.0, window=0, sinks=None):
    if kv.format == "int8" and kv.v_width:
        q = as_bytes(q)
    if kv.format == "int4":
        q = rotated(as_bytes(rotated(q).astype(np.float32)))
    outs, row = [], 0
    for part in parts:
        k, v = kv.read(part.sequence, 0, part.start + part.num_tokens)
        v = v if kv.v_width else k[..., :out_width]
        drafted = None
        if part.ancestors:
            bits = [[bits >> j & 1 for j in range(part.num_drafts)] for bits in part.ancestors]
            drafted = torch.tensor(bits, dtype=torch.bool)
        positions = depth_positions(part)
        seen = visible(
            query_positions_S=positions[part.start :],
            key_positions_C=positions,
            drafted_SD=drafted,
            window=window or part.window or None,
        )
        if part.window and not window:
            seen[:, : part.sinks] |= positions[part.start :, None] >= positions[None, : part.sinks]
        outs.append(
            attend(
                torch.from_numpy(q[row : row + part.num_tokens]).double(),
                torch.from_numpy(k).double(),
                torch.from_numpy(v).double(),
                seen,
                scale=scale,
                cap=softcap or None,
                sinks_H=None if sinks is None else torch.from_numpy(sinks).double(),
            ).numpy()
        )
        row += part.num_tokens
    return np.concatenate(outs)


def check(kv: Cache, parts: list[Part], num_heads: int, **settings: object) -> None:
    q = queries(parts, num_heads, kv.k_width)
    settings.setdefault("scale", kv.k_width**-0.5)
    got = kv.attend(parts, q, **settings)
    want = reference(kv, parts, q, **settings)
    bound = {"int8": ARITHMETIC_OF_WORDS, "int4": 3e-3}.get(kv.format, ARITHMETIC)
    bound = bound if kv.v_width else ARITHMETIC
    assert np.abs(got - want).max() < bound * np.abs(want).max()


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 65, 513])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (14, 2)])
def test_equals_the_reference(level, number_format, length, heads, kv_heads):
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=kv_heads,
        k_width=64,
        v_width=64,
        lengths=[length],
    )
    check(kv, [whole(length)], heads)
    check(kv, [Part(sequence=0, start=length - 1, num_tokens=1)], heads)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(("k_width", "v_width"), [(80, 80), (96, 96), (128, 128), (256, 256)])
def test_head_widths(level, number_format, k_width, v_width):
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=k_width,
        v_width=v_width,
        lengths=[131],
    )
    check(kv, [whole(131)], 8)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(("k_width", "v_width"), [(7, 19), (33, 5), (1, 1)])
def test_widths_that_no_vector_divides(level, number_format, k_width, v_width):
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=k_width,
        v_width=v_width,
        lengths=[70],
    )
    check(kv, [whole(70)], 6)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("window", [1, 3, 16, 100, 600])
def test_windows(level, number_format, window):
    kv = filled(
        level=level, format=number_format, num_kv_heads=2, k_width=32, v_width=32, lengths=[1100]
    )
    parts = [Part(sequence=0, start=1000, num_tokens=100)]
    check(kv, parts, 4, window=window)
    # Blocks that lie before every window belong to others by now.
    kv.tables[0][: (1000 - window + 1) // kv.block_tokens] = -(10**6)
    assert np.isfinite(kv.attend(parts, queries(parts, 4, 32), scale=0.2, window=window)).all()


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(("sinks", "window"), [(0, 20), (20, 500), (90, 30)])
def test_a_window_of_one_sequence_with_its_first_tokens(level, number_format, sinks, window):
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=32,
        v_width=32,
        lengths=[1100, 70],
    )
    parts = [
        Part(sequence=0, start=1000, num_tokens=100, sinks=sinks, window=window),
        Part(sequence=1, start=0, num_tokens=70, sinks=sinks, window=window),
    ]
    check(kv, parts, 4)
    check(kv, parts, 4, window=7)  # of a layer, which has no sinks then
    q = queries(parts, 4, 32)
    whole_part = kv.attend(parts, q, scale=0.2)
    # Blocks between them belong to others by now, and one by one the tokens see the same.
    kept = ceil_div(sinks, kv.block_tokens)
    kv.tables[0][kept : (1000 - window + 1) // kv.block_tokens] = -(10**6)
    for token in (0, 1, 50, 99):
        part = Part(sequence=0, start=1000 + token, num_tokens=1, sinks=sinks, window=window)
        alone = kv.attend([part], q[token : token + 1], scale=0.2)
        np.testing.assert_array_equal(alone[0], whole_part[token])


@pytest.mark.parametrize("number_format", FORMATS)
def test_softcap_and_sinks(level, number_format):
    kv = filled(
        level=level, format=number_format, num_kv_heads=2, k_width=48, v_width=48, lengths=[530]
    )
    sinks = np.array([-3.0, 0.0, 2.0, 9.0, 60.0, -60.0], np.float32)
    check(kv, [whole(530)], 6, softcap=1.5, scale=1.0)
    check(kv, [whole(530)], 6, sinks=sinks)
    check(kv, [whole(530)], 6, softcap=20.0, sinks=sinks, window=40)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_several_sequences(level, number_format, block_tokens):
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=40,
        v_width=40,
        lengths=[700, 1, 16, 90, 1030],
        block_tokens=block_tokens,
    )
    parts = [
        Part(sequence=3, start=60, num_tokens=30),
        Part(sequence=0, start=699, num_tokens=1),
        whole(1, 1),
        Part(sequence=4, start=1000, num_tokens=30),
        whole(16, 2),
    ]
    check(kv, parts, 6)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("num_heads", [1, 16, 112])
def test_latents(level, number_format, num_heads):
    kv = filled(
        level=level, format=number_format, num_kv_heads=1, k_width=88, v_width=0, lengths=[600]
    )
    check(kv, [Part(sequence=0, start=590, num_tokens=10)], num_heads, out_width=72)
    check(kv, [Part(sequence=0, start=599, num_tokens=1)], num_heads, out_width=70)


# Drafts 0 and 1 follow the last known token, 2 and 3 follow 0, 4 follows 3, 5 follows 1.
TREE = (0b1, 0b10, 0b101, 0b1001, 0b11001, 0b100010)


def width_of(number_format: str, width: int) -> int:
    return 64 if number_format == "int4" else width


def tree_part(start: int, known: int = 2) -> Part:
    return Part(
        sequence=0,
        start=start,
        num_tokens=known + len(TREE),
        num_drafts=len(TREE),
        ancestors=(0,) * known + TREE,
    )


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("start", [0, 11, 60, 505])
@pytest.mark.parametrize("window", [0, 3, 70])
def test_trees(level, number_format, start, window):
    part = tree_part(start)
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=width_of(number_format, 36),
        v_width=width_of(number_format, 36),
        lengths=[start + part.num_tokens, 40],
    )
    check(kv, [part, whole(40, 1)], 6, window=window)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("v_width", [36, 0])
@pytest.mark.parametrize("start", [3, 58, 507])
def test_a_path_through_a_tree_is_the_path_alone(level, number_format, v_width, start):
    part = tree_part(start)
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=1,
        k_width=width_of(number_format, 36),
        v_width=v_width and width_of(number_format, v_width),
        lengths=[start + part.num_tokens],
    )
    q = queries([part], 60, kv.k_width)
    settings = {"scale": 0.2, "out_width": kv.v_width or 30}
    in_tree = kv.attend([part], q, **settings)
    first = start + 2
    kv.move(0, [first + 0, first + 3, first + 4], [first, first + 1, first + 2])
    rows = [0, 1, 2 + 0, 2 + 3, 2 + 4]
    alone = kv.attend([Part(sequence=0, start=start, num_tokens=5)], q[rows], **settings)
    np.testing.assert_array_equal(in_tree[rows], alone)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(
    "settings",
    [
        {"k_width": 64, "v_width": 64, "num_kv_heads": 2, "num_heads": 8},
        {"k_width": 20, "v_width": 20, "num_kv_heads": 1, "num_heads": 7, "window": 90},
        {"k_width": 24, "v_width": 24, "num_kv_heads": 2, "num_heads": 2, "softcap": 2.0},
        {"k_width": 40, "v_width": 0, "num_kv_heads": 1, "num_heads": 50, "out_width": 32},
    ],
    ids=["grouped", "window", "softcap", "latents"],
)
def test_bits_do_not_depend_on_chunks_or_company_or_threads(level, number_format, settings):
    settings = dict(settings)
    num_heads = settings.pop("num_heads")
    of_cache = {name: settings.pop(name) for name in ("k_width", "v_width", "num_kv_heads")}
    length = 1100
    kv = filled(level=level, format=number_format, **of_cache, lengths=[length, 300])
    settings |= {"scale": 0.3}
    first = length - 600
    q = queries([Part(sequence=0, start=first, num_tokens=600)], num_heads, kv.k_width)
    want = kv.attend([Part(sequence=0, start=first, num_tokens=600)], q, **settings)
    for size, threads in CHUNKS_AND_THREADS:
        # One token at a time takes long: a sample of them, across a split and a chunk.
        firsts = range(0, 600, size) if size > 1 else (0, 1, 11, 12, 523, 524, 599)
        for row in firsts:
            rows = slice(row, min(row + size, 600))
            part = Part(sequence=0, start=first + row, num_tokens=rows.stop - row)
            got = kv.attend([part], q[rows], **settings, num_threads=threads)
            np.testing.assert_array_equal(got, want[rows])
    beside = [whole(300, 1), Part(sequence=0, start=length - 5, num_tokens=5), whole(10, 1)]
    q_beside = queries(beside, num_heads, kv.k_width)
    q_beside[300:305] = q[-5:]
    np.testing.assert_array_equal(kv.attend(beside, q_beside, **settings)[300:305], want[-5:])


@pytest.mark.parametrize("number_format", FORMATS)
def test_scores_that_no_float_exponential_holds(level, number_format):
    kv = filled(
        level=level, format=number_format, num_kv_heads=1, k_width=16, v_width=16, lengths=[200]
    )
    q = queries([whole(200)], 2, 16) * 1000
    got = kv.attend([whole(200)], q, scale=1.0)
    want = reference(kv, [whole(200)], q, scale=1.0)
    # float32 scores of some thousands are exact to about 1e-3.
    np.testing.assert_allclose(got, want, atol=2e-2)


def test_what_is_not_finite_spoils_its_own_sequence_only(level):
    kv = filled(
        level=level, format="f32", num_kv_heads=1, k_width=16, v_width=16, lengths=[40, 40, 40]
    )
    parts = [whole(40, i) for i in range(3)]
    q = queries(parts, 2, 16)
    before = kv.attend(parts, q, scale=0.2)
    bad = np.full((1, 1, 16), np.nan)
    kv.write([Part(sequence=1, start=20, num_tokens=1)], bad, bad)
    after = kv.attend(parts, q, scale=0.2)
    np.testing.assert_array_equal(after[:60], before[:60])
    np.testing.assert_array_equal(after[80:], before[80:])
    assert np.isnan(after[60:80]).all()


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("v_width", [20, 0])
@pytest.mark.parametrize("window", [0, 9, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_only_those_that_see_it(
    level, number_format, v_width, window, bad
):
    length, slot = 150, 70
    kv = filled(
        level=level,
        format=number_format,
        num_kv_heads=1,
        k_width=width_of(number_format, 20),
        v_width=v_width and width_of(number_format, v_width),
        lengths=[length],
    )
    out_width = kv.v_width or 20
    parts, settings = [whole(length)], {"scale": 0.2, "window": window, "out_width": out_width}
    q = queries(parts, 4, kv.k_width)
    before = kv.attend(parts, q, **settings)
    k, v = kv.read(0, slot, 1)
    # V alone, where it is not K: scores remain numbers then.
    (v if v_width else k)[0, 0, 3] = bad
    kv.write([Part(sequence=0, start=slot, num_tokens=1)], k, v)
    after = kv.attend(parts, q, **settings)
    last = min(slot + window, length) if window else length
    # Writing what was read again leaves int8 codes as they were, but perhaps not its scale.
    np.testing.assert_array_equal(after[:slot], before[:slot])
    np.testing.assert_array_equal(after[last:], before[last:])
    assert not np.isfinite(after[slot:last]).all(axis=-1).any()
    for size in (1, 7):
        for part in chunked(length, size):
            rows = slice(part.start, part.start + part.num_tokens)
            got = kv.attend([part], q[rows], **settings)
            np.testing.assert_array_equal(got, after[rows])


def test_a_half_that_overflows_is_the_largest_half(level):
    kv = Cache(level=level, format="f16", num_kv_heads=1, k_width=5, v_width=5, lengths=[1])
    values = np.array([65519.0, 65520.0, -1e30, np.inf, -np.inf], np.float32)
    kv.write([whole(1)], values[None, None], values[None, None])
    want = [65504.0, 65504.0, -65504.0, np.inf, -np.inf]
    for got in kv.read(0, 0, 1):
        np.testing.assert_array_equal(got[0, 0], want)


LOST = {"f32": 1e-6, "f16": 5e-4, "bf16": 4e-3, "int8": 8e-3, "int4": 9e-2, "fp8": 3e-2}


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("diffuse", [False, True])
def test_formats_lose_little(level, number_format, diffuse):
    """Error of K and V's rounding, as root mean square over that of the output."""
    length = 4096
    kv = Cache(
        level=level, format=number_format, num_kv_heads=1, k_width=64, v_width=64, lengths=[length]
    )
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, length, 1, 64)).astype(np.float32)
    kv.write([whole(length)], k, v + 1)
    q = queries([Part(sequence=0, start=4090, num_tokens=6)], 4, 64)
    scale = 0.001 if diffuse else 0.125
    got = kv.attend([Part(sequence=0, start=4090, num_tokens=6)], q, scale=scale)
    seen = torch.arange(4096)[None] <= torch.arange(4090, 4096)[:, None]
    exact = [torch.from_numpy(x).double() for x in (q, k, v + 1)]
    want = attend(*exact, seen, scale=scale).numpy()
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert error < LOST[number_format]

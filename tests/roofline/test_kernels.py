"""The counts of instructions that stand for the cpu executor's kernels, with AMX and without."""

from dataclasses import replace
from math import ceil, comb

import pytest

from ridgeline.core.formats import BFLOAT16, FLOAT32, NumberFormat, number_format
from ridgeline.roofline.kernels import NativeKernels, ProductKernel

VECTORS = NativeKernels(panel_tokens=8, attention_rows=12, in_16_bits=False, in_pairs=True, line=4)
TILES = replace(VECTORS, in_pairs=False, has_amx=True)
INT8 = number_format("int8")
FACTORED = replace(number_format("int4"), group_size=128, factor_columns=32)
CODES = (INT8, number_format("int4"), number_format("int4-g128"), FACTORED)


def name_of(form: object) -> str | None:
    if not isinstance(form, NumberFormat):
        return None
    return form.name + ("-factors" if form.factor_columns else "")


def work(kernel: ProductKernel, tokens: float) -> float:
    """Instructions for a weight, in lanes."""
    return kernel.unpack * kernel.panels(tokens) + kernel.product * kernel.computed(tokens)


@pytest.mark.parametrize("form", CODES, ids=name_of)
def test_codes_go_to_tiles_beyond_a_panel_of_vectors(form):
    for tokens in (1, 2.5, 8):
        assert TILES.of(form, tokens=tokens) == VECTORS.of(form, tokens=tokens)
    for tokens in (8.5, 9, 4096):
        assert TILES.of(form, tokens=tokens).family == "tiles"
        assert VECTORS.of(form, tokens=tokens).family == "codes"


def test_bfloats_always_go_to_tiles_and_other_floats_never():
    for tokens in (1, 8, 4096):
        assert TILES.of(BFLOAT16, tokens=tokens).family == "tiles"
        assert TILES.of(FLOAT32, tokens=tokens) == VECTORS.of(FLOAT32, tokens=tokens)


def test_a_float_is_loaded_for_a_panel_and_multiplied_for_each_token_and_bfloats_are_two_at_once():
    for form, num_instructions in ((FLOAT32, 1), (BFLOAT16, 1 / 2)):
        kernel = VECTORS.of(form, tokens=8)
        assert (kernel.unpack, kernel.product) == (num_instructions, num_instructions)


@pytest.mark.parametrize(
    ("form", "of_vectors", "of_tiles"),
    [
        (INT8, (8 * 4, 8 + 4 / 2), (8 * 4 + 16, (2 + 5) / 2)),
        (CODES[1], (4 * 4 + 12, 8 + 4), (4 * 4 + 12 + 16, 2 + 5)),
        (CODES[2], (4 * 4 + 12, 8 + 4 / 4), (4 * 4 + 12 + 16, (2 * 2 + 5) / 4)),
        (FACTORED, (4 * 4 + 12, 8 + 1 + 4 / 4), (4 * 4 + 12 + 16 + 48, (2 * 2 + 5) / 4)),
    ],
    ids=name_of,
)
def test_instructions_for_a_block_of_codes_by_hand(form, of_vectors, of_tiles):
    """A line of each bit, and its codes' shifts and masks, once; for each token its products, and a
    conversion at each step, of 64, 32 and 128 columns. Tiles need their codes as bytes, 16 more;
    their products of up to 64 columns take 2, and what ends a step 5."""
    for kernel, counted in (
        (VECTORS.of(form, tokens=8), of_vectors),
        (TILES.of(form, tokens=9), of_tiles),
    ):
        assert (32 * kernel.unpack, 32 * kernel.product) == counted


@pytest.mark.parametrize("form", CODES[1:], ids=name_of)
def test_sums_of_16_bits_are_multiplied_once_by_ones_or_by_factors(form):
    """8 products, 8 sums, and one product more of two halves of a sum."""
    kernel = replace(VECTORS, in_16_bits=True).of(form, tokens=4)
    assert 32 * kernel.product == 8 + 8 + 1 + 4 * 32 / min(form.group_size, 128)


@pytest.mark.parametrize("form", [BFLOAT16, *CODES[1:]], ids=name_of)
@pytest.mark.parametrize("tokens", [16, 32, 512])
def test_tiles_take_less_than_vectors(form, tokens):
    assert work(TILES.of(form, tokens=tokens), tokens) < work(
        VECTORS.of(form, tokens=tokens), tokens
    )


@pytest.mark.parametrize("form", [BFLOAT16, *CODES], ids=name_of)
def test_no_token_is_padding(form):
    """A tile has a row for each token: the products of 32 take twice those of 16, not more."""
    kernel = TILES.of(form, tokens=16)
    assert kernel.computed(32) == 2 * kernel.computed(16) == 32


def test_without_groups_a_step_is_as_long_as_in_groups_of_64():
    grouped = replace(INT8, group_size=64)
    assert TILES.of(INT8, tokens=32) == TILES.of(grouped, tokens=32)
    assert VECTORS.of(INT8, tokens=8).product == VECTORS.of(grouped, tokens=8).product


def test_factors_are_counted_where_there_are_some():
    """Not where a scale is long: that of a group of a checkpoint in float32 has as many bits."""
    plain = number_format("int4-g128")
    long_scales = replace(plain, scale_bits=32)
    for kernels, tokens in ((VECTORS, 8), (TILES, 8), (TILES, 32)):
        assert kernels.of(long_scales, tokens=tokens) == kernels.of(plain, tokens=tokens)
        factored = kernels.of(FACTORED, tokens=tokens)
        assert work(factored, tokens) > work(kernels.of(plain, tokens=tokens), tokens)


@pytest.mark.parametrize("num_tokens", [1, 3, 24, 96, 500])
def test_panels_of_an_expert_are_those_of_the_tokens_that_it_may_get(num_tokens):
    """24 tokens of which each goes to one in four are 6 in the mean, which is one panel of 8; but
    often they are more."""
    kernel = ProductKernel(family="float", panel_tokens=8)
    chances = [
        comb(num_tokens, n) * 0.25**n * 0.75 ** (num_tokens - n) for n in range(num_tokens + 1)
    ]
    wanted = sum(ceil(n / 8) * chance for n, chance in enumerate(chances)) / (1 - chances[0])
    assert kernel.expert_panels(num_tokens, 0.25) == pytest.approx(wanted)
    assert kernel.expert_panels(num_tokens, 1.0) == ceil(num_tokens / 8)
    assert kernel.expert_panels(0, 0.25) == kernel.panels(0) == 1

"""Activations of the native feed-forward network, alone and fused into the products before them."""

import ctypes as c

import numpy as np
import pytest
from tests.kernels.cpu.native import LEVELS, pool

from ridgeline.kernels.cpu.matrix import pack
from ridgeline.kernels.cpu.structs import RlActivation, RlBatch, RlBuffer, RlLinear

WIDTH = 21
KINDS = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "clamped_swiglu": 4,
    "relu_squared": 5,
}


def feed_forward(level, kind, gate_bias, up_bias, *, fused=True):
    """down . (act(gate) * up), of which only the biases are not zero; down sums."""
    threads = pool(level, 2)
    library, zeros = threads.library, np.zeros((WIDTH, WIDTH), dtype=np.float32)
    # Matrices of one format read the same panels, and then the activation is part of the product.
    gate = pack(threads, zeros if fused else zeros.astype(np.float16))
    up, down = pack(threads, zeros), pack(threads, np.ones((WIDTH, WIDTH), dtype=np.float32))

    def linear(matrix, bias):
        return RlLinear(matrix=matrix.struct, bias=None if bias is None else bias.ctypes.data)

    linears = [linear(gate, gate_bias), linear(up, up_bias), linear(down, None)]
    gated = None if gate_bias is None else c.byref(linears[0])
    program = library.rl_program_new((c.c_int32 * len(RlBuffer))(*[WIDTH] * len(RlBuffer)))
    activation = RlActivation(kind=KINDS[kind], alpha=1.702, limit=7.0)
    library.rl_add_mlp(
        program, RlBuffer.N, RlBuffer.H, gated, c.byref(linears[1]), c.byref(linears[2]),
        c.byref(activation), None,
    )  # fmt: skip
    assert library.rl_reserve(program, 1) == 0
    source = library.rl_buffer(program, RlBuffer.N)
    c.memset(source, 0, 4 * WIDTH)
    batch = RlBatch(num_tokens=1, num_sequences=0)
    assert library.rl_run(program, threads.handle, 0, 1, c.byref(batch), None, None, None) == 0
    out = c.cast(library.rl_buffer(program, RlBuffer.H), c.POINTER(c.c_float))
    result = np.ctypeslib.as_array(out, (WIDTH,)).copy()
    library.rl_program_free(program)
    return result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_not_a_number_stays_so(level, kind, fused):
    ones = np.ones(WIDTH, dtype=np.float32)
    assert np.isfinite(feed_forward(level, kind, ones, ones, fused=fused)).all()
    for place in (0, WIDTH - 1):  # in a whole vector, and in a part of one
        bad = ones.copy()
        bad[place] = np.nan
        assert np.isnan(feed_forward(level, kind, bad, ones, fused=fused)).all()
        assert np.isnan(feed_forward(level, kind, ones, bad, fused=fused)).all()
        if kind != "clamped_swiglu":  # which there is only with a gate
            assert np.isnan(feed_forward(level, kind, None, bad)).all()

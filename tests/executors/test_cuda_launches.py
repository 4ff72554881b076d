"""Which kernels a recorded decode step is, and that their replays draw the reference's tokens."""

import pytest
import torch
from tests.executors.host_cuda import RecordsLaunches, host_executor
from tests.tiny import CONFIG, Driver, tiny_executor, tiny_model

from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cuda.triton_kernels import TritonKernels
from ridgeline.kernels.gpu import missing_for_gpu

pytestmark = pytest.mark.skipif(missing_for_gpu() is None, reason="kernels are not interpreted")

PROMPT = [3, 141, 59, 26, 53]
SMALL = CONFIG | {"num_hidden_layers": 1}


def recorded(params, config=SMALL):
    """The kernels of a decode step, and the tokens that its replays have drawn."""
    device = RecordsLaunches()

    def make(models, block_tokens):
        kernels = TritonKernels(torch.device("cpu"))
        return host_executor(models, block_tokens, device=device, kernels=kernels, num_slots=2)

    model = tiny_model(config, dtype="float32")
    driver = Driver(tiny_executor(model=model, make=make))
    tokens = driver.decode(0, PROMPT, 5, params)
    driver.executor.close()
    (names,) = device.names
    assert device.num_replays == 4
    reference = Driver(tiny_executor(model=model))
    assert tokens == reference.decode(0, PROMPT, 5, params)
    return names


def test_a_step_is_its_layers_and_six_kernels():
    names = recorded(SamplingParams(temperature=0.0))
    product = ["_normalise", "linear_kernel"]
    layer = [*product, "_rope", "attention_kernel", "linear_kernel", *product, "linear_kernel"]
    assert names == [
        "_begin", "aten.embedding.default", *layer, *product, "draw_kernel", "_end",
    ]  # fmt: skip


def test_a_draw_of_what_top_p_leaves_is_nine_kernels():
    """Digits of top-k in float32, the draw, and what weighs and repeats it."""
    names = recorded(SamplingParams(temperature=0.9, top_k=40, top_p=0.8))
    truncated = [*4 * ["count_digits_kernel"], "draw_kernel", *4 * ["redraw_kernel"]]
    assert names[-11:] == ["linear_kernel", *truncated, "_end"]


def test_a_step_that_adjusts_logits_is_two_kernels_more():
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.5, logit_bias={7: 3.0}
    )
    plain = recorded(SamplingParams(temperature=0.9, top_p=0.8))
    assert recorded(params) == [*plain[:12], "_count", "_adjust", *plain[12:]]

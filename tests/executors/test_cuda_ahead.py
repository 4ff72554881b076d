"""That warming up asks for every kernel that steps ask for, so that none is compiled later."""

import importlib
import logging
from inspect import signature

import pytest
import torch
from tests.executors.host_cuda import RecordsLaunches, host_executor
from tests.tiny import CONFIG, EXPERTS, Driver, tiny_executor, tiny_model
from triton.runtime.interpreter import InterpretedFunction

from ridgeline.core.plan import Outputs
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cuda.triton_kernels import TritonKernels
from ridgeline.kernels.gpu import missing_for_gpu
from ridgeline.kernels.triton import compile_ahead, first_of_classes

pytestmark = pytest.mark.skipif(missing_for_gpu() is None, reason="kernels are not interpreted")

SMALL = {"num_hidden_layers": 1, "vocab_size": 40}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.8, top_k=20)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.4)
TOLD = SamplingParams(temperature=0.8, logprobs=2)


def variant(kernel, args, options):
    """What a launch is compiled for: types, what is known of numbers and addresses, constants."""
    plain = set(kernel.kwargs["do_not_specialize"] or ())
    anywhere = set(kernel.kwargs["do_not_specialize_on_alignment"] or ())
    known = [kernel.__name__]
    for name, value in zip(signature(kernel.fn).parameters, args, strict=False):
        if isinstance(value, torch.Tensor):
            known.append((name, value.dtype, name in anywhere or value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            known.append((name, None if name in plain else (value == 1, value % 16 == 0)))
    return (*known, *sorted(options.items()))


class Launches:
    """Notes what is asked for."""

    def __init__(self, monkeypatch):
        self.asked = set()
        run = InterpretedFunction.run

        def noting(kernel, *args, grid, warmup, **options):
            self.asked.add(variant(kernel, args, options))
            return run(kernel, *args, grid=grid, warmup=warmup, **options)

        monkeypatch.setattr(InterpretedFunction, "run", noting)


@pytest.fixture
def launches(monkeypatch):
    for name in ("attention", "linear", "sampling"):  # as many as split what is asked for
        module = importlib.import_module(f"ridgeline.kernels.triton.{name}")
        monkeypatch.setattr(module, "num_multiprocessors", lambda _device: 12)
    return Launches(monkeypatch)


def mixed_steps(driver):
    """Prompts of many lengths beside rows that decode, drawn in every way."""
    ways = (SamplingParams(temperature=0.0), SAMPLED, PENALISED, TOLD)
    starts = {}

    def admitted(slot, length):
        tokens = [(7 * slot + 3 * i) % 37 for i in range(length)]
        admission = driver.admit(slot, tokens, ways[slot % 4])
        starts[slot] = length
        return driver.segment(slot, 0, tokens, fresh=True), admission

    for lengths in ((1,), (3, 5), (16, 2, 1, 30), (20, 9, 44)):
        segments = [
            driver.segment(slot, starts[slot], [5], outputs=Outputs(sample=slot % 2 == 0))
            for slot in starts
        ]
        for slot in starts:
            starts[slot] += 1
        new = [admitted(len(starts), length) for length in lengths]
        admissions = tuple(admission for _, admission in new)
        driver.run(*segments, *(segment for segment, _ in new), admissions=admissions)
    for slots in ([0], [0, 1, 2], [1, 3, 4, 5, 6], list(starts)):
        driver.run(*(driver.segment(slot, starts[slot], [6]) for slot in slots))
        for slot in slots:
            starts[slot] += 1
    drafts = [driver.segment(s, starts[s], [1, 2, 3], num_drafts=2) for s in (0, 3)]
    driver.run(*drafts)


@pytest.mark.parametrize("config", [CONFIG | SMALL, EXPERTS | SMALL], ids=["dense", "experts"])
def test_steps_ask_for_no_kernel_that_warming_up_has_not_asked_for(launches, config, caplog):
    caplog.set_level(logging.INFO)
    kernels = TritonKernels(torch.device("cpu"))
    executor = tiny_executor(
        model=tiny_model(config, dtype="float32"),
        num_blocks=170,
        make=lambda models, size: host_executor(
            models, size, kernels=kernels, device=RecordsLaunches(), num_slots=10, warm_up=True
        ),
    )
    assert "compilers at once" in caplog.text
    before = set(launches.asked)
    assert before
    mixed_steps(Driver(executor))
    assert launches.asked - before == set()
    executor.close()


def test_nothing_runs_that_is_compiled_ahead(launches):
    kernels, x = TritonKernels(torch.device("cpu")), torch.ones(3, 8)

    def ask():
        kernels.begin_step(
            *torch.zeros(3, 4, dtype=torch.int64), torch.zeros(9, dtype=torch.int64),
            torch.zeros(1, 3, 5, dtype=torch.int32), block_tokens=4,
        )  # fmt: skip
        x.zero_()

    assert compile_ahead(ask, 2) == 0, "an interpreter compiles nothing"
    assert len(launches.asked) == 1
    assert not x.any()


def test_one_number_stands_for_each_class():
    assert first_of_classes(range(1, 10), lambda n: n // 4) == [1, 4, 8]

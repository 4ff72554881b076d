"""The CPU executor without memory."""

import resource

import numpy as np
import pytest
from tests.tiny import Driver, tiny_executor, tiny_model

from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.kernels.cpu.structs import RlBuffer

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
TOO_MANY_TOKENS = 1 << 30  # 206 GB for each buffer as wide as the hidden size


@pytest.fixture
def no_more_memory():
    """Address space for what there is, and 64 GB: less than a buffer of such a step."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def limit() -> None:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 30), hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_step_too_large_leaves_room_for_none_and_the_next_makes_its_own(no_more_memory):
    model = tiny_model(dtype="float32")
    executor = tiny_executor(model=model, block_tokens=16, make=CPUExecutor)
    driver, outputs = Driver(executor), Outputs(logits=True)
    before = driver.start(0, PROMPT, outputs=outputs).logits
    program = executor._models[ModelRole.TARGET].program
    no_more_memory()
    with pytest.raises(OutOfMemoryError, match=f"step of {TOO_MANY_TOKENS} tokens"):
        program.reserve(TOO_MANY_TOKENS)
    for buffer in RlBuffer:
        assert program._library.rl_buffer(program._handle, buffer) is None
    after = driver.start(1, PROMPT, outputs=outputs).logits
    np.testing.assert_array_equal(after, before)
    executor.close()

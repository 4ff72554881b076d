"""A model whose weights do not fit their memory runs from disk, with the same bits."""

import logging
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import CONFIG, EXPERTS, Driver

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.executors import create_executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.models import describe, lower
from ridgeline.weights import DummyWeights

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")

LARGE = CONFIG | {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 8}
PROMPT = list(range(20))


def model(config) -> ExecutorModel:
    spec = describe(config).spec
    ops = lower(spec)
    weights = DummyWeights(ops=ops, dtype="float32", seed=0)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype="float32")


def executor(folder: Path, config=LARGE, **settings):
    engine = EngineConfig(executor="cpu", packed_cache_path=str(folder), **settings)
    made = create_executor({ModelRole.TARGET: model(config)}, engine)
    made.allocate_kv([4])
    return made


def steps(made) -> list[np.ndarray]:
    """Logits of a prompt and of two tokens after it."""
    driver, found = Driver(made, blocks_per_slot=4), []
    for start, tokens in ((0, PROMPT), (20, [3]), (21, [5])):
        admissions = () if start else (driver.admit(0, PROMPT),)
        segment = driver.segment(0, start, tokens, fresh=not start, outputs=Outputs(logits=True))
        found.append(driver.run(segment, admissions=admissions).passes[0][0].logits.copy())
    return found


def resident_bytes() -> int:
    """Of mapped files, in this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.parametrize(
    "config",
    [
        LARGE,
        LARGE | {"tie_word_embeddings": True},
        EXPERTS | {key: LARGE[key] for key in ("hidden_size", "num_hidden_layers")},
    ],
    ids=["apart", "tied", "experts"],
)
def test_a_third_of_the_memory_gives_the_same_bits(tmp_path, config, caplog):
    whole = executor(tmp_path, config)
    expected, limit = steps(whole), whole.weights_bytes() // 3
    whole.close()
    before = resident_bytes()
    with caplog.at_level(logging.WARNING):
        streamed = executor(tmp_path, config, weights_memory_bytes=limit)
    assert "read from disk in every step" in caplog.text
    for _ in range(2):
        for got, want in zip(steps(streamed), expected, strict=True):
            np.testing.assert_array_equal(got, want)
        assert resident_bytes() < before + limit + 2**20
    streamed.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights_memory_bytes": 1000}, "must be at least"),
        ({"weights_memory_bytes": 10**9, "packed_cache_bytes": 1000}, "and packed_cache_bytes is"),
        ({"weights_memory_bytes": 10**9, "executor": "reference"}, "keeps weights in memory"),
        ({"weights_memory_bytes": 10**9, "tensor_parallel_size": 2}, "does not work with tensor"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path, settings, reason):
    settings = {"executor": "cpu", "packed_cache_path": str(tmp_path)} | settings
    with pytest.raises(SettingsError, match=reason):
        create_executor({ModelRole.TARGET: model(LARGE)}, EngineConfig(**settings))

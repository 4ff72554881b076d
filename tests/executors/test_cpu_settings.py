"""Settings that the CPU executor refuses."""

import pytest
from tests.tiny import tiny_model

from ridgeline.core.errors import SettingsError
from ridgeline.core.plan import ModelRole
from ridgeline.executors.cpu import executor
from ridgeline.executors.cpu.executor import CPUExecutor


def test_sizes_of_blocks_are_refused_before_weights_are_packed(monkeypatch):
    monkeypatch.setattr(executor, "pack_weights", lambda *_: pytest.fail("it packs"))
    models = {ModelRole.TARGET: tiny_model(dtype="float32")}
    with pytest.raises(SettingsError, match="multiples of 16 tokens, not 24"):
        CPUExecutor(models, 24)

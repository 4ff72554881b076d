"""The line that says what was loaded."""

import re
from dataclasses import replace

import pytest
from tests.roofline.test_fitting import CEILINGS, samples

from ridgeline import LLM
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.roofline.calibration import calibrate, calibration_path, save


def keep_calibrations(ceilings):
    for executor in ("reference", "cpu"):
        made = calibrate(samples(noise=0.1), ceilings, executor=executor, dense_attention=False)
        save(made, calibration_path(executor))


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_calibrations(CEILINGS)


def summary(folder, **settings):
    with LLM(str(folder), **settings) as llm:
        return llm.summary.line


def test_without_a_calibration_nothing_is_predicted(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = summary(model_folder, executor="reference", dtype="float32", max_model_len=128)
    assert "on reference" in line
    assert "float32 weights, 32 bits" in line
    assert "context 128, KV cache for" in line
    assert "speed not predicted (`ridgeline roofline` measures" in line


def test_random_weights_are_called_so(model_folder):
    line = summary(model_folder, executor="reference", dtype="float32", load_format="dummy")
    assert "random float32 weights, 32 bits" in line


def test_with_one_there_is_a_speed_with_its_interval(model_folder, calibrated):
    line = summary(model_folder, executor="reference", dtype="float32")
    found = re.search(r"predicted (\S+) tok/s \((\S+)–(\S+)\)", line).groups()
    rate, low, high = (float(text.replace(",", "")) for text in found)
    assert low <= rate <= high
    assert "--quantization" not in line  # the reference executor has no such formats
    assert "busy" not in line
    keep_calibrations(replace(CEILINGS, conditions={"contended": True}))
    line = summary(model_folder, executor="reference", dtype="float32")
    assert line.endswith(" by a calibration on a busy machine (`ridgeline roofline --calibrate`)")


@pytest.mark.skipif(not native_kernels_run(), reason="the native kernels do not run here")
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_format_that_would_be_much_faster_is_named(calibrated, quantization):
    settings = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64}
    line = summary("smollm2-135m", executor="cpu", quantization=quantization, **settings)
    named = re.search(r"(\S+) times as fast.*--quantization int[48]: \S+ tok/s", line)
    assert (named is not None) is (quantization is None), line
    if named:
        assert float(named[1]) >= 1.3


@pytest.mark.skipif(not native_kernels_run(), reason="the native kernels do not run here")
def test_the_bits_are_those_of_all_weights_and_not_of_the_layers_alone():
    """The head of a model in int4 has six: bits and bytes are of the same weights."""
    with LLM(quantization="int4", executor="cpu") as llm:
        line, count = llm.summary.line, llm.summary.num_parameters
    bits, size = re.search(r"int4 weights, (\S+) bits, (\S+) MB", line).groups()
    assert float(bits) == pytest.approx(float(size) * 8e6 / count, rel=0.02)

"""What the scheduler predicts steps with: this machine's calibration where there is one."""

import json
import logging
from dataclasses import replace

import pytest
from tests.roofline.test_fitting import CEILINGS, samples

from ridgeline import LLM
from ridgeline.cli.main import main
from ridgeline.roofline.calibration import calibrate, calibration_path, save
from ridgeline.scheduler import DEFAULT_PREDICTOR


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def predictors_of(model_folder):
    with LLM(str(model_folder), executor="reference") as llm:
        engine = llm._engine
        return engine.scheduler._predictor._predictor, engine.observer.predictor


def test_linear_without_a_calibration(model_folder, cache, caplog):
    with caplog.at_level(logging.INFO):
        used, predictor = predictors_of(model_folder)
    assert used == replace(DEFAULT_PREDICTOR, draft_share=0.0)  # there is no draft model
    assert predictor is None
    assert "predicted by a model that is linear" in caplog.text


def test_the_calibration_of_this_machine(model_folder, cache, caplog):
    made = calibrate(samples(("gpt2",)), CEILINGS, executor="reference", dense_attention=True)
    save(made, calibration_path("reference"))
    with caplog.at_level(logging.INFO):
        used, predictor = predictors_of(model_folder)
    assert used is predictor
    assert predictor.calibration == made
    assert "calibrated for the reference executor" in caplog.text


def test_collect_env_says_which(cache, capsys, monkeypatch):
    monkeypatch.setattr("ridgeline.executors.default_executor", lambda: "reference")
    main(["collect-env", "--json"])
    assert json.loads(capsys.readouterr().out)["step_seconds"].startswith("linear")
    made = calibrate(samples(("gpt2",)), CEILINGS, executor="reference", dense_attention=True)
    save(made, calibration_path("reference"))
    main(["collect-env", "--json"])
    assert "calibrated for the reference" in json.loads(capsys.readouterr().out)["step_seconds"]

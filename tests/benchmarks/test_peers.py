"""The comparison chooses settings by what was measured, and compares like with like."""

import json

import pytest
from benchmarks.peers import run as peers
from benchmarks.peers.engines import ENGINES, Engine
from benchmarks.peers.grid import CELLS, TRIED
from benchmarks.peers.page import PAGE, load_results, page
from benchmarks.peers.table import markdown

CEILINGS = {
    "read": {"DRAM": {"2": {"bytes_per_s": 31e9, "loop": "four streams"}}},
    "arithmetic": {"int8": {"operations_per_s": 390e9, "loop": "dot"}},
    "conditions": {"cpu": "a processor", "cores": 2, "threads": 2},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "model_folder", lambda _: tmp_path)
    return tmp_path


def engine(name, rates, weights="int4", **fields):
    """``rates[speed]`` gives the rate of a cell by its batch."""

    def measure(shape, setting, cells, cores):
        if setting["speed"] == "broken":
            raise RuntimeError("it does not start")
        return {cell.name: rates[setting["speed"]](cell.batch) for cell in cells}

    grid = {kind: [{"speed": speed} for speed in rates] for kind in TRIED}
    return Engine(name=name, weights=weights, grid=grid, measure=measure, **fields)


ours = engine("ours", {"only": lambda batch: 100.0 * batch}, is_ours=True)
theirs = engine(
    "theirs",
    {"broken": None, "latency": lambda _: 50.0, "batched": lambda batch: 20.0 * batch},
)
decodes = [cell for cell in CELLS if cell.kind == "decode"]


def test_each_cell_has_the_setting_that_was_fastest_for_the_nearest_cell_tried(folder):
    run = peers.Run("shape", [theirs], decodes, wait_s=0.0)
    run.choose(quick=False, again=False)
    chosen = {cell: figures.setting["speed"] for cell, figures in run.figures["theirs"].items()}
    assert chosen == {"decode 1": "latency", "decode 4": "latency", "decode 8": "batched",
                      "decode 16": "batched", "decode 32": "batched"}  # fmt: skip
    kept = peers.Run("shape", [theirs], decodes, wait_s=0.0)
    kept.choose(quick=True, again=False)
    assert kept.figures["theirs"]["decode 32"].setting == {"speed": "batched"}
    (folder / "best.json").unlink()
    kept.choose(quick=True, again=False)
    assert kept.figures["theirs"]["decode 32"].setting == {"speed": "broken"}
    assert not (folder / "best.json").exists()


def test_ratios_are_of_medians_and_only_between_engines_of_the_same_weights():
    other = engine("in bf16", {"only": lambda _: 1.0}, weights="bf16")
    run = peers.Run("shape", [ours, theirs, other], decodes, wait_s=0.0)
    run.choose(quick=False, again=False)
    for _ in range(3):
        run.measure_round()
    result = peers.report(run, CEILINGS, seconds=1.0)
    assert list(result["ratios"]) == ["ours / theirs"]
    assert result["ratios"]["ours / theirs"] == {
        "decode 1": 2.0, "decode 4": 8.0, "decode 8": 5.0, "decode 16": 5.0, "decode 32": 5.0,
    }  # fmt: skip
    assert result["figures"]["theirs"]["decode 8"]["rates_tok_s"] == [160.0] * 3
    table = markdown(json.loads(json.dumps(result)))
    assert "| ours / theirs | 2.00× | 8.00× | 5.00× | 5.00× | 5.00× |" in table
    assert "memory 31.0 GB/s" in table


def test_an_engine_that_fails_costs_its_own_figures_and_is_named():
    broken = engine("broken", {"broken": None})
    run = peers.Run("shape", [ours, broken], decodes, wait_s=0.0)
    run.choose(quick=False, again=False)
    run.measure_round()
    table = markdown(peers.report(run, CEILINGS, seconds=1.0))
    assert "| broken | – | – | – | – | – |" in table
    assert "Not measured: it does not start" in table
    assert "| ours | 100 | 400 | 800 | 1,600 | 3,200 |" in table


def test_every_kind_of_cell_has_settings_and_a_cell_that_stands_for_it():
    kinds = {cell.kind for cell in CELLS}
    assert kinds == set(TRIED)
    for peer in ENGINES:
        assert all(peer.grid[kind] for kind in kinds), peer.name
    for kind, tried in TRIED.items():
        assert min(cell.batch for cell in tried) == 1, kind


def test_the_page_is_made_of_the_results_that_are_kept():
    assert PAGE.read_text() == page(load_results())


def test_a_column_of_the_page_is_the_newest_run_that_measured_it():
    def result(day, **rates):
        return {
            "machine": "a processor", "shape": "llama-3.2-1b", "date": f"2026-11-{day}T00:00",
            "file": f"{day}.json", "ceilings": CEILINGS,
            "figures": {
                engine: {cell: {"median_tok_s": rate} for cell, rate in cells.items()}
                for engine, cells in rates.items()
            },
        }  # fmt: skip

    old = {"ridgeline int4": {"prefill 512": 10.0, "decode 1": 20.0}}
    old["OpenVINO int4"] = {"prefill 512": 50.0, "decode 1": 10.0}
    new = {"ridgeline int4": {"decode 1": 30.0}, "llama.cpp Q4_0": {"decode 1": 20.0}}
    text = page([result(21, **old), result(22, **new)])
    assert "| × the best peer | 0.20 | **1.50** |" in text
    assert "[11-21](../benchmarks/results/21.json), 31 GB/s | [11-22]" in text

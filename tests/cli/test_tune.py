"""``ridgeline tune`` and ``optimize --from-server``, on a server that has seen something."""

import json
from contextlib import contextmanager

import pytest
from tests.server.running import running

from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.settings.reading import changed_settings
from ridgeline.optimize import screening
from ridgeline.server.traffic import SeenRequest


@contextmanager
def seen(tmp_path, requests, **engine):
    """A server of the embedded model that has answered these already."""
    settings = {"dtype": "bfloat16", "block_tokens": 16, "max_num_seqs": 64} | engine
    with running(None, data_dir=tmp_path, engine=settings, admin_api_key="a") as server:
        server.server.settings = changed_settings(EngineConfig(**settings))
        server.server.metrics.traffic._seen.extend(requests)
        yield server.url


KEY = ("--api-key", "a")
BURST = [SeenRequest(0.001 * index, 200, 64, 24) for index in range(24)]


def test_a_setting_that_holds_it_back_is_found(predicted_before, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(screening, "_COMBINATIONS", 16)
    with seen(tmp_path, BURST, max_num_seqs=1) as url:
        code = main(
            ["tune", url, *KEY, "--slo", "ttft=0.05,tpot=0.05", "--seconds", "60", "--json"]
        )
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["max_num_seqs"] == 1
    assert report["traffic"]["requests"] == 24
    assert report["traffic"]["cached_share"] == pytest.approx(64 / 200)
    assert code == 1
    assert any("max_num_seqs" in each["changes"] for each in report["proposals"])
    assert all(each["low"] > 1 for each in report["proposals"])
    assert report["past_errors"][0].startswith("Past predictions here, decode of bfloat16: ")


def test_a_server_that_idles_keeps_its_settings(calibrated, capsys, tmp_path):
    idle = [SeenRequest(60.0 * index, 30, 0, 5) for index in range(32)]
    with seen(tmp_path, idle) as url:
        assert main(["tune", url, *KEY, "--slo", "ttft=10", "--seconds", "1"]) == 0
    assert "Keep the settings" in capsys.readouterr().out


def test_too_few_requests_and_other_servers_are_one_sentence(capsys, tmp_path):
    with seen(tmp_path, BURST[:3]) as url:
        assert main(["tune", url, *KEY]) == 2
        assert "has seen 3 requests, too few" in capsys.readouterr().err
        assert main(["tune", url + "/nothing", *KEY]) == 1
        told = capsys.readouterr().err
        assert "404" in told
        assert "{" not in told


@pytest.mark.slow
def test_optimize_starts_from_what_a_server_saw(calibrated, capsys, tmp_path):
    out = tmp_path / "best.yaml"
    options = ["--quality", "none", "--budget", "10s", "-o", str(out)]
    few = [SeenRequest(0.01 * index, 30, 0, 6) for index in range(16)]
    with seen(tmp_path, few, max_num_seqs=8) as url:
        assert main(["optimize", "--from-server", url, *KEY, *options]) == 0
    assert f"--from-server {url}" in out.read_text()
    assert "dtype: " in out.read_text()

"""The line of JSON for each request."""

import dataclasses
import json
import logging
import time

import pytest


@pytest.fixture
def lines(served, monkeypatch, caplog):
    """Reads the first ``count`` lines of the log; a line comes after its answer."""
    config = dataclasses.replace(served.server.config, log_requests=True)
    monkeypatch.setattr(served.server, "config", config)
    caplog.set_level(logging.INFO, logger="ridgeline.requests")

    def first(count):
        deadline_s = time.monotonic() + 10
        while len(caplog.records) < count and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return [json.loads(record.getMessage()) for record in caplog.records[:count]]

    return first


def test_the_outcome_is_that_of_the_answer(http, lines):
    assert http.get("/version").status_code == 200
    assert http.get("/no/such/route").status_code == 404
    assert http.delete("/version").status_code == 405
    told = http.post("/v1/completions", json={"prompt": 5, "model": "SECRET"})
    entries = lines(4)
    assert (told.status_code, entries[-1]["error"]) == (400, "invalid_request_error")
    found = [(line["status"], line["outcome"]) for line in entries]
    assert found == [(200, "ok"), *((s, f"error {s}") for s in (404, 405, 400))]


def test_probes_are_logged_where_they_fail(http, served, lines, monkeypatch):
    probes = ("/health", "/ready", "/ping", "/load", "/metrics")
    assert [http.get(path).status_code for path in probes] == [200] * len(probes)
    monkeypatch.setattr(served.server, "is_warm", False)
    assert http.get("/ready").status_code == 503
    (line,) = lines(1)
    assert (line["route"], line["status"], line["outcome"]) == ("/ready", 503, "error 503")

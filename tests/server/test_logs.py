"""Request logs: what happened is in them, and what happens every few seconds is not."""

import json
import logging

from tests.server.running import running


def test_a_line_says_what_became_of_a_request(model_folder, tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "ridgeline.requests"),
        running(model_folder, data_dir=tmp_path, log_requests=True) as server,
        server.client() as client,
    ):
        for path in ("/health", "/ready", "/ping", "/metrics", "/version"):
            assert client.get(path).status_code == 200
        assert client.get("/nowhere").status_code == 404
        server.server.is_draining = True
        assert client.get("/ready").status_code == 503
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "ridgeline.requests"]
    told = [(line["route"], line["status"], line["outcome"]) for line in lines]
    assert told == [
        ("/version", 200, "ok"),
        ("other", 404, "error 404"),
        ("/ready", 503, "error 503"),
    ]

"""Replicas on the nodes of a Ray cluster: they come and go, and streams are whole."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.reliability.process import ServeProcess, free_port

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.fleet.replicas import serve_replicas
from ridgeline.server.config import ServerConfig

RAY = EngineConfig(model="embedded", launcher="ray")
BODY = {"prompt": "import os", "max_tokens": 60, "seed": 3, "temperature": 0.9, "stream": True}
ADMIN = {"authorization": "Bearer chief"}


def test_replicas_that_anyone_could_use_are_refused():
    with pytest.raises(SettingsError, match="can be reached by others; set --api-key"):
        serve_replicas(RAY, ServerConfig(), 2)


@pytest.mark.slow
def test_replicas_come_and_go_on_nodes_of_ray_and_streams_are_whole(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ridgeline[ray]'")
    from tests.ray_nodes import ray_nodes

    with ray_nodes(3) as (address, others):
        server = ServeProcess(
            "embedded", tmp_path / "data", "--replicas", "3", "--launcher", "ray",
            "--ray-address", address, "--api-key", "user", "--admin-api-key", "chief",
            port=free_port(),
        )  # fmt: skip
        try:
            server.wait_ready(200)
            assert all(node.runs("replica_main") for node in others)
            with (
                server.client(headers={"authorization": "Bearer user"}) as client,
                ThreadPoolExecutor(4) as threads,
            ):
                is_over, engines = threading.Event(), set()

                def text():
                    with client.stream("POST", "/v1/completions", json=BODY) as answer:
                        engines.add(answer.headers["x-ridgeline-engine"])
                        lines = [line for line in answer.iter_lines() if '"text":' in line]
                    events = [json.loads(line.removeprefix("data: ")) for line in lines]
                    return "".join(each["choices"][0]["text"] for each in events)

                def ask():
                    found = []
                    while not is_over.is_set():
                        found.append(text())
                    return found

                expected = text()
                running = [threads.submit(ask) for _ in range(4)]
                try:
                    for name in ("1", "2"):
                        gone = client.delete(f"/admin/engines/{name}", headers=ADMIN, timeout=120)
                        assert gone.is_success, gone.text
                    assert not any(node.runs("replica_main") for node in others)
                    for _ in range(2):
                        come = client.post("/admin/engines", headers=ADMIN, timeout=200)
                        assert come.is_success, come.text
                    assert all(node.runs("replica_main") for node in others)
                finally:
                    is_over.set()
                answers = [each for future in running for each in future.result()]
            assert all(each == expected for each in answers)
            assert len(engines) > 1
        finally:
            server.close()

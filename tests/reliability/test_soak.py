"""Item 36: hours of mixed load change neither memory nor what is held at idle.

``SOAK_MINUTES`` says how long (30).
"""

import itertools
import json
import os
import random
import socket
import threading
import time

import numpy as np
import psutil
import pytest
from tests.reliability.process import serve_process
from tests.reliability.test_service import is_idle, wait_until

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
WARM_UP = 0.3  # of the time; what is kept up to a bound fills first
MB_PER_HOUR = 1.0
WORDS = ["the", "cat", "sat", "on", "mat", "naïve", "café", "日本", "\n", "0"]


def load(server, seed, until_s):
    """Requests of every kind, one after the other; some leave in the middle."""
    rng = random.Random(seed)
    with server.client() as client:
        for number in itertools.count():
            if time.monotonic() > until_s:
                return
            prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
            body = {"prompt": prompt, "max_tokens": rng.randint(1, 40), "n": rng.randint(1, 3)}
            match rng.randrange(8):
                case 0:
                    with client.stream(
                        "POST", "/v1/completions", json=body | {"stream": True}
                    ) as r:
                        for _ in r.iter_lines():
                            if rng.random() < 0.05:
                                break
                case 1:
                    messages = [{"role": "user", "content": prompt}]
                    chat = {"messages": messages, "max_tokens": 16, "logprobs": True}
                    assert client.post("/v1/chat/completions", json=chat).status_code == 200
                case 2:
                    schema = {"enum": [f"{seed} {number}", "b"]}
                    chosen = body | {"structured_outputs": {"json": schema}}
                    assert client.post("/v1/completions", json=chosen).status_code == 200
                case 3:
                    wrong = body | {"temperature": -1}
                    assert client.post("/v1/completions", json=wrong).status_code == 400
                    assert client.get(f"/nothing/{number}").status_code == 404
                case 4:
                    leave(server.port, body | {"max_tokens": 1000, "ignore_eos": True})
                case 5:
                    form = {"files": {"file": (prompt[:20], b"x" * 5000)}}
                    file = client.post("/v1/files", data={"purpose": "user_data"}, **form).json()
                    assert client.delete(f"/v1/files/{file['id']}").status_code == 200
                case _:
                    assert client.post("/v1/completions", json=body).status_code == 200


def leave(port, body):
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + text)
        time.sleep(0.02)


def run_largest_steps(client):
    """Full prompts at once, and then as many sequences as may run: kernels keep what the largest
    batch so far has needed, which chance alone would come by late."""
    for first in range(2):
        prompts = [[5 + (first + place * step) % 100 for place in range(1900)] for step in range(4)]
        body = {"prompt": prompts, "n": 2, "max_tokens": 60, "ignore_eos": True, "logprobs": 5}
        assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.slow
def test_memory_stays_where_it_is(roomy_folder, tmp_path, counted):
    # A pool that is full of prefixes before the measurement begins: what is known of each block is
    # kept until another takes its place.
    with serve_process(
        roomy_folder, tmp_path / "data", "--kv-cache-memory-bytes", "8MiB"
    ) as server:
        processes = {"engine": server.engine(), "server": psutil.Process(server.process.pid)}
        with server.client() as client:
            run_largest_steps(client)
        began_s = time.monotonic()
        until_s = began_s + 60 * MINUTES
        threads = [threading.Thread(target=load, args=(server, i, until_s)) for i in range(4)]
        for thread in threads:
            thread.start()
        samples = []
        while time.monotonic() < until_s:
            time.sleep(2)
            mb = [process.memory_info().rss / 1e6 for process in processes.values()]
            samples.append((time.monotonic() - began_s, *mb))
        for thread in threads:
            thread.join()
        with server.client() as client:
            wait_until(lambda: is_idle(client), 5, "requests stay open")
            metrics = client.get("/metrics").text
    (usage,) = [line for line in metrics.splitlines() if line.startswith("vllm:kv_cache_usage")]
    assert float(usage.split()[-1]) == 0, usage
    rows = np.array(samples)
    late = rows[rows[:, 0] > 60 * MINUTES * WARM_UP]
    slopes = np.polyfit(late[:, 0] / 3600, late[:, 1:], 1)[0]
    story = "\n".join(" ".join(f"{each:.1f}" for each in row) for row in rows[:: len(rows) // 30])
    print(f"MB an hour of {list(processes)}: {slopes.round(2)}\n{story}")
    assert slopes.sum() < MB_PER_HOUR
    counted(round(MINUTES))

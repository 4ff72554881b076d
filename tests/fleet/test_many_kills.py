"""Streams of every kind while engines are killed at random: none is lost, hung or changed."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.fleet.conftest import fleet_of, stream
from tests.fleet.reading import read, without_identity
from tests.fleet.test_router import CASES, CHAT, PATH

from ridgeline.weights import locate_model

NUM_STREAMS = int(os.environ.get("KILLED_STREAMS", "200"))
AT_ONCE = 8
PROMPT = {"prompt": "The history of the sea", "max_tokens": 160, "ignore_eos": True}
BODIES = {
    **{name: (PATH, CHAT | fields | {"max_tokens": 160}) for name, fields in CASES.items()},
    "completion": ("/v1/completions", PROMPT | {"temperature": 0.9, "seed": 3, "logprobs": 1}),
    "several": ("/v1/completions", PROMPT | {"seed": 8, "n": 3, "frequency_penalty": 0.3}),
}


@pytest.mark.slow
def test_no_stream_is_lost_or_changed(tmp_path, key_file, counted):
    draw = random.Random(0)
    gaps, kills = [], 0
    with (
        fleet_of(locate_model(None), tmp_path, key_file) as fleet,
        fleet.router.client() as client,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        expected = {
            name: without_identity(read(stream(client, *asked))) for name, asked in BODIES.items()
        }

        def one(name):
            last_s, longest_s = time.monotonic(), 0.0

            def note(number, _):
                nonlocal last_s, longest_s
                now_s = time.monotonic()
                longest_s = max(longest_s, now_s - last_s) if number > 1 else 0.0
                last_s = now_s

            found = read(stream(client, *BODIES[name], on_event=note))
            assert without_identity(found) == expected[name], name
            return longest_s

        names = list(BODIES)
        running = [threads.submit(one, draw.choice(names)) for _ in range(NUM_STREAMS)]
        while not all(each.done() for each in running):
            time.sleep(draw.uniform(0.3, 3.0))
            number = draw.randrange(2)
            if draw.random() < 0.3:  # its server lives, and says in the stream that it is lost
                engine = fleet.engines[number]
                dead = engine.engine()
                dead.send_signal(signal.SIGKILL)
                engine.wait_restarted(dead)
            else:
                fleet.kill(number)
                fleet.restart(number)
                fleet.engines[number].wait_ready()
            kills += 1
            fleet.router.wait_ready(2)
        gaps = sorted(each.result() for each in running)
        metrics = httpx.get(f"{fleet.router.url}/metrics").text
    moved = metrics.partition("\nridgeline_router_continuations_total ")[2].split()[0]
    counted(NUM_STREAMS)
    print(f"{NUM_STREAMS} streams, {kills} kills, {moved} continuations")
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s")
    assert float(moved) > 0

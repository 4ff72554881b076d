"""Streams of every kind while engines and routers are killed at random: none is lost, hung or
changed. Whose router is killed asks again, at the other one."""

import os
import random
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import httpx
import pytest
from tests.fleet.conftest import RefusedError, RouteProcess, fleet_of, stream
from tests.fleet.reading import read, without_identity
from tests.fleet.test_router import CASES, CHAT, PATH

from ridgeline.weights import locate_model

NUM_STREAMS = int(os.environ.get("KILLED_STREAMS", "200"))
AT_ONCE = 4
KINDS = ("server", "engine", "router")  # in turn
NUM_KILLS = max(len(KINDS), NUM_STREAMS // 5)
PROMPT = {"prompt": "The history of the sea", "max_tokens": 160, "ignore_eos": True}
BODIES = {
    **{name: (PATH, CHAT | fields | {"max_tokens": 160}) for name, fields in CASES.items()},
    "completion": ("/v1/completions", PROMPT | {"temperature": 0.9, "seed": 3, "logprobs": 1}),
    "several": ("/v1/completions", PROMPT | {"seed": 8, "n": 3, "frequency_penalty": 0.3}),
}


@pytest.mark.slow
def test_no_stream_is_lost_or_changed(tmp_path, key_file, counted):
    draw = random.Random(0)
    kills, num_done, expected = Counter(), Counter(), {}
    with fleet_of(locate_model(None), tmp_path, key_file) as fleet, ExitStack() as stack:
        routers = [fleet.router, RouteProcess(tmp_path / "router-1.log", *fleet.router.options)]
        stack.callback(lambda: routers[1].close())
        clients = [stack.enter_context(each.client()) for each in routers]
        threads = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        routers[1].wait_ready(2)

        def one(name, first):
            """The stream, its longest silence, and how often it was asked for again."""
            for attempt in range(200):
                last_s, longest_s = time.monotonic(), 0.0

                def note(number, _):
                    nonlocal last_s, longest_s
                    now_s = time.monotonic()
                    longest_s = max(longest_s, now_s - last_s) if number > 1 else 0.0
                    last_s = now_s

                client = clients[(first + attempt) % 2]
                try:
                    found = without_identity(read(stream(client, *BODIES[name], on_event=note)))
                except (httpx.TransportError, RefusedError) as error:
                    # Its router is gone, or knows of no engine: what has begun is never refused.
                    assert isinstance(error, httpx.TransportError) or error.args[0] == 503
                    time.sleep(0.5)
                    continue
                assert name not in expected or found == expected[name], name
                return found, longest_s, attempt
            raise AssertionError("no router answers")

        for name in BODIES:
            expected[name] = one(name, 0)[0]
        is_over, draws = Event(), random.Random(1)

        def keep_asking():
            found = []
            while not is_over.is_set():
                found.append(one(draws.choice(list(BODIES)), draws.randrange(2)))
                num_done.update(streams=1)
            return found

        running = [threads.submit(keep_asking) for _ in range(AT_ONCE)]
        stack.callback(is_over.set)
        while kills.total() < NUM_KILLS or num_done.total() < NUM_STREAMS:
            assert not any(each.done() for each in running), [each.result() for each in running]
            time.sleep(draw.uniform(0.1, 1.0))
            number, kind = draw.randrange(2), KINDS[kills.total() % len(KINDS)]
            if kind == "engine":  # its server lives, and says in the stream that it is lost
                engine = fleet.engines[number]
                dead = engine.engine()
                dead.send_signal(signal.SIGKILL)
                engine.wait_restarted(dead)
            elif kind == "server":
                fleet.kill(number)
                fleet.restart(number)
                fleet.engines[number].wait_ready()
            else:
                routers[number] = routers[number].again()
                fleet.router = routers[0]
            kills[kind] += 1
            for each in routers:
                each.wait_ready(2)
        is_over.set()
        found = [one for each in running for one in each.result()]
        metrics = "".join(httpx.get(f"{each.url}/metrics", timeout=60).text for each in routers)
    gaps, asked_again = sorted(each[1] for each in found), sum(each[2] for each in found)
    counts = re.findall(r"^ridgeline_router_continuations_total (\S+)", metrics, re.MULTILINE)
    moved = sum(map(float, counts))  # since the routers' last starts
    counted(len(found))
    print(f"{len(found)} streams, {dict(kills)} killed, {moved:.0f} continuations since the last "
          f"starts of routers, {asked_again} asked again")  # fmt: skip
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, p99 "
          f"{gaps[len(gaps) * 99 // 100]:.2f} s, most {gaps[-1]:.2f} s")  # fmt: skip
    assert asked_again > 0

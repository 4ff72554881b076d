"""Prompts on one engine, the rest of the output on another: real processes that read each other's
KV over a wire with faults, and are killed meanwhile. No token is lost or changed by any of it."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from tests.fleet.conftest import fleet_of, stream
from tests.fleet.faulty_wire import FaultyWire
from tests.fleet.reading import read, without_identity
from tests.fleet.test_router import CASES, PATH
from tests.reliability.process import free_port

from ridgeline.weights import locate_model

NUM_RUNS = int(os.environ.get("HANDED_OVER_RUNS", "500"))
AT_ONCE = 4
FAULTS = ("none", "none", "none", "slow", "flip", "cut")
MOVES = ("handovers", "continuations")
WORDS = ("sea", "land", "wind", "rain", "stone", "river", "tree", "bird", "road", "house", "light")


def body_of(name, number):
    """A request of a kind, with a prompt of its own of some hundred tokens."""
    words = random.Random(number).choices(WORDS, k=240)
    asked = {"messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 24}
    fields = CASES[name] | {"n": 1, "ignore_eos": name != "grammar"}
    return asked | fields | {"stream_options": {"include_usage": True}}


@contextmanager
def pair_of_engines(tmp_path, key_file):
    """Two engines that read each other's KV over wires, and a router that always hands over."""
    ports = [free_port() for _ in range(2)]
    wires = [FaultyWire(free_port(), port) for port in ports]

    def options(number):
        own = ("--kv-peer-address", f"127.0.0.1:{ports[number]}", "--kv-ram-tier-bytes", "1GiB")
        other = f"127.0.0.1:{wires[1 - number].port}"
        return (*own, "--kv-peers", other, "--kv-peer-key-file", str(key_file))

    always = ("--disaggregate", "always")
    model = locate_model(None)
    with fleet_of(model, tmp_path, key_file, options=always, serve_each=options) as fleet:
        wait_for_sources(fleet)
        yield fleet, wires
    for wire in wires:
        wire.close()


def figure(server, name):
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.split("\n")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def figures(fleet):
    """Streams handed over, streams that went on after a loss, and prompt tokens found in caches."""
    moved = (figure(fleet.router, f"ridgeline_router_{name}_total") for name in MOVES)
    hits = sum(figure(each, "ridgeline:prefix_cache_hits_total") for each in fleet.engines)
    return (*moved, hits)


def wait_for_sources(fleet, seconds=300):
    """Until each engine has written KV and reads of the other, and the router knows."""
    for number, engine in enumerate(fleet.engines):
        with engine.client() as client:
            stream(client, PATH, body_of("greedy", -1 - number))
    deadline_s = time.monotonic() + seconds
    with fleet.router.client() as client:
        while any(figure(each, "ridgeline:kv_peer_up") < 1 for each in fleet.engines):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        while figures(fleet)[0] == 0:
            assert time.monotonic() < deadline_s
            stream(client, PATH, body_of("greedy", -3))


@pytest.fixture(scope="module")
def pair(tmp_path_factory, key_file):
    with pair_of_engines(tmp_path_factory.mktemp("pair"), key_file) as pair:
        yield pair


def test_a_stream_begins_on_one_engine_and_goes_on_on_another_that_reads_its_kv(pair):
    fleet, _ = pair
    with fleet.router.client() as client:
        before, found = figures(fleet), {}
        for number, name in enumerate(CASES):
            found[name] = without_identity(read(stream(client, PATH, body_of(name, number))))
        handed_over, lost, hits = (
            now - then for now, then in zip(figures(fleet), before, strict=True)
        )
        assert (handed_over, lost) == (len(CASES), 0)
        assert hits >= 2 * 480
        for number, name in enumerate(CASES):
            with fleet.engines[number % 2].client() as engine:
                alone = stream(engine, PATH, body_of(name, number))
            assert found[name] == without_identity(read(alone)), name


def faulty_runs(fleet, wires, count, *, kills, seed=0):
    """Streams over wires with faults: the seconds to the end of each. ``kills`` is called a
    hundred times a second with how many are done."""
    draw = random.Random(seed)
    kinds = [(name, number) for number in range(2) for name in CASES]
    with fleet.router.client() as client, ThreadPoolExecutor(AT_ONCE) as threads:
        expected = {}
        for kind in kinds:
            with fleet.engines[0].client() as engine:
                expected[kind] = without_identity(read(stream(engine, PATH, body_of(*kind))))

        def one(run):
            kind = draw.choice(kinds)
            began_s = time.monotonic()
            body = body_of(*kind) | {"cache_salt": f"{seed}/{run}"}
            assert without_identity(read(stream(client, PATH, body))) == expected[kind], kind
            return time.monotonic() - began_s

        running = [threads.submit(one, run) for run in range(count)]
        changes_s = 0.0
        while not all(each.done() for each in running):
            if time.monotonic() >= changes_s:
                changes_s = time.monotonic() + draw.uniform(0.1, 1.0)
                for wire in wires:
                    wire.fault = draw.choice(FAULTS)
            kills(sum(each.done() for each in running))
            time.sleep(0.01)
        return sorted(each.result() for each in running)


def test_faults_of_the_wire_and_a_kill_change_no_token(pair):
    fleet, wires = pair
    before, killed = figures(fleet)[0], []

    def kill(num_done):
        if num_done > 10 and not killed:
            killed.append(figures(fleet)[0])
            fleet.kill(1)

    faulty_runs(fleet, wires, 20, kills=kill)
    assert killed[0] > before
    assert sum(wire.num_faults for wire in wires) > 0


@pytest.mark.slow
def test_no_stream_is_lost_or_changed_in_many_runs(tmp_path, key_file, counted):
    with pair_of_engines(tmp_path, key_file) as (fleet, wires):
        draw = random.Random(1)

        def kill(_):
            if draw.random() < 0.001:
                number = draw.randrange(2)
                fleet.kill(number)
                fleet.restart(number)
                fleet.engines[number].wait_ready()

        seconds = faulty_runs(fleet, wires, NUM_RUNS, kills=kill, seed=1)
        handed_over, moved, _ = figures(fleet)
        faults = sum(wire.num_faults for wire in wires)
    counted(NUM_RUNS)
    print(f"{NUM_RUNS} streams, {handed_over:.0f} handed over, {moved:.0f} moved on after a loss")
    print(f"{faults} faults; median {seconds[len(seconds) // 2]:.2f} s, most {seconds[-1]:.2f} s")
    assert handed_over > NUM_RUNS / 10  # an engine whose wire fails is left alone for a while
    assert moved > 0

"""KV out of other engines: what is read of them, and what happens when they fail or lie."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from tests.engine.test_kv_tiers import PARAMS, PROMPT
from tests.engine.test_kv_tiers import ask as ask_engine
from tests.fakes import FakeExecutor
from tests.kvcache.peer_process import KEY, PeerProcess, free_port
from tests.kvcache.test_tiers import Clock, make_entry
from tests.scheduler.test_scheduler import expected_output, request
from tests.scheduler.test_tiers import ask, evict_all, make_with_tiers, run_saves

from ridgeline import LLM
from ridgeline.core.channel import Channel
from ridgeline.core.config import EngineConfig
from ridgeline.core.doors import Door
from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import SettingsError
from ridgeline.kvcache.tiers import (
    ComingEntries,
    PeerServer,
    PeerTier,
    RamTier,
    peer,
    peer_server,
)
from ridgeline.kvcache.tiers.entry import encode_entry
from ridgeline.kvcache.tiers.peer_messages import (
    PURPOSE,
    AskSizes,
    Entries,
    EntrySizes,
    Hello,
    Question,
)

NUM_FAULTS = int(os.environ.get("PEER_FAULTS", "200"))


@contextmanager
def serving(*numbers, port=0, key=KEY, digest="model", size=1000, **settings):
    """The port of a server of these entries."""
    ram = RamTier(10**9)
    ram.put_all([make_entry(number, size=size) for number in numbers])
    address = ("127.0.0.1", port)
    with closing(PeerServer(address, ram, key=key, digest=digest, **settings)) as server:
        yield server


def tier_of(*ports, key=KEY, digest="model", **settings):
    addresses = [("127.0.0.1", port) for port in ports]
    return closing(PeerTier(addresses, key=key, digest=digest, **settings))


def keys_of(*numbers):
    return [make_entry(number).header.key for number in numbers]


def found(tier, *numbers):
    tier.look(keys_of(*numbers))
    return set(tier.get_all(keys_of(*numbers)))


def wait_for(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_what_several_have_is_found_and_equal():
    with (
        serving(*range(6), size=900_000) as first,
        serving(*range(4, 12), size=900_000) as second,
        tier_of(first.port, second.port) as tier,
    ):
        keys = keys_of(*range(13))
        assert all(map(tier.is_unsure, keys))
        assert not any(map(tier.may_have, keys))
        tier.look(keys)
        assert list(map(tier.may_have, keys)) == [True] * 12 + [False]
        assert not any(map(tier.is_unsure, keys))
        got = tier.get_all(keys)
        assert got == {keys[n]: make_entry(n, size=900_000) for n in range(12)}
        assert tier.usage().num_failures == 0


def test_what_is_not_there_is_asked_for_again_soon():
    ram, clock = RamTier(10**6), Clock()
    with (
        closing(PeerServer(("127.0.0.1", 0), ram, key=KEY, digest="model")) as server,
        tier_of(server.port, clock=clock) as tier,
    ):
        assert found(tier, 1) == set()
        assert not tier.is_unsure(keys_of(1)[0])
        ram.put(make_entry(1))
        clock.now += 1
        assert tier.is_unsure(keys_of(1)[0])
        assert found(tier, 1) == set(keys_of(1))
        ram.close()
        assert tier.get_all(keys_of(1)) == {}
        assert not tier.may_have(keys_of(1)[0])


@pytest.mark.parametrize(
    ("other", "why"),
    [({"key": b"x" * 32}, "has another key"), ({"digest": "other"}, "It computes other KV")],
    ids=["key", "model"],
)
def test_another_key_or_model_is_told_and_never_read(caplog, other, why):
    with serving(1, **other) as server, tier_of(server.port) as tier:
        assert tier.num_absent == 1
        assert found(tier, 1) == set()
        assert why in caplog.text


def test_an_engines_own_address_may_be_among_the_peers(caplog):
    port = free_port()
    with (
        serving(1, port=port) as own,
        serving(2) as other,
        tier_of(port, other.port, server=own) as tier,
    ):
        assert found(tier, 1, 2) == set(keys_of(2))
        assert tier.usage().num_failures == 0
    assert not caplog.text


def test_one_that_comes_later_is_found(monkeypatch):
    monkeypatch.setattr(peer, "_ABSENT_S", 0.02)
    port = free_port()
    with tier_of(port) as tier:
        assert tier.num_absent == 1
        with serving(1, port=port):
            wait_for(lambda: tier.num_absent == 0)
            assert found(tier, 1) == set(keys_of(1))


def test_only_the_key_reads_what_is_encrypted():
    encryption = Encryption(b"k" * 32)
    with serving(1, encryption=encryption) as server:
        with tier_of(server.port, encryption=encryption) as tier:
            assert found(tier, 1) == set(keys_of(1))
        for other in (Encryption(b"x" * 32), None):
            with tier_of(server.port, encryption=other) as tier:
                assert found(tier, 1) == set()
                assert tier.usage().num_failures == 1


def test_what_was_deleted_here_does_not_come_back_from_a_peer():
    with serving(1) as server, tier_of(server.port) as tier:
        assert found(tier, 1) == set(keys_of(1))
        assert tier.delete_tenant("t")
        assert found(tier, 1) == set()
        assert tier.usage().num_failures == 0


@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_a_peer_that_fails_costs_its_bound_once_and_comes_back(monkeypatch, fault):
    monkeypatch.setattr(peer, "_ABSENT_S", 0.2)
    process = PeerProcess(3)
    try:
        with tier_of(process.address[1]) as tier:
            assert found(tier, 0, 1, 2) == set(keys_of(0, 1, 2))
            getattr(process, fault)()
            started_s = time.monotonic()
            for _ in range(20):
                assert tier.get_all(keys_of(0, 1)) == {}
            assert time.monotonic() - started_s < 0.5
            assert not tier.may_have(keys_of(0)[0])
            assert not tier.is_unsure(keys_of(9)[0])
            process.resume() if fault == "pause" else process.start()
            wait_for(lambda: tier.num_absent == 0)
            assert found(tier, 0, 1, 2) == set(keys_of(0, 1, 2))
    finally:
        process.resume()
        process.kill()


def test_a_peer_that_is_silent_costs_nothing_of_what_others_have():
    process = PeerProcess(3)
    try:
        with (
            serving(*range(6)) as other,
            tier_of(process.address[1], other.port) as tier,
        ):
            process.pause()
            assert found(tier, *range(6)) == set(keys_of(*range(6)))
            assert tier.num_absent == 1
    finally:
        process.resume()
        process.kill()


def test_a_round_that_the_rounds_before_left_little_time_loses_no_peer(monkeypatch):
    monkeypatch.setattr(peer, "_LOAD_S", 1e-4)
    monkeypatch.setattr(peer, "_LEAST_BYTES_PER_S", 1e6)
    with serving(1, size=20_000_000) as server, tier_of(server.port) as tier:
        assert found(tier, 1) == set(keys_of(1))
        assert tier.num_absent == 0


@contextmanager
def liar(answer):
    """A peer that has the key and answers each question by ``answer(question)``."""
    door = Door(("127.0.0.1", 0), KEY)

    def talk(channel):
        with suppress(OSError):
            while (question := channel.receive()) is not None:
                said = answer(question)
                if isinstance(said, Iterator):
                    for byte in said:
                        channel.send_encoded(bytes([byte]))
                        time.sleep(0.03)
                else:
                    channel.send_encoded(said) if isinstance(said, bytes) else channel.send(said)

    def listen():
        with suppress(Exception):
            while True:
                stream = door.take(PURPOSE, time.monotonic() + 1000)
                threading.Thread(target=talk, args=(Channel(stream, Question),)).start()

    threading.Thread(target=listen).start()
    with closing(door):
        yield door.port


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


_TRUE = encode_entry(make_entry(1))
LIES = {
    "another's entry": [encode_entry(make_entry(2))],
    "a flipped byte": [flip(_TRUE, len(_TRUE) - 7)],
    "a flipped byte of the header": [flip(_TRUE, 60)],
    "half an entry": [_TRUE[:-100]],
    "nonsense": [b"nonsense" * 40],
    "no value": [],
    "one more": [_TRUE, _TRUE],
    "more than was asked for": [_TRUE + bytes(1 << 20)],
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_an_entry_are_misses_and_end_it(lie):
    def answer(question):
        match question:
            case Hello():
                return Hello("model", b"e")
            case AskSizes(keys=keys):
                return EntrySizes([len(_TRUE)] * len(keys))
        return Entries(LIES[lie])

    with liar(answer) as port, tier_of(port) as tier:
        tier.look(keys_of(1))
        assert tier.may_have(keys_of(1)[0])
        assert tier.get_all(keys_of(1)) == {}
        assert tier.num_absent == tier.usage().num_failures == 1


@pytest.mark.parametrize(
    "said", [EntrySizes([]), Entries([]), b"\xff\xff\xff\x3f", b"\x01\0\0\0\xc1"]
)
def test_one_that_answers_something_else_is_left_alone(said):
    def answer(question):
        return Hello("model", b"e") if isinstance(question, Hello) else said

    with liar(answer) as port, tier_of(port) as tier:
        assert found(tier, 1) == set()
        assert tier.num_absent == tier.usage().num_failures == 1


def test_a_peer_is_left_alone_for_twice_as_long_until_an_entry_is_read_of_it(monkeypatch):
    values, waits = iter(([b"no"], [b"no"], [_TRUE], [b"no"])), []
    call = peer._Peer._start_calling

    def call_at_once(each, wait_s):
        waits.append(wait_s)
        call(each, 0.0)

    def answer(question):
        match question:
            case Hello():
                return Hello("model", b"e")
            case AskSizes():
                return EntrySizes([len(_TRUE)])
        return Entries(next(values))

    monkeypatch.setattr(peer._Peer, "_start_calling", call_at_once)
    with liar(answer) as port, tier_of(port) as tier:
        for _ in range(4):
            wait_for(lambda: tier.num_absent == 0)
            tier._known.clear()
            found(tier, 1)
    assert waits == [0.0, 1.0, 2.0, 1.0]


def test_a_trickle_is_given_up_at_one_deadline(monkeypatch):
    """Each byte comes in time, and the answer never."""
    monkeypatch.setattr(peer, "_LOOK_S", 0.1)
    whole = Channel(None, EntrySizes).encoded(EntrySizes([1000]))

    def answer(question):
        return Hello("model", b"e") if isinstance(question, Hello) else iter(whole)

    with liar(answer) as port, tier_of(port) as tier:
        started_s = time.monotonic()
        assert found(tier, 1) == set()
        assert 0.1 < time.monotonic() - started_s < 0.25
        assert tier.num_absent == 1


def test_callers_are_bounded_and_the_first_goes(monkeypatch):
    monkeypatch.setattr(peer_server, "_MOST_CALLERS", 2)
    monkeypatch.setattr(peer, "_ABSENT_S", 60)
    with (
        serving(1) as server,
        tier_of(server.port) as first,
        tier_of(server.port) as second,
        tier_of(server.port) as third,
    ):
        wait_for(lambda: len(server._callers) == 2)
        assert [len(found(each, 1)) for each in (first, second, third)] == [0, 1, 1]


def pair():
    """The schedulers and executors of two engines that read of each other."""
    ports = [free_port(), free_port()]
    schedulers, executors = [], [FakeExecutor(), FakeExecutor()]
    for number, executor in enumerate(executors):
        ram = RamTier(10**6)
        server = PeerServer(("127.0.0.1", ports[number]), ram, key=KEY, digest="model")
        tier = PeerTier(
            [("127.0.0.1", port) for port in ports], key=KEY, digest="model", server=server
        )
        schedulers.append(make_with_tiers(executor, [ram, tier], in_thread=True, num_blocks=(64,)))
    for scheduler in schedulers:
        wait_for(lambda tier=scheduler.transfers._tiers[1]: tier.num_absent == 1)
    return schedulers, executors


def test_a_prefix_of_one_engine_is_loaded_by_another_and_kept_there(monkeypatch):
    monkeypatch.setattr(peer, "_ABSENT_S", 0.02)
    schedulers, executors = pair()
    tokens, output = ask(schedulers[0], executors[0], 0, range(41), max_tokens=1)
    run_saves(schedulers[0])
    assert tokens == 41
    assert ask(schedulers[1], executors[1], 0, range(41), max_tokens=1) == (1, output)
    run_saves(schedulers[1])
    schedulers[0].close()
    evict_all(schedulers[1])
    assert ask(schedulers[1], executors[1], 0, range(41), max_tokens=1) == (1, output)
    schedulers[1].close()


def test_peers_are_not_asked_for_what_this_engine_has(monkeypatch):
    clock = Clock()
    with serving(*range(3)) as server, tier_of(server.port, clock=clock) as tier:
        executor = FakeExecutor()
        scheduler = make_with_tiers(executor, [RamTier(10**6), tier], num_blocks=(64,))
        ask(scheduler, executor, 0, range(41), max_tokens=1)
        run_saves(scheduler)
        evict_all(scheduler)
        clock.now += 10
        asked = []
        monkeypatch.setattr(tier, "look", asked.extend)
        assert ask(scheduler, executor, 0, range(41), max_tokens=1)[0] == 1
        assert asked == []
        scheduler.close()


def test_entries_that_are_being_written_are_waited_for_and_not_for_long():
    coming, ram = ComingEntries(), RamTier(10**9)
    late, never = make_entry(2, size=100_000), make_entry(3)
    ram.put_all([make_entry(1, size=100_000)])
    server = PeerServer(("127.0.0.1", 0), ram, key=KEY, digest="model", coming=coming)
    with closing(server), tier_of(server.port) as tier:
        assert found(tier, 2, 3) == set()
        tier._known.clear()
        for entry in (late, never):
            coming.add(entry.header.key)
        tier.look(keys_of(1, 2, 3, 4))
        assert [tier.may_have(key) for key in keys_of(1, 2, 3, 4)] == [True, True, True, False]

        def write():
            ram.put(late)
            coming.discard([late.header.key])

        threading.Timer(0.05, write).start()
        started_s = time.monotonic()
        assert set(tier.get_all(keys_of(1, 2, 3))) == set(keys_of(1, 2))
        assert 0.05 < time.monotonic() - started_s < 1.0
        assert not tier.may_have(never.header.key)
        assert tier.num_absent == 0


def test_a_tier_knows_how_fast_its_peers_are_and_how_often_they_failed():
    with serving(1, 2, size=1 << 20) as server, tier_of(server.port, free_port()) as tier:
        figures = tier.figures()
        assert figures.engine == ""  # it gives nothing out
        there, absent = figures.peers
        assert (there.engine, there.bytes_per_s) == (server.hello.engine.hex(), 0.0)
        assert (absent.engine, absent.is_absent) == ("", True)
        assert found(tier, 1, 2) == set(keys_of(1, 2))
        there = tier.figures().peers[0]
        assert 1e6 < there.bytes_per_s < 1e11
        server.close()
        tier._known.clear()
        assert found(tier, 1) == set()
        there = tier.figures().peers[0]
        assert (there.is_absent, there.num_failures) == (True, 1)


def test_no_door_stays_open_where_another_tier_cannot_be_made(model_folder, tmp_path):
    key, port = tmp_path / "key", free_port()
    key.touch(mode=0o600)
    key.write_bytes(KEY)
    settings = {
        "kv_peer_address": f"127.0.0.1:{port}",
        "kv_ram_tier_bytes": 2**20,
        "kv_peer_key_file": str(key),
        "kv_redis_url": "http://127.0.0.1:1",
    }
    with pytest.raises(SettingsError, match="no URL of a Redis server"):
        LLM(str(model_folder), **settings)
    with serving(1, port=port):
        pass


def test_an_engine_reads_the_prefix_of_another_and_another_dtype_does_not(model_folder, tmp_path):
    key, address = tmp_path / "key", f"127.0.0.1:{free_port()}"
    key.touch(mode=0o600)
    key.write_bytes(KEY)
    plain = ask_engine(model_folder)
    settings = {"dtype": "float64", "block_tokens": 4, "max_num_seqs": 4}
    own = {"kv_peer_address": address, "kv_ram_tier_bytes": 2**20, "kv_peer_key_file": str(key)}
    peers = {"kv_peers": (address,), "kv_peer_key_file": str(key)}
    with LLM(str(model_folder), **settings, **own) as first:
        (result,) = first.generate([PROMPT], PARAMS)
        assert result.outputs[0].token_ids == plain[1]
        ram = first._engine.scheduler.transfers._tiers[0]
        wait_for(lambda: ram.usage().num_entries >= len(PROMPT) // 4)
        assert ask_engine(model_folder, **peers) == (56, plain[1])
        assert ask_engine(model_folder, dtype="float32", **peers)[0] == 0
        assert ask_engine(model_folder, salt="tenant", **peers)[0] == 0
    assert ask_engine(model_folder, **peers) == plain


def faulty_runs(count, monkeypatch, seed=0):
    """Two engines that read of each other, to which something happens between requests."""
    monkeypatch.setattr(peer, "_ABSENT_S", 0.02)
    monkeypatch.setattr(peer, "_LOOK_S", 0.05)
    monkeypatch.setattr(peer, "_ROUND_S", 0.05)
    monkeypatch.setattr(peer, "_MISSING_S", 0.0)
    rng, hits, fault = random.Random(seed), 0, "none"
    true_values = PeerServer._values

    def values(server, keys):
        found = true_values(server, keys)
        held = [number for number, value in enumerate(found) if value]
        if fault == "flip" and held:
            number = rng.choice(held)
            found[number] = flip(found[number], rng.randrange(len(found[number])))
        elif fault == "swap":
            found.reverse()
        elif fault == "cut" and held:
            found[held[-1]] = found[held[-1]][: rng.randrange(len(found[held[-1]]))]
        elif fault == "silence":
            time.sleep(0.1)
        elif fault == "break":
            raise OSError("broken")
        return found

    monkeypatch.setattr(PeerServer, "_values", values)
    schedulers, executors = pair()
    for number in range(count):
        fault = rng.choice(["none", "none", "flip", "swap", "cut", "silence", "break"])
        prompt = [rng.randrange(3)] * 17 + [rng.randrange(30)] * 24
        which = rng.randrange(2)
        before = schedulers[which].num_loads
        _, output = ask(schedulers[which], executors[which], number % 2, prompt, max_tokens=3)
        assert output == expected_output(request(number % 2, prompt, max_tokens=3), 0, 64)
        hits += schedulers[which].num_loads - before
        pool = schedulers[which].prefix_cache.pools[0]
        pool.release(pool.allocate(pool.num_free))
        if rng.random() < 0.3:
            schedulers[which].transfers._tiers[0].close()  # it forgets
        time.sleep(0.02 if fault != "none" else 0)
    for scheduler in schedulers:
        run_saves(scheduler)
        scheduler.close()
    return hits


def test_no_fault_of_a_peer_changes_a_token(monkeypatch):
    assert faulty_runs(40, monkeypatch) > 0


@pytest.mark.slow
def test_many_faults_of_peers_change_no_token(monkeypatch, counted):
    assert faulty_runs(5 * NUM_FAULTS, monkeypatch, seed=1) > NUM_FAULTS / 10
    counted(5 * NUM_FAULTS)


def test_settings_that_lack_one_another_are_told():
    for settings, lacking in (
        ({"kv_peers": ("a:1",)}, "kv_peer_key_file"),
        ({"kv_peer_address": "a:1", "kv_peer_key_file": "k"}, "kv_ram_tier_bytes"),
        ({"kv_peer_key_file": "k"}, "kv_peers or kv_peer_address"),
    ):
        with pytest.raises(SettingsError, match=f"no effect without {lacking}"):
            EngineConfig(**settings)

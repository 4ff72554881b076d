"""The tier in a real Redis server: what two engines share, and what they do when it fails."""

import os
import random
import socketserver
import threading
import time
from contextlib import contextmanager

import pytest
from tests.engine.test_kv_tiers import ask as ask_engine
from tests.fakes import FakeExecutor
from tests.kvcache.redis_server import start_redis
from tests.kvcache.test_tiers import make_entry
from tests.reliability.process import free_port
from tests.scheduler.test_scheduler import expected_output, request
from tests.scheduler.test_tiers import ask, make_with_tiers, run_saves
from tests.server.test_peers import certificate

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import SettingsError
from ridgeline.core.settings.kv import REDIS_PASSWORD
from ridgeline.kvcache.tiers import RedisTier
from ridgeline.kvcache.tiers import redis as redis_tier

NUM_FAULTS = int(os.environ.get("REDIS_FAULTS", "200"))


def tier_of(server, **settings):
    return RedisTier(server.url, namespace="model", **settings)


def keys_of(*numbers):
    return [make_entry(number).header.key for number in numbers]


def found(tier, *numbers):
    tier.look(keys_of(*numbers))
    return tier.get_all(keys_of(*numbers))


def test_what_one_puts_another_finds(redis_server):
    first, second = tier_of(redis_server), tier_of(redis_server)
    entries = [make_entry(number, size=900_000) for number in range(9)]
    first.put_all(entries)
    assert second.is_unsure(entries[0].header.key)
    assert not second.may_have(entries[0].header.key)
    assert found(second, *range(9)) == {each.header.key: each for each in entries}
    second.look(keys_of(10))
    assert not second.is_unsure(keys_of(10)[0]) and not second.may_have(keys_of(10)[0])
    assert second.touch_all(keys_of(1, 10, 3)) == set(keys_of(1, 3))
    other = RedisTier(redis_server.url, namespace="another")
    assert found(other, *range(9)) == {}
    redis_server.client().flushall()
    assert second.may_have(keys_of(0)[0])  # for a while
    assert second.get_all(keys_of(0)) == {}
    assert not second.may_have(keys_of(0)[0])


def test_entries_come_in_rounds_of_about_so_many_bytes(redis_server, monkeypatch):
    tier = tier_of(redis_server)
    tier.put_all([make_entry(number) for number in range(7)])
    size = tier.usage().num_bytes // 7
    monkeypatch.setattr(redis_tier, "_ROUND_BYTES", 3 * size)
    before = redis_server.client().info("commandstats")
    assert set(found(tier, *range(7))) == set(keys_of(*range(7)))
    after = redis_server.client().info("commandstats")
    assert after["cmdstat_mget"]["calls"] == 3
    assert "cmdstat_mget" not in before


def test_of_a_full_server_no_more_is_asked_than_a_round(redis_server, monkeypatch):
    monkeypatch.setattr(redis_tier, "_ROUND_BYTES", 3000)
    redis_server.client().config_set("maxmemory", 1)
    tier = tier_of(redis_server)
    tier.put_all([make_entry(number) for number in range(7)])  # each of 1,000 bytes and a header
    assert tier.usage().num_failures == 3


def test_a_server_is_used_again_only_once_it_answers(redis_server, monkeypatch):
    monkeypatch.setattr(redis_tier, "_ABSENT_S", 0.01)
    tier = tier_of(redis_server)
    tier.put_all([make_entry(0)])
    redis_server.kill()
    assert found(tier, 0) == {}
    pings = []
    monkeypatch.setattr(tier._redis, "ping", lambda: pings.append(tier.is_absent) or 1 / 0)
    wait_for(lambda: len(pings) > 1)
    assert all(pings) and tier.is_absent and not tier.may_have(keys_of(0)[0])
    monkeypatch.setattr(tier._redis, "ping", lambda: True)
    wait_for(lambda: not tier.is_absent)


def test_entries_expire_unless_they_are_used(redis_server):
    tier = tier_of(redis_server, ttl_s=0.4)
    tier.put_all([make_entry(0), make_entry(1)])
    for _ in range(3):
        time.sleep(0.2)
        tier.touch_all(keys_of(0))
    assert set(found(tier, 0, 1)) == set(keys_of(0))


def delete(tier, tenant):
    while not tier.delete_tenant(tenant):
        pass


def test_a_tenants_entries_are_deleted_also_after_the_server_was_away(redis_server, monkeypatch):
    monkeypatch.setattr(redis_tier, "_ABSENT_S", 0.05)
    tier, others = tier_of(redis_server), RedisTier(redis_server.url, namespace="another")
    for each in (tier, others):
        each.put_all([make_entry(number, tenant="ab"[number % 2]) for number in range(2500)])
    delete(tier, "b")
    assert redis_server.client().dbsize() == 2500
    assert set(found(others, 0, 1)) == set(keys_of(0))
    redis_server.pause()
    assert tier.delete_tenant("a")
    assert tier.is_absent
    redis_server.resume()
    wait_for(lambda: not tier.is_absent)
    assert redis_server.client().dbsize() == 0


def wait_for(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_only_the_key_reads_what_is_encrypted(redis_server):
    entry = make_entry(0, tenant="somebody", size=200_000)
    tier = tier_of(redis_server, encryption=Encryption(b"k" * 32))
    tier.put_all([entry])
    (name,) = redis_server.client().keys()
    stored = redis_server.client().get(name)
    assert not any(plain in stored for plain in (entry.kv[:16], b"somebody", b"RLKV"))
    assert found(tier, 0) == {entry.header.key: entry}
    redis_server.client().copy(name, name[:-1] + b"f")
    assert found(tier, 15) == {}  # another's name
    other = tier_of(redis_server, encryption=Encryption(b"x" * 32))
    assert found(other, 0) == {}
    assert other.usage().num_failures == 1
    assert redis_server.client().dbsize() == 0


def test_deleting_among_many_entries_of_others_takes_a_round_at_a_time(redis_server, monkeypatch):
    """Requests of other tenants wait for the thread that does it."""
    monkeypatch.setattr(redis_tier, "_DELETE_S", 0.0)
    tier, client = tier_of(redis_server), redis_server.client()
    client.mset({f"rl:other:{number}": b"x" for number in range(5000)})
    tier.put_all([make_entry(number, tenant="a") for number in range(2)])
    num_calls = 1
    while not tier.delete_tenant("a"):
        num_calls += 1
        assert found(tier, 0, 1) == {}
    assert num_calls > 10
    assert client.dbsize() == 5000


def test_what_others_wrote_under_our_names_is_a_miss_and_ends_nothing(redis_server):
    tier, client = tier_of(redis_server), redis_server.client()
    tier.put_all([make_entry(number, tenant="a") for number in range(4)])
    names = [tier._name(key) for key in keys_of(*range(4))]
    client.delete(*names[1:])
    client.lpush(names[1], "x")
    client.hset(names[2], "x", "y")
    client.set(names[3], "x")
    client.sadd("rl:somebody", "x")
    reader = tier_of(redis_server)
    assert set(found(reader, *range(4))) == set(keys_of(0))
    assert reader.usage().num_failures == 3
    assert not reader.is_absent
    assert client.dbsize() == 2
    client.lpush(names[1], "x")  # after it was seen as an entry
    assert set(tier.get_all(keys_of(0, 1))) == set(keys_of(0))
    delete(tier, "a")
    assert not tier.is_absent
    assert set(client.keys()) == {b"rl:somebody", names[1]}


_NO_ANSWERS = (
    b":x\r\n", b"*1\r\n" * 3000, b"*-5\r\n", b"+\xff\r\n", b"*2\r\n+a\r\n+b\r\n", b"(9\r\n",
    b",1.x\r\n", b"#t\r\n", b"_\r\n", b"$2\r\nab\r\n", b"*0\r\n", b":-1\r\n", b"-MOVED\r\n",
    b"-WRONGTYPE\r\n", b"-ASK x\r\n", b"%1\r\n", b"*1\r\n$-1\r\n", b"*1\r\n*0\r\n",
    b"=7\r\ntxt:abc\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n",
)  # fmt: skip


@contextmanager
def foreign_server():
    """Something that greets as Redis does, and answers what it is ``asked`` by its ``says``."""

    class Talk(socketserver.BaseRequestHandler):
        def handle(self):
            while data := self.request.recv(1 << 16):
                if b"HELLO" in data:
                    self.request.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                elif b"CLIENT" in data:
                    self.request.sendall(b"+OK\r\n" * data.count(b"CLIENT"))
                elif b"PING" in data:
                    self.request.sendall(b"+PONG\r\n")
                else:
                    self.server.asked += data
                    self.request.sendall(2 * self.server.says)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield server
        finally:
            server.shutdown()


def test_nothing_that_a_server_answers_is_more_than_a_miss():
    with foreign_server() as server:
        url = f"redis://127.0.0.1:{server.server_address[1]}"
        for server.says in _NO_ANSWERS:
            for command, act in (
                (b"STRLEN", lambda tier: tier.look(keys_of(1, 2))),
                (b"MGET", lambda tier: tier.get_all(keys_of(1, 2))),
                (b"PEXPIRE", lambda tier: tier.touch_all(keys_of(1, 2))),
                (b"SET", lambda tier: tier.put_all([make_entry(1)])),
                (b"SCAN", lambda tier: tier.delete_tenant("t")),
            ):
                server.asked = b""
                tier = RedisTier(url, namespace="model")
                for key in keys_of(1, 2):
                    tier._note(key, 100)
                act(tier)
                assert command in server.asked
                assert tier.get_all(keys_of(1, 2)) == {}
                tier.close()


def test_a_full_server_is_read_and_no_longer_written():
    server = start_redis("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = tier_of(server)
    tier.put_all([make_entry(number, size=200_000) for number in range(20)])
    kept = found(tier, *range(20))
    assert 0 < len(kept) < 20
    failures = tier.usage().num_failures
    assert failures > 0
    tier.put_all([make_entry(30)])
    assert tier.usage().num_failures == failures
    assert tier.touch_all(keys_of(30)) == keys_of(30)  # so that it is not written again and again
    server.close()


def test_a_silent_server_costs_its_bound_once(redis_server):
    tier = tier_of(redis_server)
    tier.put_all([make_entry(0)])
    client = redis_server.client()
    connections = client.info("stats")["total_connections_received"]
    redis_server.pause()
    started_s = time.monotonic()
    for _ in range(20):
        assert tier.get_all(keys_of(0)) == {}
    assert time.monotonic() - started_s < 1
    redis_server.resume()
    assert client.info("stats")["total_connections_received"] == connections  # nor tried again
    assert not tier.may_have(keys_of(0)[0])
    assert not tier.is_unsure(keys_of(0)[0])


def test_passwords_are_asked_for_and_never_settings():
    server = start_redis("--requirepass", "secret")
    assert found(tier_of(server, password="secret"), 0) == {}
    for password in (None, "wrong"):
        with pytest.raises(SettingsError, match="refuses") as error:
            tier_of(server, password=password)
        assert "wrong" not in str(error.value)
    server.close()
    for url in ("redis://:secret@host", "redis://host?password=secret"):
        with pytest.raises(SettingsError, match=REDIS_PASSWORD) as error:
            EngineConfig(kv_redis_url=url)
        assert "secret" not in str(error.value)
    with pytest.raises(SettingsError, match="no URL of a Redis server"):
        RedisTier("http://host", namespace="m")


@contextmanager
def tls_server(folder, *options):
    """One with TLS as well, under a certificate of 127.0.0.1; its URL without who signs that."""
    certificate(folder)
    port = str(free_port())
    names = {"cert-file": "cert.pem", "key-file": "key.pem", "ca-cert-file": "cert.pem"}
    files = [part for name, file in names.items() for part in (f"--tls-{name}", folder / file)]
    server = start_redis("--tls-port", port, *map(str, files), *options)
    yield server, f"rediss://127.0.0.1:{port}"
    server.close()


def test_over_tls_it_is_the_same(tmp_path):
    with tls_server(tmp_path, "--tls-auth-clients", "no") as (server, url):
        trusted = f"?ssl_ca_certs={tmp_path}/cert.pem"
        first, second = (RedisTier(url + trusted, namespace="model") for _ in "ab")
        entries = [make_entry(number, size=900_000) for number in range(9)]
        first.put_all(entries)
        assert found(second, *range(9)) == {each.header.key: each for each in entries}
        for wrong in (url, url.replace("127.0.0.1", "localhost") + trusted):
            with pytest.raises(SettingsError, match=r"is not trusted .*ssl_ca_certs=FILE"):
                RedisTier(wrong, namespace="model")
        server.pause()
        started_s = time.monotonic()
        for _ in range(20):
            assert second.get_all(keys_of(0)) == {}
        assert time.monotonic() - started_s < 1


def test_over_tls_clients_have_certificates_where_they_are_asked_for(tmp_path, caplog):
    with tls_server(tmp_path) as (_, url):
        url += f"?ssl_ca_certs={tmp_path}/cert.pem"
        mine = f"&ssl_certfile={tmp_path}/cert.pem&ssl_keyfile={tmp_path}/key.pem"
        tier = RedisTier(url + mine, namespace="model")
        tier.put_all([make_entry(0)])
        assert list(found(tier, 0)) == keys_of(0)
        assert not caplog.text
        assert RedisTier(url, namespace="model").is_absent
        assert "ConnectionError (Error" in caplog.text  # which one depends on who ends first


def test_an_option_of_the_url_that_there_is_not_is_said():
    for url in ("redis://host?nonsense=1", "redis://host?db=x"):
        with pytest.raises(SettingsError, match=r"options \(.*(nonsense|db)"):
            RedisTier(url, namespace="m")


def test_a_password_that_breaks_the_url_is_not_told():
    with pytest.raises(SettingsError, match="%2F") as caught:
        RedisTier("redis://user:sec/ret@host:6379/0", namespace="m")
    assert "sec" not in str(caught.value)


def test_an_engine_starts_without_its_server(model_folder):
    plain = ask_engine(model_folder)
    assert ask_engine(model_folder, kv_redis_url="unix:///nowhere") == plain


def test_a_second_engine_hits_and_another_dtype_does_not(model_folder, redis_server):
    plain = ask_engine(model_folder)
    shared = {"kv_redis_url": redis_server.url, "kv_ram_tier_bytes": 2**20}
    assert ask_engine(model_folder, **shared) == plain
    assert ask_engine(model_folder, **shared) == (56, plain[1])
    assert ask_engine(model_folder, dtype="float32", **shared)[0] == 0
    assert ask_engine(model_folder, salt="tenant", **shared)[0] == 0


def faulty_runs(server, count, monkeypatch, seed=0):
    """Two engines with one server, to which something happens between requests and within them."""
    monkeypatch.setattr(redis_tier, "_ABSENT_S", 0.02)
    monkeypatch.setattr(redis_tier, "_MOST_ABSENT_S", 0.02)
    monkeypatch.setattr(redis_tier, "_TIMEOUT_S", 0.02)
    rng, hits = random.Random(seed), 0
    executors = [FakeExecutor(), FakeExecutor()]
    tiers = [tier_of(server) for _ in executors]
    schedulers = [
        make_with_tiers(executor, [tier], in_thread=True, num_blocks=(64,))
        for executor, tier in zip(executors, tiers, strict=True)
    ]

    def corrupt():
        client = server.client()
        client.config_set("maxmemory", 0)
        for name in client.scan_iter():
            client.setrange(name, rng.randrange(32, client.strlen(name)), b"\x00\xff")

    def refill():
        server.client().config_set("maxmemory", rng.choice([0, 1]))

    def restart():
        server.kill()
        server.start()

    faults = [corrupt, refill, restart, server.pause, server.client().flushall]
    for number in range(count):
        prompt = [rng.randrange(3)] * 17 + [rng.randrange(4)] * 24
        which = rng.randrange(2)
        before = schedulers[which].num_loads
        _, output = ask(schedulers[which], executors[which], number % 2, prompt, max_tokens=3)
        assert output == expected_output(request(number % 2, prompt, max_tokens=3), 0, 64)
        hits += schedulers[which].num_loads - before
        for scheduler in schedulers:
            pool = scheduler.prefix_cache.pools[0]
            pool.release(pool.allocate(pool.num_free))
        server.resume()
        if rng.random() < 0.5:
            rng.choice(faults)()
        else:
            run_saves(schedulers[which])
            deadline_s = time.monotonic() + 10
            while any(tier.is_absent for tier in tiers):
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
    server.resume()
    for scheduler in schedulers:
        run_saves(scheduler)
        scheduler.close()
    return hits


def test_no_fault_of_the_server_changes_a_token(redis_server, monkeypatch):
    assert faulty_runs(redis_server, 40, monkeypatch) > 0


@pytest.mark.slow
def test_many_faults_of_the_server_change_no_token(redis_server, monkeypatch, counted):
    assert faulty_runs(redis_server, 5 * NUM_FAULTS, monkeypatch, seed=1) > NUM_FAULTS / 10
    counted(5 * NUM_FAULTS)


@pytest.mark.slow
@pytest.mark.alone
def test_a_server_that_is_stopped_or_killed_delays_no_first_token(redis_server, counted):
    """p99 of the seconds to the first token is at most 1.1 times that of no tier."""
    params, rng = SamplingParams(max_tokens=1, temperature=0), random.Random(0)
    seconds = {"plain": [], "tier": []}
    with LLM() as plain, LLM(kv_redis_url=redis_server.url) as tier:

        def ask_both(times):
            for number in range(times):
                prompt = [rng.randrange(300) for _ in range(256)]
                both = [("plain", plain), ("tier", tier)]
                for name, llm in both if number % 2 else reversed(both):
                    began_s = time.perf_counter()
                    llm.generate([prompt], [params])
                    seconds[name].append(time.perf_counter() - began_s)

        ask_both(50)
        for each in seconds.values():
            each.clear()
        redis_server.pause()
        ask_both(500)
        redis_server.kill()
        ask_both(500)
    p99 = {name: sorted(each)[int(0.99 * len(each))] for name, each in seconds.items()}
    assert max(seconds["tier"]) > 0.2, "nobody waited for the server that was stopped"
    assert p99["tier"] <= 1.1 * p99["plain"], p99
    counted(1000)

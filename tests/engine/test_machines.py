"""Stages on another machine, a network namespace where one can be made: the same tokens, and what
happens when it is lost, has another model, another kind of kernels or another key."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import pytest
from tests.equivalence.conftest import opener, write_pairs

from ridgeline import LLM, SamplingParams
from ridgeline.core import doors
from ridgeline.core.config import EngineConfig
from ridgeline.core.doors import JOINING, Door, connect, read_address
from ridgeline.core.encryption import read_key
from ridgeline.core.errors import EngineError, NetworkError, SettingsError
from ridgeline.executors.distributed import executor as distributed
from ridgeline.executors.distributed.machines import Identity
from ridgeline.executors.distributed.ranks import Silence
from ridgeline.executors.distributed.worker import JoiningMachine
from ridgeline.executors.distributed.workers import Workers
from ridgeline.kernels.cpu.library import native_kernels_run

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")

SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=2, frequency_penalty=0.3)
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
PROMPTS = [[5 + token % 90 for token in range(40)] + [7 * n + 5] * (3 + 9 * n) for n in range(4)]
NOTICED_S = 10.0


@pytest.fixture(scope="module")
def network():
    """Command that runs another in another network, the address of this side, and the cut."""
    name = f"rl{os.getpid()}"
    net = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        yield [], "127.0.0.1", None
        return
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", f"{name}p", "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", name)
        ip("link", "set", name, "up")
        inside = ["netns", "exec", name, "ip"]
        ip(*inside, "addr", "add", f"{net}.2/30", "dev", f"{name}p")
        ip(*inside, "link", "set", f"{name}p", "up")
        yield ["ip", "netns", "exec", name], f"{net}.1", partial(ip, "link", "set", name)
    finally:
        ip("netns", "del", name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("machines")
    write_pairs(root)
    (root / "key").write_bytes(secrets.token_bytes(32))
    (root / "key").chmod(0o600)
    return root


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def _worker(folder, address, prefix):
    command = [*prefix, sys.executable, "-m", "ridgeline", "worker", "--join", address]
    command += ["--key-file", str(folder / "key")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ranks_of(worker):
    return psutil.Process(worker.pid).children(recursive=True)


def _settings(folder, address, **more):
    key = str(folder / "key")
    ranks = {"pipeline_parallel_size": 2, "workers": 1, "max_model_len": 160}
    return {**ranks, "worker_address": address, "worker_key_file": key, **more}


def _tokens(llm):
    return [each.token_ids for output in llm.generate(PROMPTS, SAMPLED) for each in output.outputs]


def test_stages_on_two_machines(folder, network, monkeypatch):
    prefix, host, cut = network
    quick = partial(distributed.Ranks, silence=Silence(serving_s=2.0))
    monkeypatch.setattr(distributed, "Ranks", lambda *args: quick(*args[:3], workers=args[4]))
    open_llm = opener(folder, "cpu")
    with open_llm("off", max_model_len=160) as llm:
        expected = _tokens(llm)
    address = f"{host}:{_free_port()}"
    settings = _settings(folder, address)
    with _worker(folder, address, prefix) as worker:
        with open_llm("off", **settings) as llm:
            assert _tokens(llm) == expected
            executor = llm._engine.executor
            assert len(executor.rank_pids) == 1 and executor.num_ranks == 2
            stream = llm.stream([9, 8, 7], LONG)
            next(stream)
            _ranks_of(worker)[0].kill()
            with pytest.raises(
                EngineError, match=r"Rank 1 on .* was lost: it was ended by SIGKILL"
            ):
                for _ in stream:
                    pass
        with open_llm("off", **settings) as llm:  # which it joins again
            assert _tokens(llm) == expected
            stream = llm.stream([9, 8, 7], LONG)
            next(stream)
            begin_s, ranks = time.monotonic(), _ranks_of(worker)
            if cut is not None:
                cut("down")
            else:
                ranks[0].send_signal(signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"Rank 1 on .* was lost: it was silent"):
                for _ in stream:
                    pass
            assert time.monotonic() - begin_s < NOTICED_S
        # Nobody tells a worker that is cut off: it ends its ranks by itself.
        assert psutil.wait_procs(ranks, timeout=NOTICED_S)[1] == []
        if cut is not None:
            cut("up")


def _turned_away(folder, *, model=None):
    """What a machine that joins is told, by a driver of the model."""
    settings = _settings(folder, "127.0.0.1:0", model=str(folder / "full"))
    workers, said = Workers(EngineConfig(**settings)), []
    address = ("127.0.0.1", workers._door.port)
    try:
        with pytest.raises(SettingsError) as turned:
            JoiningMachine(address, _key(folder), model, said.append).run()
    finally:
        workers.close()
    assert said == [f"Joined 127.0.0.1:{address[1]}."]
    return str(turned.value)


def _key(folder):
    return read_key(folder / "key")


def test_a_machine_with_another_model_is_turned_away(folder):
    why = _turned_away(folder, model=str(folder / "full-draft"))
    assert why.endswith(
        "turned this machine away: its files of the model are not those of the driver."
    )


def test_a_machine_with_other_kernels_is_turned_away(folder, monkeypatch):
    def own():
        driver = threading.current_thread() is not threading.main_thread()
        return Identity("9.9", "avx2, boundary 1") if driver else actual

    actual = Identity.own()
    monkeypatch.setattr(Identity, "own", own)
    why = _turned_away(folder)
    assert f"it runs {actual.version} with kernels {actual.kernels}, and the driver 9.9" in why


def test_workers_that_do_not_come_are_not_waited_for_for_ever(folder):
    address = f"127.0.0.1:{_free_port()}"
    with pytest.raises(NetworkError, match=f"0 of 1 workers joined at {address} within 0.2 s"):
        opener(folder, "cpu")("off", **_settings(folder, address, worker_wait_s=0.2))
    with socket.create_server(("127.0.0.1", read_address(address)[1])):
        pass  # nobody listens there any more


def test_a_door_opens_to_those_who_have_the_key(monkeypatch):
    monkeypatch.setattr(doors, "_PROVE_S", 0.3)
    key, purpose = secrets.token_bytes(32), secrets.token_bytes(16)
    door = Door(("127.0.0.1", 0), key)
    address = ("127.0.0.1", door.port)
    try:
        caller = connect(address, key, purpose)
        with caller, door.take(purpose, time.monotonic() + 5) as taken:
            caller.sendall(b"x" * 100_000)
            assert taken.recv(1) == b"x"
        with pytest.raises(NetworkError, match="has another key"):
            connect(address, secrets.token_bytes(32), purpose)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"ridgeline ranks 1" + bytes(80)):
            with socket.create_connection(address, timeout=5) as stranger:
                stranger.sendall(said)
                with suppress(ConnectionResetError):
                    while stranger.recv(1000):
                        pass  # until it is closed
        with pytest.raises(NetworkError, match="did not connect in time"):
            door.take(JOINING, time.monotonic() + 0.1)
    finally:
        door.close()
    with pytest.raises(OSError, match="refused"):
        connect(address, key, purpose)


def test_a_crowd_that_proves_nothing_keeps_nobody_out():
    key = secrets.token_bytes(32)
    door = Door(("127.0.0.1", 0), key)
    address = ("127.0.0.1", door.port)
    crowd = [socket.create_connection(address, timeout=5) for _ in range(200)]
    for _ in range(20):
        purpose = secrets.token_bytes(16)
        with connect(address, key, purpose), door.take(purpose, time.monotonic() + 5):
            crowd.append(socket.create_connection(address, timeout=5))
    assert len(door._unproven) <= 64
    for stream in crowd[:100]:
        assert stream.recv(1) == b""
    for stream in crowd:
        stream.close()
    door.close()


def test_one_who_sends_a_proof_in_parts_has_the_time_of_one(monkeypatch):
    monkeypatch.setattr(doors, "_PROVE_S", 0.3)
    door = Door(("127.0.0.1", 0), b"k" * 32)
    with socket.create_connection(("127.0.0.1", door.port), timeout=5) as slow:
        for part in (b"ridgeline ranks 1", bytes(32)):
            slow.sendall(part)
            time.sleep(0.2)
        with suppress(OSError):  # it is closed
            slow.sendall(bytes(16))
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
    door.close()


def test_a_recorded_proof_opens_nothing():
    """What one connection said is said again: the door has another nonce by then."""
    key, said = secrets.token_bytes(32), []
    door = Door(("127.0.0.1", 0), key)
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay():
            caller, _ = between.accept()
            with caller, socket.create_connection(("127.0.0.1", door.port)) as onward:
                said.append(caller.recv(1000))
                onward.sendall(said[0])
                caller.sendall(onward.recv(1000))
                said.append(caller.recv(1000))

        thread = threading.Thread(target=relay)
        thread.start()
        connect(("127.0.0.1", between.getsockname()[1]), key).close()
        thread.join()
    with socket.create_connection(("127.0.0.1", door.port), timeout=5) as again:
        again.sendall(said[0])
        again.recv(1000)
        again.sendall(said[1])
        assert again.recv(1000) == b""
    door.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pipeline_parallel_size": 3}, "2 machines do not share 3 ranks equally"),
        ({"pipeline_parallel_size": 1, "tensor_parallel_size": 2}, "do not share 1 stages equally"),
        ({"worker_key_file": None}, "workers needs worker_key_file"),
        ({"worker_address": "here"}, "'here' is no address: expected HOST:PORT"),
        ({"pipeline_parallel_size": 1}, "2 machines do not share 1 ranks equally"),
    ],
)
def test_what_machines_cannot_share_is_refused(folder, settings, why):
    with pytest.raises(SettingsError, match=why):
        LLM(str(folder / "full"), executor="cpu", **_settings(folder, "127.0.0.1:0", **settings))


def test_an_address():
    assert read_address("[::1]:70") == ("::1", 70)
    for wrong in ("a..b:70", "http://a:70", "a:70,b:70"):
        with pytest.raises(SettingsError, match="no name of a host"):
            read_address(wrong)
    for wrong in ("", "a", ":70", "a:", "a:x", "a:70000"):
        with pytest.raises(SettingsError, match="expected HOST:PORT"):
            read_address(wrong)

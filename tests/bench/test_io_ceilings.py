"""Disk, network and the bus: real files and connections, small ones."""

import json
import os
import socket
import threading

import pytest
from tests.bench.test_ceilings import FakeLoops

from ridgeline.bench import io_ceilings, native_loops
from ridgeline.cli.main import main
from ridgeline.core.errors import DiskError, InvalidRequestError, MachineError


@pytest.mark.parametrize("has_direct", [True, False])
def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path, monkeypatch, has_direct):
    if not has_direct:
        open_file, direct = os.open, os.O_DIRECT

        def refuse(path, flags, *rest, **options):
            if flags & direct:
                raise OSError(22, "Invalid argument")
            return open_file(path, flags, *rest, **options)

        monkeypatch.setattr(io_ceilings.os, "open", refuse)
    found = io_ceilings.disk_rates(tmp_path, 16 << 20)
    assert found.num_bytes == 16 << 20
    assert found.write_bytes_per_s > 0
    assert found.read_bytes_per_s > 0
    assert has_direct or not found.direct
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_error(tmp_path):
    with pytest.raises(DiskError, match="No such file"):
        io_ceilings.disk_rates(tmp_path / "missing")


def listener(told):
    """A listener in a thread, and its port."""
    ready = threading.Event()

    def heard(where):
        told.append(where)
        ready.set()

    def answer():
        try:
            io_ceilings.listen("127.0.0.1", 0, ready=heard)
        except MachineError as error:
            told.append(str(error))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert ready.wait(10)
    return thread, io_ceilings.address(told[0])


def test_two_hosts_measure_the_network_between_them(monkeypatch):
    monkeypatch.setattr(io_ceilings, "_STREAM_S", 0.05)
    told = []
    thread, where = listener(told)
    found = io_ceilings.network_rates(*where)
    thread.join(10)
    assert not thread.is_alive()
    assert len(told) == 1
    assert found.send_bytes_per_s > 1e6
    assert found.receive_bytes_per_s > 1e6
    assert 0 < found.round_trip_s < 1


def test_whoever_is_no_ceilings_command_is_refused():
    told = []
    thread, where = listener(told)
    with socket.create_connection(where) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        thread.join(10)
    assert "something else" in told[1]
    with pytest.raises(MachineError, match="could not be measured"):
        io_ceilings.network_rates(*where)  # it listens no more


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:70000", "host:²"])
def test_what_is_no_address(text):
    with pytest.raises(InvalidRequestError, match="no HOST:PORT"):
        io_ceilings.address(text)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native_loops, "load_native_loops", FakeLoops)
    monkeypatch.setattr(io_ceilings, "_DISK_BYTES", 8 << 20)
    monkeypatch.setattr(io_ceilings, "_STREAM_S", 0.05)
    _, (host, port) = listener([])
    assert main(
        ["ceilings", "--disk", str(tmp_path), "--connect", f"{host}:{port}", "--json"]
    ) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["read"]["DRAM"]
    assert found["arithmetic"]["int8"]["operations_per_s"] == 400.0
    assert found["disk"]["num_bytes"] > 0
    assert found["network"]["peer"] == f"{host}:{port}"
    assert isinstance(found["pcie"], list)
    assert main(["ceilings"]) == 0
    out = capsys.readouterr().out
    assert "DRAM read" in out
    assert "PCIe" in out


def test_a_listener_measures_nothing_itself(capsys, tmp_path):
    assert main(["ceilings", "--listen", "--disk", str(tmp_path)]) == 2
    assert "--listen only answers" in capsys.readouterr().err

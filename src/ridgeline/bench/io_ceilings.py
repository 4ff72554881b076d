"""What the rest of a machine gives: a folder's disk, the network to another host, a GPU's bus."""

import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.errors import DiskError, InvalidRequestError, MachineError

_CHUNK = 4 << 20
_DISK_BYTES = 512 << 20
_DISK_S = 3.0
_HELLO = b"ridgeline-1\n"
_ECHOES = 200
_STREAM_S = 2.0
_TIMEOUT_S = 10.0
_BUS_BYTES = 256 << 20
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of it under WSL, of AMD


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes per second of one file read and written in order. ``direct`` is false where the file
    system knows no O_DIRECT: then writes end with fsync, and the file's pages are dropped."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    num_bytes: int
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRates:
    """Bytes per second of one TCP connection each way, and the median time of a round trip."""

    peer: str
    send_bytes_per_s: float
    receive_bytes_per_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BusRates:
    """Bytes per second between pinned memory of the host and a device."""

    device: str
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float


def disk_rates(folder: Path, num_bytes: int = _DISK_BYTES) -> DiskRates:
    """Write a file of at most ``num_bytes`` into a folder for 3 s, read it, and remove it.

    Raises:
        DiskError: there is no such folder, no room, or it cannot be written.
    """
    try:
        # Pages, as O_DIRECT needs; random, since some disks compress.
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".ridgeline-") as kept,
            mmap.mmap(-1, _CHUNK) as chunk,
        ):
            chunk.write(os.urandom(_CHUNK))
            path = Path(kept) / "file"
            written, seconds, is_direct = _write(path, chunk, num_bytes)
            read_s = _read(path, chunk, written, direct=is_direct)
    except OSError as error:
        raise DiskError(f"{folder} cannot be measured: {error.strerror}.") from error
    return DiskRates(
        write_bytes_per_s=written / seconds,
        read_bytes_per_s=written / read_s,
        num_bytes=written,
        direct=is_direct,
    )


def _write(path: Path, chunk: mmap.mmap, num_bytes: int) -> tuple[int, float, bool]:
    """Bytes, their seconds, and whether no cache was in between."""
    flags, is_direct = os.O_WRONLY | os.O_CREAT, True
    try:
        file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        file, is_direct = os.open(path, flags, 0o600), False
    written, start = 0, time.perf_counter()
    try:
        while written < num_bytes and time.perf_counter() - start < _DISK_S:
            written += os.write(file, chunk)
        os.fsync(file)
    finally:
        os.close(file)
    return written, time.perf_counter() - start, is_direct and hasattr(os, "O_DIRECT")


def _read(path: Path, chunk: mmap.mmap, num_bytes: int, *, direct: bool) -> float:
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        found, start = 0, time.perf_counter()
        while found < num_bytes and (count := os.readv(file, [chunk])):
            found += count
        return time.perf_counter() - start
    finally:
        os.close(file)


def address(text: str) -> tuple[str, int]:
    """``HOST:PORT``; an IPv6 host may stand in brackets.

    Raises:
        InvalidRequestError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidRequestError(f"{text!r} is no HOST:PORT.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(host: str, port: int, *, ready: Callable[[str], None] = lambda _: None) -> None:
    """Answer one `network_rates`; ``ready`` is told the address once connections are taken.

    Whoever connects first is measured: there is no password, so listen where you trust the network.
    Raises `MachineError` if the address cannot be had or the other side is something else.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as server:
            ready(f"{host}:{server.getsockname()[1]}")
            peer, _ = server.accept()
        with peer:
            _set_up(peer)
            _answer(peer)
    except OSError as error:
        raise _failed(f"{host}:{port}", error) from error


def network_rates(host: str, port: int) -> NetworkRates:
    """Measure against a `listen` there: round trips, then 2 s of bytes each way.

    Raises:
        MachineError: nobody listens there, or something else does.
    """
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as peer:
            _set_up(peer)
            peer.sendall(_HELLO)
            _expect(peer, _HELLO)
            trips = [_round_trip_s(peer) for _ in range(_ECHOES)]
            sent = _send_stream(peer)
            seconds = float(_line(peer))
            received, received_s = _receive_stream(peer)
    except (OSError, ValueError) as error:
        raise _failed(f"{host}:{port}", error) from error
    return NetworkRates(
        peer=f"{host}:{port}",
        send_bytes_per_s=sent / seconds,
        receive_bytes_per_s=received / received_s,
        round_trip_s=statistics.median(trips),
    )


def _answer(peer: socket.socket) -> None:
    _expect(peer, _HELLO)
    peer.sendall(_HELLO)
    for _ in range(_ECHOES):
        _expect(peer, b"?")
        peer.sendall(b"!")
    _, seconds = _receive_stream(peer)
    peer.sendall(f"{seconds:.9f}\n".encode())
    _send_stream(peer)
    with suppress(OSError):  # the other side has all that it wanted
        peer.recv(1)


def _round_trip_s(peer: socket.socket) -> float:
    start = time.perf_counter()
    peer.sendall(b"?")
    _expect(peer, b"!")
    return time.perf_counter() - start


def _send_stream(peer: socket.socket) -> int:
    """Blocks of a byte each, 1 before more and 0 before the last, for some seconds."""
    more, last = b"\1" * _CHUNK, b"\0" * _CHUNK
    count, start = 1, time.perf_counter()
    while time.perf_counter() - start < _STREAM_S:
        peer.sendall(more)
        count += 1
    peer.sendall(last)
    return count * _CHUNK


def _receive_stream(peer: socket.socket) -> tuple[int, float]:
    """Bytes and the seconds from the first to the last block."""
    block, count = memoryview(bytearray(_CHUNK)), 0
    start = 0.0
    while True:
        filled = 0
        while filled < _CHUNK:
            got = peer.recv_into(block[filled:])
            start = start or time.perf_counter()
            if not got:
                raise ConnectionError("the connection ended")
            filled += got
        count += 1
        if not block[0]:
            return count * _CHUNK, time.perf_counter() - start


def _expect(peer: socket.socket, words: bytes) -> None:
    found = b""
    while len(found) < len(words):
        part = peer.recv(len(words) - len(found))
        if not part:
            break
        found += part
    if found != words:
        raise ConnectionError("something else than `ridgeline ceilings` answers")


def _line(peer: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < 64:
        part = peer.recv(1)
        if not part:
            raise ConnectionError("the connection ended")
        found += part
    return found.decode()


def _set_up(peer: socket.socket) -> None:
    peer.settimeout(_TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _failed(where: str, error: Exception) -> MachineError:
    reason = getattr(error, "strerror", None) or str(error)
    return MachineError(f"The network to {where} could not be measured: {reason}.")


def bus_rates() -> list[BusRates]:
    """Of each GPU; none where there is none."""
    if not any(Path(each).exists() for each in _GPUS):
        return []
    import torch  # takes a second, and more on a busy machine

    return [_bus(number) for number in range(torch.cuda.device_count())]


def _bus(number: int) -> BusRates:
    import torch

    device = torch.device("cuda", number)
    pinned = torch.empty(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        fastest = float("inf")
        for _ in range(5):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - start)
        return _BUS_BYTES / fastest

    return BusRates(
        device=torch.cuda.get_device_name(device),
        to_device_bytes_per_s=rate(there, pinned),
        to_host_bytes_per_s=rate(pinned, there),
    )

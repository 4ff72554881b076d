"""The driver's end of workers: machines that join, and start ranks that it tells them to."""

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace as with_fields

from ridgeline.core.channel import Channel
from ridgeline.core.config import EngineConfig
from ridgeline.core.doors import JOINING, Door, read_address
from ridgeline.core.encryption import read_key
from ridgeline.core.errors import NetworkError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.settings.parallel import MAX_RANKS
from ridgeline.executors.distributed.machines import (
    CONNECT_S,
    PING_S,
    CheckModel,
    FromWorker,
    HasModel,
    Identity,
    Join,
    Ping,
    RankEnded,
    Setup,
    Turned,
    machine_of,
    model_digest,
    open_ends,
    purpose_of,
    ranks_of,
    threads_of,
)
from ridgeline.executors.distributed.messages import Begin
from ridgeline.executors.distributed.pipe import Wires
from ridgeline.executors.distributed.ray_launcher import RayLauncher

_log = logging.getLogger(__name__)

_JOIN_S = 10.0  # from a connection to its first word
_FOREVER_S = 1e9
_RAY_STARTS_S = 60.0  # its driver's process and those of workers, beyond the wait for nodes
_NAME_LENGTH = 80
_Said = TypeVar("_Said")


class RemoteRank:
    """A rank's process on a worker."""

    pid = None

    def __init__(self, machine: "_JoinedMachine", rank: int) -> None:
        self._machine, self._rank = machine, rank
        self.where = f" on {machine.name}"

    def how_it_ended(self) -> str | None:
        """A sentence on it; ``None`` while it runs."""
        return self._machine.ended.get(self._rank) or self._machine.why_gone

    def kill(self) -> None:
        """Let go of the worker, which ends its ranks then."""
        self._machine.channel.close()

    def wait(self) -> None:
        """Its worker waits for it."""


@dataclass(slots=True)
class _JoinedMachine:
    """``ended`` says how those of its ranks ended that have, ``why_gone`` why it is gone itself."""

    channel: Channel[FromWorker]
    host: str
    name: str = ""
    model: str | None = None
    num_cores: int = 1
    port: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    why_gone: str | None = None

    def said(self, kind: type[_Said]) -> _Said | None:
        """Its next word, if that is of a kind; otherwise it is gone."""
        message = self._received()
        if isinstance(message, kind):
            return message
        self.why_gone = message.message if isinstance(message, Turned) else "it went away."
        return None

    def follow(self) -> None:
        """Hear what becomes of its ranks, until it is gone."""
        while (ended := self.said(RankEnded)) is not None:
            self.ended[ended.rank] = ended.how

    def turn_away(self, why: str) -> None:
        """End the connection."""
        self.why_gone = why
        with suppress(OSError):
            self.channel.send(Turned(message=why))

    def _received(self) -> FromWorker | None:
        try:
            return self.channel.receive()
        except msgspec.DecodeError:
            return None


def _key_of(config: EngineConfig) -> bytes:
    """That of the file, or one that is for the workers that Ray is about to start alone."""
    if config.worker_key_file is not None:
        return read_key(Path(config.worker_key_file))
    assert config.launcher == "ray", "check_machines was not called"
    return secrets.token_bytes(32)


class Workers:
    """Waits for machines, and has them start their ranks, once. They end with their connections.

    Raises:
        SettingsError: the key or the address cannot be used.
        ModelFileError: there is no such model.
        NetworkError: nothing can listen there.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._key = _key_of(config)
        self._digest = model_digest(config)
        self._known: list[_JoinedMachine] = []
        self._ready: list[_JoinedMachine] = []
        self._changed = threading.Condition()
        self._is_started = self._is_closed = False
        self._why_none: str | None = None  # of those that Ray was to start
        host, port = read_address(config.worker_address)
        self._door = Door((host, port), self._key)
        self._launcher: RayLauncher | None = None
        if config.launcher == "ray":
            at = "" if host in ("0.0.0.0", "::") else host, self._door.port
            try:
                self._launcher = RayLauncher(config, at, self._key, self._not_started)
            except BaseException:
                self._door.close()
                raise
        threading.Thread(target=self._admit, daemon=True).start()
        threading.Thread(target=self._ping, daemon=True).start()

    def gather(self) -> None:
        """Wait until as many as there are to be have joined, with the model.

        Raises:
            NetworkError: they do not come in time; then all are let go.
        """
        config = self._config
        wanted = config.workers
        where = f"{config.worker_address.rpartition(':')[0]}:{self._door.port}"
        how = (
            "which Ray starts"
            if self._launcher is not None
            else "`ridgeline worker --join HOST:PORT --key-file FILE`"
        )
        _log.warning(
            "Waiting for %d worker%s at %s (%s).", wanted, "s" if wanted > 1 else "", where, how
        )
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: len(self._ready) == wanted or self._why_none is not None,
                    config.worker_wait_s + (_RAY_STARTS_S if self._launcher else 0.0),
                )
            if len(self._ready) < wanted and self._why_none is not None:
                raise NetworkError(f"Ray started no worker: {self._why_none}")
            if len(self._ready) < wanted:
                raise NetworkError(
                    f"{len(self._ready)} of {wanted} workers joined at {where} within "
                    f"{config.worker_wait_s:g} s (worker_wait_s)."
                )
        except BaseException:
            self.close()
            raise
        names = ", ".join(machine.name for machine in self._ready)
        _log.warning("Computing with %s.", names)

    def begin(self, begin: Begin) -> Begin:
        """What a rank is told first, with its machine's model and threads."""
        number = machine_of(begin.rank, begin.layout, len(self._ready) + 1)
        if number == 0 or begin.config is None:
            return begin
        machine = self._ready[number - 1]
        config = replace(begin.config, model=machine.model or begin.config.model)
        threads = threads_of(machine.num_cores, begin.layout, len(self._ready) + 1)
        return with_fields(begin, config=config, num_threads=threads)

    def start(
        self, layout: ParallelLayout
    ) -> tuple[dict[int, Wires], dict[int, tuple[RemoteRank, socket.socket]]]:
        """Have each worker start its ranks: the sockets of those of this machine, and the others
        with the connection to each.

        Raises:
            NetworkError: a machine went away, or is not reached.
        """
        self._is_started = True
        machines, token = tuple(self._ready), secrets.token_bytes(8)
        doors = [("", 0), *((each.host, each.port) for each in machines)]
        own = Setup(layout=layout, machine=0, doors=doors, token=token)
        until_s = time.monotonic() + CONNECT_S
        remote: dict[int, tuple[RemoteRank, socket.socket]] = {}
        try:
            for number, machine in enumerate(machines, 1):
                setup = with_fields(own, machine=number)
                machine.channel.send(setup)
                for rank in ranks_of(setup):
                    stream = self._door.take(purpose_of(token, -1 - rank), until_s)
                    remote[rank] = RemoteRank(machine, rank), stream
            return open_ends(own, ("", 0), self._door, self._key), remote
        except (OSError, NetworkError) as error:
            for _, stream in remote.values():
                stream.close()
            gone = (f"{each.name}: {each.why_gone}" for each in machines if each.why_gone)
            raise NetworkError(f"The ranks cannot be started: {next(gone, error)}") from error
        finally:
            self._door.close()

    def close(self) -> None:
        """Let go of all workers."""
        with self._changed:
            self._is_closed = True
        self._door.close()
        for machine in self._known:
            machine.channel.close()
        if self._launcher is not None:
            self._launcher.close()

    def _not_started(self, why: str) -> None:
        with self._changed:
            self._why_none = why
            self._changed.notify_all()

    def _admit(self) -> None:
        with suppress(NetworkError):  # the door is closed
            while True:
                stream = self._door.take(JOINING, time.monotonic() + _FOREVER_S)
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        """Know a machine from its first word to its last."""
        host, *_ = stream.getpeername()
        stream.settimeout(_JOIN_S)
        machine = _JoinedMachine(Channel(stream, FromWorker), host)
        join = machine.said(Join)
        stream.settimeout(None)
        with self._changed:
            if join is None or self._is_closed or len(self._known) >= MAX_RANKS:
                machine.channel.close()
                return
            self._known.append(machine)
        machine.name, machine.model = join.name[:_NAME_LENGTH], join.model
        machine.num_cores, machine.port = join.num_cores, join.port
        if self._is_fit(machine, join.identity):
            machine.follow()
        if machine.why_gone is not None and not self._is_closed:
            _log.warning("The worker %s (%s) is gone: %s", machine.name, host, machine.why_gone)
        with self._changed:
            self._known.remove(machine)
            if machine in self._ready and not self._is_started:
                self._ready.remove(machine)
        machine.channel.close()

    def _is_fit(self, machine: _JoinedMachine, identity: Identity) -> bool:
        """Whether it computes what this machine does, with the same model; then it is ready."""
        if identity != Identity.own():
            machine.turn_away(
                f"it runs {identity.version} with kernels {identity.kernels}, and the driver "
                f"{Identity.own().version} with {Identity.own().kernels}, which would not give "
                "the tokens of one process."
            )
            return False
        config = replace(self._config, model=machine.model or self._config.model)
        machine.channel.send(CheckModel(config=config))
        has = machine.said(HasModel)
        if has is None:
            return False
        if has.digest != self._digest:
            machine.turn_away("its files of the model are not those of the driver.")
            return False
        with self._changed:
            if len(self._ready) == self._config.workers:
                return False  # one more than is asked for: it may come again
            self._ready.append(machine)
            self._changed.notify_all()
        return True

    def _ping(self) -> None:
        while not self._is_closed:
            for machine in tuple(self._known):
                with suppress(OSError):
                    machine.channel.send(Ping())
            time.sleep(PING_S)

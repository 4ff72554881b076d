"""The processes of the ranks, seen from their driver: started, heard and watched."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ridgeline.core import errors
from ridgeline.core.channel import Channel
from ridgeline.core.errors import EngineError, RidgelineError
from ridgeline.executors.distributed.messages import Alive, Begin, Loaded, RankFailed, Report
from ridgeline.executors.distributed.pipe import wire
from ridgeline.executors.distributed.processes import LocalRank, start_ranks
from ridgeline.executors.distributed.workers import RemoteRank, Workers

_WATCH_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Seconds without a sign of life after which a rank counts as stopped, and all are ended.

    ``loading``: before it has its part of the model, when whole seconds go by in one call.
    """

    loading_s: float = 60.0
    serving_s: float = 6.0


@dataclass(slots=True)
class _Rank:
    process: LocalRank | RemoteRank
    channel: Channel[Report]
    heard_s: float
    life: Alive
    is_loaded: bool = False


class Ranks:
    """All ranks of one model. They live and die together: when one is lost, all are ended.

    Those of this machine have a socket each that nobody else can open, since it is handed down, as
    is the memory in which they exchange. They end with this process, however it ends (Linux ends
    them; elsewhere they see their socket close), those of workers with the connection to those.

    Args:
        commands: what each rank is told first.
        on_report: is told of what each says, in a thread for each rank.
        on_lost: is told once why the ranks are gone, unless they were closed.
        workers: machines that have their share of the ranks.
    """

    def __init__(
        self,
        commands: Sequence[Begin],
        on_report: Callable[[int, Report], None],
        on_lost: Callable[[RidgelineError], None],
        silence: Silence | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._workers = workers
        self._on_report, self._on_lost = on_report, on_lost
        self._silence = silence or Silence()
        self._ranks: list[_Rank] = []
        self._ending = threading.Lock()
        self._has_ended = False
        self._started: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        # Linux ends a process with the thread that started it: this one lives as long as they do.
        self._watcher = threading.Thread(target=self._live, args=(commands,), daemon=True)
        self._watcher.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def pids(self) -> list[int]:
        """The processes on this machine, in the order of their ranks."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def lives(self) -> list[Alive]:
        """What each said last of its life."""
        return [rank.life for rank in self._ranks]

    def send(self, message: object) -> None:
        """Tell all ranks the same; of those that are gone `on_lost` hears."""
        if self._ranks:
            data = self._ranks[0].channel.encoded(message)
            for rank in self._ranks:
                self._send(rank, data)

    def send_each(self, messages: Sequence[object]) -> None:
        """Tell each rank something else."""
        for rank, message in zip(self._ranks, messages, strict=True):
            self._send(rank, rank.channel.encoded(message))

    def lose(self, error: RidgelineError) -> None:
        """End all ranks, because of what one of them did."""
        if self._end():
            self._on_lost(error)

    def close(self) -> None:
        """End all ranks."""
        self._end()
        self._watcher.join()

    def _end(self) -> bool:
        """Whether this was the first call."""
        with self._ending:
            if self._has_ended:
                return False
            self._has_ended = True
        for rank in self._ranks:
            rank.process.kill()
            rank.channel.close()
        for rank in self._ranks:
            rank.process.wait()
        if self._workers is not None:
            self._workers.close()
        return True

    def _send(self, rank: _Rank, data: bytes) -> None:
        try:
            rank.channel.send_encoded(data)
        except OSError:  # it ends: the watcher says why
            return

    def _live(self, commands: Sequence[Begin]) -> None:
        try:
            self._start_all(commands)
        except BaseException as error:
            self._end()
            self._failure = error
            return
        finally:
            self._started.set()
        for number in range(len(self._ranks)):
            threading.Thread(target=self._hear, args=(number,), daemon=True).start()
        self._watch()

    def _start_all(self, commands: Sequence[Begin]) -> None:
        layout, remote = commands[0].layout, dict[int, tuple[RemoteRank, socket.socket]]()
        if self._workers is None:
            wires = dict(enumerate(wire(layout)))
        else:
            commands = [self._workers.begin(command) for command in commands]
            wires, remote = self._workers.start(layout)
        pairs = {rank: socket.socketpair() for rank in wires}
        theirs = {rank: its for rank, (_, its) in pairs.items()}
        local = start_ranks(layout, theirs, wires, commands[0].num_threads)
        for command in commands:
            rank = command.rank
            process, ours = remote.get(rank) or (local[rank], pairs[rank][0])
            channel: Channel[Report] = Channel(ours, Report)
            life = Alive(cpu_s=0.0, busy_s=0.0, sent_bytes=0, num_exchanges=0)
            self._ranks.append(_Rank(process, channel, time.monotonic(), life))
        for command, started in zip(commands, self._ranks, strict=True):
            self._send(started, started.channel.encoded(command))

    def _hear(self, number: int) -> None:
        rank = self._ranks[number]
        try:
            while (report := rank.channel.receive()) is not None:
                rank.heard_s = time.monotonic()
                match report:
                    case Alive():
                        rank.life = report
                    case RankFailed(error=name, message=message):
                        kind = getattr(errors, name, EngineError)
                        self.lose(
                            kind(message)
                            if issubclass(kind, RidgelineError)
                            else EngineError(f"Rank {number} failed: {name}: {message}")
                        )
                    case _:
                        rank.is_loaded |= isinstance(report, Loaded)
                        self._on_report(number, report)
        except msgspec.DecodeError as error:
            self.lose(EngineError(f"Rank {number} sent what is no message: {error}."))

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._has_ended:
            time.sleep(_WATCH_S)
            now = time.monotonic()
            if now - looked_s > 4 * _WATCH_S + 1.0:  # it was this process that stood still
                for rank in self._ranks:
                    rank.heard_s = now
            looked_s = now
            for number, rank in enumerate(self._ranks):
                name = f"Rank {number}{rank.process.where}"
                if (how := rank.process.how_it_ended()) is not None:
                    time.sleep(_WATCH_S)  # for its last words to be heard
                    self.lose(EngineError(f"{name} was lost: {how}"))
                patience = self._silence.serving_s if rank.is_loaded else self._silence.loading_s
                silent_s = now - rank.heard_s
                if silent_s > patience:
                    self.lose(EngineError(f"{name} was lost: it was silent for {silent_s:.0f} s."))

"""The worker's end: joins a driver, starts the ranks that it is told to, and ends them with it."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from ridgeline.core.channel import Channel
from ridgeline.core.doors import Address, Door, connect
from ridgeline.core.errors import NetworkError, RidgelineError, SettingsError
from ridgeline.core.host import usable_cores
from ridgeline.executors.distributed.machines import (
    LOST_S,
    CheckModel,
    HasModel,
    Identity,
    Join,
    Ping,
    RankEnded,
    Setup,
    ToWorker,
    Turned,
    model_digest,
    open_ends,
    purpose_of,
    ranks_of,
)
from ridgeline.executors.distributed.processes import LocalRank, start_ranks

_AGAIN_S = 1.0  # between two attempts to join
_WATCH_S = 0.25


class JoiningMachine:
    """Joins the driver at an address, and again whenever that has gone.

    Args:
        model: where this machine has the model; ``None`` for the name that the driver has.
        say: is told what happens.
        num_cores: processors that its ranks share; ``None`` for all that this process may use.
    """

    def __init__(
        self,
        driver: Address,
        key: bytes,
        model: str | None,
        say: Callable[[str], None],
        *,
        num_cores: int | None = None,
    ) -> None:
        self._driver, self._key, self._model, self._say = driver, key, model, say
        self._num_cores = num_cores or usable_cores()

    def run(self, *, once: bool = False) -> None:
        """Serve drivers one after the other, or one alone.

        Raises:
            SettingsError: a driver turned this machine away.
            NetworkError: the driver has another key.
        """
        where, is_waiting = f"{self._driver[0]}:{self._driver[1]}", False
        while True:
            try:
                stream = connect(self._driver, self._key)
            except OSError:
                if not is_waiting:
                    self._say(f"Waiting for a driver at {where}.")
                is_waiting = True
                time.sleep(_AGAIN_S)
                continue
            is_waiting = False
            self._say(f"Joined {where}.")
            stream.settimeout(LOST_S)
            # Other workers connect to where this one is seen from the driver.
            door = Door((stream.getsockname()[0], 0), self._key)
            channel: Channel[ToWorker] = Channel(stream, ToWorker)
            try:
                self._serve(channel, door)
            finally:
                channel.close()
                door.close()
            self._say(f"The driver at {where} is gone, and the ranks have ended.")
            if once:
                return
            time.sleep(_AGAIN_S)

    def _serve(self, channel: Channel[ToWorker], door: Door) -> None:
        """Do what the driver says, until it is gone."""
        ranks: dict[int, LocalRank] = {}
        join = Join(os.uname().nodename, Identity.own(), self._num_cores, door.port, self._model)
        try:
            channel.send(join)
            while (message := channel.receive()) is not None:
                match message:
                    case CheckModel(config=config):
                        channel.send(HasModel(digest=model_digest(config)))
                    case Setup():
                        ranks = self._start(message, door)
                        self._say(f"Started {len(ranks)} of {message.layout.num_ranks} ranks.")
                        _watch(channel, ranks)
                    case Turned(message=why):
                        raise SettingsError(f"The driver turned this machine away: {why}")
                    case Ping():
                        continue
        except (OSError, msgspec.DecodeError, NetworkError) as error:
            self._say(f"The connection is given up: {error}")
            _tell_why(channel, error)
        except RidgelineError as error:
            _tell_why(channel, error)
            raise
        finally:
            for rank in ranks.values():
                rank.kill()
            for rank in ranks.values():
                rank.wait()

    def _start(self, setup: Setup, door: Door) -> dict[int, LocalRank]:
        numbers = ranks_of(setup)
        streams = {
            rank: connect(self._driver, self._key, purpose_of(setup.token, -1 - rank))
            for rank in numbers
        }
        wires = open_ends(setup, self._driver, door, self._key)
        num_threads = max(1, self._num_cores // len(numbers))
        return start_ranks(setup.layout, streams, wires, num_threads)


class RayWorker:
    """What an actor of Ray's runs: a machine that joins one driver."""

    def join(self, driver: Address, key: bytes, num_cores: int) -> str:
        """Serve the driver at an address until it is gone; a sentence on how that ended."""
        try:
            JoiningMachine(driver, key, None, print, num_cores=num_cores).run(once=True)
        except RidgelineError as error:
            return str(error)
        return "The driver is gone."


def _watch(channel: Channel[ToWorker], ranks: Mapping[int, LocalRank]) -> None:
    """From a thread of its own, tell the driver of the first rank that ends."""

    def watch() -> None:
        while True:
            for number, rank in ranks.items():
                if (how := rank.how_it_ended()) is not None:
                    with suppress(OSError):
                        channel.send(RankEnded(rank=number, how=how))
                    return
            time.sleep(_WATCH_S)

    threading.Thread(target=watch, daemon=True).start()


def _tell_why(channel: Channel[ToWorker], error: Exception) -> None:
    with suppress(OSError):
        channel.send(Turned(message=str(error)))

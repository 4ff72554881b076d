"""Which rank runs on which machine, and the connections between them.

Machine 0 is the driver's, the others are workers. Each has as many ranks, one after the other: a
stage of a pipeline is on one machine, where there are as many stages as machines.
"""

import os
import socket
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from ridgeline.core.config import EngineConfig
from ridgeline.core.doors import Address, Door, connect
from ridgeline.core.errors import SettingsError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.executors.distributed.pipe import Edge, Wires, edges, wire
from ridgeline.kernels.cpu.library import ABI_VERSION, chosen_level
from ridgeline.roofline.storage import cache_folder
from ridgeline.weights import locate_model
from ridgeline.weights.digest import content_digest

CONNECT_S = 30.0  # for all connections of a start
LOST_S = 6.0  # without a word from a driver, after which it counts as gone
PING_S = 1.0


class Identity(msgspec.Struct, frozen=True):
    """What machines must have in common for their ranks to compute the same bits."""

    version: str
    kernels: str

    @staticmethod
    def own() -> "Identity":
        """This installation's, on this machine."""
        return Identity(metadata.version("ridgeline"), f"{chosen_level()}, boundary {ABI_VERSION}")


class Join(msgspec.Struct, tag=True, frozen=True):
    """A worker's first word: who it is. ``port`` is its door's; ``model`` is where it has the
    model, if not where the driver does."""

    name: str
    identity: Identity
    num_cores: int
    port: int
    model: str | None


class CheckModel(msgspec.Struct, tag=True, frozen=True):
    """Find the model, and say `HasModel`."""

    config: EngineConfig


class HasModel(msgspec.Struct, tag=True, frozen=True):
    """The digest of all files of the model, and of those that go with it."""

    digest: str


class Turned(msgspec.Struct, tag=True, frozen=True):
    """The connection ends here, and this is why."""

    message: str


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Start the ranks of ``machine``. ``doors[m]`` is where machine m is connected to; the driver's
    is known. ``token`` is in the purposes of all connections."""

    layout: ParallelLayout
    machine: int
    doors: list[Address]
    token: bytes


class Ping(msgspec.Struct, tag=True, frozen=True):
    """The driver is there."""


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """A rank's process ended, and how."""

    rank: int
    how: str


ToWorker = CheckModel | Setup | Ping | Turned
FromWorker = Join | HasModel | RankEnded | Turned


def machine_of(rank: int, layout: ParallelLayout, num_machines: int) -> int:
    """The number of the machine that has a rank."""
    return rank * num_machines // layout.num_ranks


def check_machines(config: EngineConfig) -> None:
    """
    Raises:
        SettingsError: the ranks cannot be shared among the machines, or there is no key.
    """
    if config.workers == 0:
        return
    num_machines = config.workers + 1
    if config.num_ranks % num_machines:
        raise SettingsError(
            f"{num_machines} machines do not share {config.num_ranks} ranks equally; set "
            "pipeline_parallel_size, tensor_parallel_size or expert_parallel_size so that they do."
        )
    if config.pipeline_parallel_size % num_machines:
        raise SettingsError(
            f"{num_machines} machines do not share {config.pipeline_parallel_size} stages equally, "
            "and ranks of one stage exchange through the memory of one machine; set "
            f"pipeline_parallel_size to {num_machines}."
        )
    if config.worker_key_file is None and config.launcher != "ray":
        raise SettingsError(
            "workers needs worker_key_file, the key that the other machines have, too "
            "(openssl rand -hex 32)."
        )


def open_ends(setup: Setup, driver: Address, door: Door, key: bytes) -> dict[int, Wires]:
    """The sockets of this machine's ranks, once the other machines have opened theirs. Of two
    machines the one of the higher number connects.

    Raises:
        OSError, NetworkError: a machine is not reached.
    """
    layout, own = setup.layout, setup.machine
    numbers = {edge: number for number, edge in enumerate(edges(layout))}
    opened: list[int] = []
    until_s = time.monotonic() + CONNECT_S

    def ends(edge: Edge) -> tuple[int | None, int | None]:
        first, second = (
            machine_of(rank, layout, len(setup.doors)) for rank in (edge.first, edge.second)
        )
        if own not in (first, second):
            return None, None
        if first == second:
            pair = socket.socketpair()
            opened.extend(end.detach() for end in pair)
            return opened[-2], opened[-1]
        other, purpose = first + second - own, purpose_of(setup.token, numbers[edge])
        if own > other:
            stream = connect(driver if other == 0 else setup.doors[other], key, purpose)
        else:
            stream = door.take(purpose, until_s)
        opened.append(stream.detach())
        return (opened[-1], None) if own == first else (None, opened[-1])

    try:
        wires = wire(layout, ends)
    except BaseException:
        for end in opened:
            os.close(end)
        raise
    return {rank: wires[rank] for rank in ranks_of(setup)}


def ranks_of(setup: Setup) -> Sequence[int]:
    """The ranks on a setup's machine."""
    share = setup.layout.num_ranks // len(setup.doors)
    return range(setup.machine * share, (setup.machine + 1) * share)


def threads_of(num_cores: int, layout: ParallelLayout, num_machines: int) -> int:
    """For each of the ranks of a machine with so many processors."""
    return max(1, num_cores * num_machines // layout.num_ranks)


def purpose_of(token: bytes, number: int) -> bytes:
    """The purpose of an edge's connection, or with ``-1 - rank`` of one of a rank's driver."""
    return token + number.to_bytes(8, "little", signed=True)


def model_digest(config: EngineConfig) -> str:
    """Of all bytes of the model's files and of those that go with it.

    Raises:
        ModelFileError: one is missing.
        MachineError: it cannot be downloaded or read.
    """
    if config.load_format == "dummy":
        return f"random {config.model} {config.seed}"
    paths = [locate_model(config.model, revision=config.revision, offline=config.offline)]
    if config.draft_model is not None:
        paths.append(locate_model(config.draft_model, offline=config.offline))
    paths.extend(map(Path, config.adapters.values()))
    return content_digest(paths, memory=cache_folder() / "worker-weights.json")

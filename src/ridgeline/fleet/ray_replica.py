"""A replica on a node of a Ray cluster: what the actor does, and what it is told."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.core import wire
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.core.private_folder import PrivateFolder
from ridgeline.core.ray_cluster import RayPlace
from ridgeline.core.settings.parallel import WITHOUT_RAY
from ridgeline.fleet.replica import ReplicaProcess, ReplicaStart
from ridgeline.server.config import ServerConfig

_FILES = ("api_key_file", "router_key_file", "encryption_key_file")  # which a node has not


class RayReplicaStart(msgspec.Struct):
    """A replica, where it is to be started, and what is in the server's files, by setting."""

    place: RayPlace
    start: ReplicaStart
    files: dict[str, bytes]


class ReplicaOnRay(ReplicaProcess):
    """A replica on a node with free processors, which is started again on another when it ends.

    Ray's driver is a process of its own, one for each replica.
    """

    module = "ridgeline.fleet.ray_replica_main"
    keeps_port = False

    def message(self) -> RayReplicaStart:
        engine, server = self.settings.engine, self.settings.server
        files = {
            name: Path(path).read_bytes()
            for name in _FILES
            if (path := getattr(server, name)) is not None
        }
        start = ReplicaStart(
            engine=replace(engine, **WITHOUT_RAY),
            server=replace(server, data_dir=None),
        )
        place = RayPlace(address=engine.ray_address, cpus=engine.ray_cpus)
        return RayReplicaStart(place=place, start=start, files=files)


def check_reachable(config: ServerConfig) -> None:
    """
    Raises:
        SettingsError: anyone could use replicas on other machines.
    """
    if not config.has_keys:
        raise SettingsError(
            "Replicas on Ray's nodes can be reached by others; set --api-key or --api-key-file."
        )


class RayReplica:
    """The actor: keeps a replica's process, in whose loop it is an object like any other."""

    async def start(self, data: bytes, files: Mapping[str, bytes], num_cores: int) -> str:
        """Start it; returns its URL, or why there is none."""
        import ray

        start = wire.decode(data, ReplicaStart)
        self._folder = PrivateFolder()
        paths: dict[str, Any] = {}
        for name, content in files.items():
            path = self._folder.path / name
            path.touch(mode=0o600)
            path.write_bytes(content)
            paths[name] = str(path)
        host = ray.util.get_node_ip_address()
        start.server = replace(start.server, host=host, **paths)
        start.processors = tuple(sorted(os.sched_getaffinity(0))[:num_cores])
        self._replica = ReplicaProcess(start)
        try:
            return await self._replica.start()
        except EngineError as error:
            return str(error)

    async def wait(self) -> int:
        """Until its process ends; with which code."""
        return await self._replica.wait()

    async def end(self) -> None:
        """Let it drain, and end it if it does not."""
        await self._replica.end()
        self._folder.remove()

"""Actors on other nodes of a Ray cluster.

Ray finds nodes with free processors and starts processes there. What they compute goes over our own
connections, which also tell when a machine is lost.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ridgeline.core.errors import NetworkError, SettingsError


class RayPlace(msgspec.Struct, frozen=True):
    """Where actors are started: ``count`` nodes of the cluster at ``address`` (Ray's own word for
    it, ``auto`` for that of this machine), with ``cpus`` free processors each; ``None`` for as many
    as the smallest node has. They are waited for ``wait_s`` seconds."""

    address: str
    count: int = 1
    cpus: int | None = None
    wait_s: float = 120.0


def check_ray() -> None:
    """
    Raises:
        SettingsError: Ray is not installed.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise SettingsError("launcher ray needs Ray: pip install 'ridgeline[ray]'.") from error


def start_actors(
    place: RayPlace, kind: Callable[[], object], **options: Any
) -> tuple[Sequence[Any], int]:
    """Actors of a class, each on a node of its own that is not this one; and their processors.

    This process is their driver: they end with it, and their nodes are free again.

    Args:
        kind: a class that the nodes can import.
        options: of Ray's, for each.

    Raises:
        SettingsError: Ray is not installed.
        NetworkError: there is no cluster, or not as many nodes.
    """
    check_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        ray.init(address=place.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise NetworkError(
            f"There is no Ray cluster at {place.address!r} (ray start --head): {error}"
        ) from error
    own = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    cpus = place.cpus or int(min((_cpus(node) for node in others if _cpus(node)), default=1))
    group = placement_group(
        [{"CPU": cpus}] * place.count,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": f"!{own}"}] * place.count,
    )
    if not group.wait(place.wait_s):
        raise NetworkError(
            f"In {place.wait_s:g} s the Ray cluster did not have {place.count} nodes beside this "
            f"one with {cpus} free processors; it has {len(others)} others (ray status)."
        )
    actors = [
        ray.remote(kind)
        .options(
            num_cpus=cpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            **options,
        )
        .remote()
        for index in range(place.count)
    ]
    return actors, cpus


def _cpus(node: dict[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0.0))

"""``fleet.yaml``: what a fleet is, for each ``ridgeline fleet`` command."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ridgeline.cli import route, serve
from ridgeline.cli.config_file import put_settings, read_yaml
from ridgeline.cli.options import Parser, given_settings
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.settings.parallel import ParallelSettings
from ridgeline.core.spelling import suggestion
from ridgeline.fleet.config import MOST_REPLICAS, RouterConfig
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.slo import SLO_NAMES, Slo
from ridgeline.server.config import ServerConfig, is_loopback
from ridgeline.server.schemas.choices import field_names

Positive = Annotated[float, Meta(gt=0, lt=1e9)]
Count = Annotated[int, Meta(ge=1)]
_Replicas = Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
_UNKNOWN = re.compile(r"unknown field `(\w+)`(?: - at `\$\.?(.*)`)?")
# Settings of a router that have a place of their own in the file.
_PLACED = {
    "engine": "engines", "slo": "slo", "slo_share": "slo.attainment",
    "min_replicas": "budget.min_replicas", "max_replicas": "budget.max_replicas",
}  # fmt: skip


_KEYS = {"api_key", "api_key_file"}  # without which no server listens to other machines
# Settings of a server that are those of the router where it is there, too.
_OF_THE_ROUTER = {"host", "port", "data_dir", "ssl_certfile", "ssl_keyfile"}


class _Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A part of the file, all of whose keys are known."""


class FleetLimits(_Part, frozen=True):
    """Of a good request, in seconds, and the share of the requests that are to be good."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    end_to_end_s: Positive | None = None
    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.95

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s, end_to_end_s=self.end_to_end_s)


class ReplicaBudget(_Part, frozen=True):
    """How many replicas there may be, and what they may cost together."""

    min_replicas: _Replicas = 1
    max_replicas: _Replicas | None = None
    max_usd_per_hour: Positive | None = None

    def affordable(self, most: int, replica_usd: float | None) -> int:
        """Of so many replicas, at this price an hour, those that there is money for.

        Raises:
            InvalidRequestError: there is not enough for the fewest, or no price.
        """
        if self.max_usd_per_hour is None:
            return most
        if replica_usd is None:
            raise InvalidRequestError(
                "budget.max_usd_per_hour needs the price of a device: usd_per_hour, or hardware of "
                "the catalogue."
            )
        most = min(most, int(self.max_usd_per_hour / replica_usd + 1e-9))
        if most < self.min_replicas:
            raise InvalidRequestError(
                f"budget.min_replicas cost ${self.min_replicas * replica_usd:.2f} an hour, more "
                "than budget.max_usd_per_hour."
            )
        return most


class Layout(_Part, frozen=True):
    """Processes or devices of one replica."""

    tensor: Count | None = None
    pipeline: Count | None = None


class Tiers(_Part, frozen=True):
    """Where KV goes beyond the pool."""

    ram: str | int | None = None
    redis: str | None = None
    encrypt_key_file: str | None = None


class PlannedLoad(_Part, frozen=True):
    """What comes: a rate of requests of some length, or a trace."""

    rate_rps: Positive | None = None
    prompt_tokens: Count = 1000
    output_tokens: Count = 200
    trace: str | None = None


class FleetFile(_Part, frozen=True):
    """All of it. ``engine`` has settings of ``ridgeline serve``, ``router`` of ``ridgeline route``;
    ``engines`` are addresses of those that run already. ``hardware``, ``usd_per_hour`` (of a
    device) and ``network_gb_per_s`` (between replicas) are for plans."""

    model: str | None = None
    slo: FleetLimits | None = None
    budget: ReplicaBudget = ReplicaBudget()
    layout: Layout | Literal["auto"] = "auto"
    tiers: Tiers = Tiers()
    engine: dict[str, Any] = {}
    router: dict[str, Any] = {}
    engines: tuple[str, ...] = ()
    load: PlannedLoad | None = None
    hardware: str = "this"
    usd_per_hour: Positive | None = None
    network_gb_per_s: Positive = 1.25
    image: str = "ridgeline:latest"

    def __post_init__(self) -> None:
        budget = self.budget
        if self.slo is not None and not self.slo.slo.is_set:
            raise ValueError(f"slo needs a limit: {', '.join(SLO_NAMES.values())}")
        if budget.max_replicas is not None and budget.min_replicas > budget.max_replicas:
            raise ValueError("budget.min_replicas must not exceed budget.max_replicas")
        if self.slo is None and budget.max_replicas not in (None, budget.min_replicas):
            raise ValueError(
                "budget.max_replicas needs slo, the limits from which it follows how many of them "
                "are wanted; without slo there are budget.min_replicas"
            )
        for name, place in _PLACED.items():
            if name in self.router_settings:
                raise ValueError(f"router.{name} is written {place}")

    @property
    def is_empty(self) -> bool:
        return self == FleetFile()

    @property
    def most(self) -> int:
        """Replicas that there may be, and that there is money for.

        Raises:
            InvalidRequestError: as `affordable`.
            SettingsError: a setting of ``engine`` is none, or has an impossible value.
        """
        device_usd = self.usd_per_hour
        if device_usd is None and self.hardware != "this":
            price = load_catalogue().device(self.hardware).usd_per_hour
            device_usd = None if price is None else price.value
        given = _parsed(serve.add_options, self.engine_settings, "engine")
        devices = ParallelSettings(**given_settings(given, ParallelSettings)).num_ranks
        most = self.budget.max_replicas or self.budget.min_replicas
        return self.budget.affordable(most, None if device_usd is None else devices * device_usd)

    @property
    def router_settings(self) -> dict[str, Any]:
        """``router``, by the names that settings have."""
        return {key.replace("-", "_"): value for key, value in self.router.items()}

    @property
    def engine_settings(self) -> dict[str, Any]:
        """As the options of ``ridgeline serve`` call them.

        Raises:
            SettingsError: one is written twice.
        """
        layout = Layout() if self.layout == "auto" else self.layout
        places = {
            "tensor_parallel_size": ("layout.tensor", layout.tensor),
            "pipeline_parallel_size": ("layout.pipeline", layout.pipeline),
            "kv_ram_tier_bytes": ("tiers.ram", self.tiers.ram),
            "kv_redis_url": ("tiers.redis", self.tiers.redis),
            "encryption_key_file": ("tiers.encrypt_key_file", self.tiers.encrypt_key_file),
        }
        found = {key.replace("-", "_"): value for key, value in self.engine.items()}
        for name, (place, value) in places.items():
            if value is not None:
                if name in found:
                    raise SettingsError(f"engine.{name} and {place} are the same: give one.")
                found[name] = value
        return found

    @property
    def scaling(self) -> dict[str, Any]:
        """What a router is told of how many are wanted."""
        if self.slo is None or self.budget.max_replicas is None:
            return {}
        limits = ",".join(f"{name}={value:g}" for name, value in self.slo.slo.limits.items())
        return {
            "slo": limits,
            "slo_share": self.slo.attainment,
            "min_replicas": self.budget.min_replicas,
            "max_replicas": self.most,
        }

    def command_line(self, where: str) -> argparse.Namespace:
        """That of `served`, or of `routed` where engines run already, which see for errors."""
        return self.routed(where) if self.engines else self.served(where)

    def served(self, where: str) -> argparse.Namespace:
        """The command line of `serve` that starts it on this machine.

        Raises:
            SettingsError: a setting is none, or has an impossible value.
        """
        shared = {field.name for field in dataclasses.fields(ServerConfig)}
        own, others = dict[str, Any](), dict[str, Any]()
        for name, value in self.router_settings.items():
            (others if name in shared else own)[name] = value
        found = _parsed(serve.add_options, self.engine_settings | others, where)
        routed = _parsed(route.add_options, own, where)
        found.model, found.replicas = self.model, self.most
        found.router_settings = {"policy": "least-seconds"} | given_settings(routed, RouterConfig)
        if scaling := self.scaling:
            found.slo, found.router_settings["slo_share"] = scaling["slo"], scaling["slo_share"]
            found.replicas = 1
            found.min_replicas, found.max_replicas = scaling["min_replicas"], self.most
        return found

    def joined(self, where: str, router: str) -> argparse.Namespace:
        """The command line of `serve` whose engine joins a router, from anywhere.

        Raises:
            SettingsError: a setting is none, or has an impossible value, or a key is missing.
        """
        shared = {field.name for field in dataclasses.fields(ServerConfig)} - _OF_THE_ROUTER
        own = {name: value for name, value in self.router_settings.items() if name in shared}
        if "router_key_file" not in own:
            raise SettingsError(f"{where}: who joins a fleet shows router.router_key_file.")
        here = {"host": "0.0.0.0", "port": 0, "join": [router]}
        settings = here | self.engine_settings | own
        if not is_loopback(str(settings["host"])) and _KEYS.isdisjoint(settings):
            raise SettingsError(
                f"{where}: an engine that joins listens to other machines, whose requests show a "
                "key: name the fleet's in router.api_key_file."
            )
        found = _parsed(serve.add_options, settings, where)
        found.model = self.model
        return found

    def routed(self, where: str) -> argparse.Namespace:
        """The command line of `route` before engines that run.

        Raises:
            SettingsError: a setting is none, or has an impossible value.
        """
        settings = self.router | {"engine": list(self.engines)} | self.scaling
        return _parsed(route.add_options, settings, where)

    @property
    def url(self) -> str:
        """Of the router, from this machine."""
        router = self.router_settings
        scheme = "https" if "ssl_certfile" in router else "http"
        host = router.get("host", RouterConfig.__dataclass_fields__["host"].default)
        port = router.get("port", RouterConfig.__dataclass_fields__["port"].default)
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{port}"


def read_fleet(path: Path) -> FleetFile:
    """
    Raises:
        SettingsError: the file cannot be read, or has an unknown key or an impossible value.
    """
    try:
        return msgspec.convert(read_yaml(path), FleetFile)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            name = ".".join(filter(None, (unknown[2], unknown[1])))
            meant = suggestion(unknown[1], field_names(FleetFile, unknown[2] or ""))
            raise SettingsError(f"{path}: there is no setting {name!r}{meant}") from None
        raise SettingsError(f"{path}: {error}.") from None


def _parsed(add_options: Any, settings: dict[str, Any], where: str) -> argparse.Namespace:
    parser = Parser()
    add_options(parser)
    found = parser.parse_args([])
    put_settings(found, parser, settings, where=where)
    return found

"""Settings of a router."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ridgeline.core.errors import SettingsError
from ridgeline.core.settings.reading import Needs, Reads, read_settings
from ridgeline.fleet.policies import POLICIES, ByPredictedSeconds, PolicyName
from ridgeline.fleet.roles import Disaggregate
from ridgeline.fleet.scaling import ScalingGoal
from ridgeline.roofline.slo import parse_slo
from ridgeline.server.config import Timeout, read_slo

MOST_REPLICAS = 64
_SCALED = Needs("max_replicas", lambda config: config.max_replicas is not None)
_SLO = Needs("slo", lambda config: config.slo is not None)
_SECONDS = Needs(
    "policy=least-seconds", lambda config: POLICIES[config.policy] is ByPredictedSeconds
)
_KEY = Needs("router_key_file", lambda config: config.router_key_file is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router; every bound is checked at construction.

    Attributes:
        engine: URL of an engine, http://host:port; given once for each. The first keeps files,
            batches and responses.
        policy: how an engine is chosen: by predicted seconds (least-seconds; price is its former
            name), by requests in progress (least-loaded), by cached prefix, by session, or in turn
            (round-robin).
        disaggregate: auto lets one engine compute a prompt and another that reads its KV
            (--kv-peers) go on with it, where that saves predicted seconds; always does so wherever
            it can, for comparison.
        router_key_file: file of the key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            that the engines have too; without it, a stream ends with its engine.
        host: address to listen on; a public one needs engines that ask for keys.
        port: port to listen on; 0 takes a free one.
        max_body_mib: largest request body, in MiB.
        body_timeout_s: seconds in which a request's head must arrive, and then over which its body
            must come at 16 KiB/s or more.
        stall_timeout_s: seconds after which a reader that takes nothing is disconnected.
        connect_timeout_s: seconds in which an engine takes a connection.
        silence_s: seconds without a byte after which a stream's engine counts as lost; engines
            break their silence every --ping-s.
        answer_timeout_s: seconds in which an answer must begin.
        recover_s: seconds for which a stream waits for an engine to go on, if there is none.
        probe_s: seconds between questions to each engine how it is.
        drain_s: seconds that requests in progress have to end after SIGTERM.
        cascade: URL of an engine of a small model, which is asked before those of --engine; given
            once for each.
        cascade_threshold: margin from which on its answer will do, as ridgeline cascade calibrate
            finds it.
        cascade_timeout_s: seconds in which its answer must begin, or the large model is asked.
        slo: limits of a good request: ttft=0.5,tpot=0.05,e2e=10 in seconds, or chat.
        slo_share: share of the requests that is to keep them.
        min_replicas: fewest engines that are wanted.
        max_replicas: most engines that are wanted; with it the router says how many are.
        start_s: seconds that an engine takes from its start to its first request.
        request_log: file that gets a JSON line for each answered request: when, how long, how many
            tokens, and a digest of the answer; a trace for ridgeline plan and fleet replay.
        request_log_text: also the request as it was sent, so that it can be asked again.
        ssl_keyfile: file of the private key (PEM), for HTTPS.
        ssl_certfile: file of its certificate chain (PEM).
    """

    engine: tuple[str, ...] = ()
    policy: PolicyName = "least-seconds"
    disaggregate: Annotated[Disaggregate, _SECONDS, _KEY] = "off"
    router_key_file: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    max_body_mib: Annotated[int, Meta(ge=1, le=4096)] = 16
    body_timeout_s: Timeout = 30.0
    stall_timeout_s: Timeout = 60.0
    connect_timeout_s: Timeout = 2.0
    silence_s: Timeout = 45.0
    answer_timeout_s: Timeout = 600.0
    recover_s: Timeout = 30.0
    probe_s: Timeout = 1.0
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    cascade: tuple[str, ...] = ()
    cascade_threshold: (
        Annotated[float, Meta(ge=0), Needs("cascade", lambda config: bool(config.cascade))] | None
    ) = None
    cascade_timeout_s: Annotated[Timeout, Needs("cascade", lambda config: bool(config.cascade))] = (
        60.0
    )
    slo: Annotated[str | None, Reads(read_slo), _SCALED] = None
    slo_share: Annotated[float, Meta(gt=0, lt=1), _SCALED] = 0.95
    min_replicas: Annotated[int, Meta(ge=1, le=MOST_REPLICAS), _SCALED] = 1
    max_replicas: Annotated[int, Meta(ge=1, le=MOST_REPLICAS), _SLO] | None = None
    start_s: Annotated[Timeout, _SCALED] = 60.0
    request_log: str | None = None
    request_log_text: Annotated[
        bool, Needs("request_log", lambda config: config.request_log is not None)
    ] = False
    ssl_keyfile: Annotated[
        str | None, Needs("ssl_certfile", lambda config: config.ssl_certfile is not None)
    ] = None
    ssl_certfile: Annotated[
        str | None, Needs("ssl_keyfile", lambda config: config.ssl_keyfile is not None)
    ] = None

    def __post_init__(self) -> None:
        read_settings(self)
        _ = self.scaling_goal
        if self.cascade and self.cascade_threshold is None:
            raise SettingsError(
                "cascade needs cascade_threshold, which `ridgeline cascade calibrate` finds."
            )
        if not self.engine:
            raise SettingsError("A router needs an engine: --engine http://host:port.")

    @property
    def scaling_goal(self) -> ScalingGoal | None:
        """How many engines there may be, and for what, if that is decided here.

        Raises:
            SettingsError: there is no such number.
        """
        if self.slo is None or self.max_replicas is None:
            return None
        return ScalingGoal(
            slo=parse_slo(self.slo),
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            target=self.slo_share,
        )

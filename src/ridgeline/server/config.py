"""Settings of the server."""

import ipaddress
from dataclasses import dataclass

from ridgeline.core.checks import check_float, check_int
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.roofline.slo import parse_slo
from ridgeline.server.origins import Origins
from ridgeline.text.output import REASONING_PARSERS, TOOL_PARSERS

_WHOLE_NUMBERS = {
    "port": (0, 65535),
    "max_queue": (1, 1 << 20),
    "max_body_mib": (1, 4096),
    "batch_concurrency": (1, 1024),
}
_NUMBERS = {
    "body_timeout_s": (0.01, 86400),
    "stall_timeout_s": (0.01, 86400),
    "ping_s": (0.01, 86400),
    "drain_s": (0, 86400),
    "batch_price_factor": (0, 1e6),
}
_PRICES = ("price_input", "price_cached", "price_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server; every bound is checked at construction.

    Attributes:
        host: address to listen on; without keys it must be a loopback address.
        port: port to listen on; 0 takes a free one.
        api_key: a key that clients send; may be given several times.
        api_key_file: TOML file of hashed keys with limits, see docs/server.md.
        admin_api_key: key of the admin endpoints; without it there are none.
        served_model_name: name that clients use for the model.
        tool_call_parser: how tool calls are written; auto asks the chat template, none is off.
        reasoning_parser: how reasoning is marked; auto asks the chat template, none is off.
        max_queue: requests in progress, beyond which new ones are refused with 429; batch lines do
            not count.
        max_body_mib: largest request body but for file uploads, in MiB.
        body_timeout_s: seconds in which a request's head must arrive, and then over which its body
            must come at 16 KiB/s or more.
        stall_timeout_s: seconds after which a reader that takes nothing is disconnected.
        ping_s: seconds of silence after which a stream sends a comment.
        drain_s: seconds that requests in progress have to end after SIGTERM.
        allow_origin: web pages that may call the server, scheme://host[:port] or * for all; may be
            given several times.
        vllm_metrics: also publish metrics under the vllm: names that dashboards know.
        slo: limits of a good request, for goodput: ttft=0.2,tpot=0.12,e2e=10 in seconds, or chat.
        log_requests: one JSON line for each request on standard error, without prompts.
        data_dir: folder of files and batch jobs; default: ridgeline-PORT in the user's data folder.
        encryption_key_file: file of a key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            with which files, batches and the KV tier on disk are encrypted.
        batch_concurrency: batch lines that run at once, at the lowest priority.
        batch_price_factor: what a batch token costs relative to an online one.
        price_input: price of 1M prompt tokens; with it, usage has the cost.
        price_cached: price of 1M prompt tokens found in the cache; default: a tenth of price_input.
        price_output: price of 1M output tokens.
        otlp_endpoint: OpenTelemetry collector that gets a span for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_api_key: str | None = None
    served_model_name: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_queue: int = 1024
    max_body_mib: int = 16
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    ping_s: float = 15.0
    drain_s: float = 30.0
    allow_origin: tuple[str, ...] = ()
    vllm_metrics: bool = True
    slo: str | None = None
    log_requests: bool = True
    data_dir: str | None = None
    encryption_key_file: str | None = None
    batch_concurrency: int = 8
    batch_price_factor: float = 0.5
    price_input: float | None = None
    price_cached: float | None = None
    price_output: float | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _WHOLE_NUMBERS.items():
            check_int(name, getattr(self, name), least, most, error=SettingsError)
        for name, (low, high) in _NUMBERS.items():
            check_float(name, getattr(self, name), low, high, error=SettingsError)
        for name in _PRICES:
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), 0, 1e9, error=SettingsError)
        if self.slo is not None:
            try:
                parse_slo(self.slo)
            except InvalidRequestError as error:
                raise SettingsError(str(error)) from None
        if (self.price_input is None) != (self.price_output is None):
            raise SettingsError("price_input and price_output go together.")
        for what, parsers in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            known = ["auto", "none", *parsers]
            if getattr(self, what) not in known:
                raise SettingsError(f"{what} must be one of {', '.join(known)}.")
        Origins(self.allow_origin)
        if any(not key for key in self.api_key) or self.admin_api_key == "":
            raise SettingsError("A key must not be empty.")
        if not self.has_keys and not is_loopback(self.host):
            raise SettingsError(
                f"Without keys the server listens on this machine only, and {self.host} is open to "
                "others; set --api-key or --api-key-file."
            )

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine and no other can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

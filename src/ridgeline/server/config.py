"""Settings of the server."""

import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.settings.reading import Needs, Reads, Secret, read_settings
from ridgeline.engine.guard.config import GuardConfig
from ridgeline.roofline.slo import parse_slo
from ridgeline.server.origins import Origins
from ridgeline.text.output import REASONING_PARSERS, TOOL_PARSERS

Timeout = Annotated[float, Meta(ge=0.01, le=86400)]
_USER = re.compile(r"(?:^|(?<=//)).*@")  # which may have a password
_PORTS = {"http": 80, "https": 443}
Price = Annotated[float, Meta(ge=0, le=1e9)]


def read_slo(_name: str, value: str | None) -> str | None:
    """A setting's limits of latency; SettingsError if they are none."""
    if value is not None:
        try:
            parse_slo(value)
        except InvalidRequestError as error:
            raise SettingsError(str(error)) from None
    return value


def base_url(url: str, what: str) -> tuple[str, str, int]:
    """``http://host:port`` or ``https://…``, with its scheme and without a slash; host; port.

    Raises:
        SettingsError: it is no such URL, or has a path.
    """
    with suppress(ValueError):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or _PORTS.get(parts.scheme)
        is_base = parts.scheme in _PORTS and parts.path in ("", "/") and not parts.query
        if parts.hostname and port and is_base:
            return f"{parts.scheme}://{parts.netloc}", parts.hostname, port
    raise SettingsError(f"{_without_user(url)!r} is not {what}: http://host:port.")


def _without_user(url: str) -> str:
    return _USER.sub("", url, count=1)


def _read_join(name: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(base_url(each, f"the address of a router in {name}")[0] for each in urls)


def _read_join_as(name: str, url: str | None) -> str | None:
    return None if url is None else base_url(url, f"an address for {name}")[0]


def _one_of(parsers: Iterable[str]) -> Reads:
    known = ("auto", "none", *parsers)

    def read(name: str, value: str) -> str:
        if value not in known:
            raise SettingsError(f"{name} must be one of {', '.join(known)}.")
        return value

    return Reads(read)


_SEMANTIC = Needs("semantic_cache_error", lambda config: config.semantic_cache_error is not None)
_GUARDED = Needs("guard or guard_list", lambda config: config.guard_config is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server; every bound is checked at construction.

    Attributes:
        host: address to listen on; without keys it must be a loopback address.
        port: port to listen on; 0 takes a free one.
        api_key: a key that clients send (default: none is needed); may be given several times.
        api_key_file: TOML file of hashed keys with limits, see docs/server.md.
        admin_api_key: key of the admin endpoints; without it there are none.
        served_model_name: name that clients use for the model (default: its own); may be given
            several times, and the first is the one that answers have.
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
        unknown_fields: what becomes of fields of requests that are not known: refuse, or ignore
            with a warning in the header x-ridgeline-warning.
        ssl_keyfile: file of the private key (PEM), for HTTPS.
        ssl_certfile: file of its certificate chain (PEM).
        vllm_metrics: also publish metrics under the vllm: names that dashboards know.
        slo: limits of a good request, for goodput: ttft=0.2,tpot=0.12,e2e=10 in seconds, or chat.
        log_requests: one line for each request on standard error, without prompts: on a terminal to
            be read, elsewhere JSON.
        data_dir: folder of files and batch jobs; default: ridgeline-PORT in the user's data folder.
        encryption_key_file: file of a key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            with which files, batches and the KV tier on disk are encrypted.
        router_key_file: file of a key, as that of encryption, that the routers in front of this
            server have too (ridgeline route): their streams go on elsewhere when it is lost.
        join: URL of a router, http://host:port, whose engine this server becomes by itself, and
            again whenever that starts anew, until this server ends; given once for each.
        join_as: URL under which they find it; by default the address that reaches the router.
        keep_responses_s: seconds for which responses are kept, so that previous_response_id finds
            them; without it none is.
        file_storage_mib: files of a key's tenant in all, in MiB, beyond which it uploads no more,
            and batches whose results do not fit end.
        max_open_batches: batches of a key's tenant that are not over.
        max_batch_lines: their lines in all.
        batch_concurrency: batch lines that run at once, at the lowest priority.
        batch_price_factor: what a batch token costs relative to an online one.
        price_input: price of 1M prompt tokens; with it, usage has the cost.
        price_cached: price of 1M prompt tokens found in the cache; default: a tenth of price_input.
        price_output: price of 1M output tokens.
        price_storage: price of keeping 1M tokens of cached contents for an hour.
        max_cached_contents: cached contents that a key may have.
        cached_content_share: share of the KV pool that the cached contents of one key may take.
        response_cache_mib: memory for answers that would come out the same again (greedy, or with a
            seed); 0 keeps none.
        response_cache_ttl_s: seconds for which they are kept.
        semantic_cache_error: answers stand in for those to similar questions where the chance that
            this is wrong is at most so much, such as 0.02; without it none does.
        semantic_cache_encoder: model that makes the vectors of questions; default: the served one.
        semantic_cache_judge: how answers are compared: equal texts, or the served model is asked.
        semantic_cache_audit: share of such answers that are made anew as well, to count wrong ones.
        semantic_cache_entries: questions that are kept.
        otlp_endpoint: OpenTelemetry collector that gets a span for each request.
        guard: scorer that sees outputs before they go out, module:factory or the name of an entry
            point (see docs/guard.md).
        guard_list: file of texts and patterns that no output may have; instead of guard.
        guard_on_failure: what becomes of an output over which the scorer fails: end, or release.
        guard_timeout_s: seconds that the scorer has for an answer.
        guard_window_chars: last characters of an output that are held back whatever the scorer
            says; default: 64 for a list with patterns, else 0.
        guard_window_tokens: last tokens that are held back likewise.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_key: Annotated[tuple[str, ...], Secret()] = field(default=(), repr=False)
    api_key_file: str | None = None
    admin_api_key: Annotated[str | None, Secret()] = field(default=None, repr=False)
    served_model_name: tuple[str, ...] = ()
    tool_call_parser: Annotated[str, _one_of(TOOL_PARSERS)] = "auto"
    reasoning_parser: Annotated[str, _one_of(REASONING_PARSERS)] = "auto"
    max_queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    max_body_mib: Annotated[int, Meta(ge=1, le=4096)] = 16
    body_timeout_s: Timeout = 30.0
    stall_timeout_s: Timeout = 60.0
    ping_s: Timeout = 15.0
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    allow_origin: tuple[str, ...] = ()
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    ssl_keyfile: Annotated[
        str | None, Needs("ssl_certfile", lambda config: config.ssl_certfile is not None)
    ] = None
    ssl_certfile: Annotated[
        str | None, Needs("ssl_keyfile", lambda config: config.ssl_keyfile is not None)
    ] = None
    vllm_metrics: bool = True
    slo: Annotated[str | None, Reads(read_slo)] = None
    log_requests: bool = True
    data_dir: str | None = None
    encryption_key_file: str | None = None
    router_key_file: str | None = None
    join: Annotated[
        tuple[str, ...],
        Reads(_read_join),
        Needs("router_key_file", lambda config: config.router_key_file is not None),
    ] = ()
    join_as: Annotated[
        str | None, Reads(_read_join_as), Needs("join", lambda config: bool(config.join))
    ] = None
    keep_responses_s: Annotated[float, Meta(ge=1, le=1e9)] | None = None
    file_storage_mib: Annotated[int, Meta(ge=1, le=1 << 30)] = 10_240
    max_open_batches: Annotated[int, Meta(ge=1, le=1 << 20)] = 100
    max_batch_lines: Annotated[int, Meta(ge=1, le=1 << 30)] = 100_000
    batch_concurrency: Annotated[int, Meta(ge=1, le=1024)] = 8
    batch_price_factor: Annotated[float, Meta(ge=0, le=1e6)] = 0.5
    price_input: Price | None = None
    price_cached: Price | None = None
    price_output: Price | None = None
    price_storage: Price | None = None
    max_cached_contents: Annotated[int, Meta(ge=0, le=1 << 20)] = 16
    cached_content_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    response_cache_mib: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    response_cache_ttl_s: Annotated[
        float,
        Meta(ge=1, le=1e9),
        Needs("response_cache_mib", lambda config: config.response_cache_mib > 0),
    ] = 3600.0
    semantic_cache_error: Annotated[float, Meta(gt=0, lt=1)] | None = None
    semantic_cache_encoder: Annotated[str, _SEMANTIC] | None = None
    semantic_cache_judge: Annotated[Literal["equal", "model"], _SEMANTIC] = "equal"
    semantic_cache_audit: Annotated[float, Meta(ge=0, le=1), _SEMANTIC] = 0.05
    semantic_cache_entries: Annotated[int, Meta(ge=1, le=100_000), _SEMANTIC] = 10_000
    otlp_endpoint: str | None = None
    guard: str | None = None
    guard_list: str | None = None
    guard_on_failure: Annotated[Literal["end", "release"], _GUARDED] = "end"
    guard_timeout_s: Annotated[Timeout, _GUARDED] = 1.0
    guard_window_chars: Annotated[int, Meta(ge=0, le=1 << 20), _GUARDED] | None = None
    guard_window_tokens: Annotated[int, Meta(ge=0, le=1 << 20), _GUARDED] = 0

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        read_settings(self)
        if (self.price_input is None) != (self.price_output is None):
            raise SettingsError("price_input and price_output go together.")
        if self.guard is not None and self.guard_list is not None:
            raise SettingsError("guard and guard_list exclude each other.")
        Origins(self.allow_origin)
        if any(not key for key in self.api_key) or self.admin_api_key == "":
            raise SettingsError("A key must not be empty.")
        if self.join_as is None and is_loopback(self.host):
            for router in self.join:
                if not is_loopback(base_url(router, "")[1]):
                    raise SettingsError(
                        f"host {self.host} is this machine alone, where the router "
                        f"{_without_user(router)} does not find it: give another host, or join_as."
                    )
        if not self.has_keys and not is_loopback(self.host):
            raise SettingsError(
                f"Without keys the server listens on this machine only, and {self.host} is open to "
                "others; set --api-key or --api-key-file."
            )

    @property
    def guard_config(self) -> GuardConfig | None:
        """What judges outputs, if anything does."""
        if self.guard is None and self.guard_list is None:
            return None
        return GuardConfig(
            scorer=self.guard,
            word_list=self.guard_list,
            on_failure=self.guard_on_failure,
            timeout_s=self.guard_timeout_s,
            window_chars=self.guard_window_chars,
            window_tokens=self.guard_window_tokens,
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

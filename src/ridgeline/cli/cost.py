"""``ridgeline cost``: what measured rates cost, without a model or a prediction."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ridgeline.cli.money import add_money_options, check_money, device_usd_per_hour
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.metrics import concurrency

_POSITIVE = (
    "count", "output_tok_s", "output", "prefill_rpm", "tpot_ms", "batch_ms", "cache_gb", "hours",
)  # fmt: skip
_MONTH_HOURS = 730.0


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("--hardware", metavar="NAME", help="a device of the catalogue: its price")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="devices of your own")
    parser.add_argument("--count", type=int, metavar="N", help="devices; default 1")
    parser.add_argument(
        "--output-tok-s", type=float, metavar="R", help="output tokens/s of all devices together"
    )
    parser.add_argument("--output", type=int, metavar="N", help="output tokens of a request")
    parser.add_argument(
        "--prefill-rpm", type=float, metavar="R", help="prompts that are computed in a minute"
    )
    parser.add_argument("--tpot-ms", type=float, metavar="T", help="time of an output token")
    parser.add_argument("--batch-ms", type=float, metavar="T", help="time of one batch, alone")
    parser.add_argument("--cache-gb", type=float, metavar="G", help="a cache that is kept")
    parser.add_argument("--hours", type=float, metavar="H", help="of keeping it; default a month")
    add_money_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Work out what can be from what was given."""
    for name in _POSITIVE:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e12:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be greater than 0.")
    check_money(arguments)
    result = dict(_figures(arguments))
    if not result:
        raise InvalidRequestError(
            "There is nothing to work out: give --usd-per-hour, --hardware or --purchase-usd, and "
            "a rate such as --output-tok-s."
        )
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _figures(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Names and values, each in the unit that its name ends with."""
    from ridgeline.planning import cost

    usd, rate = _usd_per_hour(arguments), arguments.output_tok_s
    if arguments.tpot_ms is not None:
        if rate is None:
            raise InvalidRequestError(
                "--tpot-ms needs --output-tok-s: together, what is in progress."
            )
        yield "sequences_in_progress", concurrency(rate, arguments.tpot_ms / 1e3)
    if arguments.cache_gb is not None:
        if arguments.usd_per_gb_month is None:
            raise InvalidRequestError("--cache-gb needs --usd-per-gb-month.")
        hours = arguments.hours or _MONTH_HOURS
        yield (
            "cache_storage_usd",
            cost.storage_usd(arguments.cache_gb * 1e9, hours, arguments.usd_per_gb_month),
        )
    if usd is None:
        if arguments.batch_ms or arguments.prefill_rpm or (rate and arguments.tpot_ms is None):
            raise InvalidRequestError(
                "What an hour costs is not known: give --usd-per-hour or --purchase-usd."
            )
        return
    yield "usd_per_hour", usd
    if arguments.batch_ms is not None:
        seconds = arguments.batch_ms / 1e3
        yield "usd_per_1m_batches", cost.usd_per_million_batches(usd, seconds)
    per_thousand = 0.0
    if arguments.prefill_rpm is not None:
        per_thousand = cost.usd_per_thousand_requests(usd, arguments.prefill_rpm / 60)
        yield "prefill_usd_per_1k_requests", per_thousand
    if rate is not None:
        per_million = cost.usd_per_million_tokens(usd, rate)
        yield "usd_per_1m_output", per_million
        if arguments.bytes_per_token is not None:
            per_bytes = cost.usd_per_million_bytes(per_million, arguments.bytes_per_token)
            yield "usd_per_1m_bytes", per_bytes
        if arguments.output is not None:
            decode = cost.usd_per_thousand_requests(usd, rate / arguments.output)
            yield "decode_usd_per_1k_requests", decode
            yield "usd_per_1k_requests", per_thousand + decode
            yield "usd_per_request", (per_thousand + decode) / 1e3
    if arguments.api_usd_per_1m is not None:
        api = cost.break_even_tokens_per_s(usd, arguments.api_usd_per_1m)
        yield "break_even_output_tok_s", api
        if rate is not None:
            yield "break_even_share_of_rate", api / rate


def _usd_per_hour(arguments: argparse.Namespace) -> float | None:
    """Of an hour in which all devices work."""
    price = power_w = None
    if arguments.hardware is not None:
        device = load_catalogue(arguments.catalogue).device(arguments.hardware)
        price = device.usd_per_hour.value if device.usd_per_hour else None
        power_w = device.power_w.value if device.power_w else None
    usd = device_usd_per_hour(arguments, price, power_w)
    return None if usd is None else usd * (arguments.count or 1)


_LINES = {
    "sequences_in_progress": "{:.2f} sequences in progress (rate × time: Little's law)",
    "cache_storage_usd": "${:.2f} to keep the cache",
    "usd_per_hour": "${:.3f} for an hour of work",
    "usd_per_1m_batches": "${:.3f} per 1M batches",
    "prefill_usd_per_1k_requests": "${:.3f} per 1K requests, prefill",
    "usd_per_1m_output": "${:.3f} per 1M output tokens",
    "usd_per_1m_bytes": "${:.3f} per 1M bytes of output",
    "decode_usd_per_1k_requests": "${:.3f} per 1K requests, decode",
    "usd_per_1k_requests": "${:.3f} per 1K requests",
    "usd_per_request": "${:.6f} per request",
    "break_even_output_tok_s": "{:,.0f} output tok/s, all the time, cost what the API does",
    "break_even_share_of_rate": "{:.0%} of the rate",
}


def _print(result: Mapping[str, float]) -> None:
    for name, value in result.items():
        too_much = name == "break_even_share_of_rate" and value > 1
        print(_LINES[name].format(value) + (", so it is dearer than the API" if too_much else ""))

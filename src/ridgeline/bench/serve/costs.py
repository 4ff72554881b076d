"""What a load costs: by the hour of a machine, or by the tokens of an API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.serve.metrics import Summary
from ridgeline.planning.cost import (
    TokenPrices,
    token_prices,
    usd_per_million_tokens,
    usd_per_thousand_requests,
)
from ridgeline.roofline.utilization import Utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars: of an hour of the whole machine, or for a million tokens of an API."""

    usd_per_hour: float | None = None
    tokens: TokenPrices | None = None


def costs(summary: Summary, prices: Prices, use: Mapping[str, Utilization]) -> dict[str, Any]:
    """Dollars for 1M output tokens, 1K completed requests, and 1K good ones, for which the others
    are paid as well; ``usd_per_1m_by_phase`` splits a machine's hour by the phases' seconds.

    What cannot be known, or was not done at all, is null.
    """
    if prices.usd_per_hour is not None:
        return {
            "usd_per_1m_output": _each(
                usd_per_million_tokens, prices.usd_per_hour, summary.output_tokens_s
            ),
            "usd_per_1m_by_phase": _by_phase(prices.usd_per_hour, summary, use),
            "usd_per_1k_requests": _each(
                usd_per_thousand_requests, prices.usd_per_hour, summary.completed_rate
            ),
            "usd_per_1k_good": _each(
                usd_per_thousand_requests, prices.usd_per_hour, summary.goodput
            ),
        }
    if prices.tokens is not None:
        # Of a second; what is asked of `of_request` need not be whole.
        usd = prices.tokens.of_request(summary.input_tokens_s, summary.output_tokens_s)
        return {
            "usd_per_1m_output": prices.tokens.output,
            "usd_per_1m_by_phase": {"input": prices.tokens.input, "output": prices.tokens.output},
            "usd_per_1k_requests": _share(1e3 * usd, summary.completed_rate),
            "usd_per_1k_good": _share(1e3 * usd, summary.goodput),
        }
    return {}


def _each(formula: Any, usd_per_hour: float, rate: float) -> float | None:
    return float(formula(usd_per_hour, rate)) if rate > 0 else None


def _share(usd: float, rate: float) -> float | None:
    return usd / rate if rate > 0 else None


def _by_phase(
    usd_per_hour: float, summary: Summary, use: Mapping[str, Utilization]
) -> dict[str, float] | None:
    prefill, decode = use.get("prefill"), use.get("decode")
    if prefill is None or decode is None or not summary.output_tokens_s:
        return None
    seconds = prefill.seconds + decode.seconds
    found = token_prices(
        usd_per_hour,
        prefill_s=prefill.seconds / seconds,
        decode_s=decode.seconds / seconds,
        input_tokens=summary.input_tokens_s,
        output_tokens=summary.output_tokens_s,
    )
    return {"input": found.input, "output": found.output}

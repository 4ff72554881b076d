"""What serving costs. Money is US dollars, rates are per hour of the whole machine."""

from dataclasses import dataclass

HOUR_S = 3600.0


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """10⁶·$h / (3600·X).

    >>> f"{usd_per_million_tokens(2.0, 100.0):.3f}"
    '5.556'
    """
    return 1e6 * usd_per_hour / (HOUR_S * tokens_per_s)


def usd_per_thousand_requests(usd_per_hour: float, requests_per_s: float) -> float:
    """10³·$h / (3600·rate); with goodput as the rate, failures and late answers cost too.

    100 requests a minute are prefilled, and 200 tokens each are decoded at 100 tokens/s:

    >>> prefill = usd_per_thousand_requests(2.0, 100 / 60)
    >>> decode = usd_per_thousand_requests(2.0, 100 / 200)
    >>> f"{prefill:.2f} {decode:.2f} {prefill + decode:.2f}"
    '0.33 1.11 1.44'
    """
    return 1e3 * usd_per_hour / (HOUR_S * requests_per_s)


def usd_per_million_batches(usd_per_hour: float, seconds_per_batch: float) -> float:
    """One machine, one batch after the other: a V100 and a TPU v3.

    >>> f"{usd_per_million_batches(2.48, 3.8e-3):.2f}"
    '2.62'
    >>> f"{usd_per_million_batches(4.50, 1.7e-3):.3f}"
    '2.125'
    """
    return 1e6 * seconds_per_batch * usd_per_hour / HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Dollars per million tokens."""

    input: float
    output: float

    def of_request(self, input_tokens: float, output_tokens: float) -> float:
        """Dollars."""
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


def token_prices(
    usd_per_hour: float,
    *,
    prefill_s: float,
    decode_s: float,
    input_tokens: float,
    output_tokens: float,
) -> TokenPrices:
    """Each phase's seconds, spread over its tokens: 1,000 s of prefill made 10 M tokens, ….

    >>> token_prices(3.6, prefill_s=1e3, decode_s=1e3, input_tokens=1e7, output_tokens=1e6)
    TokenPrices(input=0.1, output=1.0)
    """
    rate = usd_per_hour / HOUR_S
    return TokenPrices(
        input=1e6 * rate * prefill_s / input_tokens, output=1e6 * rate * decode_s / output_tokens
    )


def owned_usd_per_hour(
    *,
    purchase_usd: float,
    lifetime_years: float,
    power_w: float,
    usd_per_kwh: float,
    cooling: float,
) -> float:
    """A machine of one's own: purchase over its lifetime, and its power times ``cooling``.

    >>> box = dict(purchase_usd=26280, lifetime_years=3, power_w=1e3)
    >>> f"{owned_usd_per_hour(**box, usd_per_kwh=0.1, cooling=1.3):.2f}"
    '1.13'
    """
    return purchase_usd / (lifetime_years * 365 * 24) + power_w / 1e3 * usd_per_kwh * cooling


def usd_per_busy_hour(usd_per_hour: float, busy_share: float) -> float:
    """Idle hours are paid for as well: those in which it works bear them.

    >>> f"{usd_per_busy_hour(1.13, 0.5):.2f}"
    '2.26'
    """
    return usd_per_hour / busy_share


def break_even_tokens_per_s(usd_per_hour: float, api_usd_per_million: float) -> float:
    """Tokens per second above which a machine is cheaper than an API.

    >>> f"{break_even_tokens_per_s(3.6, 0.5):.0f}"
    '2000'
    """
    return 1e6 * usd_per_hour / (HOUR_S * api_usd_per_million)


def storage_usd(num_bytes: float, hours: float, usd_per_gb_month: float) -> float:
    """Keeping a cache: 100 GB for a month at $0.08.

    >>> f"{storage_usd(100e9, 730, 0.08):.2f}"
    '8.00'
    """
    return num_bytes / 1e9 * hours / 730 * usd_per_gb_month


def token_storage_cost(token_hours: float, per_million_token_hours: float) -> float:
    """Keeping KV by the token: 100,000 tokens for a day at 1.0 for a million an hour.

    >>> token_storage_cost(100_000 * 24, 1.0)
    2.4
    """
    return token_hours * per_million_token_hours / 1e6


def usd_per_million_bytes(usd_per_million: float, bytes_per_token: float) -> float:
    """Tokens differ among tokenizers; bytes of text do not.

    >>> usd_per_million_bytes(5.0, 4.0)
    1.25
    """
    return usd_per_million / bytes_per_token

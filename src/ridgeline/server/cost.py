"""What a request costs."""

from decimal import Decimal

from ridgeline.server.context import Call
from ridgeline.server.schemas.generation import Cost

_MILLION = 1_000_000


def cost_of(call: Call) -> Cost | None:
    """Tokens by their prices per million; the batch API has a factor on all of them.

    In decimals, like the price list: 5 tokens at 1.0 are 0.000005, and not the double beside it.
    """
    config = call.server.config
    if config.price_input is None or config.price_output is None:
        return None
    price = _decimal(config.price_input)
    price_cached = price / 10 if config.price_cached is None else _decimal(config.price_cached)
    share = (_decimal(config.batch_price_factor) if call.is_batch else Decimal(1)) / _MILLION
    prefill = (call.prompt_tokens - call.cached_tokens) * price * share
    cached = call.cached_tokens * price_cached * share
    decode = (call.output_tokens - call.replayed_tokens) * _decimal(config.price_output) * share
    return Cost(
        prefill=float(prefill),
        cached=float(cached),
        decode=float(decode),
        total=float(prefill + cached + decode),
    )


def _decimal(price: float) -> Decimal:
    """The number as it was written."""
    return Decimal(repr(price))

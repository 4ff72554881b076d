"""Options of `cost` and `plan` about money: what an hour costs, and what to compare with."""

import argparse

from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError

_OWNED = ("lifetime_years", "usd_per_kwh", "cooling", "power_w")
# Every option of `add_money_options`.
MONEY = (
    "usd_per_hour", "purchase_usd", "busy_share", "api_usd_per_1m", "bytes_per_token",
    "usd_per_gb_month", *_OWNED,
)  # fmt: skip
_LIFETIME_YEARS, _USD_PER_KWH, _COOLING = 4.0, 0.12, 1.3


def add_money_options(parser: Parser) -> None:
    """What an hour of the machine costs, rented or owned, and what its tokens are compared with."""
    money = parser.add_argument_group("money")

    def add(name: str, metavar: str, text: str) -> None:
        money.add_argument(name, type=float, metavar=metavar, help=text)

    add("--usd-per-hour", "X", "rent of one device; default: the catalogue's price, if any")
    add("--purchase-usd", "X", "a device of your own: its price, with its share of the host")
    add("--lifetime-years", "Y", f"of an owned device; default {_LIFETIME_YEARS:g}")
    add("--usd-per-kwh", "X", f"of an owned device; default {_USD_PER_KWH}")
    add("--cooling", "F", f"power of the site / power of the device (PUE); default {_COOLING}")
    add("--power-w", "W", "of an owned device; default: the datasheet's")
    add("--busy-share", "S", "hours that it works, of those paid for; default 1")
    add("--api-usd-per-1m", "X", "an API's price of output tokens, to compare with")
    add("--bytes-per-token", "B", "text of a token, for the cost of a byte")
    add("--usd-per-gb-month", "X", "of the storage that keeps a cache")


def check_money(arguments: argparse.Namespace) -> None:
    """Raise `InvalidRequestError` for what is no price, or means nothing beside the others."""
    for name in MONEY:
        value = getattr(arguments, name)
        if value is None:
            continue
        if not 0 < value < 1e9:
            raise InvalidRequestError(f"{_option(name)} must be greater than 0.")
        if name in _OWNED and arguments.purchase_usd is None:
            raise InvalidRequestError(
                f"{_option(name)} is of a device of your own: --purchase-usd."
            )
    if arguments.purchase_usd is not None and arguments.usd_per_hour is not None:
        raise InvalidRequestError(
            "--purchase-usd and --usd-per-hour are owned and rented: give one."
        )
    if (arguments.busy_share or 1.0) > 1.0:
        raise InvalidRequestError("--busy-share is at most 1.")
    if (arguments.cooling or 1.0) < 1.0:
        raise InvalidRequestError("--cooling is at least 1: the site takes what the device takes.")


def device_usd_per_hour(
    arguments: argparse.Namespace, price: float | None, power_w: float | None
) -> float | None:
    """Of an hour in which one device works: rented, owned, or the catalogue's ``price``; ``None``
    where none of them is known. ``power_w`` is the datasheet's.

    Raises:
        InvalidRequestError: the power of an owned device is not known.
    """
    from ridgeline.planning.cost import owned_usd_per_hour, usd_per_busy_hour

    usd = arguments.usd_per_hour or price
    if arguments.purchase_usd is not None:
        power_w = arguments.power_w or power_w
        if power_w is None:
            raise InvalidRequestError("The device's power is not known: give --power-w.")
        usd = owned_usd_per_hour(
            purchase_usd=arguments.purchase_usd,
            lifetime_years=arguments.lifetime_years or _LIFETIME_YEARS,
            power_w=power_w,
            usd_per_kwh=arguments.usd_per_kwh or _USD_PER_KWH,
            cooling=arguments.cooling or _COOLING,
        )
    return None if usd is None else usd_per_busy_hour(usd, arguments.busy_share or 1.0)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""Which options of ``ridgeline plan`` mean something together."""

import argparse

from ridgeline.cli.hardware import check_machine_options
from ridgeline.cli.money import MONEY, check_money
from ridgeline.cli.report_file import check_new_files
from ridgeline.core.errors import InvalidRequestError

# What an option leaves no room for, and why.
_EXCLUDED = {
    "max_rate": (("rate", "trace"), "it looks for the rate"),
    "trace": (("rate", "requests", "prompt", "output", "seed"), "a trace has its own"),
    "cheapest": (
        ("hardware", "count", "tensor_parallel", *MONEY, "executor", "calibrate"),
        "it goes through the catalogue",
    ),
    "place": (
        ("model", "shape", "config", "rate", "trace", "tensor_parallel"),
        "each --place is a shape, perhaps with a rate, on one device",
    ),
    "disaggregate": (("trace", *MONEY), "it counts instances of a typical request"),
    "layouts": (
        ("rate", "trace", "tensor_parallel", "cheapest", *MONEY),
        "it compares layouts of the devices that there are, each with all that it can take",
    ),
}
_COUNTS = (
    "count", "tensor_parallel", "prompt", "output", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
_MIN_REQUESTS = 40


def check_plan(arguments: argparse.Namespace) -> None:
    """Raise `InvalidRequestError` for what is out of range or means nothing beside the rest."""
    _check_page(arguments)
    _check_network(arguments)
    _check_excluded(arguments)
    check_machine_options(arguments)
    _check_sizes(arguments)
    check_money(arguments)
    _check_arrivals(arguments)
    _check_question(arguments)


def place_rate(text: str) -> float:
    """What stands behind the colon of ``--place``; 0 if nothing does."""
    try:
        rate_rps = float(text or 0)
    except ValueError:
        raise InvalidRequestError(f"--place SHAPE:RATE: {text!r} is not a rate.") from None
    if not 0 <= rate_rps < 1e6:
        raise InvalidRequestError("--place SHAPE:RATE: a rate is positive.")
    return rate_rps


def _check_page(arguments: argparse.Namespace) -> None:
    check_new_files([arguments.html])
    several = ("cheapest", "disaggregate", "place", "layouts")
    if arguments.html and any(_given(arguments, name) for name in several):
        raise InvalidRequestError(
            "--html is of one plan: no --cheapest, --disaggregate, --place or --layouts."
        )


def _check_network(arguments: argparse.Namespace) -> None:
    for name in ("network_gb_per_s", "network_us"):
        value = getattr(arguments, name)
        if value is not None and not arguments.layouts:
            raise InvalidRequestError(f"{_option(name)} is of --layouts.")
        if value is not None and not 0 < value < 1e6:
            raise InvalidRequestError(f"{_option(name)} must be above 0 and below 1,000,000.")
    if arguments.network_us is not None and arguments.network_gb_per_s is None:
        raise InvalidRequestError("--network-us needs --network-gb-per-s.")


def _check_excluded(arguments: argparse.Namespace) -> None:
    for name, (others, why) in _EXCLUDED.items():
        for other in others if _given(arguments, name) else ():
            if _given(arguments, other):
                raise InvalidRequestError(
                    f"{_option(other)} means nothing with {_option(name)}: {why}."
                )


def _check_sizes(arguments: argparse.Namespace) -> None:
    for name in _COUNTS:
        if _given(arguments, name) and getattr(arguments, name) < 1:
            raise InvalidRequestError(f"{_option(name)} must be at least 1.")
    if (arguments.count or 1) > 1024:
        raise InvalidRequestError("At most 1,024 devices are planned for.")
    if arguments.rate is not None and not 0 < arguments.rate < 1e9:
        raise InvalidRequestError("--rate must be greater than 0.")


def _check_arrivals(arguments: argparse.Namespace) -> None:
    if arguments.requests is not None and not _MIN_REQUESTS <= arguments.requests <= 100_000:
        raise InvalidRequestError(f"--requests must be from {_MIN_REQUESTS} to 100,000.")
    for name in ("requests", "seed"):
        if _given(arguments, name) and not _has_rate(arguments):
            raise InvalidRequestError(
                f"{_option(name)} is of a rate: give --rate, --max-rate or --place SHAPE:RATE."
            )


def _check_question(arguments: argparse.Namespace) -> None:
    if arguments.max_rate and arguments.slo is None:
        raise InvalidRequestError("--max-rate needs --slo.")
    if arguments.cheapest and (arguments.max_rate or arguments.disaggregate):
        raise InvalidRequestError("--cheapest is of a load or of --place: choose one question.")
    if arguments.memory_share is not None and not (
        arguments.place and 0 < arguments.memory_share <= 1
    ):
        raise InvalidRequestError("--memory-share is of --place, and at most 1.")
    needs_load = arguments.cheapest and not arguments.place
    if needs_load and arguments.rate is None and arguments.trace is None:
        raise InvalidRequestError("--cheapest needs a load: --rate or --trace.")


def _has_rate(arguments: argparse.Namespace) -> bool:
    """Whether requests arrive at random times."""
    placed = (text.partition(":")[2] for text in arguments.place or ())
    return arguments.max_rate or arguments.rate is not None or any(map(place_rate, placed))


def _given(arguments: argparse.Namespace, name: str) -> bool:
    value = getattr(arguments, name)
    return value is not None and value is not False and (name, value) != ("executor", "auto")


def _option(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"

"""``ridgeline hardware``: the machines that plans are made for, and where each figure is from."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.cli.display import output_console, print_paragraph
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import BFLOAT16, NumberFormat, number_format
from ridgeline.roofline.catalogue import Catalogue, Cell, DeviceSpec, load_catalogue

NO_PRICE = "no price"


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, with every source")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="devices of your own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List devices, or tell all of some."""
    catalogue = load_catalogue(arguments.catalogue)
    chosen = [name.lower() for name in arguments.names] or list(catalogue.devices)
    devices = {key: catalogue.device(key) for key in chosen}
    if arguments.json:
        print(json.dumps({key: _json(device, catalogue) for key, device in devices.items()}))
    elif arguments.names:
        _print_sources(devices, catalogue)
    else:
        _print_list(devices)
    return 0


def _json(device: DeviceSpec, catalogue: Catalogue) -> dict[str, Any]:
    """All figures; the name of a source is replaced by what it means."""

    def told(value: object) -> object:
        if isinstance(value, dict) and "source" in value:
            return value | {"source": catalogue.sources[value["source"]]}
        return {k: told(v) for k, v in value.items()} if isinstance(value, dict) else value

    return {name: told(value) for name, value in msgspec.to_builtins(device).items()}


_ROW = "{:<16} {:<34} {:>6} {:>10} {:>7} {:>6} {:>6} {:>8}"


def _print_list(devices: dict[str, DeviceSpec]) -> None:
    print(_ROW.format("name", "device", "GB", "GB/s", "16 bit", "8 bit", "W", "$/h"))
    for key, device in devices.items():
        price = device.usd_per_hour
        print(
            _ROW.format(
                key,
                device.name,
                f"{device.memory_gb.value:.3g}",
                _short(device.bandwidth_tbps.value * 1e3),
                _rate(device, BFLOAT16, number_format("float16")),
                _rate(device, number_format("fp8"), number_format("int8"), own=True),
                f"{device.power_w.value:,.0f}" if device.power_w else "–",
                NO_PRICE if price is None else f"{price.value:.2f}",
            )
        )
    print(
        "\n16 bit and 8 bit: dense TFLOP/s of the datasheet; – where there is none.\n"
        "`ridgeline hardware NAME` has the source of every figure and the date of the price.\n"
        "Your own devices go into ~/.config/ridgeline/hardware.toml."
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _rate(device: DeviceSpec, *forms: NumberFormat, own: bool = False) -> str:
    """The best rate of some formats; ``own`` leaves out what would be unpacked to wider ones."""
    ceilings, found = device.ceilings(), list[float]()
    for form in forms:
        if own and not ceilings.has_own_rate(form):
            continue
        try:
            found.append(ceilings.peak_flops(form))
        except InvalidRequestError:
            continue
    return _short(max(found) / 1e12) if found else "–"


def _print_sources(devices: dict[str, DeviceSpec], catalogue: Catalogue) -> None:
    console = output_console()
    for key, device in devices.items():
        console.print(f"{key}: {device.name} ({device.kind.value})", style="bold", markup=False)
        for label, unit, cell in _cells(device):
            source = f"{catalogue.sources[cell.source]}; confidence {cell.confidence}"
            text = f"  {label:<16} {cell.value:>10,.6g} {unit:<8} {source}"
            print_paragraph(console, text, indent=39)
        if device.usd_per_hour is None:
            console.print(f"  {'price':<16} {NO_PRICE}: no source is known; use --usd-per-hour")


def _cells(device: DeviceSpec) -> Sequence[tuple[str, str, Cell]]:
    named = [
        ("memory", "GB", device.memory_gb),
        ("bandwidth", "TB/s", device.bandwidth_tbps),
        *((name, "TFLOP/s", cell) for name, cell in device.tflops.items()),
        ("power", "W", device.power_w),
        ("price", "$/h", device.usd_per_hour),
        ("link, one way", "GB/s", device.link_gb_per_s),
        ("link latency", "µs", device.link_latency_us),
    ]
    return [(label, unit, cell) for label, unit, cell in named if cell is not None]

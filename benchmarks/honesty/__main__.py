"""``make bench-honesty``: measurements and results go to ``benchmarks/results``, the page to
``docs``."""

import argparse
from pathlib import Path

from benchmarks.honesty.cases import CALIBRATED_FORMATS
from benchmarks.honesty.measured import load, save
from benchmarks.honesty.page import page
from benchmarks.honesty.report import report
from benchmarks.honesty.run import HonestyRun
from ridgeline.roofline.storage import write_json


def main() -> None:
    """Measure, or take what was measured; fit, compare, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honesty", description=__doc__)
    parser.add_argument("--executor", choices=tuple(CALIBRATED_FORMATS), default="cpu")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--page", type=Path, default=Path("docs/honesty.md"))
    parser.add_argument("--quick", action="store_true", help="few steps; writes no page")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="fit and report from these measurements"
    )
    arguments = parser.parse_args()
    quick = "-quick" if arguments.quick else ""
    if arguments.replay is not None:
        measured = load(arguments.replay)
        name = f"honesty-{measured.executor}{quick}"
    else:
        name = f"honesty-{arguments.executor}{quick}"
        predictions = arguments.results / f"{name}-predictions.json"
        measured = HonestyRun(arguments.executor, predictions, quick=arguments.quick).measure()
        save(measured, arguments.results / f"{name}-measurements.json")
    result = report(measured) | {"replayed": arguments.replay is not None}
    write_json(arguments.results / f"{name}.json", result)
    text = page(result)
    if not arguments.quick:
        arguments.page.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""``make bench-honesty``: results go to ``benchmarks/results``, and the page to ``docs``."""

import argparse
from pathlib import Path

from ridgeline.bench.honesty.page import page
from ridgeline.bench.honesty.run import run
from ridgeline.executors import default_executor
from ridgeline.roofline.storage import write_json


def main() -> None:
    """Run everything, some eight minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executor", default=default_executor())
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--page", type=Path, default=Path("docs/honesty.md"))
    parser.add_argument("--quick", action="store_true", help="few steps; writes no page")
    arguments = parser.parse_args()
    result = run(arguments.executor, arguments.results, quick=arguments.quick)
    name = f"honesty-{arguments.executor}-{result['created'][:10]}.json"
    write_json(arguments.results / name, result)
    text = page(result)
    if not arguments.quick:
        arguments.page.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

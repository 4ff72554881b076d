"""``python -m benchmarks.gpu``: measure, print a table, write a file."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from ridgeline.kernels.gpu import missing_for_gpu, missing_for_triton


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where there is no GPU, or something failed."""
    missing = missing_for_triton()
    if missing is not None:
        return _nothing(missing)
    from benchmarks.gpu.run import check, run  # which need what is not missing
    from benchmarks.gpu.settings import FULL, MINIATURE

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, help="no other case is begun after these")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    parser.add_argument("--shapes", nargs="+", choices=tuple(FULL.shapes), help="only these")
    parser.add_argument("--formats", nargs="+", choices=FULL.formats, help="only these")
    parser.add_argument(
        "--host", action="store_true", help="a miniature on the CPU, to see that all of it runs"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the reference executor, measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.host and options.shapes:
        parser.error("--host has a shape of its own; leave --shapes out")
    settings = MINIATURE if options.host else FULL
    if options.minutes is not None:
        settings = replace(settings, minutes=options.minutes)
    if options.formats:
        settings = replace(settings, formats=tuple(options.formats))
    if options.shapes:
        shapes = {name: FULL.shapes[name] for name in options.shapes}
        settings = replace(settings, shapes=shapes)
    reason = None if options.host else missing_for_gpu()
    if reason is not None:
        if options.check:
            print(f"skipped: {reason}")
            return 0
        return _nothing(reason)
    if options.check:
        return check(settings, on_host=options.host)
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    report, path = run(settings, on_host=options.host, folder=options.out, tell=tell)
    print(report.text())
    print(f"\nwritten to {path}")
    return 1 if report.failed else 0


def _nothing(reason: str) -> int:
    print(f"Nothing can be measured here: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

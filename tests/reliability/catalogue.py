"""The 41 items of docs/reliability.md at their full counts.

``python -m tests.reliability.catalogue`` runs all (hours on a slow machine), with numbers those
items only; each gives a line, and the exit status is 1 if one fails. Results are kept in
``build/reliability.json``; ``--table`` writes those of all runs into docs/reliability.md, where the
rows of other items stay as they are.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import msgspec

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "reliability.json"
DOCS = ROOT / "docs" / "reliability.md"


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``tests`` are pytest's arguments; ``unit`` is what they count."""

    what: str
    unit: str
    tests: str
    optimized: bool = False


ITEMS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[int, Item], strict=False
)


def commit() -> str:
    """The commit, with a plus where the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def command_of(item: Item) -> str:
    optimize = "PYTHONOPTIMIZE=1 " if item.optimized else ""
    return f"{optimize}python -m pytest {item.tests}"


def run(item: Item) -> dict[str, object]:
    """Run an item's tests; what the table says of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = f"--show-capture=stdout -p no:cacheprovider --junitxml={report}"
        command = f"{command_of(item)} {options}"
        began_s = time.monotonic()
        done = subprocess.run(
            command.replace("python", sys.executable, 1), shell=True, cwd=ROOT,
            capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.monotonic() - began_s
        if not report.exists():
            return {"result": "not run", "output": done.stdout[-2000:] + done.stderr[-2000:]}
        suite = ElementTree.parse(report).getroot()[0]
    said = suite.iterfind("testcase/properties/property[@name='counted']")
    counts = [float(each.get("value", "0")) for each in said]
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    result = "passed" if done.returncode == 0 else f"{failed} of {tests} tests failed"
    uses_counts = item.unit not in ("tests", "templates")
    return {
        "count": round(sum(counts)) if uses_counts else tests - skipped,
        "result": result + (f", {skipped} skipped" if skipped else ""),
        "seconds": round(seconds),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "output": "" if done.returncode == 0 else done.stdout[-6000:],
    }


def known() -> dict[str, dict[str, object]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table() -> str:
    """docs/reliability.md's, from the results so far."""
    results, rows = known(), DOCS.read_text().splitlines()
    lines = ["| | what | count | result | date |", "|---|---|---|---|---|"]
    for number, item in ITEMS.items():
        found = results.get(str(number))
        if found is None or "count" not in found:
            begin = f"| {number} | {item.what} |"
            before = (row for row in rows if row.startswith(begin))
            lines.append(next(before, f"{begin} – | not tried | – |"))
            continue
        count = f"{found['count']:,} {item.unit}"
        when = f"{found['date']}, {found['commit']}"
        lines.append(f"| {number} | {item.what} | {count} | {found['result']} | {when} |")
    lines += [
        "",
        "`make test-reliability ITEMS=N` runs item N; the tests of each:",
        "",
        "| | tests |",
    ]
    lines += ["|---|---|"]
    lines += [f"| {number} | `{command_of(item)}` |" for number, item in ITEMS.items()]
    return "\n".join(lines)


def write_table() -> None:
    before, begin, rest = DOCS.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->")
    DOCS.write_text(f"{before}{begin}{table()}\n{end}{after}")


def main(arguments: list[str]) -> int:
    if arguments == ["--table"]:
        write_table()
        return 0
    has_failed = False
    for number in map(int, arguments) if arguments else ITEMS:
        found = run(ITEMS[number])
        has_failed |= found["result"] != "passed" and not str(found["result"]).startswith("passed,")
        print(
            f"{number:2}  {found['result']:8}  {found.get('count', 0):>7,} {ITEMS[number].unit}"
            f"  {found.get('seconds', 0)} s  {ITEMS[number].what}\n{found['output']}".rstrip(),
            flush=True,
        )
        results = known() | {str(number): found}
        RESULTS.parent.mkdir(exist_ok=True)
        partial = RESULTS.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(RESULTS)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Changes functions of a package in small ways, and says which changes no test notices.

``make test-mutants PACKAGE=scheduler COUNT=60``. What was killed once is not run again; survivors
are, so that the same command shows what a new test kills. Without a package it writes the report.

It is neither cosmic-ray nor mutmut: these draw no sample of a package's mutants by a seed, write
into a tree, and start tests anew for each mutant, most of whose time is that of torch's import.
"""

import argparse
import datetime
import os
import random
import sys
from collections import Counter
from pathlib import Path

import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.running import SOURCE, Session
from tests.reliability.catalogue import commit

_BUILD = Path("build/mutants")
_REPORT = Path("docs/mutants.md")


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``files`` are changed, ``tests`` should notice."""

    files: list[str]
    tests: list[str]

    def mutants(self) -> list[Mutant]:
        paths = sorted({path for pattern in self.files for path in SOURCE.glob(pattern)})
        return [
            mutant
            for path in paths
            for mutant in mutants_of(str(path.relative_to(SOURCE)), path.read_text(), str(path))
        ]


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mutant written by hand: ``before``, once in the file, becomes ``after`` in ``scope``;
    ``test`` is to notice."""

    what: str
    path: str
    scope: str
    before: str
    after: str
    test: str

    def mutant(self) -> Mutant:
        file = SOURCE / self.path
        text = file.read_text()
        if text.count(self.before) != 1:
            raise SystemExit(f"{self.path} should have once: {self.before}")
        original = compile(text, file, "exec", dont_inherit=True)
        changed = compile(text.replace(self.before, self.after), file, "exec", dont_inherit=True)
        return Mutant(
            path=self.path,
            scope=self.scope,
            name=self.what,
            original=original,
            code=lambda: changed,
        )


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``explained`` says of survivors why no test needs to notice them."""

    packages: dict[str, Package]
    known: list[Known]
    explained: dict[str, str]

    def package(self, name: str) -> Package:
        """Where nothing is said of it, all of it, and the tests of its name."""
        whole = Package(files=[f"{name}/**/*.py"], tests=[f"tests/{name}"])
        return self.packages.get(name, whole)


class Result(msgspec.Struct):
    """``killer`` is the first test that failed; ``survived``: there was none at first."""

    killer: str | None
    survived: bool


class State(msgspec.Struct):
    """What is known of one package's mutants, by name."""

    seed: int
    commit: str
    date: str
    num_possible: int
    results: dict[str, Result]


def main() -> int:
    """1 if a mutant survives that is not explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("packages", nargs="*", help="of src/ridgeline, or `known`")
    parser.add_argument("--count", type=int, default=60, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--most-s", type=float, default=60, help="seconds of the processor for tests of one mutant"
    )
    parser.add_argument(
        "--most-cases", type=int, default=1000, help="of a test with parameters: the first so many"
    )
    parser.add_argument(
        "--tests",
        nargs="*",
        help="in place of those of the catalogue: only what they call is changed",
    )
    args = parser.parse_args()
    catalogue = msgspec.toml.decode(
        Path(__file__).with_name("catalogue.toml").read_bytes(), type=Catalogue
    )
    if not args.packages:
        _REPORT.write_text(_report(catalogue))
        return 0
    _BUILD.mkdir(parents=True, exist_ok=True)
    drawn, tests = {}, set[str]()
    for name in args.packages:
        if name == "known":
            drawn[name] = [known.mutant() for known in catalogue.known]
            tests |= {known.test for known in catalogue.known}
            continue
        package = catalogue.package(name)
        possible = package.mutants()
        drawn[name] = random.Random(args.seed).sample(possible, len(possible))
        tests |= set(package.tests)
    left: list[str] = []

    def work(session: Session) -> None:
        session.cover(_BUILD / "covered")
        for name, mutants in drawn.items():
            left.extend(_try(session, name, mutants, catalogue.explained, args))

    Session(work, args.most_cases).run(args.tests or sorted(tests))
    return int(any(name not in catalogue.explained for name in left))


def _try(
    session: Session,
    package: str,
    drawn: list[Mutant],
    explained: dict[str, str],
    args: argparse.Namespace,
) -> list[str]:
    """The survivors of the first mutants of these. What an earlier run found is kept."""
    path = _BUILD / f"{package}.json"
    state = State(
        seed=args.seed,
        commit=commit(),
        date=datetime.date.today().isoformat(),
        num_possible=len(drawn),
        results={},
    )
    if path.exists():
        earlier = msgspec.json.decode(path.read_bytes(), type=State)
        if earlier.seed == args.seed:  # the same draw, beside tests written since
            state = earlier
    known = dict(state.results)
    results: dict[str, Result] = {}
    for mutant in drawn:
        if len(results) == args.count:
            break
        before = known.pop(mutant.name, None)
        killer = before.killer if before is not None else None
        if killer is None and not (before is not None and mutant.name in explained):
            try:
                killer = session.killer_of(mutant, args.most_s)
            except ValueError:
                continue
            except LookupError:
                if args.tests and before is None:
                    continue
            print(f"{mutant.name}\n    {killer or 'SURVIVES'}", flush=True)
        survived = killer is None or (before is not None and before.survived)
        results[mutant.name] = Result(killer=killer, survived=survived)
        state.results = results | known
        path.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    left = [name for name, result in results.items() if result.killer is None]
    print(f"{package}: {len(left)} of {len(results)} mutants survive; {len(drawn)} are possible")
    return left


_HEAD = """# Mutants

Small changes of functions, each beside the tests of `make test` that call the function. *Killed*:
one of them fails twice, or takes ten times as long. *Gone*: it survived, and what it changed is not
in the code any more. `python -m tests.mutants` makes this page of what `make test-mutants` found
([how](../CONTRIBUTING.md#tests-of-one-package-in-seconds)).
"""
_COLUMNS = ("package", "possible", "drawn", "killed", "by tests since", "explained", "gone", "left")


def _report(catalogue: Catalogue) -> str:
    states = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=State)
        for path in sorted(_BUILD.glob("*.json"))
    }
    parts, by_hand = [_HEAD], states.pop("known", None)
    if by_hand is not None:
        tried = [(name, _test(each.killer)) for name, each in by_hand.results.items()]
        parts += ["## Written by hand", _table("mutant", "killed by", rows=tried)]
    if not states:
        return _page(parts)
    rows, since, survivors = [], [], []
    together = Counter[str]()
    for package, state in states.items():
        counts = Counter[str]()
        present = {mutant.name for mutant in catalogue.package(package).mutants()}
        for name, result in state.results.items():
            why = catalogue.explained.get(name)
            if result.killer is None and name not in present:
                counts["gone"] += 1
            elif result.killer is None:
                counts["left" if why is None else "explained"] += 1
                survivors.append((name, why or "a test is missing"))
            else:
                counts["since" if result.survived else "at first"] += 1
                if result.survived:
                    since.append((name, _test(result.killer)))
        together += counts
        ends = (counts[end] for end in ("at first", "since", "explained", "gone", "left"))
        of = f"{state.seed}, {state.commit}, {state.date}"
        rows.append((package, state.num_possible, len(state.results), *ends, of))
    parts += [
        "## Drawn at random",
        _table(*_COLUMNS, "seed, commit, date", rows=rows),
        f"Killed when drawn: {_share(together, 'at first')}; "
        f"with tests that were written since, or are of the package since: "
        f"{_share(together, 'at first', 'since')}.",
    ]
    if since:
        parts += ["### Killed by tests since", _table("mutant", "test", rows=since)]
    if survivors:
        parts += ["### Survivors", _table("mutant", "why it may", rows=survivors)]
    return _page(parts)


def _share(counts: Counter[str], *ends: str) -> str:
    """How many ended so, of all."""
    num = sum(counts[end] for end in ends)
    return f"{num} of {counts.total()}, {num / counts.total():.1%}"


def _page(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _test(name: str | None) -> str:
    return "none" if name is None else f"`{name.removeprefix('tests/')}`"


def _table(*columns: str, rows: list[tuple[object, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    cells = ((str(cell).replace("|", "¦") for cell in row) for row in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    sys.exit(main())

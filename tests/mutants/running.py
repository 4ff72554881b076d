"""One collected session of tests, of which a forked process runs some for each mutant.

The working tree is not touched: the forked process gives the functions of the mutant's file other
code. So processes that a test starts, and that import for themselves, run without the mutant.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import msgspec
import pytest
from _pytest.runner import runtestprotocol
from tests.mutants.operators import Mutant

SOURCE = Path("src/ridgeline").resolve()
_SLACK_S, _SLACK = 2, 10  # processor time a test may take, and times what it takes without a mutant
_HANGS_S, _HANGS = 60, 50  # the same of the clock, after which a test that waits is ended
_Calls = dict[int, CodeType]  # by identity: a code's hash is that of all it consists of


class Covered(msgspec.Struct):
    """Of one test without a mutant: seconds of the processor, and the functions that it calls, or
    that made what it shares with others."""

    seconds: float
    functions: set[str]


class Session:
    """Collects tests once, of each its first cases; ``work`` is called in place of running them."""

    def __init__(self, work: Callable[["Session"], None], most_cases: int) -> None:
        self._work = work
        self._most_cases = most_cases
        self._items: dict[str, pytest.Function] = {}
        self._kills = Counter[str]()
        self._calls: _Calls = {}
        self._calls_of_fixtures: dict[pytest.FixtureDef[Any], _Calls] = {}
        self.covered: dict[str, Covered] = {}

    def run(self, tests: list[str]) -> None:
        """Raises SystemExit if they cannot be collected."""
        options = ["-m", "not slow", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        options += ["--basetemp", "build/mutants/tmp"]
        if pytest.main([*options, *tests], plugins=[self]) != pytest.ExitCode.OK:
            raise SystemExit("The tests cannot be collected, or the run was stopped.")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        cases = Counter[str]()
        for item in session.items:
            assert isinstance(item, pytest.Function)
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] <= self._most_cases:
                self._items[item.nodeid] = item
        self._work(self)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        outside, self._calls = self._calls, {}
        try:
            return (yield)
        finally:
            self._calls_of_fixtures[fixturedef] = self._calls
            self._calls = outside

    def cover(self, path: Path) -> None:
        """Run the tests that ``path`` does not know yet, and write there what they call."""
        if not path.exists():
            path.write_bytes(b"{}")
        self.covered = msgspec.json.decode(path.read_bytes(), type=dict[str, Covered])
        left = [name for name in self._items if name not in self.covered]
        while left:
            failed = _forked(lambda say, left=left: self._note_calls(left, path, say)).decode()
            known = msgspec.json.decode(path.read_bytes(), type=dict[str, Covered])
            self.covered |= known
            if failed:
                print(f"Left out, for it fails without a mutant: {failed}", flush=True)
            left = [name for name in left if name not in known and name != failed]
        self.covered = {name: each for name, each in self.covered.items() if name in self._items}

    def _note_calls(self, names: list[str], path: Path, say: Callable[[bytes], None]) -> None:
        def note(frame: FrameType, event: str, arg: object) -> None:
            self._calls[id(frame.f_code)] = frame.f_code

        threading.settrace(note)
        sys.settrace(note)
        for name, passed, seconds in self._tried(names, say):
            if not passed:
                break
            used = self._items[name]._fixtureinfo.name2fixturedefs.values()
            calls = dict(self._calls)  # a copy: what follows calls, too
            for fixture in chain.from_iterable(used):
                calls |= self._calls_of_fixtures.get(fixture, {})
            functions = {_named(code) for code in calls.values()}
            self.covered[name] = Covered(seconds=round(seconds, 3), functions=functions - {""})
            self._calls.clear()
            if len(self.covered) % 20 == 0:  # what is known outlasts a run that is stopped
                path.write_bytes(msgspec.json.encode(self.covered))
            sys.settrace(note)  # which a test may have ended, as one that recurses too deep does
        else:
            say(b"")
        path.write_bytes(msgspec.json.encode(self.covered))

    def killer_of(self, mutant: Mutant, most_s: float) -> str | None:
        """The first test that fails, or hangs, with the mutant in place, and once more by itself.

        Of the tests that call its function, those that killed others come first, then the shortest,
        as many as take ``most_s`` together.

        Raises:
            LookupError: none of the tests calls the function.
            ValueError: no function can be given the mutant's code.
        """
        where = f"{mutant.path} {mutant.scope}"
        able = [name for name, each in self.covered.items() if where in each.functions]
        if not able:
            raise LookupError(where)
        able.sort(key=lambda name: (-self._kills[name], self.covered[name].seconds))
        spent_s = list(accumulate(self.covered[name].seconds for name in able))
        chosen = able[: max(1, bisect_right(spent_s, most_s))]
        while chosen and (killer := self._first_failure(mutant, chosen)):
            if self._first_failure(mutant, [killer]):
                self._kills[killer] += 1
                return killer
            chosen = chosen[chosen.index(killer) + 1 :]
        return None

    def _first_failure(self, mutant: Mutant, names: list[str]) -> str:
        """Which test fails first with the mutant in place, or none; ValueError as above."""
        functions = _functions_of(mutant.path)

        def work(say: Callable[[bytes], None]) -> None:
            say(b"!")
            put_mutant(mutant, functions)
            for _, passed, _ in self._tried(names, say):
                if not passed:
                    return
            say(b"")

        failure = _forked(work).decode()
        if failure == "!":
            raise ValueError(mutant.name)
        return failure

    def _tried(
        self, names: list[str], say: Callable[[bytes], None] = lambda _: None
    ) -> Iterator[tuple[str, bool, float]]:
        """Run tests; whether each passed, and its seconds of the processor."""
        for name, following in zip_longest(names, names[1:]):
            say(name.encode())
            usual_s = self.covered[name].seconds if name in self.covered else 100
            signal.setitimer(signal.ITIMER_VIRTUAL, _SLACK_S + _SLACK * usual_s)
            faulthandler.dump_traceback_later(_HANGS_S + _HANGS * usual_s, exit=True)
            start_s = time.process_time()
            reports = runtestprotocol(
                self._items[name], log=False, nextitem=self._items.get(following)
            )
            yield name, not any(r.failed for r in reports), time.process_time() - start_s


def _forked(work: Callable[[Callable[[bytes], None]], None]) -> bytes:
    """What the work, done in a process of its own, said last."""
    with tempfile.TemporaryFile() as said:

        def say(text: bytes) -> None:
            said.seek(0)
            said.truncate()
            said.write(text)
            said.flush()

        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                gc.freeze()  # a collection writes to nothing that is shared
                nothing = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(nothing, stream)
                work(say)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):  # what the tests left running
            os.killpg(pid, signal.SIGKILL)
        said.seek(0)
        return said.read()


def _named(code: CodeType) -> str:
    """Its file and the function or method that it is in; nothing of what is not ours."""
    within, file = f"{SOURCE}/", code.co_filename
    scope = code.co_qualname.partition(".<locals>")[0]
    return f"{file.removeprefix(within)} {scope}" if file.startswith(within) else ""


@cache
def _functions_of(path: str) -> list[FunctionType]:
    """Those that a file defines, once it is imported."""
    with contextlib.suppress(ImportError):  # of something that is not installed
        importlib.import_module(f"ridgeline.{path.removesuffix('.py').replace('/', '.')}")
    name = str(SOURCE / path)
    every = (thing for thing in gc.get_objects() if type(thing) is FunctionType)
    return [function for function in every if function.__code__.co_filename == name]


def put_mutant(mutant: Mutant, functions: list[FunctionType]) -> None:
    """Give the functions of a file the code of the mutant."""
    before, after = _codes(mutant.original), _codes(mutant.code())
    instead = {
        (name, code.co_firstlineno): after[name, number]
        for (name, number), code in before.items()
        if (name, number) in after and after[name, number] != code
    }
    num_put = 0
    for function in functions:
        code = function.__code__
        if (new := instead.get((code.co_qualname, code.co_firstlineno))) is not None:
            function.__code__ = new
            num_put += 1
    if num_put == 0:
        raise ValueError("no function has this code")


def _codes(module: CodeType) -> dict[tuple[str, int], CodeType]:
    """Of all functions in a module, by qualified name and number among those that have it."""
    found: dict[tuple[str, int], CodeType] = {}
    numbers = Counter[str]()
    left = [module]
    while left:
        code = left.pop(0)
        found[code.co_qualname, numbers[code.co_qualname]] = code
        numbers[code.co_qualname] += 1
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found

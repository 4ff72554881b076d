"""``--ranks``: a training command as several processes of this machine."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from ridgeline.cli.options import Parser
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.core.errors import EngineError, InvalidRequestError
from ridgeline.core.host import how_it_ended, usable_cores
from ridgeline.core.private_folder import PrivateFolder

_MODULE = "ridgeline.cli.training_rank_main"
_POLL_S = 0.05
_GRACE_S = 3.0  # in which other ranks find the same mistake, of which the first one tells


def add_ranks_option(parser: Parser) -> None:
    """--ranks."""
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes of this machine, none of which holds a whole model; torchrun starts those "
        "of several machines",
    )


def is_launcher(arguments: argparse.Namespace, recipe: TrainingRecipe) -> bool:
    """Whether this process is to start the ranks, and is none itself.

    Raises:
        InvalidRequestError: there are to be less than one.
        SettingsError: they do not share a step's micro-batches equally.
        ModuleNotFoundError: without torch they could do nothing.
    """
    if arguments.ranks < 1:
        raise InvalidRequestError(f"--ranks is {arguments.ranks}; it must be at least 1.")
    if arguments.ranks == 1 or "WORLD_SIZE" in os.environ:
        return False
    recipe.check_shares(arguments.ranks)
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    return True


def run_on_ranks(arguments: argparse.Namespace) -> int:
    """Run the command as ranks, of which the first has our output; give the exit code.

    Raises:
        EngineError: a rank was ended by something else.
    """
    count = arguments.ranks
    with ExitStack() as stack:
        folder = stack.enter_context(PrivateFolder())
        told: list[IO[bytes]] = [stack.enter_context(TemporaryFile()) for _ in range(count)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for number, output in enumerate(told):
                ranks.append(_start(folder, number, count, arguments.command_line, output))
            return _exit_code(ranks, told)
        except KeyboardInterrupt:
            print(f"Stopped; --resume goes on with {arguments.out}.", file=sys.stderr)
            raise
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _start(
    folder: Path, number: int, count: int, words: Sequence[str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    threads = str(max(1, usable_cores() // count))
    return subprocess.Popen(
        [
            sys.executable, "-P", *["-O"] * sys.flags.optimize, "-m", _MODULE,
            str(os.getpid()), str(folder / "rendezvous"), *words,
        ],
        stdin=subprocess.DEVNULL,
        stdout=output if number else None,
        stderr=output if number else None,
        env={"OMP_NUM_THREADS": threads} | os.environ | {
            "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )  # fmt: skip


def _exit_code(ranks: Sequence[subprocess.Popen[bytes]], told: Sequence[IO[bytes]]) -> int:
    while not any(codes := [rank.poll() for rank in ranks]):
        if None not in codes:
            return 0
        time.sleep(_POLL_S)
    failed = next(number for number, code in enumerate(codes) if code)
    _wait(ranks, _GRACE_S)
    code = ranks[0].poll()
    if code is not None and code > 0:  # it has told
        return code
    if (code := ranks[failed].returncode) < 0:
        raise EngineError(
            f"Rank {failed} of the training: {how_it_ended(code)} What was saved can be gone on "
            "with by --resume."
        )
    told[failed].seek(0)
    sys.stderr.write(told[failed].read().decode(errors="replace"))
    return code


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, or the time is over."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_S)

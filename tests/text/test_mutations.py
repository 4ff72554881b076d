"""Damaged tokenizer files: a typed error or a working tokenizer, never a crash or a hang."""

import collections
import json
import selectors
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.text.chat_families import CHATML
from tests.text.tokenizer_kinds import write_folder

CASES = 500
CPU_LIMIT_S = 5
WATCHDOG_S = 180  # wall time, for a machine that is busy with other work
ROOT = Path(__file__).parents[2]


def _run_from(first: int, folders: Path, scratch: Path) -> tuple[dict[int, str], int]:
    """Run cases from ``first`` on in one process; return the outcomes, and the case to go on with.

    A process that dies, or is killed since it said nothing for too long, has failed in the case
    that it announced last.
    """
    command = [sys.executable, "-m", "tests.text.mutation_worker", str(folders), str(scratch)]
    process = subprocess.Popen(
        [*command, str(first), str(CASES - first)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    )
    outcomes: dict[int, str] = {}
    current, reason = first, "the worker did not start"
    assert process.stdout is not None
    with process, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(WATCHDOG_S):
                process.kill()
                reason = "hung"
                break
            line = process.stdout.readline()
            if not line:
                reason = f"died with status {process.wait()}"
                break
            message = json.loads(line)
            current = message["case"]
            if "outcome" in message:
                slow = message["seconds"] > CPU_LIMIT_S
                outcomes[current] = "took too long" if slow else message["outcome"]
    if current not in outcomes:
        outcomes[current] = reason
    return outcomes, current + 1


def test_damaged_files(tmp_path: Path, counted: Callable[[int], None]) -> None:
    folders, scratch = tmp_path / "folders", tmp_path / "scratch"
    scratch.mkdir()
    for kind in ("gpt2", "llama3", "llama2", "unigram-bytes", "wordpiece"):
        (folders / kind).mkdir(parents=True)
        folder = write_folder(folders / kind, kind, chat_template=CHATML)
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "top_k": 5}')
    outcomes: dict[int, str] = {}
    following = 0
    while following < CASES:
        found, following = _run_from(following, folders, scratch)
        outcomes.update(found)
        bad = {case: text for case, text in outcomes.items() if text not in ("works", "refused")}
        assert len(bad) < 5, bad
    assert not bad
    assert outcomes.keys() == set(range(CASES))
    counted(CASES)
    counts = collections.Counter(outcomes.values())
    assert min(counts["works"], counts["refused"]) > CASES // 10, counts

"""Published figures: each has an answer or a reason, and a run ends, goes on and says so."""

import json
import shlex
from pathlib import Path

import pytest

from ridgeline.bench.figures import FIGURES, Answers, Figure, page, reproduce
from ridgeline.bench.figures.reproduce import CommandFailedError, run_command
from ridgeline.cli.main import build_parser, main

RESULTS = Path("benchmarks/results/figures.json")
QUICK = Figure(
    row="A1", what="quick", low=2, high=3, commands=("a", "b"), ours=lambda r: r[0] / r[1]
)
SLOW = Figure(row="A2", what="slow", low=1, high=1, commands=("c",), ours=sum, seconds=50)


class Runner:
    """Answers commands from a table; an exception in it is raised."""

    def __init__(self, **answers):
        self.answers, self.ran = answers, []

    def __call__(self, command, scratch, timeout_s):
        self.ran.append(command)
        answer = self.answers[command]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def rows(folder, runner, figures=(SLOW, QUICK), budget_s=100.0):
    return reproduce(figures, Answers(folder), budget_s=budget_s, run=runner)["figures"]


def test_every_figure_has_commands_that_parse_or_a_reason():
    for figure in FIGURES:
        assert (figure.ours is None) == bool(figure.why_not), figure.name
        assert figure.low <= figure.high
        for command in figure.commands:
            words = shlex.split(command.replace("{scratch}", "/tmp"))
            if words[1] in ("ladder", "serve"):
                words[:2] = [f"bench-{words[1]}"]
            build_parser().parse_args(words)
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


def test_ours_stand_beside_what_was_published_in_its_order(tmp_path):
    slow, quick = rows(tmp_path, Runner(a=10, b=4, c=3))
    assert (slow["ours"], slow["verdict"]) == (3, "more")
    assert (quick["ours"], quick["verdict"]) == (2.5, "as published")
    assert QUICK.verdict(1.7) == "less"
    assert not list(tmp_path.iterdir())  # a whole run leaves nothing


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        rows(tmp_path, Runner(a=10, b=4, c=KeyboardInterrupt()))
    again = Runner(c=3)
    assert [row["ours"] for row in rows(tmp_path, again)] == [3, 2.5]
    assert again.ran == ["c"]


def test_what_the_budget_has_no_room_for_is_said_and_done_next_time(tmp_path):
    runner = Runner(a=10, b=4, c=3)
    slow, quick = rows(tmp_path, runner, budget_s=20.0)
    assert quick["verdict"] == "as published"
    assert (slow["verdict"], slow["ours"]) == ("not run", None)
    assert slow["why_not"].startswith("c: it takes 50 s")
    rows(tmp_path, runner)
    assert runner.ran == ["a", "b", "c"]


def test_a_run_of_some_figures_leaves_what_is_kept_of_others(tmp_path):
    runner = Runner(a=10, b=4, c=3)
    rows(tmp_path, runner, budget_s=20.0)
    rows(tmp_path, runner, (SLOW,))
    assert [row["ours"] for row in rows(tmp_path, runner, (QUICK,))] == [2.5]
    assert runner.ran == ["a", "b", "c"]


def test_a_command_that_fails_is_named_with_its_error(tmp_path):
    slow, _ = rows(tmp_path, Runner(a=10, b=4, c=CommandFailedError("no such shape")))
    assert (slow["verdict"], slow["why_not"]) == ("not run", "no such shape")


@pytest.mark.parametrize("printed", [0, None, {}])
def test_what_answers_nothing_is_said_and_ends_no_others(tmp_path, printed):
    slow, quick = rows(tmp_path, Runner(a=10, b=printed, c=3))
    assert (slow["verdict"], quick["verdict"]) == ("more", "not run")
    assert quick["why_not"].startswith("What was printed does not answer it")
    with pytest.raises(CommandFailedError, match=r"memory nothing: error: .*nothing"):
        run_command("memory nothing", tmp_path, 60.0)


def test_the_command_prints_what_its_own_commands_say(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "figures", "--only", "m4,M9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    assert [(row["row"], row["verdict"]) for row in found] == [("M4", "as published")] + 3 * [
        ("M9", "as published")
    ]
    assert main(["bench", "figures", "--only", "Z1"]) == 2
    assert "No published figure is of Z1" in capsys.readouterr().err


def test_the_page_of_the_docs_is_made_from_the_results_that_are_kept():
    assert Path("docs/figures.md").read_text() == page(json.loads(RESULTS.read_text()))

"""`ridgeline chat` on a terminal, a pseudo one, typed into as a person would."""

import io
import os
import re
import sys

import pexpect
import pytest
from rich.console import Console

from ridgeline.cli.answer_view import MarkdownView

ENTER, CTRL_C, CTRL_D, UP, PASTE = "\r", "\x03", "\x04", "\x1b[A", "\x1b[200~{}\x1b[201~"


class Terminal:
    """A chat with the embedded model in a process of its own."""

    def __init__(self, *options, home):
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "ridgeline", "chat", "--temperature", "0", "--max-tokens", "8", *options],
            env={
                **os.environ,
                "XDG_STATE_HOME": str(home),
                "TERM": "xterm",
                "OMP_NUM_THREADS": "1",
            },
            encoding="utf-8",
            dimensions=(40, 100),
            timeout=120,
        )
        self.child.expect("Ctrl-D leaves")
        self.child.expect_exact("\x1b[6n")
        self.seen = self.child.before
        self.child.send("\x1b[2;1R")
        self.child.expect_exact("of 1,024 tokens")

    def ready(self):
        """The line may be typed: a terminal says where the cursor is, then the foot is drawn."""
        self.child.expect_exact("\x1b[6n")
        self.child.send("\x1b[2;1R")
        self.child.expect_exact("of 1,024 tokens")

    def type(self, text):
        self.child.send(text)

    def ask(self, text):
        self.type(text + ENTER)
        self.child.expect("TTFT")
        self.ready()

    def leave(self):
        self.type(CTRL_D)
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert self.child.exitstatus == 0


@pytest.fixture
def home(tmp_path):
    return tmp_path / "state"


def history(home):
    lines = (home / "ridgeline" / "chat_history").read_text().splitlines()
    return [line for line in lines if line.startswith("+")]


def test_it_says_what_the_embedded_model_is_and_how_to_get_another(home):
    terminal = Terminal(home=home)
    assert "demonstration of 9 million parameters" in terminal.seen
    assert "ridgeline chat Qwen/Qwen3-0.6B" in terminal.seen
    terminal.leave()


def test_lines_are_edited_and_come_back_in_the_next_run(home):
    terminal = Terminal(home=home)
    terminal.ask("def addx\x7f(a, b):")
    terminal.leave()
    assert history(home) == ["+def add(a, b):"]
    assert (home / "ridgeline" / "chat_history").stat().st_mode & 0o077 == 0
    terminal = Terminal(home=home)
    terminal.type(UP)
    terminal.ask("")
    terminal.leave()
    assert history(home) == ["+def add(a, b):"]


def test_what_is_pasted_is_one_question_with_its_lines(home):
    terminal = Terminal(home=home)
    terminal.ask(PASTE.format("first line\nsecond line"))
    terminal.type("third" + "\n" + "fourth")
    terminal.ask("")
    terminal.leave()
    assert history(home) == ["+first line", "+second line", "+third", "+fourth"]


def test_control_c_clears_a_line_stops_an_answer_and_twice_leaves(home):
    terminal = Terminal("--max-tokens", "800", "--ignore-eos", home=home)
    terminal.type("half a que" + CTRL_C)
    terminal.child.expect("once more")
    terminal.ready()
    terminal.type("def" + ENTER)
    terminal.child.expect("def|class|import|return|self|the")
    terminal.type(CTRL_C)
    terminal.child.expect("stopped")
    terminal.ready()
    terminal.type(CTRL_C)
    terminal.child.expect("once more")
    terminal.type(CTRL_C)
    terminal.child.expect(pexpect.EOF)
    assert history(home) == ["+def"]


def test_markdown_is_rendered_when_it_is_whole():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=20)
    with MarkdownView(console) as view:
        view.add_reasoning("first I think\nthen I know")
        for piece in ("A **bold** wo", "rd.\n\n", "- one\n- two\n\n```python\nx = 1\n", "```"):
            view.add(piece)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "▸ thought for" in text
    assert "6 words" in text
    kept = text[text.rindex("A bold word.") :]
    assert "**" not in kept
    assert "• one" in kept
    assert "```" not in kept
    assert "x = 1" in kept

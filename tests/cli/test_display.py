import dataclasses
import io

import pytest
from rich.console import Console

from ridgeline.cli import display
from ridgeline.roofline.live import PhaseReport, RooflineReport


@pytest.mark.parametrize(("of_bytes", "shown"), [(True, "30/60 bytes"), (False, "50%")])
def test_on_a_terminal_it_is_a_bar(monkeypatch, of_bytes, shown):
    screen = io.StringIO()
    monkeypatch.setattr(display, "error_console", Console(file=screen, force_terminal=True))
    monkeypatch.setattr(display.sys.stderr, "isatty", lambda: True)
    with display.loading_bar(of_bytes=of_bytes) as progress:
        progress(30, 60, "reading")
    assert shown in screen.getvalue()


def test_without_a_terminal_progress_is_lines_now_and_then(monkeypatch, capsys):
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(seconds)))
    with display.loading_bar() as progress:
        progress(1, 60, "measuring wide in float32")  # 4 s after the start
        assert capsys.readouterr().err == ""
        progress(2, 60, "measuring deep in float32")
        progress(3, 60, "measuring small in float32")
        progress(0, 0, "config.json")
        for done in range(1, 4):
            progress(done, 4, "model.safetensors")
    err = capsys.readouterr().err.splitlines()
    assert err == ["measuring small in float32 (5%)", "model.safetensors (50%)"]


def test_columns_without_room_come_in_further_tables(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    header = ("", *(f"{load} at once" for load in range(1, 10)))
    rows = [("TTFT p50", *["123.4 (120.1–130.2)"] * 9), ("of the first", *["x"] * 2, *[""] * 7)]
    display.print_columns(display.output_console(), header, rows)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert sum(line.count("123.4 (120.1–130.2)") for line in lines) == 9
    assert sum(line.startswith("TTFT p50 ") for line in lines) == 3
    assert sum(line.startswith("of the first ") for line in lines) == 1


def test_a_column_that_has_no_room_even_alone_is_shown_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    display.print_columns(
        display.output_console(), ("", "a"), [("label", "a figure of many words")]
    )
    assert "a figure of many words" in capsys.readouterr().out


def test_an_interval_that_reads_as_the_figure_is_left_out():
    assert display.with_interval(4.004, 4.001, 4.0049) == "4.00"
    assert display.with_interval(4.004, 3.9, 4.1) == "4.00 (3.90–4.10)"
    assert display.with_interval(12345.6, 12000.2, None) == "12,346"


def test_lines_for_a_log_are_not_broken_at_80_columns(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    display.error_console.print("word " * 40)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_being_done_is_told_without_a_terminal(monkeypatch, capsys):
    seconds = iter(range(0, 1000, 11))
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(seconds)))
    with display.status_line("planning") as show:
        show("planning: h100")
    assert capsys.readouterr().err == "planning: h100\n"


def test_measured_seconds_stand_before_predicted_ones():
    none = PhaseReport(
        seconds=0.0, steps=0.0, tokens=0, useful_flops=0.0, moved_bytes=0.0, mfu=None, mbu=None,
        bound=None, predicted_s=None, median_error=None,
    )  # fmt: skip
    seen = dataclasses.replace(
        none, seconds=0.0321, mfu=0.1, mbu=0.5, bound="memory", predicted_s=0.0355
    )
    report = RooflineReport(
        prefill=none, decode=seen, num_steps=1, num_pending=0, drafted=0, accepted=0,
        overhead_s_per_step=0.0, covered=None, warnings=(), conditions={}, levels={},
    )  # fmt: skip
    line = display.roofline_line(report)
    assert line == "decode MFU 10% MBU 50% (memory), 32.1 ms (predicted 35.5)"


def test_what_looks_like_an_emoji_is_shown_as_it_is(capsys):
    display.announce("model:100:")
    display.output_console().print("x[:100:2]", markup=False)
    assert capsys.readouterr() == ("x[:100:2]\n", "model:100:\n")

import io

import pytest
from rich.console import Console

from ridgeline.cli import display


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

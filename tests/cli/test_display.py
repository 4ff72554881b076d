from ridgeline.cli import display


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

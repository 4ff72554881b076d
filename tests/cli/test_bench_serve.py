import pytest

from ridgeline.cli import main


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("think-s", "nan"),
        ("think-s", "inf"),
        ("think-s", "-1"),
        ("warmup", "-1"),
        ("num-requests", "0"),
        ("num-requests", "1000001"),
        ("turns", "0"),
        ("prefix-len", "-1"),
        ("num-prefixes", "0"),
    ],
)
def test_what_is_out_of_bounds_is_one_error_before_anything_runs(capsys, option, value):
    assert main(["bench", "serve", "nowhere", f"--{option}", value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--{option} must be between " in line

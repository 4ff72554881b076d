"""What needs no GPU kernels runs where the package triton is not installed."""

import subprocess
import sys

import pytest

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from ridgeline.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "line",
    [
        "plan --shape llama-3.1-8b --hardware l4 --rate 0.5 --slo ttft=0.5,tpot=0.1",
        "plan --shape llama-3.2-1b --hardware xeon-8480 --rate 0.5 --slo ttft=2,tpot=0.2",
        "roofline --shape llama-3.2-1b --hardware l4",
    ],
)
def test_predictions_for_other_machines(line):
    command = [sys.executable, "-c", WITHOUT_TRITON, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout

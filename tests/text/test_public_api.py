import subprocess
import sys

from ridgeline import text


def test_all_is_complete_and_sorted() -> None:
    public = {name for name, value in vars(text).items() if isinstance(value, type)}
    assert public <= set(text.__all__)
    assert sorted(text.__all__) == text.__all__
    assert all(hasattr(text, name) for name in text.__all__)


def test_importing_needs_no_torch() -> None:
    code = "import sys, ridgeline.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

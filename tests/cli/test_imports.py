"""What commands import: torch only where it computes, nothing heavy without something to do."""

import subprocess
import sys

import pytest

from ridgeline.core.extras import install_command

HEAVY = ("torch", "numpy", "rich", "jinja2", "yaml", "tokenizers", "huggingface_hub", "uvicorn",
         "llguidance", "importlib.metadata", "ridgeline.models.mixtral", "ridgeline.quant.awq",
         "ridgeline.decoding.drafters", "ridgeline.executors.distributed")  # fmt: skip
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None;"  # as if it were not installed


def run(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which tells at the end what of `HEAVY` it has imported."""
    code = (
        f"{before}import atexit, sys; from ridgeline.cli import main;"
        f"atexit.register(lambda: print('IMPORTED', *({HEAVY} & sys.modules.keys())));"
        f"sys.exit(main({words!r}))"
    ).replace(f"{HEAVY} &", f"set({HEAVY}) &")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(done.stdout.rpartition("IMPORTED")[2].split())


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("generat",)])
def test_help_and_typos_import_nothing_heavy(words):
    done = run(*words)
    assert imported(done) == set()
    assert done.returncode == 0 or "no command generat; did you mean generate?" in done.stderr


def test_a_completion_imports_neither_torch_nor_what_it_has_no_use_for():
    done = run("generate", "--prompt", "def f(", "--max-tokens", "4", "--logprobs", "2")
    assert done.returncode == 0, done.stderr
    assert imported(done) == {"numpy", "rich", "tokenizers"}


@pytest.mark.parametrize("options", [("--quantization", "int4"), ("--speculation", "draft"),
                                     ("--structured-outputs", '{"regex": "[a-z]+"}')])  # fmt: skip
def test_the_cpu_executor_needs_no_torch(options):
    done = run(
        "generate", "--prompt", "def f(", "--max-tokens", "4", *options, before=WITHOUT_TORCH
    )
    assert done.returncode == 0, done.stderr


def test_the_reference_executor_says_that_it_needs_torch():
    done = run("generate", "--prompt", "x", "--executor", "reference", before=WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The reference executor needs PyTorch: pip install '")
    assert "[torch]' (first 'torch<2.14,>=2.11' from PyTorch's index of CPU" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_command_that_needs_torch_says_so(tmp_path):
    assert run("quantize", "--help", before=WITHOUT_TORCH).returncode == 0
    done = run("quantize", "embedded", "-o", str(tmp_path / "out"), before=WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr == f"error: This command needs torch: {install_command('torch')}.\n"
    environment = run("collect-env", before=WITHOUT_TORCH)
    assert environment.returncode == 0
    assert "[torch]'" in environment.stdout


def test_ops_without_a_kernel_say_that_they_need_torch():
    code = (
        "from ridgeline.executors.cpu import native_ops; from ridgeline.core import ops;"
        "from ridgeline.models import describe, lower; from ridgeline.models import PRESETS;"
        "native_ops._NATIVE = tuple(kind for kind in native_ops._NATIVE if kind is not ops.MLP);"
        "native_ops.fallback_ops(lower(describe(PRESETS['llama-3.2-1b']).spec))"
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, check=False
    )
    assert "MissingDependencyError: The cpu executor has no kernel for MLP" in done.stderr
    assert install_command("torch") in done.stderr


def test_jinja2_is_left_to_the_process_that_renders():
    code = "import sys, ridgeline.engine.llm; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Install the engines that Ridgeline is compared with, each in an environment of its own.

``python -m benchmarks.peers.install [llama_cpp] [openvino] [transformers]``, from the repository's
root; without names, all of them. llama.cpp's tools are built for this processor, which takes about
15 minutes on two cores. What is there already is left alone.
"""

import argparse
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.paths import LLAMA_CPP_TOOLS, PEERS, peer_python

LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
LLAMA_CPP_TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")
# torch is pinned because an unpinned one brings gigabytes of CUDA.
OPENVINO = (
    "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0",
    "optimum==2.3.0", "transformers==5.5.4", "torch==2.13.0", "requests", "setuptools",
)  # fmt: skip
OPENVINO_ALONE = ("optimum-intel==2.2.0",)  # it asks for torchvision, which it does not need here
TRANSFORMERS = ("transformers==5.23.0", "accelerate==1.15.0", "torch==2.13.0")


def install_llama_cpp() -> None:
    """Unpack the source package and build llama.cpp's own tools with native flags.

    Its products by AMX are left out: where a Xeon has AMX, each of this version's ended with a
    general protection fault.
    """
    if all((LLAMA_CPP_TOOLS / name).exists() for name in LLAMA_CPP_TARGETS):
        return
    folder = PEERS / "llama_cpp"
    source, build = folder / "source", folder / "build"
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder))
        _run(sys.executable, "-m", "pip", "download", *flags, LLAMA_CPP_PYTHON)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as package:
            package.extractall(folder, filter="data")
        next(folder.glob("llama_cpp_python-*/")).rename(source)
    options = {
        "CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_CURL": "OFF", "LLAMA_OPENSSL": "OFF", "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_SERVER": "ON",
        "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF",
    }  # fmt: skip
    without_amx = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    options |= {"CMAKE_C_FLAGS": without_amx, "CMAKE_CXX_FLAGS": without_amx}
    defines = [f"-D{name}={value}" for name, value in options.items()]
    _run("cmake", "-S", source / "vendor" / "llama.cpp", "-B", build, *defines)
    _run("cmake", "--build", build, "--target", *LLAMA_CPP_TARGETS, "-j2")


def install_openvino() -> None:
    """OpenVINO GenAI, and what converts models to its int4 form."""
    if _environment("openvino"):
        _pip("openvino", *OPENVINO)
        _pip("openvino", "--no-deps", *OPENVINO_ALONE)


def install_transformers() -> None:
    """PyTorch's own bf16 and float32 products."""
    if _environment("transformers"):
        _pip("transformers", *TRANSFORMERS)


PEER_INSTALLERS: dict[str, Callable[[], None]] = {
    "llama_cpp": install_llama_cpp,
    "openvino": install_openvino,
    "transformers": install_transformers,
}


def _environment(peer: str) -> bool:
    """Create the peer's environment; false if it is there."""
    if peer_python(peer).exists():
        return False
    venv.create(PEERS / peer / "env", with_pip=True)
    return True


def _pip(peer: str, *arguments: str) -> None:
    _run(peer_python(peer), "-m", "pip", "install", "--quiet", *arguments)


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def main() -> None:
    """Install the peers that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", choices=[[], *PEER_INSTALLERS], default=[])
    for peer in parser.parse_args().peers or PEER_INSTALLERS:
        PEER_INSTALLERS[peer]()


if __name__ == "__main__":
    main()

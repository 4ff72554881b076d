"""What a newcomer does, on a machine that has nothing: ``sudo python tests/clients/bare_root.py``.

Makes a folder with this Python and the libraries that it is linked to, no shell, no compiler, and
enters it as a root without a network. There the wheel is installed from a folder of wheels, and the
steps below are taken; prints a table with the seconds of each. Needs Linux, root and `unshare`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

RIDGELINE = "/venv/bin/ridgeline"
PORT = 8000
# What wheels may expect beside libc (PEP 513), as far as ours do.
ANY_LINUX = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6")
ENTER = """
mount --bind "{prefix}" "{root}{prefix}" && mount -o remount,bind,ro "{root}{prefix}"
mount --bind "{wheels}" "{root}/wheels" && mount --rbind /dev "{root}/dev"
mount -t proc proc "{root}/proc"
exec chroot "{root}" "{python}" /bare_root.py --inside
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="folder of wheels; default: made, in minutes")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return take_steps()
    with tempfile.TemporaryDirectory() as folder:
        wheels = arguments.wheels or make_wheels(Path(folder, "made"))
        root, python = make_root(Path(folder, "root"))
        script = ENTER.format(
            prefix=sys.base_prefix, root=root, wheels=wheels.resolve(), python=python
        )
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*unshare, "sh", "-e", "-c", script], env={"LANG": "C.UTF-8"}, check=False
        ).returncode


def make_wheels(folder):
    """Ours, which compiles the kernels of all levels, and all that it depends on."""
    source = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder)]
    constraints = str(source / "constraints.txt")
    subprocess.run([*command, "--constraint", constraints, f"{source}[server]"], check=True)
    return folder


def make_root(root):
    """A root with no program but Python, at its usual path; returns that path, too."""
    python = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    for name in ("dev", "proc", "tmp", "wheels", "root", sys.base_prefix.lstrip("/")):
        (root / name).mkdir(parents=True)
    shutil.copy(__file__, root / "bare_root.py")
    modules = Path(sys.base_prefix, "lib", f"python3.{sys.version_info.minor}", "lib-dynload")
    linked = [python, *(str(each) for each in modules.glob("*.so") if "tkinter" not in each.name)]
    listed = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=True).stdout
    paths = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    libc = next(Path(path).parent for path in paths if path.endswith("/libc.so.6"))
    for path in [*paths, *(str(libc / name) for name in ANY_LINUX)]:
        if not path.startswith(sys.base_prefix):
            (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.lstrip("/"))
    return root, python


def take_steps():
    """Each step is a function that returns what it saw, or raises."""
    os.environ.update(HOME="/root", PATH="/venv/bin", LANG="C.UTF-8")
    bring_loopback_up()
    failed = 0
    print("| step | seconds | seen |\n|---|---|---|")
    for step in (nothing_there, install, generate, chat, to_gguf, serve):
        begin_s = time.monotonic()
        try:
            seen = step()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            failed += 1
            seen = f"FAILED: {error} {getattr(error, 'stderr', '') or ''}"
        line = " ".join(seen.split())[-300:]
        print(f"| {step.__name__} | {time.monotonic() - begin_s:.1f} | {line} |", flush=True)
    return 1 if failed else 0


def bring_loopback_up():
    """A new network namespace has it down; there is no `ip` to say so."""
    import fcntl
    import socket
    import struct

    set_flags, is_up = 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", is_up))


def output_of(*command, given=None):
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=300, check=True
    ).stdout


def nothing_there():
    found = [
        each for each in ("sh", "cc", "gcc", "g++", "clang", "cmake", "git") if shutil.which(each)
    ]
    assert not found, found
    try:
        urllib.request.urlopen("http://192.0.2.1", timeout=5)
    except urllib.error.URLError as error:
        return f"no shell, no compiler; network: {error.reason}"
    raise AssertionError("there is a network")


def install():
    output_of(sys.executable, "-m", "venv", "/venv")
    pip = ("/venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-compile")
    output_of(*pip, "--find-links", "/wheels", "ridgeline[server]")
    return output_of(RIDGELINE, "--version")


def generate():
    return output_of(RIDGELINE, "generate", "-p", "def add(a, b):", "-n", "8", "--temperature", "0")


def chat():
    return output_of(RIDGELINE, "chat", "-n", "8", given="Hello\n")


def to_gguf():
    output_of(RIDGELINE, "convert", "embedded", "/tmp/x.gguf", "--gguf-type", "q8_0")
    return output_of(RIDGELINE, "generate", "/tmp/x.gguf", "-p", "def add(a, b):", "-n", "8")


def serve():
    """The server, a client's stream, and the page."""
    server = subprocess.Popen([RIDGELINE, "serve", "--port", str(PORT)], stderr=subprocess.DEVNULL)
    try:
        ready_s = wait_until_ready(server)
        asked = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "stream": True,
        }
        lines = fetch("/v1/chat/completions", asked).splitlines()
        assert "data: [DONE]" in lines, lines[-3:]
        page = fetch("/")
        assert "<html" in page.lower(), page[:100]
        return f"ready after {ready_s:.1f} s; {len(lines)} lines of a stream; the page"
    finally:
        server.terminate()
        server.wait(60)


def wait_until_ready(server):
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 120:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            fetch("/ready")
        except OSError:
            time.sleep(0.1)
        else:
            return time.monotonic() - begin_s
    raise AssertionError("the server is not ready after two minutes")


def fetch(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    sys.exit(main())

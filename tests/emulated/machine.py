"""A PC in Bochs that boots one program from a CD and writes to a serial port."""

import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

MEGABYTES = 1024
INSTRUCTIONS_PER_SECOND = 50_000_000  # of the machine's own clock
ROMS = {  # of the PC and of its screen, as Bochs and Debian's packages name them
    "romimage": ("bochs/BIOS-bochs-latest",),
    "vgaromimage": ("bochs/VGABIOS-lgpl-latest.bin", "vgabios/vgabios.bin"),
}
END = "ended "  # what the first process prints at last
KERNEL_OPTIONS = (
    "console=ttyS0,115200 loglevel=1 panic=-1 mitigations=off nokaslr no5lvl tsc=reliable",
    # Some processors of Bochs have fast short copies, with fast copies switched off: Linux 6.1
    # faults without end on them.
    "clearcpuid=fsrm",
    "rdinit=/init --",  # what follows is for the first process
)


def archive(files: Mapping[str, Path]) -> bytes:
    """A cpio archive ("newc") of executable files by their absolute paths, and a console."""
    folders = {str(p) for name in files for p in Path(name).parents if str(p) != "/"} | {"/dev"}
    parts = [_entry(name, stat.S_IFDIR | 0o755) for name in sorted(folders)]
    parts.append(_entry("/dev/console", stat.S_IFCHR | 0o600, device=(5, 1)))
    parts += [
        _entry(name, stat.S_IFREG | 0o755, content=path.read_bytes())
        for name, path in files.items()
    ]
    return b"".join([*parts, _entry("/TRAILER!!!", 0)])


def _entry(
    name: str, mode: int, *, content: bytes = b"", device: tuple[int, int] = (0, 0)
) -> bytes:
    stored = name.lstrip("/").encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(stored), 0)
    header = b"070701" + b"".join(b"%08X" % value for value in fields) + stored
    return header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4)


def shared_objects(program: Path) -> dict[str, Path]:
    """The loader and the libraries that a program needs, by their paths."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    paths = [word for word in listing.split() if word.startswith("/")]
    return {path: Path(path) for path in paths}


def make_disc(folder: Path, kernel: Path, files: Mapping[str, Path], command: str) -> Path:
    """A CD image that boots ``kernel`` with ``command`` as what the first process runs."""
    root, disc = folder / "disc", folder / "disc.iso"
    (root / "boot" / "grub").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kernel, root / "kernel")
    (root / "files").write_bytes(archive(files))
    (root / "boot" / "grub" / "grub.cfg").write_text(
        f"linux /kernel {' '.join(KERNEL_OPTIONS)} {command}\ninitrd /files\nboot\n"
    )
    made = subprocess.run(["grub-mkrescue", "-o", disc, root], capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"grub-mkrescue failed: {made.stderr.strip()}")
    return disc


def find_roms(bochs: str) -> dict[str, Path]:
    """The BIOS images beside ``bochs``, or the system's; what is not found is left out."""
    shares = [Path(shutil.which(bochs) or "/").resolve().parents[1] / "share", Path("/usr/share")]
    found = {}
    for rom, names in ROMS.items():
        paths = [share / name for share in shares for name in names if (share / name).is_file()]
        if paths:
            found[rom] = paths[0]
    return found


def run(bochs: str, model: str, disc: Path, folder: Path, timeout_s: float) -> Iterator[str]:
    """Start the machine and yield the lines of its serial port, until the program has ended.

    Raises:
        RuntimeError: the machine stopped without saying how the program ended.
        TimeoutError: it took longer than ``timeout_s``.
    """
    serial, log, settings = folder / "serial", folder / "log", folder / "bochsrc"
    serial.unlink(missing_ok=True)
    roms = "".join(f"{rom}: file={path}\n" for rom, path in find_roms(bochs).items())
    settings.write_text(
        f"cpu: model={model}, count=1, ips={INSTRUCTIONS_PER_SECOND}, reset_on_triple_fault=0\n"
        f"{roms}"
        f"memory: guest={MEGABYTES}, host={MEGABYTES}\n"
        f"ata0-master: type=cdrom, path={disc}, status=inserted\n"
        f"boot: cdrom\n"
        f"com1: enabled=1, mode=file, dev={serial}\n"
        f"display_library: nogui\n"
        f"clock: sync=none\n"
        f"panic: action=fatal\n"
        f"error: action=ignore\n"  # its log is not safe in the handler of its own timer
        f"info: action=ignore\n"
        f"log: {log}\n"
    )
    output = (folder / "output").open("wb")
    process = subprocess.Popen(
        [bochs, "-q", "-f", settings], stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    try:
        yield from _lines(process, serial, time.monotonic() + timeout_s)
    finally:
        process.terminate()
        process.wait()
        output.close()


def _lines(process: "subprocess.Popen[bytes]", serial: Path, deadline: float) -> Iterator[str]:
    seen = 0
    while True:
        running = process.poll() is None
        text = serial.read_text(errors="replace") if serial.exists() else ""
        *lines, _ = text.replace("\r", "").split("\n")
        for line in lines[seen:]:
            yield line
            if line.startswith(END):
                return
        seen = len(lines)
        if not running:
            raise RuntimeError(f"the machine stopped; see {serial.parent}")
        if time.monotonic() > deadline:
            raise TimeoutError("the machine took too long")
        time.sleep(0.5)

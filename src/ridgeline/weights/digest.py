"""What a checkpoint is, as one number: for caches that outlive the process."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ridgeline.core.errors import DiskError
from ridgeline.weights.progress import ByteCount, Progress

_BLOCK_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".gguf", ".json")


def content_digest(
    paths: Sequence[Path], *, memory: Path | None = None, progress: Progress | None = None
) -> str:
    """SHA-256 over all bytes of all weights and configs of folders, and of single files.

    All bytes, since two checkpoints may differ in any of them. A file is read once: its digest is
    kept in the file ``memory`` for as long as its device, inode, size and times stay the same.
    ``progress`` is told of the bytes of files that are read.

    Raises:
        DiskError: a file cannot be read.
    """
    known = _recall(memory)
    whole, seen = hashlib.sha256(), {}
    try:
        files = [(file, _identity(file)) for path in paths for file in weight_files(path)]
        unknown = {identity: file for file, identity in files if identity not in known}
        count = ByteCount(progress, sum(file.stat().st_size for file in unknown.values()))
        for identity, file in unknown.items():
            known[identity] = _file_digest(file, count.of(f"checking {file.name}"))
        for file, identity in files:
            seen[identity] = known[identity]
            whole.update(f"{file.name}\0{known[identity]}\n".encode())
    except OSError as error:
        raise DiskError(f"The weights could not be read: {error.strerror}.") from error
    _remember(memory, known, seen)
    return whole.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """The weights and configs in a folder; a file is itself."""
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix in _WEIGHTS and each.is_file())


def _file_digest(file: Path, advance: Callable[[int], None]) -> str:
    digest, block = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(block):
            digest.update(memoryview(block)[:size])
            advance(size)
    return digest.hexdigest()


def _identity(file: Path) -> str:
    stat = file.stat()
    times = f"{stat.st_mtime_ns}/{stat.st_ctime_ns}"
    return f"{stat.st_dev}/{stat.st_ino}/{stat.st_size}/{times}"


def _recall(memory: Path | None) -> dict[str, str]:
    """What was kept; nothing if it cannot be used."""
    if memory is None:
        return {}
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        return {str(identity): str(digest) for identity, digest in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _remember(memory: Path | None, known: dict[str, str], seen: dict[str, str]) -> None:
    if memory is None or seen.keys() <= _recall(memory).keys():
        return
    temporary = memory.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):  # it is computed again next time
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(json.dumps(known), encoding="utf-8")
        temporary.replace(memory)

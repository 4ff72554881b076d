"""Download of one GGUF model, in one file or several, out of a repository that has many."""

from pathlib import Path

from ridgeline.core.errors import ModelFileError, ModelNotFoundError, NetworkError
from ridgeline.weights.gguf.choice import choose_gguf
from ridgeline.weights.hub import fetch_files, file_sizes, quiet
from ridgeline.weights.progress import Progress


def download_gguf(
    name: str,
    quantization: str | None,
    *,
    revision: str | None,
    offline: bool,
    progress: Progress | None,
) -> Path:
    """The (first) file of the GGUF model in ``quantization`` of hub repository ``name``.

    Raises:
        ModelNotFoundError: unknown, gated, without such a file, or offline and not here.
        CorruptFileError, NetworkError, DiskError: as `choose_gguf` and `download`.
    """
    # Imported late: 0.3 s that local files do without.
    from huggingface_hub import constants

    with quiet():
        if offline or constants.HF_HUB_OFFLINE:
            file = _cached(name, quantization, revision)
            if file is None:
                raise ModelNotFoundError(
                    f"{name} was not downloaded before in that quantization, or not completely, "
                    "and offline mode is on; give a file, or allow the download."
                )
            return file
        try:
            sizes, commit = file_sizes(name, revision)
            chosen = choose_gguf(sizes.keys(), quantization, f"The hub model {name}")
            wanted = {file: sizes[file] for file in chosen}
            return fetch_files(name, revision, wanted, commit, progress) / chosen[0]
        except NetworkError:
            file = _cached(name, quantization, revision)
            if file is None:
                raise
            return file


def _cached(name: str, quantization: str | None, revision: str | None) -> Path | None:
    """The file, if it and all its parts were downloaded before."""
    from huggingface_hub import constants, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                local_files_only=True,
                # No file fits: the library calls a folder incomplete that lacks any that does,
                # as the other quantizations.
                allow_patterns=["."],
            )
        )
    except (OSError, ValueError):
        return None
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")}
    try:
        return folder / choose_gguf(names, quantization, name)[0]
    except ModelFileError:
        return None

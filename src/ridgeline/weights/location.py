"""From what a person calls a model to the folder that it is in."""

import os
import re
from importlib import resources
from pathlib import Path

from ridgeline.core.errors import ModelNotFoundError, UnsupportedModelError
from ridgeline.weights.files import check_files, files_in
from ridgeline.weights.hub import download
from ridgeline.weights.progress import Progress

_EMBEDDED = ("assets", "target")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"\w[\w./+-]*", re.ASCII)
_MAX_HUB_NAME = 96


def locate_model(
    name: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    need_weights: bool = True,
    progress: Progress | None = None,
) -> Path:
    """The folder of model ``name``, downloaded if need be; it has a config and, if needed, weights.

    ``name`` is ``None`` for the embedded model, a folder, or a name on the Hugging Face hub. With
    ``offline`` (or ``HF_HUB_OFFLINE=1``) only what was downloaded before is used. Without
    ``need_weights`` they are neither downloaded nor looked for. ``HF_TOKEN`` gives access to gated
    and private models, ``HF_HOME`` says where downloads are kept. ``progress`` is called with the
    bytes downloaded, the bytes to download and the model's name, possibly from other threads.

    Raises:
        ModelNotFoundError: no such folder, hub model or revision, no access, or files are missing.
        UnsupportedModelError: the model has its weights only as GGUF or as a pickle.
        NetworkError: the hub cannot be reached and the model was not downloaded before.
        DiskError: the download does not fit, or may not be written.
    """
    if name is None:
        return _checked(_embedded_folder(), need_weights)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _checked(Path(path), need_weights)
    _refuse_file(name, path)
    if _looks_like_path(name):
        raise ModelNotFoundError(f"There is no folder {_shown(name)}.")
    _check_hub_name(name)
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ModelNotFoundError(f"{_shown(revision)} is not the name of a revision.")
    folder = download(
        name, revision=revision, offline=offline, need_weights=need_weights, progress=progress
    )
    return _checked(folder, need_weights)


def _embedded_folder() -> Path:
    folder = Path(str(resources.files("ridgeline").joinpath(*_EMBEDDED)))
    if not folder.is_dir():
        raise ModelNotFoundError("This installation has no embedded model; name a model to use.")
    return folder


def _checked(folder: Path, need_weights: bool) -> Path:
    check_files(files_in(folder), str(folder), need_weights=need_weights)
    return folder


def _refuse_file(name: str, path: str) -> None:
    if name.lower().endswith(".gguf"):
        raise UnsupportedModelError(
            f"{_shown(name)} is a GGUF file, which Ridgeline does not read yet; "
            "give a folder or hub name that has .safetensors files."
        )
    if os.path.isfile(path):
        raise ModelNotFoundError(
            f"{_shown(name)} is a file; give the folder that has it and its config.json."
        )


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "~", os.sep))
        or name.endswith(os.sep)
        or "\\" in name
        or name.count("/") > 1
    )


def _check_hub_name(name: str) -> None:
    base, colon, quantization = name.partition(":")
    if colon and _HUB_NAME.fullmatch(base) and quantization:
        raise UnsupportedModelError(
            f"{_shown(name)} names a GGUF file, which Ridgeline does not read yet; "
            f"try {base} if it has .safetensors files."
        )
    good = _HUB_NAME.fullmatch(name) and len(name) <= _MAX_HUB_NAME
    if not good or "--" in name or ".." in name or name.endswith((".", "-", ".git")):
        raise ModelNotFoundError(
            f"{_shown(name)} is neither a folder nor a name on the hub, such as owner/name."
        )


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 120 else f"{text[:117]}...")

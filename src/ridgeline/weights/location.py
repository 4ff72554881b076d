"""From what a person calls a model to the folder or GGUF file that it is in."""

import os
import re
from importlib import resources
from pathlib import Path

from ridgeline.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from ridgeline.weights.aliases import read_aliases
from ridgeline.weights.files import CONFIG_NAME, check_files, files_in, is_gguf_only
from ridgeline.weights.gguf.choice import choose_gguf
from ridgeline.weights.hub import Accept, download
from ridgeline.weights.hub_gguf import download_gguf
from ridgeline.weights.names import short_name
from ridgeline.weights.progress import Progress

EMBEDDED = "embedded"  # the name of the model that comes with Ridgeline; a folder is ./embedded
_EMBEDDED = ("assets", "target")
_EMBEDDED_DRAFT = ("assets", "draft")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"\w[\w./+-]*", re.ASCII)
_TAGGED = re.compile(r"[\w.-]+:[\w.-]+", re.ASCII)
_ADDRESS = re.compile(r"(?:https?://)?[\w-]+(?:\.[\w-]+)+/(\w[\w.-]*/\w[\w.:-]*)/?", re.ASCII)
_QUANTIZATION = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
_MAX_HUB_NAME = 96


def locate_model(
    name: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    need_weights: bool = True,
    accept: Accept = lambda _: None,
    progress: Progress | None = None,
) -> Path:
    """The folder of model ``name``, downloaded if need be; it has a config and, if needed, weights.

    ``name`` is ``None`` or ``embedded`` for the embedded model, a folder, a user's alias
    (`read_aliases`) of another name, or a name on the Hugging Face hub. A GGUF model is named by
    its file, or by a folder or hub name with its quantization, as in ``owner/name:Q4_K_M``; then
    the path is the file's (the first, if it is split). With ``offline`` (or ``HF_HUB_OFFLINE=1``)
    only what was downloaded before is used. Without ``need_weights`` they are neither downloaded
    nor looked for. ``accept`` is called with the folder (or GGUF file) and may raise: before
    weights are downloaded, but for GGUF, which has all in one file. ``HF_TOKEN`` gives access to
    gated and private models, ``HF_HOME`` says where downloads are kept. ``progress`` is called with
    the bytes downloaded, the bytes to download and the model's name, possibly from other threads.

    Raises:
        ModelNotFoundError: no such folder, hub model or revision, no access, or files are missing.
        UnsupportedModelError: the model has its weights only as a pickle, or what ``accept``
            raises; the message of that also says what the folder lacks.
        NetworkError: the hub cannot be reached and the model was not downloaded before.
        DiskError: the download does not fit, or may not be written.
    """
    if name is None or name == EMBEDDED:
        return _checked(_embedded_folder(_EMBEDDED), need_weights, accept)
    path = os.path.expanduser(name)
    if not os.path.exists(path):
        name = read_aliases().get(name, name)
        path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _in_folder(Path(path), None, need_weights, accept)
    if _is_gguf(name) and os.path.isfile(path):
        accept(Path(path))
        return Path(path)
    _refuse_file(name, path)
    base, colon, quantization = name.rpartition(":")
    if colon and _QUANTIZATION.fullmatch(quantization):
        path = os.path.expanduser(base)
        if os.path.isdir(path):
            return _in_folder(Path(path), quantization, need_weights, accept)
    repository, quantization_of_hub = hub_name(name)
    return _downloaded(
        repository,
        quantization_of_hub,
        revision=revision,
        offline=offline,
        need_weights=need_weights,
        accept=accept,
        progress=progress,
    )


def download_model(
    name: str, *, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """What `locate_model` gives for a name on the hub, or an alias of one; folders are not sought.

    Raises:
        ModelNotFoundError, NetworkError, DiskError: as `locate_model`.
    """
    repository, quantization = hub_name(read_aliases().get(name, name))
    return _downloaded(repository, quantization, revision=revision, progress=progress)


def hub_name(name: str) -> tuple[str, str | None]:
    """The repository, and the quantization of one GGUF model in it, that a name stands for.

    Raises:
        ModelNotFoundError: it is no name on the hub.
    """
    address = _ADDRESS.fullmatch(name)
    if address is not None:
        raise ModelNotFoundError(
            f"There is no folder {short_name(name)}; if it is an address of the hub, its model is "
            f"called {address[1]}."
        )
    base, colon, quantization = name.rpartition(":")
    if colon and "/" in base and _QUANTIZATION.fullmatch(quantization):
        return _repository(base), quantization
    return _repository(name), None


def _repository(name: str) -> str:
    if _looks_like_path(name):
        raise ModelNotFoundError(f"There is no folder {short_name(name)}.")
    good = _HUB_NAME.fullmatch(name) and len(name) <= _MAX_HUB_NAME
    if not good or "--" in name or ".." in name or name.endswith((".", "-", ".git")):
        tag = " Names of Ollama's library are not the hub's." if _TAGGED.fullmatch(name) else ""
        raise ModelNotFoundError(
            f"{short_name(name)} is neither a folder nor a name on the hub, such as owner/name."
            + tag
        )
    return name


def _downloaded(
    name: str,
    quantization: str | None,
    *,
    revision: str | None,
    offline: bool = False,
    need_weights: bool = True,
    accept: Accept = lambda _: None,
    progress: Progress | None,
) -> Path:
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ModelNotFoundError(f"{short_name(revision)} is not the name of a revision.")
    if quantization is not None:
        file = download_gguf(
            name, quantization, revision=revision, offline=offline, progress=progress
        )
        accept(file)
        return file
    folder = download(
        name,
        revision=revision,
        offline=offline,
        need_weights=need_weights,
        accept=accept,
        progress=progress,
    )
    check_files(files_in(folder), str(folder), need_weights=need_weights)
    return folder


def embedded_draft_folder() -> Path:
    """Where the embedded model's draft is; it takes a name of its own nowhere else."""
    return _embedded_folder(_EMBEDDED_DRAFT)


def _embedded_folder(parts: tuple[str, ...]) -> Path:
    folder = Path(str(resources.files("ridgeline").joinpath(*parts)))
    if not folder.is_dir():
        raise ModelNotFoundError("This installation has no embedded model; name a model to use.")
    return folder


def _in_folder(folder: Path, quantization: str | None, need_weights: bool, accept: Accept) -> Path:
    """The folder, or the GGUF file in it that is meant."""
    names = files_in(folder)
    if quantization is not None or is_gguf_only(names):
        file = folder / choose_gguf(names, quantization, str(folder))[0]
        accept(file)
        return file
    return _checked(folder, need_weights, accept)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _checked(folder: Path, need_weights: bool, accept: Accept) -> Path:
    """The folder, once its files are there and accepted; an error says what is wrong of both."""
    names = files_in(folder)
    lack: ModelFileError | None = None
    try:
        check_files(names, str(folder), need_weights=need_weights)
    except ModelFileError as error:
        if CONFIG_NAME not in names:
            raise
        lack = error
    try:
        accept(folder)
    except UnsupportedModelError as error:
        if lack is None:
            raise
        raise UnsupportedModelError(f"{error} {lack}") from error
    except ModelFileError as error:
        raise lack or error from error
    if lack is not None:
        raise lack
    return folder


def _refuse_file(name: str, path: str) -> None:
    if _is_gguf(name):
        raise ModelNotFoundError(f"There is no file {short_name(name)}.")
    if os.path.isfile(path):
        raise ModelNotFoundError(
            f"{short_name(name)} is a file; give the folder that has it and its config.json."
        )


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "~", os.sep))
        or name.endswith(os.sep)
        or "\\" in name
        or name.count("/") > 1
    )

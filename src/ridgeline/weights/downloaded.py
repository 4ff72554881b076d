"""Models that were downloaded from the hub: what there is, and its removal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ridgeline.core.errors import CorruptFileError, DiskError, ModelNotFoundError
from ridgeline.weights.aliases import forget_aliases, read_aliases
from ridgeline.weights.files import CONFIG_NAME
from ridgeline.weights.gguf.choice import choose_gguf, gguf_names, quantization_of
from ridgeline.weights.hub import quiet

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

_CARD = "README.md"
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadedModel:
    """One model of the hub's cache: a folder of safetensors, or one GGUF file of a repository.

    ``name`` is what commands take. ``path`` is the folder or the (first) GGUF file. ``files`` are
    those of the weights. ``licence`` is what the model's card says, where it was downloaded.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    num_bytes: int
    modified_s: float
    licence: str | None


def downloaded_models() -> list[DownloadedModel]:
    """All of them, by name; of each repository the revision that was fetched last.

    Raises:
        DiskError: the cache cannot be read.
    """
    repositories = _repositories()
    found = [model for each in repositories for model in _models(each)]
    return sorted(found, key=lambda model: model.name)


def remove_downloaded(name: str) -> tuple[int, list[str]]:
    """Delete a model by its name or alias, of whatever revision; returns the bytes that are free
    again, and the aliases that went with it.

    A repository's name removes all that was downloaded of it, a name with a quantization one GGUF
    model.

    Raises:
        ModelNotFoundError: it was not downloaded.
        DiskError: a file cannot be deleted.
    """
    name = read_aliases().get(name, name)
    repository, _, quantization = name.partition(":")
    for each in _repositories():
        if each.repo_id == repository:
            break
    else:
        raise ModelNotFoundError(f"{name} was not downloaded; `ridgeline list` shows what was.")
    try:
        freed = _remove_file(each, name, quantization) if quantization else _remove_all(each)
    except OSError as error:
        raise DiskError(f"{name} cannot be deleted: {error.strerror}.") from error
    gone = name.casefold()  # as quantizations are read
    return freed, forget_aliases(
        lambda model: model.casefold() == gone or model.casefold().partition(":")[0] == gone
    )


def repository_of(name: str) -> str:
    """The hub's repository that a model comes from, by its name, alias, or path in the cache.

    What comes from elsewhere is returned as it is.
    """
    from huggingface_hub import constants

    name = read_aliases().get(name, name)
    path, cache = Path(name).expanduser().resolve(), Path(constants.HF_HUB_CACHE).resolve()
    if path.is_relative_to(cache) and path != cache:
        folder = path.relative_to(cache).parts[0]
        return folder.removeprefix("models--").replace("--", "/")
    return name.partition(":")[0]


def _repositories() -> "list[CachedRepoInfo]":
    # Imported late: 0.3 s that local folders and the embedded model do without.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        with quiet():
            cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise DiskError(f"{constants.HF_HUB_CACHE} cannot be read: {error}.") from error
    return [each for each in cache.repos if each.repo_type == "model"]


def _models(repository: "CachedRepoInfo") -> Iterator[DownloadedModel]:
    if not repository.revisions:
        return
    revision = max(repository.revisions, key=lambda each: each.last_modified)
    paths = _paths(revision)
    licence = _licence(paths.get(_CARD))

    def model(name: str, path: Path, names: list[str]) -> DownloadedModel:
        return DownloadedModel(
            name=name,
            path=path,
            files=tuple(paths[each] for each in names),
            num_bytes=sum(paths[each].stat().st_size for each in names),
            modified_s=max(paths[each].stat().st_mtime for each in names),
            licence=licence,
        )

    weights = [name for name in paths if name.endswith(".safetensors")]
    if weights and CONFIG_NAME in paths:
        yield model(repository.repo_id, revision.snapshot_path, weights)
    for name in gguf_names(paths):
        quantization = quantization_of(name)
        try:
            parts = choose_gguf(paths.keys(), quantization, repository.repo_id)
        except (ModelNotFoundError, CorruptFileError):
            continue  # not whole, or one of several of that name
        yield model(f"{repository.repo_id}:{quantization}", paths[name], parts)


def _paths(revision: "CachedRevisionInfo") -> dict[str, Path]:
    """The files of a revision by their names in the repository."""
    return {
        file.file_path.relative_to(revision.snapshot_path).as_posix(): file.file_path
        for file in revision.files
    }


def _licence(card: Path | None) -> str | None:
    """What the model's card says in the YAML at its beginning."""
    if card is None or card.stat().st_size > _MAX_CARD_BYTES:
        return None
    match = _FRONT_MATTER.search(card.read_text(encoding="utf-8", errors="replace"))
    try:
        facts: Any = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return None
    found = facts.get("license_name", facts.get("license")) if isinstance(facts, dict) else None
    return found if isinstance(found, str) else None


def _remove_all(repository: "CachedRepoInfo") -> int:
    from huggingface_hub import constants, scan_cache_dir

    hashes = (revision.commit_hash for revision in repository.revisions)
    strategy = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*hashes)
    strategy.execute()
    return strategy.expected_freed_size


def _remove_file(repository: "CachedRepoInfo", name: str, quantization: str) -> int:
    """One GGUF model, in each revision that has it."""
    freed: dict[Path, int] = {}
    links: list[Path] = []
    kept: set[Path] = set()
    for revision in repository.revisions:
        paths = _paths(revision)
        try:
            parts = choose_gguf(paths.keys(), quantization, name)
        except (ModelNotFoundError, CorruptFileError):
            parts = []
        for each, path in paths.items():
            blob = path.resolve()
            if each in parts:
                links.append(path)
                freed[blob] = blob.stat().st_size
            else:
                kept.add(blob)
    if not links:
        raise ModelNotFoundError(f"{name} was not downloaded; `ridgeline list` shows what was.")
    for path in links:
        path.unlink()
    for blob in freed.keys() - kept:
        blob.unlink(missing_ok=True)
    return sum(size for blob, size in freed.items() if blob not in kept)

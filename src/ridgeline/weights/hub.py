"""Download of models from the Hugging Face hub, each failure told in one sentence.

``huggingface_hub`` does the work. It writes each file under a temporary name (``*.incomplete``),
checks its size and renames it, so that a file under its own name is whole. A stream that ends
early is resumed after the last 10 MiB that came whole; after a failed call the files that were
finished are kept, and the next call fetches the others from their start.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from logging import ERROR, getLogger
from pathlib import Path

from ridgeline.core.errors import DiskError, ModelFileError, ModelNotFoundError, NetworkError
from ridgeline.weights.files import (
    INDEX_NAME,
    SINGLE_NAME,
    SKIPPED_PATTERNS,
    check_files,
    files_in,
    is_wanted,
    wanted_patterns,
)
from ridgeline.weights.hub_errors import explain
from ridgeline.weights.hub_progress import DownloadCount, bar_class
from ridgeline.weights.progress import Progress
from ridgeline.weights.shard_index import read_index

_ATTEMPTS = 3
_TIMEOUT_S = 15.0
_SPARE_BYTES = 64 << 20

Accept = Callable[[Path], object]


def download(
    name: str,
    *,
    revision: str | None,
    offline: bool,
    need_weights: bool,
    accept: Accept,
    progress: Progress | None,
) -> Path:
    """The folder of hub model ``name``, after what the local cache lacks was downloaded.

    ``accept`` is called with the folder before its weights are fetched, and may raise. If the hub
    cannot be reached, what was downloaded before is used.

    Raises:
        ModelNotFoundError: unknown, gated, without the files of a model, or offline and not here.
        UnsupportedModelError: the weights are there only in other formats.
        NetworkError: the hub cannot be reached or does not answer as it should.
        DiskError: the files do not fit on the disk, or may not be written.
    """
    # Imported late: 0.3 s that local folders and the embedded model do without.
    from huggingface_hub import constants

    with quiet():
        if offline or constants.HF_HUB_OFFLINE:
            folder = _cached(name, revision, need_weights)
            if folder is None:
                remedy = f"download it with `ridgeline pull {name}`"
                if constants.HF_HUB_OFFLINE:
                    remedy = "nothing is downloaded while HF_HUB_OFFLINE is set; unset it"
                raise ModelNotFoundError(
                    f"{name} was not downloaded before, or not completely: {remedy}, or give a "
                    "folder."
                )
            accept(folder)
            return folder
        try:
            return _fetched(name, revision, need_weights, accept, progress)
        except NetworkError:
            folder = _cached(name, revision, need_weights)
            if folder is None:
                raise
            accept(folder)
            return folder


def _cached(name: str, revision: str | None, need_weights: bool) -> Path | None:
    """The folder of a model that was downloaded before, if all of it is there."""
    from huggingface_hub import constants, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                local_files_only=True,
                allow_patterns=wanted_patterns(need_weights),
                ignore_patterns=SKIPPED_PATTERNS,
            )
        )
        # The library compares with its record of the repository, but only if it could write one.
        names = files_in(folder)
        check_files(names, name, need_weights=need_weights)
        sharded = need_weights and SINGLE_NAME not in names
        whole = not sharded or set(read_index(folder / INDEX_NAME).values()) <= names
    except (OSError, ValueError, ModelFileError, DiskError):
        return None
    return folder if whole else None


def _fetched(
    name: str,
    revision: str | None,
    need_weights: bool,
    accept: Accept,
    progress: Progress | None,
) -> Path:
    """The config and its like, and once they are accepted the weights."""
    from huggingface_hub import constants

    sizes, commit = file_sizes(name, revision)
    check_files(sizes.keys(), f"The hub model {name}", need_weights=need_weights)
    first, second = (
        _missing_bytes(name, {f: n for f, n in sizes.items() if is_wanted(f, weights)}, commit)
        for weights in (False, need_weights)
    )
    _check_space(name, second, Path(constants.HF_HUB_CACHE))

    def fetch_part(weights: bool, done_bytes: int, num_bytes: int) -> Path:
        def note(done: int, _: int, label: str) -> None:
            assert progress is not None
            progress(done_bytes + done, second, label)

        return fetch(
            name,
            revision,
            patterns=wanted_patterns(weights),
            skipped=SKIPPED_PATTERNS,
            total_bytes=num_bytes,
            progress=None if progress is None else note,
        )

    folder = fetch_part(False, 0, first)
    accept(folder)
    return fetch_part(True, first, second - first) if need_weights else folder


def fetch_files(
    name: str,
    revision: str | None,
    sizes: Mapping[str, int],
    commit: str | None,
    progress: Progress | None,
) -> Path:
    """The folder of hub model ``name`` with some of its files, by name and size, downloaded.

    Raises:
        ModelNotFoundError, NetworkError, DiskError: as `download`.
    """
    return fetch(
        name,
        revision,
        patterns=[escape(file) for file in sizes],
        skipped=[],
        total_bytes=_missing_bytes(name, sizes, commit),
        progress=progress,
    )


def fetch(
    name: str,
    revision: str | None,
    *,
    patterns: list[str],
    skipped: list[str],
    total_bytes: int,
    progress: Progress | None,
) -> Path:
    """Download what fits ``patterns`` and not ``skipped``, trying again where that may help."""
    from huggingface_hub import constants, snapshot_download

    _check_space(name, total_bytes, Path(constants.HF_HUB_CACHE))
    count = DownloadCount(total_bytes, name, progress)
    for attempt in range(1, _ATTEMPTS + 1):
        before = count.start_attempt()
        try:
            folder = snapshot_download(
                name,
                revision=revision,
                endpoint=constants.ENDPOINT,
                cache_dir=constants.HF_HUB_CACHE,
                allow_patterns=patterns,
                ignore_patterns=skipped,
                tqdm_class=bar_class(count),
            )
        except Exception as error:
            if count.failure is not None:
                raise count.failure from None
            told = explain(error, name, revision)
            # The library resumes a stream that ends early, but not one that is reset.
            hopeless = not isinstance(told, NetworkError) or count.done_bytes == before
            if hopeless or attempt == _ATTEMPTS:
                raise told from error
        else:
            count.finish()
            return Path(folder)
    raise AssertionError("the last attempt returns or raises")


def file_sizes(name: str, revision: str | None) -> tuple[dict[str, int], str | None]:
    """The files of a hub model with their sizes in bytes, and the commit that they are of."""
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
        )
        return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}, info.sha
    except Exception as error:
        raise explain(error, name, revision) from error


def fetch_card(name: str, revision: str | None) -> None:
    """Download the card of a hub model, whose head names the licence, if it has one."""
    from huggingface_hub import constants, hf_hub_download

    with quiet(), suppress(Exception):  # whatever the library raises: nothing depends on a card
        hf_hub_download(
            name,
            "README.md",
            revision=revision,
            endpoint=constants.ENDPOINT,
            cache_dir=constants.HF_HUB_CACHE,
        )


def _missing_bytes(name: str, sizes: Mapping[str, int], commit: str | None) -> int:
    """The size of the files that are not in the cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = constants.HF_HUB_CACHE
    return sum(
        size
        for file, size in sizes.items()
        if not isinstance(try_to_load_from_cache(name, file, cache, commit), str)
    )


def _check_space(name: str, need_bytes: int, cache: Path) -> None:
    folder = cache.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if need_bytes and free_bytes < need_bytes + _SPARE_BYTES:
        raise DiskError(
            f"Downloading {name} takes {need_bytes / 1e9:.2f} GB and {cache} has "
            f"{free_bytes / 1e9:.2f} GB free; make room, or set HF_HOME to a larger disk."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's warnings off the terminal: what matters is raised, and told once."""
    logger = getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

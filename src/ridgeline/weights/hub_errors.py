"""What the hub library raises, told as one of Ridgeline's errors."""

import errno

from ridgeline.core.errors import DiskError, ModelNotFoundError, NetworkError, RidgelineError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WAYS_OUT = "check the name and the connection, give a folder, or use the embedded model"


def explain(error: Exception, name: str, revision: str | None) -> RidgelineError:
    """The error to raise for ``error``, which came from downloading model ``name``."""
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RidgelineError):
        return error
    if isinstance(error, GatedRepoError):
        return ModelNotFoundError(
            f"{name} is a gated model: ask for access on its page at the hub, then set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"The hub model {name} has no revision {revision or 'main'!a}.")
    if isinstance(error, DisabledRepoError):
        return ModelNotFoundError(f"The hub model {name} has been disabled.")
    if isinstance(error, RepositoryNotFoundError):
        return _unknown(name)
    if isinstance(error, HfHubHTTPError):
        return _http(error.response.status_code, name)
    return _disk(error, name) or _network(error, name)


def _unknown(name: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"There is no folder {name}, and no hub model of that name that you may read; "
        "check the name, or set HF_TOKEN if it is private."
    )


def _http(status: int, name: str) -> RidgelineError:
    if status == 404:
        return _unknown(name)
    if status in (401, 403):
        return ModelNotFoundError(f"The hub refused access to {name}; check HF_TOKEN.")
    return NetworkError(f"The hub answered {status} when asked for {name}; try again later.")


def _disk(error: BaseException, name: str) -> DiskError | None:
    """A `DiskError` if the machine's file system is what failed."""
    code = error.errno if isinstance(error, OSError) else None
    # The Rust downloader gives the operating system's error as text only.
    if code in _FULL or "(os error 28)" in str(error):
        return DiskError(
            f"The disk is full: {name} could not be downloaded; make room, or set HF_HOME to a "
            "larger disk."
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DiskError(
            f"{name} could not be downloaded, for want of permission to write the download folder; "
            "set HF_HOME to a folder of yours."
        )
    if code is None or isinstance(error, ConnectionError | TimeoutError):
        return None
    assert isinstance(error, OSError)
    return DiskError(f"{name} could not be written to the disk: {error.strerror}.")


def _network(error: Exception, name: str) -> NetworkError:
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    kind = type(cause or error).__name__
    return NetworkError(
        f"There is no folder {name}, and a hub model of that name could not be downloaded "
        f"({kind}); {_WAYS_OUT}."
    )

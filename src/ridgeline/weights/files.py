"""Which files make a model, and what to say of a folder or repository that lacks them."""

import os
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from ridgeline.core.errors import (
    DiskError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ridgeline.weights.gguf.choice import gguf_names, quantization_of
from ridgeline.weights.names import list_some

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"  # of LoRA, in PEFT's layout

# What is downloaded: never a pickle. Sub-folders hold other formats (ONNX, the original weights),
# but for chat templates and, numbered, what pooled hidden states go through (1_Pooling, 2_Dense);
# consolidated files are a second copy of the weights.
_SMALL_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_WEIGHT_PATTERNS = ["*.safetensors"]
SKIPPED_PATTERNS = ["[!0-9]*/*.json", "[!0-9]*/*.safetensors", "consolidated*"]

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def wanted_patterns(need_weights: bool) -> list[str]:
    """Patterns of the files to download, less `SKIPPED_PATTERNS`."""
    return _SMALL_PATTERNS + _WEIGHT_PATTERNS if need_weights else _SMALL_PATTERNS


def is_wanted(name: str, need_weights: bool) -> bool:
    """Whether the file ``name`` of a repository is to be downloaded."""
    wanted = any(fnmatch(name, pattern) for pattern in wanted_patterns(need_weights))
    return wanted and not any(fnmatch(name, pattern) for pattern in SKIPPED_PATTERNS)


def files_in(folder: Path) -> frozenset[str]:
    """The names in a folder; links that lead nowhere are left out.

    Raises:
        ModelNotFoundError: there is no such folder.
        DiskError: the folder cannot be read.
    """
    try:
        return frozenset(n for n in os.listdir(folder) if os.path.exists(os.path.join(folder, n)))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"There is no folder {folder}.") from None
    except OSError as error:
        raise DiskError(f"{folder} could not be read: {error.strerror or error}.") from None


def is_gguf_only(names: Collection[str]) -> bool:
    """Whether GGUF files are the only weights among ``names``."""
    return SINGLE_NAME not in names and INDEX_NAME not in names and bool(gguf_names(names))


def check_files(
    names: Collection[str], where: str, *, need_config: bool = True, need_weights: bool = True
) -> None:
    """Check that the files of a folder or repository, called ``where``, make a model.

    Raises:
        UnsupportedModelError: there are weights, but only in formats that Ridgeline does not read.
        ModelNotFoundError: the config or the weights are missing; names what is.
    """
    lacks_weights = need_weights and SINGLE_NAME not in names and INDEX_NAME not in names
    if lacks_weights and (other := _other_weights(names, where)):
        raise other
    missing = [CONFIG_NAME] if need_config and CONFIG_NAME not in names else []
    if lacks_weights:
        missing.append(f"{SINGLE_NAME} or {INDEX_NAME}")
    if missing and ADAPTER_CONFIG_NAME in names:
        raise ModelNotFoundError(
            f"{where} is a LoRA adapter: load the model that it was made for, with adapters "
            f"(--adapters NAME={where})."
        )
    if missing:
        raise ModelNotFoundError(
            f"{where} is not a model that can be loaded: it has no {', and no '.join(missing)}."
        )


def _other_weights(names: Collection[str], where: str) -> ModelFileError | None:
    models = gguf_names(names)
    if models:
        listed = list_some(sorted({quantization_of(name) for name in models}))
        return ModelNotFoundError(
            f"{where} has its weights only as GGUF; name one of its files by what follows the "
            f"colon in owner/name:Q4_K_M, of {listed}."
        )
    for name in sorted(names):
        if "/" not in name and any(fnmatch(name, pattern) for pattern in _PICKLES):
            return UnsupportedModelError(
                f"{where} has its weights only as {name}, a pickle file, which can run code and is "
                "never loaded; convert it to safetensors."
            )
    return None

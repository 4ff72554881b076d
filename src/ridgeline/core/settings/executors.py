"""Settings of one executor alone."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ridgeline.core.settings.bounds import Meta, NumBytes
from ridgeline.core.settings.reading import Needs

_CACHE = Needs("packed_cache_path", lambda config: config.packed_cache_path != "off")


@dataclass(frozen=True, kw_only=True)
class CPUSettings:
    """Settings of the cpu executor.

    Attributes:
        packed_cache_path: folder in which the cpu executor keeps the packed weights of large
            checkpoints for the next start; auto for the user's cache folder, off for none. A folder
            that is named here keeps random weights, too.
        packed_cache_bytes: the most that it may hold; what was used longest ago goes first. A model
            that takes more is packed at every start, with a warning.
        weights_memory_bytes: the most memory that a model's packed weights may take: what is beyond
            is read from packed_cache_path in every step, ahead of the products that need it.
    """

    packed_cache_path: str = "auto"
    packed_cache_bytes: Annotated[NumBytes, _CACHE] = 50 * 2**30
    weights_memory_bytes: Annotated[NumBytes | None, _CACHE] = None


@dataclass(frozen=True, kw_only=True)
class CUDASettings:
    """Settings of the cuda executor.

    Attributes:
        gpu_memory_utilization: share of a GPU's memory that weights, KV and steps may take; 0.9
            without it.
        attention_backend: what attends on a GPU: triton (our kernels), flash-attn (FlashAttention,
            for all of a model or not at all), or auto: the faster one where it is installed,
            chosen at start for each kind of layer.
        tuning_cache_path: folder in which the cuda executor keeps the tiles of products that it
            timed at start, for up to 20 s a model; auto for the user's cache folder, off for no
            timing and tiles that are guesses.
    """

    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    attention_backend: Literal["auto", "triton", "flash-attn"] = "auto"
    tuning_cache_path: str = "auto"

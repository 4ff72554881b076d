"""Settings of how a model is spread over processes."""

from dataclasses import dataclass
from typing import Annotated

from ridgeline.core.settings.bounds import Meta

MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How many processes compute one model.

    Attributes:
        tensor_parallel_size: processes that have a part of each matrix; they share this machine's
            processors, and give the tokens of one process.
        pipeline_parallel_size: stages, each of which has some of the layers and computes another
            step; each is tensor_parallel_size processes.
    """

    tensor_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

"""How one model is spread over ranks, and what joins them."""

from dataclasses import dataclass

from ridgeline.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Numbers of ranks along each axis: tensor, pipeline, context (sequence), expert and data.

    Ranks are numbered with the tensor axis fastest, then context, pipeline and data. Experts are
    spread over the tensor × context × data ranks, whose product ``expert`` must divide, or be a
    multiple of: then several ranks have the same of all but the experts.
    ``splits_operators``: of two ranks, one has the feed-forward networks alone, and the other one
    all else; this goes with no other axis.
    ``stage_borders``: the pipeline's stage s has the layers
    ``[stage_borders[s], stage_borders[s + 1])``; empty where that is not decided.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    stage_borders: tuple[int, ...] = ()
    splits_operators: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert", "data"):
            if getattr(self, name) < 1:
                raise SettingsError(f"The number of {name}-parallel ranks must be positive.")
        others = self.tensor * self.context * self.data
        if others % self.expert and self.expert % others:
            raise SettingsError(
                f"{self.expert} expert-parallel ranks do not divide {others} ranks."
            )

    @property
    def num_ranks(self) -> int:
        return self.stage_ranks * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Ranks that have the same layers."""
        if self.splits_operators:
            return 2
        return max(self.tensor * self.context * self.data, self.expert)

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage that share its experts."""
        return 1 if self.splits_operators else self.stage_ranks

    @property
    def num_copies(self) -> int:
        """Ranks that have the same of all but the experts."""
        return 1 if self.splits_operators else self.stage_ranks // self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(tensor, context, pipeline, data) coordinates of a rank."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        context, rest = rest % self.context, rest // self.context
        return tensor, context, rest % self.pipeline, rest // self.pipeline

    def layers_of(self, stage: int) -> tuple[int, int] | None:
        """The layers ``[first, stop)`` of a stage; ``None`` for all."""
        if self.pipeline == 1:
            return None
        return self.stage_borders[stage], self.stage_borders[stage + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The least that an exchange between ranks takes, in seconds, and what a rank sends beyond that
    in a second.

    ``seconds`` = ``latency_s`` + bytes sent to others / ``bytes_per_s``.
    """

    latency_s: float
    bytes_per_s: float


def borders(size: int, num_parts: int, unit: int = 1) -> tuple[int, ...]:
    """Where the parts of ``size`` begin, and the end: whole units, as equal as can be.

    >>> borders(10, 4), borders(12, 2, 4)
    ((0, 2, 5, 7, 10), (0, 4, 12))
    """
    assert size % unit == 0
    return tuple(size // unit * part // num_parts * unit for part in range(num_parts + 1))

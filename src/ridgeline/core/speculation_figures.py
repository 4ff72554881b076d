"""What speculation did, as counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoices:
    """What a drafter chose that chooses how much is drafted.

    ``steps_by_length``: steps by the tokens of the longest draft that was chosen, probes left out.
    ``num_probes``: tries of a sequence that drafted nothing. ``expected_tok_s``: tokens per second
    that the latest choice was expected to give, all sequences together.
    """

    steps_by_length: Mapping[int, int] = field(default_factory=dict)
    num_probes: int = 0
    expected_tok_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFigures:
    """Since the engine started; tokens that a grammar forces are not counted.

    ``num_drafts`` drafts were verified. ``drafted_at[i]`` had tokens at position i (of a tree, at
    that depth), and of ``accepted_at[i]`` one was accepted. ``drafted_by_rank[r]`` tokens were the
    r-th of those that a tree has in one place, ``accepted_by_rank[r]`` of them were accepted.
    ``choices`` are those of an adaptive drafter.
    """

    num_drafts: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    drafted_by_rank: tuple[int, ...] = ()
    accepted_by_rank: tuple[int, ...] = ()
    choices: DraftChoices | None = None

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_by_rank)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

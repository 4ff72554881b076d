"""What the executor remembers of a sequence between plans."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.plan import Admission, BlockTableUpdate, ModelRole
from ridgeline.decoding import History, Proposal
from ridgeline.executors.features import SequenceFeatures


@dataclass(slots=True)
class SequenceState:
    """Known tokens and block tables of one slot, for each model; mutated as plans are executed.

    A draft model's proposals are known to the draft model alone, unless it ``shares`` both with the
    target, whose KV it then writes, too. ``features`` are what a drafter that reads hidden states
    has of them. ``proposals`` are those that the target has not verified yet, by position, where
    that is done by rejection. ``drafted`` are what ops on states read of the last segment's drafts,
    by the op's offset in the state.
    """

    admission: Admission
    shares: bool = False
    tokens: dict[ModelRole, list[int]] = field(default_factory=dict)
    tables: dict[tuple[ModelRole, int], list[int]] = field(default_factory=dict)
    proposals: dict[int, Proposal] = field(default_factory=dict)
    features: SequenceFeatures = field(default_factory=SequenceFeatures)
    drafted: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def verifies_by_rejection(self) -> bool:
        """Whether drafts are; for a greedy sequence both rules are the same."""
        return self.admission.rejection and not self.admission.params.is_greedy

    def owner(self, role: ModelRole) -> ModelRole:
        """The model whose tokens and tables one uses."""
        return ModelRole.TARGET if self.shares else role

    def table(self, role: ModelRole, group: int) -> list[int]:
        return self.tables[self.owner(role), group]

    def update_table(self, role: ModelRole, update: BlockTableUpdate) -> None:
        table = self.tables.setdefault((self.owner(role), update.group), [])
        assert update.first <= len(table), "a block table has no gaps"
        table[update.first : update.first + len(update.blocks)] = update.blocks

    def known(self, role: ModelRole) -> list[int]:
        """The tokens that a model knows; those beyond what it has computed may be overtaken."""
        return self.tokens.setdefault(self.owner(role), list(self.admission.token_ids))

    def set_tokens(self, role: ModelRole, start: int, token_ids: Sequence[int]) -> None:
        """Tokens at ``start`` onward become these; what was known beyond them is kept."""
        known = self.known(role)
        assert start <= len(known), "a sequence has no gaps"
        known[start : start + len(token_ids)] = token_ids

    def rope_length(self, position: int) -> int:
        """Length of the sequence that a token at ``position`` sees, for scalings that ask.

        The prompt's length for its tokens and position + 1 for those after it, however the prompt
        was cut into chunks.
        """
        return max(self.admission.num_prompt_tokens, position + 1)

    def token_type(self, position: int) -> int:
        """1 for a token of the second text of a pair, else 0."""
        second = self.admission.second_start
        return int(second is not None and position >= second)

    def history(self, token_ids: Sequence[int]) -> History:
        return History(
            token_ids=token_ids,
            num_prompt_tokens=self.admission.num_prompt_tokens,
            eos_token_ids=self.admission.eos_token_ids,
        )

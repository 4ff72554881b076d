"""What the CPU executor remembers of a sequence."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.plan import Admission, BlockTableUpdate, ModelRole
from ridgeline.executors.cpu.adjust import CountedHistory
from ridgeline.executors.state import SequenceState
from ridgeline.kernels.cpu.structs import SAMPLING

_MIN_ENTRIES = 64


class CPUSequence(SequenceState):
    """Adds block tables in native memory, and how the sequence is sampled as a native row.

    ``sampling`` lacks the logits, the mask and the position, which differ from token to token.
    """

    def __init__(
        self, admission: Admission, num_groups: dict[ModelRole, int], *, shares: bool = False
    ) -> None:
        super().__init__(admission, shares)
        self._native = {
            role: [np.zeros(_MIN_ENTRIES, dtype=np.int32) for _ in range(count)]
            for role, count in num_groups.items()
        }
        self._pointers = {role: _addresses(tables) for role, tables in self._native.items()}
        # Looked up for every step, and slow to ask NumPy or the settings for.
        self._pointer_of = {role: table.ctypes.data for role, table in self._pointers.items()}
        # Sorted, since the sampler searches them for each token of the vocabulary.
        barred = {*admission.eos_token_ids, *admission.params.stop_token_ids}
        self._barred = np.array(sorted(barred), dtype=np.int32)
        self.sampling = _sampling_row(admission, self._barred)
        params = admission.params
        # Whether its logits are changed before a token is drawn, and whether a draw from them as
        # they are is all that is wanted.
        self.is_adjusted = params.has_penalties or bool(params.logit_bias)
        self.is_plain = not self.is_adjusted and params.logprobs is None
        self._counted: dict[ModelRole, CountedHistory] = {}
        # What ops on states read of drafts: of the last ones, and what the next are written over.
        self._drafted = [np.empty((0, 0), dtype=np.float32)] * 2

    def update_table(self, role: ModelRole, update: BlockTableUpdate) -> None:
        super().update_table(role, update)
        role = self.owner(role)
        tables = self._native[role]
        stop = update.first + len(update.blocks)
        if stop > len(tables[update.group]):
            grown = np.zeros(max(2 * len(tables[update.group]), stop), dtype=np.int32)
            grown[: update.first] = tables[update.group][: update.first]
            tables[update.group] = grown
            self._pointers[role] = _addresses(tables)
            self._pointer_of[role] = self._pointers[role].ctypes.data
        tables[update.group][update.first : stop] = update.blocks

    def set_tokens(self, role: ModelRole, start: int, token_ids: Sequence[int]) -> None:
        if (counted := self._counted.get(self.owner(role))) is not None:
            counted.forget(start)
        super().set_tokens(role, start, token_ids)

    def counted(self, role: ModelRole, stop: int) -> CountedHistory:
        """The first ``stop`` known tokens, counted; kept, so that a step counts what is new."""
        known, role = self.known(role), self.owner(role)
        if role not in self._counted:
            prompt = self.admission.num_prompt_tokens
            self._counted[role] = CountedHistory(prompt, known[:stop])
        self._counted[role].advance(known, stop)
        return self._counted[role]

    def state_inputs(self, num_drafts: int, width: int) -> tuple[int, int]:
        """The addresses of what ops on states read of the last drafts, ``width`` floats a token,
        and of where it goes of so many next ones (0: there are none)."""
        lagging = self._drafted[0].ctypes.data
        if not num_drafts:
            return lagging, 0
        if len(self._drafted[1]) < num_drafts:
            self._drafted[1] = np.empty((num_drafts, width), dtype=np.float32)
        self._drafted.reverse()
        return lagging, self._drafted[0].ctypes.data

    def native_table(self, role: ModelRole, group: int) -> npt.NDArray[np.int32]:
        return self._native[self.owner(role)][group]

    def table_pointers(self, role: ModelRole) -> int:
        """Address of an array of the groups' tables."""
        return self._pointer_of[self.owner(role)]


def _addresses(tables: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.uint64]:
    return np.array([table.ctypes.data for table in tables], dtype=np.uint64)


def _sampling_row(admission: Admission, barred: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
    params = admission.params
    row = np.zeros(1, dtype=SAMPLING)
    row["temperature"] = 0.0 if params.is_greedy else params.temperature
    row["top_p"], row["min_p"] = params.top_p, params.min_p
    row["top_k"] = max(params.top_k, 0)
    row["barred"], row["num_barred"] = barred.ctypes.data, len(barred)
    row["barred_until"] = admission.num_prompt_tokens + params.min_tokens
    row["seed"], row["sample_index"] = admission.seed, admission.sample_index
    return row

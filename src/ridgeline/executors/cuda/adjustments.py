"""Penalties, logit biases and barred tokens of each slot, on the device.

A history holds the tokens before the one that is drawn. A deferrable step adds its own input token,
which the host may not know yet; what other steps have brought since is added before it.
"""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.plan import Admission, ModelRole
from ridgeline.executors.cuda.deferrable import is_adjusted
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.staging import Staging, Writes
from ridgeline.executors.state import SequenceState
from ridgeline.kernels.triton import IN_PROMPT, AdjustmentTables

MOST_EDITS = 1024  # tokens that a sequence biases or bars; one with more is drawn through the host
_ROLE = ModelRole.TARGET
_NONE = -1


def adjustment_bytes(num_slots: int, vocab: int) -> int:
    """What `Adjustments` takes of the device's memory."""
    return (num_slots + 1) * (4 * vocab + (4 + 8 + 4) * MOST_EDITS + 3 * 8 + 4 + 4)


class Adjustments:
    """`AdjustmentTables` of the target, which change as sequences come and go.

    What is admitted is issued by the next step that adjusts logits, but for histories, which are
    issued at once.
    """

    def __init__(self, device: Device, staging: Staging, *, num_slots: int, vocab: int) -> None:
        self._staging, self._vocab, self._num_rows = staging, vocab, num_slots + 1
        self.tables = AdjustmentTables.empty(self._num_rows, vocab, MOST_EDITS, device.torch_device)
        self._counted = [_NONE] * num_slots  # what the tables have once all that is issued is done
        self._fits, self._is_set = [True] * num_slots, [False] * num_slots
        self._writes = {
            name: Writes(getattr(self.tables, name))
            for name in (
                "penalties", "counted", "edit_ids", "edit_values", "edit_until", "num_edits",
            )
        }  # fmt: skip

    def fits(self, slot: int) -> bool:
        """Whether all that changes a sequence's logits is in the tables."""
        return self._fits[slot]

    def admit(self, admission: Admission) -> None:
        """Note what changes the logits of the sequence that has this slot from now on."""
        params, slot = admission.params, admission.slot
        was_set = self._is_set[slot]
        self._is_set[slot] = params.has_penalties or bool(params.logit_bias or params.min_tokens)
        if not (was_set or self._is_set[slot]):
            return
        values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        for index, value in enumerate(values):
            self._writes["penalties"].add(index * self._num_rows + slot, value)
        self._edit(admission)
        self._set_counted(slot, _NONE)
        if params.has_penalties:
            tokens, num_prompt = admission.token_ids, admission.num_prompt_tokens
            self.tables.history[slot].zero_()
            self._count(slot, sorted(set(tokens[:num_prompt])), IN_PROMPT)
            self._count(slot, tokens[num_prompt:])
            self._set_counted(slot, len(tokens))

    def begin(self, drawn: Sequence[tuple[SequenceState, int]]) -> bool:
        """Whether a deferrable step that draws tokens at these positions adjusts logits.

        If so, what it needs is issued: each history holds the tokens before the step's input, or
        that as well.
        """
        if not any(is_adjusted(state, position) for state, position in drawn):
            return False
        for state, position in drawn:
            slot = state.admission.slot
            counted = self._counted[slot]
            assert counted <= position, "what was an input is not an input again"
            if _NONE < counted < position - 1:
                self._count(slot, state.known(_ROLE)[counted : position - 1])
                self._set_counted(slot, position - 1)
        for writes in self._writes.values():
            writes.flush(self._staging)
        return True

    def end(self, drawn: Sequence[tuple[SequenceState, int]], num_steps: int) -> None:
        """So many steps that adjust logits were issued, the first of which draws these tokens."""
        for state, position in drawn:
            slot = state.admission.slot
            if self._counted[slot] != _NONE:
                self._counted[slot] = position + num_steps - 1

    def _edit(self, admission: Admission) -> None:
        params, slot = admission.params, admission.slot
        barred: set[int] = set()
        if params.min_tokens:
            barred = {*admission.eos_token_ids, *params.stop_token_ids}
        ids = sorted({*params.logit_bias, *barred})
        # Where nothing but ends is left, nothing is barred.
        self._fits[slot] = len(ids) <= MOST_EDITS and len(barred) < self._vocab
        if not self._fits[slot]:
            ids = []
        first, until = slot * MOST_EDITS, admission.num_prompt_tokens + params.min_tokens
        self._writes["num_edits"].add(slot, len(ids))
        self._writes["edit_ids"].add(first, *ids)
        self._writes["edit_values"].add(first, *(params.logit_bias.get(each, 0.0) for each in ids))
        self._writes["edit_until"].add(first, *(until if each in barred else 0 for each in ids))

    def _count(self, slot: int, tokens: Sequence[int], each: int = 1) -> None:
        if not tokens:
            return
        ids, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        values = self._staging.send((counts * each).astype(np.int32))
        self.tables.history[slot].index_add_(0, self._staging.send(ids), values)

    def _set_counted(self, slot: int, count: int) -> None:
        self._counted[slot] = count
        self._writes["counted"].add(slot, count)

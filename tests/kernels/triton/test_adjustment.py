"""Biases, bars and penalties against the same in PyTorch ops and the sampling functions."""

import numpy as np
import pytest
import torch
from tests.kernels.triton.device import DEVICE, DTYPES

from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding import History, constrain
from ridgeline.executors.cuda.torch_kernels import TorchKernels
from ridgeline.kernels.tensors import as_array
from ridgeline.kernels.triton import IN_PROMPT, AdjustmentTables, adjust_logits, count_tokens

VOCAB, NUM_SLOTS, EDITS = 1300, 7, 300
SETTINGS = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 1.5, "logit_bias": {3: 4.0, 1030: -100.0}},
    {"logit_bias": {1200: 9.0, 11: 2.0}, "min_tokens": 99, "stop_token_ids": [11, 12]},
    {"min_tokens": 3, "stop_token_ids": [500]},
    {},
    {"logit_bias": {4 * i: i / 100 for i in range(EDITS)}, "repetition_penalty": 0.8},
]
PROMPT = 10  # tokens


class Sequences:
    """One for each of SETTINGS, in slots out of order, and two rows of padding."""

    def __init__(self, known=40):
        rng = np.random.default_rng(3)
        self.params = [SamplingParams(**each) for each in SETTINGS]
        self.known = [rng.integers(0, VOCAB, size=known).tolist() for _ in self.params]
        self.known[0][PROMPT] = self.known[0][PROMPT + 1]
        self.slots = [4, 0, 5, 2, 1, 3]
        padding = NUM_SLOTS - 1
        self.slots_N = torch.tensor([*self.slots, padding, padding], device=DEVICE)
        tables = AdjustmentTables.empty(NUM_SLOTS, VOCAB, EDITS, DEVICE)
        for slot, params, tokens in zip(self.slots, self.params, self.known, strict=True):
            self._fill(tables, slot, params, tokens[:-1])
        self.tables = tables

    def _fill(self, tables, slot, params, tokens):
        tables.penalties[:, slot] = torch.tensor(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
            dtype=torch.float64,
        )
        if params.has_penalties:
            for token in tokens[PROMPT:]:
                tables.history[slot, token] += 1
            tables.history[slot, sorted(set(tokens[:PROMPT]))] += IN_PROMPT
            tables.counted[slot] = len(tokens)
        else:
            tables.history[slot] = 77  # of another sequence, before
        barred = params.stop_token_ids if params.min_tokens else ()
        ids = [*{**params.logit_bias, **dict.fromkeys(barred)}]
        tables.num_edits[slot] = len(ids)
        for index, token in enumerate(ids):
            tables.edit_ids[slot, index] = token
            tables.edit_values[slot, index] = params.logit_bias.get(token, 0.0)
            tables.edit_until[slot, index] = (PROMPT + params.min_tokens) * (token in barred)

    def inputs(self):
        tokens = torch.tensor([*(each[-1] for each in self.known), 0, 0], device=DEVICE)
        stops = torch.tensor([*map(len, self.known), 1, 1], dtype=torch.int32, device=DEVICE)
        return self.slots_N, tokens, stops

    def expected(self, row, logits_V):
        history = History(token_ids=self.known[row], num_prompt_tokens=PROMPT)
        return torch.from_numpy(constrain(as_array(logits_V), self.params[row], history))


def logits_of(dtype):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(SETTINGS) + 2, VOCAB, generator=generator) * 3
    logits[0, 700] = float("nan")
    logits[4, :5] = float("-inf")
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("known", [12, 40])  # of the third minimum length one token is left
def test_logits_are_those_of_the_sampling_functions(dtype, known):
    ours, theirs = Sequences(known), Sequences(known)
    logits = logits_of(dtype).to(DEVICE)
    found = torch.empty(logits.shape, dtype=torch.float32, device=DEVICE)
    slots, tokens, stops = ours.inputs()
    count_tokens(ours.tables, slots, tokens, stops)
    adjust_logits(logits, found, ours.tables, slots, stops)
    by_torch = TorchKernels().adjust(logits, theirs.tables, slots, tokens, stops)
    assert by_torch.dtype == torch.float32
    torch.testing.assert_close(found, by_torch, rtol=0, atol=0, equal_nan=True)
    for row in range(len(SETTINGS)):
        expected = ours.expected(row, logits[row].float()).float()
        torch.testing.assert_close(found[row].cpu(), expected, rtol=0, atol=0, equal_nan=True)
    for name in AdjustmentTables.__slots__:
        assert torch.equal(getattr(ours.tables, name), getattr(theirs.tables, name)), name
    with pytest.raises(ValueError, match="float32"):
        adjust_logits(logits, found.half(), ours.tables, slots, stops)


def test_a_token_is_counted_once_and_in_its_turn():
    own = Sequences()
    slots, tokens, stops = own.inputs()
    before = own.tables.history.clone()
    count_tokens(own.tables, slots, tokens, stops + 1)  # one is missing before it
    assert torch.equal(own.tables.history, before)
    for _ in range(2):
        count_tokens(own.tables, slots, tokens, stops)
    added = own.tables.history - before
    assert added.sum() == sum(each.has_penalties for each in own.params)
    for slot, params, known in zip(own.slots, own.params, own.known, strict=True):
        assert added[slot, known[-1]] == params.has_penalties
        assert own.tables.counted[slot] == (len(known) if params.has_penalties else -1)

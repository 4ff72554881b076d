"""What the CPU executor counts of a sequence's tokens for penalties."""

import random
from collections import Counter

from ridgeline.core.plan import Admission, ModelRole
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cpu.adjust import CountedHistory, TokenCounts
from ridgeline.executors.cpu.state import CPUSequence


def counted(counts: TokenCounts) -> Counter[int]:
    assert (counts.counts > 0).all()
    pairs = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(pairs) == len(counts.ids), "each token is there once"
    return Counter(pairs)


def check(history: CountedHistory, tokens: list[int], num_prompt_tokens: int) -> None:
    assert len(history) == len(tokens)
    assert counted(history.every) == Counter(tokens)
    assert counted(history.output) == Counter(tokens[num_prompt_tokens:])


def test_counts_follow_a_sequence_that_grows_and_shrinks():
    rng = random.Random(4)
    for num_prompt_tokens in (0, 5, 300):
        tokens = [rng.randrange(400) for _ in range(300)]
        history = CountedHistory(num_prompt_tokens, tokens)
        for _ in range(200):
            check(history, tokens, num_prompt_tokens)
            keep = rng.randint(max(len(tokens) - 20, 0), len(tokens))
            new = [rng.randrange(400) for _ in range(rng.randrange(25))]
            tokens = tokens[:keep] + new
            history.forget(keep)
            history.extend(new)


def test_a_sequence_counts_what_was_overwritten_anew():
    prompt = [3, 1, 3, 7]
    admission = Admission(
        slot=0,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(frequency_penalty=0.5),
        seed=1,
    )
    state = CPUSequence(admission, dict.fromkeys(ModelRole, 1))
    target, draft = ModelRole.TARGET, ModelRole.DRAFT
    check(state.counted(target, 4), prompt, 4)
    state.set_tokens(target, 4, [7, 8, 9])
    check(state.counted(target, 6), [*prompt, 7, 8], 4)
    check(state.counted(target, 7), [*prompt, 7, 8, 9], 4)
    state.set_tokens(target, 5, [2])  # the draft 8 was not right
    check(state.counted(target, 7), [*prompt, 7, 2, 9], 4)
    check(state.counted(target, 5), [*prompt, 7], 4)
    check(state.counted(draft, 4), prompt, 4)
    state.set_tokens(target, 2, [5])
    check(state.counted(target, 6), [3, 1, 5, 7, 7, 2], 4)
    check(state.counted(draft, 4), prompt, 4)

import random

import numpy as np
import pytest

from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.decoding.grammars.vocabulary import grammar_vocabulary
from ridgeline.text import Tokenizer
from ridgeline.weights import locate_model


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_folder(locate_model(None))


@pytest.fixture(scope="session")
def compiler(tokenizer):
    return GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))


def allowed(mask_row) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_row.view(np.uint8), bitorder="little")).tolist()


def random_walk(constraint, tokenizer, rng: random.Random, *, max_tokens=300):
    """Tokens drawn from what the masks allow, with a liking for what closes; None if unfinished."""
    closing = {
        tokenizer.token_to_id(text) for text in ('"', "}", "]", '"}', '"]', ",", "0", "@", ".")
    }
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        choices = allowed(constraint.masks(())[0])
        assert choices, "nothing may follow, but the grammar is not complete"
        ends = [token for token in choices if token in tokenizer.eos_token_ids]
        if ends and rng.random() < 0.5:
            return tokens
        closers = [token for token in choices if token in closing]
        pool = closers if closers and rng.random() < 0.4 + len(tokens) / 100 else choices
        token = rng.choice([t for t in pool if t not in tokenizer.eos_token_ids] or ends)
        if token in tokenizer.eos_token_ids:
            return tokens
        tokens.append(token)
        constraint.advance([token])
        if constraint.is_complete:
            return tokens
    return None

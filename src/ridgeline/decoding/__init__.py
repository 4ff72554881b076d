"""Choosing tokens: sampling and the verification of drafts."""

from ridgeline.decoding.logprobs import token_logprobs
from ridgeline.decoding.noise import gumbel, random_words
from ridgeline.decoding.sampling import History, NothingToSampleError, process_logits, sample
from ridgeline.decoding.verification import ancestors, chain, depths, verify

__all__ = [
    "History",
    "NothingToSampleError",
    "ancestors",
    "chain",
    "depths",
    "gumbel",
    "process_logits",
    "random_words",
    "sample",
    "token_logprobs",
    "verify",
]

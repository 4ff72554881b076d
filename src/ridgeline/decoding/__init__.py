"""Choosing tokens: sampling and the verification of drafts."""

from ridgeline.decoding.logprobs import token_logprobs
from ridgeline.decoding.noise import gumbel
from ridgeline.decoding.rejection import Proposal, propose, verify_by_rejection
from ridgeline.decoding.sampling import (
    History,
    NothingToSampleError,
    constrain,
    process_logits,
    sample,
)
from ridgeline.decoding.verification import ancestors, chain, depths, verify

__all__ = [
    "History",
    "NothingToSampleError",
    "Proposal",
    "ancestors",
    "chain",
    "constrain",
    "depths",
    "gumbel",
    "process_logits",
    "propose",
    "sample",
    "token_logprobs",
    "verify",
    "verify_by_rejection",
]

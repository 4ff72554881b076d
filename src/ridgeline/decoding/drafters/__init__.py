"""Drafters: each guesses the next tokens of sequences in its own way."""

from ridgeline.decoding.drafters.adaptive import AdaptiveDrafter
from ridgeline.decoding.drafters.first_of import FirstOf
from ridgeline.decoding.drafters.lookahead import LookaheadDrafter
from ridgeline.decoding.drafters.model import ModelDrafter
from ridgeline.decoding.drafters.ngram import NgramDrafter
from ridgeline.decoding.drafters.recycling import RecyclingDrafter
from ridgeline.decoding.drafters.registry import make_drafter
from ridgeline.decoding.drafters.suffix import SuffixDrafter

__all__ = [
    "AdaptiveDrafter",
    "FirstOf",
    "LookaheadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "RecyclingDrafter",
    "SuffixDrafter",
    "make_drafter",
]

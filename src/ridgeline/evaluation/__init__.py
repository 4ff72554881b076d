"""How good a model is, and how far it is from another: perplexity and divergences on given text."""

from ridgeline.evaluation.engine import served_log_probabilities
from ridgeline.evaluation.quality import LogProbabilities, Quality, QualitySum, log_softmax
from ridgeline.evaluation.texts import Document, encode_documents, heldout_texts, read_texts

__all__ = [
    "Document",
    "LogProbabilities",
    "Quality",
    "QualitySum",
    "encode_documents",
    "heldout_texts",
    "log_softmax",
    "read_texts",
    "served_log_probabilities",
]

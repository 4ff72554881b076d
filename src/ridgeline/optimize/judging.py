"""The quality of a format: how far its answers are from the unquantized model's."""

from collections.abc import Sequence
from typing import Any

from ridgeline.core.config import EngineConfig
from ridgeline.engine.llm import LLM
from ridgeline.evaluation import (
    Document,
    LogProbabilities,
    Quality,
    QualitySum,
    encode_documents,
    served_log_probabilities,
)
from ridgeline.optimize.space import DEFAULT, FORMATS, Candidate
from ridgeline.text import Tokenizer

_KEPT_BYTES = 2**29  # of the reference's log-probabilities
_DOCUMENT_TOKENS = 256
_DOCUMENTS = 16


class Judge:
    """Compares formats with the model as it is without them, one engine at a time.

    Args:
        base: the settings of the default.
        tokenizer: the model's.
        texts: what is read; the first tokens of the first of them.
        context: the model's.
    """

    def __init__(
        self, base: EngineConfig, tokenizer: Tokenizer, texts: Sequence[str], *, context: int
    ) -> None:
        self._base = base
        documents = encode_documents(
            tokenizer, texts[:_DOCUMENTS], max_tokens=min(_DOCUMENT_TOKENS, context - 1)
        )
        kept, room = list[Document](), _KEPT_BYTES // (4 * tokenizer.vocab_size)
        for document in documents:
            if len(part := document[:room]) > 1:
                kept.append(part)
            room -= len(part)
        self._documents = kept
        self._wanted: list[LogProbabilities] | None = None

    def quality(self, candidate: Candidate) -> Quality:
        """Of the candidate's formats, beside a model without them."""
        if self._wanted is None:
            self._wanted = self._read(DEFAULT)
        formats = Candidate(candidate.formats)
        found = self._wanted if formats == DEFAULT else self._read(formats)
        total = QualitySum()
        for document, one, other in zip(self._documents, found, self._wanted, strict=True):
            total.add(document, one, other)
        return total.quality()

    def _read(self, candidate: Candidate) -> list[LogProbabilities]:
        config = candidate.config(self._base)
        names = ("revision", "offline", "strict", "dtype", "executor", *FORMATS)
        settings: dict[str, Any] = {name: getattr(config, name) for name in names}
        with LLM(config.model, **settings, max_num_seqs=1) as llm:
            return [found for _, found in served_log_probabilities(llm, self._documents)]

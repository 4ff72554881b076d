"""Log-probabilities of a model as it is served."""

from collections.abc import Iterator, Sequence

from ridgeline.engine.llm import LLM
from ridgeline.evaluation.quality import LogProbabilities, log_softmax
from ridgeline.evaluation.texts import Document


def served_log_probabilities(
    llm: LLM, documents: Sequence[Document]
) -> Iterator[tuple[Document, LogProbabilities]]:
    """Each document with the log-probabilities after its tokens, by the engine's own steps."""
    for document in documents:
        yield document, log_softmax(llm.logits(document))

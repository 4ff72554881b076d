"""Measuring a rung, each in a process of its own, so that its memory is its own."""

import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from ridgeline.bench.ladder.replay import ReplayExecutor
from ridgeline.bench.ladder.rungs import Rung
from ridgeline.bench.ladder.runs import Drafting, TextDecoder, longest
from ridgeline.bench.ladder.subjects import SUBJECTS, Subject
from ridgeline.bench.ladder.texts import RecordedText, heldout_code
from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import EMBEDDED, Recipe
from ridgeline.core.config import EngineConfig
from ridgeline.core.protocols import Executor
from ridgeline.engine.llm import LLM
from ridgeline.evaluation import (
    Document,
    LogProbabilities,
    Quality,
    QualitySum,
    encode_documents,
    served_log_probabilities,
)
from ridgeline.executors import create_executor

_DOCUMENTS, _DOCUMENT_TOKENS = 8, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``rates`` are tokens per second of each round; ``resident_bytes`` the process at its end."""

    rates: tuple[float, ...]
    tokens_per_step: float
    resident_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rates)


def measure(
    subject: str,
    rung: Rung,
    drafting: Drafting,
    texts: Sequence[RecordedText],
    *,
    num_tokens: int,
    rounds: int,
) -> Measured:
    """Decode the texts ``rounds`` times, after one that warms up."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        work = partial(_measure_here, subject, rung, drafting, texts, num_tokens, rounds)
        return process.submit(work).result()


def _measure_here(
    subject: str,
    rung: Rung,
    drafting: Drafting,
    texts: Sequence[RecordedText],
    num_tokens: int,
    rounds: int,
) -> Measured:
    executor = open_executor(SUBJECTS[subject], rung, texts)
    try:
        decoder = TextDecoder(
            executor,
            max_model_len=longest(texts, num_tokens),
            has_draft=rung.speculates,
            reuse_kv=rung.reuses_kv,
        )
        decoder.run(texts[:1], drafting, min(num_tokens, 8))
        runs = [decoder.run(texts, drafting, num_tokens) for _ in range(rounds)]
        return Measured(
            rates=tuple(run.tokens_per_s for run in runs),
            tokens_per_step=runs[0].tokens_per_step,
            resident_bytes=psutil.Process(os.getpid()).memory_info().rss,
        )
    finally:
        executor.close()


def open_executor(subject: Subject, rung: Rung, texts: Sequence[RecordedText]) -> Executor:
    """A rung's executor; with a draft model, one that replays the texts."""
    models = subject.models(rung.dtype, rung.formats)
    if rung.speculates:
        return ReplayExecutor(models, 16, texts=texts)
    return create_executor(
        models, EngineConfig(executor=rung.executor, block_tokens=16, packed_cache_path="off")
    )


def log_probabilities(rung: Rung) -> list[tuple[Document, LogProbabilities]]:
    """Held-out documents, and the log-probabilities after each of their tokens."""
    with TemporaryDirectory() as scratch:
        model = str(_calibrated(Path(scratch) / "int4")) if rung.calibrated else None
        with LLM(
            model, executor=rung.executor, dtype=rung.dtype, quantization=rung.quantization
        ) as llm:
            assert llm.tokenizer is not None
            texts = heldout_code(_DOCUMENTS)
            documents = encode_documents(llm.tokenizer, texts, max_tokens=_DOCUMENT_TOKENS)
            return list(served_log_probabilities(llm, documents))


def _calibrated(folder: Path) -> Path:
    """The embedded model as `ridgeline quantize` makes it without options."""
    model, recipe = LayeredModel.open(None), Recipe()
    quantize(model, folder, recipe, calibration_text(EMBEDDED, model.loaded, recipe))
    return folder


def quality(
    documents: Sequence[tuple[Document, LogProbabilities]],
    exact: Sequence[tuple[Document, LogProbabilities]],
) -> Quality:
    """Of some log-probabilities beside the first rung's of the same documents."""
    total = QualitySum()
    for (tokens, found), (_, wanted) in zip(documents, exact, strict=True):
        total.add(tokens, found, wanted)
    return total.quality()

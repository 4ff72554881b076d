"""The recipe of the embedded model: ``python -m ridgeline.compress.embedded``.

Stages, each of which continues where it was stopped: corpus, tokenizer, target, draft, export,
evaluate. Everything that they write lies in the run folder; ``export`` fills the asset folder.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ridgeline.compress import conversations, corpus, distill, evaluation, export
from ridgeline.compress.batches import EncodedDocument, WindowStream, pack
from ridgeline.compress.loss_curve import draw_losses
from ridgeline.compress.optimizer import OptimizerConfig
from ridgeline.compress.pretrain import (
    Schedule,
    TrainingConfig,
    load_checkpoint,
    next_token_loss,
    train,
)
from ridgeline.compress.tokenizer_training import train_tokenizer, write_tokenizer
from ridgeline.compress.trainable import LlamaShape, TrainableLlama

STAGES = ("corpus", "tokenizer", "target", "draft", "export", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Windows of ``length_tokens`` from an epoch with these numbers of copies per kind."""

    length_tokens: int
    weights: Mapping[str, float]


_TARGET = LlamaShape(
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=5,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
)
_DRAFT = LlamaShape(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=384,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
_STABLE = Mixture(
    length_tokens=512,
    weights={
        "library": 1.0,
        "tests": 0.2,
        "topics": 3.0,
        "docstrings": 1.0,
        "text": 1.0,
        "snippets": 0.5,
        "chat": 0.7,
    },
)
_DECAY = Mixture(
    length_tokens=1024,
    weights={
        "library": 1.0,
        "topics": 5.0,
        "docstrings": 1.0,
        "text": 1.0,
        "snippets": 1.0,
        "chat": 1.0,
    },
)
_TARGET_TRAINING = TrainingConfig(
    schedule=Schedule(warmup_steps=15, stable_steps=250, decay_steps=220)
)
_DRAFT_TRAINING = TrainingConfig(
    schedule=Schedule(warmup_steps=20, stable_steps=200, decay_steps=250),
    optimizer=OptimizerConfig(matrix_lr=0.015, other_lr=0.004),
    num_micro_batches=1,
    checkpoint_every=50,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Every choice behind the embedded model."""

    seed: int = 1
    num_threads: int = 2
    target: LlamaShape = _TARGET
    draft: LlamaShape = _DRAFT
    stable: Mixture = _STABLE
    decay: Mixture = _DECAY
    target_training: TrainingConfig = _TARGET_TRAINING
    draft_training: TrainingConfig = _DRAFT_TRAINING
    distillation: distill.DistillationConfig = field(default_factory=distill.DistillationConfig)


def _write_documents(file: Path, documents: Sequence[corpus.Document]) -> None:
    with file.open("w", encoding="utf-8") as handle:
        for document in documents:
            handle.write(json.dumps(asdict(document)) + "\n")


def _read_documents(file: Path) -> list[corpus.Document]:
    with file.open(encoding="utf-8") as handle:
        return [corpus.Document(**json.loads(line)) for line in handle]


def corpus_stage(run: Path) -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl``: all documents, split by path."""
    if (run / "heldout.jsonl").exists():
        return
    training, held_out = corpus.split(corpus.collect(corpus.library_folder()))
    derived = [*conversations.conversations(training), *conversations.snippets(training)]
    _write_documents(run / "train.jsonl", [*training, *derived])
    _write_documents(run / "heldout.jsonl", held_out)


def tokenizer_stage(run: Path, recipe: Recipe) -> None:
    """Trains the tokenizer on everything but the test package, then encodes the corpus."""
    if (run / "tokens.npz").exists():
        return
    documents = _read_documents(run / "train.jsonl")
    texts = (document.text for document in documents if document.kind != "tests")
    tokenizer = train_tokenizer(texts=texts, vocab_size=recipe.target.vocab_size)
    write_tokenizer(
        tokenizer=tokenizer,
        folder=run / "tokenizer",
        max_positions=recipe.target.max_positions,
    )
    encodings = tokenizer.encode_batch([document.text for document in documents])
    lengths = np.array([len(encoding.ids) for encoding in encodings], dtype=np.int64)
    ids = np.concatenate([np.array(encoding.ids, dtype=np.uint16) for encoding in encodings])
    np.savez(run / "tokens.npz", ids=ids, lengths=lengths)


def _encoded(run: Path) -> list[EncodedDocument]:
    documents = _read_documents(run / "train.jsonl")
    arrays = np.load(run / "tokens.npz", allow_pickle=False)
    parts = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
    return [
        EncodedDocument(kind=document.kind, path=document.path, ids=ids)
        for document, ids in zip(documents, parts, strict=True)
    ]


def _stream(documents: list[EncodedDocument], mixture: Mixture, seed: int) -> WindowStream:
    ids = pack(documents=documents, weights=mixture.weights, seed=seed)
    return WindowStream(ids=ids, length_tokens=mixture.length_tokens, seed=seed)


def target_stage(run: Path, recipe: Recipe) -> None:
    """Trains the target on next tokens."""
    documents = _encoded(run)
    model = TrainableLlama(recipe.target, seed=recipe.seed)
    train(
        model=model,
        loss_function=next_token_loss(model),
        stable=_stream(documents, recipe.stable, recipe.seed),
        decay=_stream(documents, recipe.decay, recipe.seed + 1),
        config=recipe.target_training,
        folder=run / "target",
    )


def load_model(run: Path, name: str, shape: LlamaShape) -> tuple[TrainableLlama, int]:
    """The newest checkpoint of ``name`` ("target" or "draft") and its number of steps."""
    model = TrainableLlama(shape)
    steps, _ = load_checkpoint(folder=run / name, model=model)
    if not steps:
        raise FileNotFoundError(f"{run / name} has no checkpoint: run the stage {name!r} first")
    return model, steps


def draft_stage(run: Path, recipe: Recipe) -> None:
    """Trains the draft on the target's distributions."""
    documents = _encoded(run)
    target, _ = load_model(run, "target", recipe.target)
    model = TrainableLlama(recipe.draft, seed=recipe.seed)
    train(
        model=model,
        loss_function=distill.distillation_loss(
            teacher=target, student=model, config=recipe.distillation
        ),
        stable=_stream(documents, recipe.stable, recipe.seed + 2),
        decay=_stream(documents, recipe.decay, recipe.seed + 3),
        config=recipe.draft_training,
        folder=run / "draft",
    )


def export_stage(run: Path, recipe: Recipe, assets: Path) -> None:
    """Writes Hugging Face folders of what has been trained, and the held-out texts."""
    for name, shape in (("target", recipe.target), ("draft", recipe.draft)):
        if (run / name / "checkpoint.safetensors").exists():
            model, _ = load_model(run, name, shape)
            export.export_model(model=model, tokenizer=run / "tokenizer", folder=assets / name)
    export.export_held_out(
        documents=_read_documents(run / "heldout.jsonl"), folder=assets / "heldout"
    )


def evaluate_stage(run: Path, assets: Path, docs: Path | None) -> None:
    """Measures the exported models and writes ``results.json``, and the loss curve to ``docs``."""
    results = evaluation.evaluate_assets(assets)
    (run / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))
    if docs is not None:
        draw_losses(run=run, file=docs / "images" / "embedded-loss.svg")


def run_stages(
    *, stages: Sequence[str], run: Path, assets: Path, docs: Path | None, recipe: Recipe
) -> None:
    """Runs the named stages in their fixed order."""
    run.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(recipe.num_threads)
    if "corpus" in stages:
        corpus_stage(run)
    if "tokenizer" in stages:
        tokenizer_stage(run, recipe)
    if "target" in stages:
        target_stage(run, recipe)
    if "draft" in stages:
        draft_stage(run, recipe)
    if "export" in stages:
        export_stage(run, recipe, assets)
    if "evaluate" in stages:
        evaluate_stage(run, assets, docs)


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/embedded"))
    parser.add_argument("--assets", type=Path, default=Path(__file__).parents[1] / "assets")
    parser.add_argument("--docs", type=Path, help="docs folder, for the loss curve")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--threads", type=int, default=Recipe().num_threads)
    arguments = parser.parse_args()
    run_stages(
        stages=arguments.stages,
        run=arguments.run,
        assets=arguments.assets,
        docs=arguments.docs,
        recipe=replace(Recipe(), num_threads=arguments.threads),
    )


if __name__ == "__main__":
    main()

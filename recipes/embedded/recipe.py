"""The recipe of the embedded model: ``python -m recipes.embedded``.

Stages, each of which continues where it was stopped: corpus, tokenizer, target, draft, export,
evaluate. Everything that they write lies in the run folder; ``export`` fills the asset folder.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import ridgeline
from recipes.embedded import (
    conversations,
    corpus,
    deduplication,
    documentation,
    evaluation,
    export,
    functions,
    packages,
    questions,
)
from recipes.embedded.loss_curve import draw_losses
from recipes.embedded.tokenizer_training import train_tokenizer, write_tokenizer
from ridgeline.compress import distill
from ridgeline.compress.batches import EncodedDocument, Ids, WindowStream, pack
from ridgeline.compress.optimizer import OptimizerConfig
from ridgeline.compress.pretrain import (
    Schedule,
    TrainingConfig,
    fast_dtype,
    load_checkpoint,
    next_token_loss,
    train,
)
from ridgeline.compress.trainable import LlamaShape, TrainableLlama, load_exported

SOURCES = ("standard_library", "documentation", "packages", "questions", "functions")
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
    length_tokens=256,
    weights={
        "library": 3.0,
        "tests": 1.5,
        "topics": 4.0,
        "docstrings": 3.0,
        "text": 1.0,
        "snippets": 1.0,
        "chat": 1.0,
        "documentation": 2.0,
        "packages": 1.0,
    },
)
_DECAY = Mixture(
    length_tokens=1024,
    weights={
        "library": 1.5,
        "tests": 0.5,
        "topics": 3.0,
        "docstrings": 1.5,
        "text": 1.0,
        "snippets": 1.0,
        "chat": 0.5,
        "documentation": 1.0,
        "packages": 0.08,
        "questions": 5.0,
        "programs": 5.0,
    },
)
_TARGET_TRAINING = TrainingConfig(
    schedule=Schedule(warmup_steps=50, stable_steps=2500, decay_steps=1000),
    optimizer=OptimizerConfig(other_lr=0.002, dtype=fast_dtype()),
    micro_batch_tokens=8192,
    num_micro_batches=1,
    checkpoint_every=50,
    log_every=10,
)
_DRAFT_TRAINING = TrainingConfig(
    schedule=Schedule(warmup_steps=20, stable_steps=200, decay_steps=250),
    optimizer=OptimizerConfig(matrix_lr=0.015, other_lr=0.004, dtype=fast_dtype()),
    num_micro_batches=1,
    checkpoint_every=50,
)
_FURTHER = Mixture(
    length_tokens=256,
    weights={
        "library": 1.5,
        "tests": 0.5,
        "topics": 2.0,
        "docstrings": 1.5,
        "text": 1.0,
        "documentation": 0.6,
        "packages": 0.02,
        "functions": 1.5,
        "questions": 10.0,
        "programs": 40.0,
    },
)
_FURTHER_TARGET_TRAINING = TrainingConfig(
    schedule=Schedule(warmup_steps=20, stable_steps=100, decay_steps=165),
    optimizer=OptimizerConfig(matrix_lr=0.006, other_lr=0.001, dtype=fast_dtype()),
    micro_batch_tokens=2048,
    num_micro_batches=1,
    checkpoint_every=50,
    log_every=10,
)
_FURTHER_DRAFT_TRAINING = replace(
    _DRAFT_TRAINING, schedule=Schedule(warmup_steps=5, stable_steps=25, decay_steps=240)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Every choice behind the embedded model; the defaults train a new one.

    ``trained_share`` of the target's weights are trained ones, the rest those that it began with.
    """

    seed: int = 1
    num_threads: int = 2
    target: LlamaShape = _TARGET
    draft: LlamaShape = _DRAFT
    stable: Mixture = _STABLE
    decay: Mixture = _DECAY
    target_training: TrainingConfig = _TARGET_TRAINING
    draft_training: TrainingConfig = _DRAFT_TRAINING
    distillation: distill.DistillationConfig = field(default_factory=distill.DistillationConfig)
    trained_share: float = 1.0


FURTHER = Recipe(
    stable=_FURTHER,
    decay=_FURTHER,
    target_training=_FURTHER_TARGET_TRAINING,
    draft_training=_FURTHER_DRAFT_TRAINING,
    trained_share=0.7,
)
"""How the model was trained further, from exported weights."""


def _write_documents(file: Path, documents: Iterable[corpus.Document]) -> None:
    with file.with_suffix(".tmp").open("w", encoding="utf-8") as handle:
        for document in documents:
            handle.write(json.dumps(asdict(document)) + "\n")
    file.with_suffix(".tmp").rename(file)


def _read_documents(file: Path) -> list[corpus.Document]:
    with file.open(encoding="utf-8") as handle:
        return [corpus.Document(**json.loads(line)) for line in handle]


def _standard_library() -> list[corpus.Document]:
    training, _ = corpus.split(corpus.collect(corpus.library_folder()))
    return [*training, *conversations.conversations(training), *conversations.snippets(training)]


def _package_sources(run: Path, held_out: list[corpus.Document]) -> Iterator[corpus.Document]:
    """What the pinned wheels carry beyond the standard library's own modules."""
    packages.download(run / "wheels")
    library, _ = corpus.split(list(corpus.source_files(corpus.library_folder())))
    wheels = packages.pinned_wheels(run / "wheels")
    sources = (source for wheel in wheels for source in packages.wheel_sources(wheel))
    training = (source for source in sources if not corpus.is_held_out(source.path))
    for document in deduplication.without_repetitions(
        (*(d for d in library if d.kind == "library"), *training), held_out=held_out
    ):
        if document.kind == "packages":
            yield document


def _documentation(run: Path, held_out: list[corpus.Document]) -> Iterator[corpus.Document]:
    documentation.download(run / "documentation")
    pages = documentation.pages(run / "documentation")
    training = (page for page in pages if not corpus.is_held_out(page.path))
    return deduplication.without_repetitions(training, held_out=held_out)


def corpus_stage(run: Path) -> None:
    """Writes ``heldout.jsonl`` and one JSONL file for each source of training text."""
    if not (run / "heldout.jsonl").exists():
        _, held_out = corpus.split(corpus.collect(corpus.library_folder()))
        _write_documents(run / "heldout.jsonl", held_out)
    held_out = _read_documents(run / "heldout.jsonl")
    makers: dict[str, Callable[[], Iterable[corpus.Document]]] = {
        "standard_library": _standard_library,
        "documentation": lambda: _documentation(run, held_out),
        "packages": lambda: _package_sources(run, held_out),
        "questions": questions.conversations,
        "functions": lambda: functions.functions(
            document
            for name in ("standard_library", "packages")
            for document in _read_documents(run / f"{name}.jsonl")
        ),
    }
    for name in SOURCES:
        if not (run / f"{name}.jsonl").exists():
            _write_documents(run / f"{name}.jsonl", makers[name]())


def tokenizer_stage(run: Path, recipe: Recipe, assets: Path) -> None:
    """Encodes the corpus with the tokenizer of ``assets``; where there is none, trains one.

    A new one is trained on the standard library's text, all but the tests.
    """
    folder = run / "tokenizer"
    if (assets / "target" / "tokenizer.json").exists():
        folder.mkdir(exist_ok=True)
        for name in export.TOKENIZER_FILES:
            shutil.copyfile(assets / "target" / name, folder / name)
    elif not folder.exists():
        documents = _read_documents(run / "standard_library.jsonl")
        texts = (document.text for document in documents if document.kind != "tests")
        tokenizer = train_tokenizer(texts=texts, vocab_size=recipe.target.vocab_size)
        positions = recipe.target.max_positions
        write_tokenizer(tokenizer=tokenizer, folder=folder, max_positions=positions)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name in SOURCES:
        if not (run / f"{name}.npz").exists():
            _encode(run / f"{name}.jsonl", tokenizer)


def _encode(file: Path, tokenizer: Tokenizer) -> None:
    documents = _read_documents(file)
    parts: list[Ids] = []
    for start in range(0, len(documents), 256):
        texts = [document.text for document in documents[start : start + 256]]
        parts += [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts)]
    np.savez(
        file.with_suffix(".npz"),
        ids=np.concatenate(parts),
        lengths=np.array([len(part) for part in parts], dtype=np.int64),
        kinds=np.array([document.kind for document in documents]),
        paths=np.array([document.path for document in documents]),
    )


def _encoded(run: Path) -> list[EncodedDocument]:
    documents: list[EncodedDocument] = []
    for name in SOURCES:
        arrays = np.load(run / f"{name}.npz", allow_pickle=False)
        parts = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
        documents += [
            EncodedDocument(kind=str(kind), path=str(path), ids=ids)
            for kind, path, ids in zip(arrays["kinds"], arrays["paths"], parts, strict=True)
        ]
    return documents


def _stream(documents: list[EncodedDocument], mixture: Mixture, seed: int) -> WindowStream:
    ids = pack(documents=documents, weights=mixture.weights, seed=seed)
    return WindowStream(ids=ids, length_tokens=mixture.length_tokens, seed=seed)


def target_stage(run: Path, recipe: Recipe, start: Path | None = None) -> None:
    """Trains the target on next tokens, from the exported weights in ``start`` if given."""
    documents = _encoded(run)
    model = load_exported(start) if start else TrainableLlama(recipe.target, seed=recipe.seed)
    train(
        model=model,
        loss_function=next_token_loss(model, fast_dtype()),
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


def load_target(run: Path, recipe: Recipe, start: Path | None = None) -> TrainableLlama:
    """The trained target; one that began with ``start`` is averaged with those weights.

    An interpolation of weights before and after further training often beats both (Wortsman et
    al. 2022, arXiv 2109.01903).
    """
    model, _ = load_model(run, "target", recipe.target)
    if start:
        trained = model.state_dict()
        for name, before in load_exported(start).state_dict().items():
            trained[name].copy_(before.lerp(trained[name], recipe.trained_share))
    return model


def draft_stage(run: Path, recipe: Recipe, start: Path | None = None) -> None:
    """Trains the draft on the target's distributions, from exported weights as the target."""
    documents = _encoded(run)
    target = load_target(run, recipe, start and start / "target")
    model = (
        load_exported(start / "draft") if start else TrainableLlama(recipe.draft, seed=recipe.seed)
    )
    train(
        model=model,
        loss_function=distill.distillation_loss(
            teacher=target, student=model, config=recipe.distillation, dtype=fast_dtype()
        ),
        stable=_stream(documents, recipe.stable, recipe.seed + 2),
        decay=_stream(documents, recipe.decay, recipe.seed + 3),
        config=recipe.draft_training,
        folder=run / "draft",
    )


def export_stage(run: Path, recipe: Recipe, assets: Path, start: Path | None = None) -> None:
    """Writes Hugging Face folders of what has been trained, and the held-out texts."""
    makers: dict[str, Callable[[], TrainableLlama]] = {
        "target": lambda: load_target(run, recipe, start and start / "target"),
        "draft": lambda: load_model(run, "draft", recipe.draft)[0],
    }
    for name, make in makers.items():
        if (run / name / "checkpoint.safetensors").exists():
            export.export_model(model=make(), tokenizer=run / "tokenizer", folder=assets / name)
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
    *,
    stages: Sequence[str],
    run: Path,
    assets: Path,
    docs: Path | None,
    recipe: Recipe,
    start: Path | None = None,
) -> None:
    """Runs the named stages in their fixed order."""
    run.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(recipe.num_threads)
    if "corpus" in stages:
        corpus_stage(run)
    if "tokenizer" in stages:
        tokenizer_stage(run, recipe, assets)
    if "target" in stages:
        target_stage(run, recipe, start and start / "target")
    if "draft" in stages:
        draft_stage(run, recipe, start)
    if "export" in stages:
        export_stage(run, recipe, assets, start)
    if "evaluate" in stages:
        evaluate_stage(run, assets, docs)


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/embedded"))
    parser.add_argument("--assets", type=Path, default=Path(ridgeline.__file__).parent / "assets")
    parser.add_argument("--docs", type=Path, help="docs folder, for the loss curve")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--start", type=Path, help="asset folder whose weights target and draft begin with"
    )
    parser.add_argument("--threads", type=int, default=Recipe().num_threads)
    arguments = parser.parse_args()
    run_stages(
        stages=arguments.stages,
        run=arguments.run,
        assets=arguments.assets,
        docs=arguments.docs,
        recipe=replace(FURTHER if arguments.start else Recipe(), num_threads=arguments.threads),
        start=arguments.start,
    )


if __name__ == "__main__":
    main()

"""What recipes of drafters of the embedded model share: texts, loss, schedule, agreement.

Shapes: B windows, T positions, R tokens that a drafter has, V all tokens.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.embedded import corpus
from ridgeline import LLM, SamplingParams
from ridgeline.compress.batches import WindowStream
from ridgeline.compress.optimizer import OptimizerConfig
from ridgeline.compress.pretrain import (
    LossFunction,
    Schedule,
    TrainingConfig,
    autocast,
    fast_dtype,
)
from ridgeline.compress.trainable import TrainableLlama, load_exported
from ridgeline.evaluation import heldout_texts
from ridgeline.text import Tokenizer
from ridgeline.weights import embedded_draft_folder, locate_model

DECAY = 0.8  # of the weight of each guess of a token further away

Guesses = list[tuple[Tensor, Tensor]]
"""For each distance logits ``[B, T, R]`` and the target's probabilities ``[B, T, V]``."""

Guesser = Callable[[Tensor], Guesses]
"""Guesses of token ids ``[B, T]``."""


def corpus_windows(tokenizer: Tokenizer, *, num_documents: int, length: int) -> WindowStream:
    """Windows of what the embedded model was trained on, but for tests."""
    documents, _ = corpus.split(corpus.collect(corpus.library_folder()))
    texts = [document.text for document in documents if document.kind != "tests"]
    chosen = np.random.default_rng(0).permutation(len(texts))[:num_documents]
    ids = np.concatenate([tokenizer.encode(texts[place]) for place in chosen])
    return WindowStream(ids=ids, length_tokens=length, seed=0)


def continued(llm: LLM, windows: WindowStream, *, num_texts: int) -> WindowStream:
    """What the embedded model says at a temperature of 1 after the first quarter of windows."""
    length = windows.length_tokens
    prompts = [windows.window(number)[: length // 4].tolist() for number in range(num_texts)]
    params = [
        SamplingParams(temperature=1.0, seed=n, max_tokens=length - length // 4, ignore_eos=True)
        for n in range(num_texts)
    ]
    said = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    ids = [token for texts in zip(prompts, said, strict=True) for text in texts for token in text]
    return WindowStream(ids=np.array([*ids, 0]), length_tokens=length, seed=1)


def training_streams(
    folder: Path, *, num_documents: int, num_texts: int, length: int
) -> tuple[WindowStream, WindowStream]:
    """The corpus, and what the model goes on with; kept in ``folder``."""
    file = folder / f"texts-{num_documents}-{num_texts}-{length}.npz"
    if not file.exists():
        with LLM(max_model_len=length + 8) as llm:
            assert llm.tokenizer is not None
            windows = corpus_windows(llm.tokenizer, num_documents=num_documents, length=length)
            said = continued(llm, windows, num_texts=num_texts)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(file, corpus=windows.ids, said=said.ids)
    arrays = np.load(file)
    return (
        WindowStream(ids=arrays["corpus"], length_tokens=length, seed=0),
        WindowStream(ids=arrays["said"], length_tokens=length, seed=1),
    )


def probabilities(target: TrainableLlama, ids_BT: Tensor) -> Tensor:
    """The target's, of the token after each: ``[B, T, V]``."""
    with torch.no_grad():
        return torch.softmax(target(ids_BT).float(), -1)


def guessing_loss(guesser: Guesser, rows_R: Tensor | None = None) -> LossFunction:
    """Cross-entropy with the target's probabilities of the tokens ``rows_R`` (all, if none are
    named), those of guesses further away by less.

    Matrix products are in the type that the processor multiplies fastest.
    """

    def loss(ids_BT: Tensor, _next: Tensor) -> Tensor:
        with autocast(fast_dtype()):
            guesses = guesser(ids_BT)
        losses = []
        for place, (logits, shares) in enumerate(guesses):
            wanted = shares if rows_R is None else shares[..., rows_R]
            entropy = -(wanted * torch.log_softmax(logits.float(), -1)).sum(-1).mean()
            losses.append(DECAY**place * entropy)
        return torch.stack(losses).sum()

    return loss


def evaluation_streams(
    model: Path | None, *, length: int, num_texts: int
) -> dict[str, WindowStream]:
    """Held-out code, and what the model goes on with after it."""
    with LLM(model and str(model), max_model_len=length + 8) as llm:
        assert llm.tokenizer is not None
        ids = np.concatenate([llm.tokenizer.encode(text) for text in heldout_texts("code")])
        windows = WindowStream(ids=ids, length_tokens=length, seed=0)
        return {"held out": windows, "said": continued(llm, windows, num_texts=num_texts)}


@torch.no_grad()
def agreement(
    guesser: Guesser, ids_BT: Tensor, rows_R: Tensor | None = None
) -> tuple[list[float], list[float]]:
    """For each distance the share of places where the guess is the target's token: greedy, and
    drawn at a temperature of 1 with the same noise, as drafts are."""
    torch.manual_seed(0)
    greedy: list[float] = []
    sampled: list[float] = []
    for logits, shares in guesser(ids_BT):
        noise = -torch.log(-torch.log(torch.rand_like(shares)))
        own = noise if rows_R is None else noise[..., rows_R]
        wanted = (shares, shares.log() + noise)
        for found, guess, token in zip(
            (greedy, sampled), (logits, torch.log_softmax(logits, -1) + own), wanted, strict=True
        ):
            places = guess.argmax(-1)
            tokens = places if rows_R is None else rows_R[places]
            found.append(round((tokens == token.argmax(-1)).float().mean().item(), 3))
    return greedy, sampled


def say_agreement(
    guessers: Mapping[str, tuple[Guesser, Tensor | None]],
    *,
    length: int,
    model: Path | None = None,
    num_texts: int = 12,
) -> None:
    """Print a JSON line for each kind of text and drafter, among them the embedded draft model.

    ``model`` is the target's folder, if that is not the embedded one.
    """
    target, draft = (
        load_exported(folder).eval()
        for folder in (model or locate_model(None), embedded_draft_folder())
    )

    def of_draft(ids_BT: Tensor) -> Guesses:
        return [(draft(ids_BT)[:, 1:], probabilities(target, ids_BT)[:, 1:])]

    for text, stream in evaluation_streams(model, length=length, num_texts=num_texts).items():
        ids, _ = stream.batch(number=0, num_windows=num_texts)
        for name, (guesser, rows) in {**guessers, "draft model": (of_draft, None)}.items():
            greedy, sampled = agreement(guesser, ids, rows)
            line = {"text": text, "drafter": name, "greedy": greedy, "sampled": sampled}
            print(json.dumps(line))


def training_config(
    options: argparse.Namespace, *, muon: bool, matrix_lr: float = 0.01
) -> TrainingConfig:
    """A third of the steps is decay, on what the model says."""
    decay = options.steps // 3
    return TrainingConfig(
        schedule=Schedule(
            warmup_steps=20, stable_steps=options.steps - decay - 20, decay_steps=decay
        ),
        optimizer=OptimizerConfig(
            matrix_lr=matrix_lr, other_lr=options.rate, dtype=fast_dtype(), muon=muon
        ),
        micro_batch_tokens=options.batch * options.tokens,
        num_micro_batches=1,
        checkpoint_every=10,
        log_every=10,
        compile=False,
    )


def parse_options(description: str | None, **more: int) -> argparse.Namespace:
    """What all recipes of drafters are told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    defaults = {
        "documents": 600,
        "texts": 512,
        "tokens": 256,
        "batch": 8,
        "steps": 600,
        "threads": 2,
    }
    for name, default in (defaults | more).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options

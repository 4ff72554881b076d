"""Figures of the exported models: held-out perplexity, bits per byte, agreement of the draft."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from recipes.embedded import corpus, questions
from ridgeline import LLM, SamplingParams
from ridgeline.compress.trainable import TrainableLlama, load_exported

CONTEXT_TOKENS = 1024
STRIDE_TOKENS = 512
NUM_HEADERS = 200
COMPLETION_TOKENS = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Held-out quality of one kind of text. Every token but the leading special one counts."""

    num_tokens: int
    num_bytes: int
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a draft follows its target, at every position of held-out text.

    ``top1``: share of positions with the same most probable token, which is the acceptance of a
    first greedy draft. ``acceptance``: mean over positions of Σ min(p, q), the acceptance of a
    first sampled draft (Leviathan 2023).
    """

    num_tokens: int
    top1: float
    acceptance: float


def read_held_out(assets: Path, kind: str) -> list[str]:
    """The held-out texts of a kind ("code" or "prose")."""
    lines = (assets / "heldout" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["text"] for entry in map(json.loads, lines) if entry["kind"] == kind]


def windows(num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, stop): each token is scored once, with 512 to 1023 before it, if any.

    Position p is scored when token p is predicted from the tokens before it; p starts at 1.
    """
    start, scored = 0, 1
    while scored < num_tokens:
        stop = min(start + CONTEXT_TOKENS, num_tokens)
        yield start, scored, stop
        start, scored = start + STRIDE_TOKENS, stop


@torch.no_grad()
def text_nats(model: TrainableLlama, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood in nats of each token of ``ids`` after the first: [N - 1]."""
    parts = []
    for start, scored, stop in windows(len(ids)):
        window = torch.tensor(ids[start:stop])
        logits = model(window[None, :-1])[0, scored - 1 - start :]
        parts.append(functional.cross_entropy(logits, window[scored - start :], reduction="none"))
    return torch.cat(parts)


def perplexity(*, model: TrainableLlama, tokenizer: Tokenizer, texts: list[str]) -> Perplexity:
    """Perplexity per token and bits per byte over all texts, each scored on its own."""
    nats = torch.cat([text_nats(model, tokenizer.encode(text).ids) for text in texts])
    num_bytes = sum(len(text.encode()) for text in texts)
    return Perplexity(
        num_tokens=len(nats),
        num_bytes=num_bytes,
        perplexity=math.exp(nats.mean().item()),
        bits_per_byte=nats.sum().item() / math.log(2) / num_bytes,
    )


@torch.no_grad()
def agreement(
    *, target: TrainableLlama, draft: TrainableLlama, tokenizer: Tokenizer, texts: list[str]
) -> Agreement:
    """Agreement over the first 1,024 tokens of each text."""
    same, overlap, count = 0, 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids[:CONTEXT_TOKENS]])
        p_SV, q_SV = target(ids)[0].softmax(dim=-1), draft(ids)[0].softmax(dim=-1)
        same += int((p_SV.argmax(dim=-1) == q_SV.argmax(dim=-1)).sum())
        overlap += float(torch.minimum(p_SV, q_SV).sum())
        count += ids.shape[1]
    return Agreement(num_tokens=count, top1=same / count, acceptance=overlap / count)


def function_headers(assets: Path) -> list[str]:
    """The first 200 ``def`` lines of the held-out code that end in a colon, without indentation."""
    pattern = re.compile(r"^ *((?:async )?def \w+\([^)\n]*\)(?: *->[^:\n]+)?:)$", re.MULTILINE)
    found = [match for text in read_held_out(assets, "code") for match in pattern.findall(text)]
    return found[:NUM_HEADERS]


def function_of(header: str, completion: str, *, complete: bool) -> str:
    """Header and completion up to the next line that is not indented, which is not the function's.

    The last line goes if the completion was cut by its length.
    """
    lines = completion.split("\n") if complete else completion.split("\n")[:-1]
    outside = [i for i, line in enumerate(lines) if line.strip() and not line.startswith(" ")]
    return "\n".join([header, *lines[: outside[0] if outside else None]]) + "\n"


def share_that_parses(llm: LLM, headers: list[str]) -> float:
    """The share of greedy completions of ``headers`` that are Python functions."""
    params = SamplingParams(temperature=0, max_tokens=COMPLETION_TOKENS)
    outputs = llm.generate([f"{header}\n" for header in headers], params)
    good = 0
    for header, output in zip(headers, outputs, strict=True):
        answer = output.outputs[0]
        function = function_of(header, answer.text, complete=answer.finish_reason == "stop")
        good += corpus.parse(function) is not None
    return good / len(headers)


def transcript(llm: LLM, questions: list[str]) -> str:
    """Each question, asked by itself, and its greedy answer, as Markdown."""
    params = SamplingParams(temperature=0, max_tokens=COMPLETION_TOKENS)
    parts: list[str] = []
    for number, question in enumerate(questions, start=1):
        (output,) = llm.chat([{"role": "user", "content": question}], params)
        answer = output.outputs[0].text.strip()
        parts.append(f"{number}. **{question}**\n\n" + indent(answer, "   "))
    return "\n\n".join(parts) + "\n"


def evaluate_assets(assets: Path) -> dict[str, object]:
    """All figures of the models in ``assets``, measured with their bfloat16 weights."""
    tokenizer = Tokenizer.from_file(str(assets / "target" / "tokenizer.json"))
    names = [name for name in ("target", "draft") if (assets / name / "config.json").exists()]
    models = {name: load_exported(assets / name).eval() for name in names}
    texts = {kind: read_held_out(assets, kind) for kind in ("code", "prose")}
    results: dict[str, object] = {
        "context_tokens": CONTEXT_TOKENS,
        "stride_tokens": STRIDE_TOKENS,
        "bytes": sum(file.stat().st_size for file in assets.rglob("*") if file.is_file()),
    }
    for name, model in models.items():
        figures: dict[str, object] = {"parameters": model.num_parameters()}
        for kind in texts:
            figure = perplexity(model=model, tokenizer=tokenizer, texts=texts[kind])
            figures[kind] = asdict(figure)
        results[name] = figures
    headers = function_headers(assets)
    with LLM(str(assets / "target")) as llm:
        results["completions"] = {"headers": len(headers), "parse": share_that_parses(llm, headers)}
        results["transcript"] = transcript(llm, questions.asked())
    if "draft" in models:
        results["agreement"] = {
            kind: asdict(
                agreement(
                    target=models["target"],
                    draft=models["draft"],
                    tokenizer=tokenizer,
                    texts=texts[kind],
                )
            )
            for kind in texts
        }
    return results

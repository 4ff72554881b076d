"""``ridgeline probe URL --reference MODEL``: whether an endpoint serves what it says."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.display import output_console, print_columns, status_line
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError, TokenizerError

if TYPE_CHECKING:
    from ridgeline.bench.serve.drift import AskedText, Position, Rows, Trace
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.engine.llm import LLM

_FLOATS = ("float32", "bfloat16", "float16")
_LEAST_POSITIONS = 32


def add_drift_options(parser: Parser) -> None:
    """The reference, what else to compare the endpoint with, and the text."""
    group = parser.add_argument_group("quality beside a reference, instead of speed")
    group.add_argument(
        "--reference", metavar="MODEL", help="computed here in float32; `embedded`: that model"
    )
    group.add_argument(
        "--formats", default="bfloat16,int8,int4", metavar="F,F", help="of it, to compare with"
    )
    group.add_argument(
        "--claim", metavar="F", help="exit code 1 if the endpoint is further off than this format"
    )
    group.add_argument("--text", type=Path, metavar="FILE", help="text or JSONL; default: ours")
    group.add_argument("--questions", type=int, default=24, metavar="N", help="answers compared")
    group.add_argument(
        "--question-tokens", type=int, default=48, metavar="N", help="of each answer"
    )


async def model_name(arguments: argparse.Namespace, target: "HttpTarget") -> str:
    """What the command line, or else the endpoint, calls the model."""
    if arguments.model_name is not None:
        return str(arguments.model_name)
    names = await target.models()
    if not names:
        raise InvalidRequestError("The endpoint lists no models; name one with --model-name.")
    return names[0]


def run_drift(arguments: argparse.Namespace) -> int:
    """Compare and print. Exit code 1 if the endpoint is not what is claimed."""
    from ridgeline.bench.serve import drift
    from ridgeline.engine.llm import LLM

    formats = [name.strip() for name in arguments.formats.split(",")]
    if arguments.claim is not None and arguments.claim not in formats:
        formats.append(arguments.claim)
    if arguments.questions < 1 or arguments.question_tokens < 2:
        raise InvalidRequestError("--questions must be at least 1, --question-tokens at least 2.")
    model = None if arguments.reference == "embedded" else arguments.reference
    with status_line("asking") as show:
        with LLM(model, dtype="float32") as llm:
            name, prompts, traces = asyncio.run(_traces(arguments, llm))
            told = drift.told_rows(traces)
            if len(told) < _LEAST_POSITIONS:
                raise InvalidRequestError(
                    f"Only {len(told)} tokens of the endpoint's answers are tokens of the "
                    "reference: it has another vocabulary, or answers too shortly."
                )
            show("computing the reference")
            wanted = drift.computed_rows(llm, traces)
        found: dict[str, Rows] = {"endpoint": told}
        for each in formats:
            show(f"computing {each}")
            with LLM(model, **_settings(each)) as llm:
                found[each] = drift.computed_rows(llm, traces)
    report = _report(arguments, wanted, found) | {"model": name, "prompts": prompts}
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 1 if report["refuted"] else 0


def _settings(name: str) -> dict[str, Any]:
    return {"dtype": name} if name in _FLOATS else {"quantization": name}


async def _traces(arguments: argparse.Namespace, llm: "LLM") -> "tuple[str, str, Sequence[Trace]]":
    """The model's name there, how it was asked, and its answers in the reference's tokens."""
    from ridgeline.bench.serve import drift
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.bench.serve.prompts import Prompts

    target = HttpTarget(arguments.url, model=arguments.model_name or "", api_key=arguments.api_key)
    name = await model_name(arguments, target)
    target = target.with_model(name)
    if arguments.prompts == "auto":
        await target.adapt((1, 1, 1))
    else:
        target.prompts = Prompts(arguments.prompts)
    questions = _questions(arguments, llm, is_chat=target.prompts is Prompts.CHAT)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    vocabulary = drift.TokensByText(tokenizer, llm.spec.vocab_size)
    answers: list[Sequence[Position]] = [
        await drift.ask(target, each, max_tokens=arguments.output_len) for each in questions
    ]
    pairs = zip(questions, answers, strict=True)
    traced = [drift.trace(question, answer, vocabulary) for question, answer in pairs]
    return name, str(target.prompts), [each for each in traced if each.told]


def _questions(
    arguments: argparse.Namespace, llm: "LLM", *, is_chat: bool
) -> "Sequence[AskedText]":
    """The first tokens of each text, as the endpoint will read them."""
    from ridgeline.bench.serve.drift import AskedText
    from ridgeline.evaluation import encode_documents, heldout_texts, read_texts

    if llm.tokenizer is None:
        raise TokenizerError("The reference has no tokenizer: texts cannot be compared.")
    texts = heldout_texts() if arguments.text is None else read_texts(arguments.text)
    documents = encode_documents(
        llm.tokenizer, texts[: arguments.questions], max_tokens=arguments.question_tokens
    )
    questions = []
    for document in documents:
        text = llm.tokenizer.decode(document)
        ids = (
            llm.encode_chat([{"role": "user", "content": text}])
            if is_chat
            else (llm.tokenizer.encode(text))
        )
        questions.append(AskedText(text=text, token_ids=tuple(ids)))
    return questions


def _report(
    arguments: argparse.Namespace, wanted: "Rows", found: "dict[str, Rows]"
) -> dict[str, Any]:
    from ridgeline.bench.serve import drift

    kls = {name: drift.divergences(wanted, rows) for name, rows in found.items()}
    means = {name: float(each.mean()) for name, each in kls.items()}
    endpoint = kls.pop("endpoint")
    coarser = [name for name, each in kls.items() if drift.is_further(endpoint, each)]
    return {
        "url": arguments.url,
        "reference": arguments.reference,
        "positions": len(wanted),
        "kl": means,
        "kl_error": float(endpoint.std(ddof=1) / len(endpoint) ** 0.5),
        "same_top": {name: drift.same_top(wanted, rows) for name, rows in found.items()},
        "nearest": drift.nearest(means["endpoint"], {name: means[name] for name in kls}),
        "further_than": coarser,
        "further_than_all": len(coarser) == len(kls),
        "claim": arguments.claim,
        "refuted": arguments.claim in coarser,
    }


def _print(report: dict[str, Any]) -> None:
    console = output_console()
    rows = [
        (name, f"{kl:.2e}", f"{report['same_top'][name]:.1%}") for name, kl in report["kl"].items()
    ]
    header = (f"beside {report['reference']} in float32", "KL of those told", "same top")
    print_columns(console, header, rows)
    console.print(
        f"{report['positions']} tokens of {report['model']}'s greedy answers, prompts as "
        f"{report['prompts']}; the endpoint's KL ± {report['kl_error']:.0e}",
        soft_wrap=True,
    )
    if report["further_than_all"]:
        verdict = "It is further off than each of these: another model, revision or template."
    else:
        verdict = f"It is as far off as {report['nearest']}."
    if report["claim"] is not None:
        known = "is refuted" if report["refuted"] else "is not refuted"
        verdict += f" That it is {report['claim']} {known}."
    console.print(verdict, soft_wrap=True)

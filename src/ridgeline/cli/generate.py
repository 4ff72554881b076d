"""``ridgeline generate``: complete one prompt."""

import argparse
import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.display import (
    draft_counts,
    error_console,
    full_context_line,
    loading_bar,
    roofline_line,
    timing_line,
)
from ridgeline.cli.logprobs import print_logprobs
from ridgeline.cli.options import (
    Parser,
    add_model_options,
    add_sampling_options,
    engine_settings,
    given_settings,
    read_prompt,
    sampling_params,
    token_ids,
)
from ridgeline.core.errors import InvalidRequestError, NoTokenError
from ridgeline.core.garbage import no_collection
from ridgeline.core.request import CompletionOutput, FinishReason, RequestOutput
from ridgeline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.engine.beam_search import BeamParams
    from ridgeline.engine.llm import LLM

_OF_BEAMS = {"max_tokens", "ignore_eos", "logprobs"}  # sampling options that beams have, too


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "-p", "--prompt", metavar="TEXT", help="text to complete (else standard input)"
    )
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="file to complete")
    prompt.add_argument(
        "--prompt-ids", type=token_ids, metavar="IDS", help="token ids to complete: 1,2,3"
    )
    parser.add_argument("--adapter", metavar="NAME", help="which of --adapters to use")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--best-of", type=int, metavar="N", help="draw N samples, print the --n likeliest"
    )
    parser.add_argument(
        "--beams",
        type=int,
        metavar="N",
        help="search with N beams instead of sampling, of 64 tokens without --max-tokens",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="of --beams: power of the length divided by; default: 1",
    )
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load, complete, print; the text streams unless ``--json`` or several samples are wanted."""
    sampling_params(arguments)  # a mistake in it is found before the model is loaded
    beams = _beam_params(arguments)
    prompt = arguments.prompt_ids or read_prompt(arguments)
    text = prompt if isinstance(prompt, str) else ""
    with no_collection(), loading_bar() as progress:
        from ridgeline.engine.llm import LLM  # torch takes a second: not for --help

        llm = LLM(arguments.model, progress=progress, **engine_settings(arguments))
    with llm:
        if isinstance(prompt, str) and llm.tokenizer is None:
            raise InvalidRequestError(
                f"{llm.name} has no tokenizer; give the prompt as token ids: --prompt-ids 1,2,3."
            )
        params = sampling_params(arguments, **llm.sampling_defaults)
        if beams is None and not arguments.json and _num_drawn(arguments, params) == 1:
            stream = llm.stream(prompt, params, adapter=arguments.adapter)
            print(text, end="", flush=True)
            with suppress(NoTokenError):  # said at the end
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            output = stream.output()
            print("" if llm.tokenizer else _ids(output.outputs[0]))
        else:
            try:
                output = _complete(llm, prompt, params, beams, arguments)
            except NoTokenError as error:
                output, *_ = error.outputs  # of beams, all of a step's
        report, drafts = llm.roofline(), draft_counts(llm.speculation())
        if arguments.json:
            print(json.dumps(to_json(llm.name, output) | {"roofline": asdict(report)}))
        elif beams is not None or _num_drawn(arguments, params) > 1:
            _print_samples(output, has_text=llm.tokenizer is not None)
        if not arguments.json:
            print_logprobs(output, llm.tokenizer)
    if not arguments.json:
        error_console.print(llm.summary.line, style="dim", markup=False, soft_wrap=True)
        _print_timing(output, drafts)
        error_console.print(roofline_line(report), style="dim", markup=False, soft_wrap=True)
    max_tokens = params.max_tokens if beams is None else beams.max_tokens
    if (warning := full_context_line(output, max_tokens)) is not None:
        error_console.print(warning, style="yellow", soft_wrap=True)
    if any(sample.finish_reason == FinishReason.ERROR for sample in output.outputs):
        raise NoTokenError
    return 0


def _beam_params(arguments: argparse.Namespace) -> "BeamParams | None":
    """The beam search that the command line asks for.

    Raises:
        InvalidRequestError: it asks for a draw as well, or a value is out of bounds.
    """
    if arguments.beams is None:
        if arguments.length_penalty is not None:
            raise InvalidRequestError("--length-penalty needs --beams.")
        if arguments.best_of is not None:
            _num_drawn(arguments, sampling_params(arguments))
        return None
    from ridgeline.engine.beam_search import MAX_BEAMS, BeamParams  # tokenizers take their time

    if not 1 <= arguments.beams <= MAX_BEAMS:
        raise InvalidRequestError(f"--beams must be between 1 and {MAX_BEAMS}.")
    given = given_settings(arguments, SamplingParams)
    if arguments.best_of is not None:
        given["best_of"] = arguments.best_of
    if other := [name for name in given if name not in _OF_BEAMS]:
        option = "--" + other[0].replace("_", "-")
        raise InvalidRequestError(f"{option} has no part in a beam search: leave out one of both.")
    if arguments.length_penalty is not None:
        given["length_penalty"] = arguments.length_penalty
    return BeamParams(beam_width=arguments.beams, **given)


def _num_drawn(arguments: argparse.Namespace, params: SamplingParams) -> int:
    """How many samples are drawn, of which ``params.n`` are printed."""
    drawn: int = params.n if arguments.best_of is None else arguments.best_of
    if drawn < params.n:
        raise InvalidRequestError("--best-of must be at least --n.")
    return drawn


def _complete(
    llm: "LLM",
    prompt: str | list[int],
    params: SamplingParams,
    beams: "BeamParams | None",
    arguments: argparse.Namespace,
) -> RequestOutput:
    """The whole output: beams, samples, or the best of more samples."""
    if beams is not None:
        return llm.beam_search(prompt, beams, adapter=arguments.adapter)[0]
    drawn = _num_drawn(arguments, params)
    if drawn == params.n:
        return llm.generate(prompt, params, adapter=arguments.adapter)[0]
    from ridgeline.engine.beam_search import best_of

    wanted = replace(params, n=drawn, logprobs=params.logprobs or 0)
    found = best_of(llm.generate(prompt, wanted, adapter=arguments.adapter)[0], params.n)
    shown = found.outputs
    if params.logprobs is None:
        shown = tuple(replace(sample, logprobs=None) for sample in shown)
    return replace(found, outputs=shown)


def _print_samples(output: RequestOutput, *, has_text: bool) -> None:
    for sample in output.outputs:
        shown = f"{output.prompt or ''}{sample.text}" if has_text else _ids(sample)
        print(f"[{sample.index}] {shown}")


def _ids(sample: CompletionOutput) -> str:
    return ",".join(map(str, sample.token_ids))


def _print_timing(output: RequestOutput, drafts: Counter[str]) -> None:
    if output.timings is not None:
        line = timing_line(
            output.timings,
            prompt_tokens=len(output.prompt_token_ids),
            output_tokens=sum(len(sample.token_ids) for sample in output.outputs),
            drafts=drafts,
        )
        error_console.print(line, style="dim", soft_wrap=True)


def to_json(name: str, output: RequestOutput) -> dict[str, Any]:
    """The object that ``--json`` prints; with n > 1, ``samples`` holds all of them."""
    first = _sample_json(output.outputs[0])
    result = {
        "model": name,
        **first,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "timing": asdict(output.timings) if output.timings else None,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            None if entry is None else asdict(entry) for entry in output.prompt_logprobs
        ]
    if len(output.outputs) > 1:
        result["samples"] = [_sample_json(sample) for sample in output.outputs]
    return result


def _sample_json(sample: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        result["logprobs"] = [asdict(entry) for entry in sample.logprobs]
    return result

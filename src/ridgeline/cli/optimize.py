"""``ridgeline optimize``: the settings that serve a load best on this machine, proven."""

import argparse
import hashlib
import json
import logging
import random
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ridgeline
from ridgeline.cli.display import (
    announce,
    error_console,
    loading_bar,
    output_console,
    print_paragraph,
)
from ridgeline.cli.hardware import calibration_of, kept_calibration, this_engine_memory
from ridgeline.cli.observed import ObservedTraffic, observed_traffic
from ridgeline.cli.options import Parser, add_model_options, duration, engine_settings, positive
from ridgeline.cli.report_file import check_new_files
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.core.errors import DiskError, InvalidRequestError, UnsupportedModelError
from ridgeline.core.settings.reading import changed_settings
from ridgeline.executors import default_executor, executor_traits
from ridgeline.roofline.slo import Slo, parse_slo

if TYPE_CHECKING:
    from ridgeline.engine.loading import LoadedModel
    from ridgeline.optimize import CandidatePredictor, Found, Journal, Judge, Task
    from ridgeline.planning import Arrival

_WORKLOADS = ("chat", "rag", "agents", "batch")
_OBJECTIVES = ("goodput", "cost", "latency", "memory")
_STDOUT = Path("-")
_RANDOM_TOKENS = 20_000


def add_options(parser: Parser) -> None:
    """MODEL, the engine's settings, the load, what is wanted and what is written."""
    add_model_options(parser)
    load = parser.add_argument_group("load").add_mutually_exclusive_group()
    load.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines of arrivals, lengths")
    load.add_argument(
        "--from-server",
        metavar="URL",
        help="what it saw; the default is as it serves",
    )
    load.add_argument(
        "--workload", choices=_WORKLOADS, help="a usual kind of traffic; default: chat"
    )
    parser.add_argument(
        "--rate", type=positive, metavar="R", help="requests/s of a workload; default: an overload"
    )
    parser.add_argument("--api-key", metavar="KEY", help="admin key of that server")
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument(
        "--slo", metavar="S", help="limits in seconds: ttft=0.5,tpot=0.05; default: the workload's"
    )
    wanted.add_argument(
        "--objective", choices=_OBJECTIVES, default="goodput", help="default: goodput"
    )
    wanted.add_argument(
        "--quality",
        default="kl<=0.02",
        metavar="LIMITS",
        help="kl<=0.02,top1>=0.95,ppl<=1.02 beside the unquantized model, or none",
    )
    wanted.add_argument("--text", type=Path, metavar="FILE", help="what prompts are cut from")
    wanted.add_argument(
        "--budget", type=duration, default="15m", metavar="T", help="90s, 15m, 1h; default: 15m"
    )
    wanted.add_argument("--usd-per-hour", type=positive, metavar="USD", help="of this machine")
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("ridgeline.yaml"),
        metavar="FILE",
        help="settings for `serve --config`; default: ridgeline.yaml",
    )
    out.add_argument("--html", type=Path, metavar="FILE", help="a report to read and to send")
    out.add_argument(
        "--json", type=Path, nargs="?", const=_STDOUT, metavar="FILE", help="everything; - to print"
    )
    out.add_argument("--force", action="store_true", help="write over files that are there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Optimize, print the verdict, write the files."""
    _check_files(arguments)
    from ridgeline.optimize import parse_quality

    parse_quality(arguments.quality)
    slo = None if arguments.slo is None else parse_slo(arguments.slo)
    observed = _observed(arguments)
    base = with_overrides(
        EngineConfig(model=arguments.model), **{**observed.settings, **engine_settings(arguments)}
    )
    name = default_executor() if base.executor == "auto" else base.executor
    result, journal = _optimize(arguments, base, name, slo, observed.arrivals)
    _write(arguments, result)
    journal.forget()
    return 0


def _check_files(arguments: argparse.Namespace) -> None:
    """Nothing is written over, and that is known before anything is measured."""
    files = [path for path in (arguments.out, arguments.html, arguments.json) if path is not None]
    if _STDOUT in (arguments.out, arguments.html):
        raise InvalidRequestError("Only --json is printed by -; --out and --html are files.")
    check_new_files((path for path in files if path != _STDOUT), force=arguments.force)
    if len(set(files)) < len(files):
        raise InvalidRequestError("--out, --html and --json are different files.")
    if arguments.rate is not None and (arguments.trace or arguments.from_server):
        raise InvalidRequestError("--rate is of a workload; a trace has its own times.")
    if arguments.api_key is not None and arguments.from_server is None:
        raise InvalidRequestError("--api-key is of --from-server.")


def _observed(arguments: argparse.Namespace) -> ObservedTraffic:
    """What a server has seen, or the requests of a trace."""
    if arguments.from_server is not None:
        return observed_traffic(arguments.from_server, arguments.api_key)
    if arguments.trace is None:
        return ObservedTraffic()
    from ridgeline.planning import read_trace

    return ObservedTraffic(arrivals=read_trace(arguments.trace))


def _optimize(
    arguments: argparse.Namespace,
    base: EngineConfig,
    executor: str,
    slo: Slo | None,
    observed: "Sequence[Arrival]",
) -> "tuple[dict[str, Any], Journal]":
    from ridgeline.bench.conditions import Watch
    from ridgeline.core.host import usable_cores
    from ridgeline.engine.loading import load_model
    from ridgeline.optimize import Journal, to_json

    texts = _texts(arguments)
    with loading_bar() as progress:
        loaded = load_model(base, progress=progress)
    if not loaded.model.spec.has_head:
        raise UnsupportedModelError("Only models that generate text have settings to choose here.")
    if kept_calibration(executor) is None:
        announce("This machine is calibrated first, which the --budget does not count.")
    predictor = _predictor(base, executor, loaded)
    task = _task(arguments, base, executor, loaded, slo, observed)
    _check_lengths(task, predictor.context)
    journal = Journal(_asked(arguments, base, task, texts))
    _announce(arguments.budget, goes_on=bool(journal.kept.visits))
    judge, watch = _judge(task, base, loaded, texts, predictor.context), Watch()
    found = _search(task, predictor, journal, judge, _corpus(loaded, texts))
    result = to_json(
        found,
        predictor,
        model=base.model or "embedded",
        executor=executor,
        commands=_commands(arguments, found),
        conditions=watch.conditions(threads=usable_cores()),
        usd_per_hour=arguments.usd_per_hour,
    )
    return result, journal


def _predictor(base: EngineConfig, executor: str, loaded: "LoadedModel") -> "CandidatePredictor":
    from ridgeline.optimize import CandidatePredictor

    calibration = calibration_of(executor, anew=False)
    memory_bytes, kv_share = this_engine_memory(executor)
    return CandidatePredictor(
        base,
        loaded,
        executor_traits(executor),
        calibration,
        memory_bytes=memory_bytes,
        kv_share=kv_share,
    )


def _check_lengths(task: "Task", context: int) -> None:
    longest = max((each.num_tokens for each in task.trace), default=0)
    if longest > context:
        raise InvalidRequestError(
            f"The trace has a request of {longest:,} tokens, more than the context of {context:,}."
        )


def _announce(budget_s: float, *, goes_on: bool) -> None:
    if goes_on:
        error_console.print("Going on with what an interrupted run has measured.")
    minutes = f"{budget_s / 60:.3g} minute" + "s" * (budget_s != 60)
    announce(f"Measures for up to {minutes} (--budget). Ctrl-C stops; the same command goes on.")


def _search(
    task: "Task",
    predictor: "CandidatePredictor",
    journal: "Journal",
    judge: "Judge | None",
    corpus: Sequence[int],
) -> "Found":
    from ridgeline.optimize import EngineMeasurer, Optimizer
    from ridgeline.optimize.space import DEFAULT

    roomy = 8 * predictor.memory_bytes(DEFAULT) < predictor.available_bytes
    measurer = EngineMeasurer(task.base, corpus, most_open=3 if roomy else 1)
    logger = logging.getLogger("ridgeline")
    level = logger.level
    logger.setLevel(logging.ERROR)  # each engine says the same of the model
    try:
        with loading_bar(of_bytes=False) as show:
            return Optimizer(
                task,
                predictor,
                measurer,
                journal,
                judge=judge,
                progress=lambda spent, budget, label: show(round(spent), round(budget), label),
            ).find()
    finally:
        logger.setLevel(level)
        measurer.close()


def _task(
    arguments: argparse.Namespace,
    base: EngineConfig,
    executor: str,
    loaded: "LoadedModel",
    slo: Slo | None,
    trace: "Sequence[Arrival]" = (),
) -> "Task":
    from ridgeline.optimize import PATTERNS, Objective, Task, declared_space, parse_quality

    workload = arguments.workload or "chat"
    pattern = None if trace else PATTERNS[workload]
    if pattern is not None and pattern.is_offline and arguments.rate is not None:
        raise InvalidRequestError("A batch is there all at once: it has no --rate.")
    limits = slo or (pattern.slo if pattern is not None else Slo())
    given = engine_settings(arguments)
    space = declared_space(
        base,
        executor_traits(executor),
        slo=limits,
        given=given,
        is_quantized=loaded.definition.quantization is not None,
    )
    if not space.axes:
        raise InvalidRequestError("Every setting that could be changed is given: nothing to try.")
    return Task(
        base=base,
        space=space,
        workload=workload if pattern is not None else arguments.from_server or str(arguments.trace),
        pattern=pattern,
        trace=trace,
        rate_rps=arguments.rate,
        slo=limits,
        objective=Objective(arguments.objective),
        quality=parse_quality(arguments.quality),
        budget_s=arguments.budget,
        given=tuple(given),
    )


def _texts(arguments: argparse.Namespace) -> list[str]:
    from ridgeline.evaluation import heldout_texts, read_texts

    return heldout_texts() if arguments.text is None else read_texts(arguments.text)


def _corpus(loaded: "LoadedModel", texts: Sequence[str]) -> Sequence[int]:
    """Tokens that prompts are cut from: of the text, or any where there is no tokenizer."""
    if loaded.tokenizer is None:
        rng, size = random.Random(0), loaded.model.spec.vocab_size
        return rng.choices(range(min(10, size - 1), size), k=_RANDOM_TOKENS)
    size = loaded.model.spec.vocab_size
    tokens = [token for text in texts for token in loaded.tokenizer.encode(text)]
    return [token for token in tokens if token < size] or [0]


def _judge(
    task: "Task", base: EngineConfig, loaded: "LoadedModel", texts: Sequence[str], context: int
) -> "Judge | None":
    from ridgeline.optimize import Judge

    if not task.quality.is_set:
        return None
    if loaded.tokenizer is None or base.load_format == "dummy":
        raise InvalidRequestError(
            "The quality of this model cannot be measured, since it has random weights or no "
            "tokenizer: --quality none tries formats without that."
        )
    return Judge(base, loaded.tokenizer, texts, context=context)


def _asked(
    arguments: argparse.Namespace, base: EngineConfig, task: "Task", texts: Sequence[str]
) -> dict[str, Any]:
    """What two runs must have in common for the one to go on with what the other measured."""
    return {
        "settings": repr(base),
        "workload": task.workload,
        "trace": [repr(each) for each in task.trace],
        "rate": arguments.rate,
        "slo": str(task.slo),
        "objective": task.objective.value,
        "quality": str(task.quality),
        "budget": arguments.budget,
        "texts": hashlib.sha256("\0".join(texts).encode(errors="replace")).hexdigest(),
        "version": ridgeline.__version__,
    }


def _commands(arguments: argparse.Namespace, found: "Found") -> dict[str, str]:
    """What serves with the winner, and what makes this report again."""
    task = found.task
    model = [] if task.base.model is None else [task.base.model]
    given = [
        word
        for name, value in changed_settings(task.base).items()
        if name != "model"
        for word in _words(name.replace("_", "-"), value)
    ]
    load = ["--workload", task.workload]
    if task.trace:
        load = ["--from-server" if arguments.from_server else "--trace", task.workload]
    rate = ["--rate", f"{arguments.rate:g}"] if arguments.rate is not None else []
    limits = ",".join(f"{name}={limit:g}" for name, limit in task.slo.limits.items())
    slo = ["--slo", limits] if limits else []
    again = [*load, *rate, *slo, "--objective", task.objective.value]
    again += ["--quality", str(task.quality), "--budget", f"{task.budget_s:g}s"]
    again += _words("text", arguments.text) + _words("usd-per-hour", arguments.usd_per_hour)
    return {
        "serve": shlex.join(["ridgeline", "serve", *model, *given, *found.winner.options]),
        "serve_file": shlex.join(["ridgeline", "serve", "--config", str(arguments.out)]),
        "again": shlex.join(["ridgeline", "optimize", *model, *given, *again]),
    }


def _words(name: str, value: object) -> list[str]:
    """An option as it is written; none for a value that was not given."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [word for key, each in value.items() for word in (f"--{name}", f"{key}={each}")]
    return [f"--{name}", str(value)]


def _write(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    from ridgeline.optimize import settings_yaml

    texts: dict[Path, Callable[[], str]] = {arguments.out: lambda: settings_yaml(result)}
    if arguments.json is not None and arguments.json != _STDOUT:
        texts[arguments.json] = lambda: json.dumps(result, indent=1) + "\n"
    if arguments.html is not None:
        from ridgeline.optimize.page import page

        texts[arguments.html] = lambda: page(result)
    try:
        for path, text in texts.items():
            with path.open("w" if arguments.force else "x", encoding="utf-8") as file:
                file.write(text())
    except OSError as error:
        raise DiskError(f"A file cannot be written: {error.filename}: {error.strerror}.") from error
    if arguments.json == _STDOUT:
        print(json.dumps(result))
        return
    _print(result)
    console = output_console()
    for path in texts:
        console.print(f"wrote {path}", markup=False)


def _print(result: dict[str, Any]) -> None:
    console = output_console()
    print_paragraph(console, result["verdict"], indent=2, style="bold")
    for step in result["waterfall"]:
        sure = "measured" if step["is_measured"] else "predicted, corrected by what was measured"
        text = (
            f"  {step['setting']} {step['value']}: × {step['factor']:.2f} "
            f"({step['low']:.2f} to {step['high']:.2f}, {sure}; predicted × "
            f"{step['predicted']:.2f}); {step['effort']}"
        )
        print_paragraph(console, text, indent=4)
    for note in result["notes"]:
        print_paragraph(console, f"note: {note}", indent=2, style="dim")
    print_paragraph(console, f"serve it: {result['commands']['serve_file']}", indent=2)

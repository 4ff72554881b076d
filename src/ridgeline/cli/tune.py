"""``ridgeline tune URL``: whether a server's settings still suit what it is asked."""

import argparse
import json
import time
from collections.abc import Sequence
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING, Any

from ridgeline.cli.display import output_console, print_columns, print_paragraph, status_line
from ridgeline.cli.hardware import calibration_of, this_engine_memory
from ridgeline.cli.observed import ObservedTraffic, observed_traffic
from ridgeline.cli.options import Parser, positive
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.executors import default_executor, executor_traits
from ridgeline.roofline.calibration import corrected
from ridgeline.roofline.history import past_errors, past_sentences
from ridgeline.roofline.slo import Slo, parse_slo

if TYPE_CHECKING:
    from ridgeline.optimize import CandidatePredictor
    from ridgeline.optimize.screening import PredictedCandidate, Screened

_PROPOSED = 5
_MOST_REQUESTS = 1000
_QUANTILE = 1.2816  # of the normal distribution, for intervals of 80%
_SAME_FORMAT, _WIDEST = 0.03, 0.4  # deviations of a predicted ratio's logarithm


def add_options(parser: Parser) -> None:
    """The server, what is wanted, and for how long to predict."""
    parser.add_argument("url", metavar="URL", help="of a server on this machine")
    parser.add_argument("--api-key", metavar="KEY", help="its admin key")
    parser.add_argument("--slo", metavar="S", help="limits in seconds: ttft=0.5,tpot=0.05")
    parser.add_argument(
        "--objective",
        choices=("goodput", "latency", "memory"),
        default="goodput",
        help="what is to be best",
    )
    parser.add_argument(
        "--seconds", type=positive, default=30.0, metavar="S", help="to predict for; default: 30"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, model=None)


def run(arguments: argparse.Namespace) -> int:
    """Fetch, predict, propose. Exit code 1 if a change is predicted to be worth proving."""
    slo = Slo() if arguments.slo is None else parse_slo(arguments.slo)
    observed = observed_traffic(arguments.url, arguments.api_key)
    with status_line("predicting"):
        report = _report(arguments, observed, slo)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 1 if report["proposals"] else 0


def _report(arguments: argparse.Namespace, observed: ObservedTraffic, slo: Slo) -> dict[str, Any]:
    from ridgeline.engine.loading import load_model
    from ridgeline.optimize import DEFAULT, CandidatePredictor, Objective, declared_space
    from ridgeline.optimize.screening import screen

    base = with_overrides(EngineConfig(), **observed.settings)
    executor = default_executor() if base.executor == "auto" else base.executor
    loaded = load_model(base)
    memory_bytes, kv_share = this_engine_memory(executor)
    traits = executor_traits(executor)
    calibration = corrected(calibration_of(executor, anew=False), observed.level)
    predictor = CandidatePredictor(
        base, loaded, traits, calibration, memory_bytes=memory_bytes, kv_share=kv_share
    )
    space = declared_space(
        base, traits, slo=slo, is_quantized=loaded.definition.quantization is not None
    )
    arrivals = list(observed.arrivals)[-_MOST_REQUESTS:]
    screened = screen(
        predictor,
        list(space.points()),
        arrivals,
        objective=Objective(arguments.objective),
        slo=slo,
        seconds=arguments.seconds,
        most=_PROPOSED,
    )
    default = next(each for each in screened.leaders if each.candidate == DEFAULT)
    by_memory = arguments.objective == "memory"
    again = f"ridgeline optimize --from-server {arguments.url} --objective {arguments.objective}"
    return {
        "url": arguments.url,
        "executor": executor,
        "settings": dict(observed.settings),
        "traffic": _summary(observed),
        "alarms": list(observed.alarms),
        "objective": arguments.objective,
        "slo": slo.limits,
        "value": default.value,
        "unit": Objective(arguments.objective).unit,
        "proposals": _proposals(screened, default, predictor, by_memory=by_memory),
        "num_simulated": screened.num_simulated,
        "past_errors": past_sentences(
            past_errors(
                executor,
                {predictor.model(each.candidate).main_format.name for each in screened.leaders},
            )
        ),
        "prove": again if arguments.slo is None else f"{again} --slo {arguments.slo}",
    }


def _summary(observed: ObservedTraffic) -> dict[str, float]:
    arrivals = observed.arrivals
    prompts = [each.prompt_tokens for each in arrivals]
    return {
        "requests": len(arrivals),
        "seconds": arrivals[-1].arrival_s - arrivals[0].arrival_s,
        "prompt_tokens": median(prompts),
        "output_tokens": median(each.output_tokens for each in arrivals),
        "cached_share": observed.cached_tokens / sum(prompts),
    }


def _proposals(
    screened: "Screened",
    default: "PredictedCandidate",
    predictor: "CandidatePredictor",
    *,
    by_memory: bool,
) -> Sequence[dict[str, Any]]:
    """Changes whose predicted gain, at the lower end of its interval, is more than nothing."""
    found = []
    for each in screened.leaders:
        change = log(each.value / default.value)
        error = _deviation(predictor, each, default)
        low, high = exp(change - _QUANTILE * error), exp(change + _QUANTILE * error)
        memory = each.memory_bytes / default.memory_bytes
        is_better = memory < 1 if by_memory else low > 1
        if each is not default and is_better:
            found.append(
                {
                    "changes": dict(each.candidate.changes),
                    "options": list(each.candidate.options),
                    "factor": exp(change),
                    "low": low,
                    "high": high,
                    "memory_factor": memory,
                }
            )
    return found


def _deviation(
    predictor: "CandidatePredictor", one: "PredictedCandidate", other: "PredictedCandidate"
) -> float:
    """Of the logarithm of a predicted ratio: that of the calibration where formats differ."""
    if one.candidate.formats == other.candidate.formats:
        return _SAME_FORMAT
    form = predictor.model(one.candidate).main_format
    return min(_WIDEST, predictor.calibration.spread("decode", form).deviation)


def _print(report: dict[str, Any]) -> None:
    console, seen = output_console(), report["traffic"]
    print_paragraph(
        console,
        f"{seen['requests']:,} requests in {seen['seconds'] / 60:,.1f} minutes; medians: "
        f"{seen['prompt_tokens']:,.0f} tokens of prompt, {seen['output_tokens']:,.0f} of output; "
        f"{seen['cached_share']:.0%} of prompts from the prefix cache",
        indent=2,
    )
    for alarm in report["alarms"]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(alarm["at_s"]))
        text = f"{alarm['quantity']} changed: {alarm['before']:.3g} before, {alarm['since']:.3g}"
        print_paragraph(console, f"{text} since {when}", indent=2, style="bold")
    if not report["proposals"]:
        console.print(
            f"Keep the settings: of {report['num_simulated']} that were predicted, none is better "
            "beyond the predictions' own error.",
            soft_wrap=True,
        )
        return
    rows = [
        (
            " ".join(each["options"]),
            f"× {each['factor']:.2f} ({each['low']:.2f}–{each['high']:.2f})",
            f"× {each['memory_factor']:.2f}",
        )
        for each in report["proposals"]
    ]
    print_columns(console, ("a restart with", report["objective"], "memory"), rows)
    for sentence in report["past_errors"]:
        print_paragraph(console, sentence, indent=2, style="dim")
    print_paragraph(
        console,
        "Predicted, without a look at quality. What measures it, on this machine while it is idle: "
        + report["prove"],
        indent=2,
    )

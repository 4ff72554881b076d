"""``ridgeline plan``: what a machine can do for a load, before anything is bought or downloaded."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.display import status_line
from ridgeline.cli.hardware import (
    THIS,
    add_machine_options,
    this_calibration,
    this_machine,
)
from ridgeline.cli.money import add_money_options, device_usd_per_hour
from ridgeline.cli.options import Parser
from ridgeline.cli.plan_checks import check_plan, place_rate
from ridgeline.cli.plan_report import (
    print_cheapest,
    print_disaggregation,
    print_layouts,
    print_placement,
    print_plan,
)
from ridgeline.cli.priced_model import NamedModel, add_model_options, check_model, read_model
from ridgeline.cli.report_file import add_html_option, write_html
from ridgeline.core.errors import InvalidRequestError
from ridgeline.models import PRESETS
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.memory import USABLE_SHARE, kv_bytes
from ridgeline.roofline.slo import Slo, parse_slo

if TYPE_CHECKING:  # torch takes a second: not for --help
    from ridgeline.planning import Machine, ModelDemand, Question
    from ridgeline.planning.capacity import CapacityPlan


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    add_machine_options(parser, default=None)
    parser.add_argument("--count", type=int, metavar="N", help="devices; default: those of -tp")
    parser.add_argument(
        "-tp", "--tensor-parallel", type=int, metavar="N", help="devices of one replica"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        metavar="N",
        help="prompt tokens; default 1000, or as the context allows",
    )
    parser.add_argument(
        "--output",
        type=int,
        metavar="N",
        help="output tokens; default 200, or a quarter of the context",
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests/s; default: saturation")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals as JSON lines")
    parser.add_argument(
        "--slo", metavar="S", help="limits in seconds: ttft=0.5,tpot=0.05; or: chat"
    )
    add_money_options(parser)
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="at once; default 256, here an engine's"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens of a step"
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help="simulate at least so many; default 80"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the arrivals; default 0")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--max-rate", action="store_true", help="the highest load of which 90%% meets the SLOs"
    )
    what.add_argument(
        "--place",
        action="append",
        metavar="SHAPE[:RATE]",
        help="put several models on the devices; repeat",
    )
    parser.add_argument(
        "--cheapest", action="store_true", help="rank the catalogue's machines for the load"
    )
    parser.add_argument(
        "--memory-share", type=float, metavar="S", help="of devices, for --place; default 0.9"
    )
    what.add_argument(
        "--disaggregate", action="store_true", help="instances for prefill and for decode alone"
    )
    what.add_argument(
        "--layouts", action="store_true", help="compare -tp, -pp, -ep and -dp on all devices"
    )
    parser.add_argument(
        "--network-gb-per-s",
        type=float,
        metavar="G",
        help="gigabytes a second that a host sends to another, for --layouts",
    )
    parser.add_argument(
        "--network-us", type=float, metavar="U", help="microseconds of a message; default 50"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_html_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer one question."""
    check_plan(arguments)
    slo = Slo() if arguments.slo is None else parse_slo(arguments.slo)
    if arguments.place:
        return _place(arguments, slo)
    check_model(arguments)
    machine = _any_machine(arguments) if arguments.cheapest else machine_of(arguments)
    model = read_model(arguments, machine.calibration)
    question = question_of(arguments, model, machine, slo)
    if arguments.cheapest:
        return _cheapest(arguments, question)
    if arguments.disaggregate:
        return _disaggregate(arguments, question)
    if arguments.layouts:
        return _layouts(arguments, question)
    from ridgeline.planning import answer, highest_rate

    with status_line("planning"):
        plan = highest_rate(question) if arguments.max_rate else answer(question)
    if plan is None:
        raise InvalidRequestError("No load meets the SLOs: a single request misses them.")
    result = plan.to_json() | {"model": model.name, "rate_rps": plan.question.rate_rps}
    if arguments.api_usd_per_1m is not None:
        result["most_output_tok_s"] = max(plan.output_tok_s, answer(_at_once(plan)).output_tok_s)
    result |= _money(arguments, result, question)
    if arguments.html is not None:
        from ridgeline.planning.page import page

        write_html(arguments, page(result))
    if arguments.json:
        print(json.dumps(result))
    else:
        print_plan(result)
    return 0


def _at_once(plan: "CapacityPlan") -> "Question":
    """The same machine with all that it can take."""
    question, typical = plan.question, plan.question.typical
    return replace(
        question,
        prompt_tokens=typical.prompt_tokens,
        output_tokens=typical.output_tokens,
        rate_rps=None,
        trace=(),
        slo=Slo(),
        tensor=plan.replica.model.layout.tensor,
        num_requests=None,
    )


_NETWORK_US = 50.0  # of a message by TCP, where nothing else is known


def _hardware(arguments: argparse.Namespace) -> str:
    return str(arguments.hardware or THIS).lower()


def machine_of(arguments: argparse.Namespace) -> "Machine":
    """The machine of the options, with the price of a device.

    Raises:
        RidgelineError: there is no such machine, or it cannot be measured.
    """
    from ridgeline.planning import catalogue_machine

    is_this = _hardware(arguments) == THIS
    count = arguments.count or (1 if is_this else arguments.tensor_parallel or 1)
    if is_this:
        if count != 1 and not arguments.layouts:
            raise InvalidRequestError("There is one machine like this; --count is for others.")
        machine = replace(this_machine(this_calibration(arguments)), count=count, host_devices=1)
    else:
        machine = catalogue_machine(
            load_catalogue(arguments.catalogue), _hardware(arguments), count
        )
    usd = device_usd_per_hour(arguments, machine.usd_per_hour, machine.power_w)
    return replace(machine, usd_per_hour=usd)


def _any_machine(arguments: argparse.Namespace) -> "Machine":
    """One of the catalogue's: they all run a model in the same formats."""
    from ridgeline.planning import catalogue_machine

    catalogue = load_catalogue(arguments.catalogue)
    return catalogue_machine(catalogue, next(iter(catalogue.devices)))


def question_of(
    arguments: argparse.Namespace, model: NamedModel, machine: "Machine", slo: Slo
) -> "Question":
    """The load of the options, on a machine."""
    from ridgeline.core.config import EngineConfig
    from ridgeline.planning import Question, read_trace
    from ridgeline.planning.question import MAX_SEQS

    default = EngineConfig().max_num_seqs if machine.key == THIS else MAX_SEQS
    config = EngineConfig(
        max_num_seqs=arguments.max_num_seqs or default,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    context = model.priced.spec.max_position
    output = arguments.output or max(1, min(200, context // 4))
    return Question(
        model=model.priced,
        machine=machine,
        prompt_tokens=arguments.prompt or max(1, min(1000, context - output)),
        output_tokens=output,
        rate_rps=arguments.rate,
        slo=slo,
        tensor=arguments.tensor_parallel,
        trace=() if arguments.trace is None else read_trace(arguments.trace),
        num_requests=arguments.requests,
        seed=arguments.seed or 0,
        config=config,
        notes=model.notes,
    )


def _cheapest(arguments: argparse.Namespace, question: "Question") -> int:
    from ridgeline.planning import cheapest

    catalogue = load_catalogue(arguments.catalogue)
    with status_line("planning") as show:
        found = cheapest(question, catalogue, lambda name: show(f"planning: {name}"))
    plans = [plan.to_json() for plan in found.plans]
    if arguments.json:
        print(json.dumps({"machines": plans, "notes": list(found.notes)}))
        return 0
    print_cheapest(plans, found.notes)
    return 0


def _money(
    arguments: argparse.Namespace, result: dict[str, Any], question: "Question"
) -> dict[str, Any]:
    """What is asked about money beside the plan's own figures."""
    from ridgeline.planning.cost import (
        break_even_tokens_per_s,
        storage_usd,
        usd_per_million_bytes,
    )

    usd, output_usd = result["usd_per_hour"], result["usd_per_1m_output"]
    thousand = result["usd_per_1k_requests"]
    found: dict[str, Any] = {"usd_per_request": None if thousand is None else thousand / 1e3}
    if output_usd is None or not output_usd:
        return found
    if arguments.bytes_per_token is not None:
        found["usd_per_1m_bytes"] = usd_per_million_bytes(output_usd, arguments.bytes_per_token)
    if arguments.api_usd_per_1m is not None:
        needed = break_even_tokens_per_s(usd, arguments.api_usd_per_1m)
        found["break_even_output_tok_s"] = needed
    if arguments.usd_per_gb_month is not None:
        prompt_tokens = question.typical.prompt_tokens
        prompt_kv_bytes = kv_bytes(question.model, prompt_tokens)
        month_usd = storage_usd(prompt_kv_bytes, 730, arguments.usd_per_gb_month)
        found["prompt_cache_bytes"] = prompt_kv_bytes
        found["prompt_cache_usd_per_month"] = month_usd
        input_usd = (result["usd_per_1m_by_phase"] or {}).get("input", 0.0)
        prompt_usd = input_usd * prompt_tokens / 1e6
        found["prompt_prefill_usd"] = prompt_usd
        found["cache_uses_to_pay_per_month"] = month_usd / prompt_usd if prompt_usd else None
    return found


def _disaggregate(arguments: argparse.Namespace, question: "Question") -> int:
    from ridgeline.planning.disaggregation import disaggregate
    from ridgeline.planning.notes import question_notes

    with status_line("planning"):
        found = disaggregate(question)
    prefill, decode = found.ratio
    result: dict[str, Any] = {
        "devices_of_an_instance": found.replica.model.layout.tensor,
        "prefill_rps": found.prefill_rps,
        "decode_rps": found.decode_rps,
        "decode_batch": found.decode_batch,
        "ratio": {"prefill": prefill, "decode": decode},
        "transfer_bytes": found.transfer_bytes,
        "transfer_s": found.transfer_s,
        "instances": None,
        "notes": question_notes(question),
    }
    if arguments.rate is not None:
        counts = found.instances(arguments.rate)
        result["instances"] = dict(zip(("prefill", "decode"), counts, strict=True))
    if arguments.json:
        print(json.dumps(result))
        return 0
    print_disaggregation(result, arguments.rate)
    return 0


def _layouts(arguments: argparse.Namespace, question: "Question") -> int:
    from ridgeline.planning import Network, compare_layouts

    gb_per_s, latency_us = arguments.network_gb_per_s, arguments.network_us or _NETWORK_US
    network = gb_per_s and Network(bytes_per_s=gb_per_s * 1e9, latency_s=latency_us / 1e6)
    with status_line("planning"):
        found = compare_layouts(question, network).to_json()
    if arguments.json:
        print(json.dumps(found))
    else:
        print_layouts(found, question.machine.count, question.machine.name)
    return 0


def _place(arguments: argparse.Namespace, slo: Slo) -> int:
    from ridgeline.planning import cheapest_placement, place_models
    from ridgeline.planning.search import placement_json

    machines = [_any_machine(arguments)] if arguments.cheapest else _machines(arguments)
    loads = [_load(arguments, text, machines[0], slo) for text in arguments.place]
    share = arguments.memory_share or USABLE_SHARE
    with status_line("planning") as show:
        if arguments.cheapest:
            catalogue = load_catalogue(arguments.catalogue)
            found = cheapest_placement(
                loads,
                catalogue,
                memory_share=share,
                progress=lambda text: show(f"planning: {text}"),
            )
        else:
            found = place_models(loads, machines, memory_share=share)
    if found is None:
        raise InvalidRequestError("No devices of the catalogue with a price hold these models.")
    result = placement_json(found)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print_placement(result, form=loads[0].question.model.main_format.name, memory_share=share)
    return 0


def _machines(arguments: argparse.Namespace) -> list["Machine"]:
    """Of ``--hardware a100:2,l4:4``, or one kind and ``--count``."""
    parts = _hardware(arguments).split(",")
    if len(parts) == 1 and ":" not in parts[0]:
        return [machine_of(arguments)]
    if arguments.count is not None:
        raise InvalidRequestError("--count is of one kind of device: write --hardware a100:2,l4:4.")
    found = []
    for part in parts:
        name, _, count = part.strip().partition(":")
        if not (count or "1").isdecimal() or int(count or 1) < 1 or name == THIS:
            raise InvalidRequestError(
                "Several kinds of devices are written --hardware a100:2,l4:4."
            )
        one = argparse.Namespace(**{**vars(arguments), "hardware": name, "count": int(count or 1)})
        found.append(machine_of(one))
    if len({machine.key for machine in found}) < len(found):
        raise InvalidRequestError("Each kind of device is named once.")
    if sum(machine.count for machine in found) > 1024:
        raise InvalidRequestError("At most 1,024 devices are planned for.")
    return found


def _load(arguments: argparse.Namespace, text: str, machine: "Machine", slo: Slo) -> "ModelDemand":
    from ridgeline.planning import ModelDemand

    name, _, rate = text.partition(":")
    if name not in PRESETS:
        raise InvalidRequestError(f"Unknown shape {name!r} in --place.")
    named = argparse.Namespace(**{**vars(arguments), "shape": name, "model": None})
    question = question_of(arguments, read_model(named, machine.calibration), machine, slo)
    return ModelDemand(name=name, question=question, rate_rps=place_rate(rate))

"""``ridgeline fleet``: one file says what a fleet is; these commands start, watch and check it."""

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.display import output_console, print_columns, print_paragraph, status_line
from ridgeline.cli.options import Parser, positive
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.private_folder import PrivateFolder

if TYPE_CHECKING:
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.cli.fleet_file import FleetFile
    from ridgeline.fleet.checks import FleetTold, Replayed
    from ridgeline.planning.traffic import Traffic

_ROUTER = "the router"


def add_options(parser: Parser) -> None:
    """A command for each thing that is done with a fleet."""
    commands = parser.add_subparsers(
        required=True, title="commands", metavar="COMMAND", parser_class=Parser
    )

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        command: Parser = commands.add_parser(
            name, prog=f"ridgeline fleet {name}", help=text, description=text
        )
        command.add_argument("file", type=Path, metavar="FILE.yaml", help="what the fleet is")
        command.set_defaults(run=run)
        return command

    up = add("up", _up, "start engines and a router here, or a router before engines that run")
    up.add_argument(
        "--manifests", type=Path, metavar="DIR", help="write manifests for Kubernetes instead"
    )
    join = add("join", _join, "start one more engine here, for a router anywhere")
    join.add_argument("router", metavar="URL", help="of the router, http://host:port")
    plan = add("plan", _plan, "how many replicas keep the limits, what they cost, simulated")
    plan.add_argument("--requests", type=int, default=400, metavar="N", help="that are simulated")
    commands_of_router = [
        add("status", _status, "engines, and what was decided of them"),
        add("verify", _verify, "whether all engines give the same tokens"),
        add("drain", _drain, "let an engine end what it has, and leave"),
        add("replay", _replay, "ask the requests of a log again: same answers, predicted seconds"),
    ]
    drain, replay = commands_of_router[2:]
    drain.add_argument("engine", metavar="ENGINE", help="its name or address")
    replay.add_argument("log", type=Path, metavar="LOG", help="of a router with request_log")
    replay.add_argument(
        "--speed", type=positive, default=1.0, metavar="X", help="times as fast as they came"
    )
    for command in commands_of_router:
        command.add_argument(
            "--api-key", metavar="KEY", help="of the engines; to drain, the admin's"
        )
        command.add_argument("--url", metavar="URL", help="of the router; default: the file's")
    for command in (plan, *commands_of_router):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def _file(arguments: argparse.Namespace) -> "FleetFile":
    from ridgeline.cli.fleet_file import read_fleet

    file = read_fleet(arguments.file)
    file.command_line(str(arguments.file))  # whose settings exist, for every command
    return file


def _target(arguments: argparse.Namespace, url: str | None = None) -> "HttpTarget":
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.fleet.request_log import UNLOGGED

    url = url or arguments.url or _file(arguments).url
    headers = {UNLOGGED.decode(): "1"}
    return HttpTarget(url, model="", api_key=arguments.api_key, headers=headers)


def _up(arguments: argparse.Namespace) -> int:
    file, where = _file(arguments), str(arguments.file)
    if file.is_empty:
        raise InvalidRequestError(f"{where} says nothing: name at least the model that is to run.")
    if arguments.manifests is not None:
        from ridgeline.cli.fleet_manifests import write_manifests

        print(write_manifests(file, arguments.manifests))
        return 0
    found = file.command_line(where)
    code: int = found.run(found)
    return code


def _join(arguments: argparse.Namespace) -> int:
    file, where = _file(arguments), str(arguments.file)
    found = file.joined(where, arguments.router)
    with PrivateFolder() as folder:
        if not found.port:  # no later start would find the folder of a port of chance
            vars(found).setdefault("data_dir", str(folder))
        code: int = found.run(found)
    return code


def _plan(arguments: argparse.Namespace) -> int:
    from ridgeline.cli.fleet_plan import plan, print_plan

    with status_line("simulating"):
        found = plan(_file(arguments), num_requests=arguments.requests)
    _show(arguments, found, print_plan)
    return 0


def _show(arguments: argparse.Namespace, found: Any, print_found: Callable[[Any], object]) -> None:
    if arguments.json:
        print(json.dumps(found))
    else:
        print_found(found)


def _status(arguments: argparse.Namespace) -> int:
    """Exit code 1 if no engine takes requests."""
    import msgspec

    from ridgeline.fleet.checks import fleet_state

    state = asyncio.run(fleet_state(_target(arguments)))
    if arguments.json:
        print(msgspec.json.encode(state).decode())
    else:
        _print_state(state)
    return 0 if any(each.up for each in state.engines) else 1


def _print_state(state: "FleetTold") -> None:
    console = output_console()
    up = sum(each.up for each in state.engines)
    parts = [f"{up} of {len(state.engines)} engines take requests"]
    if state.starting:
        parts.append(f"{state.starting} start")
    scaler = state.autoscaler
    if scaler is not None:
        parts.append(f"{scaler['wanted']} of {scaler['min']} to {scaler['max']} are wanted")
        if (share := scaler["within_limits_1m"]) is not None:
            parts.append(f"{share:.0%} within {scaler['limits']} in the last minute")
    print_paragraph(console, " · ".join(parts), indent=2)
    names = [each.name for each in state.engines]
    names += [f"small {each.name}" for each in state.cascade]
    rows = [
        (
            name,
            each.url,
            str(each.pending),
            str(each.running),
            *(
                "" if share is None else f"{share:.0%}"
                for share in (each.kv_usage, each.hit_rate, each.busy, each.mbu)
            ),
            each.reason,
        )
        for name, each in zip(names, (*state.engines, *state.cascade), strict=True)
    ]
    header = ("engine", "address", "pending", "running", "KV", "hits", "busy", "MBU", "why not")
    print_columns(console, header, rows, labels=2)
    for each in (scaler or {}).get("decisions", ()):
        predicted, came = each["predicted"]["within_limits"], each["came"] or {}
        text = f"{each['seconds_ago']:.0f} s ago, {each['present']} to {each['wanted']}: "
        text += each["reason"]
        if predicted is not None:
            text += f" Predicted {predicted:.0%}"
            text += f", came {came['within_limits']:.0%}." if "within_limits" in came else "."
        print_paragraph(console, text, indent=2)


def _drain(arguments: argparse.Namespace) -> int:
    from ridgeline.fleet.checks import fleet_state

    target = _target(arguments)

    async def drain() -> str:
        state = await fleet_state(target)
        wanted = arguments.engine.rstrip("/")
        found = next((each for each in state.engines if wanted in (each.name, each.url)), None)
        if found is None:
            names = ", ".join(f"{each.name} ({each.url})" for each in state.engines)
            raise InvalidRequestError(f"There is no engine {wanted}; there are {names}.")
        await target.delete(f"/admin/engines/{found.name}")
        return f"Engine {found.name} ({found.url}) has ended what it had, and left."

    with status_line("draining"):
        text = asyncio.run(drain())
    _show(arguments, {"drained": text}, lambda _: print(text))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Exit code 1 if an engine gives other tokens, or none."""
    from ridgeline.fleet.checks import fleet_state, verify

    router = _target(arguments)

    async def check() -> tuple[list[str], dict[str, list[str | None]]]:
        state = await fleet_state(router)
        urls = [each.url for each in state.engines if each.up]
        if not urls:
            raise InvalidRequestError("No engine takes requests now.")
        return urls, await verify(router, [_target(arguments, url) for url in urls])

    with status_line("asking every engine"):
        urls, found = asyncio.run(check())
    names = [*urls, _ROUTER]
    by_name = {
        name: {kind: each[number] for kind, each in found.items()}
        for number, name in enumerate(names)
    }
    differing = {
        name: [kind for kind, each in digests.items() if each is None or each != found[kind][0]]
        for name, digests in by_name.items()
    }
    report = {"digests": by_name, "differing": differing}
    _show(arguments, report, lambda _: _print_verified(differing, len(found)))
    return 1 if any(differing.values()) else 0


def _print_verified(differing: dict[str, list[str]], count: int) -> None:
    rows = [
        (name, f"{count - len(kinds)} of {count}", ", ".join(kinds))
        for name, kinds in differing.items()
    ]
    print_columns(output_console(), ("engine", "as the first", "other, or no answer"), rows)


def _replay(arguments: argparse.Namespace) -> int:
    """Exit code 1 if an answer is another one or missing, or if nothing could be asked."""
    from ridgeline.fleet.checks import fleet_state, predicted, replay
    from ridgeline.fleet.request_log import read_log

    target, requests = _target(arguments), read_log(arguments.log)

    async def ask() -> "tuple[Traffic | None, list[Replayed]]":
        state = await fleet_state(target)
        found = await replay(target, requests, speed=arguments.speed)
        return predicted(state, requests, speed=arguments.speed), found

    with status_line("asking again"):
        traffic, found = asyncio.run(ask())
    report: dict[str, Any] = {
        "requests": len(requests),
        "asked": len(found),
        "same": sum(each.is_same is True for each in found),
        "other": sum(each.is_same is False for each in found),
        "failed": sum(each.seconds is None for each in found),
        "seconds": _quantiles([each.seconds for each in found]),
        "ttft_s": _quantiles([each.ttft_s for each in found]),
        "logged_seconds": _quantiles([each.seconds for each in requests]),
        "predicted_seconds": None,
        "predicted_ttft_s": None,
    }
    if traffic is not None:
        timings = [each.timings for each in traffic.answers]
        report["predicted_seconds"] = _quantiles([each.end_to_end_s for each in timings])
        report["predicted_ttft_s"] = _quantiles([each.ttft_s for each in timings])
    _show(arguments, report, _print_replayed)
    return 1 if report["other"] or report["failed"] or not report["asked"] else 0


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    from ridgeline.roofline.metrics import shown_percentiles

    return shown_percentiles([each for each in values if each is not None])


def _print_replayed(report: dict[str, Any]) -> None:
    console = output_console()
    asked, left = report["asked"], report["asked"] - report["same"] - report["other"]
    text = f"{report['requests']} requests, {asked} asked again: {report['same']} the same answer"
    text += f", {report['other']} others, {left - report['failed']} not to be compared"
    text += f", {report['failed']} without an answer."
    if not asked:
        text += " The log has no text: `router: {request_log_text: true}` keeps it."
    print_paragraph(console, text, indent=2)
    if report["predicted_seconds"] is None:
        text = "No seconds are predicted: `ridgeline roofline --calibrate -t N`, with the number "
        text += "of an engine's processors, makes a prediction."
        print_paragraph(console, text, indent=2)
    rows = [
        (label, *(f"{1e3 * seconds[share]:,.0f}" for share in ("p50", "p90")))
        for label, name in (
            ("to the end, predicted", "predicted_seconds"),
            ("measured now", "seconds"),
            ("in the log", "logged_seconds"),
            ("to the first token, predicted", "predicted_ttft_s"),
            ("measured now, of streams", "ttft_s"),
        )
        if (seconds := report[name])
    ]
    if rows:
        print_columns(console, ("ms", "p50", "p90"), rows)

"""The docs page of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

_BASELINES = {
    "roofline": "the roofline alone",
    "constant": "one efficiency for everything",
    "affine": "an affine fit of the roofline",
}
_WORST = 10


def page(result: Mapping[str, Any]) -> str:
    """Markdown: what was held and what was not, in the order of the bars."""
    parts = (_head, _steps, _baselines, _models, _kinds, _speed_ups, _ttft, _checks, _worst)
    return "\n".join(line for part in parts for line in part(result)) + "\n"


def _head(result: Mapping[str, Any]) -> list[str]:
    calibrated, unseen = result["calibrated"], result["unseen"]
    lines = [
        "# How honest the predictions are",
        "",
        f"Made by `make bench-honesty` on {result['created'][:10]}: {result['machine']}, "
        f"{result['executor']} executor, {result['seconds']:.0f} s. A measurement is the median "
        "of the fastest of several visits, since neighbours on the machine and its host only ever "
        "add. Failures are kept.",
        "",
        f"Calibrated on {calibrated['count']} steps of the shapes "
        f"{', '.join(calibrated['shapes'])} in {', '.join(calibrated['formats'])}; never on the "
        f"shapes {' and '.join(unseen['shapes'])}, nor on {unseen['format']}. "
        f"{result['count']} configurations were tested.",
        "",
    ]
    if result["replayed"]:
        lines += [
            "The fit has changed since: this page was made again from that run's measurements.",
            "",
        ]
    else:
        lines += ["Predictions were written to a file before what they are about was measured.", ""]
    if result["contended"]:
        lines += [
            "**Other processes used the processors during this run; its errors include theirs.**",
            "",
        ]
    return lines


def _steps(result: Mapping[str, Any]) -> list[str]:
    lines = [
        *_step_table(result["steps"]),
        "",
        "Bars: decode 8 % in the median and 20 % at p90, prefill 10 % and 25 %; intervals that "
        "hold 70 to 90 %; half the error of the roofline alone, and less than that of the two fits "
        "below.",
        "",
    ]
    if not result["drift"]:
        return lines
    took = " and ".join(f"{ratio:.2f} ({phase})" for phase, ratio in result["drift"].items())
    return [
        *lines,
        "The machine's own speed moves within a run. Steps of the calibration that were measured "
        f"again in turns with the tests took {took} of the seconds of before. With every "
        "prediction times that, as a running engine corrects its own by the steps that it sees:",
        "",
        *_step_table(result["corrected"]),
        "",
    ]


def _step_table(steps: Mapping[str, Any]) -> list[str]:
    lines = [
        "| steps | count | median error | p90 | worst | in the 80 % interval | bars held |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase, each in steps.items():
        lines.append(
            f"| {phase} | {each['count']} | {each['median']:.1%} | {each['p90']:.1%} | "
            f"{each['worst']:.0%} ({each['worst_case']}) | {each['covered']:.0%} | "
            f"{_held(each['held'])} |"
        )
    return lines


def _baselines(result: Mapping[str, Any]) -> list[str]:
    phases = list(result["steps"])
    lines = [f"| median error of | {' | '.join(phases)} |", f"|---|{'---|' * len(phases)}"]
    lines.append(f"| Ridgeline | {_row(result, phases, lambda each: each['median'])} |")
    for name, label in _BASELINES.items():
        cells = _row(result, phases, lambda each, name=name: each["baselines"][name])
        lines.append(f"| {label} | {cells} |")
    return [*lines, ""]


def _row(result: Mapping[str, Any], phases: Sequence[str], value: Any) -> str:
    return " | ".join(f"{value(result['steps'][phase]):.1%}" for phase in phases)


def _models(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model | seen? | decode: median, worst | prefill: median, worst |",
        "|---|---|---|---|",
    ]
    seen = result["calibrated"]
    for name, phases in result["by_model"].items():
        shape, form = name.split(" ")
        known = {"shape": shape in seen["shapes"], "format": form in seen["formats"]}
        new = [f"new {kind}" for kind, is_known in known.items() if not is_known]
        cells = [
            f"{phases[phase]['median']:.1%}, {phases[phase]['worst']:.1%}"
            if phase in phases
            else "–"
            for phase in ("decode", "prefill")
        ]
        lines.append(f"| {name} | {' and '.join(new) or 'other steps'} | {cells[0]} | {cells[1]} |")
    return [*lines, ""]


def _unmeasured(result: Mapping[str, Any]) -> list[str]:
    """What no step of this run was."""
    cells = {
        "steps that mix prefill and decode": "mixed" in result["by_kind"],
        "verification of drafts": "verification" in result["by_kind"],
        "mixtures of experts": any(name.startswith("experts ") for name in result["by_model"]),
        "int3": any(name.endswith(" int3") for name in result["by_model"]),
    }
    missing = [name for name, is_measured in cells.items() if not is_measured]
    return [*missing, "trees of drafts", "adapters", "the regret of a choice of settings"]


def _kinds(result: Mapping[str, Any]) -> list[str]:
    """Steps that are counted above by their phase, and are more than that."""
    if not result["by_kind"]:
        return []
    lines = [
        "| of these | count | median error | worst | in the 80 % interval |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {kind} | {each['count']} | {each['median']:.1%} | {each['worst']:.0%} "
        f"| {each['covered']:.0%} |"
        for kind, each in result["by_kind"].items()
    ]
    return [*lines, ""]


def _speed_ups(result: Mapping[str, Any]) -> list[str]:
    speed = result["speed_ups"]
    if not speed:
        return []
    sign = "–" if speed["sign_right"] is None else f"{speed['sign_right']:.0%}"
    return [
        f"Speed-up of a change of format, {speed['count']} pairs: median error "
        f"{speed['median']:.1%}, sign right in {sign} of those beyond 5 %: "
        f"{_held(speed['held'])}.",
        "",
    ]


def _ttft(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "Mean TTFT of the simulation and of the real engine on the same trace, the fastest of "
        f"{max((len(each['visits_s']) for each in result['ttft']), default=0)} visits. Corrected: "
        "simulated at the speed at which the machine ran steps of the calibration between them.",
        "",
        "| load | requests | predicted s | measured s | error | held to 20 % | corrected | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in result["ttft"]:
        corrected = "– | –"
        if each["corrected_s"] is not None:
            corrected = f"{each['corrected_s']:.3f} | {each['corrected_error']:.0%}"
        lines.append(
            f"| {each['load']:.0%} | {each['requests']} | {each['predicted_s']:.3f} | "
            f"{each['measured_s']:.3f} | {each['error']:.0%} | {_yes(each['held'])} | {corrected} |"
        )
    return [*lines, ""]


def _checks(result: Mapping[str, Any]) -> list[str]:
    wins = result["a_a"]
    lines = [
        f"A/A: of {wins['count']} steps, each measured twice in turn, {wins['false']} looked "
        "different: by more than 5 %, and with no visit of the one among those of the other "
        f"({'held' if wins['held'] else 'not held'}: at most 5 %).",
        "",
        "Measured ÷ claimed seconds of lies that were planted, ÷ the same of nothing planted; of "
        "that, ÷ what steps of the calibration took between them ÷ what they took before:",
        "",
        "| planted | ratio | as it must be |",
        "|---|---|---|",
    ]
    for name, each in result["lies"].items():
        lines.append(f"| {name} | {each['ratio']:.2f} | {_yes(each['held'])} |")
    claimed = result["memory"]["claimed"]
    shares = [rate / claimed for rate in result["memory"]["rounds"]]
    return [
        *lines,
        "",
        f"Main memory's rate, measured again before each round, was {min(shares):.0%} to "
        f"{max(shares):.0%} of the best one of the calibration.",
        "",
        f"Not measured: {', '.join(_unmeasured(result))}.",
        "",
    ]


def _worst(result: Mapping[str, Any]) -> list[str]:
    ordered = sorted(result["outcomes"], key=lambda each: each["error"], reverse=True)
    lines = [
        "The worst predictions:",
        "",
        "| step | predicted ms | measured ms | error |",
        "|---|---|---|---|",
    ]
    for each in ordered[:_WORST]:
        lines.append(
            f"| {each['case']} | {each['predicted_s'] * 1e3:.2f} | "
            f"{each['measured_s'] * 1e3:.2f} | {each['error']:.0%} |"
        )
    return lines


def _held(bars: Mapping[str, bool]) -> str:
    missed = [name for name, held in bars.items() if not held]
    return "all" if not missed else f"not {', '.join(missed)}"


def _yes(held: bool) -> str:
    return "yes" if held else "**no**"

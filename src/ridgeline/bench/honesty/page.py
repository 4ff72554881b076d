"""The docs page of a run."""

from collections.abc import Mapping
from typing import Any


def page(result: Mapping[str, Any]) -> str:
    """Markdown: what was held and what was not, in the order of the bars."""
    lines = [
        "# How honest the predictions are",
        "",
        f"Made by `make bench-honesty` on {result['created'][:10]}: {result['machine']}, "
        f"{result['executor']} executor, {result['seconds']:.0f} s. Predictions were written to a "
        "file before anything of the test set was measured. A measurement is the lower quartile of "
        "at least three steps. Failures are kept.",
        "",
        f"Calibrated on {', '.join(result['calibrated']['shapes'])} in "
        f"{', '.join(result['calibrated']['formats'])}; never on the shapes "
        f"{', '.join(result['unseen']['shapes'])} nor on {result['unseen']['format']}. "
        f"{result['count']} configurations.",
        "",
    ]
    if result["contended"]:
        lines += [
            "**Other processes used the processors during this run; its errors include theirs.**",
            "",
        ]
    lines += [
        "| steps | count | median error | p90 | worst | in the 80 % interval | bars held |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase, each in result["steps"].items():
        lines.append(
            f"| {phase} | {each['count']} | {each['median']:.1%} | {each['p90']:.1%} | "
            f"{each['worst']:.0%} ({each['worst_case']}) | {each['covered']:.0%} | "
            f"{_held(each['held'])} |"
        )
    lines += ["", "| median error of | decode | prefill |", "|---|---|---|"]
    names = {
        "roofline": "the roofline alone",
        "constant": "one efficiency for everything",
        "affine": "an affine fit of the roofline",
    }
    for name, label in names.items():
        cells = [
            f"{result['steps'][phase]['baselines'][name]:.0%}" if phase in result["steps"] else "–"
            for phase in ("decode", "prefill")
        ]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    speed = result["speed_ups"]
    if speed:
        lines += [
            "",
            f"Speed-up of a change of format, {speed['count']} pairs: median error "
            f"{speed['median']:.1%}, sign right in {speed['sign_right']:.0%} of those beyond "
            f"5 %: {_held(speed['held'])}.",
        ]
    lines += ["", "| mean TTFT at load | predicted s | measured s | error | within 20 % |"]
    lines += ["|---|---|---|---|---|"]
    for each in result["ttft"]:
        lines.append(
            f"| {each['load']:.0%} | {each['predicted_s']:.3f} | {each['measured_s']:.3f} | "
            f"{each['error']:.0%} | {'yes' if each['held'] else 'no'} |"
        )
    wins = result["a_a"]
    lines += [
        "",
        f"A/A: {wins['false']} of {wins['count']} repeated measurements looked like a difference "
        f"of more than 5 % ({'held' if wins['held'] else 'not held'}: at most 5 %).",
        "",
        "| planted | measured ÷ claimed | as it must be |",
        "|---|---|---|",
    ]
    for name, each in result["lies"].items():
        lines.append(f"| {name} | {each['ratio']:.2f} | {'yes' if each['held'] else 'no'} |")
    drift = result["ceiling_drift"]
    lines += ["", f"Main memory's bandwidth at the end was {drift:.0%} of that at the start.", ""]
    return "\n".join(lines)


def _held(bars: Mapping[str, bool]) -> str:
    missed = [name for name, held in bars.items() if not held]
    return "all" if not missed else f"not {', '.join(missed)}"

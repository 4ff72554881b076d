"""What was found, as plain values: the JSON, the sentence, and the file of settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import exp
from typing import Any

from ridgeline.core.settings.reading import changed_settings
from ridgeline.optimize.measuring import Visit
from ridgeline.optimize.objective import Objective
from ridgeline.optimize.proof import Ratio
from ridgeline.optimize.screening import CandidatePredictor
from ridgeline.optimize.space import DEFAULT, Candidate
from ridgeline.optimize.task import Change, Found
from ridgeline.planning.cost import usd_per_million_tokens
from ridgeline.roofline.calibration import describe
from ridgeline.roofline.history import past_errors, past_sentences
from ridgeline.roofline.history import read as read_history
from ridgeline.roofline.metrics import percentile

_CDF_POINTS = 101
_80 = 1.2816  # deviations on each side of an 80 % interval
_EFFORT = {"restart": "a flag and a restart", "repack": "a restart that packs the weights anew"}
_STAGES = ("proof", "race", "steps")


def to_json(
    found: Found,
    predictor: CandidatePredictor,
    *,
    model: str,
    executor: str,
    commands: Mapping[str, str],
    conditions: Mapping[str, Any],
    usd_per_hour: float | None = None,
) -> dict[str, Any]:
    """Everything that the report says, of plain values."""
    task, winner = found.task, found.winner
    result: dict[str, Any] = {
        "model": model,
        "executor": executor,
        "workload": task.workload,
        "requests": len(found.arrivals),
        "rate_rps": None if task.trace else found.rate_rps,
        "offered_rps": _offered_rps(found),
        "slo": task.slo.limits,
        "objective": task.objective.value,
        "unit": task.objective.unit,
        "quality_limits": str(task.quality),
        "budget_s": task.budget_s,
        "spent_s": found.spent_s,
        "winner": _settings(winner),
        "model_settings": {
            name: value for name, value in changed_settings(task.base).items() if name != "model"
        },
        "ratio": _ratio(found.ratios.get(winner)),
        "same": _ratio(found.same),
        "challengers": [
            {"label": each.label, **(_ratio(ratio) or {})} for each, ratio in found.ratios.items()
        ],
        "level": found.level,
        "risk": found.risk,
        "num_points": found.screened.num_points,
        "num_simulated": found.screened.num_simulated,
        "num_too_large": found.screened.num_too_large,
        "sides": {
            name: _side(found, predictor, each, usd_per_hour)
            for name, each in (("default", DEFAULT), ("winner", winner))
        },
        "waterfall": [_step(found, step) for step in found.steps],
        "points": [_point(found, predictor, each) for each in found.estimates],
        "roof": _roof(predictor),
        "calibration": describe(predictor.calibration),
        "past_runs": _past(executor),
        "past_errors": past_sentences(past_errors(executor)),
        "conditions": dict(conditions),
        "commands": dict(commands),
    }
    return result | {"verdict": verdict(result), "notes": _notes(found, result)}


def verdict(result: Mapping[str, Any]) -> str:
    """The answer in a sentence or two."""
    default, winner, ratio = result["sides"]["default"], result["sides"]["winner"], result["ratio"]
    if not result["winner"]:
        return f"Keep the default settings: {_why_default(result)}"
    changes = ", ".join(f"{name} {_said(value)}" for name, value in result["winner"].items())
    quality = winner["quality"]
    if quality is None:
        cost = "" if result["quality_limits"] != "none" else "; quality was not asked for"
        cost = cost or "; answers stay what they were"
    else:
        cost = (
            f"; the same most likely token as the unquantized model in {quality['same_top']:.1%} "
            f"of cases (KL {quality['kl']:.2g})"
        )
    if result["objective"] == Objective.MEMORY:
        saved = 1 - winner["memory_bytes"] / default["memory_bytes"]
        return (
            f"Set {changes}: {saved:.0%} less memory for weights and KV "
            f"({default['memory_bytes'] / 1e9:.2f} → {winner['memory_bytes'] / 1e9:.2f} GB) at "
            f"{ratio['value']:.2f} times the goodput (95 % interval {ratio['low']:.2f} to "
            f"{ratio['high']:.2f}){cost}."
        )
    return (
        f"Set {changes}: {winner['shown']} instead of {default['shown']}, {_gain(ratio)}, measured "
        f"in {ratio['num_turns']} turns{cost}."
    )


def settings_yaml(result: Mapping[str, Any]) -> str:
    """For ``ridgeline serve --config``: the model, what was given, and what is changed."""
    settings = {} if result["model"] == "embedded" else {"model": result["model"]}
    settings |= result["model_settings"] | result["winner"]
    told = (result["verdict"], f"made by {result['commands']['again']}")
    lines = [f"# {' '.join(line.splitlines())}" for line in told]
    lines += [f"{name}: {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _why_default(result: Mapping[str, Any]) -> str:
    if not result["challengers"]:
        best = max(
            (point for point in result["points"] if point["num_pairs"]),
            key=lambda point: point["believed"],
            default=None,
        )
        if best is None:
            return "nothing is predicted to be better."
        return (
            f"nothing looked better; the best that was measured, {best['label']}, reaches × "
            f"{best['believed']:.2f} ({best['low']:.2f} to {best['high']:.2f})."
        )
    first = max(result["challengers"], key=lambda each: each["value"])
    return (
        f"nothing was proven to be better; {first['label']} reaches × {first['value']:.2f} (95 % "
        f"interval {first['low']:.2f} to {first['high']:.2f}) in {first['num_turns']} turns."
    )


def _gain(ratio: Mapping[str, Any]) -> str:
    value, low, high = (ratio[name] - 1 for name in ("value", "low", "high"))
    return f"{value:+.0%} (95 % interval {low:+.0%} to {high:+.0%})"


def _said(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _settings(candidate: Candidate) -> dict[str, Any]:
    return dict(candidate.changes)


def _ratio(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else asdict(ratio)


def _offered_rps(found: Found) -> float | None:
    span_s = found.arrivals[-1].arrival_s - found.arrivals[0].arrival_s
    return (len(found.arrivals) - 1) / span_s if span_s else None


def _side(
    found: Found, predictor: CandidatePredictor, candidate: Candidate, usd_per_hour: float | None
) -> dict[str, Any]:
    """The default's or the winner's figures of the proof, or of the race where there was none."""
    task = found.task
    stages = ("proof",) if found.outcomes(candidate, "proof") else _STAGES
    visits = [
        each.visit for each in found.visits if each.candidate == candidate and each.stage in stages
    ]
    outcomes = [each for visit in visits for each in visit.outcomes]
    measured = found.measured(candidate, *stages)
    quality = found.qualities.get(Candidate(candidate.formats))
    tokens_s = _rate(visits, lambda each: float(each.output_tokens))
    return {
        "label": candidate.label,
        "measured": measured,
        "shown": _shown(task.objective, measured),
        "num_visits": len(visits),
        "good_share": sum(each.is_good(task.slo) for each in outcomes) / max(1, len(outcomes)),
        "output_tok_s": tokens_s,
        "usd_per_1m_output": (
            usd_per_million_tokens(usd_per_hour, tokens_s) if usd_per_hour and tokens_s else None
        ),
        "ttft_s": _cdf([each.ttft_s for each in outcomes if each.ttft_s is not None]),
        "tpot_s": _cdf([each.tpot_s for each in outcomes if each.tpot_s is not None]),
        "end_to_end_s": _cdf([each.end_to_end_s for each in outcomes if each.ttft_s is not None]),
        "memory_bytes": predictor.memory_bytes(candidate),
        "quality": None if quality is None or not candidate.formats else asdict(quality),
        "utilization": _utilization(visits),
    }


def _shown(objective: Objective, measured: float | None) -> str:
    """The value in the words in which one thinks of it."""
    if measured is None:
        return "not measured"
    if objective is Objective.LATENCY:
        return f"{1e3 / measured:,.0f} ms from arrival to end"
    return f"{measured:,.3g} {objective.unit}"


def _step(found: Found, step: Change) -> dict[str, Any]:
    """What a change adds: of the only one what was proven, with its 95 % interval, else what is
    believed after all pairs, with 80 %."""
    factor = exp(step.believed)
    low, high = (exp(step.believed + sign * _80 * step.deviation) for sign in (-1, 1))
    if len(found.steps) == 1:
        ratio = found.ratios[found.winner]
        factor, low, high = ratio.value, ratio.low, ratio.high
    return {
        "setting": step.name,
        "value": step.value,
        "predicted": exp(step.predicted),
        "factor": factor,
        "low": low,
        "high": high,
        "is_measured": step.is_measured,
        "predicted_alone_last": exp(step.predicted_alone_last),
        "effort": _EFFORT[found.task.space.effort(step.name)],
    }


def _rate(visits: Sequence[Visit], count: Any) -> float:
    seconds = sum(max(each.done_s for each in visit.outcomes) for visit in visits)
    total = sum(count(each) for visit in visits for each in visit.outcomes if each.ttft_s)
    return total / seconds if seconds else 0.0


def _cdf(values: Sequence[float]) -> list[float]:
    """The percentiles from 0 to 100; empty without values."""
    ordered = sorted(values)
    shares = (number / (_CDF_POINTS - 1) for number in range(_CDF_POINTS))
    return [percentile(ordered, share) for share in shares] if ordered else []


def _utilization(visits: Sequence[Visit]) -> dict[str, dict[str, float]]:
    """What each phase did a second, and for a byte, of all visits."""
    found = {}
    for phase in ("prefill", "decode"):
        uses = [visit.utilization[phase] for visit in visits if phase in visit.utilization]
        seconds, flops, moved = (
            sum(use[name] for use in uses) for name in ("seconds", "useful_flops", "moved_bytes")
        )
        if seconds and moved:
            found[phase] = {
                "seconds": seconds,
                "flops_per_s": flops / seconds,
                "bytes_per_s": moved / seconds,
                "intensity": flops / moved,
            }
    return found


def _point(found: Found, predictor: CandidatePredictor, candidate: Candidate) -> dict[str, Any]:
    estimate, task = found.estimates[candidate], found.task
    priced = {each.candidate: each for each in found.screened.leaders}
    base = priced[DEFAULT].value
    twin = priced.get(candidate) or priced.get(candidate.without("speculation"))
    quality = found.qualities.get(Candidate(candidate.formats))
    accepted = [e.visit.acceptance for e in found.visits if e.candidate == candidate]
    shares = [share for share in accepted if share is not None]
    return {
        "label": candidate.label,
        "settings": _settings(candidate),
        "predicted": None if twin is None else twin.value / base,
        "predicted_value": None if twin is None else twin.value,
        "measured_value": found.measured(candidate),
        "believed": exp(estimate.mean),
        "low": exp(estimate.mean - _80 * estimate.deviation),
        "high": exp(estimate.mean + _80 * estimate.deviation),
        "num_pairs": estimate.num_pairs,
        "memory_bytes": predictor.memory_bytes(candidate),
        "kl": None if quality is None else quality.kl,
        "has_own_numbers": bool(candidate.formats),
        "acceptance": shares[-1] if shares else None,
        "rejected": found.rejected.get(candidate),
        "unit": task.objective.unit,
    }


def _roof(predictor: CandidatePredictor) -> dict[str, float]:
    ceilings = predictor.calibration.ceilings
    form = predictor.model(DEFAULT).main_product_format
    return {
        "flops_per_s": ceilings.peak_flops(form),
        "bytes_per_s": ceilings.memory.bytes_per_s,
    }


def _past(executor: str) -> list[dict[str, Any]]:
    runs = [run for run in read_history() if run.executor == executor]
    return [
        {"date": run.date, "prefill": run.prefill_error, "decode": run.decode_error}
        for run in runs[-40:]
    ]


def _notes(found: Found, result: Mapping[str, Any]) -> list[str]:
    task, notes = found.task, []
    default = result["sides"]["default"]
    if task.trace and len(found.arrivals) < len(task.trace):
        notes.append(
            f"Measured on the first {len(found.arrivals)} of the trace's {len(task.trace)} "
            "requests: a longer --budget takes more of it."
        )
    if task.objective is Objective.GOODPUT and not task.slo.is_set:
        notes.append("Without --slo every answer is a good one.")
    if default["good_share"] == 1.0 and task.slo.is_set and task.rate_rps is not None:
        notes.append(
            "The default already answers every request within the limits: goodput cannot grow at "
            "this rate. --objective latency or cost, or another --rate, may show differences."
        )
    elif default["good_share"] == 1.0 and task.trace:
        notes.append(
            "The default already answers the whole trace within the limits: its goodput cannot "
            "grow. --objective latency, cost or memory may show differences."
        )
    if result["conditions"].get("contended"):
        share = result["conditions"]["others_share"]
        notes.append(
            f"Other processes took {share:.0%} of the processors meanwhile. Comparisons are of "
            "turns beside each other; the figures themselves are lower than on an idle machine."
        )
    if not task.quality.is_set:
        notes.append("Quality was not measured (--quality none).")
    errors = {each.visit.first_error for each in found.visits if each.visit.first_error}
    notes += [f"Requests failed, and count as not good: {error}" for error in sorted(errors)[:3]]
    if found.risk >= 0.05 and task.objective is not Objective.MEMORY:
        notes.append(
            f"The budget ended before the choice was safe: with a probability of {found.risk:.0%} "
            "another candidate is more than 5 % better. A longer --budget measures more."
        )
    return notes

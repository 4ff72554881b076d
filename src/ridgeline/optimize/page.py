"""The report of a run: what to change, what it buys, what it costs, and how sure that is."""

from collections.abc import Mapping
from typing import Any

from ridgeline.optimize.objective import Objective
from ridgeline.report import Axes, Bar, Line, Mark, Page, Tile, cdf, plot, waterfall

Result = Mapping[str, Any]
_PHASES = ("prefill", "decode")


def page(result: Result) -> str:
    """One HTML file, of what `to_json` gives."""
    report = Page(
        title=f"{result['model']}: settings for {result['workload']}",
        subtitle=(
            f"ridgeline optimize on {result['conditions'].get('cpu', 'this machine')}, "
            f"{result['conditions'].get('cores', '?')} cores, "
            f"{str(result['conditions'].get('date', ''))[:10]}; {_minutes(result['spent_s'])} of "
            "predicting and measuring"
        ),
        verdict=result["verdict"],
        data=result,
    )
    report.add_tiles(_tiles(result))
    report.add_code(result["commands"]["serve"])
    report.add_heading("How sure that is")
    report.add_list(_surety(result))
    _add_changes(report, result)
    _add_choice(report, result)
    _add_latency(report, result)
    _add_roofline(report, result)
    _add_honesty(report, result)
    _add_points(report, result)
    report.add_heading("Conditions")
    report.add_list(_conditions(result))
    report.add_heading("Commands", "Make this report again.")
    report.add_code(result["commands"]["again"])
    return report.to_html()


def _tiles(result: Result) -> list[Tile]:
    default, winner, ratio = result["sides"]["default"], result["sides"]["winner"], result["ratio"]
    if ratio is None:
        value = default["shown"]
        tiles = [Tile(name="default", value=value, note="which nothing was proven to beat")]
    else:
        tiles = [
            Tile(
                name=_name(result),
                value=f"× {ratio['value']:.2f}",
                note=f"95 % interval × {ratio['low']:.2f} to {ratio['high']:.2f}, "
                f"{ratio['num_turns']} turns",
            ),
            Tile(name="recommended", value=winner["shown"], note=f"default: {default['shown']}"),
        ]
    quality = winner["quality"]
    if quality is None:
        is_same = not any(name in ("quantization", "kv_cache_dtype") for name in result["winner"])
        tiles.append(
            Tile(
                name="quality",
                value="unchanged" if is_same else "not measured",
                note="the same numbers are computed" if is_same else "--quality none",
            )
        )
    else:
        tiles.append(
            Tile(
                name="same most likely token",
                value=f"{quality['same_top']:.1%}",
                note=f"KL {quality['kl']:.2g} nats to the unquantized model; asked for "
                f"{result['quality_limits']}",
            )
        )
    saved = winner["memory_bytes"] / default["memory_bytes"] - 1
    tiles.append(
        Tile(
            name="weights and KV pool",
            value=f"{winner['memory_bytes'] / 1e9:.2f} GB",
            note="as the default" if abs(saved) < 0.005 else f"{saved:+.0%} to the default",
        )
    )
    if winner["usd_per_1m_output"]:
        was = default["usd_per_1m_output"]
        note = f"default: ${was:.3g}" if was else ""
        tiles.append(
            Tile(name="1M output tokens", value=f"${winner['usd_per_1m_output']:.3g}", note=note)
        )
    return tiles


def _name(result: Result) -> str:
    return {
        Objective.GOODPUT: "answers in time",
        Objective.COST: "tokens for the same money",
        Objective.LATENCY: "speed of an answer",
        Objective.MEMORY: "answers in time",
    }[Objective(result["objective"])]


def _add_changes(report: Page, result: Result) -> None:
    if not result["waterfall"]:
        return
    report.add_heading(
        "What each change buys",
        "From the default, one change after another. Bars end at what is believed after all "
        "measurements, with 80 % intervals; the grey tick is what was predicted before.",
    )
    bars = [Bar(label="default", begin=0.0, end=1.0, text="× 1", tone="quiet")]
    at = predicted = 1.0
    for step in result["waterfall"]:
        end = at * step["factor"]
        predicted *= step["predicted"]
        label = f"{step['setting']} {_said(step['value'])}"
        interval = None
        if len(result["waterfall"]) > 1:
            interval = (at * step["low"], at * step["high"])
        bars.append(
            Bar(
                label=label,
                begin=at,
                end=end,
                text=f"× {step['factor']:.2f}",
                tone="c" if end >= at else "b",
                interval=interval,
                beside=predicted,
            )
        )
        at = end
    ratio = result["ratio"]
    bars.append(
        Bar(
            label="all together, proven",
            begin=0.0,
            end=ratio["value"],
            text=f"× {ratio['value']:.2f}",
            interval=(ratio["low"], ratio["high"]),
        )
    )
    caption = f"{result['unit']}, times the default's"
    report.add_figures((caption, waterfall(bars, unit="times the default", title=caption)))
    rows = [
        (
            f"{step['setting']}: {_said(step['value'])}",
            f"× {step['factor']:.2f}",
            f"× {step['predicted']:.2f}",
            _without(step),
            "yes" if step["is_measured"] else "partly",
            step["effort"],
        )
        for step in result["waterfall"]
    ]
    header = ("change", "buys", "predicted", "without it (predicted)", "measured", "takes")
    report.add_table(header, rows)


def _without(step: Result) -> str:
    """What taking a change back alone would cost; nothing of what is not predicted."""
    cost = 1 / step["predicted_alone_last"] - 1
    return f"{cost:+.0%}" if cost else ""


def _add_choice(report: Page, result: Result) -> None:
    points = [each for each in result["points"] if each["num_pairs"] or not each["settings"]]
    measured = [each for each in points if each["measured_value"] is not None]
    if len(measured) < 2:
        return
    report.add_heading(
        "The choice",
        "Every candidate that was measured. To the left is closer to the unquantized model, above "
        "is better; vertical lines are 80 % intervals.",
    )
    marks = [
        Mark(
            x=each["kl"] if each["has_own_numbers"] and each["kl"] is not None else 0.0,
            y=each["believed"],
            tone=_tone(result, each),
            label=_pareto_label(result, each),
            title=f"{each['label']}: × {each['believed']:.2f}",
            bar=(each["low"], each["high"]) if each["settings"] else None,
        )
        for each in measured
    ]
    axes = Axes(x="KL to the unquantized model, nats", y="times the default", zero_x=True)
    memory = [
        Mark(
            x=each["memory_bytes"] / 1e9,
            y=each["believed"],
            tone=_tone(result, each),
            label=_pareto_label(result, each),
            title=f"{each['label']}: {each['memory_bytes'] / 1e9:.2f} GB",
        )
        for each in measured
    ]
    report.add_figures(
        (f"{result['unit']} against quality", plot(axes, marks=marks, title="Pareto")),
        (
            f"{result['unit']} against memory",
            plot(
                Axes(x="weights and KV pool, GB", y="times the default", zero_x=True),
                marks=memory,
                title="memory",
            ),
        ),
    )


def _pareto_label(result: Result, point: Result) -> str:
    if point["settings"] == result["winner"] and result["winner"]:
        return "recommended"
    return "default" if not point["settings"] else ""


def _tone(result: Result, point: Result) -> str:
    if point["settings"] == result["winner"] and result["winner"]:
        return "c"
    return "a" if not point["settings"] else "quiet"


def _add_latency(report: Page, result: Result) -> None:
    default, winner = result["sides"]["default"], result["sides"]["winner"]
    series = [("default", default, "a")]
    if result["winner"]:
        series.append(("recommended", winner, "c"))
    report.add_heading(
        "How long requests wait",
        "Shares of requests that got their first token, and their whole answer, within so many "
        "seconds of their arrival. Further left is better.",
    )
    limits = result["slo"]
    report.add_figures(
        *(
            (
                caption,
                cdf(
                    [(label, side[field], tone) for label, side, tone in series],
                    x=f"{caption}, seconds",
                    limit=limits.get(limit),
                ),
            )
            for caption, field, limit in (
                ("time to first token", "ttft_s", "ttft"),
                ("time from token to token", "tpot_s", "tpot"),
                ("time to the end of the answer", "end_to_end_s", "e2e"),
            )
        )
    )


def _add_roofline(report: Page, result: Result) -> None:
    roof, sides = result["roof"], result["sides"]
    marks = []
    names = (("default", "a"),) + ((("winner", "c"),) if result["winner"] else ())
    for name, tone in names:
        for phase, use in sides[name]["utilization"].items():
            label = f"{phase}, {'recommended' if name == 'winner' else name}"
            marks.append(
                Mark(x=use["intensity"], y=use["flops_per_s"] / 1e9, tone=tone, label=label)
            )
    if not marks:
        return
    peak, ridge = roof["flops_per_s"] / 1e9, roof["flops_per_s"] / roof["bytes_per_s"]
    xs = [mark.x for mark in marks]
    left, right = min([*xs, ridge]) / 2, max([*xs, ridge]) * 3
    line = [(left, left * roof["bytes_per_s"] / 1e9), (ridge, peak), (right, peak)]
    report.add_heading(
        "The machine's roof",
        "What the hardware allows from main memory, and where both settings ran under this load. "
        "Left of the bend memory limits, right of it arithmetic; data that stays in caches may "
        "lie above the slope.",
    )
    axes = Axes(x="FLOPs per byte", y="GFLOP/s", log_x=True, log_y=True)
    drawn = plot(
        axes,
        marks=marks,
        lines=[Line(points=line, tone="ink", label="")],
        title="roofline before and after",
    )
    rows = [
        (
            f"{phase}, {label}",
            f"{use['flops_per_s'] / 1e9:,.1f}",
            f"{use['flops_per_s'] / roof['flops_per_s']:.0%}",
            f"{use['bytes_per_s'] / 1e9:,.1f}",
            f"{use['bytes_per_s'] / roof['bytes_per_s']:.0%}",
        )
        for name, label in (("default", "default"), ("winner", "recommended"))
        if name == "default" or result["winner"]
        for phase in _PHASES
        if (use := sides[name]["utilization"].get(phase))
    ]
    report.add_figures(("before and after", drawn))
    header = ("phase", "GFLOP/s", "of the peak", "GB/s", "of main memory's")
    report.add_table(header, rows)


def _add_honesty(report: Page, result: Result) -> None:
    known = [
        each
        for each in result["points"]
        if each["predicted_value"] is not None and each["measured_value"] is not None
    ]
    if not known:
        return
    report.add_heading(
        "Predicted and measured",
        "On the line both agree. Predictions were made before these measurements, with the speed "
        f"of the machine corrected × {result['level']:.2f} by two visits of the default.",
    )
    marks = [
        Mark(
            x=each["predicted_value"],
            y=each["measured_value"],
            tone=_tone(result, each),
            label=_pareto_label(result, each),
            title=each["label"],
        )
        for each in known
    ]
    ends = [value for mark in marks for value in (mark.x, mark.y)]
    diagonal = [Line(points=[(each, each) for each in (min(ends), max(ends))], tone="quiet")]
    figures = [
        (
            f"{result['unit']} of what was measured",
            plot(
                Axes(x="predicted", y="measured", square=True),
                marks=marks,
                lines=diagonal,
                title="predicted and measured",
            ),
        )
    ]
    runs = result["past_runs"]
    past = [
        Mark(x=number + 1, y=100 * run[phase], tone=tone, title=f"{run['date'][:16]} {phase}")
        for number, run in enumerate(runs)
        for phase, tone in (("prefill", "b"), ("decode", "a"))
        if run[phase] is not None
    ]
    if len(past) > 2:
        figures.append(
            (
                "errors of predicted steps in past runs here, newest last: decode blue, prefill "
                "orange",
                plot(
                    Axes(x="run", y="median error, %", zero_y=True),
                    marks=past,
                    title="errors of past runs",
                ),
            )
        )
    report.add_figures(*figures)
    report.add_list(result["past_errors"])


def _add_points(report: Page, result: Result) -> None:
    report.add_heading(
        "All candidates",
        f"{result['num_points']:,} combinations, of which {result['num_simulated']:,} were "
        f"simulated by the engine's own scheduler and the {len(result['points'])} best are listed. "
        "Times the default's value; what was not measured is predicted, corrected by what was.",
    )
    order = sorted(result["points"], key=lambda each: -each["believed"])
    rows = [
        (
            each["label"],
            "" if each["predicted"] is None else f"{each['predicted']:.2f}",
            f"{each['believed']:.2f}",
            f"{each['low']:.2f} to {each['high']:.2f}",
            str(each["num_pairs"] or ""),
            "" if each["kl"] is None else f"{each['kl']:.2g}",
            f"{each['memory_bytes'] / 1e9:.2f}",
            each["rejected"] or "",
        )
        for each in order
    ]
    strong = [number for number, each in enumerate(order) if _pareto_label(result, each)]
    header = ("candidate", "predicted ×", "believed ×", "80 %", "pairs", "KL", "GB", "out because")
    report.add_table(header, rows, strong=strong)


def _conditions(result: Result) -> list[str]:
    conditions = result["conditions"]
    offered = result["offered_rps"]
    load = "all at once" if offered is None else f"{offered:.3g} a second on average"
    limits = ", ".join(f"{name.upper()} {1e3 * s:g} ms" for name, s in result["slo"].items())
    items = [
        f"Load: {result['workload']}, {result['requests']} requests in a visit, {load}; a good "
        f"answer: {limits or 'every one'}.",
        f"Objective: {result['objective']} ({result['unit']}); quality: "
        f"{result['quality_limits']}.",
        f"Executor {result['executor']}; {result['calibration']}.",
        f"{conditions.get('cpu')}, {conditions.get('threads')} threads; other processes took "
        f"{conditions.get('others_share', 0.0):.0%} of the processors meanwhile.",
    ]
    if result["rate_rps"] is not None and offered is not None:
        items.insert(
            1,
            "The rate rises from a quarter of what the default answers at most to seven quarters, "
            "so that every candidate meets the load at which it falls behind.",
        )
    return items


def _surety(result: Result) -> list[str]:
    """How far the verdict can be trusted."""
    items, same = [], result["same"]
    if same is not None:
        items.append(
            f"The default measured against itself in the same turns: × {same['value']:.2f} (95 % "
            f"interval {same['low']:.2f} to {same['high']:.2f})."
        )
    if result["risk"] < 0.05:
        items.append(
            f"That another candidate is more than 5 % better has a probability of "
            f"{result['risk']:.0%}."
        )
    return [*items, *result["notes"]]


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _said(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

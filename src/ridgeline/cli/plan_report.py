"""The answers of ``ridgeline plan``, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import output_console, predicted_range, print_paragraph
from ridgeline.roofline.slo import Slo

_WOULD_HELP = (
    "More devices (--count), fewer bits (--quantization int4) or shorter texts (--prompt, "
    "--output) may help."
)


def print_plan(result: Mapping[str, Any]) -> None:
    """The answer for people; the intervals hold eight times of ten."""
    console = output_console()
    replicas = f"{result['replicas']} × tensor-parallel {result['tensor_parallel']}"
    console.print(f"{result['model']} on {result['count']} × {result['hardware']} ({replicas})")
    console.print(
        f"  weights {result['weights_bytes'] / 1e9:.2f} GB in {result['weights_format']}, KV "
        f"{result['kv_bytes_per_token'] / 1e3:.1f} kB a token, activations of a step "
        f"{result['activation_bytes'] / 1e9:.2f} GB"
    )
    if not result["fits"]:
        print_paragraph(
            console,
            f"  does not fit: not one sequence of {result['sequence_tokens']:,} tokens has room "
            f"beside the weights on {result['tensor_parallel']} × {result['hardware']}. "
            + _WOULD_HELP,
            indent=4,
        )
        _print_notes(console, result["notes"])
        return
    console.print(
        f"  fits: {result['max_batch']:,} sequences of {result['sequence_tokens']:,} tokens, or "
        f"one of {result['max_context']:,} tokens"
    )
    _print_speed(console, result)
    _print_cost(console, result)
    _print_basis(console, result)
    _print_notes(console, result["notes"])


def _print_speed(console: Console, result: Mapping[str, Any]) -> None:
    intervals = result["interval_80"]
    bound = result["bound"]
    which = "alone" if result["load"] == "saturation" else "mean"
    for label, name, scale, unit in (
        (f"TTFT {which}", "ttft_s", 1e3, "ms"),
        (f"TPOT {which}", "tpot_s", 1e3, "ms"),
        ("output", "output_tok_s", 1, "tok/s"),
    ):
        if intervals[name] is None:
            continue
        low, high = intervals[name]
        shares = "".join(
            f", {share} {value * scale:.1f}"
            for share, value in result["percentiles"].get(name, {}).items()
        )
        console.print(
            f"  {label:<10} {result[name] * scale:9.1f} {unit:<6} "
            f"({predicted_range(low * scale, high * scale, '.1f')}){shares}"
        )
    loaded = f"  loaded  mean TPOT {_milliseconds(result['loaded_tpot_s'])} ms"
    if which == "mean":
        loaded += (
            f"; alone: TTFT {result['alone_ttft_s'] * 1e3:.1f} ms, "
            f"TPOT {_milliseconds(result['alone_tpot_s'])} ms"
        )
    console.print(loaded)
    console.print(f"  bound   prefill: {bound['prefill']}, decode: {bound['decode']}")
    print_paragraph(console, f"  load    {_goodput(result)}", indent=10)


def _print_cost(console: Console, result: Mapping[str, Any]) -> None:
    if result["usd_per_1m_output"] is not None:
        thousand = result["usd_per_1k_requests"]
        per_thousand = "–" if thousand is None else f"${thousand:.3f}"
        kind = "good requests" if any(result["slo"].values()) else "requests"
        console.print(
            f"  cost    ${result['usd_per_1m_output']:.3f} per 1M output tokens, "
            f"{per_thousand} per 1K {kind}, at ${result['usd_per_hour']:.2f} an hour"
        )
        _print_money(console, result)
    if result["power_w"] is not None:
        joules = result["joules_per_output_token_at_most"]
        per_token = "" if joules is None else f", so {joules:.3g} J per output token"
        print_paragraph(
            console,
            f"  power   at most {result['power_w']:,.0f} W by the datasheet{per_token}: an upper "
            "bound of the devices alone, not measured",
            indent=10,
        )


def _print_basis(console: Console, result: Mapping[str, Any]) -> None:
    """What the prediction rests on."""
    past = result["past_error"]["decode"]
    if result["measured"] and past["median"] is not None:
        console.print(
            f"  measured machine; past error of decode steps: median {past['median']:.0%}, "
            f"p90 {past['p90']:.0%} over {past['count']} steps",
            style="dim",
        )
    else:
        print_paragraph(
            console,
            "  not measured: datasheet and typical efficiencies of tuned engines, not of our cuda "
            "executor",
            indent=4,
            style="dim",
        )


def print_cheapest(plans: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> None:
    """The machines of the catalogue that hold a load, the cheapest first."""
    console = output_console()
    if not plans:
        print("No machine of the catalogue that has a price holds this load, up to eight devices.")
        _print_notes(console, notes)
        return
    table = Table("machine", "devices", "$/h", "TTFT s", "TPOT ms", "$/1M out", "meets SLO")
    for plan in plans:
        table.add_row(
            plan["hardware"],
            f"{plan['count']} (tp {plan['tensor_parallel']})",
            f"{plan['usd_per_hour']:.2f}",
            f"{plan['ttft_s']:.2f}",
            _milliseconds(plan["tpot_s"]),
            f"{plan['usd_per_1m_output']:.2f}",
            f"{plan['slo_attainment']:.0%}",
        )
    console.print(table)
    print_paragraph(
        console,
        "TTFT and TPOT are means. Predicted from datasheets and typical efficiencies of tuned "
        "engines, not measured.",
        indent=2,
        style="dim",
    )
    of_plans = (note for plan in plans for note in plan["notes"])
    _print_notes(console, list(dict.fromkeys([*notes, *of_plans])))


def print_layouts(result: Mapping[str, Any], count: int, hardware: str) -> None:
    """Layouts of a model on all devices, the one of the most tokens first."""
    console = output_console()
    console.print(f"layouts of {count} × {hardware}")
    table = Table(
        "layout", "TTFT ms", "TPOT ms", "at once", "TPOT then", "tok/s", "kB a token", "exchanges"
    )
    for each in result["layouts"]:
        if not each["fits"]:
            table.add_row(each["options"], *"–––––––")
            continue
        table.add_row(
            each["options"],
            _milliseconds(each["ttft_s"]),
            _milliseconds(each["alone_tpot_s"]),
            f"{each['batch']:,}" if each["batch"] else "–",
            _milliseconds(each["tpot_s"]),
            f"{each['output_tok_s']:,.0f}",
            f"{each['sent_bytes'] / 1e3:,.1f}",
            f"{each['exchanged_share']:.1%}",
        )
    by_name = {each["options"]: each for each in result["layouts"]}
    if result["best"] is None:
        print_paragraph(
            console,
            f"  none holds a sequence of this length beside the weights. {_WOULD_HELP}",
            indent=4,
        )
    else:
        best, fastest = by_name[result["best"]], by_name[result["fastest_alone"]]
        title = "best" if best["meets_slo"] else "none meets the limits; most tokens with"
        console.print(table)
        print_paragraph(
            console,
            f"  {title} {best['options']}: {best['output_tok_s']:,.0f} tok/s. A lone request "
            f"is fastest with {fastest['options']}: {_milliseconds(fastest['alone_tpot_s'])} ms a "
            "token",
            indent=4,
        )
        print_paragraph(
            console,
            "  TTFT and the first TPOT are of a lone request; kB are what all ranks of a replica "
            "send for a token that is decoded, exchanges are their share of that time",
            indent=4,
            style="dim",
        )
    refused = [
        f"Not possible: {', '.join(options)}. {why}" for why, options in result["refused"].items()
    ]
    _print_notes(console, [*refused, *result["notes"]])


def print_disaggregation(result: Mapping[str, Any], rate_rps: float | None) -> None:
    """Instances for prefill and for decode alone, and what moves between them."""
    ratio = result["ratio"]
    link_s = result["transfer_s"]
    sent = "" if link_s is None else f", {link_s * 1e3:.1f} ms on the link"
    best = f"{ratio['prefill']}:{ratio['decode']}"
    print(f"prefill:decode  {best}, of up to 8 instances the best for each of them")
    print(f"  prefill  {result['prefill_rps']:.2f} requests/s an instance within the TTFT")
    print(
        f"  decode   {result['decode_rps']:.2f} requests/s an instance within the TPOT, "
        f"{result['decode_batch']:,} at once"
    )
    print(f"  KV       {result['transfer_bytes'] / 1e6:,.1f} MB to move for a prompt{sent}")
    if result["instances"]:
        counts = result["instances"]
        print(
            f"  load     {rate_rps:g} requests/s: {counts['prefill']} for prefill, "
            f"{counts['decode']} for decode"
        )
    _print_notes(output_console(), result["notes"])


def print_placement(result: Mapping[str, Any], *, form: str, memory_share: float) -> None:
    """Which device holds which models; ``form`` is the format of their weights."""
    console = output_console()
    for device, names in result["devices"].items():
        console.print(f"{device}: {', '.join(names) or '(free)'}")
    if result["left_over"]:
        console.print(f"left over: {', '.join(result['left_over'])}")
    if result["usd_per_hour"] is not None:
        console.print(f"${result['usd_per_hour']:.2f} an hour")
    else:
        console.print("no price is known of all of these devices")
    console.print(
        f"weights in {form}, KV of one sequence each or of the load, in {memory_share:.0%} of the "
        "memory",
        style="dim",
    )
    _print_notes(console, result["notes"])


def _goodput(result: Mapping[str, Any]) -> str:
    """Requests that are answered in a second, and of them those that meet the limits, if any."""
    load = {
        "saturation": "with all of them sent at once",
        "trace": "of the trace",
        "poisson": f"of {result['rate_rps'] or 0.0:.2f} that arrive in a second",
    }[result["load"]]
    answered = f"{result['completed_rps']:.2f} requests/s are answered, {load}"
    if not result["keeps_up"]:
        answered += ": it does not keep up, and the longer it lasts the longer they wait"
    limits = [
        f"{name.upper()} up to {limit:g} s" for name, limit in Slo(**result["slo"]).limits.items()
    ]
    if not limits:
        return f"{answered}; how many are good needs limits (--slo)"
    return (
        f"{answered}; goodput {result['goodput_rps']:.2f}/s: {result['slo_attainment']:.0%} have "
        f"{' and '.join(limits)}"
    )


def _print_money(console: Console, result: Mapping[str, Any]) -> None:
    lines = []
    if "usd_per_1m_bytes" in result:
        lines.append(f"${result['usd_per_1m_bytes']:.3f} per 1M bytes of output")
    if "break_even_output_tok_s" in result:
        lines.append(_break_even(result))
    if "prompt_cache_bytes" in result:
        uses = result["cache_uses_to_pay_per_month"]
        pays = "" if uses is None else f": it pays from {uses:.3g} uses a month"
        lines.append(
            f"a prompt's KV kept: {result['prompt_cache_bytes'] / 1e6:,.1f} MB, "
            f"${result['prompt_cache_usd_per_month']:.2g} a month; computed anew "
            f"${result['prompt_prefill_usd']:.2g}{pays}"
        )
    for line in lines:
        print_paragraph(console, f"          {line}", indent=10)


def _break_even(result: Mapping[str, Any]) -> str:
    """Whether this load is worth a machine, and if not, whether any load could be."""
    needed, rate = result["break_even_output_tok_s"], result["output_tok_s"]
    if needed < rate:
        return (
            f"cheaper than the API: break-even at {needed:,.0f} output tok/s all the time, "
            f"{needed / rate:.0%} of what it answers"
        )
    text = f"dearer than the API: break-even would be {needed:,.0f} output tok/s all the time"
    if (most := result["most_output_tok_s"]) is None:
        return text
    if needed > most:
        return f"{text}, which it cannot reach: at most {most:,.0f}"
    return f"{text}; it answers {rate:,.0f} of at most {most:,.0f}"


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        print_paragraph(console, f"  note: {note}", indent=8)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"

"""A plan as one HTML file."""

from collections.abc import Mapping
from typing import Any

from ridgeline.report import Bar, Page, Tile, waterfall


def page(result: Mapping[str, Any]) -> str:
    """Of what ``ridgeline plan --json`` prints for one machine."""
    machine = f"{result['count']} × {result['hardware']}"
    shown = Page(
        title=f"{result['model']} on {machine}",
        subtitle=(
            "ridgeline plan: predicted, "
            + ("by a calibration of this machine" if result["measured"] else "not measured")
        ),
        verdict=_verdict(result, machine),
        data=result,
    )
    shown.add_tiles(_tiles(result))
    shown.add_heading("Memory", "What weights take, and what is left for K and V.")
    weights = result["weights_bytes"] / 1e9
    pool = max(0.0, result["kv_pool_bytes"] / 1e9)
    bars = [
        Bar(label="weights", begin=0.0, end=weights, text=f"{weights:.3g} GB"),
        Bar(label="KV pool", begin=weights, end=weights + pool, text=f"{pool:.3g} GB", tone="c"),
    ]
    caption = f"GB of a device's part, weights in {result['weights_format']}"
    shown.add_figures((caption, waterfall(bars, unit="GB", title="memory")))
    if result["fits"]:
        shown.add_heading("Predicted", "Intervals hold the measured value eight times of ten.")
        shown.add_table(("", "predicted", "80 %"), _rows(result))
    notes = list(result["notes"])
    if not result["measured"]:
        notes.append("Datasheets and typical efficiencies of tuned engines, not our cuda executor.")
    shown.add_heading("What must be known")
    shown.add_list(notes)
    return shown.to_html()


def _verdict(result: Mapping[str, Any], machine: str) -> str:
    if not result["fits"]:
        return f"It does not fit {machine}: not one sequence of this length has room."
    if result["load"] == "saturation":
        return (
            f"{machine} answers {result['completed_rps']:.3g} requests, "
            f"{result['output_tok_s']:,.0f} output tokens a second at the most."
        )
    keeps = "keeps up with" if result["keeps_up"] else "falls behind"
    share = result["slo_attainment"]
    limits = f"; {share:.0%} of the requests keep the limits" if any(result["slo"].values()) else ""
    return f"{machine} {keeps} this load{limits}."


def _tiles(result: Mapping[str, Any]) -> list[Tile]:
    if not result["fits"]:
        return [Tile(name="weights", value=f"{result['weights_bytes'] / 1e9:.2f} GB")]
    tiles = [
        Tile(
            name="fits",
            value=f"{result['max_batch']:,} sequences",
            note=f"or one of {result['max_context']:,} tokens",
        ),
        Tile(name="first token", value=f"{1e3 * result['ttft_s']:,.3g} ms"),
        Tile(name="output", value=f"{result['output_tok_s']:,.0f} tok/s"),
    ]
    if result["usd_per_1m_output"] is not None:
        note = f"at ${result['usd_per_hour']:.2f} an hour"
        usd = f"${result['usd_per_1m_output']:.3g}"
        tiles.append(Tile(name="1M output tokens", value=usd, note=note))
    return tiles


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for label, name, scale, unit in (
        ("time to first token", "ttft_s", 1e3, "ms"),
        ("time from token to token", "tpot_s", 1e3, "ms"),
        ("output", "output_tok_s", 1.0, "tok/s"),
    ):
        interval = result["interval_80"][name]
        if interval is None or result[name] is None:
            continue
        low, high = (scale * each for each in interval)
        rows.append((label, f"{scale * result[name]:,.3g} {unit}", f"{low:,.3g} to {high:,.3g}"))
    bound = result["bound"]
    rows.append(("bound of prefill, decode", bound["prefill"], bound["decode"]))
    return rows

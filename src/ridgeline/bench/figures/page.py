"""The page on published figures, in Markdown, from what `reproduce` found."""

from collections.abc import Iterator, Mapping
from typing import Any


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    rows = found["figures"]
    answered = [row for row in rows if row["ours"] is not None]
    counts = {
        verdict: sum(row["verdict"] == verdict for row in answered)
        for verdict in ("as published", "more", "less")
    }
    yield "# Published figures, and ours"
    yield ""
    yield (
        f"Made by `ridgeline bench figures` on {found['date'][:10]}: {found['machine']}, "
        f"{found['cores']} cores, Ridgeline {found['version']}. Of {len(rows)} published figures "
        f"{len(answered)} were run: {counts['as published']} came as published (within the bounds, "
        f"or a tenth of them), {counts['more']} larger, {counts['less']} smaller. Larger is not "
        "always better. Ratios are of this machine and of small models; the published ones are "
        "mostly of GPUs and large models, and the notes say what differs."
    )
    busy = max((row["others_share"] for row in answered), default=0.0)
    if busy > 0.05:
        yield ""
        yield (
            f"Other processes took up to {busy:.0%} of the processors while a figure was measured "
            "(the column says how much): both sides of a ratio suffer, not always equally."
        )
    yield ""
    yield "| row | what | published | ours | | by | others |"
    yield "|---|---|---|---|---|---|---|"
    for row in answered:
        commands = "<br>".join(f"`{command}`" for command in row["commands"]) or "the library"
        what = f"{row['what']}. {row['note']}" if row["note"] else row["what"]
        others = f"{row['others_share']:.0%}" if row["seconds"] >= 10 else ""
        yield (
            f"| {row['row']} | {what} | {published(row)} | {amount(row['ours'], row['unit'])} "
            f"| {row['verdict']} | {commands} | {others} |"
        )
    yield ""
    yield "## Not reproduced here"
    yield ""
    yield "| row | what | published | why |"
    yield "|---|---|---|---|"
    for row in rows:
        if row["ours"] is None:
            yield f"| {row['row']} | {row['what']} | {published(row)} | {row['why_not']} |"


def published(row: Mapping[str, Any]) -> str:
    """As it was put, or its bounds."""
    if row["published"]:
        return str(row["published"])
    low, high = row["low"], row["high"]
    text = amount(high, row["unit"])
    return text if low == high else f"{_number(low)} to {text}"


def amount(value: float, unit: str) -> str:
    """A figure of three digits, or of all before the point, with its unit."""
    return f"${_number(value)}" if unit == "$" else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

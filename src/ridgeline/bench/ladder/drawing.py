"""The ladder as one SVG: measured bars, predicted marks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.core.errors import MissingDependencyError


def draw(subjects: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write one panel for each subject, tokens per second on a logarithmic axis.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("Drawing needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(8, 0.8 + 2.4 * len(subjects)), layout="constrained")
    panels = figure.subplots(len(subjects), 1, squeeze=False)[:, 0]
    for axes, (name, rungs) in zip(panels, subjects.items(), strict=True):
        places = range(len(rungs))
        measured = [rung["measured_tok_s"] for rung in rungs]
        axes.barh(places, measured, color="tab:blue", height=0.6, label="measured")
        known = [place for place in places if rungs[place]["predicted_tok_s"] is not None]
        predicted = [rungs[place]["predicted_tok_s"] for place in known]
        if known:
            axes.plot(predicted, known, "k|", markersize=16, label="predicted")
        # Behind the bars and marks, in a column of their own.
        texts = [f"{rung['measured_tok_s']:,.1f} tok/s, {rung['speed_up']:.1f}×" for rung in rungs]
        axes.set_yticks(places, [rung["name"] for rung in rungs], fontsize=8)
        axes.invert_yaxis()
        axes.set(xscale="log", title=name, xlabel="tokens per second, batch 1")
        axes.set_xlim(min([*measured, *predicted]) / 2, max([*measured, *predicted]) * 1.5)
        right = axes.secondary_yaxis("right")
        right.set_yticks(places, texts, fontsize=7)
        right.tick_params(length=0)
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, format="svg")

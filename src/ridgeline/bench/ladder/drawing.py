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
        import matplotlib as mpl

        mpl.use("svg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError("Drawing needs matplotlib: pip install matplotlib.") from error
    figure, panels = pyplot.subplots(
        len(subjects), 1, figsize=(8, 0.8 + 2.4 * len(subjects)), squeeze=False
    )
    for axes, (name, rungs) in zip(panels[:, 0], subjects.items(), strict=True):
        places = range(len(rungs))
        measured = [rung["measured_tok_s"] for rung in rungs]
        axes.barh(places, measured, color="tab:blue", height=0.6, label="measured")
        known = [place for place in places if rungs[place]["predicted_tok_s"] is not None]
        if known:
            predicted = [rungs[place]["predicted_tok_s"] for place in known]
            axes.plot(predicted, known, "k|", markersize=16, label="predicted")
        for place, rung in zip(places, rungs, strict=True):
            text = f"  {rung['measured_tok_s']:,.1f} tok/s, {rung['speed_up']:.1f}×"
            axes.annotate(text, (rung["measured_tok_s"], place), va="center", fontsize=7)
        axes.set_yticks(list(places), [rung["name"] for rung in rungs], fontsize=8)
        axes.invert_yaxis()
        axes.set(xscale="log", title=name, xlabel="tokens per second, batch 1")
        axes.set_xlim(min(measured) / 2, max(measured) * 6)
        axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, format="svg")
    pyplot.close(figure)

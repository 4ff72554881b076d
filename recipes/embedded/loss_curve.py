"""Draws the loss curves of a run as an SVG file."""

import json
from pathlib import Path


def draw_losses(*, run: Path, file: Path) -> None:
    """Writes training loss against training tokens' time, target and draft side by side."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "ridgeline"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    labels = {"target": "cross-entropy (nats per token)", "draft": "0.9 KL + 0.1 cross-entropy"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        metrics = run / name / "metrics.jsonl"
        if not metrics.exists():
            continue
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        minutes = [line["seconds"] / 60 for line in lines]
        axis.plot(minutes, [line["mean_loss"] for line in lines], linewidth=1)
        falling = [m for m, line in zip(minutes, lines, strict=True) if line["lr_scale"] < 1]
        decay = [m for m in falling if m > minutes[-1] / 4]
        if decay:
            axis.axvline(decay[0], color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=name, xlabel="minutes of training", ylabel=label)
        axis.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)

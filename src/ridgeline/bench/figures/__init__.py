"""Published figures, and what this machine has beside them."""

from ridgeline.bench.figures import of_models, of_planning, of_serving
from ridgeline.bench.figures.figure import Figure
from ridgeline.bench.figures.page import page
from ridgeline.bench.figures.reproduce import Answers, reproduce

FIGURES: tuple[Figure, ...] = (
    *of_planning.FIGURES,
    *of_serving.FIGURES,
    *of_models.FIGURES,
)

__all__ = ["FIGURES", "Answers", "Figure", "page", "reproduce"]

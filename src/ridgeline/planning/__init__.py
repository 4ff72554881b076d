"""Planning: what machines can do for a load, by the real scheduler on a simulated executor."""

from ridgeline.planning.capacity import CapacityPlan, answer
from ridgeline.planning.layouts import LayoutComparison, LayoutPrediction, Network, compare_layouts
from ridgeline.planning.load import TooLongError
from ridgeline.planning.machine import Machine, catalogue_machine
from ridgeline.planning.question import Question
from ridgeline.planning.ranking import RankedModel, order_ranked, rank_model
from ridgeline.planning.search import (
    ModelDemand,
    Placed,
    Ranking,
    cheapest,
    cheapest_placement,
    highest_rate,
    place_models,
)
from ridgeline.planning.simulation import simulate
from ridgeline.planning.traffic import Traffic
from ridgeline.planning.workload import Arrival, poisson, read_trace
from ridgeline.roofline.slo import Slo

__all__ = [
    "Arrival",
    "CapacityPlan",
    "LayoutComparison",
    "LayoutPrediction",
    "Machine",
    "ModelDemand",
    "Network",
    "Placed",
    "Question",
    "RankedModel",
    "Ranking",
    "Slo",
    "TooLongError",
    "Traffic",
    "answer",
    "catalogue_machine",
    "cheapest",
    "cheapest_placement",
    "compare_layouts",
    "highest_rate",
    "order_ranked",
    "place_models",
    "poisson",
    "rank_model",
    "read_trace",
    "simulate",
]

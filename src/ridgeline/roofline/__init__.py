"""The roofline: what a step moves and computes, how long that takes, and what it costs.

Nothing here imports torch or runs a model: ceilings are values, and `price` is arithmetic over a
`StepPlan` and a lowered model.
"""

from ridgeline.roofline.account import StepAccount, account
from ridgeline.roofline.batch import BatchShape, batch_of, decode_batch, make_batch, prefill_batch
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.price import (
    Phase,
    StepCost,
    op_costs,
    pass_work,
    price,
)
from ridgeline.roofline.work import Work

__all__ = [
    "BatchShape",
    "Phase",
    "PricedModel",
    "StepAccount",
    "StepCost",
    "Work",
    "account",
    "batch_of",
    "decode_batch",
    "make_batch",
    "op_costs",
    "pass_work",
    "prefill_batch",
    "price",
]

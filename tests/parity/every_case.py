"""The cases of all families together."""

from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache

import pytest
from tests.parity.cases import CASES as FIRST_CASES
from tests.parity.cases import TELLING as FIRST_TELLING
from tests.parity.dense_cases import DENSE_CASES, DENSE_TELLING
from tests.parity.moe_cases import MOE_CASES, MOE_TELLING
from tests.parity.new_dense_cases import NEW_DENSE_CASES, NEW_DENSE_TELLING
from tests.parity.new_moe_cases import NEW_MOE_CASES, NEW_MOE_TELLING
from tests.parity.state_cases import STATE_CASES, STATE_TELLING

from ridgeline.models import describe, lower

CASES = [
    *FIRST_CASES, *DENSE_CASES, *MOE_CASES, *NEW_DENSE_CASES, *NEW_MOE_CASES, *STATE_CASES
]  # fmt: skip


def quick(cases):
    """The cases as parameters: slow but for those that bring an op which none before them has, or
    has with other options."""
    seen, params = set(), []
    for case in cases:
        new = _kinds(case.id)
        params.append(pytest.param(case, marks=pytest.mark.slow if new <= seen else ()))
        seen |= new
    return params


@cache
def _kinds(case_id):
    (case,) = (case for case in CASES if case.id == case_id)
    if case.family == "gemma3":  # a config of two parts, which transformers writes
        return {case_id}
    config = {"model_type": case.family} | case.config
    return {_kind(op) for op in lower(describe(config, context=case.max_model_len).spec)}


def _kind(value):
    """Of an op or of what it has, all but names and sizes."""
    if is_dataclass(value):
        parts = (_kind(getattr(value, field.name)) for field in fields(value))
        return type(value), *parts
    if isinstance(value, tuple):
        return frozenset(map(_kind, value))
    return value if value is None or isinstance(value, bool | Enum) else type(value)


# Together these set every field of a spec that a family can set.
TELLING = (
    *FIRST_TELLING, *DENSE_TELLING, *MOE_TELLING, *NEW_DENSE_TELLING, *NEW_MOE_TELLING,
    *STATE_TELLING,
)  # fmt: skip

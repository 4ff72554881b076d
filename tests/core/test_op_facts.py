"""Every op says what is done with it and with each of its weights."""

from dataclasses import dataclass, fields
from typing import Annotated, get_args, get_type_hints

import pytest
from tests.every_op import models_of_all_kinds

from ridgeline.core import ops
from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Role, Rows, Split, WeightFacts
from ridgeline.core.ops import Weight
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.sharding import num_parts
from ridgeline.core.weight_uses import (
    WeightUse,
    experts_of,
    op_weights,
    weight_fields,
    weight_roles,
    weight_uses,
)
from ridgeline.models import PRESETS, describe, lower

OPS = get_args(ops.Op)


@pytest.fixture(scope="module")
def lowered():
    return [op for _, ops in models_of_all_kinds() for op in ops]


@pytest.mark.parametrize("kind", OPS, ids=lambda kind: kind.__name__)
def test_every_op_has_facts_that_agree(kind):
    assert isinstance(kind.facts, OpFacts)
    is_attention = kind in get_args(ops.AttentionOp)
    assert (kind.facts.kind is OpKind.ATTENTION) == is_attention
    assert (kind.facts.collective is Collective.CONTEXT) == is_attention
    assert (kind.facts.rows is Rows.ROUTED) == (kind.facts.kind is OpKind.EXPERTS)


@pytest.mark.parametrize("kind", OPS, ids=lambda kind: kind.__name__)
def test_no_op_has_a_weight_of_which_nothing_is_known(kind):
    plain = get_type_hints(kind)  # without annotations
    of_weights = {
        f.name for f in fields(kind) if Weight in (plain[f.name], *get_args(plain[f.name]))
    }
    assert {name for name, _ in weight_fields(kind)} == of_weights


def test_a_weight_without_facts_is_refused():
    @dataclass(frozen=True)
    class Forgotten:
        weight: Weight | None

    with pytest.raises(TypeError, match=r"Forgotten\.weight does not say"):
        weight_fields(Forgotten)


def test_partial_sums_are_added_up():
    for kind in OPS:
        splits = {facts.split for _, facts in weight_fields(kind)}
        if splits & {Split.COLUMNS, Split.EXPERT_COLUMNS}:
            joined = {Collective.ALL_REDUCE, Collective.EXPERTS, Collective.LATER}
            assert kind.facts.collective in joined, kind


def test_the_cases_have_every_op_role_and_split(lowered):
    uses = [use for op in lowered for use in weight_uses(op)]
    assert {type(op) for op in lowered} == set(OPS)
    assert {use.role for use in uses} == set(Role)
    assert {use.split for use in uses} == set(Split)


def test_matrices_have_two_axes_and_those_of_experts_three(lowered):
    for op in lowered:
        assert op_weights(op) == tuple(use.weight for use in weight_uses(op))
        for use in weight_uses(op):
            if use.role.is_matrix or use.role.is_table:
                assert len(use.weight.shape) == 2 + use.is_stacked, use
            if use.is_stacked:
                assert use.weight.shape[0] == experts_of(op)[0] > experts_of(op)[1] > 0


def test_a_tied_head_is_a_table_too():
    roles = weight_roles(lower(describe(dict(PRESETS["llama-3.2-1b"])).spec))
    assert roles["embed"] == {Role.TABLE, Role.HEAD}


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        (Split.WHOLE, 1),
        (Split.ROWS, 4),
        (Split.COLUMNS, 4),
        (Split.KV_HEADS, 2),
        (Split.EXPERT_ROWS, 8),
        (Split.EXPERT_COLUMNS, 8),
    ],
)
def test_parts(split, parts):
    use = WeightUse(Weight(name="w", shape=(8, 8)), Role.PRODUCT, split, num_kv_heads=2)
    assert num_parts(use, ParallelLayout(tensor=4, expert=8, data=2)) == parts


def test_facts_are_read_through_optional_fields():
    @dataclass(frozen=True)
    class Some:
        weight: Annotated[Weight, WeightFacts(Role.GAIN, Split.WHOLE)] | None

    assert weight_fields(Some) == (("weight", WeightFacts(Role.GAIN, Split.WHOLE)),)

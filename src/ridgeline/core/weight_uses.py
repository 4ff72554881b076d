"""Which weights an op reads, and what it does with each."""

from collections.abc import Iterable
from typing import NamedTuple, get_args, get_type_hints

from ridgeline.core.op_facts import Role, Rows, Split, WeightFacts
from ridgeline.core.ops import MoE, Op, Weight


class WeightUse(NamedTuple):
    """A weight as an op uses it. ``num_kv_heads`` are there if it is split by them."""

    weight: Weight
    role: Role
    split: Split
    num_kv_heads: int | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether it has a part for each expert, of which only some are read."""
        return self.split in (Split.EXPERT_ROWS, Split.EXPERT_COLUMNS)


def weight_uses(op: Op) -> tuple[WeightUse, ...]:
    """The weights that an op reads, in field order, and what it does with each."""
    heads = getattr(op, "num_kv_heads", None)
    fields = ((getattr(op, name), facts) for name, facts in weight_fields(type(op)))
    return tuple(
        WeightUse(weight, facts.role, facts.split, heads)
        for value, facts in fields
        for weight in (value if isinstance(value, tuple) else (value,))
        if weight is not None
    )


def op_weights(op: Op) -> tuple[Weight, ...]:
    """The weights that an op reads, in field order."""
    return tuple(use.weight for use in weight_uses(op))


def weight_roles(ops: Iterable[Op]) -> dict[str, frozenset[Role]]:
    """What each weight is used for, by name; a tied head is a table as well."""
    found: dict[str, frozenset[Role]] = {}
    for op in ops:
        for use in weight_uses(op):
            found[use.weight.name] = found.get(use.weight.name, frozenset()) | {use.role}
    return found


def experts_of(op: Op) -> tuple[int, int]:
    """How many experts an op routes to, and how many of those a token meets; else (1, 1)."""
    if op.facts.rows is not Rows.ROUTED:
        return 1, 1
    assert isinstance(op, MoE)
    return op.router.shape[0], op.routing.top_k


def weight_fields(kind: type) -> tuple[tuple[str, WeightFacts], ...]:
    """The fields of a class of ops that hold weights.

    Raises:
        TypeError: one of them is a plain `Weight`, of which nothing is known.
    """
    if kind not in _FIELDS:
        found: list[tuple[str, WeightFacts]] = []
        for name, hint in get_type_hints(kind, include_extras=True).items():
            parts = [hint, *get_args(hint)]  # of ``X | None`` and ``tuple[X, ...]``
            notes = [note for part in parts for note in getattr(part, "__metadata__", ())]
            found += [(name, note) for note in notes if isinstance(note, WeightFacts)]
            if Weight in parts and not notes:
                raise TypeError(f"{kind.__name__}.{name} does not say what is done with it.")
        _FIELDS[kind] = tuple(found)
    return _FIELDS[kind]


_FIELDS: dict[type, tuple[tuple[str, WeightFacts], ...]] = {}

"""Ops of all kinds: those of every family, drafter and layout."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.eagle3 import head_config
from tests.parity.encoder_cases import ENCODER_CASES
from tests.parity.every_case import CASES
from tests.tiny import CONFIG

from ridgeline.core.ops import Op
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.spec import MedusaSpec, ModelSpec
from ridgeline.models import PRESETS, describe, describe_head, lower, lower_head, shard


def models_of_all_kinds() -> Iterator[tuple[ModelSpec, Sequence[Op]]]:
    """Models, or parts of them, whose ops together are all that there are, with all weights."""
    cases = [case for case in CASES if "vision" not in case.name]
    encoders = [case.hf_config.to_dict() for case in ENCODER_CASES]
    for config in (*({"model_type": case.family} | case.config for case in cases), *encoders):
        spec = describe(config).spec
        yield spec, lower(spec)
    spec = describe(dict(PRESETS["llama-3.2-1b"])).spec
    layout = ParallelLayout(tensor=2, pipeline=3, stage_borders=(0, 2, 4, 16))
    for rank in range(6):
        yield spec, shard(spec, layout, rank).ops
    yield spec, shard(spec, ParallelLayout(context=2), 0).ops
    tiny = describe(CONFIG).spec
    head = describe_head(head_config(CONFIG), tiny, ("fc.weight",)).spec
    for each in (head, MedusaSpec(hidden_size=48, num_heads=2, num_blocks=1)):
        drafted = replace(tiny, draft_head=each)
        yield drafted, lower(drafted)
        yield drafted, lower_head(drafted)

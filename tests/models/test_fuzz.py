"""Mutated configs: a spec that can be lowered, or an error of ours; never a crash, never a hang."""

import copy
import json
import random
import time

import pytest
from tests.parity.new_dense_cases import NEW_DENSE_CASES
from tests.parity.new_moe_cases import NEW_MOE_CASES

from ridgeline.core.errors import RidgelineError
from ridgeline.core.spec import ModelSpec
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import PRESETS, describe, inverse_frequencies, lower, parse_config

SEEDS = range(300)
NEW_SEEDS = range(1000, 1300)
CONFIGS = [dict(config) for config in PRESETS.values()]
CONFIGS.append({"model_type": "gemma3", "text_config": dict(PRESETS["gemma-3-1b"])})
for _yarn in ({"truncate": True}, {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.0}):
    _rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192} | _yarn
    CONFIGS.append(dict(PRESETS["qwen3-0.6b"]) | {"rope_scaling": _rope})
NEW_CONFIGS = [
    {"model_type": case.family} | case.config for case in (*NEW_DENSE_CASES, *NEW_MOE_CASES)
]
ODD_VALUES = [
    0, -1, 1, 2, 3, 2**31, 2**63, 10**12, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e-300, 1e300,
    float("nan"), float("inf"), float("-inf"), True, False, None, "", "silu", "default", "yarn",
    "dynamic", "\x00", "é" * 5000, [], [[]], ["full_attention"], ["sliding_attention"] * 26, {},
    {"rope_type": "dynamic", "factor": 2}, {"full_attention": {}}, {"a": {"b": {}}}, [0] * 1000,
]  # fmt: skip


def _sections(value):
    """The object and every object in it."""
    yield value
    for inner in value.values():
        if isinstance(inner, dict) and inner:
            yield from _sections(inner)


def _mutate(seed: int) -> bytes:
    rng = random.Random(seed)
    configs = NEW_CONFIGS if seed in NEW_SEEDS else CONFIGS
    config = json.loads(json.dumps(rng.choice(configs)))
    kind = seed % 5
    if kind in (0, 1):  # one or a few values of another type or size
        for _ in range(rng.randint(1, 3)):
            section = rng.choice(list(_sections(config)))
            section[rng.choice(list(section))] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif kind == 2:  # keys missing
        for _ in range(rng.randint(1, 4)):
            section = rng.choice(list(_sections(config)))
            if section:
                del section[rng.choice(list(section))]
    elif kind == 3 and rng.random() < 0.2:  # nested deeply, within and beyond what JSON allows
        section = rng.choice(list(_sections(config)))
        depth = rng.choice([50, 500, 5000, 200_000])
        section[rng.choice(list(section))] = "DEEP"
        deep = '{"a":' * depth + "1" + "}" * depth
        return json.dumps(config).replace('"DEEP"', deep).encode()
    data = bytearray(json.dumps(config).encode())
    if kind == 3:
        data = data[: rng.randrange(len(data))]
    if kind == 4:
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.choice(
                [rng.randrange(256), *b'0123456789-eE"{}[],:']
            )
    return bytes(data)


@pytest.mark.parametrize("first", [*SEEDS[::50], *NEW_SEEDS[::50]])
def test_mutated_config(first):
    for seed in range(first, first + 50):
        data = _mutate(seed)
        start = time.process_time()
        _describe_or_refuse(data)
        assert time.process_time() - start < 2.0, f"seed {seed}"


def _describe_or_refuse(data: bytes) -> None:
    try:
        definition = describe(parse_config(data))
    except RidgelineError as error:
        message = str(error)
    else:
        message = ""
        _use(definition.spec)
    assert len(message) < 1000
    assert "\n" not in message


def _use(spec: ModelSpec) -> None:
    """What an executor does first with a spec."""
    ops = lower(spec)
    assert all(extent > 0 for op in ops for weight in op_weights(op) for extent in weight.shape)
    for rope in {layer.attention.rope for layer in spec.layers} - {None}:
        for length in (1, 10**6):
            assert (inverse_frequencies(rope, sequence_length=length) >= 0).all()

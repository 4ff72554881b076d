"""What is not supported is refused in one sentence that says what can be done."""

import logging

import numpy as np
import pytest

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError, WeightsMismatchError
from ridgeline.quant import TensorInfo, read_scheme

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
ARGS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": ARGS}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "aqlm"}, "load the unquantized checkpoint"),
        (GPTQ | {"bits": 5}, "5 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"dynamic": {"-:x": {}, "+:.*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"dynamic": {"x": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "use a checkpoint of version gemm"),
        (AWQ | {"zero_point": False}, "zero points"),
        (CT | {"format": "marlin-24"}, "marlin-24"),
        (CT | {"transform_config": {"a": 1}}, "transform_config"),
        (CT | {"config_groups": {"a": GROUP | {"targets": ["re:(?!x)y"]}}}, "pattern"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "e4m3"),
    ],
)
def test_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_scheme(config)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quant_method": 3},
        GPTQ | {"bits": "4"},
        GPTQ | {"group_size": 0},
        CT | {"config_groups": {}},
        CT | {"config_groups": {"a": GROUP | {"targets": []}}},
        CT | {"config_groups": {"a": GROUP | {"weights": ARGS | {"group_size": None}}}},
        {"quant_method": "fp8", "weight_block_size": [128]},
    ],
)
def test_nonsense_is_a_corrupt_config(config: dict[str, object]) -> None:
    with pytest.raises(CorruptFileError):
        read_scheme(config)


def test_unknown_keys_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_scheme(GPTQ | {"novelty": 1})
    assert "quantization_config.novelty" in caplog.text
    with pytest.raises(UnsupportedModelError, match="novelty"):
        read_scheme(GPTQ | {"novelty": 1}, strict=True)


def infos(**parts: tuple[str | None, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {f"m.{name}": TensorInfo(shape, dtype) for name, (dtype, shape) in parts.items()}


def test_groups_are_found_by_name_then_pattern_then_class() -> None:
    def group(target: str, bits: int) -> dict[str, object]:
        return {"targets": [target], "weights": ARGS | {"num_bits": bits}}

    groups = {"a": group("Linear", 8), "b": group("re:.*up.*", 4), "c": group("x.up", 2)}
    scheme = read_scheme(CT | {"config_groups": groups, "ignore": ["head", "re:vision.*"]})
    find = scheme.groups.find  # type: ignore[attr-defined]
    assert [find(n).weights.bits for n in ("x.up", "y.up", "y.down")] == [2, 4, 8]
    ignores = scheme.groups.ignores  # type: ignore[attr-defined]
    assert [ignores(n) for n in ("head", "vision.a", "heads", "a.vision")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_parts_must_be_there_and_fit() -> None:
    good = {
        "qweight": ("int32", (8, 16)),
        "qzeros": ("int32", (2, 2)),
        "scales": ("float16", (2, 16)),
    }
    scheme = read_scheme(GPTQ)
    (weight,) = scheme.plan(infos(**good), lambda _: np.empty(0)).weights
    assert (weight.name, weight.shape) == ("m.weight", (16, 64))
    for change in (
        {"scales": ("float16", (3, 16))},
        {"scales": ("int32", (2, 16))},
        {"qzeros": ("int32", (2, 16))},
        {"qweight": ("int32", (8, 16, 1))},
        {"g_idx": ("int32", (80,))},
    ):
        with pytest.raises(WeightsMismatchError, match=r"'m'|m\."):
            scheme.plan(infos(**(good | change)), lambda _: np.empty(0))
    del good["scales"]
    with pytest.raises(WeightsMismatchError, match="has no"):
        scheme.plan(infos(**good), lambda _: np.empty(0))


def test_zero_biases_of_gptq_may_be_left_over() -> None:
    parts = infos(
        qweight=("int32", (8, 16)),
        qzeros=("int32", (2, 2)),
        scales=("float16", (2, 16)),
        bias=("float16", (16,)),
    )
    scheme = read_scheme(GPTQ)
    assert scheme.plan(parts, lambda _: np.zeros(16)).spare == {"m.bias"}
    assert not scheme.plan(parts, lambda _: np.ones(16)).spare


def test_fp8_of_another_kind_is_named_and_scales_of_attention_may_be_left_over() -> None:
    parts = infos(weight=("float8_e4m3fn", (8, 16)), weight_scale=("float32", (8, 1)))
    parts |= infos(q_scale=("float32", (1,)), k_scale=("float32", (1,)))
    scheme = read_scheme({"quant_method": "fp8"})
    plan = scheme.plan(parts, lambda _: np.empty(0))
    assert plan.spare == {"m.q_scale", "m.k_scale"}
    parts |= infos(weight=(None, (8, 16)))
    with pytest.raises(WeightsMismatchError, match="'m' must be float8_e4m3fn or float8_e5m2"):
        scheme.plan(parts, lambda _: np.empty(0))

"""BitNet's weights: what is not packed, or not ternary, is refused in one sentence.

Whole models are compared in `test_checkpoints.py`.
"""

import numpy as np
import pytest

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError, WeightsMismatchError
from ridgeline.quant.registry import read_scheme
from ridgeline.quant.scheme import TensorInfo

SETTINGS = {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def test_a_byte_holds_four_rows_a_quarter_of_all_apart() -> None:
    tensors = {
        "a.weight": TensorInfo((2, 1), "uint8"),
        "a.weight_scale": TensorInfo((1,), "float32"),
    }
    stored = {"a.weight": np.array([[0b10_01_00_10], [0b00_10_01_00]], np.uint8)}
    stored["a.weight_scale"] = np.array([0.5], np.float32)
    for linear, scale in (("autobitlinear", 0.5), ("bitlinear", 2.0)):
        scheme = read_scheme(SETTINGS | {"linear_class": linear}, strict=True)
        (weight,) = scheme.plan(tensors, stored.__getitem__).weights
        values = weight.assemble(stored.__getitem__).dequantize("float32")[:, 0]
        assert weight.shape == (8, 1)
        assert values.tolist() == [v * scale for v in (1, -1, -1, 0, 0, 1, 1, -1)]
    stored["a.weight"][0, 0] = 3
    with pytest.raises(CorruptFileError, match="other codes than those of −1, 0, 1"):
        weight.assemble(stored.__getitem__)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantization_mode": "online"}, "'online' are not supported.*weights packed"),
        ({"linear_class": "linear"}, "'linear'.*are not supported"),
        ({"use_rms_norm": True}, "use_rms_norm"),
    ],
)
def test_what_is_not_packed_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_scheme(SETTINGS | changed)


def test_weights_that_are_not_packed_are_refused() -> None:
    tensors = {
        "a.weight": TensorInfo((8, 1), "bfloat16"),
        "a.weight_scale": TensorInfo((1,), "float32"),
    }
    with pytest.raises(WeightsMismatchError, match="must be uint8, and it is bfloat16"):
        read_scheme(SETTINGS).plan(tensors, {}.__getitem__)

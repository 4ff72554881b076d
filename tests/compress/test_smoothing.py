"""Scales that are folded into norms: the same function, and what they are for."""

import json
from dataclasses import replace

import pytest
import torch
from tests.compress.folders import SMALL, write_folder
from tests.compress.test_block_forward import TINY, noisy
from tests.tiny import CONFIG, tiny_model
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ridgeline.compress.block_forward import BlockForward, layer_ops
from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.grids import FactoredIntegers, Integers
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.smoothing import foldable_norms, smooth
from ridgeline.core.errors import SettingsError
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_roles
from ridgeline.evaluation import QualitySum, log_softmax

WINDOW = list(range(3, 60))
FAMILIES = TINY | {
    "parallel": CONFIG | {"model_type": "cohere", "use_qk_norm": False, "logit_scale": 0.5},
    "layer-norm": CONFIG | {"model_type": "starcoder2", "use_bias": True},
    "post-norm": CONFIG | {"model_type": "olmo2"},
}


def logits(model, weights):
    forward = BlockForward(weights, [WINDOW])
    forward.run(model.ops)
    return forward.buffers["logits"]


def products(model):
    return frozenset(n for n, roles in weight_roles(model.ops).items() if Role.PRODUCT in roles)


def smoothed(model, weights, *, rounds_activations, dtype=torch.float32):
    stream, chosen = None, {}
    for run in layer_ops(model.ops)[:-1]:
        before = stream
        if before is not None:
            chosen |= smooth(
                run,
                weights,
                lambda before=before: [(before, WINDOW)],
                grid_of=lambda _, columns: (
                    Integers(bits=8, group_size=columns)
                    if rounds_activations
                    else FactoredIntegers(bits=4)
                ),
                rounds_activations=rounds_activations,
                quantized=products(model),
                gain_dtype=lambda _: dtype,
            )
        stream = BlockForward(weights, [WINDOW], x_TD=before).run(run)
    return chosen


@pytest.mark.parametrize("rounds_activations", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_the_same(family, rounds_activations):
    """Within 1e-5, with gains as bfloat16 holds them."""
    model = noisy(tiny_model(FAMILIES[family], dtype="float32"))
    weights = {name: weight.bfloat16().float() for name, weight in model.weights.items()}
    wanted = logits(model, weights)
    chosen = smoothed(model, weights, rounds_activations=rounds_activations, dtype=torch.bfloat16)
    if family == "post-norm":
        assert not chosen  # norms stand behind the products there
        return
    assert len(chosen) == (1 if family == "parallel" else 2) * CONFIG["num_hidden_layers"]
    assert any(chosen.values()) or family == "layer-norm"  # has powers of two alone
    assert (logits(model, weights) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for name in chosen:
        assert torch.equal(weights[name], weights[name].bfloat16().float())


class RoundedInputs(TorchFunctionMode):
    """Products of some weights get inputs of 8 bits, a scale for each token."""

    def __init__(self, weights):
        super().__init__()
        self.addresses = {weight.data_ptr() for weight in weights}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.linear and args[1].data_ptr() in self.addresses:
            step = args[0].abs().amax(-1, keepdim=True) / 127
            args = ((args[0] / step).round() * step, *args[1:])
        return func(*args, **(kwargs or {}))


def test_outliers_of_inputs_are_moved_into_weights():
    """Three channels of every norm a hundred times as large, their columns as much smaller."""
    model = noisy(tiny_model(dtype="float32"))
    weights = {name: weight.clone() for name, weight in model.weights.items()}
    for run in layer_ops(model.ops)[1:-1]:
        for norm in foldable_norms(run):
            weights[norm.op.weight.name][:3] *= 100
            for name in norm.readers:
                weights[name][..., :3] /= 100
    wanted = logits(model, weights)

    def kl(weights):
        rounded = dict(weights)
        for name in products(model):
            grid = Integers(bits=8, group_size=weights[name].shape[-1])
            steps = grid.fit(weights[name], torch.ones(weights[name].shape[-1]))
            spread = steps.spread(torch.arange(weights[name].shape[-1]), grid.group_size)
            rounded[name] = grid.values(grid.codes(weights[name], *spread), *spread)
        with RoundedInputs([rounded[name] for name in products(model)]):
            found = logits(model, rounded)
        total = QualitySum()
        total.add(WINDOW, log_softmax(found.numpy()), log_softmax(wanted.numpy()))
        return total.quality().kl

    plain = kl(weights)
    smoothed(model, weights, rounds_activations=True)
    assert kl(weights) < 0.2 * plain


@pytest.mark.parametrize(
    "recipe", [Recipe(method="awq"), Recipe(method="smoothquant", bits=8, group_size=0)],
    ids=lambda recipe: recipe.method,
)  # fmt: skip
def test_the_file_has_the_new_norms(recipe, tmp_path):
    folder = write_folder(tmp_path / "model", SMALL)
    model = LayeredModel.open(str(folder))
    few = replace(recipe, window_tokens=64, num_windows=4)
    text = calibration_text("embedded", model.loaded, few)
    quantize(model, tmp_path / "out", recipe, text)
    written = LayeredModel.open(str(tmp_path / "out"))
    gain = "layers.1.attention_norm"
    assert not torch.equal(written.weights(2)[gain], model.weights(2)[gain])
    (_, wanted), (_, found) = (next(m.log_probabilities([tuple(WINDOW)])) for m in (model, written))
    total = QualitySum()
    total.add(WINDOW, found, wanted)
    assert total.quality().kl < 0.1
    if recipe.method == "smoothquant":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        assert group["format"] == "int-quantized"
        assert group["input_activations"]["strategy"] == "token"


def test_smoothquant_is_of_eight_bits():
    with pytest.raises(SettingsError, match="--bits 8 --group-size 0"):
        Recipe(method="smoothquant")
    with pytest.raises(SettingsError, match="compressed-tensors"):
        Recipe(method="smoothquant", bits=8, group_size=0, format="gptq")

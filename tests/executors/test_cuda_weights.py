"""Weights of the CUDA executor: codes that are kept, formats made on load, adapters, bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.executors.host_cuda import host_executor
from tests.tiny import CONFIG, EXPERTS, Driver, tiny_executor, tiny_model

from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import NumberFormat, number_format, on_load_format
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors.cuda.formats import weights_bytes
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.weights import load_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.models import describe, lower
from ridgeline.quant import QuantizedTensor
from ridgeline.weights import LoRAWeights, dummy_weights

PROMPT = [3, 141, 59, 26, 53, 58, 97]
LOGITS = Outputs(sample=True, logits=True)
WIDE = CONFIG | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
TIED = WIDE | {"tie_word_embeddings": True}


def tiny_model_of(config):
    """As `tiny_model`, which changes the head, in bfloat16; with a tied one as well."""
    spec = describe(config).spec
    ops = lower(spec)
    weights = dummy_weights(ops, dtype="bfloat16", seed=0)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype="bfloat16")


def logits(model, make, **fields):
    driver = Driver(tiny_executor(model=model, make=make))
    found = driver.start(0, PROMPT, outputs=LOGITS, **fields).logits
    driver.executor.close()
    return found


def quantized(weight, *, bits, group, zeros):
    columns = weight.shape[-1]
    blocks = torch.from_numpy(weight).float().view(*weight.shape[:-1], -1, group or columns)
    limit = 2 ** (bits - 1)
    scales = blocks.abs().amax(-1) / (limit - 1)
    codes = (blocks / scales[..., None]).round().clamp(-limit, limit - 1).to(torch.int8)
    codes, zero_points = codes.view(weight.shape), None
    if zeros:
        codes = (codes.to(torch.int16) + limit).to(torch.uint8)
        generator = torch.Generator().manual_seed(0)
        zero_points = torch.randint(
            limit - 2, limit + 3, scales.shape, dtype=torch.uint8, generator=generator
        )
    form = NumberFormat(
        name="stored", bits=bits, is_float=False, group_size=group, scale_bits=16,
        zero_bits=bits if zeros else 0,
    )  # fmt: skip
    zeros = None if zero_points is None else zero_points.numpy()
    return QuantizedTensor(
        format=form, codes=codes.numpy(), scales=scales.half().numpy(), zeros=zeros
    )


@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 32, False), (4, 64, True), (8, None, False), (8, 64, True)]
)
def test_codes_of_a_checkpoint_are_kept(bits, group, zeros):
    plain = tiny_model(WIDE, dtype="float32")
    weights = {
        name: quantized(weight, bits=bits, group=group, zeros=zeros)
        if weight.ndim == 2 and name not in ("embed", "head")
        else weight
        for name, weight in plain.weights.items()
    }
    model = replace(plain, weights=weights)
    expected, found = logits(model, None), logits(model, host_executor)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    executor = host_executor({ModelRole.TARGET: model}, 4)
    held = executor.weight_formats()
    assert {held[name].bits for name in ("layers.0.q", "layers.2.up", "layers.1.down")} == {bits}
    assert executor.weights_bytes() < 0.6 * sum(w.nbytes for w in plain.weights.values())
    executor.close()


@pytest.mark.parametrize("config", [WIDE, TIED, EXPERTS], ids=["plain", "tied", "experts"])
@pytest.mark.parametrize("name", [None, "int8", "int4", "fp8"])
def test_bytes_are_those_that_are_foreseen_and_priced(config, name):
    config = config | {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192}
    form = None if name is None else number_format(name)
    model = replace(tiny_model_of(config), quantization=form)
    loaded = load_weights(HostDevice(), model, memory_share=0.9)
    foreseen = weights_bytes(model.ops, "bfloat16", form)
    assert loaded.num_bytes == pytest.approx(foreseen, rel=0.01)
    priced = priced_model(model, "cuda", held=loaded.formats)
    shapes = {w.name: w for op in priced.ops for w in op_weights(op)}
    total = sum(map(priced.bytes_of, shapes.values()))
    if not (config.get("tie_word_embeddings") and name):  # held twice, and priced as the head
        assert total == pytest.approx(foreseen, rel=0.01)


def test_each_model_has_its_own_format():
    config = WIDE | {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192}
    forms = {ModelRole.TARGET: None, ModelRole.DRAFT: "int8"}
    models = {
        role: replace(tiny_model_of(config), quantization=on_load_format(form))
        for role, form in forms.items()
    }
    executor = host_executor(models, 4)
    assert executor.weight_formats() == {}
    assert {each.name for each in executor.weight_formats(ModelRole.DRAFT).values()} == {"int8"}
    executor.close()


def test_what_cannot_be_quantized_is_refused_by_name():
    stored = tiny_model(WIDE, dtype="float32")
    weights = dict(stored.weights)
    weights["layers.0.o"] = quantized(weights["layers.0.o"], bits=8, group=None, zeros=False)
    with pytest.raises(SettingsError, match="quantized already"):
        load_weights(
            HostDevice(),
            replace(stored, weights=weights, quantization=number_format("int8")),
            memory_share=0.9,
        )
    narrow = tiny_model(CONFIG, dtype="float32")  # 48 columns
    narrow = replace(narrow, quantization=number_format("int4"))
    with pytest.raises(SettingsError, match="48 columns has no whole groups of 32"):
        load_weights(HostDevice(), narrow, memory_share=0.9)


def test_each_sequence_has_its_adapter():
    plain = tiny_model(WIDE)
    generator = np.random.default_rng(3)

    def adapter():
        def part(rows, columns):
            return generator.standard_normal((rows, columns))

        names = ("layers.0.q", "layers.0.v", "layers.1.gate", "layers.2.down", "layers.1.o")
        return {
            name: LoRAWeights(
                down=part(3, plain.weights[name].shape[1]),
                up=part(plain.weights[name].shape[0], 3),
            )
            for name in names
        }

    model = replace(plain, adapters=(adapter(), adapter()))
    found = {}
    for make in (None, host_executor):
        driver = Driver(tiny_executor(model=model, make=make))
        segments = [driver.segment(s, 0, PROMPT, fresh=True, outputs=LOGITS) for s in range(3)]
        admissions = tuple(driver.admit(s, PROMPT, adapter=s) for s in range(3))
        first = driver.run(*segments, admissions=admissions).passes[0]
        steps = [driver.segment(s, len(PROMPT), first[s].token_ids) for s in range(3)]
        second = driver.run(*steps).passes[0]
        found[make] = [r.logits for r in first], [r.token_ids for r in second]
        driver.executor.close()
    np.testing.assert_allclose(found[host_executor][0], found[None][0], atol=1e-6)
    assert found[host_executor][1] == found[None][1]
    assert not np.allclose(found[None][0][0], found[None][0][1])

"""GGUF files whose blocks hold codes that GPTQ chose."""

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from tests.compress.folders import EXPERTS, FUSED, SMALL, write_folder
from tests.compress.test_quantize import made

from ridgeline.compress import quantize as module
from ridgeline.compress.grids import Blocks
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.recipe import Recipe
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.kernels.tensors import as_tensor
from ridgeline.quant.gguf_encoders import ENCODERS
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.weights import expanded
from ridgeline.weights.conversion import convert_to_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
FAMILIES = {"llama": SMALL | WIDE, "phi3": FUSED | WIDE, "mixtral": EXPERTS}


@pytest.mark.parametrize("name", ENCODERS)
def test_blocks_hold_any_codes(name):
    """What is packed is read as the values that the codes stand for."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(7, 512, generator=generator) * 0.03
    grid = Blocks(encoder=ENCODERS[name])
    steps = grid.fit(w, torch.rand(512, generator=generator) + 0.1)
    low, high = grid.encoder.low, grid.encoder.high
    codes = torch.randint(low, high + 1, w.shape, generator=generator, dtype=torch.int16)
    spread = steps.spread(torch.arange(512), grid.group_size)
    wanted = grid.values(codes, *spread)
    blocks = grid.pack(codes, steps).numpy()
    form = next(form for form in GGUF_FORMATS.values() if form.name == name)
    found = form.dequantize(np.ascontiguousarray(blocks).reshape(-1)).reshape(7, 512)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "q4_0"),
        ("llama", "q4_k_m"),
        ("phi3", "q4_0"),
        ("mixtral", "q4_0"),
        pytest.param("phi3", "q4_k_m", marks=pytest.mark.slow),
        pytest.param("mixtral", "q4_k_m", marks=pytest.mark.slow),
    ],
)
def test_the_file_is_read_as_what_was_rounded(family, kind, tmp_path, monkeypatch):
    rounded = []

    def kept(weight, *arguments, plain=module.round_gptq, **options):
        found = plain(weight, *arguments, **options)
        rounded.append(found.values_OI.clone())
        return found

    monkeypatch.setattr(module, "round_gptq", kept)
    folder, out = write_folder(tmp_path / "model", FAMILIES[family]), tmp_path / "out.gguf"
    report = made(folder, out, Recipe(format="gguf", gguf_type=kind))
    assert 0 < report.error_ratio < 0.9
    assert report.weights_bytes == out.stat().st_size
    assert not (tmp_path / "out.gguf.parts").exists()
    stored = dict(LayeredModel.open(str(out)).stored.items())
    quantized = [w for w in stored.values() if not isinstance(w, np.ndarray)]
    matrices = []
    for weight in quantized:
        values = as_tensor(expanded(weight, "float32"))
        matrices += list(values) if values.ndim == 3 else [values]
    sums = {round(float(values.double().sum()), 3): values for values in matrices}
    for values in rounded:
        found = sums[min(sums, key=lambda total: abs(total - float(values.double().sum())))]
        torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-6)
    plain = tmp_path / "plain.gguf"
    convert_to_gguf(folder, plain, kind, name="out")
    one, other = GGUFReader(out), GGUFReader(plain)
    assert [t.name for t in one.tensors] == [t.name for t in other.tensors]
    assert [t.tensor_type for t in one.tensors] == [t.tensor_type for t in other.tensors]
    assert one.fields.keys() - other.fields.keys() == {"ridgeline.quantization"}
    differ = [
        a.name for a, b in zip(one.tensors, other.tensors, strict=True)
        if not np.array_equal(a.data, b.data)
    ]  # fmt: skip
    assert len(differ) == len([t for t in one.tensors if "blk" in t.name and t.data.ndim > 1
                               and "norm" not in t.name and "gate_inp" not in t.name])  # fmt: skip
    reference = quants.dequantize(one.tensors[0].data, one.tensors[0].tensor_type)
    assert np.isfinite(reference).all()


def test_impossible_gguf_recipes(tmp_path):
    with pytest.raises(SettingsError, match="those of gguf_type"):
        Recipe(format="gguf", bits=8)
    with pytest.raises(SettingsError, match="no gguf_type 'q9'"):
        Recipe(format="gguf", gguf_type="q9")
    with pytest.raises(SettingsError, match="not by awq"):
        Recipe(format="gguf", method="awq")
    folder, out = write_folder(tmp_path / "model"), tmp_path / "out.gguf"
    with pytest.raises(InvalidRequestError, match=r"end in \.gguf"):
        made(folder, tmp_path / "out", Recipe(format="gguf"))
    out.write_bytes(b"mine")
    with pytest.raises(InvalidRequestError, match="exists"):
        made(folder, out, Recipe(format="gguf"))
    assert out.read_bytes() == b"mine"


def test_a_finished_file_is_not_made_again(tmp_path):
    folder, out = write_folder(tmp_path / "model"), tmp_path / "out.gguf"
    recipe = Recipe(format="gguf", gguf_type="q4_0", method="rtn")
    size = made(folder, out, recipe).weights_bytes
    before = out.read_bytes()
    parts = tmp_path / "out.gguf.parts"  # of an end just before they are removed
    parts.mkdir()
    assert made(folder, out, recipe, resume=True).weights_bytes == size
    assert not parts.exists()
    with pytest.raises(SettingsError, match="recipe differ"):
        made(folder, out, Recipe(format="gguf", gguf_type="q8_0", method="rtn"), resume=True)
    with pytest.raises(InvalidRequestError, match="exists"):
        made(folder, out, recipe)
    assert out.read_bytes() == before
    convert_to_gguf(folder, tmp_path / "plain.gguf", "q4_0", name="out")
    (tmp_path / "no.gguf").write_bytes(b"mine")
    for name in ("plain.gguf", "no.gguf"):
        with pytest.raises(InvalidRequestError, match="did not make it"):
            made(folder, tmp_path / name, recipe, resume=True)

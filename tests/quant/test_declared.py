"""What the config alone says of formats is what the files hold."""

from pathlib import Path

import pytest

from ridgeline.models import PRESETS, describe, lower, read_config
from ridgeline.quant import QuantizedTensor, read_scheme
from ridgeline.quant.declared import declared_formats
from ridgeline.roofline import PricedModel
from ridgeline.roofline.memory import weights_bytes
from ridgeline.weights import CheckpointWeights

FOLDERS = sorted((Path(__file__).parents[1] / "data" / "quantized").iterdir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_declared_formats_are_those_of_the_files(folder: Path) -> None:
    definition = describe(read_config(folder))
    weights = CheckpointWeights(
        path=folder,
        quantization=read_scheme(definition.quantization),
        ops=lower(definition.spec),
        sources=definition.sources,
        ignored=definition.ignored,
        dtype="float32",
    )
    stored = {
        name: weight for name, weight in weights.items() if isinstance(weight, QuantizedTensor)
    }
    declared = declared_formats(definition)
    assert declared.keys() == stored.keys()
    for name, form in declared.items():
        *_, outputs, inputs = stored[name].shape
        bits = form.bits_per_element(inputs, outputs)
        assert bits == pytest.approx(
            stored[name].format.bits_per_element(inputs, outputs), rel=0.05
        )


@pytest.mark.parametrize(
    ("preset", "gb"), [("gpt-oss-20b", 13.8), ("gpt-oss-120b", 65.2), ("deepseek-v3", 674)]
)
def test_presets_take_what_was_published(preset: str, gb: float) -> None:
    """The sizes of the files, without the layers that predict further tokens."""
    definition = describe(PRESETS[preset])
    model = PricedModel(
        spec=definition.spec,
        ops=lower(definition.spec),
        weight_formats=declared_formats(definition),
    )
    assert weights_bytes(model) / 1e9 == pytest.approx(gb, rel=0.01)


def test_modules_that_were_skipped_are_not_counted() -> None:
    config = dict(PRESETS["llama-3.1-8b"]) | {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["down_proj"],
        }
    }
    declared = declared_formats(describe(config))
    assert "layers.0.up" in declared
    assert not {"layers.0.down", "head", "embed"} & declared.keys()
    assert declared_formats(describe(PRESETS["llama-3.1-8b"])) == {}

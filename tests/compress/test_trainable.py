from pathlib import Path

import pytest
import torch

from ridgeline.compress.trainable import LlamaShape, TrainableLlama, export_weights, load_exported


@pytest.fixture
def exported(tmp_path: Path) -> tuple[TrainableLlama, Path]:
    import json

    shape = LlamaShape(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
    )
    model = TrainableLlama(shape)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    export_weights(model=model, folder=tmp_path, dtype=torch.float32)
    config = shape.hf_config(bos_token_id=0, eos_token_ids=[0, 4])
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model, tmp_path


def test_logits_equal_transformers(exported: tuple[TrainableLlama, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    model, folder = exported
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(96, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)


def test_exported_folder_loads_again(exported: tuple[TrainableLlama, Path]) -> None:
    model, folder = exported
    again = load_exported(folder)
    assert again.shape == model.shape
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads"):
        LlamaShape(
            vocab_size=8,
            hidden_size=64,
            intermediate_size=64,
            num_layers=1,
            num_heads=3,
            num_kv_heads=2,
            head_dim=32,
        )

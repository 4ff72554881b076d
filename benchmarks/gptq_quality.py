"""What calibration gives: GPTQ and AWQ beside rounding to the nearest, on two models.

The embedded model, and one of another family (qwen2: biases, untied head, four queries to a KV
head) that is trained here for a minute. For each number of bits, seed and text of calibration: KL
to the unquantized model of the file's weights, computed in float32, on held-out text, and its ratio
to that of rounding to the nearest::

    python -m benchmarks.gptq_quality --seeds 3 --bits 4 3
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from recipes.embedded import corpus
from safetensors.torch import save_file
from torch.nn import functional

from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.calibration import CalibrationText, calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.evaluation import QualitySum, encode_documents, heldout_texts
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import describe, lower
from ridgeline.text import Tokenizer
from ridgeline.weights import dummy_weights, locate_model

TEXTS, TEXT_TOKENS = 12, 400
OTHER = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
STEPS, BATCH, LENGTH = 240, 6, 256


def train_other(folder: Path) -> Path:
    """A small Qwen2 that has read Python, by AdamW through the forward that quantizing uses."""
    target = locate_model(None)
    tokenizer = Tokenizer.from_folder(target)
    documents = corpus.source_files(corpus.library_folder())
    texts = [d.text for d in documents if not corpus.is_held_out(d.path)][::4]
    ids = np.concatenate([np.array(tokenizer.encode(text), dtype=np.int64) for text in texts])
    definition = describe(OTHER)
    ops = lower(definition.spec)
    weights = {
        name: as_tensor(weight)
        for name, weight in dummy_weights(ops, dtype="float32", seed=0).items()
    }
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, betas=(0.9, 0.95))
    random = np.random.default_rng(0)
    for step in range(STEPS):
        rate = min(1.0, (step + 1) / 20, 2 * (STEPS - step) / STEPS)
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        starts = random.integers(0, len(ids) - LENGTH, BATCH)
        forward = BlockForward(weights, [ids[s : s + LENGTH].tolist() for s in starts])
        forward.run(ops)
        following = torch.from_numpy(np.stack([ids[s + 1 : s + LENGTH + 1] for s in starts]))
        loss = functional.cross_entropy(forward.buffers["logits"], following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"qwen2 trained: {STEPS * BATCH * LENGTH:,} tokens, loss {loss.item():.3f}", flush=True)
    folder.mkdir()
    tensors = {
        definition.sources[name].name: weight.detach().clone() for name, weight in weights.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(OTHER), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder / name)
    return folder


def prose_only(model: LayeredModel, recipe: Recipe, scratch: Path) -> CalibrationText:
    """The prose of the embedded text, for a model that is measured on code."""
    lines = Path(calibration_path()).read_text(encoding="utf-8").splitlines()
    prose = scratch / "prose.jsonl"
    prose.write_text("\n".join(x for x in lines if json.loads(x)["kind"] == "prose"))
    return calibration_text(str(prose), model.loaded, recipe)


def calibration_path() -> Path:
    """The text that comes with the package."""
    return locate_model(None).parent / "calibration" / "calibration.jsonl"


def main() -> None:
    """Print one line for each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument(
        "--windows", type=int, default=24, help="of 384 tokens, of the 62 there are"
    )
    parser.add_argument("--models", nargs="+", default=["embedded", "qwen2"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for each in arguments.models:
            path = None if each == "embedded" else str(train_other(scratch / "qwen2"))
            measure(each, LayeredModel.open(path), scratch, arguments)


def measure(name: str, model: LayeredModel, scratch: Path, arguments: argparse.Namespace) -> None:
    """All files of one model."""
    assert model.loaded.tokenizer is not None
    texts = heldout_texts("code")[:TEXTS]
    documents = encode_documents(model.loaded.tokenizer, texts, max_tokens=TEXT_TOKENS)
    exact = list(model.log_probabilities(documents))
    base = Recipe(num_windows=arguments.windows, window_tokens=384)

    def kl(label: str, recipe: Recipe, text: CalibrationText | None, nearest: float) -> float:
        out, begin_s = scratch / "out", time.process_time()
        report = quantize(model, out, recipe, text)
        seconds = time.process_time() - begin_s
        total = QualitySum()
        found = LayeredModel.open(str(out)).log_probabilities(documents)
        for (tokens, wanted), (_, values) in zip(exact, found, strict=True):
            total.add(tokens, values, wanted)
        shutil.rmtree(out)
        figures = total.quality()
        ratio = f"{figures.kl / nearest:.3f} of the nearest" if nearest else ""
        print(
            f"{name:9} int{recipe.bits} {label:18} KL {figures.kl:.3e} ± {figures.kl_error:.0e}  "
            f"same top {figures.same_top:.1%}  ppl {figures.perplexity:.3f} "
            f"({figures.reference_perplexity:.3f})  {report.weights_bytes / 1e6:.2f} MB  "
            f"{seconds:.0f} CPU s  {ratio}",
            flush=True,
        )
        return figures.kl

    for bits in arguments.bits:
        nearest = kl("nearest", replace(base, bits=bits, method="rtn"), None, 0.0)
        for seed in range(arguments.seeds):
            recipe = replace(base, bits=bits, seed=seed)
            kl(
                f"GPTQ, seed {seed}",
                recipe,
                calibration_text("embedded", model.loaded, recipe),
                nearest,
            )
        text = calibration_text("embedded", model.loaded, base)
        kl("AWQ", replace(base, bits=bits, method="awq"), text, nearest)
        recipe = replace(base, bits=bits)
        kl("GPTQ, prose alone", recipe, prose_only(model, recipe, scratch), nearest)


if __name__ == "__main__":
    main()

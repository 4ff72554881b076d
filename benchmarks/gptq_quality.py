"""The quality of quantized files, on two models: each method beside rounding to the nearest.

The embedded model, and one of another family (qwen2: biases, untied head, four queries to a KV
head) that is trained here for a minute. For each number of bits, seed and text of calibration: KL
to the unquantized model of the file's weights, computed in float32, on the same held-out text, its
ratio to that of rounding to the nearest, and what a weight takes on average, all of the file's
tensors counted::

    python -m benchmarks.gptq_quality --seeds 3 --bits 4 3
    python -m benchmarks.gptq_quality --rows tune mixed --models embedded

``mixed`` is ``--bits-per-weight 3.7`` beside mixes of 3 and 4 bits by rules that look at no text:
the first or last layers, the feed-forward or the attention matrices have 4 as far as they go.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from recipes.embedded import corpus
from safetensors.torch import save_file
from torch.nn import functional

from ridgeline.compress import quantize as quantizing
from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.calibration import CalibrationText, calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tensors import TensorPlan
from ridgeline.core.host import cpu_name, usable_cores
from ridgeline.evaluation import QualitySum, encode_documents, heldout_texts
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import describe, lower
from ridgeline.text import Tokenizer
from ridgeline.weights import dummy_weights, locate_model, weight_shapes

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
MIXED_BITS = 3.7
ROWS = ("awq", "gptq", "tune", "prose", "mixed")
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
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--tune", type=int, default=200, help="steps of the row tune")
    parser.add_argument(
        "--windows", type=int, default=24, help="of 384 tokens, of the 62 there are"
    )
    parser.add_argument("--models", nargs="+", default=["embedded", "qwen2"])
    arguments = parser.parse_args()
    print(f"{cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads of torch")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for each in arguments.models:
            path = None if each == "embedded" else str(train_other(scratch / "qwen2"))
            _Table(each, LayeredModel.open(path), scratch, arguments).print_rows()


class _Table:
    """All files of one model."""

    def __init__(
        self, name: str, model: LayeredModel, scratch: Path, arguments: argparse.Namespace
    ) -> None:
        assert model.loaded.tokenizer is not None
        self._name, self._model, self._scratch = name, model, scratch
        self._arguments = arguments
        texts = heldout_texts("code")[:TEXTS]
        self._documents = encode_documents(model.loaded.tokenizer, texts, max_tokens=TEXT_TOKENS)
        self._exact = list(model.log_probabilities(self._documents))
        self._base = Recipe(num_windows=arguments.windows, window_tokens=384)
        shapes = weight_shapes(model.stored.ops).values()
        self._num_weights = sum(map(math.prod, shapes))

    def print_rows(self) -> None:
        """A line for each file; ratios are to the nearest of as many bits, and to GPTQ."""
        rows, seeds = self._arguments.rows, range(self._arguments.seeds)
        for bits in self._arguments.bits:
            base = replace(self._base, bits=bits)
            nearest = self._kl("nearest", replace(base, method="rtn"), None)
            for seed in seeds:
                recipe = replace(base, seed=seed)
                text = calibration_text("embedded", self._model.loaded, recipe)
                if "awq" in rows:
                    self._kl(f"AWQ, seed {seed}", replace(recipe, method="awq"), text, nearest)
                if "gptq" not in rows and "tune" not in rows:
                    continue
                gptq = self._kl(f"GPTQ, seed {seed}", recipe, text, nearest)
                if "tune" in rows:
                    tuned = replace(recipe, tune=self._arguments.tune)
                    label = f"--tune {tuned.tune}, seed {seed}"
                    self._kl(label, tuned, text, nearest, gptq=gptq)
            if "prose" in rows:
                text = prose_only(self._model, base, self._scratch)
                self._kl("GPTQ, prose alone", base, text, nearest)
        if "mixed" in rows:
            self._print_mixed()

    def _print_mixed(self) -> None:
        recipe = replace(self._base, bits_per_weight=MIXED_BITS)
        text = calibration_text("embedded", self._model.loaded, recipe)
        chosen = quantizing.choose_bits
        best = math.inf
        for rule, order in RULES.items():
            quantizing.choose_bits = partial(by_rule, order)  # type: ignore[assignment]
            best = min(best, self._kl(rule, recipe, text))
        quantizing.choose_bits = chosen
        self._kl("mixed", recipe, text, best)

    def _kl(
        self,
        label: str,
        recipe: Recipe,
        text: CalibrationText | None,
        nearest: float = 0.0,
        *,
        gptq: float = 0.0,
    ) -> float:
        out, begin_s = self._scratch / "out", time.process_time()
        report = quantizing.quantize(self._model, out, recipe, text)
        seconds = time.process_time() - begin_s
        total = QualitySum()
        found = LayeredModel.open(str(out)).log_probabilities(self._documents)
        for (tokens, wanted), (_, values) in zip(self._exact, found, strict=True):
            total.add(tokens, values, wanted)
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        shutil.rmtree(out)
        figures = total.quality()
        layers = report.bits_per_weight or recipe.stored_bits(recipe.bits)
        than = "the best rule" if report.num_weights else "the nearest"
        ratio = f"  {figures.kl / nearest:.3f} of {than}" if nearest else ""
        ratio += f", {figures.kl / gptq:.3f} of GPTQ" if gptq else ""
        print(
            f"{self._name:9} {layers:.3f} bits {label:18} KL {figures.kl:.3e} ± "
            f"{figures.kl_error:.0e}  same top {figures.same_top:.1%}  ppl "
            f"{figures.perplexity:.3f} ({figures.reference_perplexity:.3f})  "
            f"{8 * report.weights_bytes / self._num_weights:.2f} bits of all, "
            f"{size / 1e6:.2f} MB  {seconds:.0f} CPU s{ratio}",
            flush=True,
        )
        return figures.kl


RULES: dict[str, Callable[[str], tuple[object, ...]]] = {
    "first layers": lambda name: (_layer(name),),
    "last layers": lambda name: (-_layer(name),),
    "attention first": lambda name: (_is_mlp(name), _layer(name)),
    "feed-forward first": lambda name: (not _is_mlp(name), _layer(name)),
}


def by_rule(
    order: Callable[[str], tuple[object, ...]],
    model: LayeredModel,
    plan: TensorPlan,
    recipe: Recipe,
    *_: object,
) -> dict[str, int]:
    """4 bits for the matrices that come first, as far as they go, and 3 for the others."""
    shapes = weight_shapes(model.loaded.model.ops)
    names = sorted(plan.quantized, key=lambda name: (*order(name), name))
    size = sum(math.prod(shapes[name]) for name in names)
    assert recipe.bits_per_weight is not None
    room = (recipe.bits_per_weight - recipe.stored_bits(3)) * size
    found: dict[str, int] = {}
    for name in names:
        fits = math.prod(shapes[name]) <= room
        room -= math.prod(shapes[name]) if fits else 0
        found[name] = 4 if fits else 3
    return found


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _is_mlp(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("gate", "up", "down")


if __name__ == "__main__":
    main()

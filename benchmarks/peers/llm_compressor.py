"""Our files in compressed-tensors' own library, and GPTQ beside llm-compressor's, same tokens.

Three steps, the second with the Python of an environment that has llm-compressor
(``pip install "torch==2.13.0" llmcompressor``)::

    python -m benchmarks.peers.llm_compressor ours WORK
    OTHER/bin/python benchmarks/peers/llm_compressor.py theirs WORK
    python -m benchmarks.peers.llm_compressor compare WORK

The model is the embedded one. "theirs" loads our folder with transformers, checks weights and
logits against what our reader made of it, and quantizes the same model with the same calibration
tokens, in groups of 32.
"""

import json
import sys
from pathlib import Path

BITS = (4, 3)
WINDOWS, WINDOW_TOKENS = 24, 384


def ours(work: Path) -> None:
    """Quantize the embedded model, and note what our reader reads."""
    from dataclasses import replace

    import torch
    from safetensors.torch import save_file

    from ridgeline.compress.block_forward import BlockForward
    from ridgeline.compress.calibration import calibration_text
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.quantize import quantize
    from ridgeline.compress.recipe import Recipe
    from ridgeline.weights import expanded

    model = LayeredModel.open(None)
    recipe = Recipe(num_windows=WINDOWS, window_tokens=WINDOW_TOKENS)
    text = calibration_text("embedded", model.loaded, recipe)
    work.mkdir(parents=True, exist_ok=True)
    (work / "tokens.json").write_text(json.dumps(text.windows))
    (work / "model.json").write_text(json.dumps(str(model.stored.path)))
    for bits in BITS:
        out = work / f"ours-{bits}"
        quantize(model, out, replace(recipe, bits=bits), text)
        written = LayeredModel.open(str(out))
        weights = {name: expanded(w, torch.float32) for name, w in written.stored.items()}
        tokens = list(text.windows[0])
        forward = BlockForward(weights, [tokens])
        forward.run(written.loaded.model.ops)
        seen = {written.stored.sources[name].name: w for name, w in weights.items()}
        seen |= {"logits": forward.buffers["logits"], "tokens": torch.tensor(tokens)}
        save_file(
            {n: t.contiguous() for n, t in seen.items()}, work / f"expected-{bits}.safetensors"
        )


def theirs(work: Path) -> None:
    """In the other environment: read our files, and make theirs."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = json.loads((work / "model.json").read_text())
    windows = json.loads((work / "tokens.json").read_text())
    for bits in BITS:
        expected = load_file(work / f"expected-{bits}.safetensors")
        model = AutoModelForCausalLM.from_pretrained(work / f"ours-{bits}", dtype=torch.float32)
        with torch.no_grad():
            logits = model(expected["tokens"][None]).logits[0]
        different = 0
        for name, module in model.named_modules():
            wanted = expected.get(f"{name}.weight")
            if wanted is not None and hasattr(module, "quantization_scheme"):
                different += int((module.weight != wanted).sum())  # the forward expanded it
        worst = (logits - expected["logits"]).abs().max().item()
        print(f"int{bits}: {different} weights differ in transformers, logits by {worst:.1e}")
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        data = Dataset.from_dict(
            {"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]}
        )
        group = {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                },
            }
        }
        oneshot(
            model=plain,
            dataset=data,
            recipe=GPTQModifier(config_groups=group, ignore=["lm_head"]),
            num_calibration_samples=len(windows),
            max_seq_length=WINDOW_TOKENS,
            shuffle_calibration_samples=False,
            output_dir=str(work / f"theirs-{bits}"),
        )


def compare(work: Path) -> None:
    """KL of both to the unquantized model, on the same held-out tokens."""
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.evaluation import QualitySum, encode_documents, heldout_texts

    model = LayeredModel.open(None)
    assert model.loaded.tokenizer is not None
    texts = heldout_texts("code")[:12]
    documents = encode_documents(model.loaded.tokenizer, texts, max_tokens=400)
    exact = list(model.log_probabilities(documents))
    for bits in BITS:
        found = {}
        for who in ("ours", "theirs"):
            total = QualitySum()
            other = LayeredModel.open(str(work / f"{who}-{bits}"))
            for (tokens, wanted), (_, values) in zip(
                exact, other.log_probabilities(documents), strict=True
            ):
                total.add(tokens, values, wanted)
            found[who] = total.quality()
            print(
                f"int{bits} {who:6} KL {found[who].kl:.3e} ± {found[who].kl_error:.0e}  "
                f"same top {found[who].same_top:.1%}  ppl {found[who].perplexity:.3f}"
            )
        print(f"int{bits}: ours / theirs {found['ours'].kl / found['theirs'].kl:.3f}")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))

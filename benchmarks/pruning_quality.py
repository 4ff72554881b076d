"""What pruning costs, method by method: the embedded model, nothing trained after it.

KL to the unpruned model and perplexity, weights in float32, on held-out code; and for smaller
models the bytes that are left of the layers' weights::

    python -m benchmarks.pruning_quality
"""

import shutil
import tempfile
from pathlib import Path

from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.pruning.prune import prune
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.evaluation import QualitySum, encode_documents, heldout_texts

TEXTS, TEXT_TOKENS = 12, 400
_MASKS = [
    {"method": method, "pattern": pattern}
    for pattern in ("unstructured", "4:8", "2:4")
    for method in ("sparsegpt", "wanda", "magnitude", "random")
]
_CUTS = [
    {"remove_ffn": 0.25},
    {"remove_ffn": 0.25, "method": "random"},
    {"remove_ffn": 0.5},
    {"remove_kv_heads": 1},
    {"remove_kv_heads": 1, "method": "random"},
    {"remove_layers": 1},
    {"remove_layers": 1, "method": "random"},
]


def main() -> None:
    """Print one line for each recipe."""
    model = LayeredModel.open(None)
    tokenizer = model.loaded.tokenizer
    assert tokenizer is not None
    documents = encode_documents(tokenizer, heldout_texts("code")[:TEXTS], max_tokens=TEXT_TOKENS)
    for settings in (*_MASKS, *_CUTS):
        recipe = PruneRecipe(num_windows=24, window_tokens=384, **settings)
        text = calibration_text("embedded", model.loaded, recipe)
        scratch = Path(tempfile.mkdtemp())
        report = prune(model, scratch / "out", recipe, text)
        total, written = QualitySum(), LayeredModel.open(str(scratch / "out"))
        for (tokens, wanted), (_, found) in zip(
            model.log_probabilities(documents), written.log_probabilities(documents), strict=True
        ):
            total.add(tokens, found, wanted)
        quality = total.quality()
        layers = sum(written.num_bytes(run) for run in range(1, len(written.runs) - 1))
        whole = sum(model.num_bytes(run) for run in range(1, len(model.runs) - 1))
        print(
            f"{settings} zeros {report.sparsity:.1%} bytes of layers {layers / whole:.3f} KL "
            f"{quality.kl:.3e} ± {quality.kl_error:.0e} same top {quality.same_top:.1%} "
            f"perplexity {quality.perplexity:.3f} ({quality.reference_perplexity:.3f}) on "
            f"{quality.num_tokens:,} tokens",
            flush=True,
        )
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()

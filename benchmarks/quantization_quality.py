"""What quantization costs on the cpu executor, on the embedded model's held-out text.

KL divergence per token to float32 logits, and the share of equal top tokens, for each format; and
for GGUF's Q4_0 with a Q8_0 head (what llama.cpp makes of rows of 384), computed in float32:

    python benchmarks/quantization_quality.py
"""

import shutil
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from ridgeline import LLM
from ridgeline.evaluation import (
    Document,
    LogProbabilities,
    QualitySum,
    encode_documents,
    heldout_texts,
    served_log_probabilities,
)

DOCUMENTS, TOKENS = 12, 400
SETTINGS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-g64": {"quantization": "int4-g64"},
    "int4-g128": {"quantization": "int4-g128"},
    "int3": {"quantization": "int3"},
    "int2": {"quantization": "int2"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
}


def log_probabilities(
    texts: list[str], model: str | None = None, **settings: Any
) -> list[tuple[Document, LogProbabilities]]:
    """The documents, and the log-probabilities after each of their tokens."""
    with LLM(model, **settings) as llm:
        assert llm.tokenizer is not None
        documents = encode_documents(llm.tokenizer, texts, max_tokens=TOKENS)
        return list(served_log_probabilities(llm, documents))


def write_q4_0(source: Path, target: Path) -> None:
    """A copy of a model whose matrices went through Q4_0, and its embedding through Q8_0."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                is_head = "embed" in name
                form = GGMLQuantizationType.Q8_0 if is_head else GGMLQuantizationType.Q4_0
                values = quants.dequantize(quants.quantize(tensor.float().numpy(), form), form)
                tensors[name] = torch.from_numpy(values.copy())
        save_file(tensors, path)


def main() -> None:
    """Print one line for each format."""
    with as_file(files("ridgeline") / "assets") as assets, tempfile.TemporaryDirectory() as scratch:
        texts = heldout_texts()[:DOCUMENTS]
        exact = log_probabilities(texts, executor="reference", dtype="float32")

        def report(name: str, others: list[tuple[Document, LogProbabilities]]) -> None:
            total = QualitySum()
            for (tokens, wanted), (_, found) in zip(exact, others, strict=True):
                total.add(tokens, found, wanted)
            figures = total.quality()
            same = f"same top token {figures.same_top:.1%}"
            print(f"{name:26} KL {figures.kl:.2e}   {same}", flush=True)

        for name, settings in SETTINGS.items():
            report(name, log_probabilities(texts, executor="cpu", **settings))
        write_q4_0(assets / "target", Path(scratch) / "q4_0")
        folder = str(Path(scratch) / "q4_0")
        report(
            "Q4_0, head Q8_0",
            log_probabilities(texts, folder, executor="reference", dtype="float32"),
        )


if __name__ == "__main__":
    main()

"""The embedded model in llama.cpp's own quantizations: our values and logits against llama.cpp's.

Needs the packages ``gguf`` and ``llama-cpp-python`` (any build; CPU will do), and the repository's
tests on the path: ``PYTHONPATH=. python benchmarks/gguf_against_llama_cpp.py``.

For each format: whether every tensor that llama.cpp quantized has, bit for bit, the values that the
``gguf`` package gives; the KL divergence of our next-token probabilities (float32) from llama.cpp's
on the same file; and, for scale, that of llama.cpp on this file from llama.cpp on the float32 file,
which is what the format itself costs. llama.cpp also quantizes activations, and we do not. The last
line is JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from tests.parity.ours import load, run
from tests.weights.gguf_export import export, write_checkpoint

from benchmarks.embedded_gguf import export_embedded
from ridgeline.weights.gguf import GGUFFile

FORMATS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M",
           "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")  # fmt: skip
TEXT = 'def fibonacci(n):\n    """Return the n-th number."""\n    if n < 2:\n        return n\n'
# Wide enough that all rows are whole K blocks, which the embedded model's are not.
WIDE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 768,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
}  # fmt: skip


def invented_tokens(count: int) -> dict[str, object]:
    """A vocabulary of ``count`` tokens, for llama.cpp to load a model without one."""
    return {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", *(f"t{index}" for index in range(1, count))],
        "ggml.token_type": [2] + [1] * (count - 1),
        "ggml.scores": [0.0] * count,
    }


def quantized(source: Path, name: str) -> Path:
    """The file in format ``name``, made by llama.cpp."""
    path = source.with_name(f"{source.stem}-{name}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.nthread = 1
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params)
    assert status == 0, name
    return path


def their_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits ``[T, V]``, its KV cache in float32."""
    model = llama_cpp.Llama(
        str(path), n_ctx=512, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    model.eval(tokens)
    return np.array(model.scores[: len(tokens)], dtype=np.float64)


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean KL(p ‖ q) over positions, in nats."""
    log_p = p_logits - np.logaddexp.reduce(p_logits, axis=-1, keepdims=True)
    log_q = q_logits - np.logaddexp.reduce(q_logits, axis=-1, keepdims=True)
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def exact_formats(path: Path) -> dict[str, bool]:
    """For each format in the file, whether our values equal the package's in all bits."""
    exact: dict[str, bool] = {}
    with GGUFFile(path) as file:
        for tensor in gguf.GGUFReader(path).tensors:
            ours = file.blocks(tensor.name)
            values = ours.format.dequantize(ours.data.reshape(-1))
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            same = np.array_equal(values, np.ascontiguousarray(theirs).reshape(-1))
            name = tensor.tensor_type.name
            exact[name] = exact.get(name, True) and same
    return exact


def compare(source: Path, tokens: list[int], formats: list[str]) -> dict[str, object]:
    """Figures for the float32 file ``source`` and each format made from it."""
    full = their_logits(source, tokens)
    results: dict[str, object] = {}
    for name in ["F32", *formats]:
        path = source if name == "F32" else quantized(source, name)
        theirs = full if name == "F32" else their_logits(path, tokens)
        ours = run(load(path).model, tokens, prompt_tokens=len(tokens)).astype(np.float64)
        exact = exact_formats(path)
        assert all(exact.values()), (name, exact)
        results[name] = {
            "tensors": sorted(exact),
            "kl_ours": divergence(theirs, ours),
            "kl_format": divergence(full, theirs),
            "max_logit_difference": float(np.abs(ours - theirs).max()),
            "same_argmax": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        }
        print(source.stem, name, json.dumps(results[name]), flush=True)
    return results


def main() -> None:
    """Compare on the embedded model and on a random one with wide rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        loaded = load(export_embedded(work / "embedded.gguf"))
        assert loaded.tokenizer is not None
        tokens = loaded.tokenizer.encode(TEXT * 3)
        theirs = llama_cpp.Llama(str(work / "embedded.gguf"), vocab_only=True, verbose=False)
        assert tokens == theirs.tokenize((TEXT * 3).encode(), special=True)
        results["embedded"] = compare(work / "embedded.gguf", tokens, arguments.formats)
        write_checkpoint(WIDE, work / "wide")
        vocabulary = invented_tokens(WIDE["vocab_size"])
        export(work / "wide", work / "wide.gguf", "llama", tokenizer=vocabulary)
        tokens = [(7 * index * index + 3 * index + 1) % 512 for index in range(64)]
        results["wide"] = compare(work / "wide.gguf", tokens, arguments.formats)
    print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "results": results}))


if __name__ == "__main__":
    main()

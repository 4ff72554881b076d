"""Our GGUF files and llama.cpp's: what each reads of the other's, and whose are better.

Needs the packages ``gguf`` and ``llama-cpp-python`` (any build; CPU will do), and the repository's
tests on the path: ``PYTHONPATH=. python benchmarks/gguf_against_llama_cpp.py read`` or ``write``.

``read``, for files that llama.cpp quantized: whether every tensor has, bit for bit, the values that
the ``gguf`` package gives; the KL divergence of our next-token probabilities (float32) from
llama.cpp's on the same file; and, for scale, that of llama.cpp on this file from llama.cpp on the
float32 file, which is what the format itself costs. llama.cpp also quantizes activations, and we do
not.

``write``, for files that ``ridgeline convert`` wrote: whether llama.cpp cuts 50 texts into the same
tokens; the KL divergence of our probabilities from llama.cpp's on the same file; and what the file
costs beside one of the same mix by ``llama_model_quantize``, both run by llama.cpp on the same
tokens: without importance, with the same importance matrix, and with GPTQ in place of our rounding
against llama.cpp with the importance matrix. Texts are files of this repository; those of
calibration are others than those of evaluation. ``--model`` names a folder instead of the embedded
model.

The last line is JSON.
"""

import argparse
import ctypes
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from tests.parity.ours import load, run
from tests.weights.gguf_export import export, write_checkpoint

from benchmarks.embedded_gguf import embedded_folder, export_embedded
from ridgeline.compress.calibration import CalibrationText
from ridgeline.compress.imatrix import collect_importance
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.text import Tokenizer
from ridgeline.weights.conversion import convert_to_gguf
from ridgeline.weights.gguf import GGUFFile
from ridgeline.weights.gguf.imatrix import Importance
from ridgeline.weights.gguf.mixes import FILE_TYPES

FORMATS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M",
           "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")  # fmt: skip
WRITTEN = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m", "q2_k")
TEXT = 'def fibonacci(n):\n    """Return the n-th number."""\n    if n < 2:\n        return n\n'
# Wide enough that all rows are whole K blocks, which the embedded model's are not.
WIDE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 768,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
}  # fmt: skip
CALIBRATION, EVALUATION = ("docs/[c-l]*.md", "src/ridgeline/engine/*.py"), (
    "docs/[m-s]*.md", "src/ridgeline/planning/*.py",
)  # fmt: skip
WINDOW_TOKENS, CALIBRATION_WINDOWS = 384, 32


def invented_tokens(count: int) -> dict[str, object]:
    """A vocabulary of ``count`` tokens, for llama.cpp to load a model without one."""
    return {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", *(f"t{index}" for index in range(1, count))],
        "ggml.token_type": [2] + [1] * (count - 1),
        "ggml.scores": [0.0] * count,
    }


def quantized(source: Path, file_type: int, importance: Importance | None = None) -> Path:
    """The file in the format of ``llama_ftype`` number ``file_type``, made by llama.cpp."""
    path = source.with_name(f"{source.stem}-theirs.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 1
    if importance is not None:
        values = {
            name: np.ascontiguousarray(sums / np.maximum(importance.counts[name], 1)[:, None])
            for name, sums in importance.sums.items()
        }
        entries = (llama_cpp.llama_model_imatrix_data * (len(values) + 1))()
        for entry, (name, means) in zip(entries, values.items(), strict=False):
            entry.name, entry.size = name.encode(), means.size
            entry.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = ctypes.cast(entries, type(params.imatrix))
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params)
    assert status == 0, file_type
    return path


def their_logits(path: Path, windows: list[list[int]]) -> np.ndarray:
    """llama.cpp's logits ``[T, V]`` of token windows, its KV cache in float32."""
    model = llama_cpp.Llama(
        str(path), n_ctx=512, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    found = []
    for tokens in windows:
        model.reset()
        model.eval(tokens)
        found.append(np.array(model.scores[: len(tokens)], dtype=np.float64))
    model.close()
    return np.concatenate(found)


def divergences(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    """KL(p ‖ q) at each position, in nats."""
    log_p = p_logits - np.logaddexp.reduce(p_logits, axis=-1, keepdims=True)
    log_q = q_logits - np.logaddexp.reduce(q_logits, axis=-1, keepdims=True)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean KL(p ‖ q) over positions, in nats."""
    return float(divergences(p_logits, q_logits).mean())


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
    full = their_logits(source, [tokens])
    results: dict[str, object] = {}
    for name in ["F32", *formats]:
        number = 0 if name == "F32" else getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        path = source if name == "F32" else quantized(source, number)
        theirs = full if name == "F32" else their_logits(path, [tokens])
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


def windows_of(tokenizer: Tokenizer, patterns: tuple[str, ...], count: int) -> list[list[int]]:
    """Windows spread evenly over the files, each after the first token of a text."""
    files = sorted(file for pattern in patterns for file in Path().glob(pattern))
    start = tokenizer.encode("")
    tokens = [
        token
        for file in files
        for token in tokenizer.encode(file.read_text(), add_special_tokens=False)
    ]
    step = (len(tokens) - WINDOW_TOKENS) // count
    return [start + tokens[i * step : i * step + WINDOW_TOKENS - 1] for i in range(count)]


def same_tokens(path: Path, tokenizer: Tokenizer) -> int:
    """How many of 50 texts of this repository llama.cpp cuts as we do."""
    files = sorted(Path().glob("docs/**/*.md"))[:25] + sorted(Path().glob("tests/text/**/*.py"))
    files += sorted(Path().glob("src/ridgeline/**/*.py"))
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    texts = [file.read_text()[:20_000] for file in files[:50]]
    assert len(texts) == 50
    return sum(
        tokenizer.encode(text, add_special_tokens=False)
        == theirs.tokenize(text.encode(), add_bos=False, special=True)
        for text in texts
    )


def by_gptq(folder: Path, path: Path, file_type: str, windows: list[list[int]]) -> None:
    """As ``ridgeline quantize --format gguf`` writes it."""
    text = CalibrationText(source="this repository", windows=tuple(map(tuple, windows)))
    recipe = Recipe(format="gguf", gguf_type=file_type)
    quantize(LayeredModel.open(str(folder)), path, recipe, text)


def compare_written(
    folder: Path, work: Path, types: list[str], num_windows: int
) -> dict[str, object]:
    """Figures for each type that ``ridgeline convert`` writes of the model in ``folder``."""
    loaded = load(folder)
    assert loaded.tokenizer is not None
    source = work / "f32.gguf"
    convert_to_gguf(folder, source, "f32", name=folder.name)
    windows = windows_of(loaded.tokenizer, EVALUATION, num_windows)
    calibration = windows_of(loaded.tokenizer, CALIBRATION, CALIBRATION_WINDOWS)
    importance = collect_importance(loaded.model, calibration, dataset="this repository")
    full = their_logits(source, windows)
    results: dict[str, object] = {"same_tokens_of_50": same_tokens(source, loaded.tokenizer)}
    print(folder.name, json.dumps(results), flush=True)
    for file_type in types:
        for label in ("plain", "imatrix", "gptq"):
            path, given = (
                work / f"{file_type}-{label}.gguf",
                None if label == "plain" else importance,
            )
            if label == "gptq":
                by_gptq(folder, path, file_type, calibration)
            else:
                convert_to_gguf(folder, path, file_type, name=folder.name, importance=given)
            other = quantized(source, FILE_TYPES[file_type].number, given)
            formats = [
                {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(each).tensors}
                for each in (path, other)
            ]
            assert formats[0] == formats[1], "another mix"
            theirs = their_logits(path, windows)
            tokens = windows[0]
            ours = run(load(path).model, tokens, prompt_tokens=len(tokens)).astype(np.float64)
            kl, kl_other = (
                divergences(full, theirs),
                divergences(full, their_logits(other, windows)),
            )
            results[f"{file_type} {label}"] = {
                "kl_of_ours_in_llama_cpp_to_ours_here": divergence(theirs[: len(tokens)], ours),
                "kl": float(kl.mean()),
                "kl_llama_quantize": float(kl_other.mean()),
                "ratio": float(kl.mean() / kl_other.mean()),
                "paired_difference": [
                    float((kl - kl_other).mean()), float((kl - kl_other).std() / len(kl) ** 0.5)
                ],
                "same_top": float((full.argmax(-1) == theirs.argmax(-1)).mean()),
                "bytes": path.stat().st_size,
            }  # fmt: skip
            print(file_type, label, json.dumps(results[f"{file_type} {label}"]), flush=True)
            path.unlink()
            other.unlink()
    return results


def compare_read(work: Path, formats: list[str]) -> dict[str, object]:
    """The embedded model and a random one with wide rows, quantized by llama.cpp."""
    results: dict[str, object] = {}
    loaded = load(export_embedded(work / "embedded.gguf"))
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer.encode(TEXT * 3)
    theirs = llama_cpp.Llama(str(work / "embedded.gguf"), vocab_only=True, verbose=False)
    assert tokens == theirs.tokenize((TEXT * 3).encode(), special=True)
    results["embedded"] = compare(work / "embedded.gguf", tokens, formats)
    write_checkpoint(WIDE, work / "wide")
    vocabulary = invented_tokens(WIDE["vocab_size"])
    export(work / "wide", work / "wide.gguf", "llama", tokenizer=vocabulary)
    tokens = [(7 * index * index + 3 * index + 1) % 512 for index in range(64)]
    results["wide"] = compare(work / "wide.gguf", tokens, formats)
    return results


def main() -> None:
    """Compare what is read, or what is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("read", "write"))
    parser.add_argument("--formats", nargs="*", help="of read: names of llama.cpp; of write: types")
    parser.add_argument("--model", type=Path, help="of write: a folder; default: embedded")
    parser.add_argument("--windows", type=int, default=16, help="of write: of 384 tokens each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if arguments.what == "read":
            results = compare_read(work, arguments.formats or list(FORMATS))
        else:
            folder = arguments.model or embedded_folder()
            types = arguments.formats or list(WRITTEN)
            results = compare_written(folder, work, types, arguments.windows)
    print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "results": results}))


if __name__ == "__main__":
    main()

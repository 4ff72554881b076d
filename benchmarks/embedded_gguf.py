"""The embedded model as GGUF, for comparisons with llama.cpp; needs the package ``gguf``."""

import json
from importlib import resources
from pathlib import Path

import gguf
from tests.weights.gguf_export import export


def embedded_folder() -> Path:
    """The embedded model as it ships."""
    return Path(str(resources.files("ridgeline").joinpath("assets", "target")))


def export_embedded(path: Path, matrices: str = "F32") -> Path:
    """Write the embedded model, its matrices in F32, BF16, F16 or another format of ``gguf``'s."""
    folder, kind = embedded_folder(), gguf.GGMLQuantizationType[matrices]
    export(folder, path, "llama", matrices=kind, tokenizer=_tokenizer_metadata(folder))
    return path


def _tokenizer_metadata(folder: Path) -> dict[str, object]:
    """The embedded tokenizer as GGUF spells it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "llama-bpe",
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token in special else 1 for token in tokens],
        "ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0,
    }

"""Writes trained models and held-out texts into the asset folder."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from recipes.embedded.corpus import CODE_KINDS, Document
from ridgeline.compress.trainable import TrainableLlama, export_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
HELD_OUT_CODE_BYTES = 84_000
HELD_OUT_PROSE_BYTES = 54_000
MAX_EXCERPT_CHARS = 8_000


def export_model(*, model: TrainableLlama, tokenizer: Path, folder: Path) -> None:
    """Writes a Hugging Face folder with bfloat16 weights; ``tokenizer`` holds its files."""
    export_weights(model=model, folder=folder, dtype=torch.bfloat16)
    generation = json.loads((tokenizer / "generation_config.json").read_text(encoding="utf-8"))
    config = model.shape.hf_config(
        bos_token_id=generation["bos_token_id"], eos_token_ids=generation["eos_token_id"]
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)


def _excerpts(documents: Sequence[Document], kind: str, limit_bytes: int) -> list[dict[str, str]]:
    """The beginnings of documents in the order of a seeded shuffle, up to ``limit_bytes``."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    kept: list[dict[str, str]] = []
    size = 0
    for i in order:
        text = documents[i].text[:MAX_EXCERPT_CHARS]
        size += len(text.encode())
        if size > limit_bytes:
            break
        kept.append(asdict(Document(kind=kind, path=documents[i].path, text=text)))
    return kept


def export_held_out(*, documents: Sequence[Document], folder: Path) -> None:
    """Writes ``heldout.jsonl``: excerpts, of which ``kind`` is "code" or "prose"."""
    folder.mkdir(parents=True, exist_ok=True)
    code = [document for document in documents if document.kind in CODE_KINDS]
    prose = [document for document in documents if document.kind not in CODE_KINDS]
    lines = [
        *_excerpts(code, "code", HELD_OUT_CODE_BYTES),
        *_excerpts(prose, "prose", HELD_OUT_PROSE_BYTES),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "heldout.jsonl").write_text(text, encoding="utf-8")

"""Real shapes with random weights: a folder of a config, and a tokenizer that knows every token."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from ridgeline.models import PRESETS


@contextmanager
def shape_folder(preset: str) -> Iterator[Path]:
    """For ``load_format="dummy"``; each token is a word, so that streams have text at each."""
    config = dict(PRESETS[preset])
    words = {f"Ġ{number:x}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer.save(str(folder / "tokenizer.json"))
        yield folder

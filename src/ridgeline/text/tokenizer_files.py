"""Building the Rust tokenizer from whichever files a folder has."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import TokenizerError
from ridgeline.text.reading import backend_errors, read_bytes, read_json
from ridgeline.text.special_tokens import SpecialTokens, add_missing_tokens

_NO_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*(?:null|"")')
_UNIGRAM_VOCAB = re.compile(rb'"vocab"\s*:\s*\[')
_UNIGRAM_TOKEN_CHARS = 1024
_ESCAPED_LETTER = re.compile(rb"\\u00(?:6[1-9A-Fa-f]|7[0-9Aa]|5[Ff])")
_TOKENIZER_LIMIT_BYTES = 512 << 20

# transformers' Qwen2Tokenizer, whose older checkpoints have no tokenizer.json
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer; without one a model still takes token ids."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    return any((folder / name).exists() for name in names)


def load_backend(folder: Path, config: dict[str, Any], tokens: SpecialTokens) -> Backend:
    """Build the Rust tokenizer from whichever files the folder has.

    ``tokenizer.json`` is taken as it is: as in transformers 5, ``add_bos_token`` and
    ``add_eos_token`` do not change its post-processor. They rule where there is none.
    """
    if not folder.is_dir():
        raise TokenizerError("There is no model folder to load a tokenizer from.")
    data = read_bytes(folder / "tokenizer.json", _TOKENIZER_LIMIT_BYTES)
    if data is not None:
        _check_what_would_abort(data)
        with backend_errors("tokenizer.json is damaged or of an unknown format"):
            return Backend.from_buffer(data)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_vocab_and_merges(folder, config, tokens)
    if (folder / "tokenizer.model").is_file():
        raise TokenizerError(
            "The folder has only a SentencePiece tokenizer.model; convert it to tokenizer.json "
            "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    raise TokenizerError("The folder has no tokenizer.json, nor vocab.json with merges.txt.")


def _check_what_would_abort(data: bytes) -> None:
    """Refuse what kills the process inside the library, past any except clause; TokenizerError.

    A BPE whose merges lack its ``continuing_subword_prefix``: the library cuts that many bytes off
    each right-hand side unseen, perhaps inside a character. A very long token of a Unigram: the
    trie is freed by recursion, which overflows the stack. Files that have neither a prefix, nor a
    vocabulary that is a list, nor letters spelt as escapes, are not parsed twice.
    """
    prefixes = data.count(b"continuing_subword_prefix")
    plain = prefixes == len(_NO_PREFIX.findall(data)) and not _UNIGRAM_VOCAB.search(data)
    if plain and not _ESCAPED_LETTER.search(data):
        return
    with backend_errors("tokenizer.json is damaged or of an unknown format"):
        model = json.loads(data)["model"]
        prefix = model.get("continuing_subword_prefix") or ""
        merges = (model.get("merges") or []) if prefix else []
        rights = [pair.split(" ")[1] if isinstance(pair, str) else pair[1] for pair in merges]
        if any(not right.startswith(prefix) for right in rights):
            raise TokenizerError("The merges in tokenizer.json lack the prefix that it declares.")
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, list) and any(
            len(token) > _UNIGRAM_TOKEN_CHARS for token, _ in vocabulary
        ):
            raise TokenizerError(
                f"tokenizer.json has a token of more than {_UNIGRAM_TOKEN_CHARS} characters."
            )


def _from_vocab_and_merges(folder: Path, config: dict[str, Any], tokens: SpecialTokens) -> Backend:
    """Build the byte-level BPE of GPT-2 (or of Qwen2, where the config names that class)."""
    vocabulary = read_json(folder / "vocab.json")
    if any(isinstance(token, str) and token.startswith("▁") for token in vocabulary):
        raise TokenizerError(
            "vocab.json is not a byte-level vocabulary; a tokenizer.json is needed."
        )
    with backend_errors("vocab.json or merges.txt is damaged"):
        merges = [
            (left, right)
            for line in (folder / "merges.txt").read_text("utf-8").splitlines()
            if line.strip() and not line.startswith("#version")
            for left, right in [line.split(" ")]
        ]
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
        backend.decoder = decoders.ByteLevel()
        prefix = config.get("add_prefix_space") is True
        if str(config.get("tokenizer_class")).startswith("Qwen2"):
            defaults = {"eos_token", "unk_token", "pad_token"}
            backend.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated")
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        else:
            defaults = {"bos_token", "eos_token", "unk_token"}
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokens.set_defaults(dict.fromkeys(sorted(defaults - config.keys()), "<|endoftext|>"))
        add_missing_tokens(backend, tokens)
        _set_post_processor(backend, config, tokens)
        return backend


def _set_post_processor(backend: Backend, config: dict[str, Any], tokens: SpecialTokens) -> None:
    bos, eos = tokens.named.get("bos_token"), tokens.named.get("eos_token")
    before = [bos.content] if bos and config.get("add_bos_token") is True else []
    after = [eos.content] if eos and config.get("add_eos_token") is True else []
    if not before and not after:
        return
    special = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=special
    )

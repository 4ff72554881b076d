"""Small tokenizers of the well-known kinds, trained here, and folders that hold them."""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "Hello, world! How are you?  I'm fine.",
    "Grüße aus Köln — naïve café, Ångström, İstanbul, Straße",
    "你好,世界!日本語のテキスト。한국어 문장",
    "emoji 🏳️‍🌈👩‍👩‍👧‍👦🎉 e\u0301 combining \u200b zero",
    " leading and trailing  \n\n\ttabs\r\nand\u00a0nbsp\u3000wide ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # <b>&amp;</b>\n",
    "1234567890 3.14e-10 0xFF 1,000,000",
    "العربية עברית हिन्दी ไทย 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \x00\x07\x7f\ufeff\ufffd",
    "▁underline▁ Ġ and <0x41> </s> <s>x</s> <|end|>y <unk>",
    "",
    " ",
    "\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]
_WORDS = ["the", "of", "and", "hello", "world", "token", "café", "你好", "Köln", "return", "def"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _corpus() -> list[str]:
    rng = random.Random(0)
    made = [" ".join(rng.choices(_WORDS, k=12)) for _ in range(200)]
    return made + [text for text in TEXTS[:7] for _ in range(3)]


def _bpe(special: list[str], **options: Any) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, show_progress=False, **options
    )


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _demote(tokenizer: Tokenizer, keep: int) -> Tokenizer:
    """Make ordinary vocabulary of the added tokens from index ``keep`` on."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:keep]
    return Tokenizer.from_str(json.dumps(state))


def _gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_corpus(), _bpe(["<|endoftext|>"], initial_alphabet=alphabet))
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=False), AddedToken("ąę你")])
    end = "<|endoftext|>"
    return tokenizer, {"bos_token": end, "eos_token": end, "unk_token": end}


def _llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_corpus(), _bpe([], initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
            ),
        ]
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "<|end|>"}


def _sentencepiece_bpe(style: str) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama2":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        parts.append(decoders.Strip(" ", 1, 0))
    elif style == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    if style == "gemma":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.train_from_iterator(_corpus(), _bpe([*special, *_byte_tokens()], limit_alphabet=90))
    tokenizer = _demote(tokenizer, len(special))
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", bos)]
    )
    tokenizer.add_tokens([AddedToken("<|end|>", normalized=False)])
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _unigram(byte_fallback: bool) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if byte_fallback:
        state = json.loads(tokenizer.to_str())
        state["model"]["vocab"] += [[token, -20.0] for token in _byte_tokens()]
        state["model"]["byte_fallback"] = True
        tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    end = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", end)]
    )
    return tokenizer, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def _wordpiece() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer, {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def _end_of_word() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.train_from_iterator(_corpus(), _bpe(["<unk>"], end_of_word_suffix="</w>"))
    return tokenizer, {"unk_token": "<unk>"}


def _no_decoder() -> tuple[Tokenizer, dict[str, Any]]:
    vocabulary = {word: index for index, word in enumerate(["<unk>", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer, {"unk_token": "<unk>", "bos_token": "<s>"}


_BUILDERS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "gpt2": _gpt2,
    "llama3": _llama3,
    "llama2": functools.partial(_sentencepiece_bpe, "llama2"),
    "metaspace": functools.partial(_sentencepiece_bpe, "metaspace"),
    "gemma": functools.partial(_sentencepiece_bpe, "gemma"),
    "unigram": functools.partial(_unigram, False),
    "unigram-bytes": functools.partial(_unigram, True),
    "wordpiece": _wordpiece,
    "end-of-word": _end_of_word,
    "no-decoder": _no_decoder,
}
KINDS = tuple(_BUILDERS)


@functools.cache
def build(kind: str) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a backend tokenizer and the special tokens of its configuration."""
    return _BUILDERS[kind]()


def write_folder(folder: Path, kind: str, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json of a kind into ``folder``."""
    tokenizer, special = build(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text("{}")
    return folder

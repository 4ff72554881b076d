"""The pre-tokenizers of byte-level BPE by the names that GGUF files give them.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) and leaves out how it splits. The
patterns are those of the models' own ``tokenizer.json``; llama.cpp has them, rewritten for its
engine, in ``llm_tokenizer_bpe`` (``src/llama-vocab.cpp``), with the names in ``llama_vocab::load``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The pattern that cl100k made common; ``digits`` is how numbers are cut."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
    )


def _cased_words(digits: str, ending: str) -> str:
    """o200k's: a word is cut before a capital letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORDS = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x"
    r"{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-"
    r"𑣟𞤀-𞥃]+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenization:
    """How a text is cut before BPE.

    Attributes:
        patterns: applied one after the other, each to the pieces of the one before; every match is
            a piece, and so is what lies between.
        nfc: the text is put into Unicode's composed form first.
        ignore_merges: a piece that is a token is taken whole, whatever the merges.
        add_bos: whether a sequence starts with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> Normalizer | None:
        """The normalizer of ``tokenizers``, if one is needed."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        """The pre-tokenizer of ``tokenizers``, which ends in bytes spelt as characters."""
        steps: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_DIGITS_3 = r"\p{N}{1,3}"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_LLAMA3 = PreTokenization(patterns=(_words(_DIGITS_3),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenization(patterns=(_words(_DIGITS_3),))
_QWEN2 = PreTokenization(patterns=(_words(r"\p{N}"),), nfc=True)
_SINGLE_DIGITS = PreTokenization(patterns=(r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenization(patterns=(_GPT2,))
_GPT4O = PreTokenization(patterns=(_cased_words(_DIGITS_3, f"{_CONTRACTIONS}?"),))
_BLOOM = PreTokenization(patterns=(r" ?[^(\s|[.,!?…。，、।۔،])]+",))
_BAILING = PreTokenization(
    patterns=(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_DEEPSEEK_V3 = PreTokenization(patterns=(_DIGITS_3, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS))

PRE_TOKENIZATIONS: Mapping[str, PreTokenization] = {
    # What llama.cpp takes where a file says "default" or nothing.
    "default": PreTokenization(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    "glm4": PreTokenization(patterns=(_words(_DIGITS_3),), ignore_merges=True),
    "deepseek-llm": PreTokenization(
        patterns=(
            r"[\r\n]",
            _DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenization(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "falcon": PreTokenization(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    "command-r": PreTokenization(patterns=(r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion",
         "granite-docling"),
        _PLAIN_GPT2,
    ),
    **dict.fromkeys(("mpt", "olmo"), PreTokenization(patterns=(_GPT2,), nfc=True)),
    **dict.fromkeys(("qwen2", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "hunyuan", "kormo", "solar-open", "grok-2"),
        PreTokenization(patterns=(_words(r"\p{N}"),)),
    ),
    "qwen35": PreTokenization(
        patterns=(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
        )
    ),
    "seed-coder": PreTokenization(
        patterns=(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenization(patterns=(*_BLOOM.patterns, r"\p{N}")),
    "tekken": PreTokenization(
        patterns=(_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tiny_aya": PreTokenization(patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns)),
}  # fmt: skip

"""A tokenizer as the metadata of a GGUF file says it: the inverse of `gguf_tokenizer`.

A GGUF file does not hold how text is cut before BPE, but the name of a rule that its readers know
(``tokenizer.ggml.pre``). The rule is found by trying: what is written is read again, and must cut
texts of many kinds into the same tokens as the tokenizer that it came from. A tokenizer for which
no rule does is refused, since a file with a wrong one would be read without complaint.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from ridgeline.core.errors import TokenizerError
from ridgeline.text.gguf_tokenizer import END_KEYS, NAMED_TOKENS, TEMPLATE_KEY, tokenizer_from_gguf
from ridgeline.text.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from ridgeline.text.pre_tokenizers import PRE_TOKENIZATIONS, PreTokenization
from ridgeline.text.tokenizer import Tokenizer

# Digits by one, by three and at both ends; contractions in both cases; camel case; marks beside
# letters and line ends; runs of spaces, tabs and line ends; accents composed and not; scripts with
# and without spaces; emoji; code.
_PROBES = (
    "Hello world, it's 12345678 o'clock; WE'LL see: I'M, he'd  they've.\n\n  Next\tline \r\n end  ",
    "camelCaseWords HTTPServer2 x=1234567.89e-10 3rd 4.5.6 $12,345.60 #7f7f7f a_b__c 1st1000",
    "def f(x):\n    if x >= 10:\n\t\treturn {'a': [1, 2, 3]}  # done!!!\n\n\n\nclass A: pass",
    "café cafe\u0301 Ünïcödé naïve ĳ ﬁ Ⅷ ½ ² µ Ω \u00a0nbsp\u2003em \u200bzero",
    "中文分词测试，第123章。日本語のテキスト、カタカナ 한국어 문장입니다",
    "ภาษาไทย हिन्दी العربية 12٣٤ עברית",
    "Русский ТЕКСТ и українська; Ελληνικά ΚΕΦΑΛΑΊΑ ǅ 🙂🙃👩\u200d👩\u200d👧🇩🇪 ✓ → ∑∫",
    "“quotes” ‘single’ — dash … end",
    "    four\n        eight\n \n  \n\t\n   trailing   ",
    "https://example.org/a?b=c&d=%20e, mail@example.org C:\\path\\file (a)[b]{c}<d>/e|f~g^h`i",
    "123 1234 12345 123456 1,234,567 0x1F 1e9 ١٢٣٤٥ '12 's'S 're'RE ''' !!!",
    "??? ...\n\n\n...",
)  # fmt: skip
_FIRST_CHOICES = (
    "gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken", "dbrx", "glm4", "deepseek-v3",
    "deepseek-llm", "deepseek-coder", "falcon", "starcoder", "command-r", "mpt",
)  # fmt: skip
_SPACE = "▁"
_MAX_ENDS = len(END_KEYS)


def gguf_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, object]:
    """``tokenizer.*`` for a tokenizer whose model has ``vocab_size`` rows of embeddings.

    Raises:
        TokenizerError: it is of a kind that GGUF cannot say, it has more tokens than the model, or
            none of the known rules cuts text as it does.
    """
    content = json.loads(tokenizer.to_json())
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(
            f"A tokenizer of model {ascii(model.get('type'))[:40]} is not written as GGUF; BPE is."
        )
    tokens = _tokens(tokenizer, vocab_size)
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    by_bytes = bool(model.get("byte_fallback"))
    unknown = model.get("unk_token")
    kinds = [
        UNUSED
        if tokenizer.token_to_id(token) != index
        else _kind(token, special, by_bytes, unknown)
        for index, token in enumerate(tokens)
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    metadata: dict[str, object] = {
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": np.array(kinds, np.int32),
        **_named(tokenizer),
        **_templates(tokenizer.chat_template),
    }
    if by_bytes:
        metadata[f"{PREFIX}scores"] = np.array(_scores(model, tokens), np.float32)
        choices = [
            {f"{PREFIX}model": "llama", f"{PREFIX}pre": "default", f"{PREFIX}add_space_prefix": add}
            for add in (True, False)
        ]
    else:
        metadata[f"{PREFIX}merges"] = merges
        choices = [{f"{PREFIX}model": "gpt2", f"{PREFIX}pre": name} for name in _rules(content)]
    for choice in choices:
        found = {**choice, **metadata}
        if _is_same(found, tokenizer):
            return found
    raise TokenizerError(
        "No rule that GGUF readers know (tokenizer.ggml.pre) cuts text into the tokens of this "
        "tokenizer, so that a file with one would be read wrongly; it is not written."
    )


def _rules(content: Mapping[str, Any]) -> list[str]:
    """The names of rules, of those that are equal one, the likeliest first.

    Rules that cut the probes alike come first; but others too may give the same tokens.
    """
    source = Backend.from_str(json.dumps(content))
    wanted = _pieces(source.normalizer, source.pre_tokenizer)
    ignores = bool(content["model"].get("ignore_merges"))
    first: dict[PreTokenization, str] = {}
    for name in (*_FIRST_CHOICES, *PRE_TOKENIZATIONS):
        first.setdefault(PRE_TOKENIZATIONS[name], name)
    return sorted(
        first.values(),
        key=lambda name: (
            _pieces(PRE_TOKENIZATIONS[name].normalizer(), PRE_TOKENIZATIONS[name].pre_tokenizer())
            != wanted,
            PRE_TOKENIZATIONS[name].ignore_merges != ignores,
        ),
    )


def _pieces(normalizer: Normalizer | None, cut: PreTokenizer | None) -> list[list[str]] | None:
    """The probes, cut."""
    if cut is None:
        return None
    texts = (text if normalizer is None else normalizer.normalize_str(text) for text in _PROBES)
    return [[piece for piece, _ in cut.pre_tokenize_str(text)] for text in texts]


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """The text of each id; ids without a token are filled as llama.cpp's converter does."""
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"The tokenizer has {tokenizer.vocab_size} tokens and the model {vocab_size}."
        )
    found = (tokenizer.id_to_token(index) for index in range(vocab_size))
    return [f"[PAD{i}]" if token is None else token for i, token in enumerate(found)]


def _kind(token: str, special: Mapping[str, bool], by_bytes: bool, unknown: str | None) -> int:
    if by_bytes and token == unknown:
        return UNKNOWN
    if token in special:
        return CONTROL if special[token] else USER_DEFINED
    is_byte = by_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return BYTE if is_byte else NORMAL


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece's order of merging: a token's score is less the rank of its first merge.

    ``tokenizer.json`` keeps the order and not the scores, and only the order counts.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        parts = pair.split(" ", 1) if isinstance(pair, str) else pair
        ranks.setdefault("".join(parts), rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _named(tokenizer: Tokenizer) -> dict[str, object]:
    """Ids of special tokens, and whether a text begins and ends with them."""
    keys: dict[str, object] = {}
    for name, key in NAMED_TOKENS.items():
        token = tokenizer.special_tokens.get(name)
        index = None if token is None else tokenizer.token_to_id(token)
        if index is not None:
            keys[f"{PREFIX}{key}"] = index
    first = keys.get(f"{PREFIX}eos_token_id")
    if tokenizer.eos_token_ids and first not in tokenizer.eos_token_ids:
        first = min(tokenizer.eos_token_ids)
    ends = ([] if first is None else [first]) + sorted(tokenizer.eos_token_ids - {first})
    if len(ends) > _MAX_ENDS:
        raise TokenizerError(
            f"The model has {len(ends)} tokens that end a text, and GGUF names {_MAX_ENDS}."
        )
    keys |= {f"{PREFIX}{key}": index for key, index in zip(END_KEYS, ends, strict=False)}
    bare, full = (tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
    before = None if start is None else full[:start]
    after = None if start is None else full[start + len(bare) :]
    bos = keys.get(f"{PREFIX}bos_token_id")
    eos = keys.get(f"{PREFIX}eos_token_id")
    if before not in ([], [bos]) or after not in ([], [eos]):
        raise TokenizerError(
            f"With special tokens the tokenizer makes {full} of the tokens {bare}; GGUF can only "
            f"say BOS before a text (here {_id_or_none(bos)}) and EOS after it "
            f"(here {_id_or_none(eos)}). tokenizer_config.json names them: bos_token, eos_token."
        )
    keys[f"{PREFIX}add_bos_token"] = bool(before)
    keys[f"{PREFIX}add_eos_token"] = bool(after)
    return keys


def _id_or_none(token_id: object) -> str:
    return "none is named" if token_id is None else str(token_id)


def _templates(template: str | Mapping[str, str] | None) -> dict[str, object]:
    if template is None:
        return {}
    if isinstance(template, str):
        return {TEMPLATE_KEY: template}
    others = {name: text for name, text in template.items() if name != "default"}
    keys: dict[str, object] = {f"{TEMPLATE_KEY}s": list(others)}
    keys |= {f"{TEMPLATE_KEY}.{name}": text for name, text in others.items()}
    return keys | ({TEMPLATE_KEY: template["default"]} if "default" in template else {})


def _is_same(metadata: Mapping[str, object], tokenizer: Tokenizer) -> bool:
    """Whether the metadata are read as a tokenizer that does what ``tokenizer`` does."""
    try:
        found = tokenizer_from_gguf(metadata)
    except TokenizerError:
        return False
    assert found is not None
    special = "text".join(tokenizer.special_tokens.values())
    return found.eos_token_ids >= tokenizer.eos_token_ids and all(
        found.encode(text) == tokenizer.encode(text) for text in (*_PROBES, special)
    )

"""The tokenizer of a GGUF file, from its metadata (``tokenizer.ggml.*``).

Models: ``gpt2`` is byte-level BPE with merges, ``llama`` SentencePiece's BPE with scores and
bytes for what the vocabulary lacks, ``gemma4`` the same with merges, ``t5`` SentencePiece's
Unigram. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import TokenizerError
from ridgeline.text.gguf_backends import byte_level_bpe, sentencepiece_bpe, unigram
from ridgeline.text.gguf_vocabulary import CONTROL, USER_DEFINED, Vocabulary
from ridgeline.text.pre_tokenizers import PRE_TOKENIZATIONS
from ridgeline.text.reading import backend_errors
from ridgeline.text.tokenizer import Tokenizer

_SENTENCEPIECE_BPE = ("gemma4", "llama")
_MODELS = ("gpt2", *_SENTENCEPIECE_BPE, "t5")
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files do not always give the end of a turn an id; llama.cpp goes by these texts too.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<turn|>", "<EOT>", "_<EOT>", "<|end_of_text|>",
    "<end_of_utterance>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_TEMPLATES = 64


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer | None:
    """The tokenizer that the metadata of a GGUF file describes, ``None`` if it describes none.

    Raises:
        TokenizerError: it is damaged, or of a kind that Ridgeline lacks.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model in ("none", "no_vocab"):
        return None
    if model not in _MODELS:
        raise TokenizerError(
            f"The GGUF file has a tokenizer of model {ascii(model)[:40]}; supported are "
            f"{', '.join(_MODELS)}."
        )
    vocabulary = Vocabulary(metadata)
    with backend_errors("The tokenizer in the GGUF file cannot be used"):
        if model == "gpt2":
            pre = vocabulary.text("pre", "default")
            if pre not in PRE_TOKENIZATIONS:
                raise TokenizerError(
                    f"The GGUF file has the pre-tokenizer {ascii(pre)[:40]}, which Ridgeline does "
                    "not have; give a folder with a tokenizer.json instead."
                )
            backend = byte_level_bpe(vocabulary, PRE_TOKENIZATIONS[pre])
            defaults = (PRE_TOKENIZATIONS[pre].add_bos, False)
        elif model in _SENTENCEPIECE_BPE:
            backend, defaults = sentencepiece_bpe(vocabulary), (True, False)
        else:
            backend, defaults = unigram(vocabulary), (False, True)
        _add_tokens(backend, vocabulary, runs_of_spaces=model == "gpt2")
        named = {
            name: vocabulary.tokens[index]
            for name, key in NAMED_TOKENS.items()
            if (index := vocabulary.token_id(key)) is not None
        }
        _set_post_processor(backend, vocabulary, named, defaults)
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_token_ids=_ends(vocabulary),
        chat_template=_chat_templates(metadata),
    )


def _add_tokens(backend: Backend, vocabulary: Vocabulary, *, runs_of_spaces: bool) -> None:
    """Tokens that are matched in the text as they are, control tokens among them (mutates).

    SentencePiece's models (Gemma) leave runs of spaces to the model: there they are ``▁``.
    """
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) and (token.strip(" ▁") or (runs_of_spaces and token))
    ]
    backend.add_tokens(added)


def _set_post_processor(
    backend: Backend, vocabulary: Vocabulary, named: Mapping[str, str], defaults: tuple[bool, bool]
) -> None:
    before, after = (
        [named[name]] if vocabulary.flag(key, default) and name in named else []
        for name, key, default in zip(
            ("bos_token", "eos_token"), ("add_bos_token", "add_eos_token"), defaults, strict=True
        )
    )
    if before or after:
        special = [(token, backend.token_to_id(token)) for token in {*before, *after}]
        # Placeholders by id, since a token may contain what a template would read.
        names = {token: f"T{index}" for token, index in special}
        backend.post_processor = processors.TemplateProcessing(
            single=[*(names[t] for t in before), "$A", *(names[t] for t in after)],
            special_tokens=[(names[token], index) for token, index in special],
        )


def _ends(vocabulary: Vocabulary) -> frozenset[int]:
    """The ids that end a text: those with a key, and control tokens that are known to."""
    ends = {vocabulary.token_id(key) for key in END_KEYS} - {None}
    known = {text: vocabulary.ids[text] for text in _END_TEXTS if text in vocabulary.ids}
    if "<|return|>" in known and "<|call|>" in known:
        known.pop("<|end|>", None)  # there it ends a message, and not the turn
    ends |= {index for index in known.values() if vocabulary.kinds[index] == CONTROL}
    return frozenset(index for index in ends if index is not None)


def _chat_templates(metadata: Mapping[str, object]) -> str | dict[str, str] | None:
    """The template, or templates by name where there are several."""
    names = metadata.get(f"{TEMPLATE_KEY}s", [])
    named = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    found = {name: metadata.get(f"{TEMPLATE_KEY}.{name}") for name in named[:_MAX_TEMPLATES]}
    found["default"] = metadata.get(TEMPLATE_KEY)
    templates = {name: text for name, text in found.items() if isinstance(text, str)}
    if not templates:
        return None
    return templates["default"] if templates.keys() == {"default"} else templates

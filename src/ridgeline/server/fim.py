"""Fill in the middle: the prompt that has a model write what stands between two texts."""

from ridgeline.engine.prompts import check_length
from ridgeline.server.context import Server
from ridgeline.server.errors import bad_request
from ridgeline.text import Tokenizer

# What stands before the prefix, the suffix and the middle, of each family of models.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral


def fim_token_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids of the prompt.

    Raises:
        ApiError: the tokenizer has no tokens for it.
    """
    form = _form(tokenizer)
    if not form:
        raise bad_request(
            "suffix: this model cannot fill in the middle, since its tokenizer has no tokens for "
            "it.",
            "suffix",
        )
    texts = {"Prompt": prefix, "Suffix": suffix}
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for mark, name in form:
        token = tokenizer.token_to_id(mark)
        assert token is not None
        ids.append(token)
        if text := texts.get(name):
            ids += tokenizer.encode(text, False)
    return ids


def fim_template(tokenizer: Tokenizer) -> str:
    """The prompt as Ollama's templates write it, by whose ``.Suffix`` its clients know a model that
    fills in the middle; empty if this one does not."""
    return "".join(mark + (f"{{{{ .{name} }}}}" if name else "") for mark, name in _form(tokenizer))


def _form(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Each mark and which text follows it, of the first family whose marks are all tokens."""
    for before, after, middle in _MARKS:
        form: tuple[tuple[str, str], ...] = ((before, "Prompt"), (after, "Suffix"), (middle, ""))
        if all(tokenizer.token_to_id(mark) is not None for mark, _ in form):
            return form
    form = tuple(zip(_SUFFIX_FIRST, ("Suffix", "Prompt"), strict=True))
    return form if all(tokenizer.token_to_id(mark) is not None for mark, _ in form) else ()


async def fim_prompt(server: Server, prefix: str, suffix: str) -> list[int]:
    """The same for a request: in a thread, and at once refused if it cannot fit the context.

    Raises:
        ApiError: the tokenizer has no tokens for it.
        ContextLengthError: the texts are longer than the context.
    """
    check_length(prefix + suffix, server.tokenizer, server.engine.config.max_model_len)
    num_chars = len(prefix) + len(suffix)
    return await server.in_thread(
        lambda: fim_token_ids(server.tokenizer, prefix, suffix), num_chars=num_chars
    )

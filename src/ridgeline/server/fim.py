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

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, False) if text else []

    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for marks in _MARKS:
        ids = [tokenizer.token_to_id(mark) for mark in marks]
        if None not in ids:
            before, after, middle = (each for each in ids if each is not None)
            return [*start, before, *encode(prefix), after, *encode(suffix), middle]
    first, second = (tokenizer.token_to_id(mark) for mark in _SUFFIX_FIRST)
    if first is not None and second is not None:
        return [*start, first, *encode(suffix), second, *encode(prefix)]
    raise bad_request(
        "suffix: this model cannot fill in the middle, since its tokenizer has no tokens for it.",
        "suffix",
    )


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

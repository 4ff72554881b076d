"""Prompts as callers give them: text or token ids, one or several."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from ridgeline.core.errors import ContextLengthError, InvalidRequestError
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.text import Tokenizer

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from a list or from a single one: a string, or whole numbers.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidRequestError(
            "Prompts must be a string, a list of token ids, or a list of such prompts."
        )
    is_single = bool(prompts) and isinstance(prompts[0], int | np.integer)
    return [cast(Prompt, prompts)] if is_single else list(prompts)


def check_length(prompt: Prompt, tokenizer: Tokenizer | None, max_model_len: int) -> None:
    """Refuse a prompt that cannot fit, before anything is done for each of its characters.

    Raises:
        ContextLengthError: it has too many token ids, or characters that are too many tokens
            however they are cut.
    """
    if len(prompt) <= max_model_len:
        return
    count, length = len(prompt), f"{len(prompt)} tokens"
    if isinstance(prompt, str):
        count = 0 if tokenizer is None else tokenizer.least_tokens(prompt)
        length = f"{len(prompt)} characters, which are {count} tokens or more,"
    if count > max_model_len:
        raise ContextLengthError(
            f"The prompt has {length} and the context holds {max_model_len}, output included."
        )


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, max_model_len: int) -> list[int]:
    """Token ids of a prompt.

    Raises:
        InvalidRequestError: text without a tokenizer, or no token at all.
        ContextLengthError: it is at once seen to be longer than the context.
    """
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | list | tuple):
        raise InvalidRequestError("A prompt must be a string or a list of token ids.")
    check_length(prompt, tokenizer, max_model_len)
    if not isinstance(prompt, str):
        return [int(token) if isinstance(token, np.integer) else token for token in prompt]
    if tokenizer is None:
        raise InvalidRequestError("This model has no tokenizer; give the prompt as token ids.")
    token_ids = tokenizer.encode(prompt)
    if not token_ids and tokenizer.bos_token_id is not None:
        token_ids = [tokenizer.bos_token_id]
    return token_ids


def check_token_ids(
    token_ids: Sequence[int],
    params: SamplingParams,
    output_token_ids: Sequence[int] = (),
    expected_token_ids: Sequence[int] = (),
    *,
    vocab_size: int,
) -> None:
    """Every token id that reaches the model or its logits lies within the vocabulary.

    Raises:
        InvalidRequestError: one does not, or the prompt is empty.
    """
    if not token_ids:
        raise InvalidRequestError("The prompt has no tokens.")
    for what, ids in (
        ("prompt", token_ids),
        ("output", output_token_ids),
        ("prediction", expected_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(f"The {what} must hold whole numbers as token ids.")
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"Token id {token_id} in {what} is not in the vocabulary of {vocab_size}."
                )

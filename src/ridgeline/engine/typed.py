"""Answers as Python values: the output follows the type's JSON Schema and is decoded into it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import FinishReason
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.engine.llm import LLM
from ridgeline.engine.prompts import Prompt

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 512


class TypedGenerator(Generic[T]):
    """Completes prompts with values of one type; made by `format`."""

    def __init__(self, llm: LLM, wanted: type[T], params: SamplingParams) -> None:
        self._llm = llm
        self._decoder = msgspec.json.Decoder(wanted)
        outputs = StructuredOutputs.of({"json": _schema(wanted)})
        self._params = replace(params, structured_outputs=outputs)

    def __call__(self, prompt: Prompt) -> T:
        """The value that the model gives after ``prompt``.

        Raises:
            InvalidRequestError: ``max_tokens`` ended the output before it was whole.
        """
        return self.each([prompt])[0]

    def each(self, prompts: Sequence[Prompt]) -> list[T]:
        """The value after each of several prompts, in one batch."""
        values = []
        for output in self._llm.generate(prompts, self._params):
            sample = output.outputs[0]
            if sample.finish_reason is not FinishReason.STOP:
                raise InvalidRequestError(
                    f"The output was cut after {len(sample.token_ids)} tokens, before it was "
                    "whole; raise max_tokens."
                )
            values.append(self._decoder.decode(sample.text))
        return values


def format(llm: LLM, wanted: type[T], params: SamplingParams | None = None) -> TypedGenerator[T]:  # noqa: A001
    """A function from prompts to values of a type.

    ``wanted``: int, float, bool, str, a date or time, an Enum or Literal, a list, dict, tuple or
    union of such, a dataclass, TypedDict or msgspec struct.

    Raises:
        InvalidRequestError: the type has no JSON Schema.
    """
    return TypedGenerator(llm, wanted, params or SamplingParams(max_tokens=DEFAULT_MAX_TOKENS))


def _schema(wanted: Any) -> dict[str, Any]:
    try:
        schema = msgspec.json.schema(wanted)
    except (TypeError, ValueError) as error:
        name = getattr(wanted, "__name__", str(wanted))
        raise InvalidRequestError(f"{name} cannot be described to a model: {error}") from error
    _close(schema)
    return schema


def _close(schema: Any) -> None:
    """Objects have no other keys than those of the type."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)

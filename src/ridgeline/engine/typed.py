"""Answers as Python values: the output follows the type's JSON Schema and is decoded into it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import FinishReason
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.engine.llm import LLM
from ridgeline.engine.prompts import Prompt

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 512
_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}(==|[A-Za-z0-9+/]=))?$"
_DECIMAL = r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?$"


class TypedGenerator(Generic[T]):
    """Completes prompts with values of one type; made by `format`."""

    def __init__(self, llm: LLM, wanted: type[T], params: SamplingParams) -> None:
        self._llm = llm
        outputs = StructuredOutputs.of({"json": _schema(wanted)})
        self._decoder = msgspec.json.Decoder(wanted)
        self._params = replace(params, structured_outputs=outputs)

    def __call__(self, prompt: Prompt) -> T:
        """The value that the model gives after ``prompt``.

        Raises:
            InvalidRequestError: ``max_tokens`` or a stop string ended the output before it was
                whole, or it is out of a bound of the type that its schema cannot say.
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
            try:
                values.append(self._decoder.decode(sample.text))
            except (msgspec.DecodeError, TypeError) as error:
                raise InvalidRequestError(f"The output is no such value: {error}") from error
        return values


def format(llm: LLM, wanted: type[T], params: SamplingParams | None = None) -> TypedGenerator[T]:  # noqa: A001
    """A function from prompts to values of a type.

    ``wanted``: int, float, bool, str, bytes, Decimal, a date, a datetime or time that is declared
    to have a time zone (``Annotated[datetime, msgspec.Meta(tz=True)]``), an Enum or Literal, a
    list, set, dict of str, tuple or union of such, a dataclass, TypedDict or msgspec struct.

    Raises:
        InvalidRequestError: the type has no JSON Schema.
    """
    return TypedGenerator(llm, wanted, params or SamplingParams(max_tokens=DEFAULT_MAX_TOKENS))


def _schema(wanted: Any) -> dict[str, Any]:
    try:
        schema = msgspec.json.schema(wanted)
        problem = next(filter(None, map(_problem, _parts(inspect.type_info(wanted)))), None)
    except (TypeError, ValueError) as error:
        problem = str(error).splitlines()[-1]
    if problem is not None:
        name = getattr(wanted, "__name__", str(wanted))
        raise InvalidRequestError(f"{name} cannot be described to a model: {problem}")
    _close(schema)
    return schema


def _parts(info: inspect.Type) -> Iterator[inspect.Type]:
    """A type and all that it is made of, but for what has a schema of the caller's own."""
    stack: list[Any] = [info]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif isinstance(node, inspect.Type | inspect.Field) and id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, inspect.Type):
                yield node
            own = node.extra_json_schema if isinstance(node, inspect.Metadata) else None
            if not own or own.keys().isdisjoint(("format", "pattern")):
                stack.extend(getattr(node, name) for name in node.__struct_fields__)


def _problem(info: inspect.Type) -> str | None:
    """Why msgspec's schema of a type lets other texts through."""
    if isinstance(info, inspect.DateTimeType | inspect.TimeType) and info.tz is not True:
        return "a datetime or time must be declared Annotated[…, msgspec.Meta(tz=True)]."
    if isinstance(info, inspect.DictType):
        key = info.key_type
        if not isinstance(key, inspect.StrType | inspect.AnyType):
            return "the keys of a dict must be str."
    return None


def _close(schema: Any) -> None:
    """Objects have no other keys than those of the type; what llguidance lacks is said by patterns.

    That the items of a set differ is not: the set drops them.
    """
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        if schema.get("uniqueItems") is True:
            del schema["uniqueItems"]
        if schema.get("contentEncoding") == "base64":
            schema["pattern"] = _BASE64
        if schema.get("format") == "decimal":
            del schema["format"]
            schema["pattern"] = _DECIMAL
        for value in schema.values():
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)

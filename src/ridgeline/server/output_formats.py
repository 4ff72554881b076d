"""What the output must look like, by whichever field a request says it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.server.closed_objects import closed
from ridgeline.server.errors import bad_request
from ridgeline.server.schemas import generation as schemas

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OURS = re.compile(r"structured_outputs\.\w+")
_UNNAMED = re.compile(r"A (schema|pattern) may ")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFormat:
    """``field``: the path of what the grammar was made from, as the request has it."""

    grammar: StructuredOutputs
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSchema:
    """A JSON Schema that stands in a ``format`` field of a route's own."""

    field: str
    schema: dict[str, Any]


def wanted_format(
    fields: schemas.Generation, own: FormatSchema | None = None
) -> WantedFormat | None:
    """What the output must look like, by whichever of the names was used; one at the most.

    Raises:
        ApiError: there are several, or it is none.
    """
    found = [*_structured(fields), *_guided(fields), *_response_format(fields)]
    if own is not None:
        found.append((own.field, f"{own.field}.schema", {"json": own.schema}))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise bad_request(f"{names} exclude each other.", found[1][0])
    if not found:
        return None
    _, path, value = found[0]
    if "json" in value:
        value = {"json": closed(value["json"])}
    try:
        grammar = StructuredOutputs.of(value)
    except InvalidRequestError as error:
        raise refused_format(error, [path]) from None
    assert grammar is not None
    return WantedFormat(grammar=grammar, field=path)


def refused_format(error: InvalidRequestError, fields: Sequence[str]) -> Exception:
    """The refusal of a grammar that was made from these fields, by their names.

    An error about something else is given back as it is.
    """
    text = str(error)
    if not fields:
        return error
    names = " or ".join(fields)
    if _UNNAMED.match(text):
        return bad_request(f"{names}: {text[0].lower()}{text[1:]}", fields[0])
    if _OURS.match(text):
        subject = f"{names}: a schema" if "tools" in fields else names
        return bad_request(_OURS.sub(subject, text, count=1), fields[0])
    return error


_Found = list[tuple[str, str, dict[str, Any]]]  # name, path, and a value for `StructuredOutputs.of`


def _structured(fields: schemas.Generation) -> _Found:
    name = "structured_outputs"
    if fields.structured_outputs is None:
        return []
    given = msgspec.structs.asdict(fields.structured_outputs)
    given = {kind: value for kind, value in given.items() if value not in (None, False)}
    if len(given) != 1:
        kinds = ", ".join(fields.structured_outputs.__struct_fields__)
        raise bad_request(f"{name} must have exactly one of {kinds}.", name)
    ((kind, value),) = given.items()
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    return [(name, f"{name}.{kind}", {kind: value})]


def _guided(fields: schemas.Generation) -> _Found:
    found = [(name, kind, getattr(fields, name)) for name, kind in _GUIDED.items()]
    return [(name, name, {kind: value}) for name, kind, value in found if value is not None]


def _response_format(fields: schemas.Generation) -> _Found:
    name = "response_format"
    if not isinstance(fields, schemas.OpenAIGeneration) or fields.response_format is None:
        return []
    wanted = fields.response_format
    if wanted.type == "text":
        return []
    wrapped = None if wanted.json_schema is None else wanted.json_schema.schema
    if wrapped is not None and wanted.schema is not None:
        raise bad_request(f"{name} has two schemas.", f"{name}.schema")
    if wanted.schema is not None:
        return [(name, f"{name}.schema", {"json": wanted.schema})]
    if wanted.type == "json_object":
        return [(name, name, {"json": {"type": "object"}})]
    if wrapped is None:
        raise bad_request(
            "response_format of type json_schema needs json_schema.schema.",
            "response_format.json_schema",
        )
    return [(name, f"{name}.json_schema.schema", {"json": wrapped})]

"""``/openapi.json``, made from the schemas that requests are decoded with."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

import ridgeline
from ridgeline.server.endpoint import Operation

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """The description of the operations, OpenAPI 3.1."""
    types = [t for o in operations for t in (o.request, o.answer) if t is not None]
    unique = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
    schema_of = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        entry = paths.setdefault(re.sub(r":\w+}", "}", operation.path), {})
        entry[operation.method.lower()] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ridgeline", "version": ridgeline.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _describe(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer: dict[str, Any] = {"description": "Success"}
    if operation.answer is not None:
        answer["content"] = {"application/json": {"schema": schema_of[operation.answer]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.handler.__name__,
        "responses": {
            "200": answer,
            "4XX": {"description": "The request is at fault", "content": error},
            "5XX": {"description": "The server is at fault", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", operation.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        content = {"application/json": {"schema": schema_of[operation.request]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.form is not None:
        form = {"multipart/form-data": {"schema": operation.form}}
        described["requestBody"] = {"required": True, "content": form}
    return described

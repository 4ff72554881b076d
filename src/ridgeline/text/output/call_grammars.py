"""How a model writes a call of a tool, as what `structured_outputs` calls parts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Part = Mapping[str, Any]


def call_parts(
    parser: str | None, template: str, tools: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[list[Part]] | None:
    """One alternative for each tool: exactly one call of it, as the parser of that name reads it.

    ``tools`` are names and the JSON Schemas of their arguments; ``template`` is the chat template,
    which tells two forms of Mistral apart. ``None`` for formats that are not JSON.
    """
    match parser:
        case "hermes" | "qwen":
            before, key, after = [_marker("<tool_call>"), _text("\n")], "arguments", "}\n"
            end = [_marker("</tool_call>")]
        case "llama3_json":
            before, key, after, end = [], "parameters", "}", []
        case "mistral" if "[ARGS]" in template:
            return [
                [_marker("[TOOL_CALLS]"), _text(name), _marker("[ARGS]"), {"json": schema}]
                for name, schema in tools
            ]
        case "mistral":
            blank = " " if "[TOOL_CALLS] [" in template else ""
            before, key, after = [_marker("[TOOL_CALLS]"), _text(f"{blank}[")], "arguments", "}]"
            end = []
        case _:
            return None
    return [
        _joined(
            *before,
            _text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '),
            {"json": schema},
            _text(after),
            *end,
        )
        for name, schema in tools
    ]


def _marker(text: str) -> Part:
    return {"marker": text}


def _text(text: str) -> Part:
    return {"text": text}


def _joined(*parts: Part) -> list[Part]:
    """Neighbouring texts as one."""
    joined: list[Part] = []
    for part in parts:
        if "text" in part and joined and "text" in joined[-1]:
            joined[-1] = _text(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    return joined

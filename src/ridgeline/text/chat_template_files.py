"""Where a model folder keeps its chat templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import TokenizerError
from ridgeline.text.reading import read_bytes

_TEMPLATE_LIMIT_BYTES = 1 << 20
_MAX_TEMPLATES = 64


def find_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any]
) -> str | dict[str, str] | None:
    """Return the folder's template, its templates by name, or None.

    ``chat_template.jinja`` (named "default") and ``additional_chat_templates/*.jinja`` come before
    ``chat_template`` of tokenizer_config.json, which is a string or a list of {name, template}.
    Raises TokenizerError if a template has a wrong shape or is not UTF-8.
    """
    files = [(folder / "chat_template.jinja", "default")]
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files += [(path, path.name.removesuffix(".jinja")) for path in extra]
    if len(files) > _MAX_TEMPLATES:
        raise TokenizerError(f"The folder has more than {_MAX_TEMPLATES} chat templates.")
    templates: dict[str, str] = {}
    for path, name in files:
        data = read_bytes(path, _TEMPLATE_LIMIT_BYTES)
        if data is not None:
            try:
                # As text files are read: any newline becomes "\n".
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError("A chat template file is not UTF-8.") from error
            templates[name] = text.replace("\r\n", "\n").replace("\r", "\n")
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    return _from_config(tokenizer_config.get("chat_template"))


def _from_config(value: object) -> str | dict[str, str] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TokenizerError("chat_template must be a string or a list of named templates.")
    templates: dict[str, str] = {}
    for item in value:
        name = item.get("name") if isinstance(item, dict) else None
        template = item.get("template") if isinstance(item, dict) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError("Each entry of chat_template must have a name and a template.")
        templates[name] = template
    return templates

"""Which special tokens a folder declares, read as transformers 5 reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import TokenizerError
from ridgeline.text.reading import read_json

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
STANDARD_NAMES = tuple(f"{name}_token" for name in _NAMES)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens:
    """The tokens that the configuration files declare beside the tokenizer itself.

    ``named`` maps ``bos_token`` and the like to tokens, and is what chat templates see; ``extra``
    are unnamed; ``by_id`` is ``added_tokens_decoder`` of tokenizer_config.json. Where that is
    missing, a name makes a token special (``names_are_special``).
    """

    def __init__(
        self,
        named: dict[str, AddedToken],
        extra: list[AddedToken],
        by_id: dict[int, AddedToken],
        *,
        names_are_special: bool,
    ) -> None:
        self.named, self.extra, self.by_id = named, extra, by_id
        self.names_are_special = names_are_special

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> "SpecialTokens":
        """Read the declarations; TokenizerError if one has a wrong shape.

        special_tokens_map.json and added_tokens.json count only where tokenizer_config.json has no
        ``added_tokens_decoder``.
        """
        values = dict(config)
        by_id: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in config:
            by_id = _by_id(config["added_tokens_decoder"])
        else:
            values.update(read_json(folder / "special_tokens_map.json"))
        extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
        named_extra = extra if isinstance(extra, dict) else {}
        if not isinstance(extra, dict | list):
            raise TokenizerError("extra_special_tokens must be a list or an object of tokens.")
        known = {token.content: token for token in by_id.values()}
        named: dict[str, AddedToken] = {}
        for name, value in {**values, **named_extra}.items():
            is_token = name in STANDARD_NAMES or name in named_extra
            if value is None or not (is_token or (name.endswith("_token") and _is_token(value))):
                continue
            token = _token(value, name)
            named[name] = known.get(token.content, token)
        extras = [_token(value, "extra") for value in extra] if isinstance(extra, list) else []
        if "added_tokens_decoder" not in config:
            specials = {token.content for token in [*named.values(), *extras]}
            for content, index in read_json(folder / "added_tokens.json").items():
                if type(index) is not int or not 0 <= index < 2**32:
                    raise TokenizerError("added_tokens.json must map tokens to ids.")
                special = content in specials
                by_id[index] = AddedToken(content, normalized=not special, special=special)
        legacy = "added_tokens_decoder" not in config
        return cls(named, extras, by_id, names_are_special=legacy)

    def set_defaults(self, defaults: Mapping[str, str]) -> None:
        """Name tokens that no file names (mutates ``named``)."""
        for name, content in defaults.items():
            self.named.setdefault(name, AddedToken(content, special=True))


def add_missing_tokens(backend: Backend, tokens: SpecialTokens) -> None:
    """Add to ``backend`` (mutated) the declared tokens that it lacks, in transformers' order."""
    present = list(backend.get_added_tokens_decoder().values())
    reprs, contents = {repr(token) for token in present}, {token.content for token in present}
    missing = [token for _, token in sorted(tokens.by_id.items()) if repr(token) not in reprs]
    contents.update(token.content for token in missing)
    for token in [*tokens.named.values(), *tokens.extra]:
        if token.content not in contents:
            contents.add(token.content)
            missing.append(token)
    names = {token.content for token in tokens.named.values()}
    if tokens.names_are_special:
        missing += [token for token in present if token.content in names and not token.special]
    for token in missing:
        if token.content in names:
            token.special = True
    if missing:
        backend.add_tokens(missing)


def eos_token_ids(folder: Path, tokenizer_eos: int | None = None) -> frozenset[int]:
    """Return the end-of-sequence ids of the first file that names any.

    The order is generation_config.json, tokenizer_config.json (``tokenizer_eos``), config.json
    (also its ``text_config``). TokenizerError if a value is not an id or a list of ids.
    """
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    for value in (
        generation.get("eos_token_id"),
        tokenizer_eos,
        config.get("eos_token_id"),
        nested,
    ):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(index) is not int or not 0 <= index < 2**32 for index in ids):
            raise TokenizerError("eos_token_id must be a token id or a list of token ids.")
        if ids:
            return frozenset(ids)
    return frozenset()


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token(value: object, name: str) -> AddedToken:
    content, flags = value, {}
    if isinstance(value, dict):
        content = value.get("content")
        flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if not isinstance(content, str) or any(not isinstance(flag, bool) for flag in flags.values()):
        raise TokenizerError(f"The special token {json.dumps(name)[:60]} has a wrong shape.")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError("A special token is not valid Unicode.") from error
    return AddedToken(content, **{"special": True, **flags})


def _by_id(declared: object) -> dict[int, AddedToken]:
    if not isinstance(declared, dict):
        raise TokenizerError("added_tokens_decoder must be an object from ids to tokens.")
    tokens = {}
    for key, value in declared.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise TokenizerError("added_tokens_decoder must be an object from ids to tokens.")
        token = _token(value, key)
        token.special = isinstance(value, dict) and value.get("special") is True
        tokens[int(key)] = token
    return tokens

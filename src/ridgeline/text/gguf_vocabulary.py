"""The vocabulary in the metadata of a GGUF file, checked."""

import math
import re
from collections.abc import Mapping

from ridgeline.core.errors import TokenizerError

# ``enum llama_token_type``.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

PREFIX = "tokenizer.ggml."
_MAX_TOKENS = 1 << 22
_FILLER = re.compile(r"\[PAD\d+\]")


class Vocabulary:
    """Tokens with their kinds, scores and merges; ``TokenizerError`` if they do not fit together.

    Attributes:
        tokens: the text of each id.
        kinds: ``NORMAL`` and so on, for each id.
        ids: token to id, without what converters fill gaps with.
        merges: pairs, the first to be merged first; empty where there are none.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        tokens = metadata.get(f"{PREFIX}tokens")
        if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
            raise TokenizerError("The GGUF file has no list tokenizer.ggml.tokens.")
        if not all(isinstance(token, str) for token in tokens):
            raise TokenizerError("tokenizer.ggml.tokens must be strings.")
        self.tokens: list[str] = tokens
        kinds = self._numbers("token_type")
        self.kinds = [NORMAL] * len(tokens) if kinds is None else [int(kind) for kind in kinds]
        used = [
            (token, index)
            for index, (token, kind) in enumerate(zip(tokens, self.kinds, strict=True))
            if token and not (kind == UNUSED and _FILLER.fullmatch(token))
        ]
        self.ids = dict(used)
        if len(self.ids) < len(used):
            raise TokenizerError("tokenizer.ggml.tokens has a token twice.")
        self.merges = self._merges()

    def scores(self) -> list[float]:
        """The score of each id; ``TokenizerError`` if there are none."""
        scores = self._numbers("scores")
        if scores is None:
            raise TokenizerError("The GGUF file has no tokenizer.ggml.scores.")
        if not all(math.isfinite(score) for score in scores):
            raise TokenizerError("tokenizer.ggml.scores must be finite.")
        return [float(score) for score in scores]

    def token_id(self, key: str) -> int | None:
        """The id under ``key``, ``None`` if there is none or no such token."""
        value = self._metadata.get(f"{PREFIX}{key}")
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 <= value < len(self.tokens) and self.tokens[value] in self.ids else None

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._metadata.get(f"{PREFIX}{key}", default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{key} must be true or false.")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._metadata.get(f"{PREFIX}{key}", default)
        if not isinstance(value, str):
            raise TokenizerError(f"tokenizer.ggml.{key} must be a string.")
        return value

    def raw(self, key: str) -> bytes | None:
        """An array of bytes."""
        value = self._metadata.get(f"{PREFIX}{key}")
        to_bytes = getattr(value, "tobytes", None)
        return None if to_bytes is None else bytes(to_bytes())

    def _merges(self) -> list[tuple[str, str]]:
        values = self._metadata.get(f"{PREFIX}merges", [])
        if not isinstance(values, list) or len(values) > _MAX_TOKENS:
            raise TokenizerError("tokenizer.ggml.merges must be a list of strings.")
        merges = []
        for value in values:
            # A first token may itself be a space.
            cut = value.find(" ", 1) if isinstance(value, str) else -1
            if cut < 0:
                raise TokenizerError("tokenizer.ggml.merges must be pairs with a space between.")
            merges.append((value[:cut], value[cut + 1 :]))
        return merges

    def _numbers(self, key: str) -> list[float] | None:
        """A list of one number for each token."""
        value = self._metadata.get(f"{PREFIX}{key}")
        if value is None:
            return None
        to_list = getattr(value, "tolist", None)  # numpy's, which text need not know
        values = to_list() if to_list is not None else value
        if not isinstance(values, list) or len(values) < len(self.tokens):
            raise TokenizerError(f"tokenizer.ggml.{key} must be one number for each token.")
        if not all(isinstance(number, int | float) for number in values):
            raise TokenizerError(f"tokenizer.ggml.{key} must be numbers.")
        return values[: len(self.tokens)]

"""Reading a ``config.json``: the file itself, and its values with types and bounds."""

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ridgeline.core.errors import (
    CorruptFileError,
    DiskError,
    ModelNotFoundError,
    UnsupportedModelError,
)

MAX_CONFIG_BYTES = 16 * 2**20
MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e15
T = TypeVar("T")


def read_config(path: Path) -> dict[str, object]:
    """The JSON object in the file ``path``, or in ``path/config.json`` if ``path`` is a folder.

    Raises:
        ModelNotFoundError: there is no such file.
        CorruptFileError: it is too large, not JSON, nested too deeply, or not an object.
        DiskError: it cannot be read.
    """
    try:
        if path.is_dir():
            path = path / "config.json"
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelNotFoundError(f"{path} is not a file.")
        if status.st_size > MAX_CONFIG_BYTES:
            raise CorruptFileError(f"{path} has {status.st_size:,} bytes; a config has far fewer.")
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFoundError(f"There is no file {path}.") from error
    except OSError as error:
        raise DiskError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # a NUL in the path
        raise ModelNotFoundError("The path of the model is not a valid path.") from error
    return parse_config(data, name=str(path))


def parse_config(data: bytes, *, name: str = "config.json") -> dict[str, object]:
    """The JSON object in ``data``; ``name`` is how errors call it. See `read_config`."""
    try:
        values = json.loads(data)
    except RecursionError as error:
        raise CorruptFileError(f"{name} is nested too deeply.") from error
    except ValueError as error:  # bad JSON, bad UTF-8, or an integer of thousands of digits
        raise CorruptFileError(f"{name} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise CorruptFileError(f"{name} holds no JSON object.")
    return values


class ConfigReader:
    """Typed access to a config's values, which remembers what nobody asked for.

    A key that is ``null`` counts as absent, except for the ``optional_…`` getters, where ``null``
    gives ``None``. All getters raise `CorruptFileError` for a value of the wrong type, out of
    bounds, or absent without a default.

    ``context`` is what the model is read for, in tokens; ``None``: the longest that it has.
    """

    def __init__(
        self, values: Mapping[str, object], *, prefix: str = "", context: int | None = None
    ) -> None:
        self.context = context
        self._values = values
        self._prefix = prefix
        self._consumed: set[str] = set()
        self._sections: dict[str, ConfigReader] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the key is there and not ``null``."""
        return self._values.get(name) is not None

    def integer(
        self, name: str, *, minimum: int = 1, maximum: int = MAX_INTEGER, default: int | None = None
    ) -> int:
        """A whole number in ``[minimum, maximum]``."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number")
        if not minimum <= value <= maximum:
            raise self._wrong(name, f"between {minimum} and {maximum}")
        return value

    def optional_integer(
        self, name: str, *, minimum: int = 1, maximum: int = MAX_INTEGER, default: int | None
    ) -> int | None:
        """The same, where ``null`` means something: it gives ``None``; absence the default."""
        if name not in self:
            return self._absent(name, default)
        return self.integer(name, minimum=minimum, maximum=maximum)

    def number(
        self,
        name: str,
        *,
        minimum: float,
        maximum: float = _MAX_NUMBER,
        default: float | None = None,
    ) -> float:
        """A finite number in ``[minimum, maximum]``."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(name, "finite")
        if not minimum <= value <= maximum:
            raise self._wrong(name, f"between {minimum:g} and {maximum:g}")
        return float(value)

    def optional_number(
        self,
        name: str,
        *,
        minimum: float,
        maximum: float = _MAX_NUMBER,
        default: float | None = None,
    ) -> float | None:
        """The same, where ``null`` gives ``None``."""
        if name not in self:
            return self._absent(name, default)
        return self.number(name, minimum=minimum, maximum=maximum)

    def boolean(self, name: str, *, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or ``None`` if the key is absent."""
        if name not in self:
            return self._absent(name, None)
        values = self._take(name, None)
        if not isinstance(values, list | tuple):
            raise self._wrong(name, "a list of strings")
        texts = tuple(value for value in values if isinstance(value, str))
        if len(texts) != len(values):
            raise self._wrong(name, "a list of strings")
        return texts

    def integers(self, name: str, *, minimum: int = 1) -> tuple[int, ...] | None:
        """A list of whole numbers in ``[minimum, MAX_INTEGER]``, or ``None`` if it is absent."""
        if name not in self:
            return self._absent(name, None)
        values = self._take(name, None)
        expected = f"a list of whole numbers from {minimum} on"
        if not isinstance(values, list | tuple):
            raise self._wrong(name, expected)
        integers = tuple(
            value for value in values if isinstance(value, int) and not isinstance(value, bool)
        )
        if len(integers) != len(values):
            raise self._wrong(name, expected)
        if not all(minimum <= value <= MAX_INTEGER for value in integers):
            raise self._wrong(name, expected)
        return integers

    def numbers(self, name: str, *, minimum: float, maximum: float) -> tuple[float, ...] | None:
        """A list of numbers in ``[minimum, maximum]``, or ``None`` if the key is absent."""
        if name not in self:
            return self._absent(name, None)
        values = self._take(name, None)
        if not isinstance(values, list | tuple):
            raise self._wrong(name, "a list of numbers")
        numbers = tuple(
            float(value)
            for value in values
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and minimum <= value <= maximum
        )
        if len(numbers) != len(values):
            raise self._wrong(name, f"a list of numbers between {minimum:g} and {maximum:g}")
        return numbers

    def is_list(self, name: str) -> bool:
        """Whether the value is a list."""
        return isinstance(self._values.get(name), list | tuple)

    def section(self, name: str) -> "ConfigReader":
        """A reader of the object under ``name``; an empty one if the key is absent."""
        if name not in self._sections:
            value = self._take(name, {})
            if not isinstance(value, Mapping):
                raise self._wrong(name, "an object")
            self._sections[name] = ConfigReader(
                value, prefix=f"{self._prefix}{name}.", context=self.context
            )
        return self._sections[name]

    def complete(self, defaults: Mapping[str, object]) -> None:
        """Take ``defaults`` for keys that are absent from here on; nobody has to ask for them."""
        self._consumed |= defaults.keys() - self._values.keys()
        self._values = {**defaults, **self._values}

    def mapping(self, name: str) -> Mapping[str, object]:
        """The object under ``name`` as it is, for a reader elsewhere."""
        value = self._take(name, None)
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return value

    def raw(self, name: str) -> object:
        """What is under ``name``, whatever it is; ``None`` if the key is absent."""
        self._consumed.add(name)
        return self._values.get(name)

    def names(self) -> tuple[str, ...]:
        """The keys that are not ``null``, in the file's order."""
        return tuple(name for name, value in self._values.items() if value is not None)

    def is_empty(self) -> bool:
        """Whether there is no key but ``null`` ones."""
        return all(value is None for value in self._values.values())

    def refuse(self, name: str, *, unless: tuple[object, ...] = ()) -> None:
        """Raise `UnsupportedModelError` if ``name`` is set to anything but the values ``unless``.

        For keys that would change the output.
        """
        self._consumed.add(name)
        value = self._values.get(name)
        if value is not None and value not in unless:
            raise UnsupportedModelError(
                f"config.json sets {self._path(name)} to {show(value)}, which is not supported."
            )

    def ignore(self, name: str) -> None:
        """Accept any value of ``name``; the family does not depend on it."""
        self._consumed.add(name)

    def leftovers(self) -> list[str]:
        """Dotted names of the keys that were never read, in the file's order."""
        names: list[str] = []
        for name, value in self._values.items():
            if name in self._sections:
                names += self._sections[name].leftovers()
            elif name not in self._consumed and value is not None:
                names.append(self._path(name))
        return names

    def _take(self, name: str, default: object) -> object:
        self._consumed.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CorruptFileError(f"config.json has no {self._path(name)}.")
        return default

    def _absent(self, name: str, default: T) -> T | None:
        self._consumed.add(name)
        return None if name in self._values else default

    def _path(self, name: str) -> str:
        return f"{self._prefix}{name if name.isidentifier() else ascii(name)}"[:80]

    def _wrong(self, name: str, expected: str) -> CorruptFileError:
        value = show(self._values.get(name))
        return CorruptFileError(
            f"config.json must give {self._path(name)} as {expected}, and it is {value}."
        )


def show(value: object) -> str:
    """A value for an error message: short, on one line, and safe for any depth or size."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"

"""Which web pages of other origins may call."""

import re
from collections.abc import Sequence

from ridgeline.core.errors import SettingsError

ANY = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """The origins that ``allow_origin`` lists; ``*`` allows every one.

    Raises:
        SettingsError: one is neither ``*`` nor ``scheme://host[:port]``.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self.allows_any = ANY in allowed
        self._named = frozenset(_as_sent(origin) for origin in allowed if origin != ANY)

    def names(self, origin: bytes | None) -> bool:
        """Whether the origin itself is listed."""
        return origin in self._named

    def allows(self, origin: bytes | None) -> bool:
        """Whether pages of this origin may call; ``None`` is no page of another origin."""
        return origin is not None and (self.allows_any or self.names(origin))


def _as_sent(origin: str) -> bytes:
    """The origin as browsers send it: in lower case, without the scheme's own port or a slash."""
    parts = _ORIGIN.fullmatch(origin.lower())
    if parts is None:
        raise SettingsError(
            f"allow_origin must be {ANY} or scheme://host[:port], and {origin!r} is neither."
        )
    scheme, host, port = parts.groups()
    if port is None or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}".encode()
    return f"{scheme}://{host}:{int(port)}".encode()

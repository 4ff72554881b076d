"""Who may call: keys, kept as hashes, and what each may do."""

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ridgeline.core.errors import SettingsError
from ridgeline.server.body import invalid
from ridgeline.server.config import ServerConfig

ADMIN = "admin"
ANONYMOUS = "local"
_MAX_KEY_CHARS = 4096
Limit = Annotated[int, Meta(ge=1)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key may use; ``None`` is no limit. A lower ``priority`` runs first.

    ``models``: the served names that it may ask for, ``None`` for all.
    """

    requests_per_minute: Limit | None = None
    input_tokens_per_minute: Limit | None = None
    output_tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    priority: int = 0
    models: list[str] | None = None


NO_LIMITS = KeyLimits()


_Sha256 = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{64}(?!\n)$", description="64 hexadecimal digits in small letters")
]


class _KeyEntry(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.-]{1,64}(?!\n)$",
            description="1 to 64 letters of a to z, digits, points, dashes and underscores",
        ),
    ]
    sha256: _Sha256


class _KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: list[_KeyEntry]
    admin_sha256: _Sha256 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose key a request carries. ``tenant`` separates caches, limits, files and usage."""

    tenant: str
    limits: KeyLimits = NO_LIMITS
    is_admin: bool = False


class KeyRing:
    """Finds the owner of a key; every comparison takes the same time.

    Raises:
        SettingsError: the key file cannot be read, or is not as documented.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        for key in config.api_key:
            digest = _digest(key)
            self._add(digest, Caller(tenant=f"key-{digest.hex()[:8]}"))
        if config.api_key_file is not None:
            content = _read(config.api_key_file)
            _check_names([entry.name for entry in content.key])
            for entry in content.key:
                fields = {name: getattr(entry, name) for name in KeyLimits.__struct_fields__}
                caller = Caller(tenant=entry.name, limits=KeyLimits(**fields))
                self._add(bytes.fromhex(entry.sha256), caller)
            if content.admin_sha256 is not None:
                digest = bytes.fromhex(content.admin_sha256)
                self._add(digest, Caller(tenant=ADMIN, is_admin=True))
        if config.admin_api_key is not None:
            self._add(_digest(config.admin_api_key), Caller(tenant=ADMIN, is_admin=True))
        self._open = not config.has_keys

    def _add(self, digest: bytes, caller: Caller) -> None:
        if any(digest == known for known, _ in self._callers):
            raise SettingsError(f"The key of {caller.tenant} is there twice.")
        self._callers.append((digest, caller))

    @property
    def is_open(self) -> bool:
        """Whether there are no keys, so that anyone on this machine may call."""
        return self._open

    def may_administer(self, caller: Caller) -> bool:
        """Whether a caller may use what is the admin's: anyone, where there is no key at all."""
        return caller.is_admin or not self._callers

    def check_policy(self, scheduling_policy: str) -> None:
        """SettingsError if some keys go before others, and the queue has another order."""
        if scheduling_policy != "priority" and any(
            caller.limits.priority for _, caller in self._callers
        ):
            raise SettingsError("A priority in the key file needs --scheduling-policy priority.")

    def has_tenant(self, tenant: str) -> bool:
        """Whether somebody may call as that."""
        if self._open:
            return tenant == ANONYMOUS
        return any(caller.tenant == tenant for _, caller in self._callers)

    def of_tenant(self, tenant: str) -> Caller:
        """For work that a tenant left here: what it may ask for, without limits per minute.

        Of a tenant whose key is gone that is nothing.
        """
        allowed = [caller.limits.models for _, caller in self._callers if caller.tenant == tenant]
        if not allowed and not self._open:
            allowed = [[]]
        return Caller(tenant=tenant, limits=KeyLimits(models=allowed[0] if allowed else None))

    def caller(self, headers: dict[bytes, bytes]) -> Caller | None:
        """Who calls: by ``Authorization: Bearer``, ``x-api-key``, or the password of ``Basic``.

        Nobody does with two keys that differ, of which a proxy may have looked at the other.
        """
        keys = _presented(headers)
        found = None
        if len(keys) == 1:
            digest = _digest(keys.pop())
            for known, caller in self._callers:
                if hmac.compare_digest(known, digest):
                    found = caller
        if found is None and self._open:
            return Caller(tenant=ANONYMOUS)
        return found


def _presented(headers: dict[bytes, bytes]) -> set[str]:
    """The keys in the headers; one may come as a browser's password."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    password = value.strip() if scheme.lower() == b"bearer" else b""
    if scheme.lower() == b"basic":
        try:
            password = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return set()
    keys = {key.decode("latin-1") for key in (password, headers.get(b"x-api-key", b"")) if key}
    return set() if any(len(key) > _MAX_KEY_CHARS for key in keys) else keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_names(names: list[str]) -> None:
    """Two keys of one name would see each other's files."""
    for name in names:
        if name in (ADMIN, ANONYMOUS):
            raise SettingsError(f"The key file may not name a key {name}.")
        if names.count(name) > 1:
            raise SettingsError(f"The key file has two keys named {name}.")


def _read(path: str) -> _KeyFile:
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=_KeyFile)
    except OSError as error:
        raise SettingsError(f"The key file cannot be read: {error.strerror}.") from error
    except msgspec.ValidationError as error:
        raise SettingsError(f"The key file: {invalid(error, _KeyFile).message}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"The key file is not as it should be: {error}.") from error

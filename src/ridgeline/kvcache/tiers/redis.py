"""KV entries in a server of the Redis protocol, which several engines share."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import CorruptFileError, MissingDependencyError, SettingsError
from ridgeline.core.extras import install_command
from ridgeline.kvcache.tiers.entry import (
    Entry,
    content_name,
    decode_entry,
    encode_entry,
    tenant_mark,
)
from ridgeline.kvcache.tiers.tier import TierUsage

if TYPE_CHECKING:
    from redis import Redis

_log = logging.getLogger(__name__)

_TIMEOUT_S = 0.25  # without a byte: so long a load is held up when the server falls silent
_ROUND_S = 1.0  # for a round on a slow wire
_ABSENT_S = 5.0  # after a failure; twice as long after the next
_MOST_ABSENT_S = 80.0
_TTL_S = 86400.0
_ROUND_BYTES = 4 << 20  # sent or asked for at once
_MAX_ENTRY_BYTES = 256 << 20
_KNOWN_S = 5.0  # others write, and the server evicts
_MAX_KNOWN = 1 << 17
_SCAN_COUNT = 250
_DELETE_S = 0.05  # in which rounds of a deletion begin, before what others wait for
_MARK_CHARS = 32
_ANSWERS: Mapping[str, type] = {
    "STRLEN": int,
    "MGET": list,
    "PEXPIRE": int,
    "SET": bool,
    "SCAN": tuple,
    "GETRANGE": bytes,
    "UNLINK": int,
}


class _ServerError(Exception):
    """The server is gone, too slow, refuses, or answers what no server does."""


class RedisTier:
    """See `Tier`. Entries are values ``<tenant's mark><entry>`` under ``rl:<namespace>:<key>``.

    The server may evict what it wants to; what was not used for ``ttl_s`` (a day) expires. With
    ``encryption`` entries are encrypted, and those of another key are damaged.

    After an error, a quarter of a second of silence or a second for 4 MiB the tier is absent:
    nobody waits for it until the server has answered a ping, five seconds later at the earliest,
    and longer each time until an entry is read. So it is after an answer that is none of the
    command's. After a write that the server has no room for, nothing is written for five seconds.
    What lies under an entry's name and is no string is damaged.

    Raises:
        MissingDependencyError: the package redis is not installed.
        SettingsError: the URL is none, the server refuses the password, or its certificate is not
            trusted.
    """

    is_read_only = False

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        password: str | None = None,
        ttl_s: float | None = None,
        encryption: Encryption | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = _client(url, password)
        self._prefix = f"rl:{namespace[:16]}:".encode()
        self._ttl_ms = int(1000 * (ttl_s or _TTL_S)) or 1
        self._encryption = encryption or Encryption()
        self._clock = clock
        self._sizes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # 0: it is not there
        self._is_absent = False
        self._absent_s = _ABSENT_S
        self._no_puts_before_s = 0.0
        self._to_delete: set[str] = set()
        self._cursors: dict[str, int] = {}  # of deletions that have begun
        self._num_failures = 0
        self._closing = threading.Event()
        self._first_ping()

    def may_have(self, key: bytes) -> bool:
        known = self._known(key)
        return not self._is_absent and known is not None and known > 0

    def is_unsure(self, key: bytes) -> bool:
        return not self._is_absent and self._known(key) is None

    def look(self, keys: Sequence[bytes]) -> None:
        sizes = self._ask("STRLEN", [(self._name(key),) for key in keys])
        for key, size in zip(keys, sizes, strict=False):
            if size is None:
                self._remove(key, "What lies under a KV entry's name is none.")
            self._note(key, size if size and size <= _MAX_ENTRY_BYTES else 0)

    def get_all(self, keys: Sequence[bytes]) -> Mapping[bytes, Entry]:
        found: dict[bytes, Entry] = {}
        for part in self._rounds([key for key in keys if self.may_have(key)]):
            values = self._ask("MGET", [tuple(map(self._name, part))]) or [()]
            for key, value in zip(part, values[0], strict=False):
                entry = self._decode(key, value) if isinstance(value, bytes) else None
                if entry is None:
                    self._note(key, 0)
                elif entry.header.tenant not in self._cursors:
                    found[key] = entry
                    self._absent_s = _ABSENT_S
        self.touch_all(list(found))
        return found

    def touch_all(self, keys: Sequence[bytes]) -> Collection[bytes]:
        held = self._ask("PEXPIRE", [(self._name(key), self._ttl_ms) for key in keys])
        if not self._takes_puts:
            return keys
        for key, is_there in zip(keys, held, strict=False):
            if not is_there:
                self._note(key, 0)
        return {key for key, is_there in zip(keys, held, strict=False) if is_there}

    def put_all(self, entries: Sequence[Entry]) -> None:
        size, part = 0, []
        for entry in entries:
            if not self._takes_puts:
                return
            key = entry.header.key
            sealed = self._encryption.seal(encode_entry(entry), content_name(key))
            value = tenant_mark(entry.header.tenant).encode() + sealed
            part.append((key, value))
            size += len(value)
            if size >= _ROUND_BYTES:
                self._put(part)
                size, part = 0, []
        self._put(part)

    def delete_tenant(self, tenant: str) -> bool:
        """All that lies there of a tenant, whatever model it is of, a part at a time.

        Where the server is absent, this is done before it is used again.
        """
        if not self._is_absent:
            try:
                return self._delete(tenant, time.monotonic() + _DELETE_S)
            except _ServerError as error:
                self._lose(error)
        self._cursors.pop(tenant, None)
        self._to_delete.add(tenant)
        return True

    def expire(self) -> None: ...

    def usage(self) -> TierUsage:
        sizes = [size for size, _ in list(self._sizes.values()) if size]
        return TierUsage(
            name="redis",
            num_entries=len(sizes),
            num_bytes=sum(sizes),
            num_failures=self._num_failures,
        )

    def close(self) -> None:
        self._closing.set()
        self._redis.close()

    @property
    def is_absent(self) -> bool:
        """Whether nothing is asked of the server now."""
        return self._is_absent

    @property
    def _takes_puts(self) -> bool:
        return not self._is_absent and self._clock() >= self._no_puts_before_s

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _known(self, key: bytes) -> int | None:
        size, until_s = self._sizes.get(key, (0, 0.0))
        return size if self._clock() < until_s else None

    def _note(self, key: bytes, size: int) -> None:
        self._sizes[key] = size, self._clock() + _KNOWN_S
        self._sizes.move_to_end(key)
        while len(self._sizes) > _MAX_KNOWN:
            self._sizes.popitem(last=False)

    def _rounds(self, keys: Iterable[bytes]) -> list[list[bytes]]:
        """Keys in parts whose entries have about `_ROUND_BYTES`."""
        rounds: list[list[bytes]] = []
        left = 0
        for key in keys:
            size = self._known(key) or 0
            if size > left:
                rounds.append([])
                left = _ROUND_BYTES
            rounds[-1].append(key)
            left -= size
        return rounds

    def _decode(self, key: bytes, value: bytes) -> Entry | None:
        try:
            entry = decode_entry(self._encryption.unseal(value[_MARK_CHARS:], content_name(key)))
            if entry.header.key == key:
                return entry
            problem = "A KV entry lies under another's name."
        except CorruptFileError as error:
            problem = str(error)
        self._remove(key, problem)
        return None

    def _remove(self, key: bytes, problem: str) -> None:
        self._fail(problem)
        self._ask("UNLINK", [(self._name(key),)])

    def _put(self, part: Sequence[tuple[bytes, bytes]]) -> None:
        commands = [(self._name(key), value, "PX", self._ttl_ms) for key, value in part]
        answers = self._ask("SET", commands, may_refuse=True)
        for (key, value), answer in zip(part, answers, strict=False):
            if isinstance(answer, Exception):
                self._fail(f"A KV block could not be written to Redis: {answer}.")
                self._no_puts_before_s = self._clock() + _ABSENT_S
            else:
                self._note(key, len(value))

    def _delete(self, tenant: str, until_s: float = inf) -> bool:
        """Whether all is deleted; if not by ``until_s``, the next call goes on."""
        mark, cursor = tenant_mark(tenant).encode(), self._cursors.pop(tenant, 0)
        while True:
            scan = (cursor, "MATCH", "rl:*", "COUNT", _SCAN_COUNT)
            ((cursor, names),) = self._send("SCAN", [scan])
            if not isinstance(names, list):
                raise _ServerError("an answer that is none")
            marks = self._send("GETRANGE", [(name, 0, _MARK_CHARS - 1) for name in names])
            theirs = [(name,) for name, found in zip(names, marks, strict=True) if found == mark]
            self._send("UNLINK", theirs)
            if not cursor:
                self._sizes.clear()
                return True
            if time.monotonic() > until_s or self._closing.is_set():
                self._cursors[tenant] = cursor
                return False

    def _ask(
        self, command: str, arguments: Sequence[tuple[Any, ...]], *, may_refuse: bool = False
    ) -> list[Any]:
        """What `_send` returns; nothing where the server is absent, or has failed now."""
        if self._is_absent:
            return []
        try:
            return self._send(command, arguments, may_refuse=may_refuse)
        except _ServerError as error:
            self._lose(error)
            return []

    def _send(
        self, command: str, arguments: Sequence[tuple[Any, ...]], *, may_refuse: bool = False
    ) -> list[Any]:
        """The answers to one command with each of these arguments, sent at once.

        ``None`` stands for the answer about a key whose value is no string. ``may_refuse``: an
        answer may be an error.

        Raises:
            _ServerError: there is no such answer.
        """
        if not arguments:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for each in arguments:
            pipeline.execute_command(command, *each)  # type: ignore[no-untyped-call]
        ending = threading.Timer(_ROUND_S, self._redis.connection_pool.disconnect)
        ending.start()
        try:
            answers = list(pipeline.execute(raise_on_error=False))
        except Exception as error:  # of any kind, for what the client's parser does not expect
            raise _ServerError(type(error).__name__) from error
        finally:
            ending.cancel()
        return [self._checked(command, answer, may_refuse=may_refuse) for answer in answers]

    def _checked(self, command: str, answer: object, *, may_refuse: bool) -> object:
        if isinstance(answer, Exception):
            if command in ("STRLEN", "GETRANGE") and str(answer).startswith("WRONGTYPE"):
                return None
            if not may_refuse:
                raise _ServerError(type(answer).__name__)
        elif not isinstance(answer, _ANSWERS[command]):
            raise _ServerError("an answer that is none")
        return answer

    def _fail(self, message: str) -> None:
        if not self._num_failures:
            _log.warning("%s Further failures of the Redis tier are counted only.", message)
        self._num_failures += 1

    def _first_ping(self) -> None:
        from ssl import SSLCertVerificationError

        from redis import AuthenticationError

        try:
            self._redis.ping()
        except AuthenticationError as error:
            raise SettingsError(f"The server of kv_redis_url refuses: {error}.") from None
        except Exception as error:  # as in `_send`
            if isinstance(error.__context__, SSLCertVerificationError):
                raise SettingsError(
                    "The certificate of kv_redis_url's server is not trusted "
                    f"({error.__context__.verify_message}); rediss://HOST?ssl_ca_certs=FILE says "
                    "who signs it."
                ) from None
            self._lose(_ServerError(f"{type(error).__name__} ({error})"))

    def _lose(self, error: _ServerError) -> None:
        self._fail(f"Redis is left alone for some seconds: {error}.")
        self._is_absent = True
        wait_s, self._absent_s = self._absent_s, min(2 * self._absent_s, _MOST_ABSENT_S)
        threading.Thread(target=self._win_back, args=(wait_s,), daemon=True).start()

    def _win_back(self, wait_s: float) -> None:
        """Use the server again once it answers, and what was to be deleted is."""
        while not self._closing.wait(wait_s):
            with suppress(Exception):  # as in `_send`
                self._redis.ping()
                for tenant in list(self._to_delete):
                    self._delete(tenant)
                    self._to_delete.discard(tenant)
                self._sizes.clear()
                self._is_absent = False
                return


def _client(url: str, password: str | None) -> "Redis":
    try:
        from redis import Redis, RedisError
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise MissingDependencyError(
            f"kv_redis_url needs redis: {install_command('redis')}."
        ) from error
    secret = {} if password is None else {"password": password}
    try:
        client = Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            **secret,
        )
        client.connection_pool.make_connection()  # which reads the options
    except (ValueError, TypeError, RedisError) as error:
        problem = str(error).partition(" got ")[2] or error
        if str(error).startswith("Port "):  # which quotes a password with a slash
            problem = "what is behind its host's colon is no port; write / in a password as %2F"
        raise SettingsError(
            "kv_redis_url is no URL of a Redis server: redis://, rediss:// or unix://, and its "
            f"options ({problem})."
        ) from None
    return client

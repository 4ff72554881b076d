"""KV entries in the memory of other engines, which have computed them."""

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import msgspec

from ridgeline.core.channel import Channel
from ridgeline.core.doors import Address, connect
from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import CorruptFileError, NetworkError
from ridgeline.kvcache.tiers.entry import Entry, content_name, decode_entry
from ridgeline.kvcache.tiers.peer_messages import (
    EMPTY_ANSWER_BYTES,
    EMPTY_ENTRY_BYTES,
    MOST_KEYS,
    PURPOSE,
    Answer,
    AskEntries,
    AskSizes,
    Entries,
    EntrySizes,
    Hello,
)
from ridgeline.kvcache.tiers.peer_server import PeerServer
from ridgeline.kvcache.tiers.tier import TierUsage

_log = logging.getLogger(__name__)

_LOOK_S = 0.25  # for all peers together to say what they have
_ROUND_S = 0.25  # for a round, beside its bytes on a wire of `_LEAST_BYTES_PER_S`
_LEAST_BYTES_PER_S = 16e6
_LOAD_S = 1.0  # in which the rounds of a call begin
_ROUND_BYTES = 4 << 20  # asked for at once
_FIRST_WORD_S = 5.0
_START_S = 0.5  # for peers that are there when an engine starts
_ABSENT_S = 1.0  # after a failure; twice as long after the next
_MOST_ABSENT_S = 80.0
_MAX_ENTRY_BYTES = 256 << 20
_KNOWN_S = 5.0  # they evict
_MISSING_S = 0.5  # and compute
_MAX_KNOWN = 1 << 17
_SMOOTHING = 0.2  # weight of the newest of seconds
_DELETED_S = 60.0  # in which all engines are told of a deletion
Said = TypeVar("Said", EntrySizes, Entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """A peer: its random name (empty: it was never reached, or is this engine), how many bytes a
    second came from it of late (0: none), and how often it failed."""

    address: str
    engine: str
    is_absent: bool
    bytes_per_s: float
    num_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """This engine among its peers: its random name (empty: it gives nothing out), the bytes of an
    entry (0 before there was one), and the others."""

    engine: str
    entry_bytes: int
    peers: tuple[PeerState, ...]


class _PeerError(Exception):
    """A peer is lost, or said what it should not."""


class _Peer:
    """Another engine: connected, or absent and called again from time to time, by a thread."""

    def __init__(
        self, address: Address, key: bytes, hello: Hello, failed: Callable[[str], None]
    ) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._address, self._key, self._hello = address, key, hello
        self._failed = failed
        self._channel: Channel[Answer] | None = None
        self._engine, self._byte_s, self._num_failures = b"", 0.0, 0
        self._absent_s = _ABSENT_S
        self._closing = threading.Event()
        self.was_called = threading.Event()  # once, and has or has not answered
        self._told = ""
        self._start_calling(0.0)

    @property
    def is_absent(self) -> bool:
        return self._channel is None

    @property
    def state(self) -> PeerState:
        return PeerState(
            address=self.name,
            engine=self._engine.hex(),
            is_absent=self.is_absent,
            bytes_per_s=1 / self._byte_s if self._byte_s else 0.0,
            num_failures=self._num_failures,
        )

    def note_seconds(self, seconds: float, num_bytes: int) -> None:
        """So long so many bytes took, from question to answer."""
        byte_s = max(seconds, 1e-9) / num_bytes
        self._byte_s += _SMOOTHING * (byte_s - self._byte_s) if self._byte_s else byte_s

    def ask(self, question: AskSizes | AskEntries, until_s: float) -> bool:
        """Whether it was asked; it is lost if it cannot be."""
        try:
            if self._channel is None:
                return False
            self._channel.send(question, until_s=until_s)
        except OSError as error:
            self.lose(str(error))
        return not self.is_absent

    def answer(self, kind: type[Said], until_s: float, most_bytes: int) -> Said | None:
        """What it says to a question; ``None``, and it is lost, if that is not of the kind, too
        long, or late."""
        try:
            if self._channel is None:
                return None
            said = self._channel.receive(until_s=until_s, most_bytes=most_bytes)
        except (OSError, msgspec.DecodeError) as error:
            self.lose(str(error))
            return None
        if isinstance(said, kind):
            return said
        self.lose("It does not answer." if said is None else "It answers something else.")
        return None

    def lose(self, why: str) -> None:
        """Leave it alone for a while."""
        if self._channel is None:
            return
        self._failed(f"The engine at {self.name} is left alone for some seconds: {why}")
        self._num_failures += 1
        self._channel.close()
        self._channel = None
        wait_s, self._absent_s = self._absent_s, min(2 * self._absent_s, _MOST_ABSENT_S)
        self._start_calling(wait_s)

    def prove_worth(self) -> None:
        """An entry of it was read."""
        self._absent_s = _ABSENT_S

    def close(self) -> None:
        self._closing.set()
        if self._channel is not None:
            self._channel.close()

    def _start_calling(self, wait_s: float) -> None:
        threading.Thread(target=self._call, args=(wait_s,), daemon=True).start()

    def _call(self, wait_s: float) -> None:
        while not self._closing.wait(wait_s):
            try:
                channel = self._connected()
            except (OSError, NetworkError, msgspec.DecodeError, _PeerError) as error:
                self._tell(str(error))
                wait_s = min(max(_ABSENT_S, 2 * wait_s), _MOST_ABSENT_S / 8)
            else:
                self._channel = channel
                if channel is not None and self._closing.is_set():
                    channel.close()
                return
            finally:
                self.was_called.set()

    def _connected(self) -> Channel[Answer] | None:
        """A channel to a peer of the same KV; ``None``: the address is this engine's own."""
        stream = connect(self._address, self._key, PURPOSE)
        channel: Channel[Answer] = Channel(stream, Answer)
        until_s = time.monotonic() + _FIRST_WORD_S
        try:
            channel.send(self._hello, until_s=until_s)
            said = channel.receive(until_s=until_s, most_bytes=EMPTY_ANSWER_BYTES)
            if not isinstance(said, Hello):
                raise _PeerError("It does not say what KV it has.")
            if said.engine and said.engine == self._hello.engine:
                channel.close()
                return None
            self._engine = said.engine
            if said.digest != self._hello.digest:
                raise _PeerError(
                    "It computes other KV: the model's files, adapters, dtype, formats of weights "
                    "and KV, block_tokens, executor and kernel level must all be the same."
                )
        except BaseException:
            channel.close()
            raise
        return channel

    def _tell(self, why: str) -> None:
        if why != self._told:
            _log.warning("No KV is read from the engine at %s: %s", self.name, why)
        self._told = why


class PeerTier:
    """See `Tier`. What the engines at ``addresses`` have in memory, and give out (`PeerServer`).

    They are asked all at once, and one that fails, is silent, slow or says what it should not is
    absent: nobody waits for it until it has answered a call, a second later at the earliest, and
    longer each time until an entry is read of it. Requests wait a quarter of a second for an
    answer, and for entries what those take at 16 MB/s in addition; of a call for several, rounds
    begin within a second. ``server`` is
    this engine's own, and closed with it; its address may be among the others.

    A peer that has the key is believed as far as nothing contradicts it: an entry names its
    tokens and has the digest of its KV, but whether that is what the tokens give is not computed.
    """

    is_read_only = True

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        key: bytes,
        digest: str,
        encryption: Encryption | None = None,
        server: PeerServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._encryption = encryption or Encryption()
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[_Peer | None, int, float]] = OrderedDict()
        self._deleted: dict[str, float] = {}
        self._num_failures = 0
        hello = Hello(digest, b"") if server is None else server.hello
        self._peers = [_Peer(address, key, hello, self._fail) for address in addresses]
        until_s = time.monotonic() + _START_S
        for peer in self._peers:
            peer.was_called.wait(max(0.0, until_s - time.monotonic()))

    def may_have(self, key: bytes) -> bool:
        return self._holder(key) is not None

    def is_unsure(self, key: bytes) -> bool:
        _, _, until_s = self._known.get(key, (None, 0, 0.0))
        return self._clock() >= until_s and not all(peer.is_absent for peer in self._peers)

    def look(self, keys: Sequence[bytes]) -> None:
        asked = keys[:MOST_KEYS]
        until_s = time.monotonic() + _LOOK_S
        holders: dict[bytes, tuple[_Peer, int]] = {}
        peers = [each for each in self._peers if asked and each.ask(AskSizes(list(asked)), until_s)]
        for peer in peers:
            said = peer.answer(EntrySizes, until_s, EMPTY_ANSWER_BYTES + 16 * len(asked))
            if said is None:
                continue
            if len(said.sizes) != len(asked):
                peer.lose("It answers for other entries than those that it was asked for.")
                continue
            for key, size in zip(asked, said.sizes, strict=True):
                if 0 < size <= _MAX_ENTRY_BYTES:
                    holders.setdefault(key, (peer, size))
        for key in asked:
            self._note(key, *holders.get(key, (None, 0)))

    def get_all(self, keys: Sequence[bytes]) -> Mapping[bytes, Entry]:
        found: dict[bytes, Entry] = {}
        started_s, done = time.monotonic(), 0
        end_s = started_s + _LOAD_S
        for peer, part, size in self._rounds(keys):
            now_s = time.monotonic()
            byte_s = (now_s - started_s) / done if done else 0.0
            if now_s + size * byte_s > end_s:
                break
            until_s = now_s + _ROUND_S + size / _LEAST_BYTES_PER_S
            if peer.is_absent or not peer.ask(AskEntries(part), until_s):
                continue
            most_bytes = 2 * size + EMPTY_ENTRY_BYTES * len(part) + EMPTY_ANSWER_BYTES
            said = peer.answer(Entries, until_s, most_bytes)
            if said is None:
                continue
            entries = dict(self._entries(peer, part, said.values))
            found |= entries
            if entries and not peer.is_absent:
                num_bytes = sum(entry.num_bytes for entry in entries.values())
                peer.note_seconds(time.monotonic() - now_s, num_bytes)
            done += size
        return found

    def touch_all(self, keys: Sequence[bytes]) -> Collection[bytes]:
        return keys

    def put_all(self, entries: Sequence[Entry]) -> None: ...

    def delete_tenant(self, tenant: str) -> bool:
        """They delete what is theirs when they are told to; until then, nothing of the tenant is
        taken from them."""
        self._deleted[tenant] = self._clock() + _DELETED_S
        return True

    def expire(self) -> None:
        now_s = self._clock()
        for tenant in [each for each, until_s in self._deleted.items() if until_s <= now_s]:
            del self._deleted[tenant]

    def usage(self) -> TierUsage:
        sizes = [size for _, size, _ in list(self._known.values()) if size]
        return TierUsage(
            name="peers",
            num_entries=len(sizes),
            num_bytes=sum(sizes),
            num_failures=self._num_failures,
        )

    def figures(self) -> PeerFigures:
        """How it stands with the others; from any thread."""
        server = self._server
        return PeerFigures(
            engine="" if server is None else server.hello.engine.hex(),
            entry_bytes=0 if server is None else server.lender.entry_bytes,
            peers=tuple(peer.state for peer in self._peers),
        )

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        if self._server is not None:
            self._server.close()

    @property
    def num_absent(self) -> int:
        """Peers that nothing is asked of now."""
        return sum(peer.is_absent for peer in self._peers)

    def _holder(self, key: bytes) -> tuple[_Peer, int] | None:
        """Who has an entry, and its bytes."""
        peer, size, until_s = self._known.get(key, (None, 0, 0.0))
        if peer is None or peer.is_absent or self._clock() >= until_s:
            return None
        return peer, size

    def _note(self, key: bytes, peer: _Peer | None, size: int) -> None:
        self._known[key] = peer, size, self._clock() + (_KNOWN_S if peer else _MISSING_S)
        self._known.move_to_end(key)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _rounds(self, keys: Sequence[bytes]) -> Iterator[tuple[_Peer, list[bytes], int]]:
        """Keys in parts of one peer each, whose entries have about `_ROUND_BYTES`, and those."""
        of_peers: defaultdict[_Peer, list[tuple[bytes, int]]] = defaultdict(list)
        for key in keys:
            if (held := self._holder(key)) is not None:
                of_peers[held[0]].append((key, held[1]))
        for peer, pairs in of_peers.items():
            part: list[bytes] = []
            total = 0
            for key, size in [*pairs, (b"", inf)]:
                if part and total + size > _ROUND_BYTES:
                    yield peer, part, total
                    part, total = [], 0
                if key:
                    part.append(key)
                    total += int(size)

    def _entries(
        self, peer: _Peer, keys: Sequence[bytes], values: Sequence[bytes]
    ) -> Iterator[tuple[bytes, Entry]]:
        """Those that are what was asked for; after one that is not, the peer is lost."""
        if len(values) != len(keys):
            peer.lose("It answers for other entries than those that it was asked for.")
            return
        for key, value in zip(keys, values, strict=True):
            if not value:
                self._note(key, None, 0)
                continue
            try:
                entry = decode_entry(self._encryption.unseal(value, content_name(key)))
            except CorruptFileError as error:
                self._note(key, None, 0)
                peer.lose(str(error))
                return
            if entry.header.key != key:
                self._note(key, None, 0)
                peer.lose("It sends entries under others' names.")
                return
            if entry.header.tenant not in self._deleted:
                peer.prove_worth()
                yield key, entry

    def _fail(self, message: str) -> None:
        if not self._num_failures:
            _log.warning("%s Further failures of the peers are counted only.", message)
        self._num_failures += 1

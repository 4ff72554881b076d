"""`SemanticCache`: answers to questions that were like this one, while few enough are wrong."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ridgeline.core.request import CompletionChunk
from ridgeline.server.ids import new_id
from ridgeline.server.semantic.policy import EntryThreshold, binomial_interval

MAX_ANSWER_BYTES = 64 << 10  # of its text: longer ones are not kept

_log = logging.getLogger(__name__)

Vector = npt.NDArray[np.float32]
Scope = tuple[str, bytes]  # a tenant, and all but the question that an answer depends on


@dataclass(slots=True, eq=False)
class SemanticEntry:
    """A question's vector, of length 1, and its answer: one whole chunk."""

    scope: Scope
    vector: Vector
    answer: CompletionChunk
    id: str = field(default_factory=lambda: new_id("sc_"))
    threshold: EntryThreshold = field(default_factory=EntryThreshold)
    row: int = 0


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest entry of a question's scope, if there is one.

    ``is_hit``: its answer may stand in, being right with ``chance_right``.
    """

    vector: Vector
    entry: SemanticEntry | None = None
    similarity: float = 0.0
    chance_right: float = 0.0
    is_hit: bool = False

    @property
    def label(self) -> str:
        """The entry's id and how like it is, for a header."""
        assert self.entry is not None
        risk = 1.0 - self.chance_right
        return f"{self.entry.id}; similarity={self.similarity:.4f}; error={risk:.4f}"


class _Rows:
    """The entries of one scope, and their vectors in the rows of one matrix."""

    def __init__(self, width: int) -> None:
        self.entries: list[SemanticEntry] = []
        self._matrix = np.empty((1, width), dtype=np.float32)  # most scopes have one question

    def add(self, entry: SemanticEntry) -> None:
        if len(self.entries) == len(self._matrix):
            self._matrix = np.concatenate((self._matrix, np.empty_like(self._matrix)))
        entry.row = len(self.entries)
        self._matrix[entry.row] = entry.vector
        self.entries.append(entry)

    def remove(self, entry: SemanticEntry) -> None:
        """The last row takes the place of this one."""
        last = self.entries.pop()
        if last is not entry:
            last.row = entry.row
            self.entries[entry.row] = last
            self._matrix[entry.row] = last.vector

    def nearest(self, vector: Vector) -> tuple[SemanticEntry, float]:
        similarities = self._matrix[: len(self.entries)] @ vector
        best = int(np.argmax(similarities))
        return self.entries[best], float(similarities[best])


class SemanticCache:
    """Entries of all tenants, each found in its own scope alone; bounded in number, and each in
    size (`MAX_ANSWER_BYTES`). What has not been near longest goes first, of the tenant that has the
    most.

    The answer of the nearest entry is given where the chance that it is wrong is at most
    ``max_error``. Some of these (``audit``, a share) are answered anew as well, later: once their
    wrong ones prove, with 95% confidence, that more than ``max_error`` are, the cache is off.
    """

    def __init__(self, *, max_error: float, max_entries: int, audit: float) -> None:
        self.max_error = max_error
        self._max_entries = max_entries
        self._audit = audit
        self._owed_audits = 0.0
        self._rows: dict[Scope, _Rows] = {}
        self._entries: OrderedDict[str, SemanticEntry] = OrderedDict()
        self.is_on = True
        self.num_hits = self.num_misses = self.num_audits = self.num_wrong = 0

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def wrong_interval(self) -> tuple[float, float]:
        """The share of hits that are wrong, by those that were audited: 95% confidence."""
        return binomial_interval(self.num_wrong, self.num_audits)

    def nearest(self, scope: Scope, embedding: Vector) -> Nearest:
        """The entry that a question is nearest to, and whether its answer may stand in."""
        vector = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        rows = self._rows.get(scope)
        if rows is None:
            self.num_misses += 1
            return Nearest(vector)
        entry, similarity = rows.nearest(vector)
        self._entries.move_to_end(entry.id)
        chance = entry.threshold.chance_right(similarity)
        is_hit = self.is_on and 1.0 - chance <= self.max_error
        self.num_hits += is_hit
        self.num_misses += not is_hit
        return Nearest(vector, entry, similarity, chance, is_hit)

    def wants_audit(self) -> bool:
        """Whether this hit is one to be answered anew; every ``1 / audit``-th is."""
        self._owed_audits += self._audit
        if self._owed_audits < 1.0:
            return False
        self._owed_audits -= 1.0
        return True

    def learn(
        self, scope: Scope, found: Nearest, answer: CompletionChunk, *, is_right: bool
    ) -> None:
        """Take a new answer, by which the nearest entry's was right, or else is kept beside it."""
        if found.entry is not None:
            found.entry.threshold.observe(found.similarity, is_right)
            if is_right:
                return
        if len(answer.text.encode()) > MAX_ANSWER_BYTES:
            return
        entry = SemanticEntry(scope, found.vector, answer)
        if scope not in self._rows:
            self._rows[scope] = _Rows(len(found.vector))
        self._rows[scope].add(entry)
        self._entries[entry.id] = entry
        if len(self._entries) > self._max_entries:
            held = Counter(entry.scope[0] for entry in self._entries.values())
            largest = max(held, key=held.__getitem__)
            self._drop(next(e for e in self._entries.values() if e.scope[0] == largest))

    def audited(self, found: Nearest, *, is_right: bool) -> None:
        """A hit was answered anew, and compared."""
        assert found.entry is not None
        found.entry.threshold.observe(found.similarity, is_right)
        self.num_audits += 1
        self.num_wrong += not is_right
        if self.is_on and self.wrong_interval[0] > self.max_error:
            self.is_on = False
            _log.error(
                "The semantic cache is off: %d of %d audited answers were wrong.",
                self.num_wrong,
                self.num_audits,
            )

    def delete(self, tenant: str, entry_id: str) -> bool:
        """Forget one of a tenant's entries; returns whether there was one."""
        entry = self._entries.get(entry_id)
        if entry is None or entry.scope[0] != tenant:
            return False
        self._drop(entry)
        return True

    def delete_tenant(self, tenant: str) -> int:
        """Forget all of a tenant's entries; returns how many."""
        own: Sequence[SemanticEntry] = [e for e in self._entries.values() if e.scope[0] == tenant]
        for entry in own:
            self._drop(entry)
        return len(own)

    def _drop(self, entry: SemanticEntry) -> None:
        del self._entries[entry.id]
        rows = self._rows[entry.scope]
        rows.remove(entry)
        if not rows.entries:
            del self._rows[entry.scope]

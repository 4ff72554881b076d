"""Those who wait: in which order, which blocks they hold, who is turned away, who is loaded."""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from math import inf

from ridgeline.core.errors import InvalidRequestError, OverloadedError
from ridgeline.core.request import Request
from ridgeline.kvcache import KVCacheManager
from ridgeline.kvcache.tiers import Load, Look, Transfers
from ridgeline.scheduler.batching import create_batching
from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.documents import Documents, DocumentsWait
from ridgeline.scheduler.overload import DrainRate
from ridgeline.scheduler.policies import QueuePolicy, Rank
from ridgeline.scheduler.prediction import CorrectedPredictor
from ridgeline.scheduler.sequence import Sequence
from ridgeline.scheduler.waiting_queue import WaitingQueue


class Waiting:
    """The queue; beside it sequences whose KV is being loaded from tiers, or whose documents are
    computed first, and samples held back.

    The samples of a request but the first are held back until the prompt is computed.

    Sequences may hold blocks: a fork its prompt's, the head those of a prefix hit, and who waits
    for documents those of the others. These are given up when nothing else gives way.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: QueuePolicy,
        predictor: CorrectedPredictor,
        transfers: Transfers | None,
        kv: KVCacheManager,
    ) -> None:
        self._config = config
        self._policy = policy
        self._predictor = predictor
        self._transfers = transfers
        self._batching = create_batching(
            config.batching, size=config.max_num_seqs, window_s=config.batch_window_s
        )
        self._queue = WaitingQueue(policy)
        self._holders: dict[Sequence, None] = {}
        self._documents = Documents(kv)
        self._loading: dict[Sequence, Load | Look | DocumentsWait] = {}
        self._forks: dict[int, list[Sequence]] = {}  # held back, by request
        self._num_forks = 0
        self._drain_rate = DrainRate()
        self.num_loads = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._loading) + self._num_forks

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        yield from self._loading
        for forks in self._forks.values():
            yield from forks

    def rank(self, sequence: Sequence) -> Rank:
        """Whoever has the lowest goes first, and whoever has the highest gives way."""
        return self._queue.full_rank(sequence)

    def push(self, sequence: Sequence) -> None:
        if not (self._queue or self._loading or self._forks):
            self._drain_rate.note_start()
        self._queue.push(sequence)
        self._note_blocks(sequence)

    def remove(self, sequence: Sequence) -> list[Sequence]:
        """Returns the documents that were computed for it alone, and are not wanted any more."""
        if self._loading.pop(sequence, None) is None:
            self._queue.remove(sequence)
        self._holders.pop(sequence, None)
        return self._documents.end_wait(sequence)

    @property
    def has_forks(self) -> bool:
        """Whether samples are held back."""
        return bool(self._forks)

    @property
    def awaits_documents(self) -> bool:
        """Whether documents are computed: each has somebody who waits for it."""
        return bool(self._documents)

    def forks_of(self, request: Request) -> Seq[Sequence]:
        """The samples of a request that are held back."""
        return self._forks.get(request.request_id, ())

    def hold_forks(self, forks: list[Sequence]) -> None:
        """Hold back the other samples of a request; they count as waiting."""
        if forks:
            self._forks[forks[0].request.request_id] = forks
            self._num_forks += len(forks)
            for fork in forks:
                self._policy.entered(fork)

    def release_forks(self, request: Request) -> Seq[Sequence]:
        """The samples of a request that were held back, which do not wait any more."""
        forks = self._forks.pop(request.request_id, ())
        self._num_forks -= len(forks)
        for fork in forks:
            self._policy.left(fork)
        return forks

    def drop_fork(self, sequence: Sequence) -> bool:
        """Let go of a sample that is held back; False if it is not."""
        request_id = sequence.request.request_id
        forks = self._forks.get(request_id, [])
        if sequence not in forks:
            return False
        forks.remove(sequence)
        self._num_forks -= 1
        self._policy.left(sequence)
        if not forks:
            del self._forks[request_id]
        return True

    def who_gives_place(self, newcomer: Request) -> list[Sequence]:
        """The first samples of the requests that have to leave so that all of this one may wait.

        Raises:
            InvalidRequestError: it has more samples than may wait.
            OverloadedError: the queue is full of sequences that do not give way.
        """
        limit, num_samples = self._config.max_num_waiting, newcomer.params.n
        if limit is None:
            return []
        if num_samples > limit:
            raise InvalidRequestError(
                f"The request asks for {num_samples} samples (n), and at most {limit} may wait."
            )
        num_short = len(self) + num_samples - limit
        leaving: list[Sequence] = []
        if num_short > 0:
            for sequence in self._policy.displaced_by(newcomer, self._queue.untouched()):
                leaving.append(sequence)
                num_short -= 1 + len(self.forks_of(sequence.request))
                if num_short <= 0:
                    break
        if num_short <= 0:
            return leaving
        wait_s = self._drain_rate.wait_s(len(self))
        raise OverloadedError(
            f"{len(self)} samples are waiting, {limit} may, and the request has {num_samples}; "
            f"try again in {wait_s:.0f} s.",
            retry_after_s=wait_s,
        )

    def open_batch(self, num_running: int, now_s: float) -> float:
        """Seconds until a batch may start; 0 if sequences may be admitted, or somebody runs."""
        if num_running or not len(self):
            return 0.0
        return self._batching.open_batch(
            num_waiting=len(self),
            arrivals_s=(each.request.arrival_s for each in self),
            now_s=now_s,
        )

    def head(self, now_s: float) -> Sequence | None:
        """The sequence to run next, once those that are too late have been postponed."""
        head = self._queue.head()
        while self._policy.postpones and head is not None and self._is_too_late(head, now_s):
            self._queue.remove(head)
            head.postponed = True
            self._queue.push(head)
            head = self._queue.head()
        return head

    def may_join(self, sequence: Sequence) -> bool:
        """Whether batching admits it now, and no outcome of an earlier run is awaited."""
        return not sequence.num_in_flight and self._batching.admits(sequence)

    def take_prefix_and_fit(self, sequence: Sequence) -> bool:
        """Whether blocks are free for it, beside those of the cached prefix, which it takes."""
        sequence.kv.reuse_prefix(sequence.token_ids)
        self._note_blocks(sequence)
        return sequence.kv.can_hold(len(sequence.token_ids))

    def would_fit(self, sequence: Sequence, *, without: Collection[Sequence]) -> bool:
        """Whether it would fit if these sequences released their blocks."""
        others = (each.kv for each in without)
        return sequence.kv.can_hold(len(sequence.token_ids), without=others)

    def admitted(self, sequence: Sequence, now_s: float) -> None:
        """The sequence was given a slot, and waits no more."""
        self.remove(sequence)
        self._batching.admitted(sequence)
        self._drain_rate.note_admission(now_s)

    def drop_blocks(self, *, but: Sequence | None = None) -> bool:
        """Take blocks from the last of those that hold some; whether there was one.

        Before that, those that nobody but the saves of them holds.
        """
        if self._transfers is not None and self._transfers.cancel_saves():
            return True
        return self.drop_holder(but=but)

    def drop_holder(self, *, but: Sequence | None = None) -> bool:
        """Take the blocks of the last of those that wait and hold some; whether there was one."""
        holders = [each for each in self._holders if each is not but]
        if not holders:
            return False
        last = max(holders, key=self.rank)
        del self._holders[last]
        last.kv.release()
        return True

    def start_load(self, sequence: Sequence) -> bool:
        """Have the tiers load what they have of a sequence that may enter, if that beats computing;
        those that are unsure look first. Of documents in its prompt, have those computed first
        that are nowhere.

        This is how a sequence that was preempted comes back: swapped in, or computed again.
        """
        if sequence.may_look:
            sequence.may_look = False
            look = sequence.kv.look_for_rest(sequence.token_ids)
            if look is not None:
                self.remove(sequence)
                self._loading[sequence] = look
                return True
        load = None
        if sequence.may_load:
            sequence.may_load = False
            load = sequence.kv.load_rest(sequence.token_ids, self._compute_s)
        if load is None:
            return self._await_documents(sequence)
        self.remove(sequence)
        self._loading[sequence] = load
        self.num_loads += 1
        return True

    def _await_documents(self, sequence: Sequence) -> bool:
        wait, new = self._documents.await_missing(sequence)
        if wait is None:
            return False
        self._queue.remove(sequence)
        self._holders.pop(sequence, None)
        self._loading[sequence] = wait
        self._note_blocks(sequence)
        for document in new:
            self.push(document)
        return True

    def land_loads(self) -> None:
        """Let sequences whose load is done wait in the queue again; they find it in the cache.

        So do those whose look is late, which compute what a tier may have.
        """
        if self._transfers is not None:
            self._transfers.poll()
        elif not self._loading:
            return
        for sequence, load in self._loading.items():
            documents = sequence.kv.documents
            if isinstance(load, DocumentsWait) and load.note_ended() and documents is not None:
                documents.hold(0)
                self._note_blocks(sequence)
        done = [
            each
            for each, load in self._loading.items()
            if load.is_done or (isinstance(load, Look) and load.is_late)
        ]
        for sequence in done:
            awaited = self._loading.pop(sequence)
            if isinstance(awaited, DocumentsWait):
                self._documents.end_wait(sequence)
                self._holders.pop(sequence, None)
                sequence.kv.release()
                sequence.kv.reuse_prefix(sequence.token_ids)  # before they are evicted
            self._queue.push(sequence)
            self._note_blocks(sequence)

    def check_integrity(self) -> None:
        """Assert that it is known how many wait, and who holds blocks."""
        assert len(self) == sum(1 for _ in self)
        for sequence in (*self._queue, *self._loading):
            assert (sequence in self._holders) == sequence.kv.holds_blocks
        self._documents.check_integrity(self._loading)

    def last_of(self, candidates: Iterable[Sequence]) -> Sequence | None:
        """The one of them that the policy puts last."""
        return max(candidates, key=self.rank, default=None)

    def _note_blocks(self, sequence: Sequence) -> None:
        if sequence.kv.holds_blocks:
            self._holders[sequence] = None

    def _is_too_late(self, sequence: Sequence, now_s: float) -> bool:
        deadline_s = sequence.request.deadline_s
        if sequence.postponed or deadline_s is None:
            return False
        return now_s + self._predictor.remaining_s(sequence) > deadline_s

    def _compute_s(self, num_tokens: int, context: int) -> float:
        return (
            self._predictor.segment_s(num_tokens, context) if self._predictor.is_calibrated else inf
        )

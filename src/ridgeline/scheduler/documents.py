"""Documents that sequences wait for: each is computed by itself, once for all who wait for it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from ridgeline.core.request import Request
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.kvcache import KVCacheManager
from ridgeline.scheduler.sequence import Sequence

_NOTHING = SamplingParams(max_tokens=1, temperature=0.0)

_Name = tuple[bytes, tuple[int, ...]]  # the key under which it is cached, and its tokens


@dataclass(slots=True, eq=False)
class DocumentsWait:
    """A sequence waits until these have ended, computed or not: then it looks for them again.

    Meanwhile it holds those that are there, so that they stay until the last one is.
    """

    documents: tuple[Sequence, ...]
    num_ended: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_ended == len(self.documents)

    def note_ended(self) -> bool:
        """Whether more of them have ended than before."""
        before = self.num_ended
        self.num_ended = sum(document.is_finished for document in self.documents)
        return self.num_ended > before


class Documents:
    """Makes the sequences of documents, which run as those do that wait for them: at the place in
    the queue of the first, for its tenant and its adapter."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._numbers = count(-1, -1)  # requests of callers have others
        self._of_name: dict[_Name, Sequence] = {}
        self._waits: dict[Sequence, DocumentsWait] = {}

    def __bool__(self) -> bool:
        """Whether somebody waits for some."""
        return bool(self._waits)

    def await_missing(self, sequence: Sequence) -> tuple[DocumentsWait | None, list[Sequence]]:
        """What a sequence that may enter has to wait for, if anything, and what of that is new.

        Then it holds nothing but the documents that are there.
        """
        kv = sequence.kv
        missing = [] if kv.documents is None else kv.documents.missing(kv.num_computed)
        if kv.documents is None or not missing:
            return None, []
        documents, new = [], []
        for tokens in missing:
            name = kv.documents.document_key, tokens
            document = self._of_name.get(name)
            if document is None or document.is_finished:
                document = self._of_name[name] = self._made(sequence, *name)
                new.append(document)
            documents.append(document)
        kv.release()
        kv.documents.hold(0)
        wait = self._waits[sequence] = DocumentsWait(tuple(documents))
        return wait, new

    def end_wait(self, sequence: Sequence) -> list[Sequence]:
        """A sequence waits no more; returns the documents that nobody waits for now."""
        wait = self._waits.pop(sequence, None)
        if wait is None:
            return []
        wanted = {each for other in self._waits.values() for each in other.documents}
        self._of_name = {name: each for name, each in self._of_name.items() if each in wanted}
        return [each for each in wait.documents if each not in wanted and not each.is_finished]

    def _made(self, sequence: Sequence, key: bytes, tokens: tuple[int, ...]) -> Sequence:
        asked = sequence.request
        request: Request = replace(
            asked,
            request_id=next(self._numbers),
            prompt_token_ids=tokens,
            output_token_ids=(),
            expected_token_ids=(),
            params=_NOTHING,
            cache_key=key,
            draft_namespace=None,
            reused=(),
            is_document=True,
        )
        return Sequence(
            request=request,
            sample_index=0,
            token_ids=list(tokens),
            kv=self._kv.new_sequence(key, tenant=asked.tenant, max_length=len(tokens)),
            max_length=len(tokens),
            lane=sequence.lane,
            order=sequence.order,
        )

    def check_integrity(self, loading: Iterable[Sequence]) -> None:
        """Assert that whoever waits for documents is among those that are loaded."""
        assert set(self._waits) <= set(loading)

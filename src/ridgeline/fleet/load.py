"""What a router has sent to an engine and what of it is still in progress."""

from collections.abc import Sequence

from ridgeline.fleet.policies import MOST_TOKENS, EngineChoice, EngineLoad, Wanted
from ridgeline.fleet.prefixes import PrefixView
from ridgeline.scheduler.prediction import LinearPredictor


class LoadTracker:
    """Counts the requests at one engine, and knows which prompts it was sent."""

    def __init__(self) -> None:
        self.prefixes = PrefixView()
        self.num_pending = self.pending_tokens = self.num_running = self.context_tokens = 0

    @property
    def num_requests(self) -> int:
        """In progress."""
        return self.num_pending + self.num_running

    def begin(
        self, wanted: Wanted, blocks: Sequence[bytes], *, is_computed: bool = False
    ) -> "TrackedRequest":
        """A request is sent, whose prompt has these blocks. ``is_computed``: by another engine, of
        which this one reads."""
        return TrackedRequest(self, wanted, blocks, is_computed=is_computed)

    def choice(
        self,
        name: str,
        blocks: Sequence[bytes],
        *,
        linear: LinearPredictor,
        pass_s: float,
        max_seqs: int,
        kv_tokens: int = MOST_TOKENS,
    ) -> EngineChoice:
        """The engine as policies see it, for a prompt with these blocks."""
        load = EngineLoad(
            linear=linear,
            pass_s=pass_s,
            max_seqs=max_seqs,
            kv_tokens=kv_tokens,
            pending_tokens=self.pending_tokens,
            num_pending=self.num_pending,
            num_running=self.num_running,
            context_tokens=self.context_tokens,
        )
        return EngineChoice(name=name, load=load, cached_tokens=self.prefixes.cached_tokens(blocks))


class TrackedRequest:
    """A request at an engine, counted in its load until it ends."""

    def __init__(
        self, tracker: LoadTracker, wanted: Wanted, blocks: Sequence[bytes], *, is_computed: bool
    ) -> None:
        self._tracker = tracker
        self._tokens = wanted.prompt_tokens + wanted.output_tokens // 2
        cached = wanted.prompt_tokens if is_computed else tracker.prefixes.cached_tokens(blocks)
        self._pending = max(1, wanted.prompt_tokens - cached)
        self._runs = False
        tracker.num_pending += 1
        tracker.pending_tokens += self._pending
        tracker.prefixes.add(blocks)

    def start(self) -> None:
        """Its first token is here."""
        if not self._runs:
            self._runs = True
            self._leave_pending()
            self._tracker.num_running += 1
            self._tracker.context_tokens += self._tokens

    def end(self) -> None:
        """It is over."""
        if self._runs:
            self._tracker.num_running -= 1
            self._tracker.context_tokens -= self._tokens
        else:
            self._leave_pending()

    def _leave_pending(self) -> None:
        self._tracker.num_pending -= 1
        self._tracker.pending_tokens -= self._pending

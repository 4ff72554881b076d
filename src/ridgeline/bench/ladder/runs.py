"""Decoding recorded texts one after the other, with any drafter, over one executor."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.bench.ladder.texts import RecordedText
from ridgeline.core.config import EngineConfig, ResolvedConfig, resolve
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor, StepTimePredictor
from ridgeline.core.request import Request
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.settings.speculation import DRAFT_MODEL_SPECULATION, HEAD_SPECULATION
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.speculation import make_speculation
from ridgeline.executors.simulated import VirtualClock
from ridgeline.scheduler import FeatureHead, Scheduler, SchedulerConfig
from ridgeline.scheduler.prediction import DEFAULT_PREDICTOR

MAX_DRAFTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A drafter, and the length of its drafts."""

    speculation: str = "off"
    length: int = 4

    @property
    def uses_model(self) -> bool:
        return self.speculation in (*DRAFT_MODEL_SPECULATION, *HEAD_SPECULATION)

    def __str__(self) -> str:
        if self.speculation == "off":
            return "off"
        return f"{self.speculation} {self.length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Seconds and tokens after the first chunk of each text."""

    seconds: float
    num_tokens: int
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


class TextDecoder:
    """Loops of the engine over an executor, whose KV pools it allocates; batch 1.

    With a ``clock`` of its own the executor is simulated, and the time is virtual.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_model_len: int,
        has_draft: bool,
        predictor: StepTimePredictor = DEFAULT_PREDICTOR,
        clock: VirtualClock | None = None,
        reuse_kv: bool = True,
    ) -> None:
        self._executor = executor
        self._predictor = predictor
        self._clock: Callable[[], float] = time.perf_counter if clock is None else clock
        self._config = EngineConfig(
            max_num_seqs=1,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            reuse_kv=reuse_kv,
            kv_cache_memory_bytes=1 << 40,
        )
        self._head = executor.spec(ModelRole.DRAFT).draft_head if has_draft else None
        has_draft_kv = has_draft and self._head is None  # a head's is in the target's blocks
        self._resolved = self._resolve(has_draft=has_draft_kv)
        executor.allocate_kv(self._resolved.num_blocks)
        if has_draft_kv:
            executor.allocate_kv(self._resolved.num_draft_blocks, ModelRole.DRAFT)

    def run(
        self,
        texts: Sequence[RecordedText],
        drafting: Drafting,
        num_tokens: int,
        said: dict[int, tuple[int, ...]] | None = None,
    ) -> DecodeRun:
        """Decode ``num_tokens`` tokens of each text; ``said`` takes them by the text's number."""
        loop = self._loop(drafting)
        seconds, tokens, steps = 0.0, 0, 0
        for number, text in enumerate(texts):
            loop.add(_request(number, text, num_tokens))
            first_s: float | None = None
            while loop.has_work:
                chunks = loop.step()
                new = sum(len(chunk.token_ids) for chunk in chunks)
                if said is not None:
                    spoken = (token for chunk in chunks for token in chunk.token_ids)
                    said[number] = (*said.get(number, ()), *spoken)
                if first_s is not None:
                    tokens, steps = tokens + new, steps + 1
                elif new:
                    first_s = self._clock()
            assert first_s is not None
            seconds += self._clock() - first_s
        return DecodeRun(seconds=seconds, num_tokens=tokens, num_steps=steps)

    def _loop(self, drafting: Drafting) -> EngineLoop:
        config = replace(
            self._config,
            speculation=drafting.speculation,
            num_speculative_tokens=drafting.length,
        )
        resolved, sharing = self._resolved, None
        if not drafting.uses_model:
            resolved = replace(resolved, num_draft_blocks=())
        elif self._head is not None:
            sharing = FeatureHead(has_kv=bool(self._head.layers))
        groups = self._executor.kv_layout().groups
        scheduler = Scheduler(
            SchedulerConfig.of_engine(
                config,
                resolved,
                windows=tuple(group.window for group in groups),
                max_in_flight=self._executor.max_in_flight,
            ),
            make_speculation(
                config, resolved, self._executor, predictor=self._predictor, sharing=sharing
            ),
            predictor=self._predictor,
            clock=self._clock,
        )
        return EngineLoop(self._executor, scheduler, None, clock=self._clock)

    def _resolve(self, *, has_draft: bool) -> ResolvedConfig:
        executor = self._executor
        return resolve(
            self._config,
            spec=executor.spec(),
            executor=executor.name,
            dtype="",
            block_bytes=executor.kv_layout().block_bytes,
            free_bytes=0,
            draft_spec=executor.spec(ModelRole.DRAFT) if has_draft else None,
            draft_block_bytes=(
                executor.kv_layout(ModelRole.DRAFT).block_bytes if has_draft else ()
            ),
        )


def longest(texts: Sequence[RecordedText], num_tokens: int) -> int:
    """Tokens of the longest text, prompt and output, with room for drafts."""
    return max(len(text.prompt) for text in texts) + num_tokens + MAX_DRAFTS


def _request(number: int, text: RecordedText, num_tokens: int) -> Request:
    return Request(
        request_id=number,
        prompt_token_ids=text.prompt,
        params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        seed=0,
    )

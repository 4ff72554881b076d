"""The worker in a process of its own, watched, and started again when it dies."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from ridgeline.core.config import EngineConfig, ResolvedConfig
from ridgeline.engine.engine_process import EngineProcess
from ridgeline.engine.info import EngineInfo, LoadSummary
from ridgeline.engine.loading import Progress, describe_model
from ridgeline.engine.messages import Command, Event, Failed, Loading, Lost, Started, Stop
from ridgeline.engine.stats import EngineStatus, Health

_log = logging.getLogger(__name__)

_BUSY_S = 0.1  # of processor time: more than the pulses themselves take in the time of a stall
_READY = Health(status=EngineStatus.READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds of silence before a process counts as stalled, and before it is ended.

    ``pulse``: no sign of life at all (the process is stopped); it is ended if it spends no
    processor time either, as one that imports does, or after ``step_killed_s`` and
    ``start_killed_s``. ``step``: work, but neither a step completed nor processor time spent (the
    process hangs; a long step spends processor time).
    ``stop``: told to stop, it ends a step and what the tiers are writing (`transfers.FLUSH_S`).
    """

    pulse_stalled_s: float = 5.0
    pulse_killed_s: float = 30.0
    step_stalled_s: float = 20.0
    step_killed_s: float = 60.0
    start_killed_s: float = 600.0
    stop_s: float = 5.0
    watch_s: float = 0.25
    max_failed_starts: int = 5
    backoff_s: float = 0.5


class ProcessHost:
    """Keeps one `EngineProcess` running. Its events go on, but for how a process begins and ends:
    `Started` (again after each restart), `Lost` when one dies, `Failed` when none can be started.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None, patience: Patience | None = None
    ) -> None:
        self._config = config
        self._progress = progress
        self._patience = patience or Patience()
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._failure: Failed | None = None
        self._has_started = False
        self._is_stopping = False
        self.num_restarts = 0
        self.health = Health(status=EngineStatus.STARTING, reason="The model is not loaded yet.")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_event: Callable[[Event], None]) -> None:
        """Begin; `Started` or `Failed` follows. Raises what describing the model raises."""
        self._on_event = on_event
        self._description = await asyncio.to_thread(
            describe_model, self._config, progress=self._progress
        )
        self._supervisor = asyncio.create_task(self._supervise())

    def info(self) -> EngineInfo:
        """What was loaded; to be called once there was a `Started`."""
        assert self._info is not None
        return self._info

    def send(self, command: Command) -> None:
        """Raises `EngineUnavailableError` if the process takes no more."""
        if self._process is not None and self._has_started:
            self._process.send(command)

    async def stop(self) -> None:
        """End the process, politely at first."""
        self._is_stopping = True
        self.health = Health(status=EngineStatus.DEAD, reason="The engine has been shut down.")
        if self._supervisor is None:
            return
        if self._process is not None:
            if self._has_started:
                self._process.send(Stop())
            else:
                self._process.kill()
        _, pending = await asyncio.wait([self._supervisor], timeout=self._patience.stop_s)
        if pending and self._process is not None:
            self._process.kill()
            await asyncio.wait([self._supervisor], timeout=self._patience.stop_s)
        self._supervisor.cancel()

    async def _supervise(self) -> None:
        failed_starts = 0
        while not self._is_stopping:
            self._has_started, self._failure = False, None
            try:
                reason = _how_it_ended(await self._live())
            except Exception as error:  # no more files, processes or disk; nobody waits for ever
                cause = error.strerror if isinstance(error, OSError | zmq.ZMQError) else error
                reason = f"The engine process cannot be started: {cause}."
            if self._is_stopping:
                return
            reason = self._failure.message if self._failure else reason
            if self._info is not None:  # before, who starts it is told by `Failed`
                _log.error("The engine process is lost: %s", reason)
            if self._has_started:
                failed_starts = 0
                self.num_restarts += 1
                self.health = Health(
                    status=EngineStatus.STARTING, reason="The engine is starting again."
                )
                self._on_event(Lost(message=reason))
                continue
            failed_starts += 1
            if self._info is None or failed_starts > self._patience.max_failed_starts:
                self.health = Health(status=EngineStatus.DEAD, reason=reason)
                self._on_event(self._failure or Failed(error="EngineError", message=reason))
                return
            await asyncio.sleep(self._patience.backoff_s * 2**failed_starts)

    async def _live(self) -> int:
        """Start a process and watch it to its end; returns its exit code."""
        self._process = process = EngineProcess(self._on_process_event)
        await process.start(self._config)
        if self._is_stopping:  # told so while there was nothing to end
            process.kill()
        watch = asyncio.create_task(self._watch(process))
        try:
            return await process.wait()
        finally:
            watch.cancel()

    def _on_process_event(self, event: Event) -> None:
        match event:
            case Loading(done=done, total=total, label=label):
                if self._progress is not None and self._info is None:
                    self._progress(done, total, label)
            case Failed():
                self._failure = event
            case Started(config=config, kv_digest=kv_digest, summary=summary):
                self._has_started = True
                self._pin(config, kv_digest, summary)
                self.health = _READY
                self._on_event(event)
            case _:
                self._on_event(event)

    def _pin(self, config: ResolvedConfig, kv_digest: str, summary: LoadSummary) -> None:
        """Let later processes have the pool of the first one, from which their context follows.

        As a setting the context would choose the factors of LongRoPE, which the first one did not.
        """
        loaded = self._description
        self._info = EngineInfo(
            name=loaded.name,
            spec=loaded.definition.spec,
            config=config,
            kv_digest=kv_digest,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            chat_template=loaded.chat_template,
            sampling_defaults=loaded.sampling_defaults,
            pooling=loaded.pooling,
            adapters=tuple(self._config.adapters),
            sources=self._config.sources,
            summary=summary,
        )
        if config.kv_cache_bytes:  # an encoder has none
            self._config = replace(self._config, kv_cache_memory_bytes=config.kv_cache_bytes)

    async def _watch(self, process: EngineProcess) -> None:
        """Tell a process that is stopped or hangs from one that is busy; end it in the long run."""
        patience = self._patience
        moved_s, moved = time.monotonic(), (0, 0.0)
        looked_s = spent_at_s = time.monotonic()
        spent_s = 0.0
        while True:
            await asyncio.sleep(patience.watch_s)
            now, pulse = time.monotonic(), process.pulse
            if now - looked_s > 4 * patience.watch_s + 1.0:  # it was this process that stood still
                process.last_pulse_s = moved_s = now
            looked_s = now
            silent_s = now - process.last_pulse_s
            if silent_s > patience.pulse_killed_s / 2 and process.cpu_s() > spent_s:
                spent_s, spent_at_s = process.cpu_s(), now
            step_id, cpu_s = moved
            if not pulse.is_busy or pulse.step_id != step_id or pulse.cpu_s > cpu_s + _BUSY_S:
                moved_s, moved = now, (pulse.step_id, pulse.cpu_s)
            stuck_s = now - moved_s if self._has_started else 0.0
            still_s = min(silent_s, now - spent_at_s)
            longest_s = patience.step_killed_s if self._has_started else patience.start_killed_s
            if still_s > patience.pulse_killed_s or max(silent_s, stuck_s) > longest_s:
                _log.error("The engine process makes no progress; it is ended.")
                process.kill()
                return
            if not self._has_started:
                continue
            if silent_s > patience.pulse_stalled_s or stuck_s > patience.step_stalled_s:
                reason = f"The engine has made no progress for {max(silent_s, stuck_s):.0f} s."
                self.health = Health(status=EngineStatus.STALLED, reason=reason)
            elif self.health.status is EngineStatus.STALLED:
                self.health = _READY


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"The engine process ended with code {code}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # Packed weights are read where they lie, by kernels that cannot fail.
    cut = ", as a file that it had mapped was cut or cannot be read" if name == "SIGBUS" else ""
    return f"The engine process was ended by {name}{cut}."

"""`Engine`: a model, the executor that runs it, and the loop over both, in one thread."""

import logging

import psutil

from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.plan import ModelRole
from ridgeline.engine.info import EngineInfo
from ridgeline.engine.loading import Progress, load_model
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.request_factory import RequestFactory
from ridgeline.executors import create_executor
from ridgeline.scheduler import Scheduler, SchedulerConfig

_log = logging.getLogger(__name__)


class Engine:
    """What `LLM` and the worker of `AsyncEngine` drive; not thread-safe.

    Raises what loading a model raises, and `OutOfMemoryError` if the KV pool does not fit.
    """

    def __init__(self, config: EngineConfig, *, progress: Progress | None = None) -> None:
        loaded = load_model(config, progress=progress)
        self.executor = create_executor(
            config.executor, {ModelRole.TARGET: loaded.model}, block_tokens=config.block_tokens
        )
        layout = self.executor.kv_layout()
        spec = loaded.model.spec
        resolved = resolve(
            config,
            spec=spec,
            executor=self.executor.name,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            block_bytes=layout.block_bytes,
            free_bytes=psutil.virtual_memory().available,
        )
        if config.max_model_len is None and resolved.max_model_len < spec.max_position:
            _log.warning(
                "The context is clipped from %d to %d tokens: the KV pool has %.1f GB.",
                spec.max_position,
                resolved.max_model_len,
                resolved.kv_cache_bytes / 1e9,
            )
        self.executor.allocate_kv(resolved.num_blocks)
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=resolved.max_num_seqs,
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                max_model_len=resolved.max_model_len,
                num_blocks=resolved.num_blocks,
                windows=tuple(group.window for group in layout.groups),
                block_tokens=resolved.block_tokens,
            )
        )
        self.info = EngineInfo(
            name=loaded.name,
            spec=spec,
            config=resolved,
            kv_digest=layout.digest,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            sampling_defaults=loaded.sampling_defaults,
            adapters=tuple(config.adapters),
        )
        self.requests = RequestFactory(self.info)
        self.loop = EngineLoop(self.executor, scheduler, loaded.tokenizer)

    def close(self) -> None:
        """Free weights and KV; every later call of the loop raises `EngineError`."""
        self.loop.close()
        self.executor.close()

"""`Engine`: a model, the executor that runs it, and the loop over both, in one thread."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ridgeline.core.config import EngineConfig, ResolvedConfig, resolve
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.host import available_memory_bytes
from ridgeline.core.plan import ModelRole
from ridgeline.engine.info import EngineInfo
from ridgeline.engine.kv_tiers import kv_digest, make_transfers
from ridgeline.engine.loading import Progress, load_model
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.observing import keep_errors, make_observer, step_predictor
from ridgeline.engine.request_factory import RequestFactory
from ridgeline.engine.segment_gate import check_segment_reuse
from ridgeline.engine.speculation import (
    load_draft,
    make_grammars,
    make_speculation,
    sharing_passes,
    with_draft,
)
from ridgeline.engine.summary import load_summary
from ridgeline.executors import create_executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.scheduler import Scheduler, SchedulerConfig

_log = logging.getLogger(__name__)
_TORCH_HAS_NO_MEMORY = ("allocate memory", "bad_alloc")  # in its RuntimeErrors


@contextmanager
def _told_if_memory_ends() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = str(error)
        if isinstance(error, MemoryError) or any(each in words for each in _TORCH_HAS_NO_MEMORY):
            left = available_memory_bytes() / 1e9
            raise OutOfMemoryError(
                f"The memory ended while the model was loaded; {left:.2f} GB are left now."
            ) from error
        raise


class Engine:
    """What `LLM` and the worker of `AsyncEngine` drive; not thread-safe.

    Raises what loading a model raises, and `OutOfMemoryError` if the KV pool does not fit.
    """

    @_told_if_memory_ends()
    def __init__(self, config: EngineConfig, *, progress: Progress | None = None) -> None:
        loaded = load_model(config, progress=progress)
        draft = load_draft(config, loaded, progress=progress)
        models = with_draft(loaded.model, draft)
        self.executor = create_executor(models, config)
        spec = models[ModelRole.TARGET].spec
        resolved = self._allocate_kv(config, models)
        if config.enable_segment_reuse:
            ops = models[ModelRole.TARGET].ops
            check_segment_reuse(self.executor, ops, config, resolved)
        self.observer = make_observer(config, models, self.executor)
        predictor = step_predictor(self.observer)
        self.grammars = make_grammars(loaded)
        self.speculation = make_speculation(
            config,
            resolved,
            self.executor,
            constraints=self.grammars,
            predictor=predictor,
            sharing=sharing_passes(draft),
        )
        digest = kv_digest(
            config, self.executor, spec=spec, dtype=resolved.dtype, folder=loaded.folder
        )
        self.scheduler = Scheduler(
            SchedulerConfig.of_engine(
                config,
                resolved,
                windows=tuple(group.window for group in self.executor.kv_layout().groups),
                max_in_flight=self.executor.max_in_flight,
            ),
            self.speculation,
            predictor=predictor,
            transfers=make_transfers(config, self.executor, digest),
        )
        self.info = EngineInfo(
            name=loaded.name,
            spec=spec,
            config=resolved,
            kv_digest=digest,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            chat_template=loaded.chat_template,
            sampling_defaults=loaded.sampling_defaults,
            pooling=loaded.pooling,
            adapters=tuple(config.adapters),
            sources=config.sources,
            summary=load_summary(loaded.name, resolved, loaded.model, self.observer),
        )
        self.head = loaded.head
        self.requests = RequestFactory(self.info)
        self.loop = EngineLoop(
            self.executor, self.scheduler, loaded.tokenizer, observer=self.observer
        )

    def _allocate_kv(
        self, config: EngineConfig, models: Mapping[ModelRole, ExecutorModel]
    ) -> ResolvedConfig:
        """Allocate the KV pools that there is memory for, and settle what follows from them."""
        executor, target = self.executor, models[ModelRole.TARGET]
        draft, spec = models.get(ModelRole.DRAFT), target.spec
        if draft is not None and draft.shares_kv:
            draft = None
        resolved = resolve(
            config,
            spec=spec,
            executor=executor.name,
            dtype=target.dtype,
            block_bytes=executor.kv_layout().block_bytes,
            free_bytes=available_memory_bytes(),
            kv_bytes=executor.kv_budget_bytes(config.max_num_batched_tokens),
            draft_spec=None if draft is None else draft.spec,
            draft_block_bytes=(
                () if draft is None else executor.kv_layout(ModelRole.DRAFT).block_bytes
            ),
        )
        if config.max_model_len is None and resolved.max_model_len < spec.max_position:
            _log.warning(
                "The context is clipped from %d to %d tokens: the KV pool has %.1f GB.",
                spec.max_position,
                resolved.max_model_len,
                resolved.kv_cache_bytes / 1e9,
            )
        executor.allocate_kv(resolved.num_blocks)
        if resolved.num_draft_blocks:
            executor.allocate_kv(resolved.num_draft_blocks, ModelRole.DRAFT)
        return resolved

    def close(self) -> None:
        """Free weights and KV; every later call of the loop raises `EngineError`."""
        keep_errors(self.observer, model=self.info.name, executor=self.executor.name)
        self.loop.close()
        self.scheduler.close()
        if self.grammars is not None:
            self.grammars.close()
        self.executor.close()

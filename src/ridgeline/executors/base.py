"""What the executors that hold models have in common: a KV pool of each, and who asks for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ridgeline.core.formats import NumberFormat
from ridgeline.core.plan import BlockCopy, ModelRole
from ridgeline.core.protocols import Executor, KVLayout
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.runner import StepRunner


class KVPool(Protocol):
    """The paged KV of one model, as `PoolExecutor` needs it."""

    @property
    def layout(self) -> KVLayout: ...

    def allocate(self, num_blocks: Sequence[int]) -> None: ...

    def copy_block(self, group: int, source: int, target: int) -> None: ...

    def export_blocks(self, group: int, blocks: Sequence[int]) -> bytes: ...

    def import_blocks(self, group: int, blocks: Sequence[int], data: bytes) -> None: ...


Pool = TypeVar("Pool", bound=KVPool)
Result = TypeVar("Result")


class PoolExecutor(StepRunner, Generic[Pool]):
    """The half of `ridgeline.core.protocols.Executor` that is about specs and KV.

    ``pools`` is filled by the subclass. Blocks are exported and imported on the thread that runs
    the steps, and so take their turn among them. ``kernels`` names what computes: by other kernels
    the KV of the same weights and tokens is another.
    """

    def __init__(self, name: str, specs: Mapping[ModelRole, ModelSpec], *, kernels: str) -> None:
        super().__init__(name)
        self.kernels = kernels
        self.pools: dict[ModelRole, Pool] = {}
        self._specs = dict(specs)

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return self._specs[role]

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        return self.pools[role].layout

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        self.pools[role].allocate(num_blocks)

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        return self.in_turn(lambda: self.pools[role].export_blocks(group, blocks))

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        self.in_turn(lambda: self.pools[role].import_blocks(group, blocks, data))

    def in_turn(self, call: Callable[[], Result]) -> Result:
        """Call on the thread that runs the steps, after those that were submitted."""
        return self.thread.submit(call).result()

    def weight_formats(self, role: ModelRole = ModelRole.TARGET) -> Mapping[str, NumberFormat]:
        """What quantized matrices are held in, by weight."""
        return {}

    def kv_budget_bytes(self, max_num_batched_tokens: int) -> int | None:
        """What a device has for KV beside weights and steps of that size; ``None``: it is the
        host's memory that counts."""
        return None

    def copy_block(self, copy: BlockCopy) -> None:
        self.pools[copy.role].copy_block(copy.group, copy.source, copy.target)

    def close(self) -> None:
        """Abort what runs, and free everything."""
        self.stop()
        self.free()
        self.pools.clear()

    def free(self) -> None:
        """Give back what the subclass holds, once nothing runs any more."""


def kernels_of(executor: Executor) -> str:
    """See `PoolExecutor`; empty for executors that have no pools."""
    return executor.kernels if isinstance(executor, PoolExecutor) else ""


def device_kv_bytes(executor: Executor, max_num_batched_tokens: int) -> int | None:
    """See `PoolExecutor.kv_budget_bytes`; ``None`` for executors that have no pools."""
    if not isinstance(executor, PoolExecutor):
        return None
    return executor.kv_budget_bytes(max_num_batched_tokens)

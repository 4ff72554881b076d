"""`HostDevice`: the CPU in the place of a GPU, as strict as one about graphs."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.executors.cuda.device import DeviceMemory, Event, Graph, Stream

aten = torch.ops.aten

# What makes the host wait for a GPU, or depends on values that only the host can read.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.lift_fresh.default,  # a tensor made of Python numbers: copied from pageable memory
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
}


class HostWaitError(RuntimeError):
    """An op would have made the host wait for the device."""


class HostStream:
    """See `ridgeline.executors.cuda.device.Stream`; all is done as soon as it is issued."""

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, *, timed: bool = False) -> "HostEvent":
        return HostEvent()

    def wait_for(self, event: Event) -> None:
        pass


class HostDevice(HostStream):
    """See `ridgeline.executors.cuda.device.Device`; ``total`` bytes are pretended."""

    name = "host"

    def __init__(self, *, total: int = 1 << 34, used: int = 0) -> None:
        self.torch_device = torch.device("cpu")
        self.total, self.used = total, used
        self.num_replays = 0

    def copy_stream(self) -> Stream:
        return HostStream()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free=self.total - self.used, total=self.total)

    def synchronize(self) -> None:
        pass

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def release(self) -> None:
        pass

    def graph_pool(self) -> object:
        return object()

    def capture(self, body: Callable[[], None], pool: object = None) -> Graph:
        recorder = OpRecorder()
        with recorder:
            body()
        return HostGraph(self, recorder.calls)


class HostEvent:
    """See `ridgeline.executors.cuda.device.Event`; all is done as soon as it is issued."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, HostEvent)
        return self._time_s - earlier._time_s


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op with the tensors that it was given, and those that it made."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]


class HostGraph:
    """The recorded ops on the recorded tensors: nothing that Python decides is decided again."""

    def __init__(self, device: HostDevice, calls: list[OpCall]) -> None:
        self._device, self._calls = device, calls

    def replay(self) -> None:
        self._device.num_replays += 1
        for call in self._calls:
            again = tuple(_tensors(call.op(*call.args, **call.kwargs)))
            for kept, made in zip(call.outputs, again, strict=True):
                if kept.data_ptr() != made.data_ptr():  # an op that writes in place returns it
                    kept.copy_(made)


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses ops that make the host wait for a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        selects = func in _INDEXING and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
        )
        if func in _WAITS or selects:
            raise HostWaitError(f"{func} waits for the device.")
        return func(*args, **(kwargs or {}))


class OpRecorder(NoWaits):  # type: ignore[no-untyped-call]
    """Runs ops and keeps those that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OpCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = tuple(_tensors(result))
        if func not in _EMPTY and not _is_view(func, args, kwargs, outputs):
            self.calls.append(OpCall(func, args, kwargs, outputs))
        return result


def _is_view(func: Any, args: Any, kwargs: Any, outputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether the op computed nothing: its outputs lie in its inputs, which it did not write."""
    if func._schema.is_mutable:
        return False
    storages = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs)) if t.numel()}
    return bool(outputs) and all(
        t.numel() == 0 or t.untyped_storage().data_ptr() in storages for t in outputs
    )


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)

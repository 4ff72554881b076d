"""`CUDADevice`: a GPU through PyTorch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ridgeline.executors.cuda.device import DeviceMemory, Event, Graph, Stream


class CUDAStream:
    """See `ridgeline.executors.cuda.device.Stream`."""

    def __init__(self, at: torch.device) -> None:
        self._stream = torch.cuda.Stream(at)  # type: ignore[no-untyped-call]

    def scope(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self, *, timed: bool = False) -> "CUDAEvent":
        event = CUDAEvent(timed)
        event.event.record(self._stream)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CUDAEvent)
        self._stream.wait_event(event.event)


class CUDADevice(CUDAStream):
    """See `ridgeline.executors.cuda.device.Device`."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)
        super().__init__(self.torch_device)

    def copy_stream(self) -> Stream:
        return CUDAStream(self.torch_device)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device)
        return DeviceMemory(
            free=free + kept - torch.cuda.memory_allocated(self.torch_device), total=total
        )

    def synchronize(self) -> None:
        self._stream.synchronize()

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def graph_pool(self) -> object:
        return torch.cuda.graph_pool_handle()  # not to be used again once its graphs are gone

    def capture(self, body: Callable[[], None], pool: Any = None) -> Graph:
        with self.scope():
            body()  # kernels are compiled, and libraries take their workspaces, outside of it
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be waiting for an event of an earlier step meanwhile.
        with (
            _no_collection(),
            torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            body()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs that the collector destroys while a stream captures would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CUDAEvent:
    """See `ridgeline.executors.cuda.device.Event`."""

    def __init__(self, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CUDAEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3

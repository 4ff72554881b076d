"""`Handle`: a submitted step, as executors that run on a thread give it out."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from ctypes import c_int32

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import StepPlan
from ridgeline.core.result import StepResult

Mask = npt.NDArray[np.uint32]


class Handle:
    """See `ridgeline.core.protocols.StepHandle`."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.aborted = threading.Event()
        self.abort_flag = c_int32(0)  # the same, for native code
        self.masks: dict[tuple[int, int], Mask] = {}
        self.masks_complete = threading.Event()
        self.future: Future[StepResult] = Future()
        self._masked = {
            (p, s)
            for p, a_pass in enumerate(plan.passes)
            for s, segment in enumerate(a_pass.segments)
            if segment.outputs.masked
        }
        self._signal_if_complete()

    def set_masks(self, masks: Mapping[tuple[int, int], Mask]) -> None:
        self.masks.update(masks)
        self._signal_if_complete()

    def abort(self) -> None:
        self.abort_flag.value = 1
        self.aborted.set()
        self.masks_complete.set()

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> StepResult:
        if not self.masks_complete.is_set():
            raise EngineError("A step was awaited before the masks that it needs were set.")
        return self.future.result()

    def wait_for_masks(self) -> None:
        self.masks_complete.wait()
        if not self._masked <= self.masks.keys():
            raise EngineError("A step was aborted while it waited for masks.")

    def masks_of(self, pass_index: int, segment_index: int) -> Callable[[], Mask | None]:
        """Looks up a segment's mask when it is needed, since it may be set while the pass runs."""
        return lambda: self.masks.get((pass_index, segment_index))

    def _signal_if_complete(self) -> None:
        if self._masked <= self.masks.keys():
            self.masks_complete.set()

"""Requests whose grammar is being compiled, while the others stream on."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ridgeline.core.errors import EngineError, OverloadedError, RidgelineError
from ridgeline.core.protocols import ConstraintFactory, Grammar
from ridgeline.core.request import Request
from ridgeline.decoding.grammars.checker import CPU_SECONDS

_NUM_THREADS = 2


class GrammarGate:
    """Compiles in threads of its own; used from the thread that runs the steps.

    ``max_held`` requests may wait for a grammar; ``None`` for any number.
    """

    def __init__(self, constraints: ConstraintFactory | None, max_held: int | None = None) -> None:
        self._constraints = constraints
        self._max_held = max_held
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="grammar")
        self._held: dict[int, tuple[Request, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, request: Request) -> bool:
        """Take the request if its grammar is not known yet; `released` gives it back.

        Raises:
            OverloadedError: so many wait for theirs that no more may.
        """
        wanted, factory = request.params.structured_outputs, self._constraints
        if wanted is None or factory is None or factory.is_prepared(wanted, request.tenant):
            return False
        if self._max_held is not None and len(self) >= self._max_held:
            raise OverloadedError(
                f"{len(self)} requests wait for their grammars to be compiled; try again later.",
                retry_after_s=CPU_SECONDS * len(self) / _NUM_THREADS,  # at the most
            )
        future = self._threads.submit(factory.prepare, wanted, request.tenant)
        self._held[request.request_id] = (request, future)
        return True

    def released(self) -> Iterator[tuple[Request, Grammar | RidgelineError]]:
        """Requests that may go on, and those whose grammar was refused, with the reason."""
        done = [number for number, (_, future) in self._held.items() if future.done()]
        for number in done:
            request, future = self._held.pop(number)
            error = future.exception()
            if error is None:
                yield request, future.result()
            elif isinstance(error, RidgelineError):
                yield request, error
            else:
                yield request, EngineError(f"The grammar failed: {type(error).__name__}")

    def abort(self, number: int) -> None:
        """Forget a request. Its grammar may be compiled to the end."""
        held = self._held.pop(number, None)
        if held is not None:
            held[1].cancel()

    def close(self) -> None:
        """Drop everything that waits."""
        self._held.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

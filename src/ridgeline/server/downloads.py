"""Models on their way from the hub to this machine, in threads of their own."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from ridgeline.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    MachineError,
    ModelFileError,
    ModelNotFoundError,
    NetworkError,
    RidgelineError,
)
from ridgeline.server.errors import ApiError

MAX_AT_ONCE = 2
MAX_OPEN = 16  # running and waiting
_RETRY_S = 30.0


class Download:
    """One model; ``done`` of ``total`` bytes are here. Who waits for ``result`` may leave."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self.result: asyncio.Future[object] = asyncio.Future()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, well or not, after so many seconds at the most."""
        await asyncio.wait((self.result,), timeout=timeout_s)
        return self.result.done()


class Downloads:
    """Each model once at a time: who asks for one that is on its way joins it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="ridgeline-download")
        self._open: dict[str, Download] = {}
        self._closing = threading.Event()

    def start(self, name: str) -> Download:
        """Begin to download a model of the hub, or join whoever does.

        Raises:
            ApiError: 429 while as many as may are on their way.
        """
        if name in self._open:
            return self._open[name]
        if len(self._open) >= MAX_OPEN:
            text = f"{MAX_OPEN} models are being downloaded; try again later."
            raise ApiError(429, text, retry_after_s=_RETRY_S)
        download = self._open[name] = Download()

        def ended(result: asyncio.Future[object]) -> None:
            del self._open[name]
            result.cancelled() or result.exception()  # it may be that nobody waits for it

        loop = asyncio.get_running_loop()
        download.result = loop.run_in_executor(self._threads, self._fetch, name, download)
        download.result.add_done_callback(ended)
        return download

    def _fetch(self, name: str, download: Download) -> None:
        from ridgeline.weights import download_model

        def note(done: int, total: int, _: str) -> None:
            if self._closing.is_set():
                raise EngineUnavailableError("The server is shutting down.")
            download.done, download.total = done, total

        download_model(name, progress=note)

    def close(self) -> None:
        """End what runs with its next bytes; what has come is kept for the next time."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


def download_error(error: RidgelineError) -> ApiError:
    """What to tell whoever asked for a download, or to delete one."""
    match error:
        case ModelNotFoundError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case InvalidRequestError():
            return ApiError(400, str(error), param="model")
        case ModelFileError():
            return ApiError(422, str(error), param="model")
        case NetworkError():
            return ApiError(502, str(error))
        case MachineError():
            return ApiError(507, str(error))
    return ApiError(503, str(error))

"""A real server on a real socket, in a thread of the test's process."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

import httpx

from ridgeline.core.config import EngineConfig
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.server.config import ServerConfig
from ridgeline.server.context import Server
from ridgeline.server.jobs.folder import open_data_folder
from ridgeline.server.jobs.jobs import Jobs
from ridgeline.server.jobs.quotas import Quotas
from ridgeline.server.jobs.worker import BatchWorker
from ridgeline.server.pool.plan import pool_plan
from ridgeline.server.pool.pool import ModelPool
from ridgeline.server.serving import http_server, open_listener, warm_up

DEFAULTS = {"dtype": "float32", "block_tokens": 4, "max_num_seqs": 8}


def bound(monkeypatch, jobs, **quotas):
    """Let a tenant store no more, until the test ends."""
    for store in (jobs.files, jobs.batches):
        monkeypatch.setattr(store, "_quotas", Quotas(**quotas))


class Running:
    """``url`` to call; ``server`` and ``worker`` to look inside.

    `on_loop` runs a coroutine in its event loop.
    """

    def __init__(self, loop, server, worker, url):
        self.loop, self.server, self.worker, self.url = loop, server, worker, url

    def client(self, **settings):
        return httpx.Client(base_url=self.url, timeout=30, **settings)

    def on_loop(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


@contextmanager
def running(model, *, data_dir, engine=None, **settings):
    """Serve a model in this process until the block ends."""
    config = _config(data_dir, settings)
    engine_config = EngineConfig(model=model and str(model), **(DEFAULTS | (engine or {})))

    @asynccontextmanager
    async def opened(jobs):
        async with AsyncEngine(engine_config, in_process=True) as engine:
            server = Server(engine, config, jobs)
            await warm_up(server, lambda _: None)
            yield server

    with _running(config, opened) as found:
        yield found


@contextmanager
def running_pool(words, *, data_dir, engine=None, memory_bytes, ttl_s=None, wait_s=60, **settings):
    """Serve several models, each in a process of its own, until the block ends."""
    config = _config(data_dir, settings)
    engine_config = EngineConfig(**(DEFAULTS | (engine or {})))
    limits = {"memory_bytes": memory_bytes, "ttl_s": ttl_s, "wait_s": wait_s}
    plan = pool_plan(engine_config, words, config, **limits)

    @asynccontextmanager
    async def opened(jobs):
        pool = ModelPool(plan.config)
        try:
            await pool.start(plan.models)
            yield Server.of_pool(pool, config, jobs)
        finally:
            await pool.shutdown()

    with _running(config, opened) as found:
        yield found


def _config(data_dir, settings):
    return ServerConfig(**{"port": 0, "log_requests": False, "data_dir": data_dir, **settings})


@contextmanager
def _running(config, opened):
    ready, holder = threading.Event(), {}

    async def main():
        holder["stop"] = asyncio.Event()
        listener = open_listener(config)
        async with opened(Jobs(open_data_folder(config, config.port), Quotas.of(config))) as server:
            worker = BatchWorker(server)
            working = asyncio.gather(worker.run(), server.jobs.responses.keep_purging())
            http = http_server(server)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            holder["running"] = Running(asyncio.get_running_loop(), server, worker, url)
            ready.set()
            await holder["stop"].wait()
            server.is_draining = True
            http.should_exit = True
            await serving
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            server.close()
        listener.close()

    def target():
        try:
            asyncio.run(main())
        except BaseException as error:
            holder["error"] = error
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    assert ready.wait(60)
    if "error" in holder:
        raise holder["error"]
    try:
        yield holder["running"]
    finally:
        holder["running"].loop.call_soon_threadsafe(holder["stop"].set)
        thread.join(30)

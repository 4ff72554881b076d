"""Ranks as threads of one process, for plans by hand; tests of the engine have processes."""

import os
from concurrent.futures import ThreadPoolExecutor

from tests.tiny import Driver

from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.distributed.pipe import SocketPipe, wire
from ridgeline.kernels.cpu.group import RankGroup, shared_memory
from ridgeline.kernels.cpu.library import load_library
from ridgeline.kernels.cpu.pool import Pool


class RankThreads:
    """Runs what each rank does in a thread of its own, and gives what each came to."""

    def __init__(self, num_ranks, num_threads=1, layout=None):
        memory = shared_memory(num_ranks)
        self.layout = layout or ParallelLayout(tensor=num_ranks)
        self._threads = ThreadPoolExecutor(num_ranks)
        self.pools = [Pool(load_library(), num_threads) for _ in range(num_ranks)]
        self.groups = [RankGroup(pool, memory, r, num_ranks) for r, pool in enumerate(self.pools)]
        os.close(memory)

    def each(self, call):
        """``call(group)`` for every rank at once."""
        return [each.result() for each in [self._threads.submit(call, g) for g in self.groups]]

    def on_parts(self, model, run, *, make=CPUExecutor, block_tokens=16):
        """``run(driver)`` on an executor of each rank's part of a model."""

        def of_rank(group):
            part = model.part(self.layout, group.rank, group)
            return on_executor(make({ModelRole.TARGET: part}, block_tokens), run)

        return self.each(of_rank)

    def close(self):
        self._threads.shutdown()
        for pool in self.pools:
            pool.close()


class Together:
    """All ranks of a layout as one executor, of which each runs every plan; what comes of it is
    what the last of them says."""

    def __init__(self, model, layout, block_tokens=16, *, make=CPUExecutor):
        wires = wire(layout)
        self.pipes = [SocketPipe(each, layout) for each in wires]
        self.groups = []
        for rank in range(layout.num_ranks):
            place, width = rank % layout.stage_ranks, layout.stage_ranks
            if place == 0:
                memory = shared_memory(width)
            self.groups.append(RankGroup(Pool(load_library(), 1), memory, place, width))
            if place == width - 1:
                os.close(memory)
        self.parts = [
            model.part(layout, rank, self.groups[rank], self.pipes[rank])
            for rank in range(layout.num_ranks)
        ]
        self.executors = [make({ModelRole.TARGET: part}, block_tokens) for part in self.parts]

    def kv_layout(self):
        return self.executors[0].kv_layout()

    def allocate_kv(self, num_blocks):
        for executor in self.executors:
            executor.allocate_kv(num_blocks)

    def submit(self, plan):
        return [executor.submit(plan) for executor in self.executors][-1]

    def close(self):
        for executor in self.executors:
            executor.close()
        for group in self.groups:
            group.pool.close()


def on_executor(executor, run):
    """What ``run(driver)`` gives on an executor, which is closed then."""
    executor.allocate_kv([64] * len(executor.kv_layout().block_bytes))
    try:
        return run(Driver(executor))
    finally:
        executor.close()

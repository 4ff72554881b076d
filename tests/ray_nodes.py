"""A Ray cluster of this machine, whose nodes can be killed."""

import os
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def ray_nodes(count):
    """A head and other nodes of one processor each; yields their address, and the others."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # not 15
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=sizes)
    try:
        yield cluster.address, [_added(cluster, sizes) for _ in range(count - 1)]
    finally:
        cluster.shutdown()


def _added(cluster, sizes):
    """Ray gives a node half a minute to start, which is short on a machine that is busy."""
    for _ in range(2):
        with suppress(Exception):
            return RayNode(cluster.add_node(**sizes))
    return RayNode(cluster.add_node(**sizes))


class RayNode:
    """One of them. Ray leaves actors of a node that it removes alive for a while: all of its
    processes are killed, as when a machine is lost."""

    def __init__(self, node):
        (raylet,) = node.all_processes["raylet"]
        self._raylet = psutil.Process(raylet.process.pid)

    def processes(self):
        return self._raylet.children(recursive=True)

    def runs(self, *words):
        """Whether a process of it has all these words in its command."""
        lines = [" ".join(each.cmdline()) for each in self.processes() if each.is_running()]
        return any(all(word in line for word in words) for line in lines)

    def kill(self):
        family = [self._raylet, *self.processes()]
        for each in family:
            each.suspend()  # none starts another
        for each in [*family, *self.processes()]:
            each.kill()

"""Settings of how a model is spread over processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ridgeline.core.settings.bounds import Meta, Seconds
from ridgeline.core.settings.reading import Needs

MAX_RANKS = 64
_RAY = Needs("launcher ray", lambda config: config.launcher == "ray")
# Of what Ray has started itself.
WITHOUT_RAY: Mapping[str, Any] = {"launcher": "local", "ray_address": "auto", "ray_cpus": None}


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How many processes compute one model.

    Attributes:
        tensor_parallel_size: processes that have a part of each matrix; they share this machine's
            processors, and give the tokens of one process.
        pipeline_parallel_size: stages, each of which has some of the layers and computes another
            step; each is as many processes as the larger of the two other sizes.
        expert_parallel_size: processes that have a part of the experts of each layer, and all else
            whole, or as many parts of it as tensor_parallel_size, of which it is a multiple; they
            share this machine's processors, and give the tokens of one process.
        context_parallel_size: processes that have a part of each sequence's KV, and compute a part
            of long prompts; they share this machine's processors, and give the tokens of one
            process. It goes with no other of these sizes.
        split_feed_forward: the feed-forward networks in a process of their own, beside one that has
            attention and all else (attention-FFN disaggregation), with the tokens of one process.
            It goes with none of these sizes.
        workers: other machines that join by `ridgeline worker`; all have as many of the ranks.
        worker_address: HOST:PORT at which they join.
        worker_key_file: file of the key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            that all machines have.
        worker_wait_s: seconds to wait for them.
        launcher: what starts workers and replicas: you do, and replicas are of this machine
            (local), or the Ray cluster that this machine is one of does (ray).
        ray_address: HOST:PORT of that cluster's head; auto for the one that runs here.
        ray_cpus: processors of a node that a worker or a replica takes; without it, as many as the
            smallest other node has.
    """

    tensor_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    expert_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    context_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    split_feed_forward: bool = False

    workers: Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)] = 0
    worker_address: str = "0.0.0.0:7070"
    worker_key_file: str | None = None
    worker_wait_s: Seconds = 120.0
    launcher: Literal["local", "ray"] = "local"
    ray_address: Annotated[str, _RAY] = "auto"
    ray_cpus: Annotated[int, Meta(ge=1, le=4096), _RAY] | None = None

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model."""
        in_a_stage = max(
            self.tensor_parallel_size,
            self.expert_parallel_size,
            self.context_parallel_size,
            1 + self.split_feed_forward,
        )
        return in_a_stage * self.pipeline_parallel_size

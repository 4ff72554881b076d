"""Settings of the scheduler: what runs together, in which order, and how much in a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ridgeline.core.parts import one_of_or_part
from ridgeline.core.settings.bounds import Count, Meta, Positive, Seconds
from ridgeline.core.settings.reading import Needs, Reads, Tries

Batching = Literal["continuous", "dynamic", "static"]
SCHEDULING_POLICIES = ("fcfs", "priority", "edf", "fair")

_SHARES = Needs(
    "scheduling_policy fair or priority",
    lambda config: config.scheduling_policy in ("fair", "priority"),
)
_REUSE = Needs("reuse_kv", lambda config: config.reuse_kv)
_DYNAMIC = Needs("batching dynamic", lambda config: config.batching == "dynamic")


@dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
    """What runs next, and with what.

    Attributes:
        max_model_len: longest sequence, prompt and output together, in tokens (default: the
            model's); without it, no more than memory holds.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step.
        max_num_waiting: samples that may wait (a request has n); more are refused, with the seconds
            to stay away.
        scheduling_policy: who runs first: fcfs (the default), priority (that of a server), edf
            (earliest deadline), or fair (share of service between tenants, as among equal
            priorities), or an installed policy.
        tenant_weights: a tenant's share under fair or priority, relative to others'; default 1.
        batching: continuous; static (nobody joins a batch that runs); or dynamic (the same, and a
            batch starts when it is full or batch_window_s after its first request).
        batch_window_s: how long dynamic batching waits for a batch to fill.
        tpot_slo_s: prompts get only as many tokens per step as keep it within these seconds.
        decode_replay_s: decode steps that together take no longer are run in one go, while nobody
            waits; 0 returns after each. `LLM.generate`, whose caller sees no token before the end,
            takes up to 0.05 s if that is more.
    """

    max_model_len: Count | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 16), Tries(values=(8, 16, 32, 128, 256))] = 64
    max_num_batched_tokens: Annotated[Count, Tries(values=(256, 512, 1024, 4096))] = 2048
    max_num_waiting: Count | None = None
    scheduling_policy: Annotated[
        str, Reads(one_of_or_part(SCHEDULING_POLICIES, "queue_policies"))
    ] = "fcfs"
    tenant_weights: Annotated[Mapping[str, Positive], _SHARES] = field(default_factory=dict)
    batching: Annotated[Batching, _REUSE] = "continuous"
    batch_window_s: Annotated[Seconds, _DYNAMIC] = 0.05
    tpot_slo_s: Annotated[Seconds | None, Tries(limit="tpot_s")] = None
    decode_replay_s: Annotated[float, Meta(ge=0)] = 0.008

"""Independent counts on the reference executor: FLOPs by PyTorch's own counter, bytes by the sizes
of the tensors that a step looks up, reads and writes."""

from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core import ops
from ridgeline.executors.reference import experts, forward, kv_cache, states


@dataclass
class Counts:
    flops: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    experts_read: int = 0
    seen: set = field(default_factory=set)


class _Buffers(dict):
    """Named buffers that note which were read and written during one op."""

    def __init__(self):
        super().__init__()
        self.read, self.written = {}, {}

    def __getitem__(self, name):
        value = super().__getitem__(name)
        self.read.setdefault(name, value.nbytes)
        return value

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        self.written[name] = value.nbytes

    def drain(self):
        size = sum(self.read.values()) + sum(self.written.values())
        self.read, self.written = {}, {}
        return size


def count(monkeypatch, act):
    """Run ``act`` (which makes the executor run one step) and count what it touches."""
    counts = Counts()
    plain_step, plain_init = forward.Forward.step, forward.Forward.__init__
    plain_logits, plain_weight = forward.Forward.logits, forward.Forward._weight
    plain_read, plain_write = kv_cache.ReferenceKVCache.read, kv_cache.ReferenceKVCache.write
    plain_before, plain_write_state = states.StateAccess.before, states.StateAccess.write
    plain_experts, plain_run = experts.kernels.run_experts, forward.Forward.run

    def note_weight(self, weight):
        value = plain_weight(self, weight)
        # Embeddings are counted by rows, experts by those that run, others once for each pass.
        if weight.name in ("embed", "layer_embed", "positions") and not self.in_head:
            counts.weight_bytes += len(self._batch.token_ids_T) * value[0].nbytes
        elif ".experts." not in weight.name and weight.name not in counts.seen:
            counts.seen.add(weight.name)
            counts.weight_bytes += value.nbytes
        return value

    def init(self, *arguments):
        plain_init(self, *arguments)
        self.buffers, self.in_head = _Buffers(), False

    def step(self, op):
        self.buffers.drain()
        plain_step(self, op)
        if isinstance(op, ops.LayerInput):  # of which it reads its own
            own = self.buffers["layers"][:, : op.width]
            self.buffers.read["layers"] = own.numel() * own.element_size()
        if isinstance(op, ops.AddToStreams):  # to all but the first
            for moved in (self.buffers.read, self.buffers.written):
                moved["streams"] -= moved["streams"] // op.num_streams
        counts.activation_bytes += self.buffers.drain()

    def run(self):
        self._optional = lambda weight: None if weight is None else self._weight(weight)
        return plain_run(self)

    def logits(self, hidden):
        self.in_head = True
        out = plain_logits(self, hidden)
        counts.activation_bytes += hidden.nbytes + out.nbytes
        return out

    def read(self, *arguments):
        k, v = plain_read(self, *arguments)
        counts.kv_read_bytes += k.nbytes + v.nbytes
        return k, v

    def write(self, layer, rows, k, v):
        counts.kv_write_bytes += k.nbytes + (0 if v is None else v.nbytes)
        plain_write(self, layer, rows, k, v)

    def before(self, item):
        state = plain_before(self, item)
        counts.state_bytes += state.nbytes
        return state

    def write_state(self, blocks, *parts):
        counts.state_bytes += len(blocks) * sum(part.nbytes for part in parts)
        plain_write_state(self, blocks, *parts)

    def run_experts(h, experts_Tk, weights_Tk, **stacked):
        touched = torch.unique(experts_Tk)
        counts.experts_read += len(touched)
        for value in stacked.values():
            if isinstance(value, torch.Tensor):
                counts.weight_bytes += len(touched) * value[0].nbytes
        return plain_experts(h, experts_Tk, weights_Tk, **stacked)

    for target, name, replacement in (
        (forward.Forward, "__init__", init),
        (forward.Forward, "step", step),
        (forward.Forward, "_weight", note_weight),
        (forward.Forward, "run", run),
        (forward.Forward, "logits", logits),
        (kv_cache.ReferenceKVCache, "read", read),
        (kv_cache.ReferenceKVCache, "write", write),
        (states.StateAccess, "before", before),
        (states.StateAccess, "write", write_state),
        (experts.kernels, "run_experts", run_experts),
    ):
        monkeypatch.setattr(target, name, replacement)
    with FlopCounterMode(display=False) as counter:
        result = act()
    counts.flops = counter.get_total_flops()
    monkeypatch.undo()
    return counts, result


def has_experts(all_ops):
    return any(isinstance(op, ops.MoE) for op in all_ops)

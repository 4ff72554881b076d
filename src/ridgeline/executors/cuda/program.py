"""A model as a list of calls on the device."""

from collections.abc import Callable, Sequence

import torch

from ridgeline.core import ops
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.executors.cuda.attention import ModelAttention
from ridgeline.executors.cuda.inputs import PassInput
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.lowering import Buffers, Call, CallLowering, DeviceAdapter
from ridgeline.executors.cuda.weights import DeviceWeights
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels import reference
from ridgeline.kernels.tensors import torch_dtype


class CallList:
    """The calls of a model, and its LM head, which `logits` runs on chosen rows.

    ``adapters`` are on the device; slot i + 1 runs with ``adapters[i]``.
    """

    def __init__(
        self,
        model: ExecutorModel,
        weights: DeviceWeights,
        kernels: Kernels,
        cache: DeviceKVCache,
        attention: ModelAttention,
        *,
        adapters: Sequence[DeviceAdapter] = (),
    ) -> None:
        self._weights, self._kernels, self._cache = weights, kernels, cache
        *body, head = model.ops
        assert isinstance(head, ops.Head)
        self._head = head
        self._dtype = torch_dtype(model.dtype)
        lowering = CallLowering(weights, kernels, cache, attention, adapters)
        # Each with the places of the ops that it stands for.
        self._calls: tuple[tuple[Call, tuple[int, ...]], ...] = tuple(lowering.calls(body))
        self._attends = lowering.attends

    def close(self) -> None:
        """Let go of the calls, which refer to the program and to its weights."""
        self._calls = ()

    def hidden(self, at: PassInput) -> torch.Tensor:
        """Final hidden states ``[T, D]``, normed: what `logits` takes rows of."""
        buffers: Buffers = {}
        for call, _ in self._calls:
            call(buffers, at)
        return buffers["h"]

    def hidden_recorded(
        self, at: PassInput, note: Callable[[tuple[int, ...]], None]
    ) -> torch.Tensor:
        """The same, calling ``note`` after each call, with the places of its ops."""
        buffers: Buffers = {}
        for call, places in self._calls:
            call(buffers, at)
            note(places)
        return buffers["h"]

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits ``[N, V]`` in the model's type, in at least float32 where they are scaled."""
        head = self._head
        matrix = self._weights.matrices[head.weight.name]
        bias_V = None if head.bias is None else self._weights.tensors[head.bias.name]
        out = self._kernels.linear(hidden_ND, matrix, bias_O=bias_V)
        if head.scale != 1.0:
            out = reference.wide(out) * head.scale
        return out if head.softcap is None else reference.softcap(reference.wide(out), head.softcap)

    def attend_alone(self, at: PassInput) -> None:
        """Attention of each kind by the kernels, of queries that are zero."""
        for num_heads, width, layer, spec in self._attends.values():
            shape = len(at.token_ids_T), num_heads, width
            q_THd = torch.zeros(shape, dtype=self._dtype, device=at.token_ids_T.device)
            self._kernels.attend(q_THd, self._cache.layer(layer), at, spec)


def rope_specs(model_ops: Sequence[ops.Op]) -> tuple[RopeSpec, ...]:
    """The rotary schemes of a model, once each."""
    return tuple(dict.fromkeys(op.spec for op in model_ops if isinstance(op, ops.Rope)))

"""The paged KV cache on a device, in the layout of `ridgeline.kernels.triton.kv_cache`.

One block more than the scheduler knows of is at the end of each pool: padding writes there.
"""

import hashlib
from collections.abc import Sequence

import torch

from ridgeline.core.cache_groups import KVGroup, kv_groups
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.protocols import KVLayout
from ridgeline.core.spec import MLASpec, ModelSpec
from ridgeline.executors.cuda.device import Device
from ridgeline.kernels.triton import KVTensors, layer_bytes, layer_tensors

LAYOUT_VERSION = 1
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def kv_dtype(name: str, own: torch.dtype) -> torch.dtype:
    """What K and V are stored in; ``auto`` is the weights' ``own``."""
    return own if name == "auto" else _DTYPES[name]


class DeviceKVCache:
    """KV pool of one model. Blocks are written by passes and copies, owned by the scheduler.

    Args:
        dtype: of K and V as they are stored; int8 and float8 have a scale per token and head.
    """

    def __init__(
        self, device: Device, spec: ModelSpec, dtype: torch.dtype, block_tokens: int
    ) -> None:
        self.groups = kv_groups(spec)
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.num_blocks: tuple[int, ...] = ()
        self._device, self._spec = device, spec
        self._pools: list[torch.Tensor] = []  # uint8 [N + 1, layers, bytes of a layer's block]
        self._layers: dict[int, KVTensors] = {}

    @property
    def layout(self) -> KVLayout:
        identity = f"cuda/{LAYOUT_VERSION}/{self.dtype}/{self.block_tokens}/{self.groups}"
        return KVLayout(
            block_tokens=self.block_tokens,
            groups=self.groups,
            block_bytes=tuple(len(g.layers) * self._layer_bytes(g) for g in self.groups),
            digest=hashlib.sha256(identity.encode()).hexdigest(),
        )

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Create the pools.

        Raises:
            OutOfMemoryError: they do not fit; says what they need and what is free.
        """
        memory = self._device.memory()
        sizes = self.layout.block_bytes
        wanted = sum((n + 1) * size for n, size in zip(num_blocks, sizes, strict=True))
        try:
            if wanted > memory.free:
                raise torch.OutOfMemoryError
            for group, count in zip(self.groups, num_blocks, strict=True):
                shape = (count + 1, len(group.layers), self._layer_bytes(group))
                pool = torch.zeros(shape, dtype=torch.uint8, device=self._device.torch_device)
                self._pools.append(pool)
                for index, layer in enumerate(group.layers):
                    self._layers[layer] = self._tensors(group, layer, pool[:, index])
        except torch.OutOfMemoryError:
            self.free()
            raise OutOfMemoryError(
                f"The KV pool takes {wanted / 1e9:.2f} GB, and {self._device.name} has "
                f"{memory.free / 1e9:.2f} of {memory.total / 1e9:.2f} GB free; lower "
                "kv_cache_memory_bytes, max_model_len or gpu_memory_utilization."
            ) from None
        self.num_blocks = tuple(num_blocks)

    def fill_random(self) -> None:
        """Let the pools hold what K and V might be, for measuring."""
        for kv in self._layers.values():
            for codes, scales in ((kv.k, kv.k_scales), (kv.v, kv.v_scales)):
                if scales is None:
                    codes.normal_()
                else:
                    codes.copy_(torch.randn(codes.shape, device=codes.device))
                    scales.fill_(1.0)

    def free(self) -> None:
        """Give the pools back; `allocate` may be called again."""
        self._pools.clear()
        self._layers.clear()
        self.num_blocks = ()

    def layer(self, layer: int) -> KVTensors:
        """K and V of a layer, ``[N + 1, K, B, width]``."""
        return self._layers[layer]

    def copy_block(self, group: int, source: int, target: int) -> None:
        pool = self._pools[group]
        pool[target].copy_(pool[source])

    def export_blocks(self, group: int, blocks: Sequence[int]) -> bytes:
        picked = self._pools[group].index_select(0, self._index(blocks))
        return picked.cpu().numpy().tobytes()

    def import_blocks(self, group: int, blocks: Sequence[int], data: bytes) -> None:
        pool = self._pools[group]
        if len(data) != pool[0].nbytes * len(blocks):
            raise ValueError(f"{len(data)} bytes are not {len(blocks)} blocks of group {group}")
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        values = values.view(len(blocks), *pool.shape[1:])
        pool.index_copy_(0, self._index(blocks), values.to(pool.device))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), device=self._device.torch_device)

    def _layer_bytes(self, group: KVGroup) -> int:
        return layer_bytes(
            self.dtype,
            num_kv_heads=group.num_kv_heads,
            block_tokens=self.block_tokens,
            k_width=group.k_width,
            v_width=group.v_width,
        )

    def _tensors(self, group: KVGroup, layer: int, pool: torch.Tensor) -> KVTensors:
        attention = self._spec.layers[layer].attention
        return layer_tensors(
            pool,
            self.dtype,
            num_kv_heads=group.num_kv_heads,
            block_tokens=self.block_tokens,
            k_width=group.k_width,
            v_width=group.v_width,
            latent_dim=attention.latent_dim if isinstance(attention, MLASpec) else None,
        )

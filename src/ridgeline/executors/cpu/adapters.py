"""LoRA adapters as low-rank changes to native products."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.arrays import cast
from ridgeline.kernels.cpu.matrix import MatrixFormat, pack
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlAdapter, RlAdapterPart, RlFormat
from ridgeline.weights import Adapter

_FLOAT32 = MatrixFormat(format=RlFormat.F32)


class NativeAdapters:
    """``adapters[i]`` is what sequences of adapter slot i + 1 run with.

    ``products`` numbers the products that an adapter may change, by the name of their weight.
    """

    def __init__(
        self, pool: Pool, adapters: Sequence[Adapter], products: Mapping[str, int]
    ) -> None:
        self._kept: list[Any] = []
        self._structs = [self._native(pool, adapter, products) for adapter in adapters]

    def of_batch(self, slots: Sequence[int]) -> Any:
        """What `rl_run` takes for sequences of these adapter slots; ``None`` if none has one."""
        if not any(slots):
            return None
        return (ctypes.c_void_p * len(slots))(
            *(ctypes.addressof(self._structs[slot - 1]) if slot else None for slot in slots)
        )

    def _native(self, pool: Pool, adapter: Adapter, products: Mapping[str, int]) -> RlAdapter:
        parts = []
        for name, weights in adapter.items():
            if name not in products:
                continue  # of an op that has no kernel
            down, up = (
                pack(pool, cast(weight, "float32"), _FLOAT32)
                for weight in (weights.down, weights.up)
            )
            self._kept += [down, up]
            parts.append(RlAdapterPart(slot=products[name], down=down.struct, up=up.struct))
        array = (RlAdapterPart * len(parts))(*parts)
        self._kept.append(array)
        return RlAdapter(num_parts=len(parts), parts=array)

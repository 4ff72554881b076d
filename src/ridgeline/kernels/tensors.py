"""Between numpy, in which weights are read, and torch, in which some executors compute."""

from typing import cast

import torch

from ridgeline.core.arrays import Array, numpy_dtype


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of that name."""
    return cast(torch.dtype, getattr(torch, name))


def as_tensor(values: "Array | torch.Tensor") -> torch.Tensor:
    """A view of an array, or of its copy where it cannot be written to; a tensor as it is."""
    if isinstance(values, torch.Tensor):
        return values
    if not values.flags.writeable:  # torch has no such tensors
        values = values.copy()
    if values.dtype.isbuiltin == 1:
        return torch.from_numpy(values)
    # Small floats, which torch does not know as numpy's: by their bits.
    bits = values.view(f"u{values.dtype.itemsize}")
    return torch.from_numpy(bits).view(torch_dtype(values.dtype.name))


def as_array(values: torch.Tensor) -> Array:
    """The values on the host: a view where they lie there."""
    values = values.detach().cpu()
    kind = str(values.dtype).removeprefix("torch.")
    if kind != "bfloat16" and not kind.startswith("float8"):
        return values.numpy()
    bits = values.view(torch.uint8 if values.itemsize == 1 else torch.int16)
    return bits.numpy().view(numpy_dtype(kind))

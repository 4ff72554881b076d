"""From rounded matrices to the tensors and the config of a file format."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ridgeline.compress.gptq import RoundedMatrix
from ridgeline.compress.grids.base import inverse
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tensors import TensorPlan
from ridgeline.core.arrays import Array
from ridgeline.quant.compressed_tensors_writing import (
    byte_parts,
    packed_parts,
    quantization_config,
)
from ridgeline.quant.gptq_writing import gptq_config, gptq_parts


def quantized_parts(
    recipe: Recipe, matrices: Sequence[RoundedMatrix], bits: int
) -> dict[str, Array]:
    """The tensors, by suffix, of matrices that lie one below the other in one tensor.

    Scales are float16, which holds those that the grids choose without loss.
    """
    codes = torch.cat([each.codes_OI for each in matrices])
    scales = torch.cat([each.steps.scales_OG for each in matrices])
    offsets = [each.steps.offsets_OG for each in matrices if each.steps.offsets_OG is not None]
    zeros = None
    if offsets:
        zeros = (-torch.cat(offsets) * inverse(scales)).round().to(torch.int16)
    if recipe.rounds_activations:
        return byte_parts(codes.numpy(), scales.numpy())
    write = gptq_parts if recipe.format == "gptq" else packed_parts
    return write(
        codes.numpy(),
        scales.half().numpy(),
        None if zeros is None else zeros.numpy(),
        bits,
    )


def quantized_config(
    recipe: Recipe, plan: TensorPlan, bits: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json; ``bits`` of weights that have their own."""
    modules: dict[int, list[str]] = {}
    for tensor in plan.tensors:
        if tensor.matrices and bits:
            modules.setdefault(bits[tensor.matrices[0][0]], []).append(tensor.module)
    if recipe.format == "gptq":
        return gptq_config(
            bits=recipe.bits,
            group_size=recipe.group_size or -1,
            symmetric=recipe.symmetric,
            ignore=plan.ignored_modules,
        )
    return quantization_config(
        form="int-quantized" if recipe.rounds_activations else "pack-quantized",
        targets=modules or {recipe.bits: ["Linear"]},
        group_size=recipe.group_size or None,
        symmetric=recipe.symmetric,
        ignore=plan.ignored_modules,
        dynamic_activations=recipe.rounds_activations,
    )

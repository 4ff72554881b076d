"""Products of tokens and matrices.

`linear` reads the weights once and is for small batches; `matmul` and `scaled_matmul` are the
vendor's libraries, which are the best known for large ones.

Shapes: T tokens, I inputs, O outputs (of a gated pair of matrices, 2 O rows), F = O.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import Activation, ClampedSwiGLU
from ridgeline.kernels.triton.activation import kind_of
from ridgeline.kernels.triton.launch import device_limits, next_power_of_2, num_multiprocessors
from ridgeline.kernels.triton.linear_kernel import linear_kernel
from ridgeline.kernels.triton.packing import DeviceMatrix, Format
from ridgeline.kernels.triton.workspace import Workspace

SMALL_BATCH = 64  # tokens up to which a product is bound by reading weights
LARGE_BLOCK = 128
_MOST_EXPANDED = 256  # tokens up to which weights are expanded within `linear`
MOST_SPLITS = 8
_SHORT_STEP = 64  # columns


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Tile of outputs, columns a step, splits of the columns, and how the compiler lays it out."""

    block_o: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


def linear(
    x_TI: torch.Tensor,
    matrix: DeviceMatrix,
    out_TO: torch.Tensor,
    *,
    workspace: Workspace,
    bias_O: torch.Tensor | None = None,
    residual_TO: torch.Tensor | None = None,
    residual_scale: float = 1.0,
    activation: Activation | ClampedSwiGLU | None = None,
    config: LinearConfig | None = None,
) -> None:
    """out = residual + residual_scale · act(x · Wᵀ + bias), all in one kernel.

    An activation is a gated one: W has the gate's rows and then the other branch's, and ``out``
    half as many columns. ``out`` may be ``residual_TO``. Without ``config`` a guess is taken.

    Raises:
        ValueError: shapes or types do not fit.
    """
    rows = matrix.shape[0]
    gated_pair = activation is not None
    _check(x_TI, matrix, out_TO, rows // 2 if gated_pair else rows)
    num_tokens = len(x_TI)
    plan = plan_of(x_TI, matrix, out_TO.shape[1], workspace, config)
    blocks = (ceil_div(out_TO.shape[1], plan.config.block_o), ceil_div(num_tokens, plan.block_t))
    launch(
        (*blocks, plan.splits),
        (x_TI, matrix, out_TO),
        plan.config,
        block_t=plan.block_t,
        num_tokens=num_tokens,
        columns_each=plan.columns_each,
        bias=bias_O,
        activation=activation,
        gated_pair=gated_pair,
        residual=residual_TO,
        residual_scale=residual_scale,
        workspace=workspace,
    )


class LinearPlan(NamedTuple):
    """What a product's kernel is compiled for, beside what is folded into it."""

    config: LinearConfig
    block_t: int
    splits: int
    columns_each: int


def plan_of(
    x_TI: torch.Tensor,
    matrix: DeviceMatrix,
    num_outputs: int,
    workspace: Workspace,
    config: LinearConfig | None,
) -> LinearPlan:
    """How `linear` runs a product; of x the number of rows, the type and the device count."""
    num_tokens, columns = len(x_TI), matrix.shape[-1]
    chosen = config or guess(matrix, num_tokens, num_outputs, x_TI)
    block_t = _block_tokens(matrix, num_tokens, x_TI)
    reductions = ceil_div(num_outputs, chosen.block_o) * ceil_div(num_tokens, block_t)
    floats_each = 2 * chosen.block_o * block_t
    splits = workspace.most_splits(chosen.splits, reductions=reductions, floats_each=floats_each)
    each = ceil_div(columns, splits * chosen.block_k) * chosen.block_k
    return LinearPlan(chosen, block_t, min(splits, ceil_div(columns, each)), each)


def guess(
    matrix: DeviceMatrix,
    num_tokens: int,
    num_outputs: int,
    x: torch.Tensor,
    *,
    block_t: int | None = None,
) -> LinearConfig:
    """What suits most shapes: tiles of 64 outputs, and splits until every multiprocessor is busy.

    Of a gated pair a tile has the rows of both branches. Blocks of more tokens are bound by
    arithmetic, and their tiles are those of a matrix product. ``block_t`` are the tokens of a
    program, where `linear` does not choose them.
    """
    columns = matrix.shape[-1]
    precise = x.dtype == torch.float32
    block_t = block_t or _block_tokens(matrix, num_tokens, x)
    branches = matrix.shape[-2] // num_outputs
    if num_tokens > SMALL_BATCH and not precise:
        tiles = ceil_div(num_outputs, 128) * ceil_div(num_tokens, LARGE_BLOCK)
        splits = max(1, min(num_multiprocessors(x.device) // tiles, MOST_SPLITS))
        block_k = max(64, matrix.unit or matrix.group)
        # Sums of a gated pair do not leave registers for operands that are held there as well.
        from_shared = device_limits(x.device).multiplies_from_shared
        block_o = 128 if branches == 1 or from_shared else 64
        config = LinearConfig(block_o, block_k, 1 << (splits.bit_length() - 1), 8, 3)
        return _fitted(config, matrix, branches, block_t, x)
    tile = _small_tile(matrix, block_t, precise)
    block_k = max(matrix.unit or matrix.group, min(tile.block_k, next_power_of_2(columns)))
    tiles = ceil_div(num_outputs, 64) * ceil_div(num_tokens, 64)
    each = 2 if matrix.format is Format.PLAIN else 3  # programs of a multiprocessor
    wanted = num_multiprocessors(x.device) * each // tiles
    most = max(1, columns // (4 * block_k))
    splits = max(1, min(wanted, most, MOST_SPLITS))
    config = replace(tile, block_k=block_k, splits=1 << (splits.bit_length() - 1))
    return _fitted(config, matrix, branches, block_t, x)


def _small_tile(matrix: DeviceMatrix, block_t: int, precise: bool) -> LinearConfig:
    """What was fastest on an H100 with the matrices of an 8B model."""
    if precise:
        return LinearConfig(64, 64, 1, 4, 2)
    match matrix.format:
        case Format.PLAIN:
            return LinearConfig(64, 128, 1, 4, 4)
        case Format.INT4:
            return LinearConfig(64, 256 if block_t <= 16 else 128, 1, 4, 3)
        case _ if block_t <= 32:
            return LinearConfig(32, 128, 1, 2, 3)
    return LinearConfig(64, 64, 1, 4, 3)


def _fitted(
    config: LinearConfig, matrix: DeviceMatrix, branches: int, block_t: int, x: torch.Tensor
) -> LinearConfig:
    """The configuration, or what is nearest to it among those whose tiles fit into the device's
    shared memory; where none does, the one with the least."""
    found = config
    for found in _smaller(config, max(64, matrix.unit or matrix.group)):
        if (
            _shared_bytes(found, matrix, branches, block_t, x)
            <= device_limits(x.device).shared_bytes
        ):
            break
    return found


def _smaller(config: LinearConfig, least_k: int) -> Iterator[LinearConfig]:
    """Configurations that need less and less: fewer steps on their way, then fewer columns a step;
    one step on its way is the last resort."""
    columns = [config.block_k]
    while columns[-1] // 2 >= least_k:
        columns.append(columns[-1] // 2)
    for block_k in columns:
        for num_stages in range(config.num_stages, 2, -1):
            yield replace(config, block_k=block_k, num_stages=num_stages)
    for block_k in columns:
        yield replace(config, block_k=block_k, num_stages=2)


def _shared_bytes(
    config: LinearConfig, matrix: DeviceMatrix, branches: int, block_t: int, x: torch.Tensor
) -> int:
    """What the compiler lays out for steps on their way: tiles of weights, of scales and of inputs.
    Operands that tensor cores read in place are kept a step
    longer."""
    row_bytes = matrix.codes.shape[-1] * matrix.codes.element_size()
    weights = branches * config.block_o * row_bytes * config.block_k // matrix.shape[-1]
    scales = 0
    if matrix.scales is not None and matrix.group:
        groups = config.block_k // matrix.group
        scales = branches * config.block_o * groups * matrix.scales.element_size()
    inputs = block_t * config.block_k * x.element_size()
    kept = config.num_stages - 1
    kept_longer = kept + device_limits(x.device).multiplies_from_shared
    kept_weights = kept_longer if matrix.format is Format.PLAIN else kept
    return kept_weights * weights + kept_longer * inputs + kept * scales


def small_batch(matrix: DeviceMatrix, dtype: torch.dtype) -> int:
    """Tokens up to which `linear` is to be used: beyond, a library is faster, for which quantized
    weights have to be expanded and written first."""
    is_expanded = matrix.format is not Format.PLAIN and dtype != torch.float32
    return _MOST_EXPANDED if is_expanded else SMALL_BATCH


def _block_tokens(matrix: DeviceMatrix, num_tokens: int, x: torch.Tensor) -> int:
    """Tokens of a program; more of them share what is expanded."""
    most = LARGE_BLOCK if small_batch(matrix, x.dtype) > SMALL_BATCH else SMALL_BATCH
    return min(most, max(8, next_power_of_2(num_tokens)))


def launch(
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor, DeviceMatrix, torch.Tensor],
    config: LinearConfig,
    *,
    block_t: int,
    num_tokens: int,
    columns_each: int,
    bias: torch.Tensor | None,
    activation: Activation | ClampedSwiGLU | None,
    gated_pair: bool,
    residual: torch.Tensor | None = None,
    residual_scale: float = 1.0,
    workspace: Workspace | None = None,
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    pairs_per_row: int = 1,
    pair_weights: torch.Tensor | None = None,
) -> None:
    """Start `linear_kernel`. ``pairs`` are an `ExpertOrder`'s sorted pairs, experts and count."""
    x, matrix, out = tensors
    unused = x  # stands for pointers that the compiled kernel does not read
    codes, scales, zeros = matrix.codes, matrix.scales, matrix.zeros
    kind, alpha, limit = (-1, 0.0, 0.0) if activation is None else kind_of(activation)
    columns = matrix.shape[-1]
    # Inputs and weights of a step are kept in registers.
    most_columns = _SHORT_STEP if block_t >= SMALL_BATCH else config.block_k
    sorted_pairs, experts, count = pairs or (unused, unused, unused)
    linear_kernel[grid](
        x,
        codes,
        unused if scales is None else scales,
        unused if zeros is None else zeros,
        out,
        unused if bias is None else bias,
        unused if residual is None else residual,
        sorted_pairs,
        unused if pair_weights is None else pair_weights,
        experts,
        count,
        unused if workspace is None else workspace.floats,
        unused if workspace is None else workspace.counters,
        num_tokens,
        out.shape[1],
        columns,
        columns_each,
        x.stride(0),
        codes.stride(-2),
        0 if scales is None else scales.stride(-2),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        out.shape[1] * codes.stride(-2),
        codes.stride(0) if codes.ndim == 3 else 0,
        scales.stride(0) if scales is not None and scales.ndim == 3 else 0,
        bias.stride(0) if bias is not None and bias.ndim == 2 else 0,
        residual_scale,
        alpha,
        limit,
        FORMAT=int(matrix.format),
        GROUP=matrix.group,
        HAS_ZEROS=zeros is not None,
        STEP=min(config.block_k, matrix.unit or matrix.group or most_columns),
        BLOCK_K=config.block_k,
        BLOCK_O=config.block_o,
        BLOCK_T=block_t,
        SPLITS=grid[2],
        EVEN=columns % config.block_k == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=kind,
        GATED=gated_pair,
        GROUPED=pairs is not None,
        PAIRS_PER_ROW=pairs_per_row,
        WEIGHTED=pair_weights is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(
    x_TI: torch.Tensor, matrix: DeviceMatrix, out_TO: torch.Tensor, num_outputs: int
) -> None:
    if len(matrix.shape) != 2 or x_TI.shape[1] != matrix.shape[1]:
        raise ValueError(f"x {list(x_TI.shape)} does not fit a matrix {list(matrix.shape)}")
    if out_TO.shape != (len(x_TI), num_outputs):
        raise ValueError(f"out {list(out_TO.shape)} is not [{len(x_TI)}, {num_outputs}]")
    if matrix.format is Format.PLAIN and matrix.codes.dtype != x_TI.dtype:
        raise ValueError(f"x is {x_TI.dtype} and the matrix {matrix.codes.dtype}")

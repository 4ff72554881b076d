"""Compile the kernels for a compute capability, at the shapes of an 8B model, without a GPU.

Launches go through the package's own functions on CPU tensors, and end where the kernel has been
compiled. Prints one JSON line for each: its name, what it takes of a multiprocessor, how much of
the stack (for registers that did not suffice), how many tensor-core instructions it has, and
whether the compiler has given up on a part of it (a trap in its place). Arguments choose among
`PARTS`; without any all are compiled but those that are part of others.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ridgeline.core import spec
from ridgeline.core.formats import number_format
from ridgeline.kernels import triton as kernels
from ridgeline.kernels.triton import attention, sampling
from ridgeline.kernels.triton.launch import DeviceLimits
from ridgeline.quant import QuantizedTensor

linear = import_module("ridgeline.kernels.triton.linear")  # the package has a function so named
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MULTIPLIES = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
RMS = spec.NormSpec(kind=spec.NormKind.RMS, eps=1e-5)


class Target:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


case = ""  # what is compiled now


def resources(kernel):
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK")}


def compile_only(run):
    def compiled(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx, used = kernel.asm["ptx"], resources(kernel)
        entry = {
            "kernel": self.__name__,
            "case": case,
            "hash": kernel.hash,
            "registers": used["REG"],
            "stack_bytes": used["STACK"],
            "shared_bytes": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "tensor_core": sum(map(ptx.count, MULTIPLIES)),
            "asynchronous_loads": ptx.count("cp.async.c"),
            "trap": "trap;" in ptx,
        }
        print(json.dumps(entry), flush=True)
        return kernel

    return compiled


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def attend(
    form, kv_dtype=BF16, *, dtype=BF16, kv_heads=8, width=128, latent=None, page=16, tokens=1,
    tree=False, sinks=False, first=0, blocks=64, **options,
):  # fmt: skip
    global case
    case = (
        f"{form.__name__} {dtype}, KV {kv_dtype}, width {width}, page {page}, tokens {tokens}, "
        f"tree {tree}, sinks {sinks}, {options}"
    )
    shape = {
        "num_kv_heads": kv_heads, "block_tokens": page, "k_width": width,
        "v_width": 0 if latent else width,
    }  # fmt: skip
    pool = zeros(4, kernels.layer_bytes(kv_dtype, **shape), dtype=torch.uint8)
    kv = kernels.layer_tensors(pool, kv_dtype, latent_dim=latent, **shape)
    heads = 128 if latent else 32
    batch = kernels.AttentionBatch(
        query_starts_S1=zeros(9 + first, dtype=torch.int32)[first:],
        kv_lengths_S=zeros(8 + first, dtype=torch.int32)[first:],
        block_tables_RP=zeros(8, blocks, dtype=torch.int32),
        table_rows_S=zeros(8 + first, dtype=torch.int64)[first:],
        num_query_tokens=8 * tokens,
        tree=kernels.TreeMask(
            num_drafts_S=zeros(8, dtype=torch.int32),
            ancestors_T=zeros(8 * tokens, dtype=torch.int64),
            positions_T=zeros(8 * tokens, dtype=torch.int32),
        )
        if tree
        else None,
    )
    if sinks:
        options["sinks_H"] = zeros(heads, dtype=dtype)
    if form is kernels.attend_decode:
        options |= {"max_query_tokens": tokens, "workspace": kernels.Workspace("cpu")}
    q = zeros(8 * tokens, heads, width, dtype=dtype)
    out = zeros(8 * tokens, heads, latent or width, dtype=dtype)
    form(q, kv, out, batch, scale=0.1, **options)


def multiply(matrix, tokens=1, dtype=BF16, **options):
    global case
    case = f"{matrix.format.name} by {matrix.group}, {tokens} tokens, {dtype}, {[*options]}"
    rows, columns = matrix.shape
    out = zeros(tokens, rows // 2 if "activation" in options else rows, dtype=dtype)
    x = zeros(tokens, columns, dtype=dtype)
    kernels.linear(x, matrix, out, workspace=kernels.Workspace("cpu"), **options)


def rows_and_heads():
    global case
    case = "4 rows of 4096"
    x, scales = zeros(4, 4096), zeros(4, dtype=torch.float32)
    kernels.normalise(x, zeros(4, 4096), RMS, weight=x[0])
    kernels.quantize_rows(x, zeros(4, 4096, dtype=FP8), scales)
    for kind in spec.Activation:
        kernels.activate(x, zeros(4, 4096), kind, gate_TF=x)
    for kv_dtype in (BF16, INT8, FP8):
        shape = {"num_kv_heads": 8, "block_tokens": 16, "k_width": 128, "v_width": 128}
        pool = zeros(4, kernels.layer_bytes(kv_dtype, **shape), dtype=torch.uint8)
        kernels.rope_and_write(
            zeros(4, 32, 128), zeros(4, 8, 128), zeros(4, 8, 128),
            cos=zeros(64, 64, dtype=torch.float32), sin=zeros(64, 64, dtype=torch.float32),
            rows_T=zeros(4, dtype=torch.int32), kv=kernels.layer_tensors(pool, kv_dtype, **shape),
            slots_T=zeros(4, dtype=torch.int64), query_norm=zeros(128), key_norm=zeros(128),
            norm_spec=RMS,
        )  # fmt: skip


def experts(tokens, matrix):
    global case
    case = f"{tokens} tokens, experts in {matrix.format.name}"
    routing = spec.RoutingSpec(
        top_k=8, scoring=spec.Scoring.SIGMOID, normalised=True,
        groups=spec.GroupLimit(num_groups=8, top_groups=4, score=spec.GroupScore.BEST_TWO),
    )  # fmt: skip
    chosen, weights = zeros(tokens, 8, dtype=torch.int32), zeros(tokens, 8, dtype=torch.float32)
    logits = zeros(tokens, 64, dtype=torch.float32)
    kernels.route(logits, chosen, weights, routing, correction_E=logits[0])
    order = kernels.ExpertOrder(8 * tokens, 64, "cpu")
    kernels.sort_by_expert(chosen, order)
    out = zeros(8 * tokens, 128)
    kernels.grouped_linear(
        zeros(tokens, 128), matrix, out, order, pairs_per_row=8, activation=spec.Activation.SILU
    )
    kernels.combine(zeros(tokens, 8, 128), zeros(tokens, 128))


def step():
    global case
    for groups in (1, 2):
        case = f"8 rows, {groups} KV groups"
        inputs, log = zeros(25, dtype=torch.int64), zeros(513, dtype=torch.int64)
        sources, positions, slots = inputs[:24].view(3, 8)
        tables = zeros(groups, 9, 64, dtype=torch.int32)
        rows = kernels.StepRows.empty(8, groups, "cpu")
        kernels.begin_step(sources, positions, slots, log, tables, rows, block_tokens=16)
        kernels.end_step(sources, positions, inputs[24:], rows.slots_T, slots, log, padding=8)


def sampling_rows(count):
    def column(dtype):
        return zeros(count, dtype=dtype)

    return kernels.SamplingRows(
        slots_N=column(torch.int64), position_N=column(torch.int32),
        temperature_R=column(torch.float64), seed_R=column(torch.int64),
        sample_index_R=column(torch.int32), top_k_R=column(torch.int32),
        top_p_R=column(torch.float64), min_p_R=column(torch.float64),
    )  # fmt: skip


def draw():
    """Few rows, whose parts are short, and many."""
    global case
    masks = zeros(256, 4008, dtype=torch.int32)
    for count in (8, 256):
        case = f"{count} rows of logits"
        rows = sampling_rows(count)
        tokens, workspace = rows.position_N, kernels.SampleWorkspace(count, "cpu")
        logits = zeros(count, 128256)
        for truncate in (True, False):
            kernels.sample(logits, rows, tokens, workspace=workspace, truncate=truncate)
        if count == 8:
            options = {"workspace": workspace, "masks_NW": masks[:8]}
            kernels.sample(logits.float(), rows, tokens, truncate=True, **options)
            kernels.sample(logits.float(), rows, tokens, truncate=False, workspace=workspace)


def adjust():
    global case
    tables = kernels.AdjustmentTables.empty(9, 128256, 1024, "cpu")
    slots, stops = zeros(8, dtype=torch.int64), zeros(8, dtype=torch.int32)
    for dtype in (BF16, FP32):
        case = f"8 rows of logits in {dtype}"
        kernels.count_tokens(tables, slots, slots, stops)
        out = zeros(8, 128256, dtype=FP32)
        kernels.adjust_logits(out.to(dtype), out, tables, slots, stops)


def attentions():
    for form in (kernels.attend_decode, kernels.attend_prefill):
        for kv_dtype in (BF16, INT8, FP8):
            attend(form, kv_dtype)
        attend(form, kv_heads=1, width=576, latent=512)
        attend(form, INT8, dtype=FP32)
        attend(form, FP32, dtype=FP32, kv_heads=1, width=576, latent=512)
        for dtype in (FP32, FP16):
            attend(form, dtype, dtype=dtype)
        for width in (64, 256):
            attend(form, width=width)
        attend(form, page=128)
        attend(form, window=1000)
        attend(form, softcap=30.0, sinks=True)
        attend(form, tokens=16)
        attend(form, tokens=16, tree=True)


def matrices(rows, columns):
    weight = torch.ones(rows, columns)
    zero_points = QuantizedTensor(
        format=number_format("int4-g128"),
        codes=np.zeros((rows, columns), dtype=np.uint8),
        scales=np.zeros((rows, columns // 128), dtype=np.float16),
        zeros=np.zeros((rows, columns // 128), dtype=np.uint8),
    )
    return [
        kernels.pack_matrix(weight.to(BF16)),
        kernels.quantize_matrix(weight, 8),
        kernels.quantize_matrix(weight, 4, 32),
        kernels.quantize_matrix(weight, 4, 128),
        kernels.pack_matrix(zero_points),
        kernels.fp8_matrix(weight),
    ]


def products():
    global case
    # As long as the rows of an 8B model, so that sums are split as they are there.
    for matrix in matrices(1024, 4096):
        multiply(matrix)
        for tokens in (16, 32):
            multiply(matrix, tokens, activation=spec.Activation.SILU)
        multiply(matrix, 64, activation=spec.Activation.SILU)
        # With as many rows as gate and up, or a head, sums are not split.
        unsplit = replace(linear.guess(matrix, 1, 14_336, zeros(1, 4096)), splits=1)
        multiply(matrix, activation=spec.Activation.SILU, config=unsplit)
        if matrix.format is not kernels.Format.PLAIN:
            multiply(matrix, 128, activation=spec.Activation.SILU)
            multiply(matrix, dtype=FP16)
            case = f"{matrix.format.name} by {matrix.group}"
            kernels.dequantize(matrix, zeros(1024, 4096))
    multiply(kernels.pack_matrix(zeros(1024, 4096, dtype=FP32)), dtype=FP32)


def largest_products():
    """Those whose tiles take the most of shared memory, and what they are where it is short."""
    for matrix in matrices(1024, 4096):
        if matrix.format is kernels.Format.FP8 and TARGET.arch < 89:
            continue
        unsplit = replace(linear.guess(matrix, 1, 512, zeros(1, 4096)), splits=1)
        multiply(matrix, activation=spec.Activation.SILU, config=unsplit)
        multiply(matrix, 32, activation=spec.Activation.SILU)
        multiply(matrix, 64, activation=spec.Activation.SILU)
        if matrix.format is not kernels.Format.PLAIN:
            multiply(matrix, 128, activation=spec.Activation.SILU)
    experts(4096, kernels.pack_matrix(zeros(64, 256, 128)))
    precise = kernels.pack_matrix(zeros(1024, 4096, dtype=FP32))
    multiply(precise, 64, dtype=FP32, activation=spec.Activation.SILU)


def mixtures():
    weight = torch.ones(64, 256, 128)
    for matrix in (
        kernels.pack_matrix(weight.to(BF16)),
        kernels.quantize_matrix(weight, 8),
        kernels.quantize_matrix(weight, 4, 128),
        kernels.fp8_matrix(weight),
    ):
        experts(16, matrix)
        experts(4096, matrix)


def batches():
    """Batches that one kernel each has to serve, whatever their size and where they begin."""
    global case
    weight = kernels.pack_matrix(zeros(1024, 4096))
    for tokens in (1, 2, 7, 8):
        multiply(weight, tokens)
    for form in (kernels.attend_decode, kernels.attend_prefill):
        for first, blocks, tokens in ((0, 64, 4), (1, 61, 3), (2, 1, 4)):
            attend(form, first=first, blocks=blocks, tokens=tokens)


PARTS = {
    "batches": batches,
    "attention": attentions, "products": products, "experts": mixtures, "rows": rows_and_heads,
    "sampling": draw, "adjustment": adjust, "step": step, "largest-products": largest_products,
}  # fmt: skip
CONTAINED = ("largest-products",)
TARGET = Target(90)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--arch", type=int, default=90, help="compute capability, times ten")
    parser.add_argument("--shared-bytes", type=int, default=227 << 10, help="of a program")
    arguments = parser.parse_args()
    TARGET.arch = arguments.arch
    triton.runtime.driver.set_active(TARGET)
    JITFunction.run = compile_only(JITFunction.run)
    for module in (attention, linear, sampling):
        module.num_multiprocessors = lambda _device: 132
    limits = DeviceLimits(
        capability=divmod(arguments.arch, 10), shared_bytes=arguments.shared_bytes
    )
    linear.device_limits = lambda _device: limits
    for name in arguments.parts or (name for name in PARTS if name not in CONTAINED):
        PARTS[name]()


if __name__ == "__main__":
    main()

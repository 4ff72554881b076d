"""Compile the kernels for compute capability 9.0, at the shapes of an 8B model, without a GPU.

Launches go through the package's own functions on CPU tensors, and end where the kernel has been
compiled. Prints one JSON line for each: its name, what it takes of a multiprocessor, and how many
tensor-core instructions it has.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ridgeline.core import spec
from ridgeline.kernels import triton as kernels
from ridgeline.kernels.triton import attention, linear, sampling

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
RMS = spec.NormSpec(kind=spec.NormKind.RMS, eps=1e-5)


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def compile_only(run):
    def compiled(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        entry = {
            "kernel": self.__name__,
            "shared_bytes": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "tensor_core": ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
            "asynchronous_loads": ptx.count("cp.async.c"),
        }
        print(json.dumps(entry), flush=True)
        return kernel

    return compiled


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def attend(form, kv_dtype=BF16, *, kv_heads=8, width=128, latent=None, **options):
    shape = {
        "num_kv_heads": kv_heads, "block_tokens": 16, "k_width": width,
        "v_width": 0 if latent else width,
    }  # fmt: skip
    pool = zeros(4, kernels.layer_bytes(kv_dtype, **shape), dtype=torch.uint8)
    kv = kernels.layer_tensors(pool, kv_dtype, latent_dim=latent, **shape)
    heads = 128 if latent else 32
    batch = kernels.AttentionBatch(
        query_starts_S1=zeros(9, dtype=torch.int32),
        kv_lengths_S=zeros(8, dtype=torch.int32),
        block_tables_SP=zeros(8, 64, dtype=torch.int32),
        num_query_tokens=8,
    )
    if form is kernels.attend_decode:
        options |= {"max_query_tokens": 1, "workspace": kernels.Workspace("cpu")}
    form(zeros(8, heads, width), kv, zeros(8, heads, latent or width), batch, scale=0.1, **options)


def multiply(matrix, tokens=1, **options):
    rows, columns = matrix.shape
    out = zeros(tokens, rows // 2 if "activation" in options else rows)
    kernels.linear(
        zeros(tokens, columns), matrix, out, workspace=kernels.Workspace("cpu"), **options
    )


def rows_and_heads():
    x, scales = zeros(4, 4096), zeros(4, dtype=torch.float32)
    kernels.normalise(x, zeros(4, 4096), RMS, weight=x[0], branch_TD=zeros(4, 4096))
    kernels.quantize_rows(x, zeros(4, 4096, dtype=FP8), scales)
    for kind in spec.Activation:
        kernels.activate(x, zeros(4, 4096), kind, gate_TF=x)
    for kv_dtype in (BF16, torch.int8, FP8):
        shape = {"num_kv_heads": 8, "block_tokens": 16, "k_width": 128, "v_width": 128}
        pool = zeros(4, kernels.layer_bytes(kv_dtype, **shape), dtype=torch.uint8)
        kernels.rope_and_write(
            zeros(4, 32, 128), zeros(4, 8, 128), zeros(4, 8, 128),
            cos=zeros(64, 64, dtype=torch.float32), sin=zeros(64, 64, dtype=torch.float32),
            rows_T=zeros(4, dtype=torch.int32), kv=kernels.layer_tensors(pool, kv_dtype, **shape),
            slots_T=zeros(4, dtype=torch.int64), query_norm=zeros(128), key_norm=zeros(128),
            norm_spec=RMS,
        )  # fmt: skip


def experts(tokens):
    routing = spec.RoutingSpec(
        top_k=8, scoring=spec.Scoring.SIGMOID, normalised=True,
        groups=spec.GroupLimit(num_groups=8, top_groups=4, score=spec.GroupScore.BEST_TWO),
    )  # fmt: skip
    chosen, weights = zeros(tokens, 8, dtype=torch.int32), zeros(tokens, 8, dtype=torch.float32)
    logits = zeros(tokens, 64, dtype=torch.float32)
    kernels.route(logits, chosen, weights, routing, correction_E=logits[0])
    order = kernels.ExpertOrder(8 * tokens, 64, "cpu")
    kernels.sort_by_expert(chosen, order)
    matrix = kernels.quantize_matrix(torch.ones(64, 256, 128), 4, 128)
    out = zeros(8 * tokens, 128)
    kernels.grouped_linear(
        zeros(tokens, 128), matrix, out, order, pairs_per_row=8, activation=spec.Activation.SILU
    )
    kernels.combine(zeros(tokens, 8, 128), zeros(tokens, 128))


def draw():
    def column(dtype):
        return zeros(8, dtype=dtype)

    rows = kernels.SamplingRows(
        temperature_N=column(torch.float64), seed_N=column(torch.int64),
        sample_index_N=column(torch.int32), position_N=column(torch.int32),
        top_k_N=column(torch.int32), top_p_N=column(torch.float64), min_p_N=column(torch.float64),
    )  # fmt: skip
    logits, tokens = zeros(8, 128256, dtype=torch.float32), column(torch.int32)
    masks, workspace = zeros(8, 4008, dtype=torch.int32), kernels.SampleWorkspace(8, "cpu")
    kernels.sample(logits, rows, tokens, workspace=workspace, truncate=True, masks_NW=masks)
    kernels.sample(logits, rows, tokens, workspace=workspace, truncate=False)
    history, ids = zeros(8, 128256, dtype=torch.int32), zeros(8, 4, dtype=torch.int32)
    floats = column(torch.float32)
    penalties = kernels.Penalties(
        slots_N=tokens, history=history, repetition_N=floats, frequency_N=floats, presence_N=floats
    )
    kernels.adjust_logits(
        logits, position_N=rows.position_N, bias=(ids, ids.float()),
        barred=(ids, rows.position_N), penalties=penalties,
    )  # fmt: skip
    kernels.count_tokens(history, tokens, tokens)


def main():
    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_only(JITFunction.run)
    for module in (attention, linear, sampling):
        module.num_multiprocessors = lambda _device: 132
    for form in (kernels.attend_decode, kernels.attend_prefill):
        for kv_dtype in (BF16, torch.int8, FP8):
            attend(form, kv_dtype)
        attend(form, kv_heads=1, width=576, latent=512)
    weight = torch.ones(512, 1024)
    norm = kernels.FoldedNorm(weight_I=zeros(1024), eps=1e-5)
    matrices = [
        kernels.pack_matrix(weight.to(BF16)),
        kernels.quantize_matrix(weight, 8),
        kernels.quantize_matrix(weight, 4, 32),
        kernels.quantize_matrix(weight, 4, 128),
        kernels.fp8_matrix(weight),
    ]
    for matrix in matrices:
        multiply(matrix)
    multiply(matrices[0], norm=norm, activation=spec.Activation.SILU)
    multiply(matrices[3], tokens=64)
    kernels.dequantize(matrices[3], zeros(512, 1024))
    rows_and_heads()
    experts(16)
    experts(4096)
    draw()


if __name__ == "__main__":
    main()

"""Writes the checkpoints in ``tests/data/quantized``, each by the library that owns the scheme.

Run with the Python of an environment that has the library, and the name of the library::

    python tests/quant/make_checkpoints.py compressed-tensors

Each folder gets what the library saved (``config.json``, ``model.safetensors``) and
``expected.safetensors``: token ids, the logits of the library's own dequantized model in float32,
and one dequantized weight. Its metadata says which library of which version wrote it.

The model is a Llama of one layer, random, so small that all folders together take under 1.5 MB.
"""

import json
import math
import shutil
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

HOME = Path(__file__).parents[1] / "data" / "quantized"
SAMPLE = "model.layers.0.self_attn.k_proj.weight"
CONFIG: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def base_model(dtype: torch.dtype, **changes: object) -> LlamaForCausalLM:
    """The model before quantization, with weights large enough that errors would show."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(CONFIG | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
                parameter.normal_(std=scale)
                parameter[:, 0] *= 3  # an outlier channel, as real models have
            else:
                parameter.uniform_(0.5, 1.5)
    folder = Path(tempfile.gettempdir()) / f"base-{str(dtype).removeprefix('torch.')}"
    model.to(dtype).save_pretrained(folder)  # libraries read the config again
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def keep(
    name: str,
    saved: Path,
    weights: dict[str, torch.Tensor],
    library: str,
    model: torch.nn.Module | None = None,
) -> None:
    """Store what was saved, and what the dequantized ``weights`` compute in float32."""
    folder = HOME / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = load_file(saved / "model.safetensors")
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if model is None:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=True)
    token_ids = (torch.arange(24) * 29 + 5) % 64
    logits = model(token_ids[None]).logits[0]
    expected = {"token_ids": token_ids, "logits": logits, SAMPLE: weights[SAMPLE].contiguous()}
    save_file(expected, folder / "expected.safetensors", {"written_by": library})
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size:,} bytes, logits up to {logits.abs().max():.1f}, by {library}")


# compressed-tensors, by llm-compressor


def _args(**fields: object) -> dict[str, object]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | fields


def _group(size: int, **fields: object) -> dict[str, object]:
    return _args(strategy="group", group_size=size, **fields)


_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_SCHEMES: dict[str, tuple[torch.dtype, dict[str, object], dict[str, object] | None]] = {
    "ct-int4-group": (torch.bfloat16, _group(32, num_bits=4), None),
    "ct-int4-group-asym": (torch.float32, _group(32, num_bits=4, symmetric=False), None),
    "ct-int4-channel-asym": (torch.float16, _args(num_bits=4, symmetric=False), None),
    "ct-int3-group": (torch.float32, _group(32, num_bits=3), None),
    "ct-w8a8": (torch.bfloat16, _args(), _TOKEN | {"type": "int"}),
    "ct-fp8-channel": (torch.bfloat16, _args(type="float"), _TOKEN | {"type": "float"}),
    "ct-fp8-tensor": (
        torch.float32,
        _args(type="float", strategy="tensor"),
        _TOKEN | {"type": "float"},
    ),
    "ct-fp8-block": (
        torch.float32,
        _args(type="float", strategy="block", block_structure=[32, 48]),
        None,
    ),
    "ct-nvfp4": (
        torch.bfloat16,
        _args(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        None,
    ),
    "ct-mxfp4": (
        torch.bfloat16,
        _group(32, num_bits=4, type="float", scale_dtype="torch.uint8"),
        None,
    ),
    "ct-mxfp8": (torch.bfloat16, _group(32, type="float", scale_dtype="torch.uint8"), None),
}


def compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    library = f"llmcompressor {version('llmcompressor')}, compressed-tensors "
    library += version("compressed-tensors")
    for name, (dtype, weights, inputs) in _SCHEMES.items():
        model = base_model(dtype)
        scheme: dict[str, object] = {"targets": ["Linear"], "weights": weights}
        if inputs is not None:
            scheme["input_activations"] = inputs
        recipe = QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
        oneshot(model=model, recipe=recipe)
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved, save_compressed=True)
            config = json.loads((Path(saved) / "config.json").read_text())["quantization_config"]
            group = config["config_groups"]["group_0"]
            compressor = BaseCompressor.get_value_from_registry(group["format"])
            parsed = QuantizationScheme(**group)
            plain, modules = {}, {}
            for key, value in load_file(Path(saved) / "model.safetensors").items():
                prefix, _, part = key.rpartition(".")
                modules.setdefault(prefix, {})[part] = value
            for prefix, parts in modules.items():
                if "weight_scale" in parts:
                    parts = compressor.decompress(parts, parsed)
                plain[f"{prefix}.weight"] = parts["weight"].detach()
            keep(name, Path(saved), plain, library)


# bitsandbytes, by transformers


def bitsandbytes() -> None:
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig

    library = f"bitsandbytes {version('bitsandbytes')}, transformers {version('transformers')}"
    base_model(torch.float16)
    base = Path(tempfile.gettempdir()) / "base-float16"
    four: dict[str, object] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    for name, settings in {
        "bnb-nf4": four | {"bnb_4bit_quant_type": "nf4"},
        "bnb-nf4-double": four | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "bnb-fp4": four | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
        "bnb-int8": {"load_in_8bit": True},
    }.items():
        quantization = BitsAndBytesConfig(**settings)
        model = LlamaForCausalLM.from_pretrained(
            base, dtype=torch.float16, quantization_config=quantization, device_map="cpu"
        )
        plain = {}
        for key, parameter in model.named_parameters():
            value = parameter.detach()
            if state := getattr(parameter, "quant_state", None):
                value = functional.dequantize_4bit(value, state)
            elif getattr(parameter, "SCB", None) is not None:
                value = functional.int8_vectorwise_dequant(value, parameter.SCB)
            plain[key] = value
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            keep(name, Path(saved), plain, library)


# BitNet, by transformers


@torch.no_grad()
def bitnet() -> None:
    from transformers.integrations.bitnet import (
        AutoBitLinear,
        BitLinear,
        pack_weights,
        unpack_weights,
    )

    library = f"transformers {version('transformers')}"
    base = base_model(torch.bfloat16)
    for linear_class in ("bitlinear", "autobitlinear"):
        packed, plain = {}, {}
        for key, value in base.state_dict().items():
            packed[key] = plain[key] = value
            if value.ndim != 2 or "embed" in key or "lm_head" in key:
                continue
            scale = value.float().abs().mean().to(torch.bfloat16)  # as WeightQuant
            packed[key] = pack_weights((value / scale).round().clamp(-1, 1))
            held = 1 / scale if linear_class == "bitlinear" else scale
            packed[f"{key}_scale"] = held.reshape(1)
            of_class = BitLinear if linear_class == "bitlinear" else AutoBitLinear
            layer = of_class(*reversed(value.shape), bias=False, dtype=torch.float32)
            layer.weight_scale = packed[f"{key}_scale"].float()
            if linear_class == "bitlinear":
                layer.weight = packed[key]
            else:
                layer.weight.copy_(unpack_weights(packed[key], torch.float32))
            plain[key] = layer(torch.eye(value.shape[1])).T
        settings = {
            "quant_method": "bitnet",
            "linear_class": linear_class,
            "quantization_mode": "offline",
            "modules_to_not_convert": ["lm_head"],
        }
        _save(f"bitnet-{linear_class}", packed, plain, settings, library)


class _Packed:
    """What ``pack_original`` needs of the layer that it fills."""

    def __init__(self, bits: int) -> None:
        self.bits, self.maxq, self.planar = bits, (1 << bits) - 1, False
        self.pack_factor, self.pack_dtype_bits, self.pack_dtype = 32 // bits, 32, torch.int32
        self.pack_np_math_dtype, self.pack_np_dtype = numpy.uint32, numpy.int32

    def register_buffer(self, name: str, value: torch.Tensor) -> None:
        setattr(self, name, value)


# GPTQ: GPTQModel's packing, taken out of a package whose dependencies do not install here


def gptqmodel() -> None:
    spec = find_spec("gptqmodel")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    source = (root / "nn_modules" / "qlinear" / "__init__.py").read_text()
    start = source.index("    def pack_original")
    following = ("\n    def ", "\n    @", "\nclass ", "\ndef ", "\n@")
    stop = min(found for mark in following if (found := source.find(mark, start + 1)) > 0)
    space: dict[str, object] = {
        "t": torch,
        "nn": torch.nn,
        "np": numpy,
        "math": math,
        "transformers": transformers,
        "_ConvNd": torch.nn.modules.conv._ConvNd,
        "THREADPOOLCTL": SimpleNamespace(threadpool_limits=lambda _: nullcontext()),
    }
    exec("if True:\n" + source[start:stop], space)
    library = f"the packing code of gptqmodel {version('gptqmodel')}"
    kinds = [(4, "gptq", True), (8, "gptq", False), (3, "gptq_v2", True), (2, "gptq_v2", False)]
    for bits, form, ordered in kinds:
        size, packed, plain = 32, {}, {}
        for key, value in base_model(torch.float16).state_dict().items():
            packed[key] = plain[key] = value
            if "_proj" not in key:
                continue
            inputs, top = value.shape[1], (1 << bits) - 1
            g_idx = torch.arange(inputs) // size
            if ordered:
                g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
            groups = torch.stack([value.float()[:, g_idx == g] for g in range(inputs // size)], 1)
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scales = ((high - low) / top).half().float()
            zeros = torch.round(-low / scales).clamp(1, top)
            scale, zero = scales[:, g_idx], zeros[:, g_idx]
            codes = torch.round(value.float() / scale + zero).clamp(0, top)
            plain[key] = ((codes - zero) * scale).half()
            linear = torch.nn.Linear(inputs, value.shape[0], bias=False)
            linear.weight.data = plain[key].float()
            layer = _Packed(bits)
            space["pack_original"](layer, linear, scales, zeros, g_idx.int())  # type: ignore[operator]
            if form == "gptq":  # convert_gptq_v2_to_v1_format_module
                layer.qzeros -= {4: 0x11111111, 8: 0x01010101}[bits]
            del packed[key]
            for part in ("qweight", "qzeros", "scales", "g_idx"):
                packed[f"{key.removesuffix('weight')}{part}"] = getattr(layer, part)
        quantization = {
            "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered,
            "sym": False, "checkpoint_format": form,
        }  # fmt: skip
        name = (
            f"gptq-int{bits}{'-v2' if form == 'gptq_v2' else ''}{'-act-order' if ordered else ''}"
        )
        _save(name, packed, plain, quantization, library)


# AWQ: the linear layer of AutoAWQ, whose package no longer runs with today's transformers


def autoawq() -> None:
    spec = find_spec("awq")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    source = (root / "modules" / "linear" / "gemm.py").read_text()
    # The packing alone: what it imports beside torch is for GPUs.
    start = source.index("class WQLinear_GEMM")
    space: dict[str, object] = {"torch": torch, "nn": torch.nn, "get_best_device": lambda: "cpu"}
    exec("from __future__ import annotations\n" + source[start:], space)
    model = base_model(torch.float16)
    size, plain, packed = 32, {}, {}
    for key, value in model.state_dict().items():
        packed[key] = plain[key] = value
        if "_proj" not in key:
            continue
        groups = value.float().unflatten(1, (-1, size))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low).clamp(min=1e-5) / 15).half()
        zeros = (-torch.round(low / scales)).clamp(0, 15)
        linear = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
        codes = torch.round(groups / scales[..., None] + zeros[..., None]).clamp(0, 15)
        plain[key] = ((codes - zeros[..., None]) * scales[..., None]).half().flatten(1)
        linear.weight.data = plain[key].float()
        layer = space["WQLinear_GEMM"].from_linear(  # type: ignore[attr-defined]
            linear, 4, size, scales=scales.T.float().contiguous(), zeros=zeros.T.contiguous()
        )
        del packed[key]
        for part in ("qweight", "qzeros", "scales"):
            packed[f"{key.removesuffix('weight')}{part}"] = getattr(layer, part)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    _save(
        "awq-gemm", packed, plain, quantization, f"the packing code of autoawq {version('autoawq')}"
    )


# FP8 as DeepSeek has it, and gpt-oss's MXFP4, by transformers' own code


def fp8() -> None:
    """Blocks made as ``inference/fp8_cast_bf16.py`` of DeepSeek-V3 undoes them."""
    model, rows, columns = base_model(torch.bfloat16), 48, 32
    packed, plain = {}, {}
    for key, value in model.state_dict().items():
        packed[key] = plain[key] = value
        if "_proj" not in key:
            continue
        padded = torch.nn.functional.pad(
            value.float(), (0, -value.shape[1] % columns, 0, -value.shape[0] % rows)
        )
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = blocks.abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        spread = spread[: value.shape[0], : value.shape[1]]
        packed[key] = (value.float() / spread).to(torch.float8_e4m3fn)
        packed[f"{key}_scale_inv"] = scales
        plain[key] = (packed[key].float() * spread).bfloat16()
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
    }
    _save("fp8-block", packed, plain, quantization, "this script, after DeepSeek-V3's description")


def mxfp4() -> None:
    """gpt-oss: codes and scales at random, expanded by the function of transformers."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
    settings = CONFIG | sizes | {"hidden_size": 64, "intermediate_size": 32}
    torch.manual_seed(3)
    model = GptOssForCausalLM(GptOssConfig(**settings)).eval()
    packed, plain = {}, {}
    for key, value in model.state_dict().items():
        packed[key] = plain[key] = torch.randn(value.shape).bfloat16() * 0.2
        if key.endswith("norm.weight"):
            packed[key] = plain[key] = torch.rand(value.shape).bfloat16() + 0.5
        if key.endswith(("gate_up_proj", "down_proj")):
            del packed[key]
            experts, inputs, outputs = value.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16)).to(torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32)).to(torch.uint8)
            packed[f"{key}_blocks"], packed[f"{key}_scales"] = blocks, scales
            plain[key] = convert_moe_packed_tensors(blocks, scales).reshape(value.shape)
    model.load_state_dict({key: value.float() for key, value in plain.items()})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = model.config.to_dict() | {"dtype": "bfloat16", "quantization_config": quantization}
    library = f"this script; expanded by transformers {version('transformers')}"
    with tempfile.TemporaryDirectory() as saved:
        save_file(packed, Path(saved) / "model.safetensors")
        (Path(saved) / "config.json").write_text(json.dumps(config))
        keep("mxfp4-gpt-oss", Path(saved), plain, library, model)


def _save(
    name: str,
    packed: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    quantization: dict[str, object],
    library: str,
) -> None:
    dtype = str(plain["model.norm.weight"].dtype).removeprefix("torch.")
    config = {"model_type": "llama", "dtype": dtype, "quantization_config": quantization}
    with tempfile.TemporaryDirectory() as saved:
        save_file(packed, Path(saved) / "model.safetensors")
        (Path(saved) / "config.json").write_text(json.dumps(CONFIG | config))
        keep(name, Path(saved), plain, library)


if __name__ == "__main__":
    makers = {
        "autoawq": autoawq,
        "bitnet": bitnet,
        "bitsandbytes": bitsandbytes,
        "compressed-tensors": compressed_tensors,
        "fp8": fp8,
        "gptqmodel": gptqmodel,
        "mxfp4": mxfp4,
    }
    makers[sys.argv[1]]()

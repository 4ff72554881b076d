"""The formats of a checkpoint's weights by its config alone, for prices of what is not here."""

from dataclasses import replace

from ridgeline.core import ops
from ridgeline.core.formats import NumberFormat, float_format, number_format
from ridgeline.core.op_facts import OpKind, Role, Rows
from ridgeline.core.weight_uses import weight_uses
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import ModelDefinition
from ridgeline.models.lower import lower
from ridgeline.quant.awq import AWQ
from ridgeline.quant.bitnet import TERNARY, BitNet
from ridgeline.quant.bitsandbytes import BitsAndBytes
from ridgeline.quant.compressed_tensors import CompressedTensors
from ridgeline.quant.compressed_tensors_config import WeightArgs
from ridgeline.quant.fp8 import FP8Weights
from ridgeline.quant.gptq import GPTQ
from ridgeline.quant.mxfp4 import MXFP4, MXFP4_FORMAT
from ridgeline.quant.registry import read_scheme
from ridgeline.quant.scheme import Scheme

_SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")


def declared_formats(definition: ModelDefinition) -> dict[str, NumberFormat]:
    """The format of each weight that the checkpoint stores quantized, by canonical name.

    Raises:
        UnsupportedModelError, CorruptFileError: as `read_scheme`.
    """
    if definition.quantization is None:
        return {}
    config = ConfigReader(definition.quantization, prefix="quantization_config.")
    scheme = read_scheme(definition.quantization)
    skipped = [part for name in _SKIPPED for part in config.texts(name) or ()]
    sources, found = definition.sources, dict[str, NumberFormat]()
    own, is_tied = float_format(definition.dtype), definition.spec.tie_embeddings
    for op in lower(definition.spec):
        for weight, role, *_ in weight_uses(op):
            if role is not Role.PRODUCT and (role is not Role.HEAD or is_tied):
                continue  # routers are left alone, and the expansion of latents is expanded
            source = sources[weight.name].of_expert(0).name
            module = source.removesuffix(".weight")
            if any(f".{part}." in f".{module}." for part in skipped):
                continue
            form = _format(scheme, config, module, op, own)
            if form is not None:
                found[weight.name] = form
    return found


def _format(
    scheme: Scheme, config: ConfigReader, module: str, op: ops.Op, own: NumberFormat
) -> NumberFormat | None:
    """Of one module; the head is left alone, unless the config says otherwise."""
    is_head = op.facts.rows is Rows.LOGITS
    match scheme:
        case CompressedTensors():
            group = None if scheme.groups.ignores(module) else scheme.groups.find(module)
            return None if group is None else _compressed(group.weights, own)
        case GPTQ():
            with_head = config.boolean("lm_head", default=False)
            return scheme.format if with_head or not is_head else None
        case MXFP4():
            return MXFP4_FORMAT if op.facts.kind is OpKind.EXPERTS else None
        case _ if is_head:
            return None
        case AWQ():
            return scheme.format
        case BitNet():
            return TERNARY
        case FP8Weights():
            rows, columns = scheme.block or (1, None)
            return replace(number_format("fp8"), is_float=True, group_size=columns, group_rows=rows)
        case BitsAndBytes():
            return _bitsandbytes(config)
    return None


def _bitsandbytes(config: ConfigReader) -> NumberFormat:
    if not config.boolean("load_in_4bit", default=False):
        return replace(number_format("int8"), scale_bits=32)
    is_double = config.boolean("bnb_4bit_use_double_quant", default=False)
    return replace(
        number_format("nf4"), scale_bits=8 + 32 / 256 if is_double else 32, is_float=True
    )


def _compressed(args: WeightArgs, own: NumberFormat) -> NumberFormat:
    """Scales of integers are in the model's type."""
    rows, columns = args.block or (None if args.strategy == "tensor" else 1, args.group_size)
    if args.is_float and args.bits == 4:
        return replace(MXFP4_FORMAT, group_size=columns or MXFP4_FORMAT.group_size)
    if args.is_float:
        scale_bits = 8 if args.format == "mxfp8-quantized" else 32
        return replace(
            number_format("fp8"),
            is_float=True,
            group_size=columns,
            group_rows=rows,
            scale_bits=scale_bits,
        )
    bits = args.bits if args.format == "pack-quantized" else 8
    return NumberFormat(
        name=f"{'' if args.symmetric else 'u'}int{args.bits}",
        bits=bits,
        is_float=False,
        group_size=columns,
        group_rows=rows,
        scale_bits=own.bits,
        zero_bits=0 if args.symmetric else bits,
    )

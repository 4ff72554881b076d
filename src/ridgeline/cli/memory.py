"""``ridgeline memory``: what weights, KV and activations take, on no machine in particular."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ridgeline.cli.options import Parser
from ridgeline.cli.priced_model import add_model_options, check_model, shape_of
from ridgeline.core.cache_groups import KVGroup
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import AttentionSpec
from ridgeline.executors.registry import executor_traits
from ridgeline.roofline.memory import (
    activation_bytes,
    parameter_bytes,
    weights_bytes,
)
from ridgeline.roofline.model import PricedModel

_MOST = 10**9


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a sequence; default 2048"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="sequences at once; default 1")
    parser.add_argument(
        "--kv-shared-by", type=int, metavar="N", help="as if N neighbouring layers shared K and V"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="of a step; default 2048")
    parser.add_argument(
        "--parameters", type=float, metavar="N", help="weights of so many alone, such as 7e9"
    )
    parser.add_argument("--bits", metavar="B,…", help="of each parameter; default 16,8,4")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Count bytes."""
    for name in ("context", "batch", "tokens", "parameters", "kv_shared_by"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= (1e15 if name == "parameters" else _MOST):
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least 1.")
    if arguments.parameters is not None:
        return _parameters(arguments)
    if arguments.bits is not None:
        raise InvalidRequestError("--bits is of --parameters; a model has --dtype, --quantization.")
    check_model(arguments)
    name, model = shape_of(arguments)
    executor, model = _held(model)
    result = {"model": name, "executor": executor, **_memory(model, arguments)}
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _parameters(arguments: argparse.Namespace) -> int:
    for name in (
        "model", "shape", "config", "context", "batch", "tokens", "dtype", "quantization",
        "kv_cache_dtype", "kv_shared_by",
    ):  # fmt: skip
        if getattr(arguments, name) is not None:
            raise InvalidRequestError("--parameters is of no model: give --bits alone beside it.")
    try:
        bits = [float(text) for text in (arguments.bits or "16,8,4").split(",")]
    except ValueError:
        bits = [0.0]
    if not all(0 < each <= 64 for each in bits):
        raise InvalidRequestError("--bits are widths above 0 and up to 64, as in 16,8,4.5.")
    sizes = {f"{each:g}": parameter_bytes(arguments.parameters, each) for each in bits}
    if arguments.json:
        print(json.dumps({"weights_bytes": sizes}))
        return 0
    for text, size in sizes.items():
        print(f"{text:>6} bits: {_size(size)}")
    return 0


def _held(model: PricedModel) -> tuple[str | None, PricedModel]:
    """A model that is quantized on load, as the first executor that does that holds it: what its
    head and embedding are quantized to is the executor's choice. Any other model as it is stored.
    """
    for name in ("cpu", "cuda") if model.weights is not None else ():
        traits = executor_traits(name)
        if model.weights is not None and model.weights.name in traits.weight_formats:
            return name, traits.priced(model)
    return None, model


def _memory(model: PricedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    context, batch = arguments.context or 2048, arguments.batch or 1
    tokens = max(arguments.tokens or 2048, batch)  # a decode step has one of each sequence
    groups = [
        _group(model, group, context, batch, arguments.kv_shared_by or 1) for group in model.groups
    ]
    weights, kv = weights_bytes(model), sum(group["bytes"] for group in groups)
    states = model.state_bytes * batch
    active = activation_bytes(model, tokens=tokens, rows=batch)
    return {
        "context": context,
        "batch": batch,
        "step_tokens": tokens,
        "weights_format": model.main_format.name,
        "weights_bytes": weights,
        "kv_format": model.kv_format.name,
        "kv_bytes_per_token": sum(group["bytes_per_token"] for group in groups),
        "kv_bytes": kv,
        "kv_groups": groups,
        "state_bytes": states,
        "state_layers": 0 if model.states is None else len(model.states.layers),
        "activation_bytes": active,
        "total_bytes": weights + kv + states + active,
    }


def _group(
    model: PricedModel, group: KVGroup, context: int, batch: int, shared_by: int
) -> dict[str, Any]:
    """``shared_by`` neighbours hold one K and V (Brandon et al. 2024, arXiv 2405.12981)."""
    held = min(context, group.window or context)
    token_bytes = model.kv_token_bytes(group) * ceil_div(len(group.layers), shared_by)
    return {
        "kind": _kind(model, group),
        "layers": len(group.layers),
        "kv_heads": group.num_kv_heads,
        "window": group.window,
        "bytes_per_token": token_bytes,
        "bytes": token_bytes * held * batch,
    }


def _kind(model: PricedModel, group: KVGroup) -> str:
    """What the field calls attention whose heads share K and V so."""
    attention = model.spec.layers[group.layers[0]].attention
    if not isinstance(attention, AttentionSpec):
        return "MLA"
    if attention.num_kv_heads == attention.num_heads:
        return "MHA"
    return "MQA" if attention.num_kv_heads == 1 else "GQA"


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _lines(result: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    executor = result["executor"]
    held = "" if executor is None else f", as the {executor} executor holds them"
    yield "weights", _size(result["weights_bytes"]), f"in {result['weights_format']}{held}"
    of_batch = f"{result['batch']} × {result['context']:,} tokens in {result['kv_format']}"
    yield "KV", _size(result["kv_bytes"]), f"{of_batch}, {_size(result['kv_bytes_per_token'])} each"
    for group in result["kv_groups"]:
        heads = (
            "latent"
            if group["kind"] == "MLA"
            else f"{group['kv_heads']} KV head{'s' if group['kv_heads'] > 1 else ''}"
        )
        window = f", window {group['window']:,}" if group["window"] else ""
        text = f"{group['layers']} layers of {group['kind']}, {heads}{window}"
        yield "", _size(group["bytes"]), text
    if result["state_bytes"]:
        text = f"{result['state_layers']} layers, {result['batch']} × in float32"
        yield "states", _size(result["state_bytes"]), text
    yield (
        "activations",
        _size(result["activation_bytes"]),
        f"a step of {result['step_tokens']:,} tokens, logits of {result['batch']:,}",
    )
    yield "in all", _size(result["total_bytes"]), ""


def _print(result: dict[str, Any]) -> None:
    print(result["model"])
    for label, size, text in _lines(result):
        print(f"  {label:<12} {size:>11}  {text}".rstrip())

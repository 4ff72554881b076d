"""Published figures of smaller models, attention and kernels."""

from ridgeline.bench.figures.figure import Figure, figure
from ridgeline.bench.figures.reading import (
    case_ratio,
    drafts_gain,
    kept_by_windows,
    perplexity_ratio,
    ratio,
    rise_ratio,
    value,
)
from ridgeline.bench.ladder.runs import Drafting

_HALF_B = "bench --shape qwen2.5-0.5b --rounds 3"
_DECODE = f"{_HALF_B} --prompt= --batch 1 --context 128"
_EAGER = (
    "bench --shape qwen2.5-0.5b --rounds 1 --prompt= --batch 1 --context 128 --executor reference"
)
_NEAR = "eval --quantization int4 --against embedded --texts 8"
_PRUNED = "prune -o {scratch}/%s --method %s --num-windows 32"
_EVAL = "eval {scratch}/%s --against embedded --texts 8 --text-tokens 400"


def _pruned(method: str, published: float) -> Figure:
    return figure(
        "Q7",
        f"perplexity with half of the weights zero by {method} ÷ dense",
        published,
        commands=(_PRUNED % (method, method), _EVAL % method),
        ours=perplexity_ratio(1),
        seconds=20,
        note="The embedded model, much smaller than Llama-2-7B (5.12 dense), on code.",
    )


def _step(what: str, published: float, above: str, below: str, *, seconds: float = 20) -> Figure:
    """Of the published ladder: a 7B on a GPU, 25.5, 107, 157.4, 202.1, 244.7 tok/s."""
    return figure(
        "X4",
        what,
        published,
        commands=(above, below),
        ours=case_ratio("decode_tok_s", (0, 0), (1, 0)),
        seconds=seconds,
        note="0.5B shape; published of larger models, the eager pair of another one.",
    )


FIGURES: tuple[Figure, ...] = (
    figure(
        "Q1",
        "decode with weights in 4 bits ÷ in 16",
        2,
        3,
        commands=(f"{_DECODE} --quantization int4", _DECODE),
        ours=case_ratio("decode_tok_s", (0, 0), (1, 0)),
        seconds=20,
        note="0.5B shape.",
    ),
    figure(
        "Q1",
        "decode with weights in 3 bits ÷ in 16",
        3,
        4,
        commands=(f"{_DECODE} --quantization int3", _DECODE),
        ours=case_ratio("decode_tok_s", (0, 0), (1, 0)),
        seconds=20,
        note="0.5B shape.",
    ),
    figure(
        "Q1",
        "perplexity with int4 to the nearest, groups of 128 ÷ without",
        5.73 / 5.474,
        commands=("eval --quantization int4-g128 --against embedded --texts 8",),
        ours=perplexity_ratio(0),
        seconds=4,
        note="The embedded model; published of Llama-2-7B.",
    ),
    figure(
        "Q1",
        "rise in perplexity of GPTQ ÷ to the nearest, 4 bits",
        0.22 / 0.26,
        commands=(
            "quantize -o {scratch}/gptq --num-windows 32",
            "eval {scratch}/gptq --quantization int4 --against embedded --texts 8",
            _NEAR,
        ),
        ours=rise_ratio,
        seconds=40,
        note="The embedded model.",
    ),
    figure(
        "Q2",
        "prefill with weights and activations in 8 bits ÷ in 16",
        1.5,
        2,
        commands=tuple(
            f"{_HALF_B} --prompt 512 --batch={option}" for option in (" --quantization int8", "")
        ),
        ours=case_ratio("prefill_tok_s", (0, 0), (1, 0)),
        seconds=21,
        note="0.5B shape.",
    ),
    figure(
        "Q2",
        "perplexity with both in 8 bits ÷ in 16",
        5.515 / 5.474,
        commands=("eval --quantization int8 --against embedded --texts 8",),
        ours=perplexity_ratio(0),
        seconds=4,
        note="The embedded model, activations quantized step by step, without SmoothQuant.",
    ),
    figure(
        "Q4",
        "decode with weights in 2 bits ÷ in 16",
        2.4,
        6.2,
        commands=(f"{_DECODE} --quantization int2", _DECODE),
        ours=case_ratio("decode_tok_s", (0, 0), (1, 0)),
        seconds=20,
        note="0.5B shape in int2, whose bytes are those of ternary weights.",
    ),
    figure(
        "Q5",
        "training at 3 bits beats quantizing after it",
        1,
        why_not="It takes training; docs/compression.md has it measured.",
    ),
    _pruned("magnitude", 14.89 / 5.12),
    _pruned("sparsegpt", 6.51 / 5.12),
    _pruned("wanda", 6.42 / 5.12),
    figure(
        "Q8",
        "speed of a student of 0.6 of the size ÷ its teacher's",
        1.6,
        why_not="DistilBERT's training took days on GPUs.",
    ),
    figure(
        "A3",
        "KV of 40,960 tokens ÷ with a window of 4,096",
        10,
        commands=("memory mistral-7b --context 40960",),
        ours=kept_by_windows,
    ),
    figure(
        "A3",
        "KV ÷ where three layers share it",
        3,
        commands=(
            "memory llama-2-7b --context 8192",
            "memory llama-2-7b --context 8192 --kv-shared-by 3",
        ),
        ours=ratio(value("kv_bytes"), value("kv_bytes", of=1)),
        note="32 layers are 11 groups.",
    ),
    figure(
        "A3",
        "KV of Character.AI's mix",
        20,
        published="more than 20×",
        why_not="Its shape is not published.",
    ),
    figure(
        "X2",
        "Marlin ÷ 16 bits up to batch 32",
        4,
        why_not="It takes a GPU: 2.15 × at 8B on an H100 (docs/gpu.md).",
    ),
    figure(
        "X3",
        "CUDA graphs ÷ none",
        1.1,
        1.5,
        why_not="It takes a GPU: 6.2 × at 8B on an H100, over kernels one by one (docs/gpu.md).",
    ),
    figure(
        "X4",
        "bytes of weights, float32 ÷ bfloat16",
        2,
        commands=("memory qwen2.5-0.5b --dtype float32", "memory qwen2.5-0.5b --dtype bfloat16"),
        ours=ratio(value("weights_bytes"), value("weights_bytes", of=1)),
    ),
    _step("bfloat16 ÷ float32, eager", 16.70 / 11.47, _EAGER, f"{_EAGER} --dtype float32"),
    _step("own kernels ÷ eager", 107 / 25.5, _DECODE, _EAGER),
    _step("int8 ÷ bfloat16", 157.4 / 107, f"{_DECODE} --quantization int8", _DECODE),
    _step(
        "int4 ÷ int8",
        202.1 / 157.4,
        f"{_DECODE} --quantization int4",
        f"{_DECODE} --quantization int8",
    ),
    _step("int4 ÷ eager", 202.1 / 25.5, f"{_DECODE} --quantization int4", _EAGER),
    figure(
        "X4",
        "speculation ÷ int4",
        244.7 / 202.1,
        ours=drafts_gain(Drafting(speculation="draft", length=3), "continue"),
        seconds=20,
        note="1B and 100M shapes, acceptance as recorded of the embedded pair.",
    ),
)

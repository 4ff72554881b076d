"""Published figures of the KV cache, batching and decoding."""

from ridgeline.bench.figures.figure import Figure, figure
from ridgeline.bench.figures.reading import (
    case_ratio,
    drafts_gain,
    more_sequences,
    p50,
    ratio,
    value,
    waste_percent,
)
from ridgeline.bench.ladder.runs import Drafting

_HALF_B = "bench --shape qwen2.5-0.5b --rounds 3"
_NGRAM = Drafting(speculation="ngram", length=3)
_SERVE = "bench serve --in-process"
_PREFIX = f"{_SERVE} --output-len 4 --num-requests"
_MIXED = (
    f"{_SERVE} --concurrency 96 --max-num-seqs 16 --num-requests 96 "
    "--output-len bimodal:10:400:0.15"
)
_ONLINE = "plan --shape llama-3.1-8b --hardware h100 --prompt 500 --output 200"
_CAPACITY = (
    "plan --shape mistral-7b --hardware a100 --prompt 3000 --output 300 --max-rate --slo tpot=0.03"
)
_TICKETS = f"{_SERVE} --concurrency 64 --num-requests 400 --input-len 200 --output-len 10"
_BATCHES = (f"{_HALF_B} --prompt= --batch 1,64 --context 128",)
_BUSY = f"{_SERVE} --concurrency 32 --num-requests 96 --output-len 64"


FIGURES: tuple[Figure, ...] = (
    figure(
        "K1",
        "a token with a KV cache ÷ without, 1,024 tokens behind it",
        10,
        100,
        commands=(f"{_HALF_B} --prompt= --batch 1 --context 1024 --no-reuse-kv",),
        ours=value("kv_reuse", 0, "ratio"),
        seconds=17,
        note="0.5B shape; it grows with the context.",
    ),
    figure(
        "K2",
        "KV memory without a token, contiguous: the whole context for each",
        60,
        80,
        unit="%",
        ours=waste_percent("whole_context"),
        note="The scheduler alone, lengths with the means of ShareGPT's.",
    ),
    figure("K2", "the same, paged", 0, 4, unit="%", ours=waste_percent("paged")),
    figure(
        "K2",
        "sequences in the same memory, paged ÷ contiguous in powers of two",
        2,
        ours=more_sequences,
    ),
    figure(
        "K3",
        "less TTFT where nearly the whole prompt is cached",
        79,
        unit="%",
        published="−79% (100,000 tokens cached)",
        commands=(
            f"{_PREFIX} 24 --prefix-len 900 --input-len 60",
            f"{_PREFIX} 24 --prefix-len 900 --input-len 60 --no-enable-prefix-caching",
        ),
        ours=lambda reports: 100 * (1 - ratio(p50("ttft_s"), p50("ttft_s", of=1))(reports)),
        seconds=4,
        note="The embedded model, whose context is 1,024: 900 tokens cached of 960.",
    ),
    figure(
        "K3",
        "less TTFT over conversations of ten turns",
        75,
        unit="%",
        commands=(
            f"{_PREFIX} 8 --prefix-len 300 --input-len 40 --turns 10",
            f"{_PREFIX} 8 --prefix-len 300 --input-len 40 --turns 10 --no-enable-prefix-caching",
        ),
        ours=lambda reports: 100 * (1 - ratio(p50("ttft_s"), p50("ttft_s", of=1))(reports)),
        seconds=6,
        note="The embedded model: 340 to 730 tokens of prompt.",
    ),
    figure(
        "K3",
        "less TTFT with 10,000 cached tokens",
        31,
        unit="%",
        why_not="Of 1.6 s only 0.5 were prefill: what the rest was is not published.",
    ),
    figure(
        "K3",
        "less cost with 100,000 and 10,000 cached tokens, and over ten turns",
        53,
        90,
        unit="%",
        published="−90, −86, −53%",
        why_not="These are a vendor's prices of cached tokens, not what a machine takes.",
    ),
    figure(
        "K5",
        "KV memory in 16 bits ÷ in 4",
        4,
        commands=(
            "memory llama-3.1-8b --context 8192",
            "memory llama-3.1-8b --context 8192 --kv-cache-dtype int4",
        ),
        ours=ratio(value("kv_bytes"), value("kv_bytes", of=1)),
        note="With their scales.",
    ),
    figure(
        "K5",
        "decode with KV in 4 bits ÷ in 16",
        2.9,
        commands=tuple(
            f"{_HALF_B} --prompt= --batch 16 --context 4096 --quantization int4{option}"
            for option in ("", " --kv-cache-dtype int4")
        ),
        ours=case_ratio("decode_tok_s", (1, 0), (0, 0)),
        seconds=36,
        note="0.5B shape, 16 sequences of 4,096 tokens.",
    ),
    figure(
        "B1",
        "tokens/s of continuous batching ÷ static",
        2,
        5,
        commands=(_MIXED, f"{_MIXED} --batching static"),
        ours=ratio(
            value("points", 0, "output_tokens_s"), value("points", 0, "output_tokens_s", of=1)
        ),
        seconds=5,
        note="The embedded model; outputs of 10 tokens, 15% of 400, 16 at once.",
    ),
    figure(
        "B1",
        "end-to-end time of a short request, static ÷ continuous",
        1,
        100,
        published="up to 100×: 10 tokens wait for 1,000",
        commands=(_MIXED, f"{_MIXED} --batching static"),
        ours=ratio(p50("end_to_end_s", of=1), p50("end_to_end_s")),
        seconds=5,
        note="The median, of which 85% have 10 tokens and all queue.",
    ),
    figure(
        "B1",
        "over plain transformers",
        24,
        why_not="It takes transformers: 7.8 to 10.9 × in docs/log.md.",
    ),
    figure("B1", "over FasterTransformer (Orca)", 36.9, why_not="It takes A100s and a 175B model."),
    figure(
        "B2",
        "load within the limits, prompts in chunks of 512 tokens ÷ whole",
        2.6,
        commands=tuple(f"{_CAPACITY} --max-num-batched-tokens {tokens}" for tokens in (512, 8192)),
        ours=ratio(value("rate_rps"), value("rate_rps", of=1)),
        seconds=9,
        note="Simulated: 7B on an A100, limit of the mean TPOT; the paper's is of P99 of tokens.",
    ),
    figure(
        "B6",
        "cheaper in batches than within limits of latency",
        50,
        unit="%",
        commands=(f"{_ONLINE} --max-rate --slo ttft=0.3,tpot=0.015", _ONLINE),
        ours=lambda reports: (
            100 * (1 - ratio(value("usd_per_1m_output", of=1), value("usd_per_1m_output"))(reports))
        ),
        seconds=13,
        note="8B on an H100, simulated; the published figure is a price.",
    ),
    figure(
        "B6",
        "10,000 tickets of 200 tokens put into categories",
        1,
        60,
        unit="minutes",
        published="in minutes",
        commands=(_TICKETS,),
        ours=lambda reports: 10000 / value("points", 0, "completed_rate")(reports) / 60,
        seconds=5,
        note="The embedded model, from 400 of them.",
    ),
    figure(
        "B7",
        "tokens/s of batch 64 ÷ batch 1",
        14,
        commands=_BATCHES,
        ours=case_ratio("decode_tok_s", (0, 1), (0, 0)),
        seconds=12,
        note="0.5B shape in bfloat16; published of a GPU, whose ridge is further out.",
    ),
    figure(
        "B7",
        "latency of batch 64 ÷ batch 1",
        4,
        commands=_BATCHES,
        ours=lambda reports: 64 / case_ratio("decode_tok_s", (0, 1), (0, 0))(reports),
        seconds=12,
        note="64 ÷ the ratio of above: 14 and 4 are of different prompts.",
    ),
    figure(
        "D2",
        "a draft model ÷ none",
        1.5,
        2.5,
        published="1.5–2.5× at 50 to 70% acceptance",
        ours=drafts_gain(Drafting(speculation="draft", length=3), "continue"),
        seconds=20,
        note="1B and 100M shapes, recorded acceptance, one round: 1.0 to 1.5 in three runs.",
    ),
    figure(
        "D3",
        "drafts looked up ÷ none, outputs that repeat their inputs",
        2,
        2.8,
        ours=drafts_gain(_NGRAM, "edit"),
        seconds=20,
        note="1B shape in int4, recorded texts: code written again with one name changed.",
    ),
    figure(
        "D3",
        "drafts looked up ÷ none, other outputs",
        1.3,
        1.8,
        ours=drafts_gain(_NGRAM, "continue"),
        seconds=20,
        note="1B shape in int4, recorded texts: code continued.",
    ),
    figure(
        "D4",
        "early exit ÷ none",
        1.5,
        2,
        why_not="It takes a model trained for it; ours has 0.2 to 0.3 × (docs/decoding.md).",
    ),
    figure(
        "D5",
        "Medusa's heads ÷ none",
        1.9,
        published="up to 1.9×",
        why_not="It takes heads of a large model; ours have 0.26 to 0.49 × (docs/decoding.md).",
    ),
    figure(
        "D6",
        "lookahead decoding ÷ none",
        1.13,
        2.3,
        why_not="It takes a real model's texts; the embedded one has 1.5 to 2.0 tokens a pass "
        "with 4 drafts.",
    ),
    figure(
        "D8",
        "speculation at 32 sequences ÷ none",
        1 / 1.8,
        1 / 1.4,
        published="1.4 to 1.8 times slower, not adaptive",
        commands=(f"{_BUSY} --speculation adaptive", _BUSY),
        ours=ratio(
            value("points", 0, "output_tokens_s"), value("points", 0, "output_tokens_s", of=1)
        ),
        seconds=5,
        note="The embedded model with `adaptive`, which is to lose at most 3%.",
    ),
)

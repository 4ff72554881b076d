"""Published figures of measuring and planning."""

from ridgeline.bench.figures.figure import Figure, figure
from ridgeline.bench.figures.reading import on_first_device, prefill_to_decode, ratio, value
from ridgeline.roofline.metrics import goodput, mbu, percentile

_TIMES_MS = (90, 95, 99, 100, 100, 100, 102, 104, 110, 3000)
_COST = ("cost --usd-per-hour 2 --output-tok-s 100 --output 200 --prefill-rpm 100",)
_SIZES = ("memory --parameters 7e9 --bits 16,8,4,4.5,3,1.58",)
_PLACE = "plan --hardware a100-40 --quantization int8 --memory-share 1 --prompt 100 --output 28"
_APART = "plan --shape llama-3.1-8b --hardware h100 --output 200 --disaggregate"


def _size(bits: str, gigabytes: float) -> Figure:
    return figure(
        "M8",
        f"weights of 7B in {bits} bits",
        gigabytes,
        unit="GB",
        commands=_SIZES,
        ours=lambda reports: reports[0]["weights_bytes"][bits] / 1000000000.0,
    )


FIGURES: tuple[Figure, ...] = (
    figure(
        "M3",
        "FLOPs per byte of decode in 16 bits at batch 1",
        1,
        unit="FLOP/byte",
        commands=("roofline --shape llama-2-7b --hardware a100 --batch 1 --context 512",),
        ours=value("points", 0, "intensity"),
    ),
    figure(
        "M4",
        "MBU of 7B in 16 bits at 100 tok/s on 2 TB/s",
        70,
        unit="%",
        ours=lambda _: 100 * mbu(7000000000.0 * 2, 1 / 100, 2000000000000.0),
    ),
    figure(
        "M5",
        "mean of ten latencies of which one is 3,000 ms",
        390,
        unit="ms",
        ours=lambda _: sum(_TIMES_MS) / len(_TIMES_MS),
    ),
    figure(
        "M5",
        "what nine of these ten are at most",
        110,
        unit="ms",
        ours=lambda _: percentile(_TIMES_MS, 8 / 9),
    ),
    figure(
        "M6",
        "goodput of 100 requests in a minute of which 30 meet both limits",
        30,
        unit="a minute",
        ours=lambda _: 60 * goodput([True] * 30 + [False] * 70, 60),
    ),
    figure(
        "M7",
        "1M output tokens at $2 an hour and 100 tok/s",
        5.556,
        unit="$",
        commands=_COST,
        ours=value("usd_per_1m_output"),
    ),
    figure(
        "M7",
        "decode of 1K requests of 200 tokens",
        1.11,
        unit="$",
        commands=_COST,
        ours=value("decode_usd_per_1k_requests"),
    ),
    figure(
        "M7",
        "prefill of 1K requests, 100 in a minute",
        0.33,
        unit="$",
        commands=_COST,
        ours=value("prefill_usd_per_1k_requests"),
    ),
    figure("M7", "both", 1.44, unit="$", commands=_COST, ours=value("usd_per_1k_requests")),
    figure(
        "M8",
        "KV of 13B, batch 32 of 2,048 tokens",
        54,
        unit="GB",
        commands=("memory llama-2-13b --batch 32 --context 2048",),
        ours=lambda reports: reports[0]["kv_bytes"] / 1000000000.0,
    ),
    figure(
        "M8",
        "weights of 70B in 16 bits",
        140,
        unit="GB",
        commands=("memory --parameters 70e9 --bits 16",),
        ours=lambda reports: reports[0]["weights_bytes"]["16"] / 1000000000.0,
    ),
    _size("16", 14),
    _size("8", 7),
    _size("4", 3.5),
    _size("4.5", 4),
    _size("3", 2.6),
    _size("1.58", 1.5),
    figure(
        "M8",
        "KV of 500B+ at batch 512 of 2,048 tokens",
        3,
        unit="TB",
        commands=("memory palm-540b-mha --batch 512 --context 2048",),
        ours=lambda reports: reports[0]["kv_bytes"] / 1000000000000.0,
    ),
    figure(
        "M8",
        "KV of a 70B GQA sequence of 4,096 tokens",
        2.5,
        unit="GB",
        commands=("memory llama-3.1-70b --context 4096",),
        ours=lambda reports: reports[0]["kv_bytes"] / 1000000000.0,
        note="The published table contradicts its own formula.",
    ),
    figure(
        "M9",
        "1M batches of 3.8 ms on a V100 at $2.48 an hour",
        2.62,
        unit="$",
        commands=("cost --hardware v100 --batch-ms 3.8",),
        ours=value("usd_per_1m_batches"),
    ),
    figure(
        "M9",
        "1M batches of 1.7 ms on a TPU v3 at $4.50 an hour",
        2.13,
        unit="$",
        commands=("cost --hardware tpu-v3 --batch-ms 1.7",),
        ours=value("usd_per_1m_batches"),
    ),
    figure(
        "M9",
        "sequences in progress at 42.23 tok/s of 88.8 ms",
        3.75,
        unit="sequences",
        commands=("cost --output-tok-s 42.23 --tpot-ms 88.8",),
        ours=value("sequences_in_progress"),
    ),
    figure(
        "M10",
        "13B models that 40 GB hold",
        3,
        unit="models",
        commands=(_PLACE + " --place llama-2-13b" * 4,),
        ours=on_first_device,
        note="In 8 bits, and with nothing left to the runtime: in 16 a 13B is 26 GB.",
    ),
    figure(
        "M10",
        "models that 40 GB hold of a 34B and a 13B",
        1,
        unit="models",
        commands=(f"{_PLACE} --place codellama-34b --place llama-2-13b",),
        ours=on_first_device,
        note="In 8 bits.",
    ),
    figure(
        "M11",
        "prefill instances for each of decode: long inputs, TTFT first",
        2,
        4,
        commands=(f"{_APART} --prompt 4000 --slo ttft=0.5,tpot=0.05",),
        ours=prefill_to_decode,
        note="8B on H100s; other lengths and limits lie outside.",
    ),
    figure(
        "M11",
        "prefill instances for each of decode: short inputs, TPOT first",
        0.5,
        1,
        commands=(f"{_APART} --prompt 500 --slo ttft=1,tpot=0.015",),
        ours=prefill_to_decode,
        note="8B on H100s; other lengths and limits lie outside.",
    ),
    figure(
        "M12",
        "latency of Llama 70B ÷ 13B on the same machine",
        2,
        commands=tuple(
            f"plan --shape {shape} --hardware a100 -tp 4 --prompt 512 --output 64"
            for shape in ("llama-3.1-70b", "llama-2-13b")
        ),
        ours=ratio(value("tpot_s"), value("tpot_s", of=1)),
        seconds=15,
        note="TPOT of a lone request, predicted on 4 × A100, where bytes bind: 5.3 times as many.",
    ),
    figure("M12", "latency of MPT-30B ÷ MPT-7B", 2.5, why_not="MPT's ALiBi is of no family here."),
)

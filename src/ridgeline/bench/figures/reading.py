"""What reports of our commands say, as functions of them, and what needs no command."""

from collections.abc import Callable
from functools import cache

from ridgeline.bench.figures.figure import Reports
from ridgeline.bench.figures.kv_waste import KVWaste, kv_waste
from ridgeline.bench.ladder.measuring import measure
from ridgeline.bench.ladder.rungs import RUNGS
from ridgeline.bench.ladder.runs import Drafting
from ridgeline.bench.ladder.texts import read_texts

Reading = Callable[[Reports], float]


def value(*keys: str | int, of: int = 0) -> Reading:
    """What lies at these keys of one of the reports."""

    def read(reports: Reports) -> float:
        found = reports[of]
        for key in keys:
            found = found[key]
        return float(found)

    return read


def ratio(above: Reading, below: Reading) -> Reading:
    """Of two readings."""
    return lambda reports: above(reports) / below(reports)


def p50(name: str, *, of: int = 0) -> Reading:
    """The median of a latency of `bench serve`."""
    return value("points", 0, name, "p50", "value", of=of)


def case_ratio(key: str, above: tuple[int, int], below: tuple[int, int]) -> Reading:
    """Of two cases of `bench`, each the number of its report and its own."""
    return ratio(*(value("cases", case, key, of=of) for of, case in (above, below)))


def perplexity_ratio(of: int) -> Reading:
    """Of `eval`: the model's over the reference's."""
    return ratio(value("perplexity", of=of), value("reference_perplexity", of=of))


def rise_ratio(reports: Reports) -> float:
    """Of two reports of `eval`, behind another: the rise in perplexity of the first over that of
    the second."""
    calibrated, nearest = (perplexity_ratio(of)(reports) - 1 for of in (1, 2))
    return calibrated / nearest


def kept_by_windows(reports: Reports) -> float:
    """KV of the whole context over what windows hold of it."""
    found = reports[0]
    return float(found["kv_bytes_per_token"] * found["context"] / found["kv_bytes"])


def on_first_device(reports: Reports) -> float:
    """Models that `plan --place` put there."""
    return float(len(next(iter(reports[0]["devices"].values()))))


def prefill_to_decode(reports: Reports) -> float:
    """The ratio of `plan --disaggregate`."""
    found = reports[0]["ratio"]
    return float(found["prefill"] / found["decode"])


@cache
def _waste() -> KVWaste:
    return kv_waste(block_tokens=16, num_requests=400, seed=0)


def waste_percent(name: str) -> Reading:
    """Of the KV memory taken, what holds no token, with an allocation of `KVWaste`."""
    return lambda _: 100 * float(getattr(_waste(), name))


def more_sequences(_: Reports) -> float:
    """In the same memory, over contiguous allocation in powers of two."""
    return (1 - _waste().paged) / (1 - _waste().power_of_two)


def drafts_gain(drafting: Drafting, workload: str) -> Reading:
    """Speed of the 1B shape in int4 with drafts over that without, on recorded texts."""

    def measured(_: Reports) -> float:
        kept = next(each for each in RUNGS if each.speculates)  # its executor replays the texts
        texts = read_texts(workload, kept.draft_quantization)[:3]
        drafted, plain = (
            measure("1b", kept, each, texts, num_tokens=48, rounds=1).tokens_per_s
            for each in (drafting, Drafting())
        )
        return drafted / plain

    return measured

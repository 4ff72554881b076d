"""Every pair of features gives what each prompt gives alone with neither: bit for bit, as text.

``python -m tests.equivalence.test_combinations`` writes the table of docs/combinations.md.
"""

import random
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import pytest
from tests.equivalence.conftest import _write
from tests.tiny import CONFIG, WINDOWED

from ridgeline import LLM, SamplingParams
from ridgeline.kernels.cpu.library import native_kernels_run

DOCS = Path(__file__).parents[2] / "docs" / "combinations.md"
BLOCK = 16


@dataclass(frozen=True)
class Feature:
    """Settings that turn it on. ``baseline`` ones hold for the run that is compared with, too."""

    text: str
    settings: dict = field(default_factory=dict)
    baseline: dict = field(default_factory=dict)


FEATURES = {
    "prefix cache": Feature("prompts share prefixes, found in the pool"),
    "chunking": Feature("24 tokens a step, decodes beside", {"max_num_batched_tokens": 24}),
    "preemption": Feature("a pool of little more than one sequence"),
    "window": Feature("attention behind a window of 9 tokens", baseline={"window": True}),
    "int8 KV": Feature("K and V stored in 8 bits", baseline={"kv_cache_dtype": "int8"}),
    "int4 KV": Feature("K and V stored in 4 bits, rotated", baseline={"kv_cache_dtype": "int4"}),
    "n > 1": Feature("three samples of each prompt"),
    "abort": Feature("every third request ends after two tokens"),
    "tiers": Feature("evicted KV goes to memory and comes back", {"kv_ram_tier_bytes": 2**24}),
}
RANKS = "context ranks"
FEATURES[RANKS] = Feature("two ranks have a part of each context", {"context_parallel_size": 2})
NO_PAIRS = {("int8 KV", "int4 KV"), ("window", RANKS), ("tiers", RANKS)}  # the last are refused
PAIRS = [pair for pair in combinations(FEATURES, 2) if pair not in NO_PAIRS]
# Ranks take seconds to start.
RUN = [
    pytest.param(pair, marks=pytest.mark.slow) if RANKS in pair and "chunking" not in pair else pair
    for pair in PAIRS
]
WIDE = {"head_dim": 32}  # of which int4 is
SETTINGS = {
    "executor": "cpu", "dtype": "float32", "block_tokens": BLOCK, "max_model_len": 128,
    "max_num_seqs": 6, "enable_prefix_caching": False,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")


def prompts():
    rng = random.Random(0)
    common = [rng.randrange(290) for _ in range(40)]
    return [
        common[: rng.choice([0, 20, 40])] + [rng.randrange(290) for _ in range(rng.randint(5, 30))]
        for _ in range(9)
    ]


def params(number, *, samples):
    return SamplingParams(n=samples, temperature=0.8, seed=number, max_tokens=25 + 5 * (number % 4))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("combinations")
    _write(folder / "plain", CONFIG | WIDE)
    _write(folder / "window", WINDOWED | WIDE)
    return {False: str(folder / "plain"), True: str(folder / "window")}


@pytest.fixture(scope="module")
def baselines(folders):
    """Outputs of every prompt and sample, each alone, with none of the features; made once."""
    made = {}

    def baseline(*, window=False, kv_cache_dtype="auto"):
        key = (window, kv_cache_dtype)
        if key not in made:
            with LLM(folders[window], **SETTINGS, kv_cache_dtype=kv_cache_dtype) as llm:
                made[key] = [
                    [o.token_ids for o in llm.generate([each], params(n, samples=3))[0].outputs]
                    for n, each in enumerate(prompts())
                ]
                made[key, "block"] = llm.config.kv_cache_bytes // llm.config.num_blocks[0]
        return made[key], made[key, "block"]

    return baseline


@pytest.mark.parametrize("pair", RUN, ids=" × ".join)
def test_pair(pair, folders, baselines):
    on = {name: FEATURES[name] for name in pair}
    shared = {key: value for feature in on.values() for key, value in feature.baseline.items()}
    expected, block_bytes = baselines(**shared)
    settings = dict(SETTINGS)
    for feature in on.values():
        settings |= feature.settings
    settings["kv_cache_dtype"] = shared.get("kv_cache_dtype", "auto")
    settings["enable_prefix_caching"] = "prefix cache" in on or "tiers" in on
    if "preemption" in on or "tiers" in on:  # without a small pool nothing leaves it
        num_ranks = settings.get("context_parallel_size", 1)
        settings["kv_cache_memory_bytes"] = (num_ranks * 128 // BLOCK + 3) * block_bytes
    samples = 3 if "n > 1" in on else 1
    with LLM(folders["window" in on], **settings) as llm:
        for _ in range(2 if settings["enable_prefix_caching"] else 1):
            check_outputs(llm, expected, samples=samples, aborts="abort" in on)
        scheduler = llm._engine.scheduler
        llm._loop.check_integrity()
        if "preemption" in on and "window" not in on:
            assert scheduler.num_preemptions > 0
        if "prefix cache" in on:
            assert scheduler.prefix_cache.stats.hit_tokens > 0
        if "tiers" in on and "window" not in on:
            assert scheduler.transfers.stats.loaded_blocks > 0


def check_outputs(llm, expected, *, samples, aborts):
    streams = [llm.stream(each, params(n, samples=samples)) for n, each in enumerate(prompts())]
    for number, stream in enumerate(streams):
        is_aborted = aborts and number % 3 == 0
        if is_aborted:
            next(stream)
            next(stream)
            stream.close()
        else:
            for _ in stream:
                pass
        for sample, output in enumerate(stream.output().outputs):
            whole = expected[number][sample]
            want = whole[: len(output.token_ids)] if is_aborted else whole
            assert output.token_ids == want, f"prompt {number}, sample {sample}"


def table() -> str:
    """docs/combinations.md, from the features above."""
    names = list(FEATURES)
    lines = [
        "# What composes with what",
        "",
        "Each pair below is run by `tests/equivalence/test_combinations.py` on the `cpu` executor,",
        "bit for bit against each prompt run alone without either; this table is made from it.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for row in names:
        tested = {each for pair in PAIRS for each in (pair, pair[::-1])}
        cells = ["tested" if (row, column) in tested else "" for column in names]
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines += ["", *(f"* {name}: {feature.text}." for name, feature in FEATURES.items()), ""]
    return "\n".join(lines)


def test_the_table_in_the_docs_is_of_these_tests():
    assert DOCS.read_text(encoding="utf-8") == table()


if __name__ == "__main__":
    DOCS.write_text(table(), encoding="utf-8")

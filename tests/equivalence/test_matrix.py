"""Each drafter with each feature: equal outputs, or refused with a sentence.

``python -m tests.equivalence.test_matrix`` runs the matrix and writes it into docs/decoding.md;
``… cpu`` the half of that executor.
"""

import itertools
import sys
import tempfile
from pathlib import Path

import pytest
from tests.equivalence.conftest import (
    DRAFTERS,
    DRAFTERS_WITH_HEADS,
    DRAFTERS_WITH_PREDICTION,
    EXECUTOR_NAMES,
    PREDICTION,
    draft_on_tiny_models,
    opener,
    write_pairs,
)
from tests.equivalence.test_speculation import accepted, essence

from ridgeline import SamplingParams
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.parts import part_names

DOCS = Path(__file__).parents[2] / "docs" / "decoding.md"
WRITTEN = EXECUTOR_NAMES[:2]  # what is so on the CUDA executor is not in the page
TEXT = "the cat sat on the mat the cat sat on the "
PROMPTS = [TEXT * 2, TEXT + "mat", "a"]
BOTH = ({"temperature": 0.0, "max_tokens": 24}, {"temperature": 0.4, "seed": 3, "max_tokens": 24})
# feature: engine settings, sampling settings, adapter
FEATURES = {
    "grammar": ({}, {"structured_outputs": {"regex": "[a-z ]{8,40}"}}, None),
    "prefix cache": ({"enable_prefix_caching": True}, {}, None),
    "preemption": ({"pool_tokens": 128, "max_model_len": 112}, {}, None),
    "n > 1": ({}, {"n": 3}, None),
    "int8 KV": ({"kv_cache_dtype": "int8"}, {}, None),
    "window": ({"pair": "windowed"}, {}, None),
    "MLA": ({"pair": "latent"}, {}, None),
    "chunked": ({"max_num_batched_tokens": 17}, {}, None),
    "penalties": ({}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3}, None),
    "logprobs": ({}, {"logprobs": 2}, None),
    "LoRA": ({}, {}, "other"),
}


def drafted(outputs):
    return sum(sum(sample.num_drafted) for output in outputs for sample in output.outputs)


def predict(llm, outputs):
    """From now on requests are told what those of the same place said, but for one token."""
    build, said = llm._engine.requests.build, itertools.cycle(outputs)

    def told(*args, **settings):
        expected = list(next(said).outputs[0].token_ids)
        expected[len(expected) // 2] ^= 1
        return build(*args, **settings, expected_token_ids=expected)

    llm._engine.requests.build = told


def outcome(open_llm, pairs, drafter, feature):
    """What the matrix says of a pair: "equal", or the sentence with which it is refused."""
    engine, sampling, adapter = FEATURES[feature]
    if adapter is not None:
        engine = engine | {"adapters": {adapter: str(pairs / "adapter")}}
    prompts = [prompt for _ in BOTH for prompt in PROMPTS]
    params = [SamplingParams(**(each | sampling)) for each in BOTH for _ in PROMPTS]
    outputs, found, num_drafted, num_accepted, num_preemptions = [], [], 0, 0, 0
    plain = {key: value for key, value in engine.items() if key != "pool_tokens"}
    try:
        for speculation, settings in (("off", plain), (drafter, engine)):
            with open_llm(speculation, **settings) as llm:
                if speculation != "off" and PREDICTION in drafter:
                    predict(llm, found[0])
                found = []
                for _ in range(2):
                    found.append(llm.generate(prompts, params, adapter=adapter))
                outputs.append([essence(each) for each in found])
                num_drafted = sum(map(drafted, found))
                num_accepted = sum(map(accepted, found))
                num_preemptions = llm._engine.loop._scheduler.num_preemptions
    except (InvalidRequestError, SettingsError) as error:
        return str(error)
    assert outputs[0] == outputs[1]
    assert num_drafted > 0, "nothing was tested"
    if PREDICTION in drafter and not drafter.startswith("adaptive"):  # which goes by the clock
        assert num_accepted > 0
    assert feature != "preemption" or num_preemptions > 0
    return "equal"


def is_quick(executor, row, column):
    one_in = {"cpu": 8, "reference": 32}.get(executor)
    has_time = one_in is not None and ROWS[row] not in DRAFTERS_WITH_HEADS
    return has_time and (3 * row + column) % one_in == 0


ROWS = (*DRAFTERS, *DRAFTERS_WITH_HEADS, *DRAFTERS_WITH_PREDICTION)
WRITTEN_ROWS = tuple(row for row in ROWS if row not in part_names("drafters"))
# Each drafter and each feature is in `make test` at least once on cpu; the rest is slow.
PAIRS = [
    pytest.param(
        executor,
        drafter,
        feature,
        marks=() if is_quick(executor, row, column) else pytest.mark.slow,
    )
    for executor in EXECUTOR_NAMES
    for row, drafter in enumerate(ROWS)
    for column, feature in enumerate(FEATURES)
]


@pytest.mark.parametrize(("executor", "drafter", "feature"), PAIRS, indirect=["executor"])
def test_each_pair(open_llm, pairs, drafter, feature):
    assert outcome(open_llm, pairs, drafter, feature) == "equal"


def table(executor, root):
    """The matrix of one executor in Markdown."""
    open_llm = opener(root, executor)
    lines = [f"| `{executor}` | " + " | ".join(FEATURES) + " |"]
    lines.append("|---" * (1 + len(FEATURES)) + "|")
    for drafter in WRITTEN_ROWS:
        cells = [outcome(open_llm, root, drafter, feature) for feature in FEATURES]
        marks = ["equal" if cell == "equal" else "refused" for cell in cells]
        lines.append(f"| {drafter} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def section():
    """What docs/decoding.md has before the matrix, in it, by executor, and after it."""
    before, begin, rest = DOCS.read_text(encoding="utf-8").partition("<!-- matrix -->\n")
    tables, end, after = rest.partition("\n<!-- end of matrix -->")
    known = dict(zip(WRITTEN, tables.split("\n\n"), strict=True))
    return before + begin, known, end + after


def test_the_table_in_the_docs_is_of_these_pairs():
    _, tables, _ = section()
    for executor, text in tables.items():
        head, _, *rows = (line.strip("| ").split(" | ") for line in text.splitlines())
        assert head == [f"`{executor}`", *FEATURES]
        assert [row[0] for row in rows] == list(WRITTEN_ROWS)
        assert {cell for row in rows for cell in row[1:]} == {"equal"}


def main() -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        draft_on_tiny_models(patch)
        root = Path(name)
        write_pairs(root)
        made = {each: table(each, root) for each in sys.argv[1:] or WRITTEN}
    before, tables, after = section()
    whole = "\n\n".join((tables | made)[each] for each in WRITTEN)
    DOCS.write_text(before + whole + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

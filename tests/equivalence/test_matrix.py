"""Each drafter with each feature: equal outputs, or refused with a sentence.

``python -m tests.equivalence.test_matrix`` runs the matrix and writes it into docs/decoding.md.
"""

import sys
import tempfile
from pathlib import Path

import pytest
from tests.equivalence.conftest import (
    DRAFTERS,
    DRAFTERS_WITH_HEADS,
    EXECUTOR_NAMES,
    draft_on_tiny_models,
    opener,
    write_pairs,
)
from tests.equivalence.test_speculation import essence

from ridgeline import SamplingParams
from ridgeline.core.errors import InvalidRequestError, SettingsError

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


def outcome(open_llm, pairs, drafter, feature):
    """What the matrix says of a pair: "equal", or the sentence with which it is refused."""
    engine, sampling, adapter = FEATURES[feature]
    if adapter is not None:
        engine = engine | {"adapters": {adapter: str(pairs / "adapter")}}
    prompts = [prompt for _ in BOTH for prompt in PROMPTS]
    params = [SamplingParams(**(each | sampling)) for each in BOTH for _ in PROMPTS]
    outputs, num_drafted, num_preemptions = [], 0, 0
    plain = {key: value for key, value in engine.items() if key != "pool_tokens"}
    try:
        for speculation, settings in (("off", plain), (drafter, engine)):
            with open_llm(speculation, **settings) as llm:
                found = []
                for _ in range(2):
                    found.append(llm.generate(prompts, params, adapter=adapter))
                outputs.append([essence(each) for each in found])
                num_drafted = sum(map(drafted, found))
                num_preemptions = llm._engine.loop._scheduler.num_preemptions
    except (InvalidRequestError, SettingsError) as error:
        return str(error)
    assert outputs[0] == outputs[1]
    assert num_drafted > 0, "nothing was tested"
    assert feature != "preemption" or num_preemptions > 0
    return "equal"


def is_quick(executor, row, column):
    one_in = {"cpu": 8, "reference": 32}.get(executor)
    return one_in is not None and row < len(DRAFTERS) and (3 * row + column) % one_in == 0


ROWS = (*DRAFTERS, *DRAFTERS_WITH_HEADS)
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
    for drafter in ROWS:
        cells = [outcome(open_llm, root, drafter, feature) for feature in FEATURES]
        marks = ["equal" if cell == "equal" else "refused" for cell in cells]
        lines.append(f"| {drafter} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def main() -> None:
    path = Path("docs/decoding.md")
    before, begin, rest = path.read_text().partition("<!-- matrix -->\n")
    _, end, after = rest.partition("<!-- end of matrix -->")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        draft_on_tiny_models(patch)
        root = Path(name)
        write_pairs(root)
        tables = "\n\n".join(table(each, root) for each in ("reference", "cpu"))
    path.write_text(f"{before}{begin}{tables}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())

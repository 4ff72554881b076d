"""Speculation changes no output: tokens, text, ends and log-probabilities are those without."""

import itertools
import json
from importlib import resources

import pytest
from tests.conftest import VOCAB
from tests.equivalence.conftest import DRAFTERS, EXECUTOR_NAMES, drafting_settings

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import SettingsError
from ridgeline.core.parts import part_names
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Draft
from ridgeline.decoding.drafters import registry
from ridgeline.decoding.drafters.ngram import NgramDrafter
from ridgeline.engine import loading
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.roofline.memory import weights_bytes
from ridgeline.weights import locate_model

TEXT = "the cat sat on the mat "
PROMPTS = ["a", TEXT * 3 + "the", "naïve café"]
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "cold": {"temperature": 0.3, "seed": 8},
    "top-k": {"temperature": 1.5, "top_k": 5, "seed": 9},
    "top-p": {"temperature": 1.2, "top_p": 0.8, "seed": 10},
    "min-p": {"temperature": 1.5, "min_p": 0.1, "seed": 11},
    "penalties": {
        "temperature": 0.5,
        "seed": 12,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "bias": {"temperature": 0.7, "seed": 13, "logit_bias": {260: 4.0, 261: -100.0, 270: 2.5}},
    "minimum": {"temperature": 0.9, "seed": 14, "min_tokens": 9, "logit_bias": {0: 30.0}},
    "stop": {"temperature": 0.0, "stop": ("at", "sa")},
    "logprobs": {"temperature": 0.8, "seed": 15, "logprobs": 2},
    "prompt logprobs": {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    "samples": {"temperature": 1.1, "seed": 16, "n": 3},
}
ENGINES = {
    "plain": {},
    "tight": {"max_model_len": 96, "max_num_batched_tokens": 24, "pool_tokens": 112},
    "chunked": {"max_num_batched_tokens": 9},
    "uncached": {"enable_prefix_caching": False},
    "windowed": {"pair": "windowed"},
}


SLOW = pytest.mark.slow
# The whole matrix is run by `make test-all`.
QUICK = {
    ("ngram", "tight"),
    ("suffix", "chunked"),
    ("exit", "tight"),
    ("eagle3", "tight"),
    ("eagle3 tree", "plain"),
    ("mtp", "tight"),
    ("medusa", "tight"),
    ("draft", "windowed"),
    ("adaptive", "plain"),
}
QUICK_ON = {"cpu": QUICK, "reference": {("eagle3 tree", "plain")}, "cuda": ()}
MATRIX = [
    pytest.param(
        executor,
        drafter,
        engine,
        marks=() if (drafter, engine) in QUICK_ON[executor] else pytest.mark.slow,
    )
    for executor in EXECUTOR_NAMES
    for drafter in DRAFTERS
    for engine in ENGINES
]


def params(name, **changes):
    return SamplingParams(**({"max_tokens": 16} | SETTINGS[name] | changes))


def generate(llm):
    """Every prompt with every kind of settings, all in one batch."""
    cases = [(prompt, params(name)) for name in SETTINGS for prompt in PROMPTS]
    return llm.generate(*map(list, zip(*cases, strict=True)))


def essence(outputs):
    """All that must not change; log-probabilities to the precision that batches leave."""
    return [
        [
            (
                sample.token_ids,
                sample.text,
                sample.finish_reason,
                sample.stop_reason,
                [
                    (entry.token_id, round(entry.logprob, 6), entry.rank, len(entry.top))
                    for entry in sample.logprobs or ()
                ],
            )
            for sample in output.outputs
        ]
        for output in outputs
    ]


def accepted(outputs):
    return sum(sum(sample.num_accepted) for output in outputs for sample in output.outputs)


@pytest.fixture(scope="module")
def expected(open_llm):
    """Outputs without speculation, by pair of models."""
    known = {}

    def get(pair):
        if pair not in known:
            with open_llm("off", pair=pair, enable_prefix_caching=False) as llm:
                known[pair] = essence(generate(llm))
        return known[pair]

    return get


@pytest.mark.parametrize(("executor", "drafter", "engine"), MATRIX, indirect=["executor"])
def test_outputs_are_those_without(open_llm, expected, drafter, engine):
    settings = ENGINES[engine]
    num_accepted = 0
    with open_llm(drafter, num_speculative_tokens=3, **settings) as llm:
        for _ in range(2):  # again, with prefixes cached and outputs remembered
            outputs = generate(llm)
            assert essence(outputs) == expected(settings.get("pair", "full"))
            llm._engine.loop.check_integrity()
            num_accepted += accepted(outputs)
        scheduler = llm._engine.loop._scheduler
        assert (scheduler.num_preemptions > 0) == (engine == "tight")
    is_adaptive = drafter.startswith("adaptive")
    if drafter in part_names("drafters") or (is_adaptive and engine == "chunked"):
        return  # which promise nothing; nine tokens a step leave no room that is worth it
    is_random = drafter.startswith(("eagle3", "mtp", "medusa"))
    # Windows leave little to look up.
    fewest = 0 if is_adaptive else 10 if is_random or engine == "windowed" else 50
    if drafter.startswith("medusa"):  # which guess that a token comes again
        fewest = 1
    assert num_accepted > fewest


class TwoContinuations(NgramDrafter):
    """What followed the last tokens the latest two times, as a tree: the better guess comes last,
    so that what is accepted of it has to be moved in the KV cache."""

    def propose(self, slot, max_tokens):
        best = super().propose(slot, max_tokens - 1).token_ids
        if not best:
            return Draft()
        tokens = self._texts[slot].tokens
        last, ends = tuple(tokens[-2:]), range(len(tokens) - 3, -1, -1)
        others = (tokens[end + 2] for end in ends if tuple(tokens[end : end + 2]) == last)
        other = next((token for token in others if token != best[0]), (best[0] + 1) % VOCAB)
        return Draft(token_ids=(other, *best), parents=(-1, -1, *range(1, len(best))))


@pytest.mark.parametrize(
    "engine",
    [pytest.param(each, marks=() if each in ("plain", "tight") else SLOW) for each in ENGINES],
)
def test_outputs_are_those_without_where_drafts_are_trees(open_llm, expected, engine, monkeypatch):
    monkeypatch.setattr(registry, "NgramDrafter", TwoContinuations)
    settings = ENGINES[engine]
    with open_llm("ngram", num_speculative_tokens=5, **settings) as llm:
        outputs = generate(llm)
        assert essence(outputs) == expected(settings.get("pair", "full"))
        llm._engine.loop.check_integrity()
    # Nine tokens a step leave half the drafts no room, and windows little to look up.
    assert accepted(outputs) > (5 if engine in ("chunked", "windowed") else 30)
    assert any(len(sample.num_accepted) == 4 for output in outputs for sample in output.outputs)


@pytest.mark.parametrize("drafter", ["combined", *(pytest.param(d, marks=SLOW) for d in DRAFTERS)])
def test_adapters(open_llm, pairs, drafter):
    adapters = {"adapters": {"other": str(pairs / "adapter")}}
    names = [None, "other", "other"]
    outputs = {}
    for speculation in ("off", drafter):
        with open_llm(speculation, **adapters) as llm:
            outputs[speculation] = [
                essence(llm.generate(PROMPTS, params(name), adapter=names))
                for name in ("greedy", "sampled")
            ]
    assert outputs[drafter] == outputs["off"]
    with open_llm("off") as llm:
        assert outputs["off"][0] != essence(llm.generate(PROMPTS, params("greedy")))


@pytest.mark.parametrize("drafter", ["combined", *(pytest.param(d, marks=SLOW) for d in DRAFTERS)])
def test_streams_of_several_tokens_a_step(open_llm, expected, drafter):
    with open_llm(drafter) as llm:
        llm.generate(PROMPTS[0], params("greedy"))  # adaptive: to know what steps take without
        chunks = list(llm.stream(PROMPTS[1], params("greedy")))
    tokens = sum((chunk.token_ids for chunk in chunks), ())
    assert tokens == expected("full")[1][0][0]
    if not drafter.startswith(
        ("exit", "eagle3", "mtp", "medusa")
    ):  # random layers seldom agree with all of the model
        assert len(chunks) < len(tokens)


def test_counts_are_per_position(open_llm):
    with open_llm("draft", num_speculative_tokens=3) as llm:
        (output,) = llm.generate(PROMPTS[1], params("greedy"))
    drafted, accepted = output.outputs[0].num_drafted, output.outputs[0].num_accepted
    assert len(drafted) == len(accepted) == 3
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert list(accepted) == sorted(accepted, reverse=True)  # a position counts after those before


def test_figures_are_the_sums_of_all_outputs(open_llm):
    """Of several runs, since the adaptive drafter first looks at steps without drafts."""
    with open_llm("adaptive", num_speculative_tokens=3) as llm:
        runs = [
            llm.generate(PROMPTS, params("greedy")) for _ in range(4)
        ]  # the first without drafts
        figures = llm.speculation()
    outputs = itertools.chain.from_iterable(runs)
    samples = [sample for output in outputs for sample in output.outputs]
    assert figures.num_drafted == sum(sum(sample.num_drafted) for sample in samples) > 0
    assert figures.num_accepted == sum(sum(sample.num_accepted) for sample in samples)
    assert sum(figures.choices.steps_by_length.values()) >= figures.num_drafts / len(PROMPTS)
    with open_llm("off") as llm:
        assert llm.speculation() is None


def test_the_outputs_of_other_tenants_are_not_drafts(open_llm):
    """What one tenant's output said shows in nobody else's drafts, not even in their number."""
    prompt = "a"
    with open_llm("suffix", enable_prefix_caching=False) as llm:
        runs = [
            llm.generate(prompt, params("sampled"), cache_salt=salt)[0].outputs[0]
            for salt in ("a", "a", "b")
        ]
    assert runs[1].num_accepted > runs[0].num_accepted
    assert runs[2].num_drafted == runs[0].num_drafted


def test_a_draft_with_another_vocabulary_is_refused(pairs):
    with pytest.raises(SettingsError, match="another vocabulary"):
        LLM(speculation="draft", draft_model=str(pairs / "full"))
    with pytest.raises(SettingsError, match="needs draft_model"):
        LLM(str(pairs / "full"), speculation="draft")


@pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None)),
        ({"draft_quantization": "int4"}, (None, "int4")),
        ({"quantization": "int8"}, ("int8", "int8")),
        ({"quantization": "int8", "draft_quantization": "none"}, ("int8", None)),
    ],
    ids=str,
)
def test_each_model_has_its_own_weight_format(settings, expected):
    """Read off the weights that the executor holds; outputs are those without a draft model."""
    settings = {"executor": "cpu", "max_model_len": 128} | settings
    target = {name: value for name, value in settings.items() if name != "draft_quantization"}
    with LLM(**target) as off, LLM(speculation="draft", **settings) as on:
        executor = on._engine.executor
        found = []
        for role in (ModelRole.TARGET, ModelRole.DRAFT):
            form = executor.weight_formats(role).get("layers.0.q")
            found.append(form and form.name.removesuffix("-grow"))
        assert tuple(found) == expected
        priced = on._engine.observer.models[ModelRole.DRAFT]
        assert weights_bytes(priced) == pytest.approx(
            executor.weights_bytes(ModelRole.DRAFT), rel=0.05
        )
        wanted = params("sampled", max_tokens=24)
        assert essence(on.generate(PROMPTS, wanted)) == essence(off.generate(PROMPTS, wanted))
        assert on.speculation().num_accepted > 0


def test_a_draft_format_without_a_draft_model_is_refused(pairs):
    settings = {"speculation": "adaptive", "draft_quantization": "int8"}
    with pytest.raises(SettingsError, match="draft_quantization needs draft_model"):
        LLM(str(pairs / "full"), **settings)


def test_the_revision_is_that_of_the_target(pairs, monkeypatch):
    def note(name, *, revision, **options):
        revisions.append(revision)
        return locate_model(name, **options)

    revisions = []
    monkeypatch.setattr(loading, "locate_model", note)
    draft = str(pairs / "full-draft")
    with LLM(str(pairs / "full"), speculation="draft", draft_model=draft, revision="v1"):
        assert revisions == ["v1", None]


@pytest.mark.parametrize("settings", [{"speculation": "guess"}, {"num_speculative_tokens": 0}])
def test_bad_settings_are_refused(pairs, settings):
    with pytest.raises(SettingsError):
        LLM(str(pairs / "full"), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_five_hundred_prompts_of_the_embedded_model(executor, drafter):
    """Texts of the held-out set, in batches of 32, greedy and sampled."""
    lines = (resources.files("ridgeline") / "assets/heldout/heldout.jsonl").read_text().splitlines()
    text = "".join(json.loads(line).get("text", "") for line in lines)
    prompts = [text[start : start + 60] for start in range(0, 500 * 100, 100)]
    settings = {"executor": executor, "max_num_seqs": 32, "max_model_len": 256}
    if executor != "cpu":  # the others round differently by batch
        settings["dtype"] = "float64"
    for settings_name in ("greedy", "top-p"):
        wanted = params(settings_name, max_tokens=12)
        outputs = {}
        for speculation in ("off", drafter):
            with LLM(**drafting_settings(speculation), **settings) as llm:
                outputs[speculation] = essence(llm.generate(prompts, wanted))
        assert outputs[drafter] == outputs["off"]

"""Documents whose KV is taken over: at their own place the bits of a plain run, and the same output
in any company wherever they stand."""

import json
import random

import pytest
from tests.equivalence.conftest import _write, _write_adapter
from tests.tiny import CONFIG, GROWING, LATENT, WINDOWED

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.formats import float_format
from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.plan import Segment
from ridgeline.executors import kv_reuse
from ridgeline.executors.reference import kv_cache as of_reference
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.models import describe, lower
from ridgeline.roofline import PricedModel, batch_of, pass_work

SETTINGS = {
    "dtype": "float32", "block_tokens": 16, "max_model_len": 256, "max_num_seqs": 4,
    "enable_segment_reuse": True,
}  # fmt: skip
HOW = {
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"pool_blocks": 18, "others": True},
    "tiers": {"kv_ram_tier_bytes": 2**24, "pool_blocks": 28},
    "speculation": {"speculation": "ngram"},
    "steps ahead": {"decode_replay_s": 0.5},
}
EXECUTORS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(not native_kernels_run(), reason="no kernels")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments")
    _write(folder / "plain", CONFIG)
    _write_adapter(folder / "adapter")
    return folder


def tokens(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(290) for _ in range(length)]


DOCUMENTS = [tokens(length, length) for length in (40, 51, 33)]


def prompt(order, *, head=(1, 2, 3, 4, 5)):
    """Documents with a token behind each, and a question."""
    found = list(head)
    for number in order:
        found += [*DOCUMENTS[number], 7]
    return [*found, 9, 8, len(order)]


ORDERS = [(0, 1, 2), (2, 0), (1,), (2, 1, 0)]


def params(reuse, *, seed=None, **settings):
    """What is drawn by a seed, or the most likely tokens, with all that is known of them."""
    return SamplingParams(
        temperature=0.0 if seed is None else 0.8,
        seed=seed,
        max_tokens=12,
        logprobs=2,
        segment_reuse=reuse,
        **settings,
    )


def marked(number, reuse, **settings):
    segments = [DOCUMENTS[each] for each in ORDERS[number]]
    return params(reuse, segments=segments, **settings)


def said(result):
    return [(sample.token_ids, sample.logprobs) for sample in result.outputs]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_at_its_own_place_and_where_all_is_computed_every_bit_is_that_of_a_plain_run(
    folder, tmp_path, executor, kv
):
    if kv == "int4":
        _write(tmp_path / "wide", CONFIG | {"head_dim": 32})
        folder = tmp_path
    model = str(folder / ("wide" if kv == "int4" else "plain"))
    first = [*DOCUMENTS[0], 9, 8]
    with LLM(model, executor=executor, kv_cache_dtype=kv, **SETTINGS) as llm:
        (plain,) = llm.generate([first], params("all"))
        for _ in range(2):
            (own,) = llm.generate([first], params(0, segments=DOCUMENTS[:1]))
            assert said(own) == said(plain)
        assert own.num_cached_tokens == 32
        plain = llm.generate([prompt(ORDERS[0])], params("all"))
        whole = llm.generate([prompt(ORDERS[0])], marked(0, "all"))
        longer = llm.generate([prompt(ORDERS[0])], marked(0, 60))
        moved = llm.generate([prompt(ORDERS[0])], marked(0, 0))
    assert said(plain[0]) == said(whole[0]) == said(longer[0]) != said(moved[0])


@pytest.mark.parametrize("how", HOW)
def test_the_same_in_any_company(folder, how):
    executor = "cpu" if native_kernels_run() else "reference"
    model = {"model": str(folder / "plain"), "executor": executor}
    asked = [marked(number, (16, 0, 16, 5)[number], seed=number, n=2) for number in range(4)]
    prompts = [prompt(order) for order in ORDERS]
    with LLM(**model, **SETTINGS) as llm:
        alone = [said(llm.generate([p], a)[0]) for p, a in zip(prompts, asked, strict=True)]
        again = [said(llm.generate([p], a)[0]) for p, a in zip(prompts, asked, strict=True)]
        assert alone == again
        block_bytes = llm.config.kv_cache_bytes // llm.config.num_blocks[0]
    settings = dict(HOW[how])
    others = [tokens(120, 9)] * 2 if settings.pop("others", False) else []
    if blocks := settings.pop("pool_blocks", None):
        settings["kv_cache_memory_bytes"] = blocks * block_bytes
    plain = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(**model, **SETTINGS | settings) as llm:
        for _ in range(2):
            results = llm.generate([*others, *prompts], [plain] * len(others) + asked)
            assert [said(each) for each in results[len(others) :]] == alone
            llm._loop.check_integrity()
        if how == "preempted":
            assert llm._engine.scheduler.num_preemptions > 0


def test_neither_tenants_nor_adapters_share_documents(folder):
    adapters = {"a": str(folder / "adapter")}
    with LLM(str(folder / "plain"), executor="reference", adapters=adapters, **SETTINGS) as llm:
        for who in ({"cache_salt": "x"}, {"cache_salt": "y"}, {"adapter": "a"}):
            cached = [
                llm.generate([prompt((1,), head=head)], marked(2, 0), **who)[0].num_cached_tokens
                for head in ([1, 2], [3], [4, 5, 6])
            ]
            assert cached == [0, 48, 48]


@pytest.mark.skipif(not native_kernels_run(), reason="no kernels")
def test_both_executors_agree(folder):
    found = []
    for executor in ("cpu", "reference"):
        with LLM(str(folder / "plain"), executor=executor, **SETTINGS) as llm:
            results = llm.generate([prompt(ORDERS[0])] * 2, [marked(0, 0), marked(0, 16)])
            found.append([each.outputs[0].token_ids for each in results])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_texts_are_found_by_their_tokens(folder):
    documents = ["the cat sat on the mat " * 4, "a dog ran to the cat " * 4]
    text = f"Read this: {documents[0]}; and this: {documents[1]}; who sat?"
    with LLM(str(folder / "plain"), executor="reference", **SETTINGS) as llm:
        asked = params(0, segments=documents)
        assert llm.generate([text], asked)[0].num_cached_tokens == 0
        text = f"{documents[1]}, {documents[0]}. Who ran?"
        assert llm.generate([text], asked)[0].num_cached_tokens > 32
        with pytest.raises(InvalidRequestError, match=r"segments\[1\] is not in the prompt"):
            llm.generate([text], params(0, segments=[documents[0], documents[0]]))


SCALED = {
    "interleaved": CONFIG | {"model_type": "cohere", "logit_scale": 1.0, "use_qk_norm": False},
    "part of a head": CONFIG
    | {"model_type": "stablelm", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "yarn": {k: v for k, v in GROWING.items() if k != "rope_parameters"}
    | {
        "model_type": "mistral",
        "sliding_window": None,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama3": CONFIG
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", SCALED)
def test_the_check_on_load_passes_for_every_kind_of_rotation(tmp_path, executor, kind):
    _write(tmp_path / "model", SCALED[kind])
    settings = SETTINGS | {"dtype": "float64"} if executor == "reference" else SETTINGS
    with LLM(str(tmp_path / "model"), executor=executor, **settings) as llm:
        assert llm.config.enable_segment_reuse


@pytest.mark.parametrize("wrong", ["distance", "nothing is copied", "nothing is moved"])
def test_the_check_on_load_finds_keys_that_are_turned_wrong(folder, monkeypatch, wrong):
    if wrong == "distance":

        def turned(rope, distance):
            return kv_reuse.turn_tables(rope, distance + 9)

        monkeypatch.setattr(of_reference, "turn_tables", turned)
    else:
        copy = of_reference.ReferenceKVCache.reuse

        def reuse(pool, *arguments):
            *_, kv_reuse, _rope = arguments
            if wrong == "nothing is moved" and kv_reuse.first == 0:
                copy(pool, *arguments)

        monkeypatch.setattr(of_reference.ReferenceKVCache, "reuse", reuse)
    with pytest.raises(SettingsError, match="this model cannot have it"):
        LLM(str(folder / "plain"), executor="reference", **SETTINGS | {"dtype": "float64"})


REFUSED = {
    "windowed layers": WINDOWED,
    "queries that grow with their position": GROWING,
    "latents": LATENT | {"first_k_dense_replace": 3},
    "a norm of keys behind their rotation": CONFIG | {"model_type": "hunyuan_v1_dense"},
    "rotary frequencies that depend on the prompt's length": CONFIG
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "learned positions": {
        "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256,
        "vocab_size": 300,
    },
    "states beside KV": CONFIG
    | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_models_whose_kv_stays_where_it_is_are_refused_by_name(tmp_path, reason):
    (tmp_path / "config.json").write_text(json.dumps(REFUSED[reason]))
    with pytest.raises(SettingsError, match=f"does not work with {reason}"):
        LLM(str(tmp_path), executor="reference", load_format="dummy", **SETTINGS)


@pytest.mark.parametrize("name", ["draft", "exit"])
def test_drafts_of_models_are_refused_by_name(folder, name):
    model = str(folder / "plain")
    draft = {"draft_model": model} if name == "draft" else {}
    with pytest.raises(SettingsError, match=f"does not work with speculation {name}"):
        LLM(model, executor="reference", speculation=name, **draft, **SETTINGS)


def test_what_a_request_asks_in_vain_is_said(folder):
    asked = prompt(ORDERS[2])
    with LLM(str(folder / "plain"), executor="reference", **SETTINGS) as llm:
        for settings, told in (
            ({"kv_compression": {"window": 40}}, "does not work with kv_compression"),
            ({"prompt_logprobs": 1}, "does not work with prompt_logprobs"),
        ):
            with pytest.raises(InvalidRequestError, match=told):
                llm.generate([asked], marked(2, 16, **settings))
        with pytest.raises(InvalidRequestError, match=r"segments\[0\] is not in the prompt"):
            llm.generate([asked], params(16, segments=[[5] * 20]))
    off = SETTINGS | {"enable_segment_reuse": False}
    with LLM(str(folder / "plain"), executor="reference", **off) as llm:
        llm.generate([asked], marked(2, "all"))
        with pytest.raises(InvalidRequestError, match="needs an engine with enable_segment_reuse"):
            llm.generate([asked], marked(2, 16))
    for given, told in (
        ({"segment_reuse": -1}, "segment_reuse"),
        ({"segment_reuse": "some"}, "segment_reuse"),
        ({"segments": "text"}, "segments must be a list"),
        ({"segments": [[]]}, "a text or a list of token ids"),
        ({"segments": [["a"]]}, "segments token id"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            SamplingParams(**given)


def test_what_is_taken_over_is_priced_by_its_bytes():
    spec = describe(CONFIG).spec
    model = PricedModel(spec=spec, ops=lower(spec), activations=float_format("float32"))
    plain = Segment(0, 60, 70, (1,) * 10)
    taken = plain._replace(reuses=(KVReuse(5, 20, 53, ((0, 1, 2),)), KVReuse(53, 53, 60, ((3,),))))
    work, without = (pass_work(model, batch_of([each])) for each in (taken, plain))
    # 40 tokens of 3 layers, 2 KV heads, K and V of 8 elements, 4 bytes each.
    num_bytes = 40 * 3 * 2 * 2 * 8 * 4
    assert work.kv_read_bytes - without.kv_read_bytes == num_bytes
    assert work.kv_write_bytes - without.kv_write_bytes == num_bytes
    assert work.flops == without.flops

import gc
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import (
    ChatTemplateError,
    ContextLengthError,
    CorruptFileError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OutOfMemoryError,
    SettingsError,
)
from ridgeline.core.request import FinishReason

PROMPTS = ["the cat", "a", "the mat sat on the cat on the mat", "naïve café"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.9, seed=7, max_tokens=12)
EITHER = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def tokens(output, sample=0):
    return output.outputs[sample].token_ids


@EITHER
def test_batched_equals_alone_and_together_with_others(llm, params):
    together = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate(prompt, params)
        assert tokens(alone) == tokens(output)
        assert alone.outputs[0].text == output.outputs[0].text
        assert output.prompt == prompt


@EITHER
def test_small_pool_and_small_chunks_change_nothing(llm, model_folder, params):
    expected = [tokens(output) for output in llm.generate(PROMPTS, params)]
    settings = {"dtype": "float64", "block_tokens": 4, "max_num_batched_tokens": 3}
    # Room for one sequence of 32 tokens: 4 tokens × 3 layers × 2 × 2 heads × 8 wide × 8 bytes each.
    settings |= {"max_model_len": 32, "kv_cache_memory_bytes": 9 * 4 * 3 * 2 * 2 * 8 * 8}
    with LLM(str(model_folder), **settings) as small:
        outputs = small.generate(PROMPTS, params)
    assert [tokens(output) for output in outputs] == expected


def test_samples_of_a_request_are_those_of_their_index(llm):
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=10)
    (several,) = llm.generate(PROMPTS[2], params)
    (again,) = llm.generate(PROMPTS[2], params)
    samples = [tokens(several, index) for index in range(4)]
    assert samples == [tokens(again, index) for index in range(4)]
    assert len(set(samples)) == 4
    (one,) = llm.generate(PROMPTS[2], SamplingParams(temperature=1.5, seed=3, max_tokens=10))
    assert tokens(one) == samples[0]


def test_without_a_seed_draws_differ(llm):
    params = SamplingParams(temperature=2.0, max_tokens=10)
    first, second = llm.generate([PROMPTS[0]] * 2, params)
    assert tokens(first) != tokens(second)


def test_one_params_for_each_prompt(llm):
    outputs = llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    assert [len(tokens(output)) for output in outputs] == [12, 3]
    assert outputs[1].outputs[0].finish_reason is FinishReason.LENGTH


def test_token_ids_as_prompts(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    by_ids, by_text = llm.generate(ids, GREEDY), llm.generate(PROMPTS[0], GREEDY)
    assert tokens(by_ids[0]) == tokens(by_text[0])
    assert len(llm.generate([ids, ids[:2]], GREEDY)) == 2


@EITHER
def test_stream_equals_generate(llm, params):
    for prompt in PROMPTS:
        (expected,) = llm.generate(prompt, params)
        stream = llm.stream(prompt, params)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == expected.outputs[0].text
        assert sum((chunk.token_ids for chunk in chunks), ()) == tokens(expected)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == expected.outputs[0].finish_reason
        assert stream.output().outputs == expected.outputs


def test_streams_run_side_by_side(llm):
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    texts = ["" for _ in PROMPTS]
    llm.generate(PROMPTS[0], GREEDY)  # steps of others must not lose their chunks
    for index in (0, 3, 1, 2):
        texts[index] = "".join(chunk.text for chunk in streams[index])
    assert texts == expected


def test_closed_and_dropped_streams_end_their_requests(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.output().outputs[0].finish_reason is FinishReason.ABORT
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    del stream
    gc.collect()
    llm.generate(PROMPTS[1], GREEDY)
    assert llm._loop._scheduler.num_running == 0
    llm._loop.check_integrity()


def test_a_stream_that_is_dropped_within_a_step_ends_before_the_next(llm, monkeypatch):
    """As the garbage collector does, wherever it runs."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    kept, *dropped = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    next(kept)
    scheduler, num_running = llm._engine.scheduler, []
    with monkeypatch.context() as patch:

        def tick(_):
            dropped.clear()
            num_running.append(scheduler.num_running)

        patch.setattr(scheduler.prefix_cache, "tick", tick)
        next(kept)
    assert num_running == [2]
    next(kept)
    assert scheduler.num_running == 1
    kept.close()
    llm._loop.check_integrity()


def test_stop_string_cuts_the_text_wherever_it_lies(llm):
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    for start in range(1, len(text) - 3):
        stop = text[start : start + 3]
        params = SamplingParams(temperature=0, max_tokens=12, stop=stop)
        (output,) = llm.generate(PROMPTS[0], params)
        sample = output.outputs[0]
        assert sample.text == text[: text.index(stop)]
        assert (sample.finish_reason, sample.stop_reason) == (FinishReason.STOP, stop)
        assert tokens(whole)[: len(sample.token_ids)] == sample.token_ids
        including = SamplingParams(
            temperature=0, max_tokens=12, stop=stop, include_stop_str_in_output=True
        )
        (output,) = llm.generate(PROMPTS[0], including)
        assert output.outputs[0].text == text[: text.index(stop) + 3]


def test_tokens_after_a_stop_string_do_not_count(model_folder):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(str(model_folder), decode_replay_s=1.0) as llm:
        whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
        before = llm._loop.stats().generated_tokens
        stop = whole.text[2:4]
        (output,) = llm.generate(PROMPTS[0], replace(params, stop=(stop,)))
        count = len(tokens(output))
        assert 1 < count < 8, "the rest of the replay is not tested"
        assert llm._loop.stats().generated_tokens - before == count
    timings = output.timings
    decode_s = timings.end_to_end_s - timings.ttft_s
    assert timings.tpot_s == pytest.approx(decode_s / (count - 1))


def test_stop_token_is_left_out_of_the_text(llm):
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    stop = tokens(whole)[4]
    first = tokens(whole).index(stop)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,))
    (output,) = llm.generate(PROMPTS[0], params)
    assert tokens(output) == tokens(whole)[: first + 1]
    assert output.outputs[0].text == llm.tokenizer.decode(tokens(whole)[:first])
    assert output.outputs[0].stop_reason == stop


def test_logprobs_are_those_of_the_model(llm):
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=1, repetition_penalty=1.5
    )
    (output,) = llm.generate(PROMPTS[2], params)
    sample, prompt_ids = output.outputs[0], output.prompt_token_ids
    logits = llm.logits([*prompt_ids, *sample.token_ids]).astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert len(sample.logprobs) == len(sample.token_ids) == 6
    for row, entry in enumerate(sample.logprobs, start=len(prompt_ids) - 1):
        assert entry.logprob == pytest.approx(logprobs[row, entry.token_id], abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-logprobs[row])[:3].tolist()
    assert sample.cumulative_logprob == pytest.approx(sum(e.logprob for e in sample.logprobs))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt_ids)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry.token_id == prompt_ids[position]
        assert entry.logprob == pytest.approx(logprobs[position - 1, entry.token_id], abs=1e-5)


def test_prompt_logprobs_take_no_room_for_the_logits_of_all_tokens(model_folder):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    with LLM(str(model_folder), executor="cpu", dtype="float32", block_tokens=16) as llm:
        prompts = [[(n * i) % 290 for i in range(100)] for n in (3, 5)]
        outputs = llm.generate(prompts, params)
        logits = [llm.logits(prompt) for prompt in prompts]
        held = llm._engine.executor._logits
    assert held.size == len(prompts) * llm.spec.vocab_size
    for output, logits_NV in zip(outputs, logits, strict=True):
        logprobs = torch.from_numpy(logits_NV).double().log_softmax(-1)
        for entry, row in zip(output.prompt_logprobs[1:], logprobs, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), rel=1e-14)
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(2).values.tolist(), rel=1e-14
            )


def test_logits_in_chunks_equal_logits_at_once(llm, model_folder):
    ids = llm.tokenizer.encode("the cat sat on the mat " * 5)
    with LLM(str(model_folder), dtype="float64", max_num_batched_tokens=7) as chunked:
        np.testing.assert_allclose(chunked.logits(ids), llm.logits(ids), atol=1e-5)
    assert llm.logits(ids).shape == (len(ids), 300)
    assert llm.logits(ids).dtype == np.float32


def test_chat_renders_and_answers(llm):
    messages = [{"role": "user", "content": "the cat"}]
    assert llm.render_chat(messages) == "<user>the cat<assistant>"
    (output,) = llm.chat(messages, GREEDY)
    assert tokens(output) == tokens(llm.generate("<user>the cat<assistant>", GREEDY)[0])
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_timings_are_in_order(llm):
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    timings = output.timings
    assert 0 <= timings.queue_s <= timings.ttft_s <= timings.end_to_end_s
    assert timings.tpot_s == pytest.approx((timings.end_to_end_s - timings.ttft_s) / 11)
    (single,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    assert single.timings.tpot_s is None


def test_the_end_of_the_context_ends_the_output(model_folder):
    with LLM(str(model_folder), max_model_len=10) as llm:
        (output,) = llm.generate([1, 2, 3], SamplingParams(ignore_eos=True))
        assert len(tokens(output)) == 7
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


REFUSED = [
    ([[]], InvalidRequestError, "no tokens"),
    ([[300]], InvalidRequestError, "Token id 300 in prompt"),
    ([[-1]], InvalidRequestError, "Token id -1"),
    ([[True]], InvalidRequestError, "whole numbers"),
    ([[1.0]], InvalidRequestError, "whole numbers"),
    ([[1] * 256], ContextLengthError, "256 tokens"),
    (["ok", "bad \ud800"], InvalidRequestError, None),
]


@pytest.mark.parametrize(("prompts", "error", "message"), REFUSED)
def test_bad_prompts_are_refused_and_nothing_is_left_behind(llm, prompts, error, message):
    with pytest.raises(error, match=message):
        llm.generate([PROMPTS[0], *prompts], GREEDY)
    llm._loop.check_integrity()
    assert llm._loop._scheduler.num_waiting == 0
    assert len(llm.generate(PROMPTS[0], GREEDY)) == 1


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": (300,)}, {"logit_bias": {300: 1.0}}], ids=lambda f: next(iter(f))
)
def test_token_ids_in_settings_are_checked(llm, fields):
    with pytest.raises(InvalidRequestError, match="300"):
        llm.generate(PROMPTS[0], SamplingParams(**fields))


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []
    assert llm.embed([]).shape == (0, llm.spec.hidden_size)


def test_number_of_params_must_fit(llm):
    with pytest.raises(InvalidRequestError, match="2 sampling params for 1 prompts"):
        llm.generate([PROMPTS[0]], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_model_len": 257}, SettingsError, "256 positions"),
        ({"max_model_len": 0}, SettingsError, "max_model_len"),
        ({"max_num_seqs": "a"}, SettingsError, "max_num_seqs"),
        ({"block_tokens": 16.5}, SettingsError, "block_tokens"),
        ({"seed": -1}, SettingsError, "seed"),
        ({"dtype": "float8"}, SettingsError, "float8"),
        ({"executor": "abacus"}, SettingsError, "abacus"),
        ({"load_format": "pickle"}, SettingsError, "load_format"),
        ({"max_modle_len": 5}, SettingsError, "max_modle_len"),
        ({"num_speculative_tokens": 8}, SettingsError, "no effect without speculation"),
        ({"kv_disk_tier_bytes": 10**9}, SettingsError, "no effect without kv_disk_tier_path"),
        ({"tenant_weights": {"a": 2}}, SettingsError, "no effect without scheduling_policy"),
        ({"batch_window_s": 1.0}, SettingsError, "no effect without batching dynamic"),
        ({"max_model_len": 200, "kv_cache_memory_bytes": 1000}, OutOfMemoryError, "1,000"),
        ({"chat_template": "{% for %}"}, ChatTemplateError, None),
        ({"chat_template": "/no/such/file"}, SettingsError, "cannot be read"),
    ],
)
def test_bad_settings_are_refused(model_folder, settings, error, message):
    with pytest.raises(error, match=message):
        LLM(str(model_folder), **settings)


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    memory = SimpleNamespace(available=500_000_000, total=1_000_000_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    settings = {"load_format": "dummy", "dtype": "bfloat16", "executor": "cpu"}
    with pytest.raises(OutOfMemoryError, match=r"take \d\.\d GB packed, and 0.5 GB .* int4"):
        LLM("qwen2.5-0.5b", **settings)


def test_a_small_pool_clips_the_context(model_folder):
    with LLM(str(model_folder), kv_cache_memory_bytes=50_000) as llm:
        assert llm.config.max_model_len < 256
        assert llm.config.kv_cache_bytes <= 50_000


def test_dummy_weights_from_a_shape_preset():
    settings = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64}
    with LLM("qwen2.5-0.5b", **settings) as llm:
        (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(tokens(output)) == 2


def test_a_shape_preset_has_no_weights_of_its_own():
    with pytest.raises(ModelNotFoundError, match="load-format dummy"):
        LLM("qwen2.5-0.5b")


def test_an_interrupt_loses_nothing(llm, monkeypatch):
    """Ctrl-C while a step runs: the request is aborted, and the engine goes on."""
    executor, calls = llm._engine.executor, []
    submit = executor.submit

    def interrupted_submit(plan):
        handle = submit(plan)
        if len(calls) == 1:  # the rest may be one replay
            result = handle.result

            def raise_once():
                handle.result = result
                raise KeyboardInterrupt

            handle.result = raise_once
        calls.append(plan)
        return handle

    monkeypatch.setattr(executor, "submit", interrupted_submit)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == expected
    llm._loop.check_integrity()
    assert llm._loop._scheduler.num_running == 0


def test_a_failing_executor_fails_every_later_call(model_folder, monkeypatch):
    with LLM(str(model_folder)) as llm:
        monkeypatch.setattr(llm._engine.executor, "run", lambda _: 1 / 0)
        for _ in range(2):
            with pytest.raises(EngineError, match="executor failed"):
                llm.generate(PROMPTS[0], GREEDY)


@EITHER
def test_cached_equals_uncached(llm, model_folder, params):
    prompts = ["the cat sat on the mat " * 3 + end for end in ("the cat", "a mat", "the cat", "")]
    prompts = [prompt.strip() for prompt in prompts]
    settings = {"dtype": "float64", "block_tokens": 4, "enable_prefix_caching": False}
    with LLM(str(model_folder), **settings) as off:
        expected = off.generate(prompts, params)
    assert {output.num_cached_tokens for output in expected} == {0}
    for _ in range(2):
        salt = f"a{params.seed}"
        outputs = [llm.generate(prompt, params, cache_salt=salt)[0] for prompt in prompts]
        assert [tokens(output) for output in outputs] == [tokens(output) for output in expected]
    assert all(output.num_cached_tokens >= 16 for output in outputs)
    (other,) = llm.generate(prompts[0], params, cache_salt=f"b{params.seed}")
    assert other.num_cached_tokens == 0


def test_reports_on_the_prompt_compute_all_of_it(llm):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    prompt = "the cat sat on the mat " * 4
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert None not in second.prompt_logprobs[1:]


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(llm):
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=12, stop=text[-2:])
    first = text.index(text[-2:])
    stream = llm.stream(PROMPTS[0], params)
    last = [*stream][-1]
    sample = stream.output().outputs[0]
    assert (last.finish_reason, sample.finish_reason) == (FinishReason.STOP, FinishReason.STOP)
    assert last.stop_reason == sample.stop_reason == text[-2:]
    assert sample.text == text[:first]


def test_logits_of_a_prompt_that_was_preempted(llm, model_folder):
    """A decode beside it takes its blocks, so that its chunks come again, cut differently."""
    ids = [3, 7, 100, 21, 9] * 6
    pool = 14 * 4 * 3 * 2 * 2 * 8 * 8
    settings = {"max_model_len": 48, "kv_cache_memory_bytes": pool, "max_num_batched_tokens": 5}
    with LLM(str(model_folder), dtype="float64", block_tokens=4, **settings) as small:
        streams = [small.stream([i], SamplingParams(max_tokens=30, seed=i)) for i in range(2)]
        for stream in streams:
            next(stream)
        logits = small.logits(ids)
    assert logits.shape == (30, 300)
    np.testing.assert_allclose(logits, llm.logits(ids), atol=1e-5)


def test_the_models_own_sampling_settings_are_the_default(model_folder, tmp_path, caplog):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    path = folder / "generation_config.json"
    ours = {"temperature": 1e-6, "top_k": 1}
    theirs = {"do_sample": True, "num_beams": 4, "typical_p": 1, "suppress_tokens": [3]}
    path.write_text(json.dumps(ours | theirs))
    with LLM(str(folder), dtype="float64") as llm:
        assert llm.sampling_defaults == ours
        assert "gives num_beams, suppress_tokens, which" in caplog.text
        (output,) = llm.generate("the cat")
        greedy = SamplingParams(temperature=0)
        assert tokens(output) == tokens(llm.generate("the cat", greedy)[0])
    path.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(CorruptFileError, match="temperature"):
        LLM(str(folder))


def test_a_model_without_a_tokenizer_stops_where_its_configuration_says(model_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, folder)
    with LLM(str(folder), dtype="float64") as llm:
        (whole,) = llm.generate([1, 2, 3], GREEDY)
    end = tokens(whole)[4]
    config = json.loads((folder / "config.json").read_text())
    for name, content in (
        ("config.json", config | {"eos_token_id": end}),
        ("generation_config.json", {"eos_token_id": [0, end]}),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / name).write_text(json.dumps(content))
        with LLM(str(folder), dtype="float64") as llm:
            (output,) = llm.generate([1, 2, 3], GREEDY)
            assert output.outputs[0].finish_reason is FinishReason.STOP
            assert tokens(output) == tokens(whole)[: tokens(whole).index(end) + 1]


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_warned_of(model_folder, tmp_path, caplog):
    shutil.copytree(model_folder, folder := tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<extra {number}>" for number in range(50)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), max_model_len=32) as llm:
        has = f"The tokenizer has {tokenizer.get_vocab_size()} tokens and the model 300: "
        assert has in caplog.text
        with pytest.raises(InvalidRequestError, match="is not in the vocabulary of 300"):
            llm.generate("the <extra 49>")


def test_arrays_of_token_ids_are_prompts(llm):
    expected = tokens(llm.generate([1, 2, 3], GREEDY)[0])
    array = np.array([1, 2, 3])
    for prompts in (array, [array], array[None], list(array), (1, 2, 3)):
        assert tokens(llm.generate(prompts, GREEDY)[0]) == expected
    np.testing.assert_array_equal(llm.logits(array), llm.logits([1, 2, 3]))

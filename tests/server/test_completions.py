"""``/v1/completions`` on a tiny model, against `LLM` on the same model."""

import asyncio

import httpx
import pytest
from tests.server.running import running

from ridgeline import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def offline(roomy_folder):
    from ridgeline import LLM

    with LLM(str(roomy_folder), dtype="float32", block_tokens=4) as llm:
        yield llm


def complete(http, **body):
    response = http.post("/v1/completions", json={**GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_text_is_what_the_engine_says(http, offline):
    params = SamplingParams(**GREEDY)
    (expected,) = offline.generate("the cat", params)
    got = complete(http, prompt="the cat", return_token_ids=True)
    (choice,) = got["choices"]
    assert choice["text"] == expected.outputs[0].text
    assert choice["token_ids"] == list(expected.outputs[0].token_ids)
    assert choice["finish_reason"] == "length"
    assert got["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert got["usage"]["completion_tokens"] == 6


def test_four_forms_of_prompt_give_the_same(http, offline):
    ids = offline.tokenizer.encode("the cat")
    texts = [
        [choice["text"] for choice in complete(http, prompt=prompt)["choices"]]
        for prompt in ("the cat", ["the cat"], ids, [ids], ["the cat", "the cat"], [ids, "the cat"])
    ]
    assert len({text for each in texts for text in each}) == 1
    assert [len(each) for each in texts] == [1, 1, 1, 1, 2, 2]


def test_stream_joins_to_the_whole(http, events):
    body = {"prompt": ["the cat", "on the"], "n": 2, **GREEDY, "temperature": 1.0, "seed": 7}
    whole = complete(http, **body)
    chunks = events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-2]:
        assert "usage" not in chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}


def test_continuous_usage_counts_up(events):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events("/v1/completions", {"prompt": "the", **GREEDY, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_echo_with_logprobs_scores_the_prompt(http, offline):
    """What lm-eval sends: token ids, echo, one token, log-probabilities."""
    ids = offline.tokenizer.encode("the cat sat on the mat")
    got = complete(http, prompt=[ids], echo=True, logprobs=1, max_tokens=1)
    logprobs = got["choices"][0]["logprobs"]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    (expected,) = offline.generate([ids], params)
    wanted = [entry and entry.logprob for entry in expected.prompt_logprobs]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(wanted[1:], abs=1e-5)
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert got["choices"][0]["text"].startswith("the cat sat on the mat")
    offsets = logprobs["text_offset"]
    text = got["choices"][0]["text"]
    for token, start in zip(logprobs["tokens"][: len(ids)], offsets, strict=False):
        assert text[start : start + len(token)] == token


@pytest.mark.parametrize("hidden", [True, False])
def test_offsets_are_those_of_the_text_of_each_prompt(http, offline, hidden):
    """Special tokens are in the echo of token ids, and in the output unless they are hidden."""
    ids = [0, *offline.tokenizer.encode("on the")]
    body = {"prompt": ["the cat", ids], "echo": True, "logprobs": 0, "max_tokens": 3}
    settings = {"logit_bias": {"0": 100}, "skip_special_tokens": hidden}
    for choice in complete(http, **body, **settings)["choices"]:
        text, logprobs = choice["text"], choice["logprobs"]
        prompt = "<eos>on the" if choice["index"] else "the cat"
        assert text == prompt + ("" if hidden else "<eos>" * 3)
        tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
        assert tokens[-3:] == ["<eos>"] * 3
        assert offsets[:-3] == [len("".join(tokens[:i])) for i in range(len(tokens) - 3)]
        width = 0 if hidden else len("<eos>")
        assert offsets[-3:] == [len(prompt) + width * i for i in range(3)]


def test_echo_without_output(http):
    got = complete(http, prompt="the cat", echo=True, max_tokens=0, logprobs=0)
    assert got["choices"][0]["text"] == "the cat"
    assert got["usage"]["completion_tokens"] == 0


def test_both_names_of_the_limit(http):
    del_max = {"max_completion_tokens": 3, "max_tokens": None}
    assert complete(http, prompt="the", **del_max)["usage"]["completion_tokens"] == 3


def test_nulls_are_as_if_absent(http):
    body = {"stop": None, "logprobs": None, "n": None, "seed": None, "user": None}
    assert complete(http, prompt="the", **body)["choices"][0]["logprobs"] is None


def test_stop_string(http):
    text = complete(http, prompt="the cat", max_tokens=12)["choices"][0]["text"]
    stop = text[4:6]
    choice = complete(http, prompt="the cat", max_tokens=12, stop=[stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_usage_has_cached_tokens_and_cost(http):
    prompt = "on the mat the cat sat " * 3
    complete(http, prompt=prompt)
    usage = complete(http, prompt=prompt)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    cost = usage["cost"]
    assert cost["prefill"] == pytest.approx((usage["prompt_tokens"] - cached) * 1e-6)
    assert cost["cached"] == pytest.approx(cached * 0.1e-6)
    assert cost["decode"] == pytest.approx(usage["completion_tokens"] * 2e-6)
    assert cost["total"] == pytest.approx(sum(cost[k] for k in ("prefill", "cached", "decode")))


def test_costs_are_printed_as_the_price_list_is(http):
    """5 tokens at 1.0 per million were once 4.9999999999999996e-06."""
    for count in range(1, 40):
        ids = [200 + count] * count
        cost = complete(http, prompt=ids, max_tokens=count)["usage"]["cost"]
        assert repr(cost["prefill"]) == repr(float(f"{count}e-6"))
        assert repr(cost["decode"]) == repr(float(f"{2 * count}e-6"))
        assert repr(cost["total"]) == repr(float(f"{3 * count}e-6"))


def test_prompt_logprobs_and_token_ids(http):
    choice = complete(http, prompt="the cat", prompt_logprobs=2, return_token_ids=True)["choices"][
        0
    ]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    assert len(choice["token_ids"]) == 6


def test_truncation_keeps_the_end(http):
    got = complete(http, prompt="the cat sat on the mat", truncate_prompt_tokens=2)
    assert got["usage"]["prompt_tokens"] == 2


def test_truncation_leaves_room_for_the_output(http):
    usage = complete(http, prompt=[7] * 5000, truncate_prompt_tokens=-1, max_tokens=10)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2038, 10)
    body = {"prompt": [7] * 5000, "truncate_prompt_tokens": -1, "max_tokens": None}
    usage = complete(http, **body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2032, 16), "the default"
    for unlimited in ("max_tokens", "n_predict"):
        usage = complete(http, **body | {"max_tokens": None, unlimited: -1})["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2047, 1)


def test_negative_seeds(http):
    """−1 draws one; the others are as good as any."""

    def texts(*seeds):
        body = {"prompt": "the cat", "temperature": 2, "max_tokens": 16}
        answers = (complete(http, **body, seed=seed) for seed in seeds)
        return {answer["choices"][0]["text"] for answer in answers}

    assert len(texts(-1, -1, -1, 2**64 - 1)) > 2
    assert len(texts(-2, -2, 2**64 - 2, -2 - 2**64)) == 1


def test_an_output_limit_must_fit_into_the_context(http):
    """As at OpenAI and vLLM; the default limit may be clipped."""
    for body in ({"max_tokens": 9}, {"max_tokens": None, "max_completion_tokens": 9}):
        response = http.post("/v1/completions", json={"prompt": [7] * 2040, **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "2040" in error["message"]
        assert "1 too many" in error["message"]
    got = complete(http, prompt=[7] * 2040, max_tokens=None)
    assert got["usage"]["completion_tokens"] == 8


def test_stop_strings_wait_for_min_tokens(http):
    """As at vLLM: what is complete within the first ``min_tokens`` does not end the output."""
    text = complete(http, prompt="the cat", max_tokens=40)["choices"][0]["text"]
    stop = text[1]
    least = complete(http, prompt="the cat", max_tokens=40, stop=[stop], return_token_ids=True)
    assert len(least["choices"][0]["token_ids"]) < 20
    got = complete(
        http, prompt="the cat", max_tokens=40, min_tokens=20, stop=[stop], return_token_ids=True
    )["choices"][0]
    assert len(got["token_ids"]) > 20
    assert text.startswith(got["text"])
    assert stop in got["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10**30}, "n"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "stop": [1]}, "stop[0]"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 5, "stream": True}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "deadline_ms": 1000}, "deadline_ms"),
        ({"prompt": "a", "priority": -1}, "priority"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "a " * 3000}, "prompt"),
        ({"prompt": "a", "max_tokens": 2048}, "max_tokens"),
        ({"prompt": ["a", "a b"], "max_completion_tokens": 2047}, "max_completion_tokens"),
        ({}, "prompt"),
    ],
)
def test_refusals_name_the_field(http, body, param):
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("policy", "field"), [("edf", {"deadline_ms": 1000}), ("priority", {"priority": -1})]
)
def test_an_order_is_for_a_policy_that_goes_by_it(model_folder, tmp_path, policy, field):
    engine = {"scheduling_policy": policy}
    with (
        running(model_folder, data_dir=tmp_path, engine=engine) as server,
        server.client() as client,
    ):
        body = {"prompt": "the", "max_tokens": 1, **field}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_unknown_model(http):
    response = http.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_request_id_comes_back(http):
    body = {"prompt": "a", "max_tokens": 1}
    response = http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert http.post("/v1/completions", json=body).headers["x-request-id"].startswith("req-")


def test_one_request_id_may_be_used_twice_at_a_time(served):
    async def both():
        headers = {"x-request-id": "same"}
        async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=30) as client:
            body = {"prompt": "the cat", **GREEDY, "max_tokens": 60}
            calls = (client.post("/v1/completions", json=body) for _ in range(4))
            return await asyncio.gather(*calls)

    answers = asyncio.run(both())
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


def test_best_of_gives_the_likeliest_of_its_samples(http):
    """The mean log-probability of what is returned is the highest of all, for each prompt."""
    body = {"prompt": ["the cat", "a dog"], "temperature": 1.0, "seed": 7, "logprobs": 0}
    drawn = complete(http, **body, n=6)
    best = complete(http, **body, n=2, best_of=6)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]

    def mean(choice):
        found = choice["logprobs"]["token_logprobs"]
        return sum(found) / len(found)

    for prompt in range(2):
        ranked = sorted(drawn["choices"][6 * prompt : 6 * prompt + 6], key=mean, reverse=True)
        got = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in got] == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == drawn["usage"]["completion_tokens"]
    assert (
        complete(http, **(body | {"logprobs": None}), best_of=6)["choices"][0]["logprobs"] is None
    )


def test_a_named_format_is_a_structured_output(http):
    wanted = {"structured_outputs": {"format": "bool"}, "ignore_eos": False}
    got = complete(http, prompt="is it?", **wanted)
    assert got["choices"][0]["text"] in ("true", "false")
    refused = http.post(
        "/v1/completions", json={"prompt": "a", "structured_outputs": {"format": "year"}}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs.format"

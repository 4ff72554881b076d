"""Beam search over HTTP: the beams of `LLM.beam_search`, by completions and chat."""

import hashlib
import time

import httpx
import pytest
from tests.server.running import running

from ridgeline import LLM
from ridgeline.engine.beam_search import BeamParams

BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 6, "ignore_eos": True}
CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def offline(roomy_folder):
    with LLM(str(roomy_folder), dtype="float32", block_tokens=4) as llm:
        yield llm


def post(http, path, **body):
    response = http.post(path, json={**BEAMS, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("length_penalty", [None, 0.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_completions_are_the_beams(http, offline, length_penalty, ignore_eos):
    prompts = ["the cat", "on the"]
    got = post(
        http,
        "/v1/completions",
        prompt=prompts,
        length_penalty=length_penalty,
        ignore_eos=ignore_eos,
        return_token_ids=True,
        logprobs=2,
    )
    params = BeamParams(
        beam_width=3,
        max_tokens=6,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        ignore_eos=ignore_eos,
        logprobs=2,
    )
    expected = [s for output in offline.beam_search(prompts, params) for s in output.outputs]
    assert [choice["index"] for choice in got["choices"]] == list(range(6))
    for choice, sample in zip(got["choices"], expected, strict=True):
        assert choice["text"] == sample.text
        assert choice["token_ids"] == list(sample.token_ids)
        assert choice["finish_reason"] == sample.finish_reason
        logprobs = choice["logprobs"]["token_logprobs"]
        assert sum(logprobs) == pytest.approx(sample.cumulative_logprob, abs=1e-4)
        assert logprobs == pytest.approx([entry.logprob for entry in sample.logprobs], abs=1e-5)
        assert all(1 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    usage = got["usage"]
    assert usage["completion_tokens"] == sum(len(sample.token_ids) for sample in expected)
    assert usage["prompt_tokens"] == sum(len(offline.tokenizer.encode(each)) for each in prompts)


def test_chat_answers_with_beams(http, offline):
    got = post(http, "/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=1)
    (expected,) = offline.beam_search(
        [offline.encode_chat(CHAT)], BeamParams(beam_width=3, max_tokens=6, ignore_eos=True)
    )
    texts = [choice["message"]["content"] for choice in got["choices"]]
    assert texts == [sample.text for sample in expected.outputs]
    assert {len(choice["logprobs"]["content"]) for choice in got["choices"]} == {6}
    assert got["usage"]["completion_tokens"] == 18


def test_one_beam_is_greedy(http):
    greedy = {"use_beam_search": None, "temperature": 0}
    texts = [
        post(http, "/v1/completions", prompt="the cat", n=1, **each)["choices"][0]["text"]
        for each in ({}, greedy)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": ["a"]}, "stop"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"1": 3}}, "logit_bias"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 65}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty"),
    ],
)
def test_what_has_no_part_is_refused_by_name(http, fields, param):
    for path, what in (
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ):
        response = http.post(path, json={**BEAMS, **what, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 0}, "echo"),
        ("/v1/completions", {"prompt": ["the " * 700] * 32, "n": 64}, "n"),
        (
            "/v1/chat/completions",
            {
                "messages": CHAT,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ],
)
def test_what_only_one_of_them_has_is_refused(http, path, fields, param):
    response = http.post(path, json={**BEAMS, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_neutral_values_are_taken(http):
    neutral = {"temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0, "stop": [], "seed": 3}
    plain = post(http, "/v1/completions", prompt="the cat")
    assert plain["choices"] == post(http, "/v1/completions", prompt="the cat", **neutral)["choices"]


@pytest.fixture(scope="module")
def limited(roomy_folder, tmp_path_factory):
    """A server whose key may have three outputs at once, and 60 output tokens a minute."""
    folder = tmp_path_factory.mktemp("limited")
    entries = (("few", "concurrency = 3"), ("short", "output_tokens_per_minute = 60"))
    keys = folder / "keys.toml"
    keys.write_text(
        "".join(
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f"{limit}\n"
            for name, limit in entries
        )
    )
    engine = {"max_model_len": 128}
    with running(roomy_folder, data_dir=folder, engine=engine, api_key_file=str(keys)) as server:
        yield server


def test_without_a_limit_the_context_ends_a_chat(limited):
    with limited.client(headers={"authorization": "Bearer few"}) as http:
        got = post(http, "/v1/chat/completions", messages=CHAT, n=1, max_tokens=None)
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 128


def test_beams_count_towards_concurrency(limited):
    with limited.client(headers={"authorization": "Bearer few"}) as http:
        assert post(http, "/v1/completions", prompt="a")["choices"]
        for fields in ({"n": 4}, {"prompt": ["a", "b"], "n": 2}):
            response = http.post("/v1/completions", json={**BEAMS, "prompt": "a", **fields})
            assert response.status_code == 400
            assert "4 outputs" in response.json()["error"]["message"]
        # Samples that are drawn for best_of count as well.
        drawn = {"prompt": "a", "max_tokens": 2, "best_of": 4}
        assert http.post("/v1/completions", json=drawn).status_code == 400


def test_every_computed_token_is_charged(limited):
    """Beams that end early leave others that are computed and never shown."""
    with limited.client(headers={"authorization": "Bearer short"}) as http:
        server = limited.server
        post(http, "/v1/completions", prompt="a", n=4, max_tokens=10)
        tenant = server.limits._tenants["short"]
        assert tenant.outputs.total() == 1 + 9 * 4
        assert tenant.reserved == 0
        refused = http.post("/v1/completions", json={**BEAMS, "prompt": "a", "max_tokens": 10})
        assert refused.status_code == 429


def test_a_client_that_leaves_ends_the_search(served):
    engine = served.server.engine
    body = {**BEAMS, "prompt": "a", "max_tokens": 2000, "n": 8}
    with served.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # a search that goes on is between two steps for a moment
        if not any(engine.num_open_requests or time.sleep(0.01) for _ in range(20)):
            break
    assert not engine.num_open_requests
    assert engine.stats().generated_tokens < 8 * 2000

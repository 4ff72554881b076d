"""OpenAI's predicted outputs: a draft that changes no output."""

import pytest
from tests.server.running import running

from ridgeline.server import prompts

PATHS = {
    "/v1/completions": {"prompt": "once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "once upon a time"}]},
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    with running(None, data_dir=data_dir, engine={"speculation": "ngram"}) as server:
        yield server


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_predicted_output_is_accepted_and_stays_the_same(drafting, path, as_parts):
    body = PATHS[path] | {
        "max_tokens": 60, "temperature": 1.0, "seed": 4, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    with drafting.client() as client:
        plain = client.post(path, json=body).raise_for_status().json()["choices"][0]
        text = text_of(plain)
        parts = [{"type": "text", "text": each} for each in (text[:40], text[40:])]
        counts = []
        for content in (parts if as_parts else text, "no " * 9):
            predicted = {"type": "content", "content": content}
            found = client.post(path, json=body | {"prediction": predicted}).json()
            assert found["choices"][0]["token_ids"] == plain["token_ids"]
            details = found["usage"]["completion_tokens_details"]
            counts.append(
                (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"])
            )
    (accepted, rejected), (accepted_by_chance, _) = counts
    assert accepted > accepted_by_chance + 20
    assert 0 < rejected < 20


@pytest.mark.parametrize("path", PATHS)
def test_where_nobody_drafts_it_a_predicted_output_is_not_read(http, path, monkeypatch):
    body = PATHS[path] | {"max_tokens": 3}
    texts = []
    read = prompts.tokenize

    async def tokenize(*args, **settings):
        texts.append(args[1])
        return await read(*args, **settings)

    monkeypatch.setattr(prompts, "tokenize", tokenize)
    plain = http.post(path, json=body).raise_for_status().json()["usage"]
    predicted = {"prediction": {"type": "content", "content": "a time"}}
    usage = http.post(path, json=body | predicted).raise_for_status().json()["usage"]
    assert "completion_tokens_details" not in plain
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0
    }  # fmt: skip
    assert texts == []


def test_what_is_no_prediction_is_named(drafting):
    with drafting.client() as client:
        for wrong in ({"type": "content"}, {"type": "other", "content": "a"}, "a"):
            found = client.post("/v1/completions", json={"prompt": "a", "prediction": wrong})
            assert found.status_code == 400
            assert "prediction" in found.text


def test_what_is_drafted_past_a_stop_token_is_not_accepted(drafting):
    path = "/v1/completions"
    body = PATHS[path] | {"max_tokens": 60, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    with drafting.client() as client:
        plain = client.post(path, json=body | {"return_token_ids": True}).json()["choices"][0]
        body["prediction"] = {"type": "content", "content": plain["text"]}
        stop = plain["token_ids"][1]
        usage = client.post(path, json=body | {"stop_token_ids": [stop]}).json()["usage"]
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] <= usage["completion_tokens"] <= 2

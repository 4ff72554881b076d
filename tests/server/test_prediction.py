"""OpenAI's predicted outputs: a draft that changes no output."""

import pytest
from tests.server.running import running

PATHS = {
    "/v1/completions": {"prompt": "once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "once upon a time"}]},
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    with running(None, data_dir=data_dir, engine={"speculation": "ngram"}) as server:
        yield server


def num_accepted(client):
    metrics = client.get("/metrics").text
    return float(
        metrics.partition("\nridgeline:spec_decode_num_accepted_tokens_total")[2].split()[1]
    )


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
        before = num_accepted(client)
        plain = client.post(path, json=body).raise_for_status().json()["choices"][0]
        between = num_accepted(client)
        text = text_of(plain)
        parts = [{"type": "text", "text": each} for each in (text[:40], text[40:])]
        predicted = {"type": "content", "content": parts if as_parts else text}
        found = client.post(path, json=body | {"prediction": predicted}).json()["choices"][0]
        after = num_accepted(client)
        other = client.post(path, json=body | {"prediction": predicted | {"content": "no " * 9}})
    assert found["token_ids"] == plain["token_ids"] == other.json()["choices"][0]["token_ids"]
    assert after - between > between - before + 20


def test_what_is_no_prediction_is_named(drafting):
    with drafting.client() as client:
        for wrong in ({"type": "content"}, {"type": "other", "content": "a"}, "a"):
            found = client.post("/v1/completions", json={"prompt": "a", "prediction": wrong})
            assert found.status_code == 400
            assert "prediction" in found.text

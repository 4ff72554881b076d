"""Embeddings, models, the tokenize family, and what tells how the server is."""

import base64

import numpy as np
import pytest

from ridgeline.core.errors import EngineUnavailableError, OverloadedError


def embed(http, **body):
    response = http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_embeddings_have_length_one(http):
    got = embed(http, input=["the cat", "on the mat", "the cat"])
    vectors = np.array([item["embedding"] for item in got["data"]])
    assert vectors.shape == (3, 48)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-6)
    assert not np.allclose(vectors[0], vectors[1])


def test_embeddings_in_base64_and_shorter(http):
    numbers = embed(http, input="the cat", dimensions=8)["data"][0]["embedding"]
    text = embed(http, input="the cat", dimensions=8, encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), dtype="<f4")
    assert decoded == pytest.approx(numbers, abs=1e-6)
    assert np.linalg.norm(decoded) == pytest.approx(1.0, abs=1e-5)


def test_embedding_of_token_ids(http):
    ids = http.post("/tokenize", json={"prompt": "the cat"}).json()["tokens"]
    by_ids = embed(http, input=ids)["data"][0]["embedding"]
    assert by_ids == embed(http, input="the cat")["data"][0]["embedding"]


def test_too_many_dimensions(http):
    response = http.post("/v1/embeddings", json={"input": "a", "dimensions": 99})
    assert response.json()["error"]["param"] == "dimensions"


def test_models(http, served):
    (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == served.server.model_name
    assert http.get(f"/v1/models/{card['id']}").json() == card
    assert http.get("/v1/models/other").status_code == 404


def test_tokenize_and_back(http):
    got = http.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True}).json()
    assert got["count"] == len(got["tokens"])
    assert "".join(got["token_strs"]) == "the cat"
    back = http.post("/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": "the cat", "content": "the cat"}


def test_token_ids_that_the_model_does_not_have(http):
    response = http.post("/detokenize", json={"tokens": [1, 300]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"
    response = http.post("/v1/embeddings", json={"input": [1, 300]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"


def test_embeddings_are_counted_and_priced(http, served):
    def counted():
        name = 'ridgeline:tenant_tokens_total{kind="prompt",tenant="local"} '
        lines = http.get("/metrics").text.splitlines()
        (count,) = (line.removeprefix(name) for line in lines if line.startswith(name))
        return float(count)

    embed(http, input="the cat")
    before = counted()
    usage = embed(http, input=["the cat", "on the mat"])["usage"]
    assert counted() == before + usage["prompt_tokens"]
    assert usage["cost"]["total"] == pytest.approx(usage["prompt_tokens"] * 1e-6)


def test_tokenizer_info(http):
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>"
    assert "messages" in info["chat_template"]


def test_health(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json()["status"] == "ready"
    assert http.get("/ping").status_code == 200
    assert http.get("/load").json()["server_load"] == 0
    assert "version" in http.get("/version").json()


def test_unknown_routes_and_methods_are_json(http):
    assert http.get("/v2/nothing").json()["error"]["type"] == "not_found_error"
    response = http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert http.get("/v1/messages/nothing").json()["type"] == "error"


@pytest.mark.parametrize("count", [1, 3])
def test_an_input_over_the_context_is_the_callers_mistake(http, caplog, count):
    response = http.post("/v1/embeddings", json={"input": ["a"] * (count - 1) + ["the " * 4000]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not caplog.records
    assert embed(http, input="the cat")["data"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(OverloadedError("Full.", retry_after_s=7), 503), (EngineUnavailableError("Restarts."), 503)],
)
def test_an_engine_that_refuses_embeddings_says_when_to_come_again(
    http, served, monkeypatch, error, status
):
    async def refuse(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(served.server.engine, "embed", refuse)
        response = http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert response.status_code == status
    assert int(response.headers["retry-after"]) == getattr(error, "retry_after_s", 1)

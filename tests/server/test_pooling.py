"""Embeddings, scores and rankings of models that are made for them, over HTTP."""

import base64

import numpy as np
import pytest
from tests.parity.encoder_cases import ENCODER_CASES, make_model
from tests.server.running import running

from ridgeline.engine.llm import LLM

BERT = ENCODER_CASES[0]
DOCUMENTS = ["ab cd", "ef", "gh ab ij kl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    embedder, reranker = (tmp_path_factory.mktemp("models") / name for name in ("e", "r"))
    make_model(BERT, embedder)
    make_model(BERT, reranker, suffix="ForSequenceClassification", num_labels=1)
    return embedder, reranker


@pytest.fixture(scope="module", params=[0, 1], ids=["embedder", "reranker"])
def one(request, folders, tmp_path_factory):
    """A client of a server with a model, and the model's folder."""
    folder = folders[request.param]
    with (
        running(
            folder, data_dir=tmp_path_factory.mktemp("data"), price_input=1.0, price_output=2.0
        ) as server,
        server.client() as client,
    ):
        yield client, folder, request.param == 1


def test_embeddings(one):
    http, folder, is_reranker = one
    body = {"input": [*DOCUMENTS, [5, 6, 7]], "dimensions": 16}
    response = http.post("/v1/embeddings", json=body)
    if is_reranker:
        assert response.status_code == 400
        assert "makes no embeddings" in response.json()["error"]["message"]
        return
    got = response.json()
    with LLM(str(folder)) as llm:
        expected = np.concatenate([llm.embed(each, dimensions=16) for each in body["input"]])
        num_tokens = sum(len(llm.tokenizer.encode(text)) for text in DOCUMENTS) + 3
    found = np.array([item["embedding"] for item in got["data"]], dtype=np.float32)
    assert np.abs(found - expected).max() <= 1e-6
    assert got["usage"]["prompt_tokens"] == num_tokens
    assert got["usage"]["cost"]["total"] == pytest.approx(num_tokens * 1e-6)
    coded = http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    first = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_array_equal(first, found[0])
    name = http.get("/v1/models").json()["data"][0]["id"]
    ollama = http.post("/api/embed", json={"model": name, "input": DOCUMENTS}).json()
    assert np.array(ollama["embeddings"]).shape == (3, 64)
    error = http.post("/v1/embeddings", json={"input": "a", "prompt_name": "no"}).json()["error"]
    assert "no prompt 'no'" in error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(one, path):
    http, folder, _ = one
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    got = http.post(path, json={"query": "ab", "documents": documents, "top_n": 2}).json()
    with LLM(str(folder)) as llm:
        expected = llm.rerank("ab", DOCUMENTS)
    assert [(each["index"], each["relevance_score"]) for each in got["results"]] == [
        (each.index, pytest.approx(each.score, abs=1e-6)) for each in expected[:2]
    ]
    assert got["results"][0]["document"] == {"text": DOCUMENTS[expected[0].index]}
    body = {"query": "ab", "documents": documents, "return_documents": False}
    assert "document" not in http.post(path, json=body).json()["results"][0]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(one, path):
    http, folder, _ = one
    got = http.post(path, json={"text_1": "ab", "text_2": DOCUMENTS}).json()
    with LLM(str(folder)) as llm:
        expected = llm.score("ab", DOCUMENTS)
    assert [each["score"] for each in got["data"]] == pytest.approx(expected, abs=1e-6)
    assert got["usage"]["total_tokens"] > 0
    error = http.post(path, json={"text_1": ["ab", "cd"], "text_2": DOCUMENTS}).json()["error"]
    assert (error["param"], "2 queries and 3 documents" in error["message"]) == ("text_2", True)
    long = http.post(path, json={"text_1": "ab", "text_2": "ab " * 900})
    assert long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "stream": True}),
    ],
)
def test_no_text_is_generated(one, path, body):
    http, _, _ = one
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert "does not generate text" in response.json()["error"]["message"]


def test_a_model_that_generates_ranks_nothing(http):
    response = http.post("/v1/rerank", json={"query": "the cat", "documents": ["the mat"]})
    assert response.status_code == 400
    assert "neither a reranker nor made for embeddings" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "model_not_supported"

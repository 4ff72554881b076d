"""llama.cpp's own routes, as its server's README has them."""

import json

import pytest

ASK = {"prompt": "the cat", "n_predict": 5, "temperature": 0}


def test_a_completion_is_that_of_the_other_interface(http, served):
    whole = http.post("/completion", json=ASK | {"return_tokens": True}).json()
    openai = http.post(
        "/v1/completions", json={"prompt": "the cat", "max_tokens": 5, "temperature": 0}
    ).json()
    assert whole["content"] == openai["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 5)
    assert len(whole["tokens"]) == 5
    assert whole["truncated"] is False
    assert whole["tokens_evaluated"] == openai["usage"]["prompt_tokens"]
    assert whole["timings"]["predicted_n"] == 5
    assert whole["timings"]["predicted_per_second"] > 0
    assert whole["model"] == served.server.model_name
    by_ids = http.post("/tokenize", json={"content": "the cat"}).json()["tokens"]
    assert http.post("/completion", json=ASK | {"prompt": by_ids}).json()["content"]


def test_an_adapter_is_named_as_what_answered(http, served, says, monkeypatch):
    monkeypatch.setattr(type(served.server.engine), "adapters", ("tuned",))
    says("yes")
    whole = http.post("/completion", json=ASK | {"model": "tuned"}).json()
    assert (whole["content"], whole["model"]) == ("yes", "tuned")


def test_a_stream_ends_with_what_is_said_of_the_whole(events):
    *pieces, last = events("/completion", ASK)
    assert all(piece["stop"] is False for piece in pieces)
    assert last["stop"] is True
    assert last["content"] == ""
    assert last["tokens_predicted"] == 5
    assert sum(len(piece["tokens"]) for piece in pieces) == 5


def test_stop_words_schemas_and_probabilities(http):
    words = http.post("/completion", json=ASK | {"n_predict": 40, "stop": ["t"]}).json()
    if words["stop_type"] == "word":
        assert words["stopping_word"] == "t"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    made = http.post("/completion", json=ASK | {"n_predict": 60, "json_schema": schema}).json()
    assert json.loads(made["content"]) == {"a": 1}
    gbnf = http.post("/completion", json=ASK | {"grammar": 'root ::= "yes"'}).json()
    assert gbnf["content"] == "yes"
    likely = http.post("/completion", json=ASK | {"n_probs": 2}).json()["completion_probabilities"]
    assert [len(entry["top_logprobs"]) for entry in likely] == [2] * 5


def test_what_the_server_is(http, served):
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["total_slots"] == len(http.get("/slots").json()) == 8
    assert props["chat_template"]
    turns = [{"role": "user", "content": "the cat"}]
    text = http.post("/apply-template", json={"messages": turns}).json()["prompt"]
    assert text == "<user>the cat<assistant>"


def test_tokens_with_pieces_and_back(http):
    plain = http.post("/tokenize", json={"content": "the cat"}).json()["tokens"]
    pieces = http.post("/tokenize", json={"content": "the cat", "with_pieces": True}).json()
    assert [each["id"] for each in pieces["tokens"]] == plain
    assert "".join(each["piece"] for each in pieces["tokens"]) == "the cat"
    assert http.post("/detokenize", json={"tokens": plain}).json()["content"] == "the cat"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/completion",
            ASK | {"mirostat": 2},
            "mirostat: this is not done here, and may only be off, which is 0.",
        ),
        (
            "/completion",
            ASK | {"typical_p": 0.5},
            "typical_p: this is not done here, and may only be off, which is 1.",
        ),
        ("/completion", ASK | {"n_predict": 0}, "n_predict"),
        ("/completion", ASK | {"prompt": ["a", "b"]}, "one text"),
        ("/completion", ASK | {"grammar": "x", "json_schema": {}}, "exclude each other"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "cannot fill in the middle"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "give one of them"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "cannot fill in the middle"),
    ],
)
def test_what_is_not_done_is_a_sentence(http, path, body, words):
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


class Marked:
    """A tokenizer with the tokens of one family."""

    bos_token_id = None

    def __init__(self, *marks):
        self.marks = marks

    def token_to_id(self, token):
        return self.marks.index(token) if token in self.marks else None

    def encode(self, text, _):
        return [text]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), [0, "a", 1, "b", 2]),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), [0, "a", 1, "b", 2]),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), [0, "a", 1, "b", 2]),
        (("[SUFFIX]", "[PREFIX]"), [0, "b", 1, "a"]),
    ],
)
def test_prompts_of_a_gap_as_each_family_was_trained(marks, expected):
    from ridgeline.server.fim import fim_token_ids

    assert fim_token_ids(Marked(*marks), "a", "b") == expected

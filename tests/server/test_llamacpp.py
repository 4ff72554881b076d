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


def test_several_prompts_have_an_answer_each(http, events):
    ids = http.post("/tokenize", json={"content": "a dog sat"}).json()["tokens"]
    prompts = ["the cat", ids]
    alone = [http.post("/completion", json=ASK | {"prompt": p}).json() for p in prompts]
    together = http.post("/completion", json=ASK | {"prompt": prompts}).json()
    assert [each["index"] for each in together] == [0, 1]
    for name in ("content", "tokens_predicted", "tokens_evaluated", "stop_type"):
        assert [each[name] for each in together] == [each[name] for each in alone]
    assert http.post("/completion", json=ASK | {"prompt": ["the cat"]}).json()["index"] == 0
    streamed = events("/completion", ASK | {"prompt": prompts})
    for index, whole in enumerate(alone):
        *pieces, last = [each for each in streamed if each["index"] == index]
        assert "".join(piece["content"] for piece in pieces) == whole["content"]
        assert [each["stop"] for each in (*pieces, last)] == [False] * len(pieces) + [True]


def test_outputs_are_cut_one_by_one(http, served, says, monkeypatch):
    counted = []
    monkeypatch.setattr(served.server.metrics, "finished", counted.append)
    says("a\n", "b", "c", "d")
    body = ASK | {"prompt": ["the cat", "a dog"], "n_indent": 4}
    together = http.post("/completion", json=body).json()
    assert [(each["content"], each["stop_type"]) for each in together] == [("a\n", "limit")] * 2
    assert counted == ["stop", "stop"]


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
        ("/completion", ASK | {"prompt": ["a", [0.5]]}, "a list of either"),
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


VIM = {  # what llama.vim sends, after the texts; its bookkeeping of chunks goes along
    "input_extra": [{"text": "import os\n", "time": [3, 14], "filename": "a.py"}],
    "prompt": "", "n_predict": 5, "stop": [], "n_indent": 0, "top_k": 40, "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "id_slot": 0,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", ""],
}  # fmt: skip


@pytest.fixture
def fills_gaps(monkeypatch):
    """Gives the tiny model a prompt for gaps: the two texts."""

    async def prompt(server, prefix, suffix):
        return server.tokenizer.encode(f"{prefix}{suffix}", False)

    monkeypatch.setattr("ridgeline.server.routes.llamacpp.fim_prompt", prompt)


def test_the_requests_of_llama_vim_are_understood(http, fills_gaps):
    texts = {"input_prefix": "def add(", "input_suffix": "return a"}
    answer = http.post("/infill", json=VIM | texts)
    assert set(answer.json()) == set(VIM["response_fields"]) - {""}
    warming = {"n_predict": 0, "temperature": 0.0, "samplers": [], "response_fields": [""]}
    answer = http.post("/infill", json=VIM | texts | warming)
    assert (answer.status_code, answer.json()) == (200, {})


def test_without_tokens_to_predict_a_prompt_is_only_cached(http, events):
    prompt = {"prompt": "the cat sat on the mat and looked", "n_predict": 0}
    whole = http.post("/completion", json=prompt).json()
    assert (whole["content"], whole["tokens_predicted"]) == ("", 0)
    assert (whole["truncated"], whole["generation_settings"]["n_predict"]) == (False, 0)
    assert http.post("/completion", json=prompt).json()["tokens_cached"] > 0
    (last,) = events("/completion", prompt)
    assert (last["content"], last["stop"]) == ("", True)


def test_a_line_that_is_indented_too_little_is_not_written(http, events, says):
    read = says("a\n", "    b\n", "  c", "d", "e")
    whole = http.post("/completion", json=ASK | {"n_indent": 4}).json()
    assert (whole["content"], whole["stop_type"]) == ("a\n    b\n  ", "limit")
    assert whole["truncated"] is False
    assert whole["timings"]["predicted_n"] == 3
    assert "e" not in read
    *pieces, _ = events("/completion", ASK | {"n_indent": 4})
    assert "".join(piece["content"] for piece in pieces) == whole["content"]


def test_an_output_that_is_cut_is_counted_once(http, served, says, monkeypatch):
    counted = []
    monkeypatch.setattr(served.server.metrics, "finished", counted.append)
    says("a\n", "b", "c")
    assert http.post("/completion", json=ASK | {"n_indent": 4}).json()["content"] == "a\n"
    assert counted == ["stop"]
    assert http.post("/completion", json=ASK).json()["content"] == "a\nbc"
    assert counted == ["stop", "stop"]


def test_token_ids_need_no_tokenizer(http, served, says, monkeypatch):
    says("a", "b")
    monkeypatch.setattr(type(served.server.engine), "tokenizer", None)
    ids = ASK | {"prompt": [5, 6], "n_probs": 1, "logit_bias": [[7, -1]]}
    answer = http.post("/completion", json=ids)
    assert answer.is_success, answer.text
    assert len(answer.json()["completion_probabilities"]) == 2
    assert http.post("/completion", json=ids | {"logit_bias": [["a", 1]]}).status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_fields", ["content"] * 65),
        ("logit_bias", [[5, 1]] * 1025),
        ("logit_bias", [["x" * 257, 1]]),
    ],
)
def test_what_is_read_while_others_wait_has_a_limit(http, field, value):
    answer = http.post("/completion", json=ASK | {field: value})
    assert answer.status_code == 400
    assert field in answer.text


def test_an_output_ends_with_its_line_when_its_time_is_over(http, says):
    says("a", "b\n", "c")
    late = http.post("/completion", json=ASK | {"t_max_predict_ms": 1e-6}).json()
    assert (late["content"], late["stop_type"]) == ("ab\n", "limit")
    early = http.post("/completion", json=ASK | {"t_max_predict_ms": 60_000}).json()
    assert (early["content"], early["stop_type"]) == ("ab\nc", "eos")
    never = http.post("/completion", json=ASK | {"t_max_predict_ms": None}).json()
    assert never["content"] == "ab\nc"


def test_biases_are_pairs_of_tokens_or_texts(http):
    plain = http.post("/completion", json=ASK | {"return_tokens": True}).json()
    first = plain["tokens"][0]
    text = http.post("/detokenize", json={"tokens": [first]}).json()["content"]
    for biases in ([[first, False]], [[text, -100]], {str(first): -100}):
        other = http.post(
            "/completion", json=ASK | {"return_tokens": True, "logit_bias": biases}
        ).json()
        assert other["tokens"][0] != first


def test_what_its_front_ends_send_to_chats_is_understood(http, says):
    says("yes")
    body = {  # llama.vscode's edit of a selection
        "messages": [{"role": "user", "content": "the cat"}], "stream": False, "temperature": 0.8,
        "samplers": "edkypmxt", "dynatemp_range": 0, "dynatemp_exponent": 1, "typical_p": 1,
        "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64, "dry_multiplier": 0,
        "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "max_tokens": -1,
    }  # fmt: skip
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    on = http.post("/v1/chat/completions", json=body | {"dry_multiplier": 0.8})
    assert on.json()["error"]["param"] == "dry_multiplier"


def test_minus_one_is_an_output_to_the_end_of_the_context(http, served, says, monkeypatch):
    says("yes")
    engine, limits = served.server.engine, []
    generate = engine.generate

    def noted(request):
        limits.append(request.params.max_tokens)
        return generate(request)

    monkeypatch.setattr(engine, "generate", noted)
    for given in ({"max_tokens": -1}, {"n_predict": -1}, {}):
        assert http.post("/v1/completions", json={"prompt": "the cat", **given}).is_success
    assert limits == [2048, 2048, 16]


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

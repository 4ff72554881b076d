"""Refusals name the field at fault as the request has it, on every route."""

import functools

import pytest

from ridgeline.core.errors import ChatTemplateError, InvalidRequestError
from ridgeline.server.output_formats import refused_format

HI = [{"role": "user", "content": "the cat"}]
LONG = "the cat " * 2048
LONG_TURN = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": LONG_TURN}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
    ],
)
def test_what_is_over_the_context_is_named_by_its_field(http, path, body, param):
    error = http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/tokenize", "messages"),
    ],
)
def test_what_the_template_refuses_is_named_by_its_field(http, served, monkeypatch, path, param):
    def render(*_, **__):
        raise ChatTemplateError("The chat template raises: That cannot be rendered.")

    monkeypatch.setattr(served.server.engine.chat_template, "render", render)
    response = http.post(path, json={"input" if path == "/v1/responses" else "messages": HI})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


NO_SCHEMA = {"type": "thing"}
DEEP = functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(40), {})


def schema_in(schema):
    """Bodies with a schema, and the path that it has in them."""
    openai = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ours = {"type": "json_schema", "name": "a", "schema": schema}
    theirs = {"type": "json_schema", "schema": schema}
    chat, path = {"messages": HI}, "response_format.json_schema.schema"
    return [
        ("/v1/chat/completions", {**chat, "response_format": openai}, path),
        ("/v1/completions", {"prompt": "a", "response_format": openai}, path),
        ("/v1/chat/completions", {**chat, "guided_json": schema}, "guided_json"),
        (
            "/v1/chat/completions",
            {**chat, "structured_outputs": {"json": schema}},
            "structured_outputs.json",
        ),
        ("/v1/responses", {"input": "a", "text": {"format": ours}}, "text.format.schema"),
        (
            "/v1/messages",
            {**chat, "max_tokens": 4, "output_config": {"format": theirs}},
            "output_config.format.schema",
        ),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", [NO_SCHEMA, DEEP])
def test_a_schema_that_is_none_is_named_as_the_request_has_it(http, schema, stream):
    for path, body, param in schema_in(schema):
        response = http.post(path, json={**body, "stream": stream})
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert param in error["message"]
        assert error.get("param", param) == param
        assert param.startswith("structured") or "structured_outputs" not in error["message"]


def test_the_schemas_of_which_one_is_none_are_named_both(http):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HI, "tools": tools, "guided_json": NO_SCHEMA}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"].startswith("tools or guided_json: a schema was refused: ")


def test_a_schema_of_a_tool_is_named_by_its_field(http):
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": NO_SCHEMA}}}
    tools = [{"type": "function", "function": function}]
    body = {"messages": HI, "tools": tools, "tool_choice": "required"}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"].startswith("tools: a schema was refused: ")
    assert error["param"] == "tools"


@pytest.mark.parametrize("text", ["A schema may be small.", "structured_outputs.json was refused"])
def test_an_error_that_is_of_no_field_stays_as_it_is(text):
    error = InvalidRequestError(text)
    assert refused_format(error, ()) is error


def test_formats_exclude_each_other(http):
    body = {"messages": HI, "guided_regex": "a", "structured_outputs": {"choice": ["a"]}}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == "structured_outputs and guided_regex exclude each other."
    for given in ({}, {"regex": "a", "choice": ["a"]}):
        body = {"messages": HI, "structured_outputs": given}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "structured_outputs"
        kinds = "json, regex, choice, grammar, format, json_object"
        assert f"exactly one of {kinds}" in error["message"]


def in_result(kind):
    block = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": kind}]}
    return [{"role": "user", "content": [block]}]


def image(kind):
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        (CHAT, {"messages": image("image_url")}, "messages[0].content[1]", "reads text"),
        (CHAT, {"messages": image("text")}, "messages[0].content[1]", "has no text"),
        (CHAT, {"messages": HI, "logit_bias": {"999999": 1}}, "logit_bias", "vocabulary"),
        (CHAT, {"messages": HI, "logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
        (CHAT, {"messages": HI, "max_token": 1}, "max_token", "; did you mean 'max_tokens'?"),
        (CHAT, {"messages": HI, "colour": 1}, "colour", "this field is not known."),
        (
            CHAT,
            {"messages": [{"role": "user", "contents": "a"}]},
            "messages[0].contents",
            "; did you mean 'content'?",
        ),
        (CHAT, {"messages": HI, "chat_template": "x"}, "chat_template", "; the server has one, by"),
        (CHAT, {"messages": HI, "functions": []}, "functions", "; tools has them."),
        (CHAT, {"messages": HI, "allowed_token_ids": [5]}, "allowed_token_ids", "by choice"),
        ("/v1/embeddings", {"input": "a", "regex": "x"}, "regex", "is not known."),
        (CHAT, {"messages": HI, "stop_token_ids": [999999]}, "stop_token_ids", "vocabulary"),
        (
            CHAT,
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "exclude",
        ),
        (
            CHAT,
            {"messages": HI, "tool_choice": "any"},
            "tool_choice",
            "'any' is not one of auto, none, required",
        ),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "web_search"}]},
            "tools[0].type",
            "'web_search' is not one of function",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json"}},
            "response_format.type",
            "'json' is not one of json_object, json_schema, text",
        ),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ("/v1/responses", {"input": [{"type": "item_reference"}]}, "input[0]", "item_reference"),
        (MESSAGES, {"messages": image("image")}, "messages[0]", "does not read 'image'"),
        (MESSAGES, {"messages": image("tool_result")}, "messages[0]", "needs tool_use_id"),
        (MESSAGES, {"messages": in_result("text")}, "messages[0]", "needs text"),
        (MESSAGES, {"messages": in_result("thinking")}, "messages[0]", "not read 'thinking'"),
        (
            MESSAGES,
            {
                "messages": HI,
                "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
            },
            "context_management.edits[0].type",
            "clear_thinking_20251015",
        ),
    ],
)
def test_refusals_say_what_and_where(http, path, body, param, told):
    if path == MESSAGES:
        body = {"max_tokens": 4, **body}
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert told in error["message"]
    if path == MESSAGES:  # whose errors have no field for it
        assert error["message"].startswith(param)
    else:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "told"),
    [(b"", "is empty"), (b" ", "is empty"), (b'{"prompt": "\xff"}', "UTF-8"), (b"{", "truncated")],
)
def test_bodies_that_are_no_json(http, body, told):
    error = http.post("/v1/completions", content=body).json()["error"]
    assert error["code"] == "invalid_json"
    assert told in error["message"]


def test_the_file_of_a_batch_is_named_as_the_batch_has_it(http):
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    response = http.post("/v1/batches", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "input_file_id")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("kind", ["string", ["array", "null"], 5])
def test_the_arguments_of_a_tool_are_an_object(http, kind, choice):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    body = {"messages": HI, "tools": tools, "tool_choice": choice}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "The arguments of 'f' must be an object."


def test_kv_compression_is_of_a_request(http):
    body = {"prompt": "the cat sat on the mat " * 20, "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        window = {"window": 16, "sinks": 2}
        response = http.post("/v1/completions", json={**body, "kv_compression": window})
        assert response.status_code == 200, response.text
        details = response.json()["usage"].get("prompt_tokens_details") or {}
        assert not details.get("cached_tokens")
    response = http.post("/v1/completions", json={**body, "kv_compression": {"window": 0}})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("kv_compression")


def test_documents_are_marked_in_a_request(http):
    document = "the cat sat on the mat " * 4
    body = {"prompt": f"Read: {document} Who sat?", "max_tokens": 2, "segments": [document]}
    assert http.post("/v1/completions", json=body).status_code == 200
    for wrong, told in (
        ({"segment_reuse": 16}, "enable_segment_reuse"),
        ({"segment_reuse": "some"}, "segment_reuse"),
        ({"segments": "text"}, "segments"),
    ):
        response = http.post("/v1/completions", json={**body, **wrong})
        assert response.status_code == 400
        assert told in response.json()["error"]["message"]

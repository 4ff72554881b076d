"""``/v1/chat/completions``, ``/v1/messages`` and ``/v1/responses`` over one engine."""

import dataclasses
import json

import pytest

HI = [{"role": "user", "content": "the cat"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
TOOL = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False}  # fmt: skip


def chat(http, **body):
    response = http.post("/v1/chat/completions", json={"messages": HI, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_all_three_interfaces_say_the_same(http):
    """One prompt, one template, greedy: the text does not depend on who asks."""
    text = chat(http, max_tokens=5)["choices"][0]["message"]["content"]
    message = http.post("/v1/messages", json={"messages": HI, **GREEDY, "max_tokens": 5}).json()
    assert message["content"] == [{"type": "text", "text": text}]
    assert message["stop_reason"] == "max_tokens"
    body = {"input": "the cat", **GREEDY, "max_output_tokens": 5}
    response = http.post("/v1/responses", json=body).json()
    assert response["output"][0]["content"][0]["text"] == text
    assert response["status"] == "incomplete"
    prompt = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    body = {"prompt": prompt, **GREEDY, "max_tokens": 5}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    counted = http.post("/v1/messages/count_tokens", json={"messages": HI}).json()
    assert counted == {"input_tokens": len(prompt)}


def test_stream_joins_to_the_whole(http, events):
    body = {"messages": HI, **GREEDY, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    (whole,) = chat(http, **body)["choices"]
    chunks = events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["usage"]["completion_tokens"] == 6
    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["message"]["content"]
    logprobs = [e for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert choices[-1]["finish_reason"] == "length"


def test_the_first_event_has_a_token(events):
    """A role chunk without a token would falsify every client's time to the first token."""
    chunks = events(
        "/v1/chat/completions",
        {"messages": HI, **GREEDY, "max_tokens": 2, "return_token_ids": True},
    )
    assert chunks[0]["choices"][0]["token_ids"]


def test_no_token_id_is_lost_in_a_stream(http, events):
    """Tokens of half characters have no text of their own, and their ids are sent all the same."""
    body = {"messages": HI, "temperature": 3, "seed": 5, "ignore_eos": True, "max_tokens": 24,
            "n": 2, "return_token_ids": True}  # fmt: skip
    whole = chat(http, **body)
    chunks = events("/v1/chat/completions", body)[:-1]
    found = {0: [], 1: []}
    texts = 0
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["token_ids"]
        texts += bool(choice["delta"].get("content"))
    assert texts < sum(map(len, found.values()))  # chunks are joined where the reader is slow
    assert found == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


def test_content_parts(http):
    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    in_parts, plain = chat(http, messages=parts, max_tokens=5), chat(http, max_tokens=5)
    assert in_parts["choices"] == plain["choices"]
    assert in_parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_message_events(events):
    found = events("/v1/messages", {"messages": HI, **GREEDY, "max_tokens": 4})
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == 4


def test_system_messages_within_a_conversation(http):
    """Anthropic's packages have them beside ``system``, which is only the first."""
    rest = [*HI, {"role": "system", "content": "Be brief."}, *HI]
    turns = [{"role": "system", "content": "Be good."}, *rest]
    plain = http.post("/tokenize", json={"messages": turns}).json()["count"]
    body = {"system": "Be good.", "messages": rest}
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": plain}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    wrong = {"messages": [*HI, {"role": "system", "content": [call]}], "max_tokens": 1}
    refused = http.post("/v1/messages", json=wrong)
    assert refused.status_code == 400
    assert "messages[1]" in refused.json()["error"]["message"]


def test_a_message_may_run_into_the_end_of_the_context(http, events):
    """Anthropic's clients send a limit that is the model's, and read of the context's end."""

    def asking(repeats):
        return {"messages": [{"role": "user", "content": "the cat " * repeats}]}

    def count(repeats):
        counted = http.post("/v1/messages/count_tokens", json=asking(repeats))
        return counted.json()["input_tokens"]

    each = (count(110) - count(10)) / 100
    body = {**asking(int((2020 - count(0)) / each)), **GREEDY}
    message = http.post("/v1/messages", json={**body, "max_tokens": 4096}).json()
    used = message["usage"]
    length = used["input_tokens"] + used["cache_read_input_tokens"]
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert length + used["output_tokens"] == 2048
    assert used["cost"]["decode"] == pytest.approx(used["output_tokens"] * 2e-6)
    end = events("/v1/messages", {**body, "max_tokens": 4096})[-2]
    assert end["delta"]["stop_reason"] == "model_context_window_exceeded"
    fits = {**body, "max_tokens": 2048 - length}
    assert http.post("/v1/messages", json=fits).json()["stop_reason"] == "max_tokens"


def test_response_events(events):
    found = events("/v1/responses", {"input": "the cat", **GREEDY, "max_output_tokens": 4})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert found[-1]["response"]["usage"]["output_tokens"] == 4


def test_stop_sequence(http):
    body = {"messages": HI, **GREEDY, "max_tokens": 12}
    text = http.post("/v1/messages", json=body).json()["content"][0]["text"]
    stop = text[3:5]
    message = http.post("/v1/messages", json={**body, "stop_sequences": [stop]}).json()
    assert message["stop_reason"] == "stop_sequence"
    assert message["stop_sequence"] == stop
    assert message["content"][0]["text"] == text[: text.index(stop)]


def test_histories_with_tools_are_read(http):
    """A template that knows no tools gets calls and results as text."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
    assert chat(http, messages=messages, tools=tools, max_tokens=2)["choices"][0]["message"]
    rendered = http.post("/tokenize", json={"messages": messages, "tools": tools})
    assert rendered.status_code == 200


def test_what_a_message_spells_is_what_the_model_reads(http):
    """As in vLLM: roles are the template's, null is empty, and special tokens are themselves."""
    messages = [{"role": "alien", "content": "<eos>"}, {"role": "user", "content": None}]
    found = chat(http, messages=messages, max_tokens=1, return_token_ids=True)
    ids = found["prompt_token_ids"]
    assert 0 in ids  # <eos>
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == "<alien><eos><user><assistant>"


def test_histories_of_openais_package_are_read(http):
    """Its ``parse()`` and ``stream()`` leave their own fields in what they return."""
    function = {"name": "f", "arguments": '{"a": true}', "parsed_arguments": {"a": True}}
    call = {"id": "c1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "refusal": None, "parsed": {"b": True}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    plain = {"name": "f", "arguments": '{"a": true}'}
    without = {"role": "assistant", "tool_calls": [{**call, "function": plain}]}
    counts = [
        chat(http, messages=[*HI, turn, result], max_tokens=2)["usage"]["prompt_tokens"]
        for turn in ({**answer, "tool_calls": [call]}, without)
    ]
    assert counts[0] == counts[1]
    item = {"type": "function_call", "call_id": "c1", **function}
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    body = {"input": [*HI, item, output], "max_output_tokens": 2}
    assert http.post("/v1/responses", json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2048}, "max_tokens"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2048}, "max_output_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ("/v1/chat/completions", {"messages": HI, "stream_options": {}}, "stream_options"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, "stream_options"),
        (
            "/v1/chat/completions",
            {"messages": HI, "stream": True, "prompt_logprobs": 1},
            "prompt_logprobs",
        ),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input[0]"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_refusals_name_the_field(http, path, body, param):
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_output_config_of_a_message(http, events):
    """What ``messages.parse`` of Anthropic's package sends."""
    config = {"effort": "low", "format": {"type": "json_schema", "schema": TOOL}}
    body = {"messages": HI, "max_tokens": 64, "output_config": config, "temperature": 0}
    message = http.post("/v1/messages", json=body).json()
    assert isinstance(json.loads(message["content"][0]["text"])["a"], bool)
    body["structured_outputs"] = {"json": TOOL}
    assert http.post("/v1/messages", json=body).status_code == 400


def test_anthropic_errors_have_their_own_shape(http):
    response = http.post("/v1/messages", json={"messages": HI})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


def tools_of(family):
    if family == "/v1/chat/completions":
        function = {"name": "set_flag", "parameters": TOOL}
        return {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "set_flag"}},
            "messages": HI,
        }
    if family == "/v1/messages":
        tool = {"name": "set_flag", "input_schema": TOOL}
        choice = {"type": "tool", "name": "set_flag"}
        return {"tools": [tool], "tool_choice": choice, "messages": HI, "max_tokens": 128}
    tool = {"type": "function", "name": "set_flag", "parameters": TOOL}
    return {"tools": [tool], "tool_choice": "required", "input": "the cat"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_tool_whose_schema_is_none_is_refused_as_that(http, monkeypatch, path, stream):
    monkeypatch.setitem(TOOL, "properties", {"a": {"type": "thing"}})
    response = http.post(path, json={**tools_of(path), "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param", "tools") == "tools"
    assert "structured_outputs" not in error["message"]
    assert "thing" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_forced_call_follows_its_schema(http, events, path):
    body = {**tools_of(path), "temperature": 0}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    got = response.json()
    if path == "/v1/chat/completions":
        (choice,) = got["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        deltas = [c["choices"][0]["delta"] for c in events(path, body)[:-1]]
        calls = [d["tool_calls"][0]["function"] for d in deltas if "tool_calls" in d]
        assert calls[0]["name"] == "set_flag"
        assert json.loads("".join(c.get("arguments", "") for c in calls)) == arguments
    elif path == "/v1/messages":
        (block,) = got["content"]
        assert got["stop_reason"] == "tool_use"
        name, arguments = block["name"], block["input"]
        pieces = [e["delta"] for e in events(path, body) if e["type"] == "content_block_delta"]
        assert json.loads("".join(p["partial_json"] for p in pieces)) == arguments
    else:
        (item,) = got["output"]
        assert got["status"] == "completed"
        name, arguments = item["name"], json.loads(item["arguments"])
        last = events(path, body)[-1]["response"]
        assert json.loads(last["output"][0]["arguments"]) == arguments
    assert name == "set_flag"
    assert isinstance(arguments["a"], bool)


ANSWER = {**TOOL, "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
NAMED = {"type": "json_schema", "name": "answer", "schema": ANSWER}
FORMATS = {
    "/v1/chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}},
    },
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}},
    "/v1/responses": {"text": {"format": NAMED}},
}


def text_and_arguments(path, answer):
    """The text of an answer, and the arguments of its call."""
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        return message["content"], *map(json.loads, calls)
    if path == "/v1/messages":
        (block,) = answer["content"]
        return block.get("text"), *([block["input"]] if "input" in block else [])
    (item,) = answer["output"]
    if item["type"] == "message":
        return (item["content"][0]["text"],)
    return None, json.loads(item["arguments"])


@pytest.mark.parametrize("path", FORMATS)
def test_with_a_format_the_model_may_still_call(http, path):
    """Each answer is JSON by the schema, or a call; both occur."""
    body = {name: value for name, value in tools_of(path).items() if name != "tool_choice"}
    texts, calls = 0, 0
    for seed in range(24):
        response = http.post(path, json={**body, **FORMATS[path], "seed": seed, "temperature": 2})
        assert response.status_code == 200, response.text
        text, *arguments = text_and_arguments(path, response.json())
        if arguments:
            assert not text
            assert isinstance(arguments[0]["a"], bool)
            calls += 1
        else:
            assert isinstance(json.loads(text)["b"], bool)
            texts += 1
    assert texts
    assert calls


@pytest.mark.parametrize("path", FORMATS)
def test_a_format_and_a_call_that_must_be_made_exclude_each_other(http, path):
    response = http.post(path, json={**tools_of(path), **FORMATS[path]})
    assert response.status_code == 400
    assert "exclude each other" in response.json()["error"]["message"]


def test_tools_are_not_dropped_where_the_grammar_cannot_hold_them(http, served, monkeypatch):
    path = "/v1/chat/completions"
    body = {name: value for name, value in tools_of(path).items() if name != "tool_choice"}
    asked = {**body, "structured_outputs": {"regex": "a"}}
    response = http.post(path, json=asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert http.post(path, json={**asked, "tool_choice": "none"}).status_code == 200
    config = dataclasses.replace(served.server.config, tool_call_parser="pythonic")
    monkeypatch.setattr(served.server, "config", config)
    assert http.post(path, json={**body, **FORMATS[path]}).status_code == 400

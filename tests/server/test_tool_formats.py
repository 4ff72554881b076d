"""The form of a model's calls, as its chat template shows it."""

import dataclasses
import json

import msgspec
import pytest

from ridgeline.core.request import CompletionChunk, FinishReason, PromptReport
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.server.routes.messages import _conversation
from ridgeline.server.schemas.messages import MessagesRequest
from ridgeline.server.serving import start_notes
from ridgeline.text import ChatTemplate

MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"
QWEN3_CODER = MESSAGES + (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{{ '' if not tools else '<tool_call>\n<function=f>\n<parameter=x>\n' }}"
)
DEEPSEEK = MESSAGES + "{{ '' if not tools else '<｜tool▁calls▁begin｜>' }}"
TOOL = {"type": "object", "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}}
BODY = {
    "messages": [{"role": "user", "content": "the cat"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}],
}
FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in "fg"]
TWO = {
    "/v1/chat/completions": {
        "messages": BODY["messages"],
        "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    },
    "/v1/responses": {
        "input": "the cat",
        "tools": [{"type": "function", **each} for each in FUNCTIONS],
    },
}
CODER_CALL = (
    "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=text>\n5\n</parameter>\n"
    "</function>\n</tool_call>"
)
HERMES_CALL = '<tool_call>{"name": "f", "arguments": {"n": 5, "text": "5"}}</tool_call>'


@pytest.fixture
def model(served, monkeypatch):
    """Gives the engine a chat template, and makes it write a text, a character at a time."""

    def give(template, text):
        asked = []

        async def generate(request):
            asked.append(request)
            for at, char in enumerate(text):
                is_last = at == len(text) - 1
                yield CompletionChunk(
                    request_id=1,
                    index=0,
                    text=char,
                    token_ids=(65,),
                    finish_reason=FinishReason.STOP if is_last else None,
                    prompt=None if at else PromptReport(num_tokens=3, num_cached_tokens=0),
                )

        monkeypatch.setattr(AsyncEngine, "chat_template", ChatTemplate(template))
        monkeypatch.setattr(served.server.engine, "generate", generate)
        return asked

    return give


def answer(http, **body):
    response = http.post("/v1/chat/completions", json={**BODY, **body})
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    calls = message.get("tool_calls") or ()
    return message["content"], [json.loads(call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("template", "text", "is_read"),
    [
        (QWEN3_CODER, CODER_CALL, True),
        (QWEN3_CODER, HERMES_CALL, False),
        (DEEPSEEK, HERMES_CALL, False),
        (MESSAGES, HERMES_CALL, True),
    ],
    ids=["qwen3-coder", "qwen3-coder, other form", "unknown form", "told in words"],
)
def test_calls_are_read_in_the_form_of_the_template(model, http, template, text, is_read):
    model(template, text)
    content, calls = answer(http)
    assert calls == ([{"n": 5, "text": "5"}] if is_read else [])
    assert is_read or content == text


@pytest.mark.parametrize("template", [QWEN3_CODER, DEEPSEEK])
def test_a_forced_call_in_another_form_is_plain_json(model, http, template):
    asked = model(template, '{"name": "f", "arguments": {"n": 5}}')
    assert answer(http, tool_choice="required") == (None, [{"n": 5}])
    assert asked[0].params.structured_outputs.kind == "json"


def test_a_template_that_knows_only_calls_gets_tools_in_words(model, http, served):
    asked = model(MESSAGES + "{{ '' if messages[0].tool_calls }}", HERMES_CALL)
    assert answer(http)[1] == [{"n": 5, "text": "5"}]
    assert "You may call functions" in served.server.tokenizer.decode(asked[0].prompt)


@pytest.mark.parametrize(
    ("template", "parser", "is_said"),
    [
        (DEEPSEEK, "auto", True),
        (DEEPSEEK, "hermes", False),
        (DEEPSEEK, "none", False),
        (QWEN3_CODER, "auto", False),
        (MESSAGES, "auto", False),
    ],
)
def test_an_unknown_form_is_said_at_start(model, served, monkeypatch, template, parser, is_said):
    model(template, "Hi.")
    config = dataclasses.replace(served.server.config, tool_call_parser=parser)
    monkeypatch.setattr(served.server, "config", config)
    assert any("--tool-call-parser" in note for note in start_notes(served.server)) == is_said


@pytest.mark.parametrize("template", [MESSAGES, QWEN3_CODER], ids=["JSON", "its own format"])
def test_arguments_of_a_call_that_must_be_made_are_an_object(model, http, template):
    asked = model(template, '{"name": "f", "arguments": {}}')
    function = {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}
    answer(http, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert '{"type": "object", "properties": {"n": ' in asked[0].params.structured_outputs.source


def allowing(path, mode, name):
    """A request with two tools of which one may be called, as OpenAI's interfaces say so."""
    if path == "/v1/responses":
        some = {"mode": mode, "tools": [{"type": "function", "name": name}]}
        return {**TWO[path], "tool_choice": {"type": "allowed_tools", **some}}
    some = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
    return {**TWO[path], "tool_choice": {"type": "allowed_tools", "allowed_tools": some}}


@pytest.mark.parametrize("path", TWO)
@pytest.mark.parametrize("name", ["f", "g"])
def test_the_model_is_told_of_the_tools_that_it_may_call(model, http, served, path, name):
    asked = model(MESSAGES, HERMES_CALL)
    response = http.post(path, json=allowing(path, "auto", name))
    assert response.status_code == 200, response.text
    prompt = served.server.tokenizer.decode(asked[0].prompt)
    assert [f'"name": "{each}"' in prompt for each in "fg"] == [name == "f", name == "g"]
    assert ("<tool_call>" in response.text) == (name == "g")  # which is not what is called


@pytest.mark.parametrize("path", TWO)
@pytest.mark.parametrize("name", ["f", "g"])
def test_one_of_the_allowed_tools_is_called_where_one_must_be(http, path, name):
    got = http.post(path, json=allowing(path, "required", name)).json()
    any_tool = http.post(path, json=TWO[path] | {"tool_choice": "required"}).json()
    if path == "/v1/responses":
        assert [item["name"] for item in got["output"]] == [name]
        assert got["usage"]["input_tokens"] == any_tool["usage"]["input_tokens"]
    else:
        (call,) = got["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name
        assert got["usage"]["prompt_tokens"] == any_tool["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", TWO)
def test_allowed_tools_are_some_of_the_tools(http, path):
    response = http.post(path, json=allowing(path, "auto", "h"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
    assert "not in tools" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", TWO)
def test_an_allowed_tool_says_its_type(http, path):
    body = allowing(path, "auto", "f")
    choice = body["tool_choice"]
    del choice.get("allowed_tools", choice)["tools"][0]["type"]
    error = http.post(path, json=body).json()["error"]
    assert error["message"].endswith("tools[0].type: this field is required.")


@pytest.mark.parametrize("name", ["f\n", "f g", ""])
def test_a_tool_has_a_name_on_one_line(http, name):
    tool = {"name": name, "input_schema": TOOL}
    message = {"role": "user", "content": "a"}
    response = http.post(
        "/v1/messages", json={"max_tokens": 1, "messages": [message], "tools": [tool]}
    )
    assert response.status_code == 400
    assert "tools[0].name: this must be 1 to 128 letters" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"type": "tool_reference", "tool_name": "f", "text": "a"},
            "tool_reference block has no text",
        ),
        ({"type": "text", "text": "a", "data": "b"}, "text block has no data"),
        ({"type": "text", "text": "a", "data": "b", "name": "c", "source": 1}, "has no data"),
        ({"type": "text", "text": "a", "citations": None, "cache_control": {}}, None),
    ],
)
def test_a_block_has_the_fields_of_its_type(http, block, words):
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [("user", "a"), ("assistant", [use]), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in turns]
    tools = [{"name": "f", "input_schema": TOOL}]
    response = http.post("/v1/messages/count_tokens", json={"messages": messages, "tools": tools})
    assert response.status_code == (200 if words is None else 400), response.text
    if words is not None:
        assert words in response.json()["error"]["message"]


def test_a_deferred_tool_is_told_of_where_a_result_refers_to_it(model, http, served):
    asked = model(MESSAGES, HERMES_CALL)
    tools = [
        {"name": "find", "input_schema": {"type": "object"}},
        {"name": "f", "input_schema": TOOL, "defer_loading": True},
    ]
    body = {"tools": tools, "max_tokens": 8, "messages": [{"role": "user", "content": "the cat"}]}
    use = {"type": "tool_use", "id": "a", "name": "find", "input": {}}
    reference = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    found = body | {"messages": body["messages"] + turns}
    for each in (body, found):
        answer = http.post("/v1/messages", json=each)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["content"]
        assert (call["name"], call["input"]) == ("f", {"n": 5, "text": "5"})
    before, after = [served.server.tokenizer.decode(request.prompt) for request in asked]
    assert after.startswith(before)
    assert ['"name": "f"' in each for each in (before, after)] == [False, True]
    for wrong, words in (
        (found | {"tools": tools[:1]}, "there is no 'f' in tools"),
        (body | {"tools": tools[1:]}, "without defer_loading"),
    ):
        answer = http.post("/v1/messages", json=wrong)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("num_references", [0, 1, 2000])
def test_a_tool_is_told_of_once_and_must_be_called_only_then(num_references):
    reference = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference] * num_references}
    request = {
        "model": "m",
        "max_tokens": 8,
        "tool_choice": {"type": "any"},
        "tools": [
            {"name": "find", "input_schema": {"type": "object"}},
            {"name": "f", "description": "x" * 9000, "input_schema": TOOL, "defer_loading": True},
        ],
        "messages": [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "find", "input": {}}
            ]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    asked = _conversation(msgspec.convert(request, MessagesRequest))
    assert len(json.dumps(asked.messages)) < 20_000
    assert [each.name for each in asked.callable] == ["find", "f"][: 1 + (num_references > 0)]

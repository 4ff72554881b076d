"""What templates are given: ids of calls, and whether the model is to reason."""

import json

import pytest
from tests.text.chat_families import MISTRAL, QWEN3

from ridgeline.server import answers
from ridgeline.server.call_ids import with_template_ids
from ridgeline.text import ChatTemplate

HI = {"role": "user", "content": "the cat"}
PARAMETERS = {"type": "object"}
CALLS = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that are rendered."""
    found, render = [], answers.render

    async def noting(*arguments, **named):
        found.append(await render(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(answers, "render", noting)
    return found


@pytest.fixture
def template(served, monkeypatch):
    """Gives the model another chat template."""

    def use(source):
        made = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
        monkeypatch.setattr(type(served.server.engine), "chat_template", made)

    return use


def posted(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat_loop(http, change):
    body = {"tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]}
    path = "/v1/chat/completions"
    message = posted(http, path, messages=[HI], **body)["choices"][0]["message"]
    for call in message["tool_calls"]:
        call["id"] = change(call["id"])
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{index} it is"}
        for index, call in enumerate(message["tool_calls"])
    ]
    posted(http, path, messages=[HI, message, *results], **body)


def messages_loop(http, change):
    body = {"max_tokens": 64, "tools": [{"name": "f", "input_schema": PARAMETERS}]}
    blocks = posted(http, "/v1/messages", messages=[HI], **body)["content"]
    for block in blocks:
        block["id"] = change(block["id"])
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"{index} it is"}
        for index, block in enumerate(blocks)
    ]
    turns = [HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    posted(http, "/v1/messages", messages=turns, **body)


def responses_loop(http, change):
    body = {"tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}]}
    items = posted(http, "/v1/responses", input="the cat", **body)["output"]
    for item in items:
        item["call_id"] = change(item["call_id"])
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"{index} it is"}
        for index, item in enumerate(items)
    ]
    posted(http, "/v1/responses", input=[HI, *items, *results], **body)


@pytest.mark.parametrize("loop", [chat_loop, messages_loop, responses_loop])
@pytest.mark.parametrize("form", ["{}", "call_{}AbCdEf", "toolu_01-{}", "{}_"])
def test_mistral_reads_the_calls_of_every_interface(says, http, prompts, template, loop, form):
    """Its templates raise where an id has not nine characters."""
    template(MISTRAL)
    says(CALLS)
    loop(http, form.format)
    calls = json.loads(prompts[-1].partition("[TOOL_CALLS] ")[2].partition("</s>")[0])
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    for index, each in enumerate(ids):
        assert f'[TOOL_RESULTS] {{"content": {index} it is, "call_id": "{each}"}}' in prompts[-1]


def test_ids_lose_only_our_own_prefixes():
    ids = ["call_abcdefghi", "toolu_abcdefghi", "abcdefghi", "call_abcdefghij", "functions.f:0"]
    calls = [{"id": each, "function": {"name": "f"}} for each in ids]
    messages = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": ids[0]},
    ]
    first, second = with_template_ids(messages, "{{ messages }}")
    assert [call["id"] for call in first["tool_calls"]] == ["abcdefghi"] * 3 + ids[3:]
    assert second["tool_call_id"] == "abcdefghi"
    assert messages[1]["tool_call_id"] == ids[0], "what was given is not changed"


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_think_only_when_asked(says, http, prompts, template, path, thinking, thinks):
    """Qwen 3's template lets the model think unless it is told not to."""
    template(QWEN3)
    says("Hm.")
    limit = {"max_tokens": 64} if path == "/v1/messages" else {}
    posted(http, path, messages=[HI], **limit, **thinking)
    assert ("</think>" in prompts[-1]) != thinks


@pytest.mark.parametrize(
    ("edits", "kept"),
    [
        ([], "abc"),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], "abc"),  # as Claude Code asks
        ([{"type": "clear_thinking_20251015"}], "c"),
        (
            [
                {
                    "type": "clear_thinking_20251015",
                    "keep": {"type": "thinking_turns", "value": 2},
                }
            ],
            "bc",
        ),
    ],
    ids=str,
)
def test_reasoning_of_earlier_turns_is_cleared(says, http, prompts, template, edits, kept):
    template("{% for m in messages %}{{ m.role[0] }}[{{ m.reasoning_content }}]{% endfor %}")
    says("Hm.")
    turns = [
        turn
        for thought in "abc"
        for turn in (
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"<{thought}>"},
                    {"type": "text", "text": "So."},
                ],
            },
        )
    ]
    managed = {"context_management": {"edits": edits}}
    posted(http, "/v1/messages", messages=[*turns, HI], max_tokens=64, **managed)
    assert [each for each in "abc" if f"<{each}>" in prompts[-1]] == list(kept)

"""What a model writes, as the interfaces tell it; the engine says what a test wants it to say."""

import json

import pytest

INCLUDE = ["message.output_text.logprobs"]


def respond(http, **body):
    response = http.post("/v1/responses", json={"input": "the cat", **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_what_cuts_a_response_cuts_its_last_item(says, http, events):
    says("<think>", "hm", "</think>", "Yes", " and", finish="length")
    whole = respond(http)
    assert whole["status"] == "incomplete"
    statuses = [(item["type"], item["status"]) for item in whole["output"]]
    assert statuses == [("reasoning", "completed"), ("message", "incomplete")]
    found = events("/v1/responses", {"input": "the cat"})
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == statuses
    assert done == found[-1]["response"]["output"]


def test_reasoning_that_takes_all_there_is_is_incomplete(says, http):
    says("<think>", "hm", finish="length")
    (item,) = respond(http)["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


def test_a_tag_that_the_user_writes_opens_no_reasoning(says, http):
    says("A", " tag.")
    body = {"messages": [{"role": "user", "content": "what is <think> about"}]}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == "A tag."
    body["messages"].append({"role": "assistant", "content": "<think>hm"})
    (choice,) = http.post(
        "/v1/chat/completions", json={**body, "continue_final_message": True}
    ).json()["choices"]
    assert choice["message"]["content"] in (None, "")
    assert choice["message"]["reasoning_content"] == "A tag."


def test_no_logprob_of_a_response_is_lost(says, http, events):
    """Of tokens whose text is held back: in the middle, and at the end."""
    says("<think>", "hm", "</think>", "a", "", "b", "", finish="stop")
    (_, message) = respond(http, include=INCLUDE)["output"]
    wanted = message["content"][0]["logprobs"]
    assert [entry["token"] for entry in wanted][-4:] == list("defg")
    found = events("/v1/responses", {"input": "the cat", "include": INCLUDE})
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert [len(e["logprobs"]) for e in deltas][-1] == 2
    (begun,) = [e for e in found if e["type"] == "response.content_part.added"]
    assert begun["part"]["logprobs"] == []
    (done,) = [e for e in found if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == wanted
    assert found[-1]["response"]["output"][1]["content"][0]["logprobs"] == wanted


def test_top_logprobs_of_a_response_are_included(says, http):
    says("a", "b")
    (message,) = respond(http, top_logprobs=2)["output"]
    assert len(message["content"][0]["logprobs"]) == 2


CALL = '<tool_call>{"name": "f", "arguments": {"a": %d}}</tool_call>'
CALLS = [CALL % 1, (CALL % 2)[:20], (CALL % 2)[20:], CALL % 3, CALL % 4]
PARAMETERS = {"type": "object"}
HI = [{"role": "user", "content": "the cat"}]
ASKING = {
    "/v1/chat/completions": {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
        "parallel_tool_calls": False,
    },
    "/v1/responses": {
        "input": "the cat",
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
        "parallel_tool_calls": False,
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 64,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
}


def calls_of(path, answer):
    """The arguments of its calls."""
    if path == "/v1/chat/completions":
        found = answer["choices"][0]["message"]["tool_calls"]
        return [json.loads(call["function"]["arguments"]) for call in found]
    if path == "/v1/responses":
        return [json.loads(item["arguments"]) for item in answer["output"]]
    return [block["input"] for block in answer["content"]]


@pytest.mark.parametrize("path", ASKING)
def test_without_parallel_calls_the_first_one_ends_the_answer(says, http, events, path):
    body = ASKING[path]
    read = says(*CALLS)
    answer = http.post(path, json=body).json()
    assert calls_of(path, answer) == [{"a": 1}]
    assert read == CALLS[:3], "the rest is not generated"
    found = events(path, body)
    if path == "/v1/chat/completions":
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        choices = [chunk["choices"][0] for chunk in found[:-1]]
        calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        assert [each["finish_reason"] for each in choices if each["finish_reason"]] == [
            "tool_calls"
        ]
    elif path == "/v1/responses":
        assert answer["status"] == "completed"
        assert calls_of(path, found[-1]["response"]) == [{"a": 1}]
    else:
        assert answer["stop_reason"] == "tool_use"
        assert [e["type"] for e in found].count("content_block_start") == 1
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
    parallel = {name: body[name] for name in body if "tool_c" not in name}
    answer = http.post(path, json=parallel).json()
    assert calls_of(path, answer) == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}]


def test_each_of_several_answers_ends_at_its_first_call(says, http, events, served):
    says(*CALLS)
    body = {**ASKING["/v1/chat/completions"], "n": 3}
    for choice in http.post("/v1/chat/completions", json=body).json()["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
    chunks = events("/v1/chat/completions", body)[:-1]
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert served.server.limits.running == 0


MIXED = "<think>Hm.</think>First." + CALL % 1 + "\nDone." + CALL % 2 + "\nEnd."
PARTS = [("reasoning", "Hm."), ("text", "First."), ("call", {"a": 1}), ("text", "Done."),
         ("call", {"a": 2}), ("text", "End.")]  # fmt: skip


def response_parts(response):
    found = []
    for item in response["output"]:
        if item["type"] == "function_call":
            found.append(("call", json.loads(item["arguments"])))
        else:
            kind = "text" if item["type"] == "message" else "reasoning"
            found.append((kind, item["content"][0]["text"]))
    return found


def message_parts(message):
    names = {"thinking": ("reasoning", "thinking"), "tool_use": ("call", "input")}
    found = [(*names.get(block["type"], ("text", "text")), block) for block in message["content"]]
    return [(kind, block[name]) for kind, name, block in found]


def streamed_message(found):
    """The message that a stream's blocks and deltas make."""
    content = []
    for each in found:
        if each["type"] == "content_block_start":
            content.append({**each["content_block"], "json": ""})
        elif each["type"] == "content_block_delta":
            block, delta = content[each["index"]], each["delta"]
            into = {"input_json_delta": "json"}.get(delta["type"], block["type"])
            block[into] += delta.get(into, delta.get("partial_json", ""))
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return {"content": content}


def streamed_response(found):
    """The response that a stream's deltas make, its items as they were added."""
    output = []
    for each in found:
        if each["type"] == "response.output_item.added":
            output.append({**each["item"], "arguments": "", "content": [{"text": ""}]})
        elif each["type"] == "response.function_call_arguments.delta":
            output[each["output_index"]]["arguments"] += each["delta"]
        elif each["type"].endswith("_text.delta"):
            output[each["output_index"]]["content"][0]["text"] += each["delta"]
    return {"output": output}


@pytest.mark.parametrize("path", ASKING)
def test_the_order_of_an_answer_is_kept_wherever_its_text_is_cut(says, http, events, path):
    """A chunk may hold the end of a call and the text after it."""
    body = {name: value for name, value in ASKING[path].items() if "tool_c" not in name}
    for cut in range(len(MIXED)):
        says(*(piece for piece in (MIXED[:cut], MIXED[cut:]) if piece))
        whole, found = http.post(path, json=body).json(), events(path, body)
        if path == "/v1/responses":
            assert response_parts(whole) == PARTS, cut
            assert response_parts(streamed_response(found)) == PARTS, cut
            assert response_parts(found[-1]["response"]) == PARTS, cut
        elif path == "/v1/messages":
            assert message_parts(whole) == PARTS, cut
            assert message_parts(streamed_message(found)) == PARTS, cut
        else:
            message = whole["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == ("Hm.", "First.Done.End.")
            assert calls_of(path, whole) == [{"a": 1}, {"a": 2}], cut
            deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
            assert "".join(each.get("content", "") for each in deltas) == "First.Done.End."
            arguments = ["", ""]
            for call in (call for each in deltas for call in each.get("tool_calls", ())):
                arguments[call["index"]] += call["function"].get("arguments", "")
            assert [json.loads(text) for text in arguments] == [{"a": 1}, {"a": 2}], cut

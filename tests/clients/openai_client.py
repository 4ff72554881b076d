"""The openai package, unmodified; run by run.py in an environment of its own.

Prints one JSON object per check on a line of its own.
"""

import json
import os
import sys
import tempfile
import time

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=os.environ.get("CLIENT_KEY", "none"))
MODEL = client.models.list().data[0].id
HI = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["flag", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "set_flag", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "set_flag"}}


def completions():
    settings = {"model": MODEL, "prompt": "import os", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**settings, logprobs=2, echo=True)
    assert whole.choices[0].text.startswith("import os")
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.total_tokens
    usage = {"include_usage": True}
    chunks = list(client.completions.create(**settings, stream=True, stream_options=usage))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert "import os" + text == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def beams():
    settings = {"model": MODEL, "max_tokens": 8, "n": 3}
    wanted = {"use_beam_search": True, "length_penalty": 1.0}
    whole = client.completions.create(**settings, prompt="import os", logprobs=0, extra_body=wanted)
    sums = [sum(choice.logprobs.token_logprobs) for choice in whole.choices]
    lengths = [len(choice.logprobs.token_logprobs) for choice in whole.choices]
    scores = [total / length for total, length in zip(sums, lengths, strict=True)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert whole.usage.completion_tokens == sum(lengths)
    answer = client.chat.completions.create(**settings, messages=HI, extra_body=wanted)
    assert len({choice.message.content for choice in answer.choices}) == 3
    try:
        client.completions.create(**settings, prompt="a", stream=True, extra_body=wanted)
    except BadRequestError as error:
        assert error.param == "stream"
    else:
        raise AssertionError("a beam search was streamed")


def chat():
    whole = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_completion_tokens=8,
        n=2,
        seed=1,
        logprobs=True,
        top_logprobs=2,
    )
    assert len(whole.choices) == 2
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens / 2


def chat_stream():
    settings = {"model": MODEL, "messages": HI, "max_tokens": 200, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    with client.chat.completions.stream(**settings) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text


def tools():
    settings = {"model": MODEL, "messages": HI, "tools": [TOOL], "temperature": 0}
    answer = client.chat.completions.create(**settings, tool_choice=FORCED)
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"flag", "kind"}
    with client.chat.completions.stream(**settings, tool_choice="required") as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "set_flag"
    other = {"type": "function", "function": {"name": "other", "parameters": SCHEMA}}
    for mode in ("auto", "required"):
        some = {"mode": mode, "tools": [{"type": "function", "function": {"name": "other"}}]}
        allowed = client.chat.completions.create(
            model=MODEL, messages=HI, tools=[TOOL, other], max_tokens=100,
            tool_choice={"type": "allowed_tools", "allowed_tools": some},
        )  # fmt: skip
        calls = allowed.choices[0].message.tool_calls or []
        assert len(calls) >= (mode == "required")
        assert all(each.function.name == "other" for each in calls)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    history = [*HI, answer.choices[0].message, result]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=4).choices
    assert client.chat.completions.create(**settings, max_tokens=4).choices  # auto


def structured_output():
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=HI, response_format=wanted)
    assert set(json.loads(answer.choices[0].message.content)) == {"flag", "kind"}
    choice = client.completions.create(
        model=MODEL, prompt="I", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].text in ("yes", "no")


def responses():
    settings = {"model": MODEL, "input": "Hello", "max_output_tokens": 200, "temperature": 0}
    whole = client.responses.create(**settings)
    assert whole.output_text
    with client.responses.stream(**settings) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    tool = {"type": "function", "name": "set_flag", "parameters": SCHEMA, "strict": True}
    called = client.responses.create(
        model=MODEL, input="Hello", tools=[tool], tool_choice="required"
    )
    assert called.output[0].type == "function_call"
    some = {"type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "name": "set_flag"}]}  # fmt: skip
    other = {**tool, "name": "other"}
    chosen = client.responses.create(
        model=MODEL, input="Hello", tools=[other, tool], tool_choice=some
    )
    assert chosen.output[0].name == "set_flag"
    assert chosen.tool_choice.type == "allowed_tools"
    try:
        client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_1")
    except BadRequestError as error:
        assert error.param == "previous_response_id"
    else:
        raise AssertionError("a previous response was accepted")


def embeddings():
    found = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert abs(sum(x * x for x in found.data[0].embedding) - 1) < 1e-4
    assert (
        len(client.embeddings.create(model=MODEL, input="a", dimensions=8).data[0].embedding) == 8
    )


def files_and_batches():
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": HI, "max_tokens": 4},
        }
        for i in range(5)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(map(json.dumps, lines)))
        file.flush()
        with open(file.name, "rb") as content:
            uploaded = client.files.create(file=content, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.completed == 5
    text = client.files.content(batch.output_file_id).text
    assert {json.loads(line)["custom_id"] for line in text.splitlines()} == {
        f"line-{i}" for i in range(5)
    }
    assert batch.id in [each.id for each in client.batches.list()]
    assert client.files.delete(uploaded.id).deleted


def errors():
    for change in ({"temperature": -1}, {"n": 0}, {"max_tokens": -5}):
        try:
            client.chat.completions.create(model=MODEL, messages=HI, **change)
        except BadRequestError as error:
            assert error.param == next(iter(change))
        else:
            raise AssertionError(change)


for check in (
    completions, beams, chat, chat_stream, tools, structured_output, responses, embeddings,
    files_and_batches, errors,
):  # fmt: skip
    try:
        check()
        problem = None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps({"check": check.__name__, "problem": problem}), flush=True)

"""The anthropic package, unmodified; run by run.py in an environment of its own."""

import json
import os
import sys
import time

from anthropic import Anthropic, BadRequestError
from pydantic import BaseModel

client = Anthropic(base_url=sys.argv[1], api_key=os.environ.get("CLIENT_KEY", "none"))
MODEL = client.models.list().data[0].id
HI = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}},
    "required": ["flag"],
    "additionalProperties": False,
}
TOOL = {"name": "set_flag", "description": "Sets a flag.", "input_schema": SCHEMA}
SETTINGS = {"model": MODEL, "messages": HI, "max_tokens": 64}
GREEDY = {"extra_body": {"temperature": 0}}  # this package has no parameter for it any more


def messages():
    message = client.messages.create(**SETTINGS, system="Be brief.", **GREEDY)
    assert message.content[0].type == "text"
    assert message.usage.output_tokens > 0


def stream():
    whole = client.messages.create(**SETTINGS, **GREEDY)
    with client.messages.stream(**SETTINGS, **GREEDY) as found:
        text = "".join(found.text_stream)
        final = found.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason


def tools():
    forced = {"type": "tool", "name": "set_flag"}
    message = client.messages.create(**SETTINGS, tools=[TOOL], tool_choice=forced)
    (call,) = message.content
    assert isinstance(call.input["flag"], bool)
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**SETTINGS, tools=[TOOL], tool_choice={"type": "any"}) as found:
        assert isinstance(found.get_final_message().content[0].input["flag"], bool)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    history = [*HI, {"role": "assistant", "content": message.content},
               {"role": "user", "content": [result]}]  # fmt: skip
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=history, tools=[TOOL])
    assert answer.content


class Flag(BaseModel):
    flag: bool


def structured_output():
    message = client.messages.parse(**SETTINGS, output_format=Flag)
    assert isinstance(message.parsed_output, Flag)


def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=HI)
    usage = client.messages.create(**SETTINGS).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def stop_sequence():
    text = client.messages.create(**SETTINGS, **GREEDY).content[0].text
    stop = text[5:7]
    message = client.messages.create(**SETTINGS, stop_sequences=[stop], **GREEDY)
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop


def batches():
    requests = [
        {"custom_id": "well", "params": SETTINGS},
        {"custom_id": "badly", "params": {**SETTINGS, "max_tokens": -1}},
    ]
    batch = client.messages.batches.create(requests=requests)
    while batch.processing_status != "ended":
        time.sleep(0.1)
        batch = client.messages.batches.retrieve(batch.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    results = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert results["well"].message.content[0].type == "text"
    assert results["badly"].error.error.type == "invalid_request_error"
    early = client.messages.batches.create(requests=requests[:1])
    client.messages.batches.cancel(early.id)
    while (early := client.messages.batches.retrieve(early.id)).processing_status != "ended":
        time.sleep(0.1)
    (result,) = client.messages.batches.results(early.id)
    assert result.result.type in ("canceled", "succeeded")
    assert [each.id for each in client.messages.batches.list(limit=1)] == [early.id, batch.id]
    for each in (early, batch):
        assert client.messages.batches.delete(each.id).type == "message_batch_deleted"


def errors():
    try:
        client.messages.create(**SETTINGS, extra_body={"temperature": -1})
    except BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a temperature below zero was accepted")


for check in (
    messages, stream, tools, structured_output, count_tokens, stop_sequence, batches, errors,
):  # fmt: skip
    try:
        check()
        problem = None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps({"check": check.__name__, "problem": problem}), flush=True)

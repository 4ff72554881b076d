"""What a model writes, as the interfaces tell it; the engine says what a test wants it to say."""

import dataclasses
import itertools

import pytest

from ridgeline.core.request import CompletionChunk, FinishReason, PromptReport
from ridgeline.core.result import TokenLogprobs

INCLUDE = ["message.output_text.logprobs"]


@pytest.fixture
def says(served, monkeypatch):
    """Makes the engine write these pieces, each a token (a, b, c, …), in every output.

    Returns the list of those that were read.
    """
    server = served.server
    monkeypatch.setattr(
        server, "config", dataclasses.replace(server.config, reasoning_parser="think")
    )

    def script(*pieces, finish="stop"):
        read = []

        async def generate(request):
            for number, index in itertools.product(range(len(pieces)), range(request.params.n)):
                token = 65 + number
                entry = TokenLogprobs(token_id=token, logprob=-1.0, rank=1, top=())
                is_last = number == len(pieces) - 1
                report = PromptReport(num_tokens=3, num_cached_tokens=0)
                read.append(pieces[number])
                yield CompletionChunk(
                    request_id=1,
                    index=index,
                    text=pieces[number],
                    token_ids=(token,),
                    logprobs=() if request.params.logprobs is None else (entry,),
                    finish_reason=FinishReason(finish) if is_last else None,
                    prompt=report if number == index == 0 else None,
                )

        monkeypatch.setattr(server.engine, "generate", generate)
        return read

    return script


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


def test_no_logprob_of_a_response_is_lost(says, http, events):
    """Of tokens whose text is held back: in the middle, and at the end."""
    says("<think>", "hm", "</think>", "a", "", "b", "", finish="stop")
    (_, message) = respond(http, include=INCLUDE)["output"]
    wanted = message["content"][0]["logprobs"]
    assert [entry["token"] for entry in wanted][-4:] == list("defg")
    found = events("/v1/responses", {"input": "the cat", "include": INCLUDE})
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert [len(e["logprobs"]) for e in deltas][-1] == 2
    (done,) = [e for e in found if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == wanted
    assert found[-1]["response"]["output"][1]["content"][0]["logprobs"] == wanted

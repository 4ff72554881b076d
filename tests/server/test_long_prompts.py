"""A prompt that cannot fit is refused unread, and one that is read holds nobody back."""

import asyncio
import itertools
import json
import threading
import time

import pytest

from ridgeline.server import endpoint
from ridgeline.server.context import Call
from ridgeline.server.conversation import call_input
from ridgeline.server.jobs.lines import BatchLine, LinePlace, run_line
from ridgeline.server.keys import Caller
from ridgeline.server.routes import chat, messages, responses
from ridgeline.text import Tokenizer

LONG = "a" * 500_000
TURNS = [{"role": "user", "content": LONG}]
ROUTES = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/embeddings": {"input": LONG},
    "/tokenize": {"prompt": LONG},
}
LISTS = {
    "/v1/completions": {"prompt": ["the cat", LONG]},
    "/v1/embeddings": {"input": ["the cat", LONG]},
    "/tokenize": {"messages": TURNS},
}
CASES = [*ROUTES.items(), *LISTS.items()]


@pytest.fixture
def tokenized(monkeypatch):
    """The lengths of the texts that are tokenized from now on."""
    lengths = []

    def count(name):
        encode = getattr(Tokenizer, name)

        def counted(self, text, *arguments, **settings):
            lengths.append(len(text))
            return encode(self, text, *arguments, **settings)

        monkeypatch.setattr(Tokenizer, name, counted)

    count("encode")
    count("encode_cut")
    return lengths


@pytest.mark.parametrize(("path", "body"), CASES)
def test_what_cannot_fit_is_refused_without_tokenizing_it(http, tokenized, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert "500" in response.json()["error"]["message"]
    assert "2048, output included" in response.json()["error"]["message"]
    assert max(tokenized, default=0) < len(LONG)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_nor_is_a_line_of_a_batch_tokenized(served, tokenized, path):
    line = BatchLine(custom_id="a", method="POST", url=path, body=json.dumps(ROUTES[path]).encode())
    place = LinePlace(number=1, offset=0, size=0, custom_id="a")
    result = served.on_loop(run_line(served.server, Caller(tenant="local"), place, line))
    assert json.loads(result.body)["response"]["status_code"] == 400
    assert not tokenized


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_what_is_to_be_truncated_is_read(http, tokenized, path):
    limit = {} if path == "/v1/embeddings" else {"max_tokens": 1}
    body = {**ROUTES[path], **limit, "truncate_prompt_tokens": 5}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == 5
    assert max(tokenized) >= len(LONG)


def test_a_list_of_too_many_token_ids_is_refused_before_each_is_looked_at(http, served):
    wrong = [served.server.engine.spec.vocab_size] * 3000
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        error = http.post(path, json={field: wrong}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "3000 tokens" in error["message"]


@pytest.mark.parametrize("value", ["the cat " * 1000, ["the cat"] * 2048, [7] * 4000, [[7] * 4000]])
def test_prompts_that_take_time_are_read_off_the_event_loop(served, monkeypatch, value):
    from ridgeline.server import prompts

    threads, split = [], prompts.split_prompts

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return split(*arguments)

    monkeypatch.setattr(prompts, "split_prompts", noted)
    served.on_loop(prompts.tokenize(served.server, value, is_cut=True))
    assert threads[0].startswith("ridgeline-text")


def test_one_long_text_leaves_a_thread_to_the_others(served):
    server, blocked = served.server, threading.Event()

    async def both():
        long = [
            asyncio.create_task(server.in_thread(blocked.wait, 20, num_chars=1 << 20))
            for _ in range(4)
        ]
        try:
            return await asyncio.wait_for(server.in_thread(lambda: "done"), 10)
        finally:
            blocked.set()
            await asyncio.gather(*long)

    assert served.on_loop(both()) == "done"


def test_a_body_is_decoded_while_long_texts_are_tokenized(served):
    server, blocked = served.server, threading.Event()
    call = Call(server=server, request_id="r", caller=None, body_bytes=1 << 20)

    async def both():
        long = asyncio.create_task(server.in_thread(blocked.wait, 20, num_chars=1 << 20))
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(call.read(lambda: "read"), 10)
        finally:
            blocked.set()
            await long

    assert served.on_loop(both()) == "read"


def _largest_gap_s(client, while_open):
    """The longest silence within a stream, during which ``while_open`` is called once."""
    body = {"prompt": "the cat", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    times, helper = [], threading.Thread(target=while_open)
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                if len(times) == 20:
                    helper.start()
    helper.join()
    return max(after - before for before, after in itertools.pairwise(times))


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_goes_on_beside_a_prompt_of_two_megabytes(http, served, path):
    """Tokenizing that with the interpreter's lock held would be a silence of some seconds."""
    text = "hello the world of token " * 80_000
    body = (
        {"prompt": text}
        if "chat" not in path
        else {"messages": [{"role": "user", "content": text}]}
    )
    statuses = []

    def large():
        with served.client() as other:
            answer = other.post(path, json={**body, "max_tokens": 1, "truncate_prompt_tokens": 5})
            statuses.append(answer.status_code)

    assert _largest_gap_s(http, large) < 1.5
    assert statuses == [200]


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("/v1/chat/completions", chat),
        ("/v1/messages/count_tokens", messages),
        ("/v1/responses/input_tokens", responses),
    ],
)
def test_a_long_body_is_read_beside_the_event_loop(http, monkeypatch, path, module):
    """120,000 earlier calls held it up for 0.9 s."""
    threads = []

    def noted(function):
        def call(*arguments):
            threads.append(threading.current_thread().name)
            return function(*arguments)

        return call

    name = "conversation_of" if module is chat else "_conversation"
    monkeypatch.setattr(module, name, noted(getattr(module, name)))
    monkeypatch.setattr(endpoint, "decode_request", noted(endpoint.decode_request))
    key = "input" if module is responses else "messages"
    for size, beside in ((10, False), (100_000, True)):
        body = {key: [{"role": "user", "content": "a" * size}]}
        http.post(path, json=body | ({"max_tokens": 1} if module is chat else {}))
        assert len(threads) == 2
        assert all(each.startswith("ridgeline-") == beside for each in threads), threads
        threads.clear()


def test_arguments_that_are_longer_than_any_context_stay_text():
    for length, kind in ((1 << 10, dict), (1 << 21, str)):
        text = json.dumps({"a": "b" * length})
        assert isinstance(call_input(None, "f", text)["function"]["arguments"], kind)

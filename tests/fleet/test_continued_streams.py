"""A stream that is cut after any event goes on in another server with the events that were missing.

The servers are one here: that nothing else of it is used is what `test_router` shows.
"""

import hashlib
import json
import re

import pytest
from tests.fleet.conftest import KEY
from tests.fleet.reading import read, without_identity
from tests.server.running import running

from ridgeline.fleet.stream_log import StreamLog
from ridgeline.server.continuation import (
    HAND_OVER,
    HANDED_OVER,
    MARK,
    ROUTER_KEY,
    STATE_BYTES,
    STREAM_SEED,
    router_token,
)
from ridgeline.server.replies import encode

HEADERS = {ROUTER_KEY: router_token(KEY), STREAM_SEED: b"7", b"content-type": b"application/json"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
USAGE = {"stream_options": {"include_usage": True}}
ASKED = {
    "sampled, several, logprobs": (
        "/v1/completions",
        {"prompt": ["the cat", "a mat"], "n": 2, "logprobs": 1, "echo": True, "max_tokens": 6},
    ),
    "penalties": (
        "/v1/completions",
        {"prompt": "the mat", "frequency_penalty": 1.0, "repetition_penalty": 1.2, "seed": 4}
        | {"max_tokens": 12}
        | USAGE,
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the cat"}], "n": 2, "max_tokens": 8}
        | {"logprobs": True, "return_token_ids": True}
        | USAGE,
    ),
    "tool": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 60}
        | {"tool_choice": "required", "temperature": 0},
    ),
}


@pytest.fixture(scope="module")
def served(roomy_folder, tmp_path_factory, key_file):
    data_dir = tmp_path_factory.mktemp("data")
    engine = {"executor": "cpu", "block_tokens": 16, "decode_replay_s": 0.0}
    with running(
        roomy_folder, data_dir=data_dir, router_key_file=str(key_file), engine=engine
    ) as server:
        yield server


@pytest.fixture(scope="module")
def http(served):
    with served.client() as client:
        yield client


def events(http, path, body, headers=HEADERS):
    response = http.post(path, content=body, headers=headers)
    assert response.status_code == 200, response.text
    return [each + b"\n\n" for each in response.content.split(b"\n\n")[:-1]]


def shown(parts):
    """What a client gets."""
    return re.sub(rb"^%b.*\n" % MARK, b"", b"".join(parts), flags=re.MULTILINE)


@pytest.mark.parametrize("name", ASKED)
def test_after_any_event(http, name):
    path, fields = ASKED[name]
    body = json.dumps(fields | {"stream": True}).encode()
    whole = events(http, path, body)
    expected = read(shown(whole))
    assert ("call 0" in str(expected)) == (name == "tool")
    assert len(whole) > 2
    for cut in range(1, len(whole)):
        log = StreamLog()
        given = b"".join(log.take(each) for each in whole[:cut])
        assert given == shown(whole[:cut])
        if log.lacks_only_the_end:
            assert whole[cut:] == [b"data: [DONE]\n\n"]
            continue
        state = encode(log.state())
        rest = events(http, path, state + body, HEADERS | {STATE_BYTES: str(len(state)).encode()})
        assert read(given + shown(rest)) == expected


@pytest.mark.parametrize("name", ASKED)
def test_a_stream_is_handed_over_once_every_output_has_begun(http, name):
    path, fields = ASKED[name]
    body = json.dumps(fields | {"stream": True}).encode()
    expected = without_identity(read(shown(events(http, path, body))))
    for _ in range(20):  # it may be over before anybody looks
        begun = b"".join(events(http, path, body, HEADERS | {HAND_OVER: b"1"}))
        if begun.endswith(HANDED_OVER):
            break
        assert without_identity(read(shown([begun]))) == expected
    assert begun.endswith(HANDED_OVER)
    log = StreamLog()
    given = log.take(begun + b":\n\n")  # a ping may follow
    assert log.is_handed_over
    assert HANDED_OVER not in given
    assert not log.is_done
    tokens = [len(choice.token_ids) for choice in log.state().choices.values()]
    assert any(count < fields["max_tokens"] for count in tokens)
    state = encode(log.state())
    rest = events(http, path, state + body, HEADERS | {STATE_BYTES: str(len(state)).encode()})
    assert without_identity(read(given + shown(rest))) == expected


def test_a_prompt_counts_towards_a_keys_limit_where_its_stream_began(
    roomy_folder, tmp_path, key_file
):
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"a").hexdigest()
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{digest}"\ninput_tokens_per_minute = 3\n')
    path, body = "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}
    settings = {"router_key_file": str(key_file), "api_key_file": str(keys)}
    with (
        running(roomy_folder, data_dir=tmp_path / "data", **settings) as server,
        server.client(headers={"authorization": "Bearer a"}) as http,
    ):
        asked = json.dumps(body | {"ignore_eos": True}).encode()
        whole = events(http, path, asked)
        assert http.post(path, content=asked, headers=HEADERS).status_code == 429
        log = StreamLog()
        given = b"".join(log.take(each) for each in whole[:2])
        state = encode(log.state())
        sizes = {STATE_BYTES: str(len(state)).encode()}
        rest = events(http, path, state + asked, HEADERS | sizes)
        assert read(given + shown(rest)) == read(shown(whole))


def test_what_ends_with_its_first_token_is_not_handed_over(http):
    body = json.dumps({"prompt": "the cat", "max_tokens": 1, "stream": True}).encode()
    whole = shown(events(http, "/v1/completions", body, HEADERS | {HAND_OVER: b"1"}))
    assert read(whole)["choices"][0]["finish_reason"] == "length"


def test_half_events_are_held_back_and_errors_taken_out():
    log = StreamLog()
    first = MARK + b'0 5\ndata: {"id":"a","created":3,"choices":[{"index":0}]}\n\n'
    second = MARK + b'0 6,7\ndata: {"id":"a","created":3,"choices":[{"index":0}]}\n\n'
    assert log.take(first + second[:30]) == first.split(b"\n", 1)[1]
    assert log.take(second[30:] + b'data: {"error":{}}\n\n') == second.split(b"\n", 1)[1]
    assert log.error == b'data: {"error":{}}\n\n'
    state = log.state()
    assert (state.id, state.created, state.choices[0].token_ids) == ("a", 3, [5, 6, 7])
    log.drop_half()
    with pytest.raises(ValueError, match="no end"):
        log.take(b"x" * (5 << 20))


def test_the_text_of_an_answer_is_no_mark():
    log = StreamLog()
    event = b'data: {"id":"a","choices":[{"index":0,"text":"' + MARK + b'0 5"}]}\n\n'
    assert log.take(event) == event
    assert log.num_marks == 0
    assert not log.state().choices
    assert log.take(MARK + b"0 5\n" + event) == event
    assert log.num_marks == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({STREAM_SEED: b"7"}, 403),
        ({ROUTER_KEY: b"guessed"}, 403),
        (HEADERS | {STATE_BYTES: b"5"}, 400),
        (HEADERS | {STREAM_SEED: b"-1"}, 400),
        (HEADERS | {HAND_OVER: b"2"}, 400),
        (HEADERS | {HAND_OVER: b"1", STATE_BYTES: b"5"}, 400),
    ],
)
def test_nobody_else_may(http, headers, status):
    body = b'{"prompt":"a","max_tokens":1}'
    assert http.post("/v1/completions", content=body, headers=headers).status_code == status


def test_only_what_fits_goes_on(http):
    state = encode({"id": "x", "created": 1, "choices": {"3": {"token_ids": [5]}}})
    headers = HEADERS | {STATE_BYTES: str(len(state)).encode()}
    body = state + b'{"prompt":"a","max_tokens":4,"stream":true}'
    answer = http.post("/v1/completions", content=body, headers=headers)
    assert (answer.status_code, "not such choices" in answer.text) == (400, True)
    answer = http.post("/v1/embeddings", content=state + b'{"input":"a"}', headers=headers)
    assert (answer.status_code, "go on elsewhere" in answer.text) == (400, True)

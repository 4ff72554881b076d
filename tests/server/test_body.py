"""The bounds of a JSON body, told without decoding it."""

import asyncio
import json
import random
import time

import msgspec
import pytest

from ridgeline.server import body as bodies
from ridgeline.server.body import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_PARTS,
    ClientDisconnectedError,
    declared_length,
    decode_body,
    decode_request,
    read_body,
)
from ridgeline.server.errors import ApiError
from ridgeline.server.schemas.batches import MessageBatchRequest
from ridgeline.server.schemas.chat import ChatRequest

ANYTHING = msgspec.json.Decoder()
TEXT = '[]{}"\\a\n\u00e9'


def nested(generator, depth=0):
    kind = generator.random()
    if depth > 6 or kind < 0.4:
        return "".join(generator.choice(TEXT) for _ in range(generator.randrange(8)))
    if kind < 0.7:
        return [nested(generator, depth + 1) for _ in range(generator.randrange(4))]
    return {nested(generator, 9): nested(generator, depth + 1) for _ in range(3)}


def depth_of(value):
    if isinstance(value, str):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0)


def test_a_declared_length_is_a_number_within_the_limit():
    assert declared_length({}, 10) is None
    assert [declared_length({b"content-length": text}, 10) for text in (b"0", b"10")] == [0, 10]
    for text, status in ((b"11", 413), (b"-1", 400), (b"ten", 400), (b"1" * 19, 400), (b"", 400)):
        with pytest.raises(ApiError) as refused:
            declared_length({b"content-length": text}, 10)
        assert refused.value.status == status


def test_a_body_is_read_up_to_its_limit():
    def read(*pieces):
        messages = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, 1)
        ]
        told = []

        async def receive():
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        return asyncio.run(read_body(receive, limit=10, on_bytes=told.append)), told

    assert read(b"12345", b"", b"67890") == (b"1234567890", [5, 0, 5])
    assert read(b"") == (b"", [0])
    for pieces in ((b"1" * 11,), (b"123456", b"78901"), (b"12345", b"67890", b"1")):
        with pytest.raises(ApiError) as refused:
            read(*pieces)
        assert refused.value.status == 413
    with pytest.raises(ClientDisconnectedError):
        read()


def test_depth_is_that_of_the_decoded_value(monkeypatch):
    generator = random.Random(1)
    monkeypatch.setattr(bodies, "MAX_DEPTH", 3)
    refused = 0
    for _ in range(2000):
        monkeypatch.setattr(bodies, "_BLOCK", generator.choice((1, 2, 3, 7, 1000)))
        value = nested(generator)
        try:
            assert decode_body(ANYTHING, json.dumps(value).encode()) == value
        except ApiError:
            refused += 1
            assert depth_of(value) > 3
        else:
            assert depth_of(value) <= 3
    assert 100 < refused < 1900


def test_the_bounds_themselves():
    for depth, ok in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        body = b"[" * depth + b"]" * depth
        if ok:
            decode_body(ANYTHING, body)
        else:
            with pytest.raises(ApiError, match="levels deep"):
                decode_body(ANYTHING, body)
    decode_body(ANYTHING, b"[" + b"[]," * (MAX_PARTS - 2) + b"[]]")
    fields = [b'"%d":0' % number for number in range(MAX_PARTS)]
    decode_body(ANYTHING, b"{" + b",".join(fields[1:]) + b"}")
    for body in (b"[" + b"[]," * MAX_PARTS + b"[]]", b"{" + b",".join(fields) + b"}"):
        with pytest.raises(ApiError, match="arrays, objects and fields"):
            decode_body(ANYTHING, body)
    decode_body(ANYTHING, b"[" + b"0," * (MAX_ELEMENTS - 1) + b"0]")
    with pytest.raises(ApiError, match="500,000 commas"):
        decode_body(ANYTHING, b"[" + b"0," * MAX_ELEMENTS + b"0]")
    text = ":,[{" * MAX_ELEMENTS
    assert decode_body(ANYTHING, json.dumps([text]).encode()) == [text]


def test_a_batch_of_messages_has_as_many_as_may_be():
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    message = {"model": "m", "max_tokens": 1, "temperature": 0, "system": "b", "messages": turns}
    lines = [{"custom_id": f"line-{number}", "params": message} for number in range(50_000)]
    decoder = msgspec.json.Decoder(MessageBatchRequest)
    assert len(decode_body(decoder, json.dumps({"requests": lines}).encode()).requests) == 50_000


@pytest.mark.parametrize("number", [b"1e300", b"-1.7976931348623157E+308", b"1e-0310"])
def test_numbers_that_take_long_to_read_are_few(number):
    """100,000 of them held the interpreter for a second, and strings may have any."""
    few = b"[" + number + (b"," + number) * 999 + b"]"
    assert len(decode_body(ANYTHING, few)) == 1000
    with pytest.raises(ApiError, match="more than 1,000 numbers with exponents"):
        decode_body(ANYTHING, few[:-1] + b"," + number + b"]")
    text = b'{"a":"\\"' + number * 2000 + b'","b":[1e12,"\\\\"]}'
    assert decode_body(ANYTHING, text)["b"] == [1e12, "\\"]


@pytest.mark.parametrize(
    "piece", [b"[],", b'{"":[]},', b'"[",', b'["]"],', b"0,", b'"":0,', b'"\\"[",']
)
def test_a_large_body_takes_the_processor_for_little_time(piece):
    """Once 5.5 s for 16 MiB of empty lists, in which nobody else was served."""
    size = 16 << 20
    began = time.process_time()
    try:
        decode_body(ANYTHING, b"[" + piece * (size // len(piece)) + b"0]")
    except ApiError as error:
        assert "The JSON " in error.message
    assert time.process_time() - began < 3


ODD_NAMES = ["a.b", "a[0]", "[", ".", "x" * 100, "`", "messages[0].role", "é\n"]


def test_unknown_fields_are_left_out_whatever_they_are_called():
    decoder = msgspec.json.Decoder(ChatRequest)
    message = {"role": "user", "content": [{"type": "text", "text": "a", "a.b[1]": 1}] * 2}
    known = {"messages": [message] * 2, "max_tokens": 4, "tool_choice": "auto"}
    body = json.dumps({**known, **{name: {"messages": 1} for name in ODD_NAMES}}).encode()
    found, ignored = decode_request(decoder, body, "ignore")
    assert ignored == ["messages[...].content[...].a.b[1]", *ODD_NAMES]
    for part in message["content"]:
        part.pop("a.b[1]", None)
    assert found == decode_body(decoder, json.dumps(known).encode())
    with pytest.raises(ApiError, match="not known"):
        decode_request(decoder, body, "refuse")
    wrong = json.dumps({**known, "a.b": 1, "max_tokens": "four"}).encode()
    with pytest.raises(ApiError, match="max_tokens"):
        decode_request(decoder, wrong, "ignore")


def test_many_unknown_fields_are_left_out_in_one_pass():
    """Once the body was decoded again for each kind of them, and from the 33rd on refused."""
    fields = {f"field{number}": 1 for number in range(2000)}
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    began = time.process_time()
    _, ignored = decode_request(msgspec.json.Decoder(ChatRequest), body, "ignore")
    assert ignored == list(fields)
    assert time.process_time() - began < 2


def test_a_value_that_speaks_of_unknown_fields_is_no_unknown_field():
    body = b'{"messages": [{"role": "user"}], "response_format": {"type": "unknown field `x`"}}'
    with pytest.raises(ApiError) as refused:
        decode_body(msgspec.json.Decoder(ChatRequest), body)
    assert refused.value.code != "unknown_field"


def test_an_error_names_the_field_at_fault():
    message = {"role": "user", "content": "a"}
    decoder = msgspec.json.Decoder(ChatRequest)
    for value, param, code, text in (
        ({}, "messages", "missing_field", "messages: this field is required."),
        ({"messages": [{}]}, "messages[0].role", "missing_field", "this field is required."),
        ({"messages": [message], "max_tokens": "4"}, "max_tokens", None, "max_tokens: expected"),
        ({"messages": [message | {"x": 1}]}, "messages[0].x", "unknown_field", "not known"),
        ({"messages": [message], "bad_words": 1}, "bad_words", "unknown_field", "a logit_bias of"),
        ({"messages": [message | {"bad_words": 1}]}, "messages[0].bad_words", "unknown_field", ""),
        ([], None, None, "The body: expected"),
    ):
        with pytest.raises(ApiError) as refused:
            decode_body(decoder, json.dumps(value).encode())
        assert (refused.value.param, refused.value.code) == (param, code)
        assert text in refused.value.message

"""What the process that tries grammars answers, without the process."""

import io
import json
import signal

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from ridgeline.decoding.grammars.check_worker import Bytes, serve, tried
from ridgeline.decoding.grammars.checker import GrammarChecker


def test_tokens_are_the_bytes_the_end_and_the_special_ones():
    tokens = Bytes(["<a>", "<b>"])
    assert tokens.tokens[:256] == [bytes([value]) for value in range(256)]
    assert tokens.tokens[256:] == [b"</s>", b"<a>", b"<b>"]
    assert tokens.special_token_ids == [256, 257, 258]
    assert tokens.eos_token_id == 256
    assert GrammarChecker(["<a>", "<b>"], {}).special == {"<a>": 257, "<b>": 258}
    assert tokens(b"ab") == [97, 98]


def test_a_grammar_is_tried_over_its_first_tokens_special_ones_included():
    vocabulary = LLTokenizer(TokenizerWrapper(Bytes(["<a>", "<b>"])))
    for good in ('start: "a" <[258]> "b"', "start: /(ab)*/", 'start: ""'):
        problem, num_bytes = tried(vocabulary, good, LLParserLimits())
        assert problem == "" and (num_bytes is None or abs(num_bytes) < 2**20)
    for bad in ("start: <[259]>", "start: nowhere", "start: /a/ &"):
        assert tried(vocabulary, bad, LLParserLimits())[0]
    rows = LLParserLimits(step_max_items=1)
    assert tried(vocabulary, 'start: "a" x* "b"\nx: "c" | "d" x | x "e"', rows)[0]


def test_each_request_is_answered_in_turn_until_the_last():
    def frame(grammar):
        asked = {"special": ["<a>"], "limits": {}, "grammar": grammar}
        data = json.dumps(asked).encode()
        return len(data).to_bytes(4, "little") + data

    grammars = ["start: /a+/", "start: nowhere", "start: <[257]>"]
    replies = io.BytesIO()
    serve(io.BytesIO(b"".join(map(frame, grammars)) + b"\0\0"), replies, cpu_seconds=100.0)
    data, problems = replies.getvalue(), []
    while data:
        size = int.from_bytes(data[:4], "little")
        problems.append(json.loads(data[4 : 4 + size])["problem"])
        data = data[4 + size :]
    assert [bool(each) for each in problems] == [False, True, False]
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)

"""Reasoning and tool calls in text: what they are, and that the cut into pieces plays no part."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.output import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Content,
    Reasoning,
    ToolArguments,
    ToolCall,
    choose_reasoning_parser,
    choose_tool_parser,
    output_parser,
)

NAMES = ("get_weather", "add", "f")
ARGUMENTS = {"city": 'Zürich "old\\town"', "n": -1.5, "deep": {"a": [1, {"b": "}]"}]}, "e": None}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
CALL_2 = '{"parameters": {"a": 1, "b": 2}, "name": "add"}'
EXPECTED = [("get_weather", ARGUMENTS), ("add", {"a": 1, "b": 2})]


def run(text, cuts=(), *, tool=None, reasoning=None, names=NAMES, **of_prompt):
    """The outcome of a text that arrives in pieces: reasoning, content, calls."""
    parser = output_parser(
        tool_parser=tool, reasoning_parser=reasoning, names=names, **{"prompt": "", **of_prompt}
    )
    events = []
    for start, stop in pairwise([0, *sorted(min(c, len(text)) for c in cuts), len(text)]):
        events += parser.push(text[start:stop])
    events += parser.finish()
    reasoning_text = "".join(e.text for e in events if isinstance(e, Reasoning))
    content = "".join(e.text for e in events if isinstance(e, Content))
    calls = [[e.name, ""] for e in events if isinstance(e, ToolCall)]
    for event in events:
        if isinstance(event, ToolArguments):
            calls[event.index][1] += event.text
    return reasoning_text, content, [tuple(call) for call in calls]


def decoded(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


WELL_FORMED = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL_2}\n</tool_call>",
    "llama3_json": f"<|python_tag|>{CALL}; {CALL_2}",
    "mistral": f"[TOOL_CALLS] [{CALL}, {CALL_2}]",
    "json": f"[{CALL},\n {CALL_2}]",
    "pythonic": "[get_weather(city='Zürich \"old\\\\town\"', n=-1.5, "
    "deep={'a': [1, {'b': '}]'}]}, e=None), add(a=1, b=2)]",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{json.dumps(ARGUMENTS)}<|call|><|start|>assistant<|channel|>commentary to=functions.add"
    '<|message|>{"a": 1, "b": 2}<|call|>',
}


@pytest.mark.parametrize("tool", WELL_FORMED)
def test_two_calls_are_found(tool):
    assert decoded(run(WELL_FORMED[tool], tool=tool)[2]) == EXPECTED
    assert run(WELL_FORMED[tool], tool=tool)[:2] == ("", "")


@pytest.mark.parametrize("tool", WELL_FORMED)
def test_arguments_stream(tool):
    """The first piece of the arguments is out before the call's text is complete."""
    parser = output_parser(tool_parser=tool, reasoning_parser=None, names=NAMES, prompt="")
    text = WELL_FORMED[tool]
    first = next(
        i
        for i, char in enumerate(text)
        if any(isinstance(event, ToolArguments) for event in parser.push(char))
    )
    assert first < text.index("deep")


FRAGMENTS = [
    *WELL_FORMED.values(), CALL, CALL_2, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]",
    "add[ARGS]", '{"a": 1}', "<think>", "</think>", "\n", " ", "[", "]", "{", "}", '"', "\\",
    "Sure: ", "ü", '{"name": "Bob"}', "f(", "f(x=[1, 2], y='a')", ")", ",", "<|channel|>",
    "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", "<", "|", "get_weather",
    '{"name": "f"', '"arguments": ', '"{\\"x\\": 1}"', "null", "[f(__import__('os'))]", "3e5",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=8).map("".join)


@pytest.mark.parametrize("tool", [None, *TOOL_PARSERS])
@pytest.mark.parametrize("reasoning", [None, "think", "harmony"])
@given(text=texts, cuts=st.lists(st.integers(0, 300), max_size=12), opened=st.booleans())
def test_pieces_do_not_matter(tool, reasoning, text, cuts, opened):
    settings = {"tool": tool, "reasoning": reasoning, "prompt": "<think>" if opened else ""}
    whole = run(text, **settings)
    assert run(text, cuts, **settings) == whole
    assert run(text, range(len(text)), **settings) == whole


@pytest.mark.parametrize("tool", [None, "hermes", "llama3_json", "json", "pythonic", "mistral"])
@given(text=st.text(max_size=40))
def test_text_without_calls_is_content(tool, text):
    assert run(text, tool=tool) == ("", text, [])


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"answer": [1, 2, 3]}'),
        ("hermes", 'Use <tool_call>{"name": "unknown", "arguments": {}}</tool_call> so.'),
        ("hermes", "a <tool_call> is a tag"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[get_weather]"),
    ],
)
def test_what_only_looks_like_a_call_is_content(tool, text):
    assert run(text, tool=tool) == ("", text, [])


def test_content_around_calls():
    text = f"Let me see.\n<tool_call>{CALL}</tool_call>\n\nDone."
    assert run(text, tool="hermes")[1] == "Let me see.Done."


def test_later_mistral_form():
    text = '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}'
    assert decoded(run(text, tool="mistral")[2]) == [("add", {"a": 1}), ("f", {})]


@pytest.mark.parametrize(
    "call",
    [
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '{"id": 7, "name": "f", "parameters": {"x": 1}, "done": true}',
    ],
)
def test_spellings_of_a_call(call):
    assert decoded(run(call, tool="json")[2]) == [("f", {"x": 1})]


def test_a_call_without_arguments_has_an_empty_object():
    assert run('{"name": "f"}', tool="json")[2] == [("f", "{}")]


def test_a_call_that_is_cut_short_keeps_what_there_is():
    text = '<tool_call>{"name": "f", "arguments": {"x": "lo'
    assert run(text, tool="hermes") == ("", "", [("f", '{"x": "lo')])


@pytest.mark.parametrize("value", ["__import__('os')", "open('x')", "[].append", "1 if 1 else 2"])
def test_pythonic_arguments_are_never_run(value):
    assert run(f"[f(x={value})]", tool="pythonic")[2] == [("f", "{")]


@pytest.mark.parametrize("name", ["think", "mistral", "seed_oss", "granite"])
def test_reasoning(name):
    kind = REASONING_PARSERS[name]
    text = f"{kind.start}\nLet me think.\n\n{kind.end}\n\nThe answer."
    assert run(text, reasoning=name) == ("Let me think.", "The answer.", [])
    opened = text.removeprefix(kind.start)
    assert run(opened, reasoning=name, prompt=f"<user>\n{kind.start}\n") == (
        "Let me think.", "The answer.", [],
    )  # fmt: skip
    closed = f"{kind.start}\n\n{kind.end}\n\n"
    assert run("The answer.", reasoning=name, prompt=closed) == ("", "The answer.", [])


@pytest.mark.parametrize("name", ["think", "mistral", "seed_oss", "granite"])
def test_only_the_end_of_a_prompt_opens_reasoning(name):
    kind = REASONING_PARSERS[name]
    asked = f"<user>What does {kind.start} mean?<assistant>"
    assert run("A tag.", reasoning=name, prompt=asked) == ("", "A tag.", [])
    opened = f"<user>What does {kind.end} mean?<assistant>{kind.start}\n"
    assert run("A tag.", reasoning=name, prompt=opened) == ("A tag.", "", [])


@pytest.mark.parametrize(
    ("last", "is_reasoning"),
    [
        ("<think>\nFirst,", True),
        ("<think>First,</think>It", False),
        ("The tag <think>", True),
        ("The tag <think> is", False),
        ("It", False),
    ],
)
def test_a_message_that_goes_on_may_be_within_reasoning(last, is_reasoning):
    prompt = f"<user>What are <think> and </think>?<assistant>{last}"
    reasoning, content, _ = run(" more", reasoning="think", prompt=prompt, continued=last)
    assert (bool(reasoning), bool(content)) == (is_reasoning, not is_reasoning)


def test_reasoning_that_does_not_end_is_not_content():
    assert run("<think>and then", reasoning="think") == ("and then", "", [])


def test_calls_within_reasoning_are_reasoning():
    text = f"<think>{WELL_FORMED['hermes']}</think>{WELL_FORMED['hermes']}"
    reasoning, content, calls = run(text, reasoning="think", tool="hermes")
    assert decoded(calls) == EXPECTED
    assert content == ""
    assert reasoning == WELL_FORMED["hermes"]


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes.<|return|>"
    )
    assert run(text, reasoning="harmony") == ("Hm.", "Yes.", [])


def test_harmony_header_after_white_space():
    """White space that arrives alone may still be followed by a header."""
    text = "\n<|channel|>final<|message|>Yes.<|return|>"
    assert run(text, [1], reasoning="harmony") == run(text, reasoning="harmony") == ("", "Yes.", [])
    assert run("\nYes", [1], reasoning="harmony") == ("", "\nYes", [])
    assert run("<b>Yes</b>", [1, 2], reasoning="harmony") == ("", "<b>Yes</b>", [])


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}</think>", "hermes", "think"),
        ("{{ tools }}[TOOL_CALLS]", "mistral", None),
        ("{{ tools }}<|python_tag|>", "llama3_json", None),
        ("{{ tools }}<|channel|>", "harmony", "harmony"),
        ("{{ messages }}", None, None),
    ],
)
def test_parsers_are_chosen_from_the_template(template, tool, reasoning):
    assert choose_tool_parser(template) == tool
    assert choose_reasoning_parser(template) == reasoning

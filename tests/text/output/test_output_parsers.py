"""Reasoning and tool calls in text: what they are, and that the cut into pieces plays no part."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.chat_families import FAMILIES

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

WEATHER = {
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "number"},
        "deep": {"type": "object"},
        "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
}
NUMBERS = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = {"get_weather": WEATHER, "add": NUMBERS, "f": {}}
ARGUMENTS = {"city": 'Zürich "old\\town"', "n": -1.5, "deep": {"a": [1, {"b": "}]"}]}, "e": None}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
CALL_2 = '{"parameters": {"a": 1, "b": 2}, "name": "add"}'
EXPECTED = [("get_weather", ARGUMENTS), ("add", {"a": 1, "b": 2})]


def run(text, cuts=(), *, tool=None, reasoning=None, tools=TOOLS, **of_prompt):
    """The outcome of a text that arrives in pieces: reasoning, content, calls."""
    parser = output_parser(
        tool_parser=tool, reasoning_parser=reasoning, tools=tools, **{"prompt": "", **of_prompt}
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
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    f"{ARGUMENTS['city']}\n</parameter>\n<parameter=n>\n-1.5\n</parameter>\n<parameter=deep>\n"
    f"{json.dumps(ARGUMENTS['deep'])}\n</parameter>\n<parameter=e>\nnull\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>2</parameter>\n</function>\n</tool_call>",
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
    parser = output_parser(tool_parser=tool, reasoning_parser=None, tools=TOOLS, prompt="")
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
    "<function=f>", "<parameter=x>", "</parameter>", "</function>", "<parameter=a>", "5",
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


PLAIN = [None, "hermes", "qwen3_coder", "llama3_json", "json", "pythonic", "mistral"]


@pytest.mark.parametrize("tool", PLAIN)
@given(text=st.text(max_size=40))
def test_text_without_calls_is_content(tool, text):
    assert run(text, tool=tool) == ("", text, [])


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"answer": [1, 2, 3]}'),
        ("llama3_json", '{"name": "unknown", "parameters": {"a": 1}}'),
        ("llama3_json", '{"parameters": {"a": 1}, "name": "unknown"}'),
        ("llama3_json", '{"type": "object", "name": "f", "parameters": {"a": 1}}'),
        ("llama3_json", '{"name": "f", "description": "F", "parameters": {"type": "object"}}'),
        ("llama3_json", '{"type": "function", "function": {"name": "f", "description": "F"}}'),
        ("llama3_json", '{"type": "object", "properties": {"name": {}, "parameters": {}}}'),
        ("llama3_json", '{"name": "f", "price": 3}'),
        ("llama3_json", '{"name": "f", "parameters": [1]}'),
        ("llama3_json", '{"name": "f", "parameters": 5}'),
        ("llama3_json", '{"name": "f", "parameters": "of use"}'),
        ("llama3_json", '{"name": "f"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", 'Use <tool_call>{"name": "unknown", "arguments": {}}</tool_call> so.'),
        ("hermes", "a <tool_call> is a tag"),
        ("qwen3_coder", "a <tool_call> is a tag"),
        ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=" + "f" * 300 + ">"),
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


def test_an_end_tag_that_is_cut_short_is_not_content():
    assert run(f"<tool_call>{CALL}\n</tool", tool="hermes")[1] == ""


def test_later_mistral_form():
    text = '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}'
    assert decoded(run(text, tool="mistral")[2]) == [("add", {"a": 1}), ("f", {})]


@pytest.mark.parametrize(
    "call",
    [
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '{"id": 7, "name": "f", "parameters": {"x": 1}, "done": true}',
        '{"name": "f", "arguments": {"x": 1}, "parameters": {"y": 1}}',
    ],
)
def test_spellings_of_a_call(call):
    assert decoded(run(call, tool="json")[2]) == [("f", {"x": 1})]


@pytest.mark.parametrize("kind", ["function", "function_call", "tool_call"])
def test_the_type_of_a_call_without_tags(kind):
    call = f'{{"type": "{kind}", "name": "f", "arguments": {{"x": 1}}}}'
    assert decoded(run(call, tool="llama3_json")[2]) == [("f", {"x": 1})]


@pytest.mark.parametrize("rest", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments_has_an_empty_object(rest):
    assert run(f'{{"name": "f"{rest}}}', tool="json")[2] == [("f", "{}")]


def test_a_call_between_tags_may_say_more():
    text = '<tool_call>{"name": "f", "why": "so", "arguments": {"x": 1}}</tool_call>'
    assert decoded(run(text, tool="hermes")[2]) == [("f", {"x": 1})]


def function(*arguments, name="f"):
    """A call in the format of Qwen3-Coder."""
    texts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments]
    return f"<tool_call>\n<function={name}>\n{''.join(texts)}</function>\n</tool_call>"


COLOR = {"$defs": {"color": {"enum": ["red", "1"]}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '\n "a"\t\\ü\n', '\n "a"\t\\ü\n'),
        ({"type": "string"}, "", ""),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "null", None),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-2.5", -2.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "[1,\n {}]", [1, {}]),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, "1", "1"),
        ({"$ref": "#/$defs/color"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"$ref": "elsewhere"}, "red", "red"),
        ({}, "[1]", [1]),
        (True, "red", "red"),
        (None, "5", "5"),
    ],
)
def test_text_of_arguments_becomes_what_the_schema_says(schema, text, value):
    properties = {} if schema is None else {"x": schema}
    tools = {"f": {"properties": properties, **COLOR}}
    (call,) = decoded(run(function(("x", text)), tool="qwen3_coder", tools=tools)[2])
    assert call == ("f", {"x": value})


def test_tags_within_an_argument():
    code = "<a>\n</parameter>\n<b></function> <parameter=y> <tool_call></tool_call>"
    found = run(function(("x", code), ("y", "2")), tool="qwen3_coder")
    assert found[:2] == ("", "")
    assert decoded(found[2]) == [("f", {"x": code, "y": "2"})]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<tool_call><function=f></function></tool_call>", [("f", {})]),
        ("<tool_call><function=f></tool_call>", [("f", {})]),
        ("<tool_call><function=f><parameter=x>\n1\n</function>\n</tool_call>", [("f", {"x": "1"})]),
        (
            "<tool_call><function=f></function>\n<function=add><parameter=a>1</parameter>\n"
            "</function></tool_call>",
            [("f", {}), ("add", {"a": 1})],
        ),
    ],
)
def test_calls_that_lack_a_tag(text, calls):
    found = run(text, tool="qwen3_coder")
    assert found[1] == ""
    assert decoded(found[2]) == calls


def test_text_of_an_argument_streams():
    parser = output_parser(tool_parser="qwen3_coder", reasoning_parser=None, tools=TOOLS, prompt="")
    parser.push("<tool_call>\n<function=f>\n<parameter=x>\nlong")
    assert parser.push(" text") == [ToolArguments(0, " text")]


def test_a_call_that_is_cut_short_keeps_what_there_is():
    text = '<tool_call>{"name": "f", "arguments": {"x": "lo'
    assert run(text, tool="hermes") == ("", "", [("f", '{"x": "lo')])
    text = "<tool_call><function=f><parameter=x>lo"
    assert run(text, tool="qwen3_coder") == ("", "", [("f", '{"x": "lo')])


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
        ("{{ tools }}'<tool_call>\\n{\"name\": <function-name>'", "hermes", None),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=x>", "qwen3_coder", None),
        ("{{ tools }}<tool_call>{name}\n<arg_key>", None, None),
        ("{{ tools }}<｜tool▁calls▁begin｜>", None, None),
        ('{{ tools }}<|tool_calls_section_begin|>"parameters":', None, None),
        ('{{ tools }}<|START_ACTION|>[{"tool_name": , "parameters": ', None, None),
        ("{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=x>", None, None),
        ("{{ tools }}[TOOL_CALLS]", "mistral", None),
        ("{{ tools }}<|python_tag|>", "llama3_json", None),
        ("{{ tools }}<|channel|>", "harmony", "harmony"),
        ("{{ messages }}", None, None),
    ],
)
def test_parsers_are_chosen_from_the_template(template, tool, reasoning):
    assert choose_tool_parser(template) == tool
    assert choose_reasoning_parser(template) == reasoning


@pytest.mark.parametrize(
    ("family", "tool"),
    [
        ("llama-3.1", "llama3_json"), ("mistral", "mistral"), ("qwen2.5", "hermes"),
        ("deepseek-r1", None), ("gpt-oss", "harmony"), ("gemma", None),
    ],
)  # fmt: skip
def test_parsers_of_well_known_families(family, tool):
    assert choose_tool_parser(FAMILIES[family]) == tool

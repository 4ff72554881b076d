# ruff: noqa: E501
"""Rendering equals transformers' ``apply_chat_template``, family by family."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tests.text.chat_families import FAMILIES
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ridgeline.core.errors import ChatTemplateError, InvalidRequestError
from ridgeline.text import ChatTemplate, Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BACKEND = Backend(BPE({"<unk>": 0, "<s>": 1, "</s>": 2}, [], unk_token="<unk>"))
ORACLE = PreTrainedTokenizerFast(tokenizer_object=BACKEND, **SPECIAL)

Message = dict[str, Any]
UNICODE = "Grüße, 你好 🏳️‍🌈 <b>\"a\" & 'b'</b> {{ x }} {% if %} \\n \u2028 end"


def _call(name: str, arguments: object, call_id: str = "abcdefghi") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": "Hi"}],
    "system": [
        {"role": "system", "content": "Be brief. /no_think"},
        {"role": "user", "content": " Hi \n"},
    ],
    "turns": [
        {"role": "user", "content": "1 < 2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes & no.  "},
        {"role": "user", "content": UNICODE},
        {"role": "assistant", "content": "'quoted' \"twice\"\n"},
        {"role": "user", "content": ""},
    ],
    "ends with assistant": [
        {"role": "system", "content": UNICODE},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": UNICODE},
    ],
    "ends with spaces": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "half a  "},
    ],
    "tools used": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I need the tool.",
            "tool_calls": [
                _call("get_weather", {"city": "Köln <>&", "days": [1, 2.5, True, None]})
            ],
        },
        {"role": "tool", "content": '{"t": "20 °C"}', "tool_call_id": "abcdefghi", "name": "w"},
        {"role": "assistant", "content": "20 °C", "reasoning": "Easy."},
        {"role": "user", "content": "Thanks"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": " one "}, {"type": "text", "text": UNICODE}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
    ],
    "roles repeated": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "odd role": [{"role": "unused", "content": "x"}, {"role": "user", "content": "y"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now> & later, in 'words'; très détaillé",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Köln", "東京"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"type": ["string", "null"]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "a", "description": "", "parameters": {"properties": {}}},
    },
]
DOCUMENTS = [{"title": "T & <U>", "text": "naïve 文"}, {"title": "2", "text": "b"}]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "reasoning_effort": "high", "date_string": "1 Jan 2020"},
    {"tools_in_user_message": False, "controls": {"length": "short"}, "bos_token": "<bos>"},
]


def _variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, generate in itertools.product(CONVERSATIONS, (False, True)):
        yield name, {"add_generation_prompt": generate}
        yield name, {"add_generation_prompt": generate, "tools": TOOLS}
    for name, extra in itertools.product(("user", "turns", "tools used"), EXTRAS):
        yield name, {"chat_template_kwargs": extra, "documents": DOCUMENTS, "tools": TOOLS}
        yield name, {"chat_template_kwargs": extra, "add_generation_prompt": True}
    for name in ("ends with assistant", "ends with spaces", "parts", "user", "tools used"):
        yield name, {"continue_final_message": True}


def _theirs(template: str, messages: list[Message], options: dict[str, Any]) -> str | Exception:
    options = dict(options)
    options.update(options.pop("chat_template_kwargs", {}))
    try:
        text = ORACLE.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return error
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_family_renders_as_in_transformers(family: str) -> None:
    template = ChatTemplate(FAMILIES[family], special_tokens=SPECIAL)
    rendered = 0
    for name, options in _variants():
        expected = _theirs(FAMILIES[family], CONVERSATIONS[name], options)
        if name == "parts" and not _iterates(family):
            continue  # transformers prints the list, or fails; ours joins the parts
        if isinstance(expected, Exception):
            with pytest.raises((ChatTemplateError, InvalidRequestError)) as caught:
                template.render(CONVERSATIONS[name], **options)
            if type(expected) is jinja2.TemplateError:
                assert str(expected) in str(caught.value)
            continue
        assert template.render(CONVERSATIONS[name], **options) == expected, (name, options)
        rendered += 1
    assert rendered >= 15


def _iterates(family: str) -> bool:
    return family == "gemma-3"


SNIPPETS = [
    "{{ messages|map(attribute='role')|join(', ') }}",
    "{{ messages|selectattr('role', 'eq', 'user')|list|length }} {{ messages|length }}",
    "{% for a, b in {'x': 1, 'y': 2}.items() %}{{ loop.index }}{{ a }}{{ b }}{{ loop.revindex }}{% endfor %}",
    "{{ 'a,b,,c'.split(',') }} {{ ' x '.strip() }} {{ 'abc'[::-1] }} {{ [1,2,3][-2:] }} {{ (1,2)[:1] }}",
    "{{ '%s-%05.1f-%d' % ('a', 2.5, 3) }} {{ '%s'|format(4) }} {{ '{:>5}|{a!r}'.format(1, a='q') }}",
    "{{ 'abc'|center(9) }}|{{ 'a\nb'|indent(3, true) }}|{{ 'x'.ljust(4) }}|{{ '7'.zfill(3) }}|",
    "{% set ns = namespace(a=1) %}{% for i in range(5) if i % 2 %}{% set ns.a = ns.a + i %}{% else %}n{% endfor %}{{ ns.a }}",
    "{% for i in [] %}{% else %}none{% endfor %}{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for x in [[1,[2]],[3]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{{ kwargs }}{% endmacro %}{{ m(1) }}{% call m(3, c=4) %}!{% endcall %}",
    "{% filter upper %}abc{{ 'd' ~ 1 ~ none ~ [1] }}{% endfilter %}{% set b %}<{{ 2 }}>{% endset %}{{ b }}",
    "{{ [3,1,2]|sort }} {{ ['b','A']|sort|first }} {{ [1,1,2]|unique|list }} {{ [1,2]|sum }} {{ [[1],[2]]|sum(start=[]) }}",
    "{{ range(7)|batch(3, 'x')|list }} {{ range(5)|slice(2)|list }} {{ [1,2]|min }} {{ 'ab'|list }} {{ 'ab'|reverse }}",
    "{{ {'b': 1, 'a': '<é>'}|tojson }} {{ {'a': [1]}|tojson(indent=2, ensure_ascii=True, separators=(',', ': ')) }}",
    "{{ {'b': 1, 'a': 2}|dictsort }} {{ {'k': 1}.get('z', 5) }} {{ dict(a=1) }} {{ dict([('x', 2)]) }} {{ {'q': 1}|items|list }}",
    "{{ '<a>'|e }} {{ 'a b'|title }} {{ '3'|int + 1 }} {{ 2.567|round(1) }} {{ -3|abs }} {{ 'abcdef ghi'|truncate(8) }} {{ 'x'|string }}",
    "{{ undefined_thing }}|{{ undefined_thing|default('d') }}|{{ 'q' if x is defined }}|{{ none }}|{{ true }}",
    "{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 'ab' * 3 }} {{ [0] * 2 }} {{ [1] + [2] }} {{ 1 < 2 < 3 }}",
    "{{ 'a' in 'abc' }} {{ 1 in [1] }} {{ 'k' in {'k': 1} }} {{ 3 is divisibleby 3 }} {{ 'A' is upper }} {{ 1 is in [1] }}",
    "{{ cycler('a', 'b').next() }} {% set j = joiner(',') %}{{ j() }}a{{ j() }}b {{ 'aXbX'.replace('X', 'y', 1) }}{{ 'a'|replace('a','b') }}",
    "{% block one %}[{{ 1 }}]{% endblock %}{{ self.one() }}{% with a = 5 %}{{ a }}{% endwith %}{{ loop is defined }}",
    "{% for m in messages %}{{ loop.cycle('o', 'e') }}{{ loop.changed(m.role) }}{{ loop.previtem.role if loop.previtem is defined }}{% endfor %}",
    "{{ 'a\tb'.expandtabs(4) }}{{ 'Straße'.casefold() }}{{ 'abcabc'.rfind('bc') }}{{ 'a-b-c'.rsplit('-', 1) }}{{ '-'.join(['a', 'b']) }}",
    "{% generation %}{% set q = 1 %}g{{ q }}{% endgeneration %}{{ q is defined }}{{ messages[-1]['content'][:2] }}{{ messages[0].role[0] }}",
    "{{ messages|groupby('role')|map('first')|list }} {{ ['a','b']|map('upper')|join('-') }} {{ [1,none,2]|select|list }} {{ [1,2,3]|reject('odd')|list }}",
    "{{ 'line\\nnext'.splitlines() }}{{ 'x=y=z'.partition('=') }}{{ 'abc'.startswith(('x', 'a')) }}{{ 1.0.is_integer() }}{{ '%%' % () }}{{ ''|length }}",
    "  {%- if true %}\n  yes  \n  {% endif %}\n  {# c #}\nno{{ 'a' if false }}\n",
]


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_language_is_jinja(index: int) -> None:
    messages = CONVERSATIONS["turns"]
    expected = _theirs(SNIPPETS[index], messages, {})
    assert isinstance(expected, str), expected
    assert ChatTemplate(SNIPPETS[index]).render(messages) == expected


def test_parts_are_joined_for_templates_that_take_strings() -> None:
    template = ChatTemplate(FAMILIES["chatml"])
    message = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    assert template.render([message]).strip() == "<|im_start|>user\na\nb<|im_end|>"


def test_long_conversation_is_within_the_limits() -> None:
    text = "word " * 20_000
    messages = [{"role": role, "content": text} for role in ("user", "assistant") * 20]
    for family in ("qwen3", "llama-3.1", "mistral", "gpt-oss"):
        messages[-1] = {"role": "user", "content": text} if family == "mistral" else messages[-1]
        messages = messages[:-1] if family == "mistral" else messages
        rendered = ChatTemplate(FAMILIES[family], special_tokens=SPECIAL).render(messages)
        assert len(rendered) > 39 * len(text) * 0.99


@pytest.mark.parametrize(
    "layout",
    [
        "none",
        "config string",
        "config list",
        "file",
        "file over config",
        "file and extras",
        "extras",
    ],
)
def test_lookup_is_that_of_transformers(layout: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    extras = tmp_path / "additional_chat_templates"
    if layout == "config string" or layout == "file over config":
        config["chat_template"] = "config {{ bos_token }}"
    if layout in ("config list", "file and extras"):
        config["chat_template"] = [
            {"name": "default", "template": "listed default"},
            {"name": "tool_use", "template": "listed tools {{ tools|length }}"},
            {"name": "rag", "template": "rag"},
        ]
    if layout.startswith("file"):
        (tmp_path / "chat_template.jinja").write_text("file\r\n{{ eos_token }}", newline="")
    if "extras" in layout:
        extras.mkdir()
        (extras / "tool_use.jinja").write_text("extra tools")
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template == theirs.chat_template
    assert tokenizer.special_tokens == theirs.special_tokens_map
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert (template is None) == (layout == "none")
    for tools in (None, [], TOOLS):
        try:
            expected = theirs.apply_chat_template(
                CONVERSATIONS["user"], tools=tools, tokenize=False
            )
        except ValueError:
            if template is not None:
                with pytest.raises(ChatTemplateError):
                    template.render(CONVERSATIONS["user"], tools=tools)
            continue
        assert template is not None
        assert template.render(CONVERSATIONS["user"], tools=tools) == expected


def test_content_that_is_null_is_empty_unless_there_are_calls() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content is defined }}{{ m.content }};{% endfor %}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "user", "content": None}, {"role": "assistant", "tool_calls": calls}]
    assert template.render(messages) == "True;False;"


def test_a_developer_is_the_system_to_a_template_that_does_not_name_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    generic = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert ChatTemplate(generic).render(messages) == "<system>Be brief."
    assert ChatTemplate(generic + "{# developer #}").render(messages) == "<developer>Be brief."
    assert messages[0]["role"] == "developer"


BAD_MESSAGES: list[Any] = [
    [{"role": "user"}],
    [{"role": "assistant", "tool_calls": []}],
    [],
    "hi",
    {"role": "user", "content": "x"},
    ["hi"],
    [None],
    [{"content": "x"}],
    [{"role": 1, "content": "x"}],
    [{"role": "", "content": "x"}],
    [{"role": "r" * 1000, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"text": "x"}}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}],
    [{"role": "user", "content": "x", "extra": object()}],
    [{"role": "user", "content": "x", "extra": b"bytes"}],
    [{"role": "user", "content": "x", "extra": {1: 2}}],
    [{"role": "user", "content": "x", "deep": json.loads("[" * 90 + "]" * 90)}],
]


@pytest.mark.parametrize("index", range(len(BAD_MESSAGES)))
def test_bad_messages_are_the_callers_mistake(index: int) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages }}").render(BAD_MESSAGES[index])


BAD_OPTIONS: list[dict[str, Any]] = [
    {"tools": "x"},
    {"tools": [1]},
    {"tools": [print]},
    {"documents": [[]]},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": {"f": print}},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"template_name": "rag"},
]


@pytest.mark.parametrize("index", range(len(BAD_OPTIONS)))
def test_bad_options_are_the_callers_mistake(index: int) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages }}").render(CONVERSATIONS["user"], **BAD_OPTIONS[index])


def test_message_of_the_template_is_escaped_and_capped() -> None:
    template = ChatTemplate("{{ raise_exception('no\n\x1b[31m' ~ 'x' * 5000) }}")
    with pytest.raises(ChatTemplateError) as caught:
        template.render(CONVERSATIONS["user"])
    message = str(caught.value)
    assert r"no\n\x1b[31mxxx" in message
    assert message.isprintable()
    assert len(message) < 300


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    before = json.dumps(messages)
    ChatTemplate("{% for p in messages[0].content %}{{ p.text }}{% endfor %}").render(
        messages, continue_final_message=True
    )
    assert json.dumps(messages) == before

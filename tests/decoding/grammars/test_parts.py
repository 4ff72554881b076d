"""Calls of tools in the formats of models: what the grammar lets through, the parser reads."""

import json
import random

import jsonschema
import pytest
from tests.decoding.grammars.conftest import random_walk
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.decoding.grammars.vocabulary import grammar_vocabulary
from ridgeline.text import Tokenizer
from ridgeline.text.output import ToolArguments, ToolCall, call_parts, output_parser

VOCAB = 320
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich"]},
        "when": {"type": "string", "format": "date"},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [("get_weather", WEATHER), ('sto"p', STOP)]
FORMATS = {  # parser, chat template: how a call begins
    ("hermes", ""): "<tool_call>\n{",
    ("qwen", ""): "<tool_call>\n{",
    ("llama3_json", ""): '{"name": "',
    ("mistral", ""): '[TOOL_CALLS][{"name": "',
    ("mistral", "{{ '[TOOL_CALLS] [' }}"): '[TOOL_CALLS] [{"name": "',
    ("mistral", "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"): "[TOOL_CALLS]",
}


def make_tokenizer(folder, special):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(['{"name": "arguments": "get_weather"}' * 9], trainer)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module", params=["special markers", "markers of text"])
def tools(request, tmp_path_factory):
    """A tokenizer whose markers are special tokens, and one that spells them; its compiler."""
    is_special = request.param == "special markers"
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(folder, MARKERS if is_special else [])
    special = {text: tokenizer.token_to_id(text) for text in MARKERS} if is_special else {}
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, VOCAB), special)
    yield tokenizer, compiler, special
    compiler.close()


@pytest.mark.parametrize(("parser", "template"), FORMATS)
def test_calls_can_be_read_and_are_valid(tools, parser, template):
    tokenizer, compiler, special = tools
    wanted = StructuredOutputs.of({"parts": call_parts(parser, template, TOOLS)})
    called = set()
    for seed in range(20):
        tokens = random_walk(compiler.prepare(wanted)(), tokenizer, random.Random(seed))
        if tokens is None:
            continue
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert text.startswith(FORMATS[parser, template]), text
        assert all((special[m] in tokens) == (m in text) for m in special)
        reader = output_parser(
            tool_parser=parser, reasoning_parser=None, tools=dict(TOOLS), prompt=""
        )
        name, *arguments = [*reader.push(text), *reader.finish()]
        assert isinstance(name, ToolCall)
        assert all(isinstance(event, ToolArguments) for event in arguments)
        jsonschema.validate(json.loads("".join(e.text for e in arguments)), dict(TOOLS)[name.name])
        called.add(name.name)
    assert called == {name for name, _ in TOOLS}


def test_other_formats_have_no_parts():
    assert call_parts("pythonic", "", TOOLS) is None
    assert call_parts("qwen3_coder", "", TOOLS) is None
    assert call_parts(None, "", TOOLS) is None


@pytest.mark.parametrize(
    "parts",
    [
        [], "text", [[]], [[{"text": ""}]], [[{"text": 5}]], [[{"text": "a", "json": {}}]],
        [["a"]], [[{"json": 5}]], [[{"lark": "a"}]], [{"text": "a"}],
    ],
    ids=str,
)  # fmt: skip
def test_bad_parts_are_refused(parts):
    with pytest.raises(InvalidRequestError):
        StructuredOutputs.of({"parts": parts})


def test_a_bad_schema_in_parts_is_refused(tools):
    _, compiler, _ = tools
    wanted = StructuredOutputs.of({"parts": [[{"json": {"type": "strnig"}}]]})
    with pytest.raises(InvalidRequestError, match="parts was refused"):
        compiler.prepare(wanted)

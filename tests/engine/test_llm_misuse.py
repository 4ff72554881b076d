"""`LLM` used as it is not meant to be: a sentence each, and the engine goes on."""

import os
import select
import signal
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    NotFiniteError,
    NoTokenError,
    SettingsError,
)
from ridgeline.text import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_a_closed_engine_says_so(model_folder):
    llm = LLM(str(model_folder))
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: llm.logits([1])):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_second_thread_is_told(llm):
    with llm._loop._stepping, pytest.raises(EngineError, match="two threads"):
        llm.generate("the cat", GREEDY)


def test_a_forked_process_is_told(llm):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("the cat", GREEDY)
        except EngineError as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        told, _, _ = select.select([ours], [], [], 20.0)
        assert told and b"fork" in os.read(ours, 1000)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
    assert llm.generate("the cat", GREEDY)[0].finished


@pytest.mark.parametrize("prompts", [None, b"abc", {"prompt": "a"}, [None], ["a", 1], [1.5], 7])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm, text: llm.generate(text, GREEDY),
        lambda llm, text: llm.generate(["the cat", text], GREEDY),
        lambda llm, text: llm.stream(text, GREEDY),
        lambda llm, text: llm.chat([{"role": "user", "content": text}], GREEDY),
        lambda llm, text: llm.embed(text),
        lambda llm, text: llm.beam_search(text),
        lambda llm, text: llm.pin_prefix(text),
        lambda llm, text: llm.explain_miss(text),
        lambda llm, _: llm.generate([[7] * 5_000_000], GREEDY),
        lambda llm, _: llm.logits([7] * 5_000_000),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_unread(llm, monkeypatch, call):
    encode = Tokenizer.encode

    def encode_short(self, text, *arguments, **settings):
        assert len(text) < 1000
        return encode(self, text, *arguments, **settings)

    monkeypatch.setattr(Tokenizer, "encode", encode_short)
    with pytest.raises(ContextLengthError, match=r"5000\d\d\d .* the context holds 256"):
        call(llm, "a" * 5_000_000)
    assert llm.generate("the cat", GREEDY)[0].finished


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], "greedy", 5])
def test_what_is_no_sampling_params_is_refused(llm, params):
    with pytest.raises(InvalidRequestError):
        llm.generate(["a"], params)


@pytest.mark.parametrize("messages", [None, {"role": "user", "content": "a"}, "a", 5, [5]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": 5}, {"executor": None}, {"quantization": 4}, {"chat_template": 5},
        {"revision": 5}, {"packed_cache_path": None}, {"draft_model": 1, "speculation": "draft"},
    ],
)  # fmt: skip
def test_settings_of_another_type_are_refused(settings):
    with pytest.raises(SettingsError, match="must be text"):
        LLM(**settings)


def test_a_path_may_be_a_path(model_folder, tmp_path):
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}")
    with LLM(Path(model_folder), chat_template=template, max_model_len=32) as llm:
        assert llm.name == str(model_folder)
        assert llm.render_chat([{"role": "user", "content": "a"}]) == "a"


def test_what_is_no_adapter_and_no_pin_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="adapter"):
        llm.generate(["a"], GREEDY, adapter=3)
    with pytest.raises(InvalidRequestError, match="number 7 is pinned"):
        llm.unpin_prefix(7)


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_weights_that_are_not_finite_are_an_error(damaged_folder, executor):
    turn = [{"role": "user", "content": "the cat"}]
    with LLM(str(damaged_folder), executor=executor) as llm:
        with pytest.raises(NoTokenError, match="logits are not finite") as raised:
            llm.generate(["the cat", "a"], GREEDY)
        assert [each.outputs[0].finish_reason for each in raised.value.outputs] == ["error"] * 2
        for call in (
            lambda: llm.chat(turn, GREEDY),
            lambda: list(llm.stream("the cat", GREEDY)),
            lambda: llm.beam_search("the cat"),
        ):
            with pytest.raises(NoTokenError):
                call()
        with pytest.raises(NotFiniteError):
            llm.embed("the cat")

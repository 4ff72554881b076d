import io
import sys

from ridgeline import LLM, SamplingParams
from ridgeline.cli.chat import Conversation
from ridgeline.cli.main import main

GREEDY = SamplingParams(temperature=0, max_tokens=5)


def chat(capsys, monkeypatch, folder, lines, *options):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    arguments = ["chat", str(folder), "--temperature", "0", "--max-tokens", "5", *options]
    assert main(arguments) == 0
    return capsys.readouterr()


def test_answers_stream_to_standard_output(model_folder, capsys, monkeypatch):
    with LLM(str(model_folder)) as llm:
        (expected,) = llm.chat([{"role": "user", "content": "the cat"}], GREEDY)
    captured = chat(capsys, monkeypatch, model_folder, ["the cat"])
    assert captured.out == expected.outputs[0].text + "\n"
    assert "TTFT" in captured.err


def test_the_conversation_is_remembered_until_reset(model_folder, capsys, monkeypatch):
    first = chat(capsys, monkeypatch, model_folder, ["the cat"]).out
    twice = chat(capsys, monkeypatch, model_folder, ["the cat", "the mat"]).out
    reset = chat(capsys, monkeypatch, model_folder, ["the cat", "/reset", "the cat", "/exit", "x"])
    assert twice.startswith(first)
    assert reset.out == first * 2


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model_folder, capsys):
    with LLM(str(model_folder)) as llm:
        conversation = Conversation(llm, GREEDY, "be brief")
        conversation.answer("the cat")
        before = list(conversation.messages)
        conversation.answer("x " * 500)
        assert conversation.messages == before
        assert [message["role"] for message in before] == ["system", "user", "assistant"]
    assert "the context holds" in capsys.readouterr().err


def test_unknown_commands_do_not_go_to_the_model(model_folder, capsys, monkeypatch):
    captured = chat(capsys, monkeypatch, model_folder, ["/rest", "/reset now", "/help"])
    assert captured.out == ""
    assert captured.err.count("no such command") == 2
    assert captured.err.count("/reset forgets") == 4
    assert chat(capsys, monkeypatch, model_folder, ["/etc/hosts is a file"]).out


def test_several_answers_are_refused(model_folder, capsys):
    assert main(["chat", str(model_folder), "--n", "2"]) == 2
    assert "n must be 1" in capsys.readouterr().err

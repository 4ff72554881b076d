import io
import json
import shutil
import sys

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli.answer_view import split_blocks
from ridgeline.cli.chat_session import Chat
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


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(
    model_folder, capsys, monkeypatch, tmp_path
):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    lines = ["the cat", f"/save {before}", "x " * 500, f"/save {after}"]
    captured = chat(capsys, monkeypatch, model_folder, lines, "--system", "be brief")
    assert "the context holds" in captured.err
    assert before.read_text() == after.read_text()
    roles = [message["role"] for message in json.loads(after.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]


def test_unknown_commands_do_not_go_to_the_model(model_folder, capsys, monkeypatch):
    captured = chat(capsys, monkeypatch, model_folder, ["/rest", "/reset now", "/save", "/help"])
    assert captured.out == ""
    assert "no command /rest; did you mean '/reset'?" in captured.err
    assert "/reset takes nothing" in captured.err
    assert "/save needs the path" in captured.err
    assert captured.err.count("forget every turn") == 1
    assert chat(capsys, monkeypatch, model_folder, ["/etc/hosts is a file"]).out


def test_retry_and_undo_take_the_last_turn_back(model_folder, capsys, monkeypatch):
    once = chat(capsys, monkeypatch, model_folder, ["the cat"]).out
    twice = chat(capsys, monkeypatch, model_folder, ["the cat", "the mat"]).out
    retried = chat(capsys, monkeypatch, model_folder, ["the cat", "/retry", "the mat"]).out
    assert retried == once + twice
    undone = chat(capsys, monkeypatch, model_folder, ["the mat", "/undo", "the cat", "/undo"]).out
    assert undone.endswith(once)
    assert "There is no turn yet" in chat(capsys, monkeypatch, model_folder, ["/retry"]).err


def test_a_full_context_drops_the_oldest_turns_and_says_so(
    model_folder, capsys, monkeypatch, tmp_path
):
    kept = tmp_path / "all.json"
    lines = [*["the cat sat on the mat"] * 12, f"/save {kept}"]
    captured = chat(capsys, monkeypatch, model_folder, lines)
    assert "oldest turn" in captured.err
    assert "error" not in captured.err
    assert len(json.loads(kept.read_text())["messages"]) == 24


def test_a_saved_conversation_goes_on(model_folder, capsys, monkeypatch, tmp_path):
    path = tmp_path / "chat.json"
    twice = chat(capsys, monkeypatch, model_folder, ["the cat", "the mat"]).out
    first = chat(capsys, monkeypatch, model_folder, ["the cat", f"/save {path}"]).out
    second = chat(capsys, monkeypatch, model_folder, [f"/load {path}", "the mat"]).out
    assert first + second == twice


@pytest.mark.parametrize(
    "content", ["no JSON", "{}", '{"messages": [{"role": "user", "content": "a"}]}']
)
def test_what_is_no_chat_is_neither_loaded_nor_overwritten(
    model_folder, capsys, monkeypatch, tmp_path, content
):
    path = tmp_path / "notes.md"
    path.write_text(content)
    captured = chat(capsys, monkeypatch, model_folder, [f"/load {path}", f"/save {path}"])
    assert captured.err.count("is not a chat") == 2
    assert path.read_text() == content


def test_a_file_goes_with_the_next_question(model_folder, capsys, monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("the mat\n")
    kept = tmp_path / "chat.json"
    lines = [f"/file {tmp_path}/none", f"/file {tmp_path}/a.txt", "sat", f"/save {kept}"]
    captured = chat(capsys, monkeypatch, model_folder, lines)
    assert "cannot be read: No such file" in captured.err
    question = json.loads(kept.read_text())["messages"][0]["content"]
    assert question == "a.txt:\n```\nthe mat\n```\n\nsat"


def test_a_path_in_quotes_and_a_question_with_an_apostrophe(
    model_folder, capsys, monkeypatch, tmp_path
):
    (tmp_path / "a b.txt").write_text("the mat\n")
    kept, lines = tmp_path / "chat.json", []
    for quote in "'\"":
        lines.append(f'/file {quote}{tmp_path}/a b.txt{quote} what\'s in "it"')
    captured = chat(
        capsys, monkeypatch, model_folder, [*lines, f"/save {kept}", f'/file "{tmp_path}/a b.txt']
    )
    questions = json.loads(kept.read_text())["messages"][::2]
    assert [each["content"].partition("\n\n")[2] for each in questions] == ['what\'s in "it"'] * 2
    assert "not closed" in captured.err


def test_files_stay_attached_until_there_is_an_answer(model_folder, capsys, monkeypatch, tmp_path):
    """The first two answers end before a word, as Ctrl-C ends them."""
    (tmp_path / "a.txt").write_text("the mat\n")
    (tmp_path / "b.txt").write_text("the cat\n")
    kept, plain, asked = tmp_path / "chat.json", Chat._events, []

    def events(self, prompt, stream):
        asked.append(prompt)
        return (
            iter(())
            if len(asked) < 3 and list(plain(self, prompt, stream))
            else plain(self, prompt, stream)
        )

    monkeypatch.setattr(Chat, "_events", events)
    lines = [f"/file {tmp_path}/a.txt", "sat", f"/file {tmp_path}/b.txt on", "sat", f"/save {kept}"]
    chat(capsys, monkeypatch, model_folder, lines)
    (question, _) = json.loads(kept.read_text())["messages"]
    assert question["content"] == "a.txt:\n```\nthe mat\n```\n\nsat"


def test_settings_and_the_system_message_change_within_a_chat(model_folder, capsys, monkeypatch):
    lines = ["/set max_tokens 2", "/set temperature hot", "/set temprature 1", "/system be brief"]
    captured = chat(capsys, monkeypatch, model_folder, [*lines, "the cat", "/stats"])
    assert "max_tokens = 2" in captured.err
    assert "temperature must be" in captured.err
    assert "did you mean 'temperature'" in captured.err
    assert "be brief" in captured.err
    assert "+ 2 tokens" in captured.err
    assert "2 tokens written" in captured.err
    assert "1 turn, 0 dropped" in captured.err


def test_another_model_takes_the_conversation_over(model_folder, capsys, monkeypatch):
    lines = ["the cat", f"/model {model_folder}/none", "the mat", f"/model {model_folder}", "/undo"]
    captured = chat(capsys, monkeypatch, model_folder, lines)
    twice = chat(capsys, monkeypatch, model_folder, ["the cat", "the mat"]).out
    assert captured.out == twice
    assert "There is no folder" in captured.err
    assert "forgotten: the mat" in captured.err


def test_what_is_no_model_leaves_the_loaded_one(model_folder, capsys, monkeypatch, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(model_folder, plain)
    (plain / "tokenizer_config.json").write_text("{}")
    lines = [f"/model {model_folder}/none", f"/model {plain}", "/model", "the cat"]
    captured = chat(capsys, monkeypatch, model_folder, lines)
    assert captured.err.count("There is no folder") == 1
    assert captured.err.count("has no chat template") == 1
    assert captured.err.count(" weights, ") == 1  # it was loaded once
    assert captured.out == chat(capsys, monkeypatch, model_folder, ["the cat"]).out


def test_markdown_is_cut_only_between_blocks():
    text = "One\ntwo.\n\n```python\na = 1\n\nb = 2\n```\n\n- x\n"
    cut = [split_blocks(text[:length])[0] for length in range(len(text) + 1)]
    assert set(cut) == {"", "One\ntwo.\n\n", text.removesuffix("- x\n")}


def test_run_is_another_name_of_chat(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    assert main(["run", str(model_folder)]) == 0
    assert "/help lists the commands" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("{model}", "the cat", "--temperature", "0", "--max-tokens", "5"),
        ("{model}", "--temperature", "0", "--max-tokens", "5", "the", "cat"),
        ("{model}", "--temperature", "0", "--max-tokens", "5", "-p", "the cat"),
        ("{model}", "--temperature", "0", "--max-tokens", "5", "--", "the cat"),
    ],
)
@pytest.mark.parametrize("piped", ["", "in the sun\n"])
def test_one_prompt_is_answered_alone(model_folder, capsys, monkeypatch, words, piped):
    with LLM(str(model_folder)) as llm:
        asked = "in the sun\n\nthe cat" if piped else "the cat"
        (expected,) = llm.chat([{"role": "user", "content": asked}], GREEDY)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    assert main(["run", *(word.format(model=model_folder) for word in words)]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected.outputs[0].text + "\n"
    assert "/help" not in captured.err


def test_a_prompt_that_is_there_twice_or_follows_bytes_is_refused(capsys, monkeypatch):
    assert main(["run", "embedded", "a", "-p", "b"]) == 2
    assert "The prompt is there twice" in capsys.readouterr().err
    assert main(["run", "embedded", "-p", ""]) == 2
    assert "The prompt is empty" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main(["run", "embedded", "a"]) == 2
    assert "Standard input is not UTF-8 text." in capsys.readouterr().err


def test_several_answers_are_refused(model_folder, capsys):
    assert main(["chat", str(model_folder), "--n", "2"]) == 2
    assert "n must be 1" in capsys.readouterr().err

"""A batch without a server, while its engine is full or dies."""

import asyncio
import json

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, InvalidRequestError, OverloadedError
from ridgeline.engine.engine import Engine
from ridgeline.engine.loop import EngineLoop
from ridgeline.server.jobs import lines
from ridgeline.server.jobs.offline import OfflineBatch

NUM_LINES = 8


class Files:
    """The input and the outputs of a batch in a folder."""

    def __init__(self, folder, prompts):
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        rows = [
            {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            for number, prompt in enumerate(prompts)
            for body in [{"prompt": prompt, "max_tokens": 8, "ignore_eos": True}]
        ]
        self.source.write_text("\n".join(map(json.dumps, rows)))

    def run(self, model, *, concurrency=NUM_LINES, on_line=lambda: None, **settings):
        batch = OfflineBatch(self.source, self.output, concurrency=concurrency)
        running = batch.run(EngineConfig(model=str(model), **settings), on_line=on_line)
        return asyncio.run(asyncio.wait_for(running, 20))

    def errors(self):
        path = self.output.with_name("out.errors.jsonl")
        return [json.loads(text) for text in path.read_text().splitlines()]


def broken():
    raise RuntimeError("broken")


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "not-even-closed"])
def test_a_dead_engine_ends_the_batch_and_the_next_run_does_the_rest(
    model_folder, tmp_path, monkeypatch, closes
):
    files, done = Files(tmp_path, ["the cat"] * NUM_LINES), []
    step, close = EngineLoop.step, Engine.close
    with monkeypatch.context() as patch:
        patch.setattr(EngineLoop, "step", lambda loop: broken() if len(done) > 2 else step(loop))
        patch.setattr(Engine, "close", lambda engine: close(engine) if closes else broken())
        with pytest.raises(EngineError, match=r"engine has stopped: .*broken.*3 of 8") as ended:
            files.run(model_folder, concurrency=1, on_line=lambda: done.append(1))
    assert ended.value.exit_code == 1
    assert len(files.output.read_text().splitlines()) == 3
    assert files.run(model_folder) == {"completed": NUM_LINES, "failed": 0}


def test_lines_wait_for_a_place_in_a_full_queue(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_MAX_RETRY_S", 0.02)
    files = Files(tmp_path, ["the cat"] * NUM_LINES)
    counts = files.run(model_folder, max_num_seqs=1, max_num_waiting=1)
    assert counts == {"completed": NUM_LINES, "failed": 0}


def test_a_line_of_more_prompts_than_may_wait_fails_alone(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_MAX_RETRY_S", 0.02)
    files = Files(tmp_path, ["the cat", ["the cat"] * 40, "the cat", ["the cat"] * 40])
    counts = files.run(model_folder, max_num_seqs=1, max_num_waiting=1)
    assert counts == {"completed": 2, "failed": 2}
    for error in files.errors():
        assert error["response"]["body"]["error"]["code"] == "overloaded"


GOOD = '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {}}\n'


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, " cannot be read: No such file"),
        ("\n", " has no requests."),
        ("\n[1]", ", line 2: It is not a JSON object."),
        ('{"url": "/v1/models"}', ", line 1: Its url must be one of /v1/"),
        ('{"url": []}', ", line 1: Its url must be one of /v1/"),
        (GOOD + "no JSON", ", line 2: The line is not valid JSON: JSON is malformed: "),
        (
            GOOD + GOOD + GOOD,
            ", line 2: custom_id is there twice. It is the first of 2 lines at fault.",
        ),
    ],
)
def test_a_file_that_is_no_batch_is_named_with_the_line_and_the_reason(tmp_path, content, told):
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    with pytest.raises(InvalidRequestError) as found:
        OfflineBatch(source, tmp_path / "out.jsonl", concurrency=1)
    assert str(found.value).startswith(f"{source}{told}")


@pytest.mark.parametrize("text", ["a letter\n", "[1]\n", '{"id": 1}\n'])
def test_a_file_that_is_no_output_of_a_batch_stays_as_it_is(tmp_path, text):
    source, output = tmp_path / "in.jsonl", tmp_path / "letter"
    source.write_text(GOOD)
    output.write_text(text)
    with pytest.raises(InvalidRequestError, match="letter is there, and is no output of a batch"):
        OfflineBatch(source, output, concurrency=1)
    assert output.read_text() == text


@pytest.mark.parametrize(
    ("wanted_s", "wait_s"), [(0.0, lines._RETRY_S), (7.0, 7.0), (1e6, lines._MAX_RETRY_S)]
)
def test_the_engine_says_how_long_to_stay_away(wanted_s, wait_s):
    assert lines._wait_s(OverloadedError("full", retry_after_s=wanted_s)) == wait_s

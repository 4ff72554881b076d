"""A batch without a server, while its engine is full or dies."""

import asyncio
import json

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, OverloadedError
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


@pytest.mark.parametrize(
    ("wanted_s", "wait_s"), [(0.0, lines._RETRY_S), (7.0, 7.0), (1e6, lines._MAX_RETRY_S)]
)
def test_the_engine_says_how_long_to_stay_away(wanted_s, wait_s):
    assert lines._wait_s(OverloadedError("full", retry_after_s=wanted_s)) == wait_s

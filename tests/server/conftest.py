import dataclasses
import itertools
import json
import shutil

import pytest
from tests.server.running import running

from ridgeline.core.request import CompletionChunk, FinishReason, PromptReport
from ridgeline.core.result import TokenLogprobs
from ridgeline.engine.guard.config import GuardConfig
from ridgeline.engine.guard.guard import Guard


@pytest.fixture(scope="session")
def roomy_folder(model_folder, tmp_path_factory):
    """The tiny model with room for tools in its context."""
    folder = tmp_path_factory.mktemp("roomy") / "tiny"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="session")
def served(roomy_folder, tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    with running(roomy_folder, data_dir=data_dir, price_input=1.0, price_output=2.0) as server:
        yield server


@pytest.fixture(scope="session")
def http(served):
    with served.client() as client:
        yield client


@pytest.fixture
def events(http):
    """Posts a request with ``stream`` and returns the events' JSON, the names in ``event``."""

    def post(path, body):
        found, name = [], None
        with http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    text = line.removeprefix("data: ")
                    found.append(text if text == "[DONE]" else json.loads(text))
                    if name is not None:
                        assert found[-1]["type"] == name
        return found

    return post


@pytest.fixture
def says(served, monkeypatch):
    """Makes the engine write these pieces, each a token (a, b, c, …), in every output.

    Returns the list of those that were read.
    """
    server = served.server
    monkeypatch.setattr(
        server, "config", dataclasses.replace(server.config, reasoning_parser="think")
    )

    def script(*pieces, finish="stop"):
        read = []

        async def generate(request):
            for number, index in itertools.product(range(len(pieces)), range(request.params.n)):
                token = 65 + number
                entry = TokenLogprobs(token_id=token, logprob=-1.0, rank=1, top=())
                is_last = number == len(pieces) - 1
                report = PromptReport(num_tokens=3, num_cached_tokens=0)
                read.append(pieces[number])
                yield CompletionChunk(
                    request_id=1,
                    index=index,
                    text=pieces[number],
                    token_ids=(token,),
                    logprobs=() if request.params.logprobs is None else (entry,),
                    finish_reason=FinishReason(finish) if is_last else None,
                    prompt=report if number == index == 0 else None,
                )

        monkeypatch.setattr(server.engine, "generate", generate)
        return read

    return script


@pytest.fixture
def guards(served, monkeypatch):
    """Puts a guard before the server's routes."""
    made = []

    def put(**settings):
        server = served.server
        made.append(Guard(GuardConfig(**settings), server.metrics.guard_decided))
        monkeypatch.setattr(server, "guard", made[-1])

    yield put
    for guard in made:
        guard.close()

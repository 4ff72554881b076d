import json
import shutil

import pytest
from tests.server.running import running


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

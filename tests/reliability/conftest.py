import pytest
from tests.server.conftest import roomy_folder  # noqa: F401
from tests.server.running import running


@pytest.fixture(scope="session")
def served(roomy_folder, tmp_path_factory):  # noqa: F811
    with running(roomy_folder, data_dir=tmp_path_factory.mktemp("data"), ping_s=0.5) as server:
        yield server


@pytest.fixture
def http(served):
    with served.client() as client:
        yield client
        canary(client)


def canary(client):
    """A plain request right afterwards is served."""
    body = {"prompt": "the cat", "max_tokens": 2, "temperature": 0}
    assert client.post("/v1/completions", json=body, timeout=10).status_code == 200

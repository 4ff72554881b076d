"""The admin's route that profiles the next steps of a server that is at work."""

import hashlib
import threading
import time
from contextlib import contextmanager

import pytest
from tests.server.running import running

from ridgeline.engine.messages import StopProfile

ADMIN, USER = "admin-key", "user-key"


@pytest.fixture(scope="module")
def guarded(roomy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (ADMIN, USER)]
    (folder / "keys.toml").write_text(
        f'admin_sha256 = "{digests[0]}"\n[[key]]\nname = "user"\nsha256 = "{digests[1]}"\n'
    )
    keys = str(folder / "keys.toml")
    with running(roomy_folder, data_dir=folder / "data", api_key_file=keys) as server:
        yield server


def post(server, key, **body):
    with server.client() as client:
        return client.post("/admin/profile", json=body, headers={"x-api-key": key})


@contextmanager
def at_work(server):
    """One request after the other."""
    over = threading.Event()

    def work():
        body = {"prompt": "a b c", "max_tokens": 64, "ignore_eos": True}
        with server.client(headers={"x-api-key": USER}) as client:
            while not over.is_set():
                assert client.post("/v1/completions", json=body).status_code == 200

    worker = threading.Thread(target=work)
    worker.start()
    yield
    over.set()
    worker.join()


def test_a_profile_of_steps_at_work(guarded):
    with at_work(guarded):
        reply = post(guarded, ADMIN, steps=5)
        by_layer = post(guarded, ADMIN, steps=2, per_layer=True).json()
    assert reply.status_code == 200
    found = reply.json()
    assert found["num_plans"] == 5
    assert found["num_steps"] >= 5
    assert {"MLP", "Attend", "Head"} <= {row["name"] for row in found["ops"]}
    assert found["sum_s"] == pytest.approx(found["seconds"], rel=0.03)
    assert {row["layer"] for row in by_layer["ops"] if row["name"] == "MLP"} >= {0, 1}


def test_it_is_the_admins(guarded):
    assert post(guarded, USER, steps=1).status_code == 403
    with guarded.client() as client:
        assert client.post("/admin/profile", json={}).status_code == 401


def test_steps_that_do_not_come(guarded):
    idle = post(guarded, ADMIN, steps=3, timeout_s=0.1)
    assert idle.status_code == 400
    assert "No step ran" in idle.text
    with at_work(guarded):
        assert post(guarded, ADMIN, steps=1).json()["num_plans"] == 1  # another may follow


def test_one_at_a_time(guarded):
    replies = []
    first = threading.Thread(
        target=lambda: replies.append(post(guarded, ADMIN, steps=256, timeout_s=20))
    )
    first.start()
    engine = guarded.server.engine
    while not engine._asked:
        time.sleep(0.01)
    assert "already" in post(guarded, ADMIN, steps=1).text
    with guarded.client(headers={"x-api-key": USER}) as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    guarded.on_loop(_stop(engine))
    first.join()
    assert replies[0].status_code == 200
    assert replies[0].json()["num_plans"] < 256


async def _stop(engine):
    (number,) = engine._asked  # the other one was refused
    engine._host.send(StopProfile(number=number))


@pytest.mark.parametrize("body", [{"steps": 0}, {"steps": 257}, {"timeout_s": 0}, {"step": 1}])
def test_what_cannot_be_asked_for(guarded, body):
    assert post(guarded, ADMIN, **body).status_code == 400

"""Stored data with a key: no text in any file, and damage or another key is told in a sentence."""

import json
import os
import shutil
import time

import pytest
from tests.server.running import running
from tests.server.test_jobs import LINE, batch_file, finished, lines_of, start, tenant_of, upload
from tests.server.test_jobs import with_key as client_of

from ridgeline.core.config import EngineConfig
from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import SettingsError
from ridgeline.kvcache.tiers.entry import tenant_mark
from ridgeline.server.config import ServerConfig
from ridgeline.server.jobs.database import Database
from ridgeline.server.jobs.files import FileStore
from ridgeline.server.serving import serve

SECRET = "the-secret-cat"


@pytest.fixture
def key_path(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def encrypted(roomy_folder, tmp_path, key_path):
    keys = {"api_key": ("a" * 32, "b" * 32), "admin_api_key": "c" * 32}
    engine = {"kv_disk_tier_path": str(tmp_path / "data/kv"), "encryption_key_file": key_path}
    data_dir = tmp_path / "data"
    with running(
        roomy_folder, data_dir=data_dir, encryption_key_file=key_path, engine=engine, **keys
    ) as server:
        yield server


def stored(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def holders(folder, *texts):
    """Files that hold a text, as it is, as JSON or as base64 would show it."""
    return [
        (path, text)
        for path, content in stored(folder).items()
        for text in texts
        if text.encode() in content
    ]


def test_no_text_is_found_in_any_file(encrypted, tmp_path, monkeypatch):
    async def keep(_):
        """So the log of changes has all that was ever written."""

    monkeypatch.setattr(Database, "erase", keep)
    content = batch_file(3, body={"prompt": SECRET, "logprobs": 1, **LINE})
    with client_of(encrypted, "a") as http:
        own = upload(http, SECRET.encode() * 20_000, filename=f"{SECRET}.txt", purpose="user_data")
        file = upload(http, content)
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"about": SECRET},
        }
        batch = finished(http, http.post("/v1/batches", json=body).json()["id"])
        wrong = finished(http, start(http, SECRET.encode())["id"])
        answer = http.post("/v1/completions", json={"prompt": f"{SECRET} " * 20, **LINE})
        assert answer.status_code == 200
        # All of it is there for its owner.
        assert batch["metadata"] == {"about": SECRET}
        assert wrong["errors"]["data"][0]["line"] == 1
        lines = lines_of(http, batch["output_file_id"])
        assert [line["custom_id"] for line in lines] == ["line-0", "line-1", "line-2"]
        text = lines[0]["response"]["body"]["choices"][0]["text"]
        assert http.get(f"/v1/files/{own['id']}").json()["filename"] == f"{SECRET}.txt"
        read = http.get(f"/v1/files/{own['id']}/content").content
        assert read == SECRET.encode() * 20_000
    folder = tmp_path / "data"
    assert len(stored(folder)) > 5
    assert (
        holders(folder, SECRET, "custom_id", "line-1", "invalid_json", *([text] * (len(text) > 3)))
        == []
    )
    # The same bytes are found by this test where they are not encrypted.
    (folder / "plain").write_bytes(content)
    assert holders(folder, SECRET)


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "plain"])
def test_a_damaged_file_is_told_in_a_sentence(encrypted, tmp_path, damage):
    with client_of(encrypted, "a") as ours, client_of(encrypted, "b") as theirs:
        first = upload(ours, os.urandom(200_000), purpose="user_data")
        second = upload(theirs, os.urandom(200_000), purpose="user_data")
        paths = [tmp_path / "data/files" / each["id"] for each in (first, second)]
        content = bytearray(paths[0].read_bytes())
        match damage:
            case "flip":
                content[100] ^= 1
            case "cut":
                del content[30_000:]
            case "swap":
                content = bytearray(paths[1].read_bytes())
            case "plain":
                content = bytearray(b"text")
        paths[0].write_bytes(content)
        answer = ours.get(f"/v1/files/{first['id']}/content")
        assert answer.status_code == 500, answer.text
        assert "encrypted" in answer.json()["error"]["message"]
        assert theirs.get(f"/v1/files/{second['id']}/content").status_code == 200


def make(folder, key=None):
    database = Database(folder, Encryption(key))
    FileStore(database)
    database.close()


def test_a_folder_is_opened_with_its_own_key_only(tmp_path):
    key = os.urandom(32)
    for _ in range(2):
        make(tmp_path, key)
    with pytest.raises(SettingsError, match="another key"):
        make(tmp_path, os.urandom(32))
    with pytest.raises(SettingsError, match="give its --encryption-key-file"):
        make(tmp_path)
    make(tmp_path, key)  # nor is it still locked


def test_a_folder_with_plain_files_is_not_encrypted_by_halves(http, served, tmp_path):
    upload(http, b"plain", purpose="user_data")
    shutil.copytree(served.server.jobs._database.folder, tmp_path / "copy")
    with pytest.raises(SettingsError, match="not encrypted"):
        make(tmp_path / "copy", os.urandom(32))


def test_keys_of_engine_and_data_folder_do_not_differ(key_path, tmp_path):
    engine = EngineConfig(kv_disk_tier_path=tmp_path)
    with pytest.raises(SettingsError, match="both settings"):
        serve(engine, ServerConfig(encryption_key_file=key_path))


def test_a_bad_key_is_told_before_the_model_is_loaded(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        serve(EngineConfig(model="nowhere"), ServerConfig(encryption_key_file=str(tmp_path / "no")))


def test_texts_of_a_deleted_tenant_stay_in_no_file(roomy_folder, tmp_path):
    keys = {"api_key": ("a" * 32, "b" * 32), "admin_api_key": "c" * 32}
    with (
        running(roomy_folder, data_dir=tmp_path, **keys) as server,
        client_of(server, "a") as ours,
        client_of(server, "b") as theirs,
        client_of(server, "c") as admin,
    ):
        upload(theirs, b"kept", purpose="user_data", filename="kept.txt")
        line = json.dumps(SECRET)[1:-1]
        content = batch_file(3, body={"prompt": line, "echo": True, **LINE})
        finished(ours, start(ours, content)["id"])
        upload(ours, b"own", filename=f"{SECRET}.txt", purpose="user_data")
        assert holders(tmp_path, SECRET)
        answer = admin.delete(f"/admin/tenants/{tenant_of(server, 'a')}")
        assert answer.json()["deleted"]
        assert holders(tmp_path, SECRET, "line-1") == []
        assert holders(tmp_path, "kept.txt")


def test_texts_of_deleted_files_and_batches_that_are_over_leave_the_database(http, served):
    folder = served.server.jobs._database.folder
    file = upload(http, b"own", filename=f"{SECRET}.txt", purpose="user_data")
    assert holders(folder, SECRET)
    http.delete(f"/v1/files/{file['id']}")
    assert holders(folder, SECRET) == []
    content = batch_file(3, body={"prompt": SECRET, "echo": True, **LINE})
    batch = finished(http, start(http, content)["id"])
    for kind in ("input", "output"):
        http.delete(f"/v1/files/{batch[f'{kind}_file_id']}")
    assert holders(folder, SECRET) == []


def test_deleting_a_tenant_removes_its_kv_from_the_disk(encrypted, tmp_path):
    body = {"prompt": "the cat sat on the mat " * 20, **LINE}

    with client_of(encrypted, "a") as ours, client_of(encrypted, "c") as admin:
        assert ours.post("/v1/completions", json=body).status_code == 200
        tenant = tenant_of(encrypted, "a")
        folder = tmp_path / "data/kv" / tenant_mark(tenant)
        until(lambda: list(folder.glob("*.kv")))
        admin.delete(f"/admin/tenants/{tenant}")
        until(lambda: not folder.exists())


def until(is_so):
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)

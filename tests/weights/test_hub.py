"""Downloads from a fake hub: what is fetched, what is kept after a failure, and what is said."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants, file_download

from ridgeline import weights
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    DiskError,
    ModelNotFoundError,
    NetworkError,
    RidgelineError,
    UnsupportedModelError,
)
from ridgeline.engine.loading import describe_model
from ridgeline.weights import Checkpoint, locate_model
from ridgeline.weights.hub_progress import DownloadCount

NAME = "owner/name"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
WANTED = [
    "chat_template.jinja",
    "config.json",
    "model-1.safetensors",
    "model-2.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
]


def check_model(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == WANTED
    with Checkpoint(folder) as checkpoint:
        assert np.array_equal(checkpoint.tensor("a"), np.arange(50_000.0))
        assert np.array_equal(checkpoint.tensor("b"), np.arange(70_000.0))


def leftovers() -> list[str]:
    return [str(path) for path in Path(constants.HF_HUB_CACHE).rglob("*.incomplete")]


def sentence(error: RidgelineError) -> str:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 300
    return text


def test_download_takes_what_is_needed_and_no_pickle(hub, capfd) -> None:
    calls: list[tuple[int, int, str]] = []
    check_model(locate_model(NAME, progress=lambda *call: calls.append(call)))
    assert sorted(hub.fetched()) == WANTED
    total = sum(len(hub.files[name]) for name in WANTED)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert {call[1:] for call in calls} == {(total, NAME)}
    assert calls[-1][0] == total
    assert len(calls) > 3
    assert capfd.readouterr() == ("", "")


def test_progress_never_goes_back_nor_over_the_total() -> None:
    calls: list[tuple[int, int, str]] = []
    count = DownloadCount(100, "x", lambda *call: calls.append(call))
    count.start_attempt()
    for num_bytes in (30, 20, 60):
        count.set_attempt_bytes(num_bytes)
    assert count.start_attempt() == 60
    count.set_attempt_bytes(10)
    assert [call[0] for call in calls] == [30, 60, 70]
    count.finish()
    count.set_attempt_bytes(500)
    assert calls[3:] == [(100, 100, "x")]


def test_progress_ends_at_the_total_though_files_are_alike(hub) -> None:
    hub.files |= dict.fromkeys(["a.json", "b.json"], b"1" * 50_000)  # fetched once
    calls: list[tuple[int, int, str]] = []
    locate_model(NAME, need_weights=False, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] > 100_000


def test_a_progress_that_fails_does_not_hang_this_download_or_the_next(hub) -> None:
    def fail(*_: object) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        locate_model(NAME, progress=fail)
    check_model(locate_model(NAME))


def test_a_second_call_fetches_nothing_nor_does_an_offline_one(hub, monkeypatch) -> None:
    folder = locate_model(NAME)
    hub.requests.clear()
    assert locate_model(NAME, progress=lambda *_: pytest.fail("nothing to do")) == folder
    assert hub.fetched() == []
    hub.requests.clear()
    assert locate_model(NAME, offline=True) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_model(NAME) == folder
    assert hub.requests == []


def test_without_weights_only_small_files_are_fetched(hub) -> None:
    folder = locate_model(NAME, need_weights=False)
    assert sorted(file.name for file in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    with pytest.raises(ModelNotFoundError, match="or not completely"):
        locate_model(NAME, offline=True)
    assert locate_model(NAME, need_weights=False, offline=True) == folder


def test_a_model_that_is_not_accepted_is_refused_before_its_weights_are_fetched(hub) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "config.json").is_file()
        raise UnsupportedModelError("No.")

    with pytest.raises(UnsupportedModelError, match="No"):
        locate_model(NAME, accept=refuse)
    assert [name for name in hub.fetched() if name.endswith(".safetensors")] == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "kimi_linear"}, r"'kimi_linear' is not supported: it needs a decay"),
        ({"model_type": "x", "ssm_cfg": {}}, r"'x' is not supported: it needs a state-space scan"),
        ({"model_type": "llama", "clip_qkv": 3}, "sets clip_qkv to 3"),
        (LLAMA | {"quantization_config": {"quant_method": "new"}}, "'new'"),
    ],
)
def test_an_unsupported_model_is_named_with_what_it_needs_and_not_downloaded(
    hub, config, text
) -> None:
    hub.files["config.json"] = json.dumps(config).encode()
    hub.files["tokenizer.json"] = b"not read"
    with pytest.raises(UnsupportedModelError, match=text):
        describe_model(EngineConfig(model=NAME))
    assert [name for name in hub.fetched() if name.endswith(".safetensors")] == []


def test_a_stream_that_ends_early_is_resumed_where_it_broke(hub, monkeypatch, capfd) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cuts["model-2.safetensors"] = [105_000]
    calls: list[int] = []
    check_model(locate_model(NAME, progress=lambda done, *_: calls.append(done)))
    first, second = hub.ranges("model-2.safetensors")
    assert (first, second) == (None, "bytes=100000-")
    assert calls[-1] == sum(len(hub.files[name]) for name in WANTED)
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_is_reset_is_tried_again(hub) -> None:
    hub.resets["model-2.safetensors"] = [100_000]
    check_model(locate_model(NAME))
    assert hub.fetched().count("model-2.safetensors") == 2
    assert hub.fetched().count("model-1.safetensors") == 1
    assert leftovers() == []


def test_a_connection_that_never_holds_ends_in_an_error(hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.resets["model-2.safetensors"] = [20_000 * count for count in range(1, 10)]
    with pytest.raises(NetworkError) as caught:
        locate_model(NAME)
    assert "could not be downloaded" in sentence(caught.value)
    assert hub.fetched().count("model-2.safetensors") == 3
    assert leftovers() == []
    with pytest.raises(ModelNotFoundError):
        locate_model(NAME, offline=True)


class FullDisk:
    """A file that takes some bytes and then fails."""

    def __init__(self, file, code: int) -> None:
        self.file, self.code, self.room = file, code, 40_000

    def write(self, data: bytes) -> int:
        part = data[: self.room]
        self.room -= len(part)
        self.file.write(part)
        if len(part) < len(data):
            raise OSError(self.code, os.strerror(self.code))
        return len(part)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk is full"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "permission"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_a_disk_that_fails_leaves_nothing_that_looks_whole(hub, monkeypatch, code, text) -> None:
    real = file_download.http_get
    with monkeypatch.context() as patch:
        patch.setattr(
            file_download, "http_get", lambda url, file, **k: real(url, FullDisk(file, code), **k)
        )
        with pytest.raises(DiskError, match=text) as caught:
            locate_model(NAME)
    assert NAME in sentence(caught.value)
    assert leftovers() == []
    whole = {path.stat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*")}
    assert whole <= {len(data) for data in hub.files.values()}
    with pytest.raises(ModelNotFoundError):
        locate_model(NAME, offline=True)
    check_model(locate_model(NAME))


def test_a_partial_download_is_not_whole_even_without_the_record(
    hub, monkeypatch, no_network
) -> None:
    folder = locate_model(NAME)
    (folder / "model-2.safetensors").unlink()
    for record in Path(constants.HF_HUB_CACHE).rglob("trees/*.json"):
        record.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    with pytest.raises(ModelNotFoundError, match="not completely"):
        locate_model(NAME, offline=True)
    no_network()
    with pytest.raises(NetworkError):
        locate_model(NAME)


def test_a_download_folder_that_cannot_be_made(hub, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DiskError):
        locate_model(NAME)


def test_too_little_room_is_said_before_anything_is_fetched(hub, monkeypatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DiskError, match=r"GB free.*HF_HOME"):
        locate_model(NAME)
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("part", "answer", "kind", "text"),
    [
        ("/api/models", (404, "RepoNotFound"), ModelNotFoundError, "no hub model"),
        ("/api/models", (401, ""), ModelNotFoundError, "HF_TOKEN"),
        ("/api/models", (403, ""), ModelNotFoundError, "HF_TOKEN"),
        ("/api/models", (403, "GatedRepo"), ModelNotFoundError, "gated"),
        ("/api/models", (500, ""), NetworkError, "answered 500"),
        ("/resolve/", (403, "GatedRepo"), ModelNotFoundError, "gated"),
        ("/tree/", (404, "RepoNotFound"), ModelNotFoundError, "no hub model"),
    ],
)
def test_answers_of_the_hub(hub, part, answer, kind, text) -> None:
    hub.answers[part] = answer
    with pytest.raises(kind, match=text) as caught:
        locate_model(NAME)
    assert NAME in sentence(caught.value)


def test_an_unknown_revision_and_one_that_is_no_name(hub) -> None:
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'"):
        locate_model(NAME, revision="v9")
    hub.requests.clear()
    for revision in ("../../x", "a b", "", "/x", "x\0"):
        with pytest.raises(ModelNotFoundError, match="not the name of a revision"):
            locate_model(NAME, revision=revision)
    assert hub.requests == []


@pytest.mark.parametrize(
    "page", ["<html>Log in to the hotel network</html>", "[]", '{"siblings": 3}']
)
def test_an_answer_that_is_no_hubs(hub, monkeypatch, page: str) -> None:
    monkeypatch.setattr("json.dumps", lambda *_, **__: page)
    with pytest.raises(RidgelineError) as caught:
        locate_model(NAME)
    sentence(caught.value)


def test_no_network(no_network) -> None:
    no_network()
    with pytest.raises(NetworkError, match="folder, or use the embedded model") as caught:
        locate_model(NAME)
    assert "ConnectError" in sentence(caught.value)


def test_no_network_but_downloaded_before(no_network) -> None:
    folder = locate_model(NAME)
    no_network()
    assert locate_model(NAME) == folder


@pytest.mark.parametrize(
    ("removed", "added", "kind", "text"),
    [
        (["config.json"], [], ModelNotFoundError, r"no config\.json"),
        (["model.safetensors.index.json"], [], UnsupportedModelError, r"pytorch_model\.bin"),
        (["model.safetensors.index.json"], ["x.gguf"], ModelNotFoundError, "only as GGUF"),
    ],
)
def test_repositories_that_are_no_model(hub, removed, added, kind, text) -> None:
    for name in removed:
        del hub.files[name]
    hub.files |= dict.fromkeys(added, b"GGUF")
    with pytest.raises(kind, match=text):
        locate_model(NAME)
    assert hub.fetched() == []


def test_the_token_comes_from_the_environment(hub, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    locate_model(NAME, need_weights=False)
    assert hub.tokens == {"Bearer hf_secret"}


def test_kill_9_during_a_download(hub, tmp_path: Path) -> None:
    hub.stalls["model-2.safetensors"] = 100_000
    # The package without its __init__, which would import torch.
    code = (
        "import sys, types, ridgeline.core; package = types.ModuleType('ridgeline.weights');"
        f"package.__path__ = {[str(Path(weights.__file__).parent)]};"
        "sys.modules['ridgeline.weights'] = package;"
        f"from ridgeline.weights.location import locate_model; locate_model({NAME!r})"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        assert hub.stalled.wait(300)
        process.send_signal(signal.SIGKILL)
    hub.released.set()
    assert len(leftovers()) >= 1
    with pytest.raises(ModelNotFoundError, match="not completely"):
        locate_model(NAME, offline=True)
    hub.stalls.clear()
    check_model(locate_model(NAME))

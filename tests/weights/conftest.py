"""A hub on 127.0.0.1 that speaks what ``snapshot_download`` needs, and fails on request."""

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

NAME = "owner/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One repository. ``answers`` replaces answers: (status, X-Error-Code) by part of the path.

    ``cuts`` and ``resets`` break off the body of a file after so many bytes, once for each number
    in the list: with an early end, and with a TCP reset. ``stall`` waits there instead, until set.
    """

    files: dict[str, bytes]
    url: str = ""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    resets: dict[str, list[int]] = field(default_factory=dict)
    stalls: dict[str, int] = field(default_factory=dict)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def fetched(self) -> list[str]:
        """The files of which bytes were asked for, in order."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if "GET" in method
                and "/resolve/" in path]  # fmt: skip

    def ranges(self, file: str) -> list[str | None]:
        """The Range headers with which a file was asked for."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(file)]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.add(self.headers.get("Authorization"))
        for part, (status, code) in self.hub.answers.items():
            if part in path:
                return self._send(status, b"", {"X-Error-Code": code} if code else {})
        if path.startswith("/api/") and f"/tree/{COMMIT}" in path:
            return self._json([{"type": "file", "path": n, "size": len(d), "oid": _etag(d)}
                               for n, d in self.hub.files.items()])  # fmt: skip
        if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            siblings = [{"rfilename": n, "size": len(d)} for n, d in self.hub.files.items()]
            return self._json({"id": NAME, "sha": COMMIT, "siblings": siblings})
        if path.startswith(f"/api/models/{NAME}/revision/"):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        for revision in (COMMIT, "main"):
            prefix = f"/{NAME}/resolve/{revision}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in self.hub.files:
                return self._file(path.removeprefix(prefix))
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        data = self.hub.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._send(200, data, headers, name)
        start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self._send(206, data[start:], headers, name)

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for breaks, hard in ((self.hub.cuts, False), (self.hub.resets, True)):
            if breaks.get(name):
                self._break_off(body[: breaks[name].pop(0)], hard)
                return
        if name in self.hub.stalls:
            self.wfile.write(body[: self.hub.stalls[name]])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(300)
            body = body[self.hub.stalls[name] :]
        self.wfile.write(body)

    def _break_off(self, body: bytes, hard: bool) -> None:
        self.wfile.write(body)
        self.wfile.flush()
        self.close_connection = True
        if hard:
            time.sleep(0.2)  # a reset also takes back what has not been read yet
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:40]


def model_files() -> dict[str, bytes]:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": save({"a": torch.arange(50_000.0)}),
        "model-2.safetensors": save({"b": torch.arange(70_000.0)}),
        # Never to be downloaded:
        "pytorch_model.bin": b"pickle",
        "training_args.pt": b"pickle",
        "consolidated.safetensors": b"a second copy",
        "original/params.json": b"{}",
        "onnx/model.safetensors": b"another format",
        "README.md": b"text",
    }


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let the hub library use ``url``; it reads ``HF_ENDPOINT`` only once."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Cuts the network: from the call on the hub is where nobody listens."""

    def cut() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            point_at(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}")

    return cut


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(files=model_files())
    handler = type("Handler", (_Handler,), {"hub": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    point_at(monkeypatch, fake.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    yield fake
    fake.released.set()
    server.shutdown()
    server.server_close()

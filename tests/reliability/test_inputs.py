"""Items 3, 4, 8 to 12 and 14 of the catalogue: what callers send."""

import asyncio
import json
import logging
import random
import re
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.server.running import running

from ridgeline.server.app import all_operations
from ridgeline.server.http import MAX_HEAD_BYTES

EDGES = [-1, 0, 2**31, 2**64, 10**30, -(2**63), 1.5, "1", True, [], {}, "NaN", 1e308]
RAW_EDGES = ["NaN", "Infinity", "-Infinity", "1e999", "-0.0", "00", "0x1", "1_0"]
VALID = {
    "/v1/completions": {"prompt": "the", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def numeric_fields():
    """Every numeric field of every route with a schema, from the schemas themselves."""
    for operation in all_operations():
        if operation.request is None or operation.path not in VALID:
            continue
        for field in msgspec.structs.fields(operation.request):
            text = str(field.type)
            if "int" in text or "float" in text:
                yield operation.path, field.name


FIELDS = sorted(numeric_fields())


def test_the_fields_were_found():
    assert ("/v1/completions", "temperature") in FIELDS
    assert ("/v1/messages", "max_tokens") in FIELDS
    assert len(FIELDS) > 60


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_numeric_edges(http, path, field, counted):
    """Item 3: each is served or refused as JSON with the field's name."""
    for value in EDGES:
        check_answer(http.post(path, json={**VALID[path], field: value}))
    for raw in RAW_EDGES:
        body = json.dumps(VALID[path])[:-1] + f', "{field}": {raw}}}'
        check_answer(http.post(path, content=body))
    counted(len(EDGES) + len(RAW_EDGES))


def check_answer(response):
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("count", [99, pytest.param(1000, marks=pytest.mark.slow)])
def test_token_ids_out_of_range_leave_neighbours_alone(http, served, count, counted):
    """Item 4: a neighbour's output is the same whatever others send."""
    body = {"prompt": "the cat sat", "max_tokens": 24, "temperature": 1, "seed": 3,
            "ignore_eos": True}  # fmt: skip
    alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    attacks = [
        {"prompt": [bad]} for bad in (-1, 300, 2**31, 2**63, 2**64)
    ] + [
        {"prompt": "a", "stop_token_ids": [10**9]},
        {"prompt": "a", "logit_bias": {"999999": 100}},
        {"prompt": "a", "logit_bias": {"-1": 100}},
        {"prompt": [[1, 2], [300]]},
    ]  # fmt: skip

    async def attack():
        import httpx

        slots = asyncio.Semaphore(50)

        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:

            async def one(index):
                async with slots:
                    return await client.post("/v1/completions", json=attacks[index % len(attacks)])

            neighbour = asyncio.create_task(client.post("/v1/completions", json=body))
            answers = await asyncio.gather(*map(one, range(count)))
            return (await neighbour).json(), [answer.status_code for answer in answers]

    beside, statuses = asyncio.run(attack())
    assert set(statuses) == {400}
    assert beside["choices"][0]["text"] == alone
    counted(count)


def address(served):
    return "127.0.0.1", int(served.url.rsplit(":", 1)[1])


def exchange(served, *pieces, wait_s=10.0):
    """Send bytes as they are; return what came back until the server closed, or was silent."""
    with socket.create_connection(address(served), timeout=10) as connection:
        received = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        connection.settimeout(wait_s)
        try:
            while data := connection.recv(65536):
                received += data
        except (ConnectionResetError, TimeoutError):
            pass
        return received


def post(path, body, *headers):
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: localhost", b"connection: close",
             b"content-type: application/json", *headers]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def length(body):
    return b"content-length: %d" % len(body)


def test_bodies_over_the_limit(http, served):
    """Item 8: refused by what is declared, and by what arrives."""
    limit = served.server.config.max_body_mib << 20
    declared = post("/v1/completions", b"", b"content-length: %d" % (limit + 1))
    assert exchange(served, declared).startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    head = post("/v1/completions", b"", b"transfer-encoding: chunked")
    before = psutil.Process().memory_info().rss
    answer = exchange(served, head, *[chunk] * (limit // 65536 + 2))
    assert answer.startswith(b"HTTP/1.1 413") or answer == b""
    assert psutil.Process().memory_info().rss - before < 80 << 20


@pytest.mark.parametrize("opener", ["[", '{"a":'])
@pytest.mark.parametrize("where", ["prompt", "metadata", "chat_template_kwargs"])
def test_deep_json(http, opener, where):
    for depth in (99, 101, 10**5):
        body = f'{{"{where}": ' + opener * depth
        check_answer(http.post("/v1/completions", content=body))
        check_answer(http.post("/v1/chat/completions", content=body))


def test_one_byte_chunks(http, served):
    body = json.dumps(VALID["/v1/completions"]).encode()
    chunks = [b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body))]
    head = post("/v1/completions", b"", b"transfer-encoding: chunked")
    assert exchange(served, head, *chunks, b"0\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES + 1000, 1 << 20])
def test_long_heads(http, served, size):
    for head in (
        post("/v1/completions", b"", b"x-long: " + b"a" * size),
        b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * (size // 6) + b"\r\n",
    ):
        answer = exchange(served, head)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]


def test_slow_senders(http, served):
    """Sockets that hold back hold nobody up."""
    before = psutil.Process().memory_info().rss
    held = [socket.create_connection(address(served)) for _ in range(200)]
    for index, connection in enumerate(held):
        part = post("/v1/completions", b'{"prompt"', b"content-length: 1000")
        connection.sendall(part[: 20 + index % len(part)])
    before_they_end_s = served.server.config.body_timeout_s / 2
    body = VALID["/v1/completions"]
    answer = http.post("/v1/completions", json=body, timeout=before_they_end_s)
    assert answer.status_code == 200
    assert psutil.Process().memory_info().rss - before < 50 << 20
    for connection in held:
        connection.close()


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
AMBIGUOUS = [
    (b"content-length: 5", b"content-length: 6"),
    (b"content-length: 5", b"content-length: 5"),
    (b"content-length: 5, 6",),
    (b"content-length: +5",),
    (b"content-length: -5",),
    (b"content-length: 0x5",),
    (b"content-length: 5 5",),
    (b"content-length : 5",),
    (b" content-length: 5",),
    (b"content-length: 5", b"transfer-encoding: chunked"),
    (b"transfer-encoding: chunked", b"content-length: 5"),
    (b"transfer-encoding: chunked", b"transfer-encoding: identity"),
    (b"transfer-encoding: xchunked",),
    (b"transfer-encoding: chunked, identity",),
    (b"transfer-encoding : chunked",),
    (b"transfer-encoding: \x0bchunked",),
    (b"transfer-encoding: chunked\x00",),
    (b"transfer-encoding:\r\n chunked", b"content-length: 5"),
    (b"host: other", b"content-length: 5"),
    (b"x: y\x00z", b"content-length: 5"),
    (b"x: y\nz: 1", b"content-length: 5", b"content-length: 6"),
    (b"x y: z", b"content-length: 5", b"transfer-encoding: chunked"),
    (b"transfer-encoding: gzip, chunked",),
    (b"transfer-encoding: chunked, chunked",),
    (b"transfer-encoding: chunked;q=1",),
]


@pytest.mark.parametrize("headers", AMBIGUOUS)
def test_two_readings_of_a_request(http, served, headers, counted):
    """Item 9: refused, or read one way and the connection closed; never a second answer."""
    for body in (b"hello", b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b""):
        answer = exchange(served, post("/v1/completions", body + SMUGGLED, *headers), wait_s=0.3)
        assert answer.count(b"HTTP/1.1 ") <= 1, answer
        assert b'"object":"list"' not in answer
        counted(1)


NAMES = ["../x", "../../../etc/x", "/etc/x", "a\0b", "..", ".", "", "a/b/c", "\\\\x\\y", "C:\\x",
         "x" * 5000, "ünï", "%2e%2e%2fx", "a\r\nb", "\u202ex", "jobs.sqlite", "lock"]  # fmt: skip


def names(count):
    """So many: those above, and others glued together from them."""
    rng = random.Random(0)
    made = ["".join(rng.choices(NAMES, k=rng.randint(2, 4))) for _ in range(count - len(NAMES))]
    return NAMES + made


@pytest.mark.parametrize("count", [len(NAMES), pytest.param(500, marks=pytest.mark.slow)])
def test_file_names_never_become_paths(http, served, count, counted):
    """Item 10: whatever a file is called, only the data folder changes, by the server's names."""
    jobs = served.server.jobs
    for name in names(count):
        boundary = b"xyz"
        shown = name.encode().replace(b"\r", b"%0D").replace(b"\n", b"%0A").replace(b'"', b"%22")
        body = (
            b"--xyz\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nuser_data\r\n"
            b"--xyz\r\ncontent-disposition: form-data; name=\"file\"; filename=\"" + shown
            + b'"\r\n\r\ncontent\r\n--xyz--\r\n'
        )  # fmt: skip
        kind = {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
        response = http.post("/v1/files", content=body, headers=kind)
        assert response.status_code in (200, 400), response.text
    written = {path.name for path in jobs.files._folder.iterdir()}
    assert all(re.fullmatch(r"file-[0-9a-f]{24}", name) for name in written)
    top = {path.name for path in jobs.files._folder.parent.iterdir()}
    assert top <= {"files", "lock", "jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm"}
    for path in ("../jobs.sqlite", "%2e%2e%2fjobs.sqlite", "file-../../x", "lock", "a" * 5000):
        assert http.get(f"/v1/files/{path}/content").status_code in (400, 404)
    counted(count)


class Listener:
    """Counts who connects, by either address family."""

    def __init__(self):
        self.calls = 0
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        with suppress(OSError):  # a machine without IPv6
            self._sockets.append(socket.create_server(("::1", self.port), family=socket.AF_INET6))

    def count(self):
        """Those that wait to be accepted."""
        for listener in self._sockets:
            listener.settimeout(0.3)
            with suppress(TimeoutError):
                while True:
                    listener.accept()[0].close()
                    self.calls += 1
        return self.calls

    def close(self):
        for listener in self._sockets:
            listener.close()


def requests_with(url):
    """A request for every place that a URL has in some provider's API."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_data": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    for part in parts:
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}
    for kind in ("image", "document"):
        block = {"type": kind, "source": {"type": "url", "url": url}}
        content = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
        yield "/v1/messages", content
        yield "/v1/messages/count_tokens", content
    for part in (
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
    ):
        yield "/v1/responses", {"input": [{"role": "user", "content": [part]}]}
    text = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    server = {"type": "url", "url": url, "name": "x"}
    yield "/v1/responses", {"input": "a", "tools": [{"type": "mcp", "server_url": url}]}
    yield "/v1/messages", text | {"mcp_servers": [server]}
    schema = {"$ref": url, "$schema": url, "$id": url}
    yield "/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    yield "/v1/chat/completions", text | {"response_format": shaped}
    for field in ("model", "adapter", "lora_request", "webhook", "chat_template", "file_url"):
        yield "/v1/completions", {"prompt": "a", "max_tokens": 1, field: url}
    yield "/v1/batches", {"input_file_id": url, "endpoint": url, "completion_window": "24h"}


URLS = ["http://127.0.0.1:{port}/", "http://[::1]:{port}/", "http://169.254.169.254/latest",
        "file:///etc/passwd", "http://localhost:{port}/x.png", "data:image/png;base64,AAAA",
        "ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/_x",
        "//127.0.0.1:{port}/x.png"]  # fmt: skip


def test_no_url_is_ever_fetched(http, counted):
    """Item 11: a listener that nobody calls, whatever place a URL comes in."""
    listener = Listener()
    with socket.create_connection(("127.0.0.1", listener.port)):
        assert listener.count() == 1, "it would not notice"
    sent = 0
    for url in (url.format(port=listener.port) for url in URLS):
        for path, body in requests_with(url):
            answer = http.post(path, json=body)
            assert answer.status_code in (200, 400, 404), (path, body, answer.text)
            assert answer.status_code != 200 or not has_part(body), (path, body)
            sent += 1
    assert listener.count() == 1
    listener.close()
    assert sent > 200
    counted(sent)


def has_part(body):
    """Whether it has content that is no text; that is refused, not left out in silence."""
    return any(isinstance(each.get("content"), list) for each in body.get("messages", ()))


@pytest.mark.parametrize("count", [37, pytest.param(250, marks=pytest.mark.slow)])
def test_control_characters_stay_within_a_log_line(roomy_folder, tmp_path, caplog, count, counted):
    """Item 12: one line of JSON for each of four requests, whatever is in its strings."""
    nasty = [chr(code) for code in [*range(32), 0x7F, 0x85, 0x2028, 0x2029, 0x9B]]
    rng = random.Random(0)
    nasty += ["".join(rng.choices(nasty, k=5)) for _ in range(count - len(nasty))]
    settings = {"data_dir": tmp_path, "log_requests": True}
    with (
        caplog.at_level(logging.INFO),
        running(roomy_folder, **settings) as server,
        server.client() as client,
    ):
        for char in nasty:
            text = f"a{char}\n{char}SECRET-PROMPT"
            client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
            client.post("/v1/completions", json={"prompt": "a", "model": text})
            client.post("/v1/completions", json={text: 1})
            client.get("/v1/models/" + "".join(f"%{b:02x}" for b in text.encode()))
    lines = [r.getMessage() for r in caplog.records if r.name == "ridgeline.requests"]
    assert len(lines) == 4 * len(nasty)
    for line in lines:
        assert len(line.splitlines()) == 1
        entry = json.loads(line)
        assert entry["status"] in (200, 400, 404)
        assert (entry["ttft_s"] is not None) == (entry["output_tokens"] > 0)
        entry.pop("path", None)  # what was asked for in vain is told
        assert "SECRET" not in json.dumps(entry)
    counted(len(lines))


FORBIDDEN = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|dill|shelve|marshal|cloudpickle|joblib)\b"
    r"|(?<![\w.])(?:eval|exec)\(|\bos\.system\(|shell=True|trust_remote_code\s*=\s*True"
    r"|weights_only\s*=\s*False|\byaml\.load\(",
    re.MULTILINE,
)


def test_no_pickle_eval_or_shell_in_the_source(counted):
    """Item 14."""
    source = Path(__file__).parents[2] / "src"
    files = list(source.rglob("*.py"))
    found = [
        f"{path}:{match.group().strip()}"
        for path in files
        for match in FORBIDDEN.finditer(path.read_text())
    ]
    assert not found, found
    assert FORBIDDEN.search("import pickle\n")
    counted(len(files))

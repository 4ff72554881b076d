"""Requests as real clients put them on the wire."""

import gzip
import http.client
import json
import socket
import time

import pytest

BODY = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
JSON = {"content-type": "application/json"}
# What curl --http2 and Java's HttpClient send with every request.
OFFER = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}


@pytest.fixture
def connection(served):
    """One connection to the server, kept for several requests."""
    opened = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
    yield opened
    opened.close()


def test_an_offer_of_http_2_costs_no_body(connection):
    for _ in range(2):
        connection.request("POST", "/v1/completions", BODY, JSON | OFFER)
        answer = connection.getresponse()
        assert (answer.status, answer.version) == (200, 11), answer.read()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 2


def test_a_body_may_speak_of_upgrades(connection):
    text = b"a\r\n\r\nb\r\nUpgrade: h2c\r\n"
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + text
        + b"\r\n--x--\r\n"
    )
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}\r\n\r\n"
    connection.connect()
    connection.sock.sendall(head.encode() + form)  # as one piece
    answer = http.client.HTTPResponse(connection.sock)
    answer.begin()
    file = json.loads(answer.read())
    connection.request("GET", f"/v1/files/{file['id']}/content")
    assert connection.getresponse().read() == text


def test_the_head_of_a_stream_leaves_the_connection_free(connection):
    connection.request("HEAD", "/live")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


def test_a_compressed_body_is_refused_as_that(connection):
    body = gzip.compress(BODY)
    connection.request("POST", "/v1/completions", body, JSON | {"content-encoding": "gzip"})
    answer = connection.getresponse()
    assert answer.status == 415
    assert "gzip" in json.loads(answer.read())["error"]["message"]
    connection.request("POST", "/v1/completions", BODY, JSON | {"content-encoding": "identity"})
    assert connection.getresponse().status == 200


def received(served, *pieces, pause_s=0.0):
    """Sends the pieces, each as a segment of its own, and reads until the server closes."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, piece in enumerate(pieces):
            time.sleep(pause_s if number else 0)
            sock.sendall(piece)
        return read_to_end(sock)


def read_to_end(sock):
    read = b""
    while piece := sock.recv(1 << 16):
        read += piece
    return read


def exchange(served, *pieces, pause_s=0.0):
    """The one answer that is ``received``: its status, headers and body."""
    head, _, body = received(served, *pieces, pause_s=pause_s).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def posted(body, *headers, version="1.1", path="/v1/completions"):
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@pytest.mark.parametrize("cut", ["\r\nUp", "\r", "\r\n", "\r\nUpgrade:", "h2c\r\n", "h2c\r\n\r"])
def test_an_offer_in_two_segments_costs_no_body(served, cut):
    request = posted(BODY, "Connection: close, Upgrade", "Upgrade: h2c")
    at = request.index(cut.encode(), request.index(b"Upgrade") - 2) + len(cut)
    status, _, body = exchange(served, request[:at], request[at:], pause_s=0.05)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2), body


def test_an_offer_a_byte_at_a_time_costs_no_body(served):
    request = posted(BODY, "Upgrade: h2c", "Connection: Upgrade, close")
    status, _, body = exchange(served, *(bytes([byte]) for byte in request), pause_s=0.001)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2), body


def test_what_cannot_change_the_protocol_is_told_so(served):
    request = b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status, _, body = exchange(served, request)
    assert (status, b"The protocol cannot be changed." in body) == (400, True), body


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BAD = [
    b"nonsense\r\n\r\n",
    posted(b"", "Host: other"),
    posted(BODY, "Connection: Upgrade", "Upgrade: h2c"),  # hidden by what is before it
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n",
]


@pytest.mark.parametrize("bad", BAD, ids=["nonsense", "two_hosts", "offer", "bad_chunk"])
def test_no_error_stands_for_the_answer_to_an_earlier_request(served, bad):
    assert received(served, HEALTH + bad) == b""


@pytest.mark.parametrize("bad", BAD, ids=["nonsense", "two_hosts", "offer", "bad_chunk"])
def test_no_error_is_within_the_answer_to_an_earlier_request(served, bad):
    body = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "stream": True}
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(posted(json.dumps(body).encode()))
        read = sock.recv(1 << 16)
        sock.sendall(HEALTH + bad)  # queued behind the stream, and what is no request
        read += read_to_end(sock)
    assert read.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400" not in read


def test_a_body_that_stops_being_http_is_refused(served):
    status, _, body = exchange(served, BAD[-1])
    assert (status, b"Invalid HTTP request" in body) == (400, True), body


def test_a_body_that_stops_being_http_after_its_answer_gets_no_second_one(served):
    head = posted(b"", "Content-Encoding: gzip", "Transfer-Encoding: chunked")
    head = head.replace(b"Content-Length: 0\r\n", b"")
    read = received(served, head, b"no\r\n", pause_s=0.2)
    assert (read[:13], read.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 415 ", 1), read


@pytest.mark.parametrize("version", ["0.9", "1.0"])
def test_a_stream_over_old_http_ends_with_the_connection(served, version):
    body = {"prompt": "ab", "max_tokens": 8, "temperature": 0, "stream": True}
    wire = posted(json.dumps(body).encode(), version=version)
    status, headers, events = exchange(served, wire)
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    lines = [line for line in events.decode().split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    whole = exchange(served, posted(json.dumps(body | {"stream": False}).encode(), version="1.0"))
    assert text == json.loads(whole[2])["choices"][0]["text"]


def test_a_whole_answer_over_http_1_0_has_its_length(served):
    _, headers, body = exchange(served, posted(BODY, version="1.0"))
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["usage"]["completion_tokens"] == 2
    status, headers, body = exchange(served, b"HEAD /live HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert (status, body) == (200, b"")


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (b"nonsense\r\n\r\n", "Invalid HTTP request"),
        (posted(b"", "Host: other"), "two readings"),
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 70_000, "too long"),
    ],
)
def test_what_is_no_request_gets_an_error_with_an_id(served, http, request_, told):
    name = 'ridgeline:http_requests_total{method="other",route="refused",status="400"}'

    def counted():
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = counted()
    status, headers, body = exchange(served, request_)
    assert status == 400
    assert headers["x-request-id"].startswith("req-")
    assert told in json.loads(body)["error"]["message"]
    assert counted() == before + 1


@pytest.mark.parametrize(
    "name", ["Authorization", "X-Api-Key", "Origin", "Content-Type", "Content-Encoding"]
)
def test_a_header_that_decides_something_is_there_once(served, name):
    request = posted(BODY, f"{name}: identity", f"{name}: other", "Connection: close")
    status, _, body = exchange(served, request)
    assert (status, b"two readings" in body) == (400, True), body


CHUNKED_BODY = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def coded(coding, version="1.1"):
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Transfer-Encoding: {coding}\r\n\r\n".encode() + CHUNKED_BODY


@pytest.mark.parametrize(
    ("coding", "version"),
    [
        ("gzip, chunked", "1.1"),
        ("identity, chunked", "1.1"),
        ("chunked, chunked", "1.1"),
        ("chunked;q=1", "1.1"),
        ("chunked,", "1.1"),
        ("gzip", "1.1"),
        ("identity", "1.1"),
        ("chunked", "1.0"),  # which has no chunks: RFC 9112, section 6.1
    ],
)
def test_no_transfer_coding_but_chunks(served, coding, version):
    status, _, body = exchange(served, coded(coding, version))
    assert status == 400, body


@pytest.mark.parametrize("coding", ["chunked", "Chunked", " chunked "])
def test_chunks_are_read(served, coding):
    status, _, body = exchange(served, coded(coding))
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)


def half_closed(served, request):
    """What comes after a client has sent a request and shut down its sending side."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        return read_to_end(sock)


def asked(**fields):
    body = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "temperature": 0, **fields}
    return json.dumps(body).encode()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_reads_still_gets_its_answer(served, version, stream):
    answer = half_closed(served, posted(asked(stream=stream), version=version))
    *interim, final = answer.split(b"HTTP/1.1 ")[1:]
    assert set(interim) <= {b"100 Continue\r\n\r\n"}  # which asks whether it is still there
    assert not (interim and version == "1.0")
    assert final.startswith(b"200 OK\r\n")
    assert b"connection: close" in final
    assert (b"[DONE]" if stream else b'"completion_tokens":200') in final


def test_requests_in_a_row_are_answered_before_the_end(served):
    answer = half_closed(served, HEALTH + posted(asked()) + HEALTH)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("sent", [b"", b"GET /hea", posted(BODY)[:-1], HEALTH[:-1], HEALTH * 2])
def test_an_end_without_a_whole_request_ends_the_connection(served, sent):
    assert half_closed(served, sent).count(b"HTTP/1.1 200 OK") == sent.count(HEALTH)


def test_what_is_no_request_of_anthropics_has_their_shape(served):
    request = posted(b"", "Host: other", path="/v1/messages")
    _, headers, body = exchange(served, request)
    error = json.loads(body)
    assert (error["type"], error["request_id"]) == ("error", headers["request-id"])

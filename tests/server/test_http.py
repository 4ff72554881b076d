"""Requests as real clients put them on the wire."""

import gzip
import http.client
import json

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

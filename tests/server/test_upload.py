"""Forms that are no forms: each is the caller's mistake."""

import asyncio
import random

import pytest

from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.upload import Upload

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n'
    b"--x--\r\n"
)
PIECES = [b"\r\n", b"\n", b"\r", b"--x", b"--x--", b'"', b";", b":", b"\0", b"=", b"\xff", b"--",
          b"\r\n\r\n", b'Content-Disposition: form-data; name="file"\r\n']  # fmt: skip


def read(target, body):
    """An upload whose body comes in two pieces."""
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    upload = Upload(b"multipart/form-data; boundary=x", target)
    asyncio.run(upload.read(receive))
    return upload


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_damaged_form_is_refused_or_read(tmp_path, count):
    generator = random.Random(count)
    refused = 0
    for number in range(count):
        form = bytearray(FORM)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(form))
            length = generator.choice((0, 0, 1, 30))
            form[at : at + length] = b"" if length else generator.choice(PIECES)
        try:
            read(tmp_path / str(number), bytes(form))
        except ApiError as error:
            refused += 1
            assert 400 <= error.status < 500
    assert 0 < refused < count


def test_a_part_without_a_header_is_no_part_of_the_file(tmp_path):
    target = tmp_path / "file"
    upload = read(target, FORM.removesuffix(b"--x--\r\n") + b"--x\r\n\r\nmore\r\n--x--\r\n")
    assert (target.read_bytes(), upload.size) == (b"abc", 3)


@pytest.mark.parametrize(
    "boundary", [b"b" * 71, b"b" * 257, b"b" * 60_000, b'"', b'""', b"", b"\xff", b"a;boundary=b"]
)
def test_a_boundary_that_is_none_is_a_bad_request(http, boundary):
    headers = {"content-type": b"multipart/form-data; boundary=" + boundary}
    assert http.post("/v1/files", content=FORM, headers=headers).status_code == 400

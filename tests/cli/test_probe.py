"""``ridgeline probe`` against endpoints that are not ours."""

import contextlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from ridgeline.bench.serve.prompts import text_of
from ridgeline.cli import main

OPTIONS = ("--input-lens", "4,16", "--concurrency", "1,2", "--requests", "2", "--json")


@contextlib.contextmanager
def endpoint(answer):
    """A server whose answer to a POST is ``answer(path, body)``: a status, and pieces or a text."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send(200, json.dumps({"data": [{"id": "other"}]}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answer(self.path, body)
            if status == 200:
                events = [json.dumps(each) for each in content] + ["[DONE]"]
                content = "".join(f"data: {each}\n\n" for each in events)
            self.send(status, content)

        def send(self, status, text):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def probe(capsys, answer, *options):
    with endpoint(answer) as url:
        code = main(["probe", url, *OPTIONS, *options])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else None, captured.err


def only_text(path, body):
    """Refuses token ids and unknown fields, and ends after two tokens."""
    if not isinstance(body["prompt"], str) or "ignore_eos" in body:
        return 400, "prompt must be a string"
    usage = {"prompt_tokens": 2 * len(body["prompt"].split()), "completion_tokens": 2}
    choices = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
    return 200, [*choices, {"choices": [], "usage": usage}]


def only_chat(path, body):
    if path != "/v1/chat/completions":
        return 404, "no such path"
    assert body["messages"][0]["role"] == "user"
    return 200, [{"choices": [{"delta": {"content": text}}]} for text in ("", "a", "b")]


@pytest.mark.parametrize(
    ("answer", "prompts", "counted"),
    [(only_text, "text", [8, 32]), (only_chat, "chat", [4, 16])],
)
def test_plain_endpoints_that_answer_shortly(capsys, answer, prompts, counted):
    code, report, _ = probe(capsys, answer)
    assert code == 0
    assert report["prompts"] == prompts
    assert [point["input_tokens"] for point in report["lengths"]] == counted
    assert [load["num_failed"] for load in report["loads"]] == [0, 0]
    assert report["error"] is None
    assert report["throttled_at"] is None
    assert report["loads"][0]["output_tokens_s"] > 0


def test_only_too_many_requests_are_throttling(capsys):
    def answer(path, body):
        return (429, "slow down") if body["max_tokens"] == 32 else only_text(path, body)

    code, report, _ = probe(capsys, answer)
    assert code == 0  # prompts alone were answered
    assert report["throttled_at"] == 1
    assert report["loads"][0]["num_throttled"] == 2
    assert report["error"] is None


def test_other_failures_are_told_and_are_not_throttling(capsys):
    def answer(path, body):
        return (500, "out of paper") if body["max_tokens"] == 32 else only_text(path, body)

    code, report, _ = probe(capsys, answer)
    assert code == 0
    assert report["throttled_at"] is None
    assert report["loads"][0]["num_failed"] == 2
    assert "500" in report["error"]
    assert "out of paper" in report["error"]


def test_nothing_but_failures_is_exit_code_1(capsys):
    code, report, err = probe(capsys, lambda *_: (500, "out of paper"))
    assert (code, report) == (1, None)  # the first request says it all
    assert "out of paper" in err
    code, report, _ = probe(capsys, lambda *_: (500, "out of paper"), "--prompts", "ids")
    assert code == 1
    assert report["num_completed"] == 0
    assert "out of paper" in report["error"]


def test_an_endpoint_that_takes_nothing_says_why(capsys):
    code, _, err = probe(capsys, lambda *_: (404, "not here"))
    assert code == 1
    assert "not here" in err


def test_texts_differ_as_their_tokens_do():
    assert text_of((1, 2, 3)) == text_of((1, 2, 3))
    assert text_of((1, 2, 3)) != text_of((1, 2, 4))
    assert len(text_of(tuple(range(200))).split()) == 200

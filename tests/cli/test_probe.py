"""``ridgeline probe`` against endpoints that are not ours."""

import contextlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from ridgeline.bench.serve.prompts import text_of
from ridgeline.bench.serve.stand_in import StandInTime, verdict
from ridgeline.cli import main

OPTIONS = ("--input-lens", "4,16", "--concurrency", "1,2", "--requests", "2", "--rounds", "2")


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
        code = main(["probe", url, *OPTIONS, "--json", *options])
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
    assert [point["num_failed"] for point in report["points"]] == [0, 0]
    assert [point["num_requests"] for point in report["points"]] == [2 * 2, 2 * 4]
    assert [len(rounds) for rounds in report["output_tokens_s"]] == [2, 2]
    assert report["error"] is None
    assert report["throttling"] is None
    assert report["points"][0]["output_tokens_s"] > 0


def test_only_too_many_requests_are_throttling(capsys):
    def answer(path, body):
        return (429, "slow down") if body["max_tokens"] == 32 else only_text(path, body)

    code, report, _ = probe(capsys, answer)
    assert code == 0  # prompts alone were answered
    assert report["throttling"] == {"concurrency": 1, "refused_share": 1, "completed_rpm": 0}
    assert report["error"] is None


def test_other_failures_are_told_and_are_not_throttling(capsys):
    def answer(path, body):
        return (500, "out of paper") if body["max_tokens"] == 32 else only_text(path, body)

    code, report, _ = probe(capsys, answer)
    assert code == 0
    assert report["throttling"] is None
    assert report["points"][0]["num_failed"] == 4
    assert "500" in report["error"]
    assert "out of paper" in report["error"]


def test_the_report_is_that_of_a_load(capsys):
    """Percentiles, goodput and cost; time to publish leaves out reasoning."""

    def thinks(path, body):
        if path != "/v1/chat/completions":
            return 404, "no such path"
        deltas = [{"reasoning_content": "hm"}, {"content": "a"}, {"content": "b"}]
        return 200, [{"choices": [{"delta": delta}]} for delta in deltas]

    prices = ("--usd-per-1m-input", "1", "--usd-per-1m-output", "10")
    code, report, _ = probe(capsys, thinks, "--slo", "ttft=60,tpot=60", *prices)
    assert code == 0
    for point in report["points"]:
        assert point["good_share"] == 1
        assert point["rpm"]["good"] == pytest.approx(60 * point["goodput"])
        assert point["request_rate"] is None
        assert point["time_to_publish_s"]["count"] == point["num_requests"]
        assert point["time_to_publish_s"]["p50"]["value"] >= point["ttft_s"]["p50"]["value"]
        assert point["cost"]["usd_per_1k_good"] == pytest.approx(1e3 * (4 * 1 + 3 * 10) / 1e6)


def test_people_see_the_same_table(capsys):
    with endpoint(only_text) as url:
        assert main(["probe", url, *OPTIONS, "--slo", "chat", "--shape", "llama-3.1-8b",
                     "--hardware", "h100"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    for words in ("requests/s good (RPM)", "TTFT p90", "Were it llama-3.1-8b", "roof ms"):
        assert words in out


def test_a_stand_in_that_is_slower_than_what_was_measured_is_refuted(capsys):
    """This endpoint answers at once: it cannot read 140 GB for each token."""
    shape = ("--shape", "llama-3.1-70b", "--hardware", "h100")
    _, report, _ = probe(capsys, only_text, *shape)
    found = report["stand_in"]
    assert found["implied"]["bytes_per_s"] > 3.35e12
    assert "h100" not in found["implied"]["devices"]
    assert any(each["mbu"] > 1 and not each["is_possible"] for each in found["times"])
    assert found["verdict"].startswith("It is not that: ")
    for option in ("--hardware", "h100"), ("--quantization", "int8"):
        assert probe(capsys, only_text, *option)[0] == 2  # of no shape
    assert probe(capsys, only_text, *shape, "-tp", "65")[0] == 2  # of 64 heads


def times(*measured_s):
    """Of steps that take 2 s at the least, and are predicted to take 3 to 5."""
    return [
        StandInTime(
            phase="decode", batch=1, tokens=8.0, measured_s=seconds, roof_s=2.0, predicted_s=4.0,
            low_s=3.0, high_s=5.0, mfu=0.1, mbu=0.5, bound="memory",
        )
        for seconds in measured_s
    ]  # fmt: skip


def test_a_stand_in_is_confirmed_only_where_most_times_are_as_predicted():
    assert verdict(times(3.5, 4.5, 9.0)).startswith("It can be that: ")
    for none in (verdict(times(9.0, 8.0, 2.5)), verdict(times(4.0, 9.0))):
        assert "can be that" not in none
        assert none.startswith("Nothing speaks for it: ")
    assert "0 of 3 times are within" in verdict(times(9.0, 8.0, 2.5))
    assert "2 above it and 1 below" in verdict(times(9.0, 8.0, 2.5))
    assert verdict(times(4.0, 4.0, 1.0)).startswith("It is not that: ")


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

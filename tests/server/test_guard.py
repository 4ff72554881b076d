"""A guard stands before every route: what it holds back is in no byte of any answer."""

import json
import re
import time

import pytest

PIECES = ("fine ", "so far, s", "ecr", "et words", " follow")
SHOWN = "fine so far, "
ASKED = [{"role": "user", "content": "the cat"}]
ROUTES = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 9, "logprobs": 1},
    "/v1/chat/completions": {"messages": ASKED, "logprobs": True, "return_token_ids": True},
    "/v1/responses": {"input": "the cat", "top_logprobs": 1},
    "/v1/messages": {"messages": ASKED, "max_tokens": 9},
    "/api/chat": {"messages": ASKED, "logprobs": True},
    "/api/generate": {"prompt": "the cat", "raw": True},
    "/completion": {"prompt": "the cat", "n_predict": 9, "return_tokens": True},
}
ENDS = {
    "/v1/completions": '"finish_reason":"content_filter"',
    "/v1/chat/completions": '"finish_reason":"content_filter"',
    "/v1/responses": '"incomplete_details":{"reason":"content_filter"}',
    "/v1/messages": '"stop_reason":"refusal"',
    "/api/chat": '"done_reason":"content_filter"',
    "/api/generate": '"done_reason":"content_filter"',
    "/completion": '"stop_type":"content_filter"',
}


@pytest.fixture
def listed(guards, tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("secret words\n")
    guards(word_list=str(path))


def asked(served, path):
    return ROUTES[path] | ({"model": served.server.model_name} if "/api/" in path else {})


def texts_of(value):
    """Every text in an answer."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts_of(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_nothing_that_is_planted_leaks(served, http, says, listed, path, stream):
    says(*PIECES)
    answer = http.post(path, json={**asked(served, path), "stream": stream})
    assert answer.status_code == 200, answer.text
    body = answer.text
    assert ENDS[path] in body
    lines = [line.removeprefix("data: ") for line in body.splitlines() if "{" in line]
    texts = [text for line in lines for text in texts_of(json.loads(line))]
    assert any("fine" in text for text in texts)
    for text in (*texts, "".join(texts)):
        assert "ecr" not in text and "et words" not in text and "follow" not in text
    if '"logprobs"' in body and not stream and path == "/v1/chat/completions":
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"] == SHOWN
        assert choice["token_ids"] == [65]
        assert len(choice["logprobs"]["content"]) == 1


def test_each_of_several_answers_is_guarded(http, says, listed):
    says(*PIECES)
    body = {"messages": ASKED, "n": 3}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [each["message"]["content"] for each in choices] == [SHOWN] * 3
    best = {"prompt": ["a", "b"], "n": 1, "best_of": 2, "max_tokens": 9}
    choices = http.post("/v1/completions", json=best).json()["choices"]
    assert [each["text"] for each in choices] == [SHOWN] * 2


def test_reasoning_and_calls_are_guarded_as_text(http, says, listed):
    says("<think>secret", " words</think>", "yes")
    answer = http.post("/v1/chat/completions", json={"messages": ASKED}).json()["choices"][0]
    assert answer["message"].get("reasoning") in (None, "")
    assert (answer["message"]["content"], answer["finish_reason"]) == ("", "content_filter")


def test_lines_of_batches_are_guarded(http, says, listed):
    says(*PIECES)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    data = json.dumps(line | {"body": {"messages": ASKED}}) + "\n"
    file = http.post("/v1/files", files={"file": ("in", data)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
    batch = http.post("/v1/batches", json=body).json()
    while batch["status"] != "completed":
        time.sleep(0.02)
        batch = http.get(f"/v1/batches/{batch['id']}").json()
    text = http.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert "content_filter" in text and SHOWN in text and "ecr" not in text


LATE = ("<think>hm</think>", "so ", "bad", " it", " is", " over")
KEPT = "so  it"


@pytest.mark.parametrize("path", ROUTES)
def test_what_is_taken_back_is_told(served, http, says, guards, path):
    """In a stream; what is not streamed was never there."""
    guards(scorer="tests.engine.guard.scorers:Late")
    says(*LATE)
    body = asked(served, path)
    whole = http.post(path, json={**body, "stream": False}).text
    whole = re.sub(r"[0-9a-f]{24}", "", whole)  # ids may spell it
    assert "bad" not in whole.replace('"stop_reason":"bad"', "")
    assert ENDS[path] in whole and "retraction" not in whole.replace('"retraction":null', "")
    said = http.post(path, json={**body, "stream": True}).text
    assert ENDS[path] in said
    lines = [line.removeprefix("data: ") for line in said.splitlines() if "retraction" in line]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    found = told[0].get("retraction") or told[0]["choices"][0]["retraction"]
    has_content = path not in ("/v1/completions", "/completion", "/api/generate")
    assert (found["start"], found["stop"]) == (20, 23)
    assert found.get("content") == (KEPT if has_content else found.get("content"))
    if path == "/v1/responses":
        output = json.loads(said.splitlines()[-2].removeprefix("data: "))["response"]["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        assert output[1]["content"][0]["text"] == KEPT


def test_a_scorer_that_dies_ends_the_answer_and_serves_the_next(http, says, guards):
    guards(scorer="tests.engine.guard.scorers:Troubled", timeout_s=1.0)
    body = {"messages": ASKED}
    says("a", " die", " c")
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "content_filter")
    assert choice["stop_reason"] == "guard_failed"
    says("a", "b")
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
    metrics = http.get("/metrics").text
    for kind in ("release", "failed"):
        assert f'ridgeline:guard_decisions_total{{decision="{kind}"' in metrics
    assert 'finished_reason="content_filter"' in metrics


def test_time_to_publish_is_after_what_is_held_back(served, http, says, guards):
    guards(scorer="tests.engine.guard.scorers:Troubled", window_chars=1000)
    says("a", "b", "c")
    before = len(served.server.metrics.recent)
    http.post("/v1/chat/completions", json={"messages": ASKED, "stream": True})
    finished = served.server.metrics.recent[before]
    assert finished.publish_s > finished.ttft_s

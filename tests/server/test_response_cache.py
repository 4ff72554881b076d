"""Answers that would come out the same again come out of the cache, byte for byte, to their key."""

import hashlib
import json

import pytest
from tests.server.running import running

from ridgeline.core.request import CompletionChunk, FinishReason
from ridgeline.engine.guard.config import GuardConfig
from ridgeline.engine.guard.guard import Guard
from ridgeline.server.response_cache import ResponseCache, cache_key

ASKED = [{"role": "user", "content": "the cat"}]
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def keyed(roomy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    names = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "admin")}
    keys = folder / "keys.toml"
    keys.write_text(
        f'admin_sha256 = "{names["admin"]}"\n'
        + "".join(f'[[key]]\nname = "{name}"\nsha256 = "{names[name]}"\n' for name in "ab")
    )
    with running(
        roomy_folder, data_dir=folder / "data", api_key_file=str(keys), response_cache_mib=1,
        price_input=1.0, price_output=2.0,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(autouse=True)
def emptied(keyed):
    for tenant in "ab":
        keyed.server.responses.delete_tenant(tenant)


def post(keyed, path, body, key="a"):
    with keyed.client(headers={"authorization": f"Bearer {key}"}) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer, answer.headers.get("x-ridgeline-cache")


def same(value):
    """An answer without what tells one request from another."""
    if isinstance(value, list):
        return [same(item) for item in value]
    if not isinstance(value, dict):
        return value
    skipped = ("id", "created", "created_at", "usage", "item_id", "timings", "total_duration",
               "prompt_eval_duration", "eval_duration", "tokens_cached", "call_id")  # fmt: skip
    return {name: same(item) for name, item in value.items() if name not in skipped}


REQUESTS = {
    "/v1/completions": {"prompt": ["the cat", "the dog"], "n": 2, "logprobs": 2, **GREEDY},
    "/v1/chat/completions": {"messages": ASKED, "logprobs": True, "top_logprobs": 2, "seed": 7},
    "/v1/responses": {"input": "the cat", "temperature": 0, "max_output_tokens": 6},
    "/v1/messages": {"messages": ASKED, **GREEDY},
    "/completion": {"prompt": "the cat", "n_predict": 6, "temperature": 0, "n_probs": 2},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_hit_is_the_answer_itself(keyed, path):
    body = REQUESTS[path] | ({"max_tokens": 6} if path == "/v1/chat/completions" else {})
    first, state = post(keyed, path, body)
    assert state == "miss"
    again, state = post(keyed, path, body)
    assert state.startswith("hit; id=rc_")
    assert same(again.json()) == same(first.json())
    if "usage" in again.json() and path.startswith("/v1/c"):
        usage, before = again.json()["usage"], first.json()["usage"]
        assert usage["prompt_tokens"] == before["prompt_tokens"]
        assert usage["completion_tokens"] == before["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
        made = usage["completion_tokens_details"]["cached_tokens"]
        assert made == usage["completion_tokens"]
        assert usage["cost"]["decode"] == usage["cost"]["prefill"] == 0
    _, state = post(keyed, path, body, key="b")
    assert state == "miss"


def test_a_stream_is_kept_and_answered_alike(keyed):
    body = {"messages": ASKED, **GREEDY}
    whole, _ = post(keyed, "/v1/chat/completions", body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed, state = post(keyed, "/v1/chat/completions", body | options)
    assert state.startswith("hit")
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[6:7] == "{"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole.json()["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens_details"]["cached_tokens"] == 6


@pytest.mark.parametrize(
    "change",
    [{"temperature": 1.0}, {"max_tokens": 7}, {"stop": ["x"]}, {"prompt": "the caT"},
     {"logit_bias": {"5": 1.0}}, {"cache_salt": "s"}, {"logprobs": 1}, {"seed": 3}],
)  # fmt: skip
def test_what_differs_is_another_answer(keyed, change):
    body = {"prompt": "the cat", **GREEDY}
    post(keyed, "/v1/completions", body)
    _, state = post(keyed, "/v1/completions", body | change)
    assert state == (None if change.get("temperature") else "miss")
    if change.get("temperature"):  # drawn anew: neither looked up nor kept
        assert keyed.server.responses.num_entries == 1


def test_answers_are_forgotten_one_by_one_by_key_and_with_their_tenant(keyed):
    def ask(key):
        return post(keyed, "/v1/completions", {"prompt": "the cat", **GREEDY}, key)[1]

    def delete(key, path):
        with keyed.client(headers={"authorization": f"Bearer {key}"}) as http:
            return http.delete(path)

    ask("a"), ask("b")
    entry = ask("a").partition("id=")[2]
    assert delete("b", f"/v1/response-cache/{entry}").status_code == 404
    assert delete("a", f"/v1/response-cache/{entry}").json()["deleted"] == 1
    assert (ask("a"), ask("b")[:3]) == ("miss", "hit")
    assert delete("a", "/v1/response-cache").json()["deleted"] == 1
    assert (ask("a"), ask("b")[:3]) == ("miss", "hit")
    assert delete("admin", "/admin/tenants/b").status_code == 200
    assert (ask("a")[:3], ask("b")) == ("hit", "miss")


def test_a_guard_sees_what_was_kept_again(keyed, monkeypatch, tmp_path):
    (tmp_path / "list").write_text("never written by it")
    guard = Guard(GuardConfig(word_list=str(tmp_path / "list")), lambda *_: None)
    monkeypatch.setattr(keyed.server, "guard", guard)
    body = {"prompt": "the cat", "n": 2, **GREEDY}
    first, state = post(keyed, "/v1/completions", body)
    assert state == "miss"
    again, state = post(keyed, "/v1/completions", body)
    assert state.startswith("hit")
    assert same(again.json()) == same(first.json())
    text = first.json()["choices"][0]["text"]
    (tmp_path / "other").write_text(text[1:4])
    other = Guard(GuardConfig(word_list=str(tmp_path / "other")), lambda *_: None)
    monkeypatch.setattr(keyed.server, "guard", other)
    filtered, state = post(keyed, "/v1/completions", body)
    assert state.startswith("hit")
    assert {c["finish_reason"] for c in filtered.json()["choices"]} == {"content_filter"}
    assert text[1:4] not in filtered.text
    guard.close(), other.close()


def test_an_answer_that_did_not_end_is_not_kept(keyed):
    with keyed.client(headers={"authorization": "Bearer a"}) as http:
        body = {"prompt": "the cat", "max_tokens": 1500, "temperature": 0, "stream": True}
        with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            next(response.iter_lines())
    assert keyed.server.responses.num_entries == 0


def a_chunk(text):
    return CompletionChunk(
        request_id=0, index=0, text=text, token_ids=(1,), finish_reason=FinishReason.STOP
    )


def test_memory_and_time_are_bounded_and_no_tenant_drives_out_another():
    now = [0.0]
    cache = ResponseCache(10_000, 60.0, lambda: now[0])
    cache.put("quiet", b"q", [a_chunk("kept")])
    for number in range(200):
        cache.put("loud", cache_key(number), [a_chunk("x" * 300)])
        assert cache.num_bytes <= 10_000
    assert cache.get("quiet", b"q").chunks[0].text == "kept"
    assert cache.get("loud", cache_key(0)) is None
    assert cache.get("loud", cache_key(199)) is not None
    cache.put("loud", b"huge", [a_chunk("x" * 20_000)])
    assert cache.get("loud", b"huge") is None
    now[0] = 60.0
    assert cache.get("quiet", b"q") is None
    assert cache.delete_tenant("loud") > 0
    assert cache.num_bytes == cache.num_entries == 0

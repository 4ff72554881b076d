"""Similar questions over HTTP: a like one gets the answer again, of the same key alone."""

import hashlib
import time

import numpy as np
import pytest
from tests.server.running import running

from ridgeline.engine.client import Embedding
from ridgeline.server.conversation import ChatInput, ToolSpec
from ridgeline.server.semantic.answers import UserQuestion, question_of, same_text
from ridgeline.server.semantic.judge import says_the_same


@pytest.fixture(scope="module")
def keyed(roomy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("similar")
    names = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "admin")}
    keys = folder / "keys.toml"
    keys.write_text(
        f'admin_sha256 = "{names["admin"]}"\n'
        + "".join(f'[[key]]\nname = "{name}"\nsha256 = "{names[name]}"\n' for name in "ab")
    )
    with running(
        roomy_folder, data_dir=folder / "data", api_key_file=str(keys),
        semantic_cache_error=0.1, semantic_cache_audit=1.0,
    ) as server:  # fmt: skip
        yield server


def ask(keyed, text, key="a", **fields):
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 5}
    with keyed.client(headers={"authorization": f"Bearer {key}"}) as http:
        answer = http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    for _ in range(500):  # until what was answered has been compared
        if not keyed.server.similar.is_busy:
            return answer, answer.headers.get("x-ridgeline-cache")
        time.sleep(0.01)
    raise AssertionError("it is never compared")


def until_hit(keyed, text, key="a"):
    for number in range(30):
        answer, state = ask(keyed, text, key)
        if state != "miss":
            return answer, state, number
    raise AssertionError("it never hit")


def test_what_came_out_alike_often_enough_is_given_out(keyed):
    first, state = ask(keyed, "the cat sat")
    assert state == "miss"
    answer, state, number = until_hit(keyed, "the cat sat")
    assert number >= 2
    assert state.startswith("hit; id=sc_") and "similarity=1.0000" in state
    message = first.json()["choices"][0]["message"]
    assert answer.json()["choices"][0]["message"] == message
    usage = answer.json()["usage"]
    assert usage["completion_tokens_details"]["cached_tokens"] == usage["completion_tokens"]
    streamed, state = ask(keyed, "the cat sat", stream=True)
    assert state.startswith("hit") and message["content"][:2] in streamed.text
    cache = keyed.server.similar.cache
    assert (cache.num_audits, cache.num_wrong) == (cache.num_hits, 0)
    with keyed.client(headers={"authorization": "Bearer admin"}) as http:
        text = http.get("/metrics").text
    assert "ridgeline:semantic_cache_wrong_share_high" in text
    assert "ridgeline:semantic_cache_audits_total" in text
    for changed in (
        {"key": "b"}, {"temperature": 0.5}, {"max_tokens": 6},
        {"chat_template_kwargs": {"enable_thinking": True}}, {"cache_salt": "s"},
    ):  # fmt: skip
        assert ask(keyed, "the cat sat", **changed)[1] == "miss"
    for plain in ({"n": 2}, {"logprobs": True}, {"structured_outputs": {"choice": ["a", "b"]}}):
        assert ask(keyed, "the cat sat", **plain)[1] is None


def test_a_like_question_with_another_answer_is_kept_beside(keyed, monkeypatch):
    """Its vector is all but the same: no threshold would tell the two apart."""
    near = {"do this": (1.0, 0.0), "do not do this": (1.0, 0.02)}

    async def embed(token_ids, **_):
        text = keyed.server.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Embedding(vector=np.array(near[text], dtype=np.float32), num_tokens=1)

    whole = {text: ask(keyed, text, "b")[0].json()["choices"][0]["message"] for text in near}
    monkeypatch.setattr(keyed.server.engine, "embed", embed)
    assert whole["do this"] != whole["do not do this"]
    for _ in range(6):
        for text in near:
            answer, _ = ask(keyed, text, cache_salt="beside")
            assert answer.json()["choices"][0]["message"] == whole[text]


def test_entries_are_forgotten_by_their_key(keyed):
    _, state, _ = until_hit(keyed, "on the mat", "b")
    entry = state.partition("id=")[2].partition(";")[0]
    with keyed.client(headers={"authorization": "Bearer a"}) as http:
        assert http.delete(f"/v1/response-cache/{entry}").status_code == 404
    with keyed.client(headers={"authorization": "Bearer b"}) as http:
        assert http.delete(f"/v1/response-cache/{entry}").json()["deleted"] == 1
    assert ask(keyed, "on the mat", "b")[1] == "miss"
    with keyed.client(headers={"authorization": "Bearer admin"}) as http:
        assert http.delete("/admin/tenants/b").status_code == 200
    assert keyed.server.similar.cache.delete_tenant("b") == 0


def test_what_is_asked_and_all_beside_it():
    def question(*texts, **settings):
        turns = [{"role": "user", "content": text} for text in texts]
        return question_of(ChatInput(messages=turns, **settings))

    asked = question("hello", "what?")
    assert asked.text == "what?"
    assert question("hello", "why?").context == asked.context
    assert question("bye", "what?").context != asked.context
    tool = ToolSpec(name="look")
    assert question("hello", "what?", tools=(tool,)).context != asked.context
    assert question("what?", tools=(tool,), choice="required") is None
    assert question(" ") is None
    assert question_of(ChatInput(messages=[{"role": "assistant", "content": "x"}])) is None


def test_the_model_says_whether_two_answers_are_one(keyed):
    """Whatever it says, being random: it is yes or no, and not for a model without a template."""
    server = keyed.server
    asked = UserQuestion(text="what?", context=b"")
    verdict = says_the_same(server.engine, server.in_thread, asked, "this", "that")
    assert keyed.on_loop(verdict) in (True, False)


def test_answers_are_compared_without_spaces_and_case():
    assert same_text("Yes,  it is\n", "yes, it is")
    assert not same_text("it is", "it is not")

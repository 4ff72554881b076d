"""Named prefixes: who names one gets the answer to the whole prompt; each key for itself."""

import asyncio
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.server.running import running

LONG = "the cat sat on the mat and " * 12
OTHER = "on the mat the cat sat, or " * 12
SYSTEM = {"role": "system", "content": "be kind " * 20}
ENGINE = {"max_model_len": 256, "max_num_seqs": 4, "executor": "cpu", "block_tokens": 16}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def keyed(roomy_folder, tmp_path_factory):
    """Two keys and an admin; a pool of 64 blocks of 16 tokens, which a few prompts fill."""
    folder = tmp_path_factory.mktemp("caches")
    names = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "admin")}
    keys = folder / "keys.toml"
    keys.write_text(
        f'admin_sha256 = "{names["admin"]}"\n'
        + "".join(f'[[key]]\nname = "{name}"\nsha256 = "{names[name]}"\n' for name in "ab")
    )
    with running(
        roomy_folder, data_dir=folder / "data", engine=ENGINE,
        api_key_file=str(keys), price_input=1.0, price_output=2.0, price_storage=3.6e6,
        max_cached_contents=3,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(autouse=True)
def emptied(keyed):
    """Nothing is kept from one test to the next."""
    yield
    for card in call(keyed, "admin", "GET", "/v1/caches").json()["data"]:
        call(keyed, "admin", "DELETE", f"/v1/caches/{card['id']}")
    for tenant in "ab":
        call(keyed, "admin", "DELETE", f"/admin/tenants/{tenant}")
    assert keyed.server.engine.pinned_prefixes == ()


def call(server, key, method, path, **body):
    headers = {"authorization": f"Bearer {key}"}
    with server.client(headers=headers) as http:
        return http.request(method, path, json=body or None)


def made(server, key, **body):
    answer = call(server, key, "POST", "/v1/caches", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server, key, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2, **fields}
    answer = call(server, key, "POST", "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_completion_goes_on_from_what_it_names(keyed):
    whole = complete(keyed, "b", LONG + "the dog", return_token_ids=True)
    card = made(keyed, "a", prompt=LONG)
    assert card["usage"]["prompt_tokens"] == card["tokens"] >= card["pinned_tokens"] > 0
    for field in (
        {"cached_content": card["id"]},
        {"extra_body": {"google": {"cached_content": card["id"]}}},
    ):
        named = complete(keyed, "a", "the dog", **field, return_token_ids=True)
        assert named["choices"] == whole["choices"]
        assert cached(named) >= card["pinned_tokens"] - 16
        assert named["usage"]["cost"]["cached"] > 0
    ids = whole["choices"][0]["prompt_token_ids"]
    rest = complete(keyed, "a", ids[card["tokens"] :], cached_content=card["id"])
    assert rest["choices"][0]["text"] == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "rest", "text"),
    [
        (
            "/v1/chat/completions",
            {"messages": [HI], "logprobs": True},
            lambda body: [body["choices"][0][name] for name in ("message", "logprobs")],
        ),
        ("/v1/responses", {"input": [HI]}, lambda body: body["output"][0]["content"]),
        ("/v1/messages", {"messages": [HI]}, lambda body: body["content"]),
    ],
)
def test_every_interface_joins_its_messages(keyed, path, rest, text):
    name = "input" if "input" in rest else "messages"
    limit = "max_output_tokens" if name == "input" else "max_tokens"
    body = {**rest, limit: 8, "temperature": 0}
    kwargs = {"enable_thinking": False} if path == "/v1/messages" else {}
    card = made(keyed, "a", messages=[SYSTEM], chat_template_kwargs=kwargs)
    named = call(keyed, "a", "POST", path, **body, cached_content=card["id"])
    assert named.status_code == 200, named.text
    whole = call(keyed, "b", "POST", path, **(body | {name: [SYSTEM, HI]})).json()
    assert text(named.json()) == text(whole)


def test_pinned_tokens_outlive_all_others_until_they_are_let_go(keyed):
    card = made(keyed, "admin", prompt=LONG, tenant="a", ttl=None)
    assert card["expires_at"] is None and card["tenant"] == "a"
    for number in range(12):
        complete(keyed, "a", f"{number} {OTHER}", max_tokens=1)
    assert cached(complete(keyed, "a", LONG)) >= card["pinned_tokens"] - 16
    assert cached(complete(keyed, "b", LONG)) == 0
    path = f"/v1/caches/{card['id']}"
    assert call(keyed, "a", "DELETE", path).json()["deleted"]
    assert call(keyed, "a", "DELETE", path).status_code == 404
    for number in range(12):
        complete(keyed, "a", f"{number} {OTHER}", max_tokens=1)
    assert cached(complete(keyed, "a", LONG)) == 0


def test_no_key_sees_anothers(keyed):
    card = made(keyed, "a", prompt=LONG)
    path = f"/v1/caches/{card['id']}"
    for method, body in (("GET", {}), ("PATCH", {"ttl": 9}), ("DELETE", {})):
        assert call(keyed, "b", method, path, **body).status_code == 404
    assert call(keyed, "b", "GET", "/v1/caches").json()["data"] == []
    for name in (card["id"], "cache_0", "../x"):
        body = {"prompt": "x", "cached_content": name}
        answer = call(keyed, "b", "POST", "/v1/completions", **body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "cached_content_not_found"
    assert call(keyed, "a", "GET", path).status_code == 200
    assert len(call(keyed, "admin", "GET", "/v1/caches").json()["data"]) == 1


def test_what_has_expired_is_gone_and_its_storage_was_charged(keyed):
    def spent():
        data = call(keyed, "admin", "GET", "/admin/usage").json()["data"]
        return {each["tenant"]: each.get("cost", 0) for each in data}["a"]

    card = made(keyed, "a", prompt=LONG, ttl=600)
    path = f"/v1/caches/{card['id']}"
    before = spent()
    changed = call(keyed, "a", "PATCH", path, ttl=0.3).json()
    assert changed["expires_at"] < card["expires_at"]
    time.sleep(0.4)
    assert call(keyed, "a", "GET", path).status_code == 404
    body = {"prompt": "x", "cached_content": card["id"]}
    assert call(keyed, "a", "POST", "/v1/completions", **body).status_code == 404
    assert keyed.server.engine.pinned_prefixes == ()
    # 3.6 million for a million tokens and an hour are 1/1000 for a token and a second.
    cost = spent() - before
    assert 0.2e-3 < cost / card["pinned_tokens"] < 2e-3


def test_a_prompt_that_leaves_the_prefix_names_the_token(keyed):
    """As one that was cut does, or one whose words go on at the border."""
    text, turns = made(keyed, "a", prompt=LONG[:160]), made(keyed, "a", messages=[SYSTEM])
    for path, body in (
        ("/v1/chat/completions", {"messages": [HI], "cached_content": turns["id"]}),
        ("/v1/completions", {"prompt": "x", "cached_content": text["id"]}),
    ):
        answer = call(keyed, "a", "POST", path, **body, truncate_prompt_tokens=30)
        assert answer.status_code == 409, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("cached_content_mismatch", "cached_content")
        assert "leaves the cached content at token" in error["message"]


def test_a_prefix_is_pinned_again_where_the_engine_lost_it(keyed):
    card = made(keyed, "a", prompt=LONG)

    async def lose():
        for pin in keyed.server.engine.pinned_prefixes:
            keyed.server.engine.unpin_prefix(pin.number)

    keyed.on_loop(lose())
    complete(keyed, "a", "the dog", cached_content=card["id"])
    assert len(keyed.server.engine.pinned_prefixes) == 1


def test_a_tenant_that_is_deleted_has_none(keyed):
    made(keyed, "a", prompt=LONG)
    kept = made(keyed, "b", prompt=LONG)
    assert call(keyed, "admin", "DELETE", "/admin/tenants/a").status_code == 200
    left = call(keyed, "admin", "GET", "/v1/caches").json()["data"]
    assert [card["id"] for card in left] == [kept["id"]]
    assert cached(complete(keyed, "a", LONG)) == 0
    assert cached(complete(keyed, "b", LONG)) > 0


def test_a_key_has_limits(keyed):
    for number in range(3):
        made(keyed, "a", prompt=f"{number} the cat sat on the mat and the dog sat on it")
    answer = call(keyed, "a", "POST", "/v1/caches", prompt=LONG)
    assert (answer.status_code, "may have 3 cached contents" in answer.text) == (429, True)
    answer = [call(keyed, "b", "POST", "/v1/caches", prompt=f"{n} {LONG}") for n in range(3)][-1]
    assert (answer.status_code, "cached tokens" in answer.text) == (429, True)


def test_what_leaves_no_room_for_a_sequence_is_refused(keyed):
    answers = [
        call(keyed, "admin", "POST", "/v1/caches", prompt=f"{number} {LONG}", tenant="a")
        for number in range(12)
    ]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 400
    assert "pinned prefixes would take" in answers[-1].json()["error"]["message"]
    num_made = sum(answer.status_code == 200 for answer in answers)
    assert len(call(keyed, "admin", "GET", "/v1/caches").json()["data"]) == num_made


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("a", {"prompt": LONG, "tenant": "b"}, 403),
        ("admin", {"prompt": LONG, "tenant": "c"}, 400),
        ("admin", {"prompt": LONG, "tenant": "local"}, 400),
        ("a", {"prompt": "the"}, 400),
        ("a", {"prompt": LONG, "messages": [HI]}, 400),
        ("a", {"prompt": LONG, "ttl": 0}, 400),
        ("a", {"prompt": LONG, "ttl": None}, 400),
        ("a", {"prompt": LONG, "ttl": 1e9}, 400),
        ("a", {}, 400),
    ],
)
def test_refusals(keyed, key, body, status):
    answer = call(keyed, key, "POST", "/v1/caches", **body)
    assert answer.status_code == status, answer.text
    assert call(keyed, "admin", "GET", "/v1/caches").json()["data"] == []


def test_a_prompt_is_no_conversation(keyed):
    text = made(keyed, "a", prompt=LONG[:160])
    turns = made(keyed, "a", messages=[SYSTEM])
    for path, body in (
        ("/v1/chat/completions", {"messages": [HI], "cached_content": text["id"]}),
        ("/v1/completions", {"prompt": "x", "cached_content": turns["id"]}),
        ("/v1/completions", {"prompt": "x", "cached_content": text["id"], "echo": True}),
        ("/v1/completions", {"prompt": "x", "cached_content": text["id"], "cache_salt": "s"}),
    ):
        assert call(keyed, "a", "POST", path, **body).status_code == 400


@pytest.fixture
def slow_pins(keyed, monkeypatch):
    """Pins that are made when ``go`` is set; ``asked`` counts them."""
    engine, go, asked = keyed.server.engine, threading.Event(), []
    pin_prefix = engine.pin_prefix

    async def late(token_ids, **settings):
        asked.append(token_ids)
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await pin_prefix(token_ids, **settings)

    monkeypatch.setattr(engine, "pin_prefix", late)
    return go, asked


def until(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/caches/{id}", "/admin/tenants/a"])
def test_what_is_deleted_while_it_is_computed_pins_nothing(keyed, slow_pins, path):
    """Else its KV would be held for ever, by nobody, and nobody else would have room."""
    go, asked = slow_pins
    with ThreadPoolExecutor() as pool:
        making = pool.submit(call, keyed, "a", "POST", "/v1/caches", prompt=LONG)
        until(lambda: asked)
        (card,) = call(keyed, "a", "GET", "/v1/caches").json()["data"]
        key = "admin" if "admin" in path else "a"
        assert call(keyed, key, "DELETE", path.format(**card)).status_code == 200
        go.set()
        answer = making.result()
    assert (answer.status_code, "deleted" in answer.text) == (409, True)
    assert keyed.server.engine.pinned_prefixes == ()
    assert call(keyed, "a", "GET", "/v1/caches").json()["data"] == []


def test_what_many_name_at_once_is_pinned_again_once(keyed, slow_pins):
    go, asked = slow_pins
    go.set()
    card = made(keyed, "a", prompt=LONG)

    async def lose():
        for pin in keyed.server.engine.pinned_prefixes:
            keyed.server.engine.unpin_prefix(pin.number)
        go.clear()

    keyed.on_loop(lose())
    with ThreadPoolExecutor() as pool:
        naming = [
            pool.submit(complete, keyed, "a", f"{number} dog", cached_content=card["id"])
            for number in range(3)
        ]
        until(lambda: len(asked) > 1)
        time.sleep(0.2)
        go.set()
        assert all(cached(each.result()) for each in naming)
    assert len(keyed.server.engine.pinned_prefixes) == 1

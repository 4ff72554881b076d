"""Pinned prefixes and miss reports over HTTP, each tenant for itself."""

import hashlib

import pytest
from tests.server.running import running

LONG = "the cat sat on the mat and " * 12
OTHER = "on the mat the cat sat, or " * 12


@pytest.fixture
def keyed(roomy_folder, tmp_path):
    """Two keys and an admin; a pool of 256 blocks of 4 tokens, which a few prompts fill."""
    names = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "admin")}
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'admin_sha256 = "{names["admin"]}"\n'
        + "".join(f'[[key]]\nname = "{name}"\nsha256 = "{names[name]}"\n' for name in "ab")
    )
    engine = {"max_model_len": 256, "max_num_seqs": 4}
    with running(
        roomy_folder, data_dir=tmp_path / "data", engine=engine, api_key_file=str(keys)
    ) as server:
        yield server


def call(server, key, method, path, **body):
    headers = {"authorization": f"Bearer {key}"}
    with server.client(headers=headers) as http:
        return http.request(method, path, json=body or None)


def complete(server, key, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = call(server, key, "POST", "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def explain(server, key, prompt, **fields):
    answer = call(server, key, "POST", "/explain_miss", prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_miss_names_the_first_token_that_differs(keyed):
    complete(keyed, "a", LONG)
    changed = LONG[:100] + "dog" + LONG[103:]
    report = explain(keyed, "a", changed)
    assert 0 < report["cached_tokens"] <= report["matching_tokens"] < report["prompt_tokens"]
    assert report["cached_tokens"] % 4 == 0
    assert report["token_id"] != report["cached_token_id"]
    assert report["token"]
    assert complete(keyed, "a", changed) == report["cached_tokens"]


def test_no_tenant_learns_of_anothers_prompts(keyed):
    """Not with its salt either, nor by writing the other's name into it."""
    complete(keyed, "a", LONG, cache_salt="s")
    assert explain(keyed, "a", LONG, cache_salt="s")["cached_tokens"] > 0
    for key, salt in (("b", "s"), ("b", "a\0s"), ("admin", "s"), ("a", "t")):
        report = explain(keyed, key, LONG, cache_salt=salt)
        assert report["matching_tokens"] == report["cached_tokens"] == 0
        assert report["cached_token_id"] is None
    body = {"prompt": LONG, "tenant": "a"}  # only pins have one
    assert call(keyed, "b", "POST", "/explain_miss", **body).status_code == 400


def test_a_pinned_prefix_outlives_all_others_until_it_is_unpinned(keyed):
    pinned = call(keyed, "admin", "POST", "/admin/prefixes", prompt=LONG, tenant="a").json()
    assert pinned["tokens"] > 0
    assert pinned["tenant"] == "a"
    listed = call(keyed, "admin", "GET", "/admin/prefixes").json()["data"]
    assert listed == [pinned]
    for number in range(12):
        complete(keyed, "a", f"{number} {OTHER}")
    assert complete(keyed, "a", LONG) >= pinned["tokens"] - 4
    assert complete(keyed, "b", LONG) == 0
    path = f"/admin/prefixes/{pinned['id']}"
    assert call(keyed, "admin", "DELETE", path).json()["deleted"]
    assert call(keyed, "admin", "DELETE", path).status_code == 404
    for number in range(12):
        complete(keyed, "a", f"{number} {OTHER}")
    assert complete(keyed, "a", LONG) == 0


@pytest.mark.parametrize("tenant", ["c", "local", "A", "a "])
def test_nothing_is_pinned_for_a_key_that_does_not_exist(keyed, tenant):
    """Nobody could reuse it, and nobody would be told."""
    answer = call(keyed, "admin", "POST", "/admin/prefixes", prompt=LONG, tenant=tenant)
    assert answer.status_code == 400
    assert "no key of the name" in answer.json()["error"]["message"]
    assert call(keyed, "admin", "GET", "/admin/prefixes").json()["data"] == []


def test_what_is_deleted_of_a_tenant_is_not_pinned_any_more(keyed):
    pinned = call(keyed, "admin", "POST", "/admin/prefixes", prompt=LONG, tenant="a")
    kept = call(keyed, "admin", "POST", "/admin/prefixes", prompt=LONG, tenant="b").json()
    assert pinned.status_code == 200
    assert call(keyed, "admin", "DELETE", "/admin/tenants/a").status_code == 200
    assert call(keyed, "admin", "GET", "/admin/prefixes").json()["data"] == [kept]
    assert complete(keyed, "a", LONG) == 0
    assert complete(keyed, "b", LONG) > 0


def test_a_chat_prefix_is_reused_by_conversations(keyed):
    system = {"role": "system", "content": "be kind " * 20}
    fields = {"messages": [system], "add_generation_prompt": False, "tenant": "b"}
    pinned = call(keyed, "admin", "POST", "/admin/prefixes", **fields).json()
    body = {"messages": [system, {"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = call(keyed, "b", "POST", "/v1/chat/completions", **body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= pinned["tokens"] - 4


@pytest.mark.parametrize(
    ("key", "method", "path", "body", "status"),
    [
        ("a", "POST", "/admin/prefixes", {"prompt": LONG, "tenant": "a"}, 403),
        ("a", "GET", "/admin/prefixes", {}, 403),
        ("a", "DELETE", "/admin/prefixes/0", {}, 403),
        ("admin", "DELETE", "/admin/prefixes/0", {}, 404),
        ("admin", "DELETE", "/admin/prefixes/x", {}, 404),
        ("admin", "POST", "/admin/prefixes", {"prompt": "the", "tenant": "a"}, 400),
        ("admin", "POST", "/admin/prefixes", {"prompt": LONG}, 400),
        ("a", "POST", "/explain_miss", {}, 400),
    ],
)
def test_refusals(keyed, key, method, path, body, status):
    answer = call(keyed, key, method, path, **body)
    assert answer.status_code == status, answer.text


def test_what_leaves_no_room_for_a_sequence_is_refused(keyed):
    answers = [
        call(keyed, "admin", "POST", "/admin/prefixes", prompt=f"{number} {LONG}", tenant="a")
        for number in range(12)
    ]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 400
    assert "pinned prefixes would take" in answers[-1].json()["error"]["message"]
    num_pinned = sum(answer.status_code == 200 for answer in answers)
    assert len(call(keyed, "admin", "GET", "/admin/prefixes").json()["data"]) == num_pinned

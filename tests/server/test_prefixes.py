"""Miss reports over HTTP, each tenant for itself."""

import hashlib

import pytest
from tests.server.running import running

LONG = "the cat sat on the mat and " * 12


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


def test_a_report_needs_a_prompt(keyed):
    assert call(keyed, "a", "POST", "/explain_miss").status_code == 400

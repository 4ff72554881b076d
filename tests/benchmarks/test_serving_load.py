"""The native load client reads streams right, and its figures are added up right."""

import json
import subprocess

import pytest
from benchmarks.serving_load import completion, is_complete, load_client, summary
from tests.server.conftest import roomy_folder  # noqa: F401
from tests.server.running import running


@pytest.fixture(scope="module")
def served(roomy_folder, tmp_path_factory):  # noqa: F811
    with running(roomy_folder, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def load(server, folder, bodies, users, seconds):
    path = folder / "bodies.jsonl"
    path.write_text("\n".join(bodies) + "\n")
    port = server.url.rsplit(":", 1)[1]
    command = [str(load_client()), port, str(users), str(seconds), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *exchanges, last = map(json.loads, done.stdout.splitlines())
    return exchanges, last


def test_each_request_is_read_to_its_end(served, tmp_path):
    prompts = ["the cat", 'on "the" mat\n', "sat", [7, 8, 9], "é"]
    bodies = [completion(prompt=prompt, max_tokens=12) for prompt in prompts]
    exchanges, last = load(served, tmp_path, bodies, users=3, seconds=0)
    assert sorted(each["body"] for each in exchanges) == [0, 1, 2, 3, 4]
    assert last["cpu_s"] < last["wall_s"]
    with served.client() as client:
        for each in exchanges:
            body = {**json.loads(bodies[each["body"]]), "stream": False}
            del body["stream_options"]
            whole = client.post("/v1/completions", json=body).json()
            assert each["text"] == whole["choices"][0]["text"]
            assert is_complete(each, 12)
            assert each["start_s"] <= each["first_s"] <= each["last_s"] <= each["end_s"]
            assert each["events_in_time"] == each["events"] <= 12


def test_users_ask_until_time_is_over_and_errors_are_told(served, tmp_path):
    bodies = [completion(prompt="the cat", max_tokens=4), completion(prompt="a", temperature=-1)]
    exchanges, last = load(served, tmp_path, bodies, users=4, seconds=0.5)
    assert last["wall_s"] >= 0.5
    good = [each for each in exchanges if each["body"] == 0]
    assert len(good) > 4
    assert all(is_complete(each, 4) for each in good)
    for each in exchanges:
        if each["body"] == 1:
            assert "400" in each["error"]
            assert "temperature" in each["error"]


def exchange(start_s, first_s, last_s, **fields):
    return {
        "body": 0, "start_s": start_s, "first_s": first_s, "last_s": last_s, "end_s": last_s,
        "longest_gap_s": 0.1, "events": 4, "events_in_time": 4, "tokens": 8, "is_done": True,
        "finish": "length", "text": "", "error": "",
    } | fields  # fmt: skip


def test_the_figures():
    exchanges = [
        exchange(0.0, 0.5, 1.9),
        exchange(1.0, 1.25, 2.65, events_in_time=2),  # half of it came too late
        exchange(1.0, 1.1, 1.2, is_done=False),
        exchange(1.0, 1.1, 1.2, error="503"),
    ]
    usage = {"cpu_s": {"api": 1.6}, "rss_bytes": {"api": 3 << 20}, "client": {"cpu_s": 0.16}}
    figures = summary(exchanges, usage, 2.0, 8)
    assert figures["complete"] == 2
    assert figures["problems"] == {"incomplete": 1, "503": 1}
    assert figures["output_tok_s"] == pytest.approx((8 + 4) / 2)
    assert figures["tokens_per_event"] == 2
    assert figures["ttft_s"]["p50"] == pytest.approx(0.375)
    assert figures["tpot_s"]["p50"] == pytest.approx(0.2)
    assert figures["cpu_us_per_token"] == pytest.approx({"api": 100_000, "client": 10_000})

"""Items 5 and 6: grammars that cost, and ever new ones, beside other requests."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.decoding.grammars.bombs import cycle
from tests.reliability.process import serve_process

CANARY = {"prompt": "the cat", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def process(roomy_folder, tmp_path_factory):
    with serve_process(roomy_folder, tmp_path_factory.mktemp("grammars") / "data") as server:
        yield server


def p99_s(client, going):
    """Of a plain request's seconds, at least 200 times and while ``going()``."""
    seconds = []
    while len(seconds) < 200 or going():
        began_s = time.monotonic()
        assert client.post("/v1/completions", json=CANARY).status_code == 200
        seconds.append(time.monotonic() - began_s)
    return sorted(seconds)[int(0.99 * len(seconds))]


@pytest.mark.slow
@pytest.mark.alone
def test_bombs_delay_no_canary(process):
    """Item 5: 200 bombs one after the other; each is refused or harmless."""

    def bombard():
        with process.client() as client:
            for bomb in cycle(200):
                kind, value = next(iter(bomb.items()))
                body = {**CANARY, "max_tokens": 2, "structured_outputs": {kind: value}}
                answers.append(client.post("/v1/completions", json=body, timeout=60))

    answers = []
    attack = threading.Thread(target=bombard)
    with process.client() as client:
        alone_s = p99_s(client, lambda: False)
        attack.start()
        beside_s = p99_s(client, attack.is_alive)
        attack.join()
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert len(answers) == 200
    assert sum(answer.status_code == 400 for answer in answers) > 20
    assert beside_s < 2 * alone_s, (alone_s, beside_s)


def unique_schema(number):
    return {
        "type": "object",
        "properties": {f"name_{number}": {"enum": [f"a{number}", f"b{number}"]}},
        "required": [f"name_{number}"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_unique_schemas_leave_no_memory_behind(process, count, counted):
    """Item 6: of the server, the engine and whoever checks grammars."""

    def ask(number):
        schema = {"name": "x", "schema": unique_schema(number)}
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": schema},
            "max_tokens": 40,
            "temperature": 0,
        }
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            (value,) = json.loads(choice["message"]["content"]).values()
            assert value in (f"a{number}", f"b{number}")
            return True
        return False

    with process.client() as client, ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(-1000 if count > 60 else -20, 0)))
        before = resident_bytes(process)
        whole = sum(threads.map(ask, range(count)))
        grown = resident_bytes(process) - before
    assert whole > 0.9 * count
    assert grown <= 20 << 20, f"{grown >> 20} MiB"
    counted(count)


def resident_bytes(process):
    return sum(each.memory_info().rss for each in process.family() if is_there(each))


def is_there(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

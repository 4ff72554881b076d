"""A small model before a large one: who answers, what the client sees, and what is risked."""

import asyncio
import json
import random
from math import inf

import pytest
from tests.fleet.conftest import RouteProcess, stream
from tests.fleet.reading import read, without_identity
from tests.fleet.test_forwarding import answer, routed
from tests.reliability.process import ServeProcess

from ridgeline.cli.main import main
from ridgeline.core.errors import InvalidRequestError
from ridgeline.fleet.cascade import HeldClient, asked_of_small, events_of, score_of
from ridgeline.fleet.cascade_calibration import JudgedPair, cascade_threshold
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.forwarding import Client
from ridgeline.fleet.upstream import AnswerHead, UpstreamPool
from ridgeline.weights.location import embedded_draft_folder, locate_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ("import os\nimport sys\n", "The history of the sea", "def main(", "A very odd pudding")


def pair(score, small, large):
    return JudgedPair(
        score=score, small_is_right=small, large_is_right=large, small_s=0.1, large_s=1.0
    )


def test_the_threshold_is_the_lowest_whose_bound_is_kept():
    pairs = [pair(n / 100, small=n >= 30, large=True) for n in range(99)]
    found = cascade_threshold(pairs, 0.05)
    assert found.threshold == 0.26  # 4 of those below 0.30 are lost: (4 + 1) / 100
    assert (found.bound, found.lost) == (0.05, 4 / 99)
    assert found.right == (69 / 99, 95 / 99, 1.0)
    assert found.seconds == pytest.approx((0.1, 0.1 + 26 / 99, 1.0))
    assert found.is_worth_it
    wrong_for_both = [pair(each.score, each.small_is_right, large=False) for each in pairs]
    assert cascade_threshold(wrong_for_both, 0.05).kept == 1.0  # nothing is lost by them
    random_scores = random.Random(0).sample([each.score for each in pairs], 99)
    blind = [
        pair(s, p.small_is_right, large=True) for s, p in zip(random_scores, pairs, strict=True)
    ]
    assert cascade_threshold(blind, 0.05).kept < 0.3
    hopeless = [pair(n / 100, small=n < 50, large=True) for n in range(99)]
    found = cascade_threshold(hopeless, 0.01)
    assert (found.kept, found.told()["threshold"], found.is_worth_it) == (0.0, None, False)
    with pytest.raises(InvalidRequestError, match="needs 99"):
        cascade_threshold(pairs[:50], 0.01)


def test_a_small_model_that_says_nothing_is_not_waited_for_as_long_as_a_large_one(tmp_path, capsys):
    large = answer(200, b'{"choices":[{"index":0,"text":"large"}]}')
    with routed(tmp_path, [answer(200), None]) as (of_small, _):
        (told,) = of_small.get("/fleet/state").json()["engines"]
        with routed(
            tmp_path, [large], cascade=(told["url"],), cascade_threshold=1.0, cascade_timeout_s=0.3
        ) as (client, _):
            found = client.post(COMPLETIONS, json={"prompt": "x"})
            state = client.get("/fleet/state").json()
            assert [each["url"] for each in state["cascade"]] == [told["url"]]
            file = tmp_path / "fleet.yaml"
            file.touch()
            assert main(["fleet", "status", str(file), "--url", str(client.base_url)]) == 0
            assert f"small 0  {told['url']}" in capsys.readouterr().out
    assert found.headers["x-ridgeline-cascade"] == "large"
    assert found.json()["choices"][0]["text"] == "large"


def test_no_threshold_is_of_answers_without_a_token():
    """The router passes none of them on."""
    pairs = [pair(-inf, small=True, large=True)] * 20 + [pair(2.0, small=True, large=True)] * 20
    assert cascade_threshold(pairs, 0.05).threshold == 2.0
    assert cascade_threshold(pairs[:20], 0.05).told()["threshold"] is None


@pytest.mark.parametrize("model", [None, "m", "an-adapter"])
def test_what_names_another_model_than_the_large_one_is_not_the_small_ones(tmp_path, model):
    tops = b'"top_logprobs":[{"a":-0.1,"b":-9}]'
    small = b'{"choices":[{"index":0,"text":"small","logprobs":{%b}}]}' % tops
    with routed(tmp_path, [answer(200, small)], models=[b"tiny"]) as (of_small, _):
        (told,) = of_small.get("/fleet/state").json()["engines"]
        with routed(
            tmp_path, [answer(200, b'{"choices":[{"index":0,"text":"large"}]}')],
            cascade=(told["url"],), cascade_threshold=1.0,
        ) as (client, _):  # fmt: skip
            body = {"prompt": "x"} | ({} if model is None else {"model": model})
            text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    assert text == ("large" if model == "an-adapter" else "small")


def test_a_small_engine_that_tells_its_name_to_nobody_without_a_key_is_asked(tmp_path):
    tops = b'"top_logprobs":[{"a":-0.1,"b":-9}]'
    small = b'{"data":[],"choices":[{"index":0,"text":"small","logprobs":{%b}}]}' % tops
    with routed(tmp_path, [answer(200, small)]) as (of_small, seen):
        (told,) = of_small.get("/fleet/state").json()["engines"]
        with routed(
            tmp_path, [answer(200, b'{"data":[],"choices":[{"index":0,"text":"large"}]}')],
            cascade=(told["url"],), cascade_threshold=1.0, router_key_file=None,
        ) as (client, _):  # fmt: skip
            answered = client.post(COMPLETIONS, json={"prompt": "x"}).json()
        assert answered["choices"][0]["text"] == "small"
        body = json.loads(seen[0][-1].partition(b"\r\n\r\n")[2] or "{}")
        assert body.get("model") is None


class Told(Client):
    def __init__(self):
        self.has_begun = False

    async def whole(self, status, headers, body):
        self.answer = status, dict(headers)[b"content-type"], body


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_too_long_to_come_as_one_is_passed_on_as_one(status):
    async def main():
        held, told = HeldClient(), Told()
        kind = (b"content-type", b"application/json")
        head = AnswerHead(status, [kind])
        await held.begin(
            head, RoutedEngine("0", UpstreamPool("http://a:1", connect_timeout_s=1.0), None)
        )
        held.write(b'{"choices":[{"index":0,')
        held.write(b'"text":"long","logprobs":{}}]}')
        await held.end()
        if status != 200:
            assert held.events() == []
            return
        await held.pass_on(told, held.events())
        text = b'{"choices":[{"index":0,"text":"long","logprobs":null}]}'
        assert told.answer == (200, kind[1], text)

    asyncio.run(main())


def test_of_other_requests_no_more_are_lost_than_was_asked_for():
    draw, risk, lost = random.Random(1), 0.1, []

    def requests(count):
        scores = [draw.random() for _ in range(count)]
        return [pair(s, small=draw.random() < 0.4 + s / 2, large=True) for s in scores]

    for _ in range(400):
        threshold = cascade_threshold(requests(99), risk).threshold
        others = requests(20)
        lost.append(sum(each.is_loss for each in others if each.score >= threshold) / 20)
    assert 0.08 < sum(lost) / 400 < 0.105  # the bound is no more careful than it has to be


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"prompt": ["a", "b"]}, {"logprobs": 1}, {"logprobs": 0},
        {"prompt_logprobs": 0}, {"tools": [{}]}, {"echo": True},
    ],
)  # fmt: skip
def test_what_is_more_than_a_text_is_the_large_models_at_once(fields):
    plain = {"prompt": [1, 2], "echo": False, "tools": []}
    assert asked_of_small(COMPLETIONS, plain, "m") is not None
    assert asked_of_small(COMPLETIONS, {"prompt": "a"} | fields, "m") is None


def answer_of(client, path, prompt, *, streams, **fields):
    """The text, and whose it is."""
    body = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | fields
    chat = path == CHAT
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if streams:
        whole = without_identity(read(stream(client, path, body)))
        choice = whole["choices"][0]
        return choice["delta"]["content"] if chat else choice["text"]
    found = client.post(path, json=body).raise_for_status().json()["choices"][0]
    assert (found["logprobs"] is None) == ("logprobs" not in fields)
    return found["message"]["content"] if chat else found["text"]


def test_a_sure_answer_is_the_small_models_and_another_the_large_ones(tmp_path, capsys):
    large = ServeProcess(locate_model(None), tmp_path / "large", "--no-log-requests")
    small = ServeProcess(embedded_draft_folder(), tmp_path / "small", "--no-log-requests")
    router = None
    try:
        small.wait_ready()
        large.wait_ready()
        with small.client() as of_small, large.client() as of_large:
            scores = {}
            for path in (COMPLETIONS, CHAT):
                for prompt in PROMPTS:
                    chat = path == CHAT
                    asked = {"messages": [{"role": "user", "content": prompt}]}
                    body = asked if chat else {"prompt": prompt}
                    body = body | {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
                    found = of_small.post(path, json=asked_of_small(path, body, "tiny"))
                    scores[path, prompt] = score_of(events_of(found.content))
            sample = tmp_path / "sample.jsonl"
            lines = [{"prompt": p, "max_tokens": 4, "temperature": 0.0} for p in PROMPTS * 5]
            sample.write_text("\n".join(map(json.dumps, lines)))
            words = ["cascade", "calibrate", str(sample), "--small", small.url, "--large"]
            assert main([*words, large.url, "--risk", "0.2", "--json"]) in (0, 1)
            told = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert (told["requests"], told["right"]["large"]) == (20, 1.0)
            assert told["bound"] <= 0.2
            assert main([*words, large.url, "--risk", "0.01"]) == 2
            threshold = sorted(scores.values())[len(scores) // 2]
            router = RouteProcess(
                tmp_path / "router.log", "--engine", large.url, "--cascade", small.url,
                "--cascade-threshold", repr(threshold),
            )  # fmt: skip
            router.wait_ready(1)
            with router.client() as client:
                for (path, prompt), score in scores.items():
                    expected = of_small if score >= threshold else of_large
                    for streams in (False, True):
                        wanted = answer_of(expected, path, prompt, streams=streams)
                        assert answer_of(client, path, prompt, streams=streams) == wanted
                assert answer_of(client, COMPLETIONS, PROMPTS[0], streams=False, logprobs=1)
                told = client.post(COMPLETIONS, json={"prompt": PROMPTS[0], "max_tokens": 12})
                assert told.headers["x-ridgeline-cascade"] in ("small", "large")
                small.close()
                wanted = answer_of(of_large, CHAT, PROMPTS[1], streams=True)
                assert answer_of(client, CHAT, PROMPTS[1], streams=True) == wanted
                metrics = client.get("/metrics").text
        counts = {
            by: float(metrics.partition(f'cascade_total{{by="{by}"}} ')[2].split()[0])
            for by in ("small", "large", "large at once")
        }
        assert counts["small"] >= 2 * sum(score >= threshold for score in scores.values())
        assert counts["large"] >= 2 * sum(score < threshold for score in scores.values())
        assert counts["large at once"] >= 1
    finally:
        if router is not None:
            router.close()
        for each in (small, large):
            each.close()

"""Metrics: right, under both names, and what dashboards and alerts ask for is there."""

import dataclasses
import itertools
import json
import re
import runpy
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.running import running

from ridgeline.core.errors import SettingsError
from ridgeline.core.expert_load import expert_load
from ridgeline.core.request import CompletionChunk
from ridgeline.roofline.slo import Slo
from ridgeline.server.context import Call
from ridgeline.server.errors import ApiError
from ridgeline.server.keys import Caller
from ridgeline.server.live import LiveView
from ridgeline.server.metrics import ALIASED, FinishedRequest, Metrics
from ridgeline.server.routes import operations

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"ridgeline:\w+")


def samples(http):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(found, name, **labels):
    return sum(
        v for (n, pairs), v in found.items() if n == name and labels.items() <= dict(pairs).items()
    )


@pytest.fixture(scope="module")
def found(http):
    """Metrics before and after three requests of 5 tokens each."""
    body = {"prompt": "the cat", "max_tokens": 5, "ignore_eos": True}
    before = samples(http)
    for stream in (False, True, True):
        assert http.post("/v1/completions", json={**body, "stream": stream}).status_code == 200
    time.sleep(0.3)  # the engine's counters come a few times a second
    return before, samples(http)


@pytest.mark.parametrize(
    ("name", "labels", "grown"),
    [
        ("ridgeline:generation_tokens_total", {}, 15),
        ("ridgeline:request_success_total", {"finished_reason": "length"}, 3),
        ("ridgeline:time_to_first_token_seconds_count", {}, 3),
        ("ridgeline:e2e_request_latency_seconds_count", {}, 3),
        ("ridgeline:request_queue_time_seconds_count", {}, 3),
        ("ridgeline:tenant_tokens_total", {"kind": "output", "tenant": "local"}, 15),
        ("ridgeline:http_requests_total", {"route": "/v1/completions", "status": "200"}, 3),
    ],
)
def test_counts(found, name, labels, grown):
    before, after = found
    assert value(after, name, **labels) - value(before, name, **labels) == grown


def counted(http, ask):
    """What the counters of `ask` grew by, by (name, label of the limit)."""
    before = samples(http)
    ask()
    return lambda name, **labels: (
        value(samples(http), f"ridgeline:{name}", **labels)
        - value(before, f"ridgeline:{name}", **labels)
    )


CHAT = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 8}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_is_published_after_its_reasoning_or_at_its_end(http, says, is_streamed):
    """TTFT and gaps are those of tokens, whether they are streamed or not."""
    says("<think>", "b", "c", "</think>", "", "f", "g", "")

    def ask():
        http.post("/v1/chat/completions", json={**CHAT, "stream": is_streamed})

    grown = counted(http, ask)
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 7
    assert grown("request_stall_seconds_count") == 1
    assert grown("time_to_publish_seconds_count") == 1
    ttft_s, publish_s = (
        grown(f"time_to_{name}_seconds_sum") for name in ("first_token", "publish")
    )
    gaps_s = grown("inter_token_latency_seconds_sum")
    if is_streamed:
        assert ttft_s < publish_s < ttft_s + gaps_s
    else:
        assert publish_s == pytest.approx(ttft_s + gaps_s)


def test_an_answer_without_text_is_never_published(http, says):
    says("<think>", "b", "c", "</think>", "")
    grown = counted(http, lambda: http.post("/v1/chat/completions", json=CHAT))
    assert grown("time_to_publish_seconds_count") == 0
    assert grown("requests_completed_total") == 1


def test_a_request_is_good_if_it_meets_every_limit(http, served, monkeypatch):
    body = {"prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
    for slo, good, missed in (
        (Slo(), 1, None),
        (Slo(ttft_s=60.0, tpot_s=60.0, end_to_end_s=60.0), 1, None),
        (Slo(ttft_s=1e-9, tpot_s=60.0), 0, "ttft"),
        (Slo(tpot_s=1e-9), 0, "tpot"),
        (Slo(end_to_end_s=1e-9), 0, "e2e"),
    ):
        monkeypatch.setattr(served.server.metrics, "slo", slo)
        grown = counted(http, lambda: http.post("/v1/completions", json=body))
        assert grown("requests_received_total") == grown("requests_completed_total") == 1
        assert grown("requests_good_total") == good
        for name in ("ttft", "tpot", "e2e"):
            assert grown("slo_missed_total", slo=name) == (name == missed)


def test_what_is_refused_for_load_counts_against_goodput_and_mistakes_do_not(
    http, served, monkeypatch
):
    def ask():
        body = {"prompt": "a", "model": "nobody"}
        assert http.post("/v1/completions", json=body).status_code == 404

    grown = counted(http, ask)
    assert (grown("requests_received_total"), grown("requests_failed_total")) == (1, 0)

    def refuse(*_):
        raise ApiError(429, "There are too many.")

    monkeypatch.setattr(served.server.limits, "admitted", refuse)
    grown = counted(http, lambda: http.post("/v1/completions", json={"prompt": "a"}))
    assert (grown("requests_received_total"), grown("requests_failed_total")) == (1, 1)
    assert grown("requests_completed_total") == 0


def test_limits_are_published_and_wrong_ones_refused(served):
    config = dataclasses.replace(served.server.config, slo="chat")
    text = Metrics(served.server.engine, config, "tiny").exposition(with_tenants=False).decode()
    assert 'ridgeline:slo_seconds{model_name="tiny",slo="ttft"} 0.2' in text
    assert 'ridgeline:slo_seconds{model_name="tiny",slo="tpot"} 0.12' in text
    with pytest.raises(SettingsError, match="preset"):
        dataclasses.replace(served.server.config, slo="fast")


def test_the_load_of_experts_has_as_many_series_however_many_there_are(served, monkeypatch):
    engine, config = served.server.engine, served.server.config
    tokens = {f"layers.{n}.router": np.array([1, 1, 1, 5]) for n in range(60)}
    report = dataclasses.replace(engine.stats().roofline, experts=expert_load(tokens, 2))
    stats = dataclasses.replace(engine.stats(), roofline=report)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    text = Metrics(engine, config, "tiny").exposition(with_tenants=False).decode()
    found = dict(re.findall(r"^(ridgeline:expert_.*) (\S+)$", text, re.MULTILINE))
    assert found == {
        'ridgeline:expert_tokens_total{model_name="tiny"}': "480.0",
        'ridgeline:expert_skew{model_name="tiny",of="experts"}': "2.5",
        'ridgeline:expert_skew{model_name="tiny",of="worst_layer"}': "2.5",
        'ridgeline:expert_skew{model_name="tiny",of="ranks"}': "1.5",
    }


def test_the_live_view_has_p99_from_1_000_requests_on(served, monkeypatch):
    metrics = Metrics(served.server.engine, served.server.config, "tiny")
    view = LiveView(served.server.engine, metrics)
    one = FinishedRequest(
        finished_s=time.monotonic(), ttft_s=0.1, publish_s=None, tpot_s=0.01, stall_s=0.02
    )
    metrics.recent.extend([one] * 999)
    metrics.count("received")
    metrics.count("failed")
    for _ in range(3):
        metrics.judge(ttft_s=0.1, tpot_s=0.01, end_to_end_s=1.0)
    found = view.snapshot()
    assert found["ttft_s"] == {"p50": 0.1, "p90": 0.1, "p95": 0.1}
    assert found["publish_s"] == {}
    metrics.recent.append(one)
    assert set(view.snapshot()["stall_s"]) == {"p50", "p90", "p95", "p99"}
    view = LiveView(served.server.engine, metrics)
    view.snapshot()
    for _ in range(3):
        metrics.judge(ttft_s=0.1, tpot_s=0.01, end_to_end_s=1.0)
    metrics.count("failed")
    found = view.snapshot()
    assert found["good_share"] == 0.75
    assert found["rpm"]["good"] == found["rpm"]["completed"] == 180  # 3 in the first second


def test_aliases_have_the_same_values(found):
    _, after = found
    ours = {key: v for key, v in after.items() if key[0].startswith("ridgeline:")}
    theirs = {key: v for key, v in after.items() if key[0].startswith("vllm:")}
    assert {name.partition(":")[2] for name, _ in theirs}
    for (name, labels), number in theirs.items():
        assert ours["ridgeline:" + name.removeprefix("vllm:"), labels] == number
    names = " ".join(name for name, _ in theirs)
    assert all(f"vllm:{stem}" in names for stem in ALIASED)


def queries():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    yield from re.findall(r"expr: (.*)", (DEPLOY / "alerts.yaml").read_text())


@pytest.mark.parametrize("query", sorted(queries()))
def test_every_query_names_a_live_metric(found, http, query):
    """MFU and MBU have samples only on a machine whose ceilings were measured."""
    names = {name for name, _ in found[1]}
    names |= set(re.findall(r"^# TYPE (\S+) gauge$", http.get("/metrics").text, re.MULTILINE))
    asked = METRIC.findall(query)
    assert asked
    assert not set(asked) - names


def test_labels_that_queries_use_exist(found):
    labels = {label for _, pairs in found[1] for label, _ in pairs}
    for query in queries():
        for names in re.findall(r"by \(([\w, ]+)\)", query):
            assert set(names.split(", ")) <= labels


def test_the_dashboard_is_what_its_script_makes():
    made = runpy.run_path(str(DEPLOY / "make_dashboard.py"))["dashboard"]()
    assert json.loads((DEPLOY / "grafana.json").read_text()) == made


def test_aliases_can_be_switched_off(model_folder, tmp_path):
    settings = {"data_dir": tmp_path, "vllm_metrics": False}
    with running(model_folder, **settings) as server, server.client() as client:
        assert "vllm:" not in client.get("/metrics").text


def test_the_type_of_the_cache_is_its_own(http, served, monkeypatch):
    engine = served.server.engine
    config = dataclasses.replace(engine.config, kv_cache_dtype="int8")
    monkeypatch.setattr(type(engine), "config", property(lambda _: config))
    assert value(samples(http), "ridgeline:cache_config_info", cache_dtype="int8") == 1


def test_tokens_that_come_together_share_a_gap(served, monkeypatch):
    """docs/metrics.md: m tokens after a gap g count as m gaps of g / m."""
    metrics = Metrics(served.server.engine, served.server.config, "tiny")
    clock = SimpleNamespace(monotonic=itertools.count(0, 2).__next__)
    monkeypatch.setattr("ridgeline.server.metrics.time", clock)
    meter = metrics.meter(Call(server=served.server, request_id="a", caller=Caller(tenant="a")))
    for count in (3, 1, 4):
        chunk = CompletionChunk(request_id=1, index=0, text="", token_ids=(7,) * count)
        meter.take(0, chunk)
    meter.take(1, chunk)
    text = metrics.exposition(with_tenants=False).decode()
    name = r"ridgeline:inter_token_latency_seconds_(\w+){model_name=\"tiny\"} (\S+)"
    found = dict(re.findall(name, text))
    assert float(found["count"]) == 1 + 4
    assert float(found["sum"]) == 2 + 4 * 0.5


def test_those_who_watch_are_bounded(http, served, monkeypatch):
    """Each takes processor time twice a second, of whichever key it is."""
    monkeypatch.setattr(operations, "_MAX_WATCHERS", 2)
    with http.stream("GET", "/live") as first, http.stream("GET", "/live") as second:
        assert all("data" in next(each.iter_lines()) for each in (first, second))
        refused = http.get("/live")
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
    deadline_s = time.monotonic() + 10
    while served.server.num_watchers and time.monotonic() < deadline_s:
        time.sleep(0.05)
    with http.stream("GET", "/live") as again:
        assert again.status_code == 200


def test_the_live_stream_moves(http, served):
    found = []
    with http.stream("GET", "/live") as response:
        body = {"prompt": "the", "max_tokens": 20, "ignore_eos": True}

        def ask():
            with served.client() as client:
                client.post("/v1/completions", json=body)

        threading.Thread(target=ask).start()
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == 4:
                break
    assert any(snapshot["points"] for snapshot in found)
    assert max(snapshot["output_tok_s"] for snapshot in found) > 0
    assert found[-1]["ttft_s"]["p50"] <= found[-1]["ttft_s"]["p95"]
    assert found[-1]["rpm"].keys() == {"received", "completed", "good", "failed"}


def test_spans_reach_a_collector(model_folder, tmp_path):
    """With an endpoint set, each request is a span with its tokens, a child of the caller's."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["content-length"])
            received.append(ExportTraceServiceRequest.FromString(self.rfile.read(size)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    settings = {"data_dir": tmp_path, "otlp_endpoint": endpoint}
    with running(model_folder, **settings) as server, server.client() as client:
        client.post(
            "/v1/completions",
            json={"prompt": "the", "max_tokens": 3, "ignore_eos": True},
            headers={"traceparent": parent},
        )
    collector.shutdown()
    spans = [
        span
        for request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (span,) = [span for span in spans if span.name == "/v1/completions"]
    attributes = {pair.key: pair.value.int_value for pair in span.attributes}
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"

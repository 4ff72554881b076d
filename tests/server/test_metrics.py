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

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.running import running

from ridgeline.core.request import CompletionChunk
from ridgeline.server.context import Call
from ridgeline.server.keys import Caller
from ridgeline.server.metrics import ALIASED, Metrics

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
    assert found[-1]["ttft_s"]["p50"] <= found[-1]["ttft_s"]["p99"]


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

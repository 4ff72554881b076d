"""Writes grafana.json: ``python deploy/make_dashboard.py``; a test checks that it is up to date."""

import json
from pathlib import Path

PANELS = [
    ("Output and prompt tokens per second", "short", [
        ("output", "sum(rate(ridgeline:generation_tokens_total[1m]))"),
        ("prompt", "sum(rate(ridgeline:prompt_tokens_total[1m]))"),
    ]),
    ("Running and waiting", "short", [
        ("running", "sum(ridgeline:num_requests_running)"),
        ("waiting", "sum(ridgeline:num_requests_waiting)"),
    ]),
    ("Time to first token", "s", [
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) "
         "(rate(ridgeline:time_to_first_token_seconds_bucket[5m])))") for q in (50, 90, 99)
    ]),
    ("Time per output token", "s", [
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) "
         "(rate(ridgeline:request_time_per_output_token_seconds_bucket[5m])))")
        for q in (50, 90, 99)
    ]),
    ("Between tokens", "s", [
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) "
         "(rate(ridgeline:inter_token_latency_seconds_bucket[5m])))") for q in (50, 99)
    ]),
    ("End to end", "s", [
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) "
         "(rate(ridgeline:e2e_request_latency_seconds_bucket[5m])))") for q in (50, 99)
    ]),
    ("Where the time goes, mean", "s", [
        (part, f"sum(rate(ridgeline:request_{part}_time_seconds_sum[5m])) / "
         f"sum(rate(ridgeline:request_{part}_time_seconds_count[5m]))")
        for part in ("queue", "prefill", "decode")
    ]),
    ("KV pool and prefix hits", "percentunit", [
        ("KV pool", "max(ridgeline:kv_cache_usage_perc)"),
        ("prefix hits", "sum(rate(ridgeline:prefix_cache_hits_total[5m])) / "
         "sum(rate(ridgeline:prefix_cache_queries_total[5m]))"),
    ]),
    ("Preemptions and restarts", "short", [
        ("preemptions", "sum(rate(ridgeline:num_preemptions_total[5m]))"),
        ("restarts", "sum(increase(ridgeline:engine_restarts_total[5m]))"),
    ]),
    ("Tokens in a step", "short", [
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) "
         "(rate(ridgeline:iteration_tokens_total_bucket[5m])))") for q in (50, 99)
    ]),
    ("Outputs by how they ended", "short", [
        ("{{finished_reason}}",
         "sum by (finished_reason) (rate(ridgeline:request_success_total[5m]))"),
    ]),
    ("Answers by status", "short", [
        ("{{status}}", "sum by (status) (rate(ridgeline:http_requests_total[5m]))"),
    ]),
    ("Tokens by key", "short", [
        ("{{tenant}} {{kind}}", "sum by (tenant, kind) (rate(ridgeline:tenant_tokens_total[5m]))"),
    ]),
    ("Of the roof: MFU and MBU", "percentunit", [
        ("{{phase}} MFU", "ridgeline:mfu"),
        ("{{phase}} MBU", "ridgeline:mbu"),
    ]),
    ("Bytes moved per second", "Bps", [
        ("{{phase}}", "sum by (phase) (rate(ridgeline:step_bytes_total[1m])) / "
         "sum by (phase) (rate(ridgeline:step_seconds_total[1m]))"),
    ]),
]  # fmt: skip
WIDTH, HEIGHT = 12, 8


def dashboard():
    """The dashboard as Grafana imports it."""
    panels = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {
                "x": WIDTH * (index % 2), "y": HEIGHT * (index // 2), "w": WIDTH, "h": HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + number), "expr": query, "legendFormat": legend}
                for number, (legend, query) in enumerate(queries)
            ],
        }
        for index, (title, unit, queries) in enumerate(PANELS)
    ]  # fmt: skip
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Ridgeline",
        "uid": "ridgeline",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


if __name__ == "__main__":
    path = Path(__file__).with_name("grafana.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")

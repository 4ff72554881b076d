"""Writes grafana.json: ``python deploy/make_dashboard.py``; a test checks that it is up to date."""

import json
from pathlib import Path

MIN_P99_SAMPLES = 1000  # of fewer, one or two decide: docs/metrics.md


def percentiles(metric, shares=(50, 90, 95, 99)):
    """A curve for each percentile of a histogram; p99 only where it has samples enough."""
    curves = []
    for share in shares:
        query = f"histogram_quantile(0.{share}, sum by (le) (rate(ridgeline:{metric}_bucket[5m])))"
        if share == 99:
            count = f"sum(increase(ridgeline:{metric}_count[5m]))"
            query += f" and on() {count} >= {MIN_P99_SAMPLES}"
        curves.append((f"p{share}", query))
    return curves


def per_minute(name):
    """Requests of one kind in a minute."""
    return f"60 * sum(rate(ridgeline:requests_{name}_total[1m]))"


PANELS = [
    ("Output and prompt tokens per second", "short", [
        ("output", "sum(rate(ridgeline:generation_tokens_total[1m]))"),
        ("prompt", "sum(rate(ridgeline:prompt_tokens_total[1m]))"),
    ]),
    ("Running and waiting", "short", [
        ("running", "sum(ridgeline:num_requests_running)"),
        ("waiting", "sum(ridgeline:num_requests_waiting)"),
    ]),
    ("Requests per minute", "short", [
        (name, per_minute(name)) for name in ("received", "completed", "good", "failed")
    ]),
    ("Goodput: of the requests that ended, those within every limit", "percentunit", [
        ("good", "sum(rate(ridgeline:requests_good_total[5m])) / "
         "(sum(rate(ridgeline:requests_completed_total[5m])) + "
         "sum(rate(ridgeline:requests_failed_total[5m])))"),
        ("missed {{slo}}", "sum by (slo) (rate(ridgeline:slo_missed_total[5m])) / on() group_left "
         "sum(rate(ridgeline:requests_completed_total[5m]))"),
    ]),
    ("Time to first token", "s", [
        *percentiles("time_to_first_token_seconds"),
        ("limit", 'max(ridgeline:slo_seconds{slo="ttft"})'),
    ]),
    ("Time to publish", "s", percentiles("time_to_publish_seconds")),
    ("Time per output token", "s", [
        *percentiles("request_time_per_output_token_seconds"),
        ("limit", 'max(ridgeline:slo_seconds{slo="tpot"})'),
    ]),
    ("Between tokens", "s", percentiles("inter_token_latency_seconds")),
    ("Largest gap of a request", "s", percentiles("request_stall_seconds")),
    ("End to end", "s", [
        *percentiles("e2e_request_latency_seconds"),
        ("limit", 'max(ridgeline:slo_seconds{slo="e2e"})'),
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
    ("Tokens in a step", "short", percentiles("iteration_tokens_total")),
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
    ("Of the roof since the start: MFU and MBU", "percentunit", [
        ("{{phase}} MFU", "ridgeline:mfu"),
        ("{{phase}} MBU", "ridgeline:mbu"),
    ]),
    ("Of the roof now: MFU and MBU", "percentunit", [
        (f"{{{{phase}}}} {name}", f"sum by (phase) (rate(ridgeline:step_{what}_total[1m])) / "
         "sum by (phase) (rate(ridgeline:step_seconds_total[1m])) / on() group_left "
         f"max(ridgeline:ceiling_{what}_per_second)")
        for name, what in (("MFU", "flops"), ("MBU", "bytes"))
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

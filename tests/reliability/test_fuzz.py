"""Item 2 of the catalogue: requests made from ``/openapi.json``, right and wrong ones."""

import itertools

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode


def fuzz(served, http, per_operation):
    """Send that many requests to every operation in both modes; returns how many in all."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    count = itertools.count()
    for operation in schema.get_all_operations():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            strategy = operation.ok().as_strategy(generation_mode=mode)

            @settings(
                max_examples=per_operation,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @hypothesis.seed(0)
            @hypothesis.given(case=strategy)
            def send(case):
                next(count)
                bound(case)
                response = case.call(timeout=15)
                assert response.status_code < 500 or is_told(case, response), response.text
                if response.status_code >= 400 and case.method != "HEAD":
                    assert "error" in response.json(), response.text

            try:
                send()
            except (hypothesis.errors.Unsatisfiable, hypothesis.errors.InvalidArgument):
                continue  # nothing wrong can be made for an operation without input
        body = {"prompt": "the cat", "max_tokens": 1}
        assert http.post("/v1/completions", json=body, timeout=5).status_code == 200
    return next(count)


def bound(case):
    """Few output tokens, so that what is right does not take long."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "min_tokens"):
            if type(case.body.get(name)) is int and case.body[name] > 4:
                case.body[name] = 4
        generates = case.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        limit = "max_output_tokens" if "resp" in case.path else "max_tokens"
        if generates and case.body.get(limit) is None:
            case.body[limit] = 4
        seconds = case.body.get("timeout_s", 30.0)
        if case.path == "/admin/profile" and isinstance(seconds, int | float):
            case.body["timeout_s"] = min(seconds, 0.1)


def is_told(case, response):
    """A 503 of /ready while the engine is busy is an answer."""
    return case.path == "/ready" and response.status_code == 503


@pytest.mark.parametrize("per_operation", [3, pytest.param(380, marks=pytest.mark.slow)])
def test_schema_fuzz(served, http, counted, per_operation):
    sent = fuzz(served, http, per_operation)
    counted(sent)
    assert sent >= (20_000 if per_operation > 100 else 80)

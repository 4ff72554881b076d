"""OpenTelemetry: a span for each request (extra ``otel``)."""

import time
from typing import Any, Protocol

from ridgeline.core.errors import MissingDependencyError


class TracedCall(Protocol):
    """What a span says of a request."""

    path: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Tracing:
    """Sends spans to a collector; without an endpoint it does nothing.

    Raises:
        MissingDependencyError: an endpoint is set and OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str | None, service: str = "ridgeline") -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingDependencyError(
                "Traces need the packages opentelemetry-sdk and "
                "opentelemetry-exporter-otlp-proto-http."
            ) from error
        self._extract = extract
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("ridgeline")

    def record(
        self, call: TracedCall | None, status: int, started_s: float, headers: dict[bytes, bytes]
    ) -> None:
        """A span from ``started_s`` (monotonic) to now, a child of the caller's ``traceparent``."""
        if self._tracer is None or call is None:
            return
        now_ns = time.time_ns()
        carrier = {"traceparent": headers.get(b"traceparent", b"").decode("latin-1")}
        span = self._tracer.start_span(
            call.path,
            context=self._extract(carrier),
            start_time=now_ns - int((time.monotonic() - started_s) * 1e9),
            attributes={
                "http.response.status_code": status,
                "gen_ai.usage.input_tokens": call.prompt_tokens,
                "gen_ai.usage.cached_tokens": call.cached_tokens,
                "gen_ai.usage.output_tokens": call.output_tokens,
            },
        )
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()

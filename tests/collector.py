"""A collector of OpenTelemetry for tests: it takes metrics and traces over OTLP with HTTP, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS: dict[str, Any] = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}


class Collector:
    def __init__(self, port: int = 0) -> None:
        received = self.received = dict[str, list[Any]]((path, []) for path in REQUESTS)
        arrived = self._arrived = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                raw = gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw
                with arrived:
                    received[self.path].append(REQUESTS[self.path].FromString(raw))
                    arrived.notify_all()
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *values: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def services(self) -> dict[str, str]:
        """Return the version of each service that has sent metrics."""
        found = {}
        for request in self.received["/v1/metrics"]:
            for one in request.resource_metrics:
                about = {pair.key: pair.value.string_value for pair in one.resource.attributes}
                found[about["service.name"]] = about["service.version"]
        return found

    def wait_for(self, services: set[str], seconds: float) -> None:
        """Return when all of these services have sent metrics; fail after this many seconds."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.services().keys() >= services, seconds), self.services()


def samples(request: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the values of an export as a page for Prometheus has them: running totals of buckets, sums and counts."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        data = getattr(metric, metric.WhichOneof("data"))
        for point in data.data_points:
            labels = frozenset((pair.key, pair.value.string_value) for pair in point.attributes)
            if metric.WhichOneof("data") != "histogram":
                found[metric.name, labels] = point.as_double
                continue
            count = 0
            for bound, more in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
                count += more
                found[f"{metric.name}_bucket", labels | {("le", f"{bound:g}")}] = count
            found[f"{metric.name}_count", labels], found[f"{metric.name}_sum", labels] = point.count, point.sum
    return found

"""Export of a daemon's metrics to a collector of OpenTelemetry (`otlp_endpoint`), over OTLP with HTTP.

The metrics are those of the page for Prometheus, with the same names, labels and values (`waltzd.daemon.metrics`). Counts
are cumulative, so an export that fails loses nothing: the next one has everything. A collector that is away costs the
daemon one thread and one line of its log. Credentials and certificates for the collector are taken from the environment, as
OpenTelemetry names them (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from waltzd.daemon.metrics import Families
from waltzd.daemon.process import Threads
from waltzd.errors.operations import NotInstalled
from waltzd.protocol.role import Role

try:
    import requests
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        MetricExportResult,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError as error:
    raise NotInstalled("the package opentelemetry-exporter-otlp-proto-http is not installed", extra="otlp") from error

EXPORT_SECONDS = 15.0
TIMEOUT_SECONDS = 10.0
"""Limit for one export, including its retries."""
REASON_MAX = 200
"""Characters of an address from the collector in an error."""
_CUMULATIVE = AggregationTemporality.CUMULATIVE
log = logging.getLogger("waltz.otlp")


class _FirstMessage(logging.Handler):
    """First message that the library logged: it returns no reason, and would log each try."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class _Session(requests.Session):
    """HTTP without the bodies of answers, which the library would read to their end, and a redirect is an error: the
    library counts one as delivered."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        answer = super().send(request, **{**options, "stream": True})
        answer.close()
        if answer.is_redirect:
            raise requests.TooManyRedirects(f"it redirects to {answer.headers['Location'][:REASON_MAX]}")
        return answer

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return None for no target: `requests` would read the body before it follows."""


class MetricsExport:
    def __init__(self, endpoint: str, role: Role, name: str | None, collect: Callable[[], Awaitable[Families]]) -> None:
        """`endpoint`: address of the collector, such as http://127.0.0.1:4318. `name`: name of this daemon."""
        self._endpoint = endpoint
        self._collect = collect
        self._resource = Resource.create(
            {
                "service.name": f"waltz-{role.value}",
                "service.version": version("waltzd"),
                **({"service.instance.id": name} if name else {}),
            }
        )
        self._exporter = OTLPMetricExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/metrics", timeout=TIMEOUT_SECONDS, session=_Session()
        )
        self._reasons = _FirstMessage()
        library = logging.getLogger("opentelemetry.exporter")
        library.handlers, library.propagate = [self._reasons], False
        self._began_ns = time.time_ns()
        self._is_well = True
        """Whether the last export arrived."""

    async def run(self) -> None:
        """Export every `EXPORT_SECONDS` until cancelled."""
        with Threads(1, "otlp", is_waited_for=False) as thread:
            while True:
                sending = thread.run(self._send, list(await self._collect()))
                await asyncio.wait([sending], timeout=2 * TIMEOUT_SECONDS)
                if not sending.done():  # the library has a limit for the silence between two bytes only
                    self._reasons.text = "it answers too slowly"
                    self._note(False)
                self._note(await sending)
                await asyncio.sleep(EXPORT_SECONDS)

    def _send(self, families: Iterable[Family]) -> bool:
        self._reasons.text = ""
        data = metrics_data(families, self._resource, self._began_ns, time.time_ns())
        return self._exporter.export(data) is MetricExportResult.SUCCESS

    def _note(self, is_well: bool) -> None:
        if not is_well and self._is_well:
            log.warning("metrics do not reach %s: %s", self._endpoint, self._reasons.text)
        elif is_well and not self._is_well:
            log.info("metrics reach %s again", self._endpoint)
        self._is_well = is_well


def metrics_data(families: Iterable[Family], resource: Resource, began_ns: int, now_ns: int) -> MetricsData:
    """Return the values of metric families as OpenTelemetry has them."""
    metrics = [metric for family in families for metric in _metrics(family, began_ns, now_ns)]
    scope = InstrumentationScope("waltzd", version("waltzd"))
    scoped = ScopeMetrics(scope=scope, metrics=metrics, schema_url="")
    return MetricsData(resource_metrics=[ResourceMetrics(resource=resource, scope_metrics=[scoped], schema_url="")])


def _metrics(family: Family, began_ns: int, now_ns: int) -> Iterator[Metric]:
    if family.type == "histogram":
        series = [_histogram(labels, found, began_ns, now_ns) for labels, found in _series(family.samples)]
        data: Any = Histogram(data_points=series, aggregation_temporality=_CUMULATIVE)
        yield Metric(name=family.name, description=family.documentation, unit="", data=data)
        return
    for name in dict.fromkeys(sample.name for sample in family.samples):
        points = [
            NumberDataPoint(dict(sample.labels), began_ns, now_ns, float(sample.value))
            for sample in family.samples
            if sample.name == name
        ]
        is_counter = family.type == "counter"
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if is_counter else Gauge(data_points=points)
        yield Metric(name=name, description=family.documentation, unit="", data=data)


def _series(samples: Iterable[Sample]) -> Iterator[tuple[Mapping[str, str], list[Sample]]]:
    """Group the samples of a histogram by their labels without the bound of the bucket."""
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        found.setdefault(labels, []).append(sample)
    for key, of_key in found.items():
        yield dict(key), of_key


def _histogram(labels: Mapping[str, str], samples: Iterable[Sample], began_ns: int, now_ns: int) -> HistogramDataPoint:
    """Return a histogram with counts of single buckets; Prometheus has them as running totals."""
    totals = [(float(sample.labels["le"]), int(sample.value)) for sample in samples if "le" in sample.labels]
    total = next((sample.value for sample in samples if sample.name.endswith("_sum")), 0.0)
    counts = [count - before for (_, count), (_, before) in zip(totals, [(0.0, 0), *totals], strict=False)]
    unknown: Any = None
    return HistogramDataPoint(
        attributes=labels,
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=totals[-1][1],
        sum=total,
        bucket_counts=counts,
        explicit_bounds=[bound for bound, _ in totals[:-1]],
        min=unknown,
        max=unknown,
    )

"""Metrics of a daemon at a collector of OpenTelemetry: the values of the page for Prometheus, also after it was away."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import Metric

from tests.collector import Collector, samples
from tests.unit.waltzd.daemon import test_metrics as pages
from waltzd.daemon import metrics, otlp
from waltzd.daemon.otlp import MetricsExport
from waltzd.protocol.role import Role


def of_server() -> Iterable[Metric]:
    return metrics.of_server(
        pages.SERVER, cluster_partitions=8, unready=(), commit=pages.COMMIT, certificate_seconds=1.5, archive=pages.READS
    )


def of_storage() -> Iterable[Metric]:
    return metrics.of_storage(pages.STORAGE, unready=(), free_bytes_min=64, certificate_seconds=1.5)


def exporting(endpoint: str, role: Role, families: Any, name: str | None = "one") -> MetricsExport:
    async def collect() -> Iterable[Metric]:
        return families()  # type: ignore[no-any-return]

    return MetricsExport(endpoint, role, name, collect)


@pytest.mark.parametrize(("role", "families"), [(Role.SERVER, of_server), (Role.STORAGE, of_storage)])
def test_a_collector_gets_the_values_of_the_page(role: Role, families: Any) -> None:
    with Collector().running() as collector:
        export = exporting(collector.endpoint, role, families)
        assert export._send(families())
    (request,) = collector.received["/v1/metrics"]
    about = {pair.key: pair.value.string_value for pair in request.resource_metrics[0].resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == (f"waltz-{role.value}", "one")
    page = pages.samples(metrics.page(families())[0].decode())

    def plain(labels: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        return frozenset((key, f"{float(value):g}" if key == "le" else value) for key, value in labels)

    expected = {
        (name, plain(labels)): found
        for (name, labels), found in page.items()
        if name.startswith("waltz_") and not name.endswith("_created")
    }
    assert len(expected) > 40
    assert samples(request) == pytest.approx(expected)


def test_a_collector_that_is_away_is_one_line_and_gets_everything_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "EXPORT_SECONDS", 0.01)
    monkeypatch.setattr(otlp, "TIMEOUT_SECONDS", 0.05)
    with Collector().running() as collector:
        port = collector.port  # nobody listens there any more

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "waltz.otlp"]

    async def work() -> None:
        export = exporting(f"http://127.0.0.1:{port}/", Role.SERVER, of_server, None)
        task = asyncio.create_task(export.run())
        while not told():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        with Collector(port).running() as again:
            await asyncio.to_thread(again.wait_for, {"waltz-server"}, 30)
            while len(told()) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])

    with caplog.at_level(logging.INFO, "waltz.otlp"):
        asyncio.run(asyncio.wait_for(work(), 60))
    away, back = told()
    assert away.startswith(f"metrics do not reach http://127.0.0.1:{port}/: ")
    assert "Failed to export" in away
    assert back.endswith("again")


def test_without_the_extra_it_is_named() -> None:
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; import waltzd.daemon.otlp"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "`pip install 'waltzd[otlp]'`, which brings it" in found.stderr

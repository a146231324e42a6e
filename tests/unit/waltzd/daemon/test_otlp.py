"""Metrics of a daemon at a collector of OpenTelemetry: the values of the page for Prometheus, also after it was away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
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


@contextlib.contextmanager
def answering(*pieces: bytes, pause: float = 0.0) -> Iterator[str]:
    """A collector that sends the last piece again and again, until its caller has gone or the test has ended."""
    ended = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connected, _ = listening.accept()
                with connected, contextlib.suppress(OSError):
                    connected.recv(1 << 16)
                    for piece in itertools.chain(pieces, itertools.repeat(pieces[-1])):
                        connected.sendall(piece)
                        if ended.wait(pause):
                            return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.mark.parametrize("status", ["200 OK", "500 Broken", "302 Found\r\nLocation: /there"])
def test_the_body_of_an_answer_is_not_read(status: str) -> None:
    """It ended in no time and in as much memory as it liked."""
    with answering(f"HTTP/1.1 {status}\r\n\r\n".encode(), bytes(1 << 16)) as endpoint:
        export = exporting(endpoint, Role.STORAGE, of_storage)
        assert export._send(of_storage()) == (status == "200 OK")
    assert ("/there" in export._reasons.text) == (status[:3] == "302")


def test_a_collector_that_dawdles_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_SECONDS", 0.2)

    async def work(endpoint: str) -> None:
        task = asyncio.create_task(exporting(endpoint, Role.STORAGE, of_storage).run())
        while not caplog.records:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    with answering(b"HTTP/1.1 200 O", b"K", pause=0.01) as endpoint, caplog.at_level(logging.INFO, "waltz.otlp"):
        asyncio.run(asyncio.wait_for(work(endpoint), 30))
    assert [record.getMessage() for record in caplog.records] == [f"metrics do not reach {endpoint}: it answers too slowly"]


def test_without_the_extra_it_is_named() -> None:
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; import waltzd.daemon.otlp"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "`pip install 'waltzd[otlp]'`, which brings it" in found.stderr

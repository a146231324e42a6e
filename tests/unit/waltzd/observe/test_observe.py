"""What a client does, seen by Prometheus and OpenTelemetry: as many as there were, below the caller's span, and no
traceback where the packages are missing."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from tests.collector import Collector
from waltzd import Builder, Command, Committed, Rejected, Transaction, observe, write_lock
from waltzd.errors import BadArgument
from waltzd.observe.prometheus import GAUGES, families
from waltzd.testing import BlockingCluster, LocalCluster

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "how-to" / "observe.md").read_text(encoding="utf-8")


class Shop:
    """A view in memory; what it fails on is put into `failures`."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.failures: list[Exception] = []
        self.spans: list[Any] = []

    def position(self, partition: int) -> int:
        return -1

    def apply(self, transaction: Transaction) -> None:
        self.spans.append(trace.get_current_span().get_span_context())
        if self.failures:
            raise self.failures.pop()
        self.applied.append(transaction.payload)


class Order(Command):
    def partition(self, count: int) -> int:
        return 0

    def build(self, builder: Builder) -> bool:
        builder.payload = b"order"
        builder.locks = [write_lock("stock", 1)]
        return True


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class Page:
    """The figures of a registry, by name and labels."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def __getitem__(self, name: str) -> float | None:
        name, _, labels = name.partition(" ")
        given = dict(pair.split("=") for pair in labels.split())
        return self.registry.get_sample_value(f"waltz_client_{name}", {"client": "client", **given})


# -- figures -----------------------------------------------------------------------------------------------------------


def test_every_transaction_is_counted_by_its_outcome() -> None:
    async def story() -> None:
        page, shop = Page(), Shop()
        async with LocalCluster(partitions=2) as cluster:
            client = cluster.client(view=shop)
            observe.metrics(client, registry=page.registry)
            async with client:
                assert type(await client.append(b"one", partition=0)) is Committed
                assert (await client.append_many([b"two", b"three"], partition=1)).committed == 2
                group = await client.append_atomic([b"four", b"five", b"six"], partition=0)
                assert type(group) is Committed
                locks = [write_lock("stock", 1)]
                assert type(await client.append(b"seven", partition=0, locks=locks, position=group.ids[-1])) is Committed
                assert type(await client.append(b"late", partition=0, locks=locks, position=group.ids[-1])) is Rejected
                cluster.force_next_lock_failure()
                assert type(await client.submit(Order())) is Committed
                await until(lambda: len(shop.applied) == 8)
                counted = [page[f"transactions_total outcome={kind}"] for kind in ("committed", "unknown", "not_sent")]
                assert counted == [8, 0, 0]
                failed = ("conflict", "in_flight", "too_far_behind", "owner_changed")
                assert sum(page[f"transactions_total outcome={kind}"] or 0 for kind in failed) == 2
                assert page["retries_total"] == 1
                assert page["outcome_seconds_count"] == 10
                assert page["apply_seconds_count"] == 8
                assert [page[f"position partition={number}"] for number in (0, 1)] == [5, 1]
                assert [page[f"{name} partition=0"] for name in ("pending", "lag", "failing", "ready")] == [0, 0, 0, 1]
            assert page["ready partition=0"] is None, "a client that is closed has no partitions"
            assert page["retries_total"] == 1

    asyncio.run(story())


def test_a_view_that_fails_is_seen() -> None:
    async def story() -> None:
        page, shop = Page(), Shop()
        shop.failures = [ValueError("no stock")]
        async with LocalCluster(partitions=1) as cluster:
            client = cluster.client(view=shop)
            observe.metrics(client, registry=page.registry)
            async with client:
                await client.append(b"one", partition=0)
                await until(lambda: page["failing partition=0"] == 1)
                assert page["lag partition=0"] == 1
                await until(lambda: page["failing partition=0"] == 0)
                assert page["apply_failures_total"] == 1

    asyncio.run(story())


@pytest.mark.slow
def test_clients_of_a_process_share_a_registry_by_name() -> None:
    async def story() -> None:
        registry = CollectorRegistry()
        async with LocalCluster(partitions=1) as cluster:
            one, two = cluster.client(), cluster.client()
            for _ in range(2):
                observe.metrics(one, registry=registry)  # the second time changes nothing
            with pytest.raises(BadArgument, match="another client has the name 'client'"):
                observe.metrics(two, registry=registry)
            async with one:
                await one.append(b"one", partition=0)
                with pytest.raises(BadArgument, match="open already"):
                    observe.metrics(one, registry=registry)
                observe.metrics(two, name="two", registry=registry)
                async with two:
                    await two.append(b"one", partition=0)
                    page = generate_latest(registry).decode()
            assert page.count("# TYPE waltz_client_pending gauge") == 1
            assert 'waltz_client_transactions_total{client="client",outcome="committed"} 1.0' in page
            assert 'waltz_client_transactions_total{client="two",outcome="committed"} 1.0' in page
            three = cluster.client()
            observe.metrics(three, registry=registry)  # the one that had the name is closed
            del one, two
            gc.collect()
            assert 'client="two"' not in generate_latest(registry).decode(), "a client that nobody has is forgotten"

    asyncio.run(story())


def test_deliveries_of_consumer_groups_are_counted_by_what_became_of_them() -> None:
    async def story() -> None:
        page = Page()
        async with LocalCluster(partitions=1) as cluster:
            client = cluster.client()
            observe.metrics(client, registry=page.registry)
            observe.traces(client)
            async with client:
                await client.create_group("mailer", mode="queue")
                await client.append_many([b"one", b"two", b"three"], partition=0)
                async with client.subscribe("mailer") as subscription:
                    found: list[Any] = []
                    while len(found) < 3:
                        found += await subscription.take(3)
                    await found[0].ack()
                    await found[1].nack(delay=100)
                    await found[2].reject("no")
                kinds = ("given", "acknowledged", "failed", "rejected")
                counted = [page[f"deliveries_total group=mailer outcome={kind}"] for kind in kinds]
                assert counted == [3, 1, 1, 1]

    asyncio.run(story())


def test_the_document_lists_every_metric_and_no_other() -> None:
    names = {name: "client, partition" for name, _, _ in GAUGES} | {
        "transactions": "client, outcome",
        "deliveries": "client, group, outcome",
    }
    told = list(families([]))
    assert len(re.findall("^. `waltz_client_", PAGE, re.MULTILINE)) == len(told)
    for metric in told:
        total = "_total" if metric.type == "counter" else ""
        labels = names.get(metric.name.removeprefix("waltz_client_"), "client")
        assert f"| `{metric.name}{total}` | {metric.type} | {labels} | {metric.documentation} |\n" in PAGE


# -- spans -------------------------------------------------------------------------------------------------------------


class Told:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.provider.shutdown()


def contexts(spans: Sequence[ReadableSpan]) -> list[int]:
    return [span.context.span_id for span in spans if span.context is not None]


def test_spans_of_a_caller_lead_to_what_the_view_applies(told: Told) -> None:
    async def story() -> None:
        shop = Shop()
        async with LocalCluster(partitions=1) as cluster:
            client = cluster.client(view=shop)
            observe.traces(client, tracer_provider=told.provider)
            async with client:
                with told.provider.get_tracer("shop").start_as_current_span("request") as request:
                    cluster.force_next_lock_failure()
                    outcome = await client.submit(Order())
                await until(lambda: len(told.spans("waltz apply")) == 1)
                assert type(outcome) is Committed
                first, second = told.spans("waltz append")
                for span in (first, second):
                    assert span.parent is not None
                    assert span.parent.span_id == request.get_span_context().span_id
                assert first.attributes is not None
                assert second.attributes is not None
                assert first.attributes["waltz.outcome"] == "rejected"
                assert dict(second.attributes) == {
                    "waltz.partition": 0, "waltz.transactions": 1, "waltz.outcome": "committed", "waltz.id": outcome.id,
                }  # fmt: skip
                (apply,) = told.spans("waltz apply")
                assert apply.attributes is not None
                assert apply.attributes["waltz.id"] == outcome.id
                assert [link.context.span_id for link in apply.links] == contexts([second])
                assert [context.span_id for context in shop.spans] == contexts([apply])

    asyncio.run(story())


def test_a_view_on_a_thread_works_within_its_span(told: Told) -> None:
    shop = Shop()
    with BlockingCluster(partitions=1) as cluster:
        client = cluster.client(view=shop)
        observe.traces(client, tracer_provider=told.provider)
        with client, told.provider.get_tracer("shop").start_as_current_span("request") as request:
            client.append_many([b"one", b"two"], partition=0)
            client.append(b"three", partition=0)
            asyncio.run(until(lambda: len(told.spans("waltz apply")) == 3))
    many, one = told.spans("waltz append")
    assert many.attributes is not None
    assert many.attributes["waltz.committed"] == 2
    assert {span.parent.span_id for span in (many, one) if span.parent} == {request.get_span_context().span_id}
    assert sorted(context.span_id for context in shop.spans) == sorted(contexts(told.spans("waltz apply")))


def test_what_was_not_sent_is_an_error_of_its_span(told: Told) -> None:
    async def story() -> None:
        async with LocalCluster(partitions=1) as cluster:
            client = cluster.client()
            observe.traces(client, tracer_provider=told.provider)
            async with client:
                with pytest.raises(Exception, match="bytes"):
                    await client.append(bytes(20 << 20), partition=0)
        (span,) = told.spans("waltz append")
        assert span.status.status_code is trace.StatusCode.ERROR
        assert [event.name for event in span.events] == ["exception"]

    asyncio.run(story())


# -- without the packages ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "package", "extra"), [("metrics", "prometheus_client", "metrics"), ("traces", "opentelemetry", "otel")]
)
def test_without_its_package_it_says_what_to_install(call: str, package: str, extra: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from waltzd import Client, observe
from waltzd.errors.operations import NotInstalled
try:
    observe.{call}(Client("localhost:1"))
except NotInstalled as error:
    print(*error.lines(), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        f"W2032 the package {package} is not installed",
        "Not done: nothing was started, read or written",
        f"Next: `pip install 'waltzd[{extra}]'`, which brings it",
    ], done.stderr


def test_spans_reach_a_collector_over_otlp() -> None:
    with Collector().running() as collector:
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{collector.endpoint}/v1/traces")))
        with BlockingCluster(partitions=1) as cluster:
            client = cluster.client()
            observe.traces(client, tracer_provider=provider)
            with client:
                client.append(b"a", partition=0)
        provider.shutdown()
    spans = [
        span.name
        for request in collector.received["/v1/traces"]
        for one in request.resource_spans
        for scope in one.scope_spans
        for span in scope.spans
    ]
    assert spans == ["waltz append"]

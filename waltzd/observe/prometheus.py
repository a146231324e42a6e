"""Prometheus metrics of clients. Outcomes are counted when they arrive; everything else is read at a scrape.

One collector serves all clients of a registry, because a page may list each metric once. A scrape may run on any thread: it
reads only numbers, which the client may change meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from waltzd.client.client import Client
from waltzd.client.follower import Call
from waltzd.client.instrument import handed_on
from waltzd.client.pending import IS_COMMITTED, IS_UNKNOWN, AnyRequest, Outcomes
from waltzd.errors import BadArgument
from waltzd.protocol.groups import AckKind
from waltzd.protocol.histogram import BOUNDS, Durations, Histogram
from waltzd.protocol.locks import Committed, Reason, Rejected

_BOUNDS = (*map(floatToGoString, BOUNDS), "+Inf")
_NAMES = {IS_COMMITTED: "committed", IS_UNKNOWN: "unknown", **{int(reason): reason.name.lower() for reason in Reason}}
NOT_SENT, CANCELLED = "not_sent", "cancelled"
_SETTLED = {AckKind.ACKNOWLEDGE: "acknowledged", AckKind.REFUSE: "failed", AckKind.REJECT: "rejected"}
OUTCOMES = (*_NAMES.values(), NOT_SENT, CANCELLED)


class ClientCounters:
    """Counters of one client."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.retries = 0
        self.deliveries: Counter[tuple[str, str]] = Counter()
        """Number of deliveries by group and outcome."""
        self.durations = Durations()
        self.applied = Durations()
        self.apply_failures = 0

    def sent(self, partition: int, request: AnyRequest, outcome: asyncio.Future[Any]) -> None:
        outcome.add_done_callback(partial(self._decided, request.rows, time.perf_counter()))

    def _decided(self, rows: int, started: float, outcome: asyncio.Future[Any]) -> None:
        if outcome.cancelled():
            self.outcomes[CANCELLED] += rows
        elif outcome.exception() is not None:
            self.outcomes[NOT_SENT] += rows
        else:
            self.durations.add(time.perf_counter() - started, rows)
            found = outcome.result()
            if isinstance(found, Outcomes):
                for reason, count in enumerate(np.bincount(found.reasons).tolist()):
                    if count:
                        self.outcomes[_NAMES[reason]] += count
            elif isinstance(found, Committed):
                self.outcomes["committed"] += rows
            else:
                self.outcomes[found.reason.name.lower() if isinstance(found, Rejected) else "unknown"] += rows

    def again(self, partition: int) -> None:
        self.retries += 1

    def calling(self, partition: int, call: Call) -> Call:
        async def counted(function: Any, *arguments: Any) -> Any:
            given = handed_on(function, arguments)
            if not given:
                return await call(function, *arguments)
            started = time.perf_counter()
            try:
                found = await call(function, *arguments)
            except Exception:
                self.apply_failures += 1
                raise
            self.applied.add((time.perf_counter() - started) / len(given), len(given))
            return found

        return counted

    def delivered(self, group: str, partition: int, count: int) -> None:
        self.deliveries[group, "given"] += count

    def settled(self, group: str, partition: int, verb: AckKind, count: int) -> None:
        if verb in _SETTLED:
            self.deliveries[group, _SETTLED[verb]] += count


class ClientCollector(Collector):
    def __init__(self) -> None:
        self._lock = Lock()
        self._clients: WeakKeyDictionary[Client, ClientCounters] = WeakKeyDictionary()

    def add(self, client: Client, name: str) -> ClientCounters:
        with self._lock:
            for other, counters in list(self._clients.items()):
                if counters.name == name and other is not client:
                    if not _is_over(other):
                        raise BadArgument(f"another client has the name {name!r}", next_step="give each its own `name`")
                    del self._clients[other]
            return self._clients.setdefault(client, ClientCounters(name))

    def describe(self) -> Iterator[Metric]:
        return families([])

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            clients = list(self._clients.items())
        return families([(counters, client) for client, counters in clients])


def _is_over(client: Client) -> bool:
    """Return whether a client was opened and is closed again."""
    return client._registration is not None and not client.partitions


_collectors: WeakKeyDictionary[CollectorRegistry, ClientCollector] = WeakKeyDictionary()
_registering = Lock()


def register_client(client: Client, name: str, registry: CollectorRegistry | None) -> ClientCounters:
    """Register a client, and return its counters."""
    registry = REGISTRY if registry is None else registry
    with _registering:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = ClientCollector()
            registry.register(collector)
    return collector.add(client, name)


def families(found: Sequence[tuple[ClientCounters, Client]]) -> Iterator[Metric]:
    outcomes = CounterMetricFamily(
        "waltz_client_transactions",
        "Transactions that were appended, by outcome; each attempt of a submit counts.",
        labels=["client", "outcome"],
    )
    retries = CounterMetricFamily(
        "waltz_client_retries", "Retries of submits: each builds its transaction anew.", labels=["client"]
    )
    failures = CounterMetricFamily("waltz_client_apply_failures", "Calls of the view that failed.", labels=["client"])
    deliveries = CounterMetricFamily(
        "waltz_client_deliveries",
        "Deliveries of consumer groups, by outcome.",
        labels=["client", "group", "outcome"],
    )
    took = HistogramMetricFamily("waltz_client_outcome_seconds", "Seconds from append to outcome.", labels=["client"])
    applied = HistogramMetricFamily(
        "waltz_client_apply_seconds", "Seconds in which the view applied a transaction.", labels=["client"]
    )
    for counters, _ in found:
        for outcome in OUTCOMES:
            outcomes.add_metric([counters.name, outcome], counters.outcomes[outcome])
        retries.add_metric([counters.name], counters.retries)
        failures.add_metric([counters.name], counters.apply_failures)
        for group, outcome in sorted(counters.deliveries):
            deliveries.add_metric([counters.name, group, outcome], counters.deliveries[group, outcome])
        for family, durations in ((took, counters.durations), (applied, counters.applied)):
            _add(family, counters.name, durations.histogram())
    yield from (outcomes, retries, failures, deliveries, took, applied)
    states = [(counters, state) for counters, client in found for state in client.status()]
    for name, about, value in GAUGES:
        gauge = GaugeMetricFamily(f"waltz_client_{name}", about, labels=["client", "partition"])
        for counters, state in states:
            gauge.add_metric([counters.name, str(state.partition)], value(state))
        yield gauge


def _add(family: HistogramMetricFamily, name: str, found: Histogram) -> None:
    rising = zip(_BOUNDS, map(float, accumulate(found.counts)), strict=True)
    family.add_metric([name], list(rising), found.seconds)


GAUGES = (
    ("pending", "Transactions without an outcome yet.", lambda state: state.pending),
    ("ready", "1 when transactions leave at once.", lambda state: state.is_ready),
    ("position", "The highest id that the view has applied; -1 for none.", lambda state: state.applied),
    ("lag", "Transactions that the view is behind the end of the log.", lambda state: state.lag),
    ("failing", "1 while the view fails.", lambda state: state.failing is not None),
    ("stopped", "1 when the partition was stopped by an error.", lambda state: state.stopped is not None),
)

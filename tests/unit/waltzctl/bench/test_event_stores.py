"""The comparison of event stores, without their servers: what is decided and counted, and that wrong stores are found."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.bench.dcb.command import parsed
from tests.bench.dcb.load import (
    BOUNDARY_EVENTS,
    RACERS,
    WORKLOADS,
    StoreLoad,
    Workload,
    Writer,
    WrongReadError,
    client,
    identity,
    kept_of,
    run_client,
    run_client_blocking,
)
from tests.bench.dcb.stores import STORES, SYSTEMS, Found, Store, WaltzStore
from tests.bench.peers.load import Measurement, Plan, Window
from tests.unit import timeless
from tests.unit.told import told
from tests.unit.waltzd.testing.test_cluster import with_cluster
from waltzd.dcb import EventStore
from waltzd.testing import LocalCluster

PLAN = Plan(system="waltz", address=(), pids=(), sizes=(40, 64), seconds=0.1, warm_seconds=0.05, in_flight=0)
RACE = WORKLOADS[-1]


class Ledger(Store):
    """An event store in memory. A condition is checked, and then a round trip passes if the store is too lenient."""

    is_blocking = False

    def __init__(self, *, is_lenient: bool = False, loses: bool = False, repeats: bool = False) -> None:
        super().__init__(())
        self.is_lenient, self.loses, self.repeats = is_lenient, loses, repeats
        self.events: list[tuple[str, bytes]] = []
        self.together: set[str] = set()
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True

    async def read(self, boundary: str | None, after: int | None = None) -> Found:
        await asyncio.sleep(0.01)
        found = self.events[after or 0 :]
        return Found([event for one, event in found if boundary in (None, one)], len(self.events))

    async def append(self, boundary: str, event: bytes) -> None:
        await asyncio.sleep(0.01)
        if not self.loses or len(self.events) != 7:
            self.events += [(boundary, event)] * (2 if self.repeats else 1)
        else:
            self.loses = False

    async def append_after(self, boundary: str, event: bytes, head: int | None) -> bool:
        await asyncio.sleep(0.01)
        if boundary in [one for one, _ in self.events[head or 0 :]]:
            return False
        if self.is_lenient:
            await asyncio.sleep(0.01)
        self.events.append((boundary, event))
        return True

    async def close(self) -> None:
        self.is_open = False


def load(ledger: Ledger) -> list[Measurement]:
    found: list[Measurement] = []
    timeless.run(StoreLoad(PLAN, ledger).run(found.append))
    return found


def test_every_system_has_a_client() -> None:
    assert set(SYSTEMS) == set(STORES)
    assert parsed(["--rounds", "2"]).peers == tuple(SYSTEMS)


def test_a_writer_turns_to_the_next_boundary_when_one_is_full() -> None:
    writer = Writer("a", 40)
    events = [writer.next_event() for _ in range(BOUNDARY_EVENTS + 2)]
    assert [identity(event) for event in events[-3:]] == ["a-0/9", "a-1/0", "a-1/1"]
    assert {len(event) for event in events} == {40}


def test_a_decision_follows_what_was_read() -> None:
    writer, others = Writer("a", 40), Writer("a", 40)
    events = [others.next_event() for _ in range(BOUNDARY_EVENTS)]
    assert [writer.decide(events[:count]) for count in range(BOUNDARY_EVENTS)] == events
    assert writer.decide(events) is None
    assert writer.boundary == "a-1"


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0), (1, 0), tuple(range(BOUNDARY_EVENTS + 1))])
def test_a_read_with_a_gap_or_an_event_twice_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(WrongReadError):
        Writer("a", 40).decide([f"a-0/{number}\n".encode() for number in order])


def test_only_who_shares_a_boundary_may_lose() -> None:
    Writer("a", 40, is_shared=True).lose()
    with pytest.raises(WrongReadError):
        Writer("a", 40).lose()


@pytest.mark.parametrize(
    ("acknowledged", "found", "counts"),
    [
        ("abc", "cab", (3, 3)),
        ("abc", "ab", (3, 2)),
        ("abc", "abcc", (3, 4)),
        ("abc", "abcd", (3, 4)),
        ("abc", "abdd", (3, 2)),
        ("abb", "abb", (2, 3)),
    ],
)
def test_kept_is_what_is_there_once_and_nothing_makes_up_for_what_is_lost(
    acknowledged: str, found: str, counts: tuple[int, int]
) -> None:
    assert kept_of([one.encode() for one in acknowledged], [one.encode() for one in found]) == counts


@pytest.mark.slow
def test_every_workload_is_measured_and_everything_is_kept() -> None:
    ledger = Ledger()
    found = load(ledger)
    expected = [(size, workload.name) for size in PLAN.sizes for workload in WORKLOADS]
    assert [(one.size, one.workload) for one in found] == expected
    assert all(one.count and one.missing == 0 for one in found)
    assert len(set(ledger.events)) == len(ledger.events)
    assert not ledger.is_open


def test_a_store_that_loses_or_repeats_is_found() -> None:
    assert race(Ledger(repeats=True), WORKLOADS[0], 12) == (12, 24)
    assert race(Ledger(loses=True), WORKLOADS[0], 12) == (12, 11)


def race(store: Store, workload: Workload, count: int) -> tuple[int, int]:
    """Run the clients of a workload until so many events were acknowledged; return what was, and what is kept."""

    async def work() -> tuple[int, int]:
        window, events = Window(), list[bytes]()

        def take(event: bytes, seconds: float) -> None:
            events.append(event)
            window.is_over = len(events) >= count

        writers = [Writer("a", 40, is_shared=workload.is_shared) for _ in range(workload.clients)]
        await asyncio.gather(*[run_client(store, client(workload, writer, window, take)) for writer in writers])
        return kept_of(events, (await store.read(None)).events)

    return timeless.run(work())


def test_of_clients_that_race_one_wins_and_two_winners_are_found() -> None:
    acknowledged, kept = race(Ledger(), RACE, 25)
    assert acknowledged == kept >= 25
    acknowledged, kept = race(Ledger(is_lenient=True), RACE, 1)
    assert (acknowledged, kept) == (1, RACERS)
    with pytest.raises(WrongReadError):
        race(Ledger(is_lenient=True), RACE, 25)


def test_clients_in_threads_race_as_well() -> None:
    class Locked(Store):
        lock, events = threading.Lock(), list[bytes]()

        async def open(self) -> None: ...

        def read(self, boundary: str | None, after: int | None = None) -> Found:
            with self.lock:
                found = [event for event in self.events if event.startswith(f"{boundary}/".encode())]
                return Found(found, len(self.events))

        def append(self, boundary: str, event: bytes) -> None: ...

        def append_after(self, boundary: str, event: bytes, head: int | None) -> bool:
            with self.lock:
                if any(one.startswith(f"{boundary}/".encode()) for one in self.events[head or 0 :]):
                    return False
                self.events.append(event)
                return True

        async def close(self) -> None: ...

    store, window, taken, lock = Locked(()), Window(), list[bytes](), threading.Lock()

    def take(event: bytes, seconds: float) -> None:
        with lock:
            taken.append(event)
            window.is_over = len(taken) >= 30

    clients = [client(RACE, Writer("a", 40, is_shared=True), window, take) for _ in range(4)]
    threads = [threading.Thread(target=run_client_blocking, args=(store, calls)) for calls in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept_of(taken, store.events) == (len(taken), len(taken))


@pytest.mark.slow
@told(with_cluster, partitions=1)
async def test_waltz_keeps_what_it_acknowledged_and_of_racers_one_wins(cluster: LocalCluster) -> None:
    async with cluster.client() as waltz:
        store = WaltzStore(())
        store._store = EventStore(waltz, partition=0)
        for workload in (WORKLOADS[1], WORKLOADS[3], RACE):
            window, events = Window(), list[bytes]()
            before = (await store.read(None)).head

            def take(event: bytes, seconds: float, window: Window = window, events: list[bytes] = events) -> None:
                events.append(event)
                window.is_over = len(events) >= 30

            names = [workload.name if workload.is_shared else f"{workload.name}-{one}" for one in range(workload.clients)]
            writers = [Writer(name, 64, is_shared=workload.is_shared) for name in names]
            await asyncio.gather(*[run_client(store, client(workload, one, window, take)) for one in writers])
            found = await store.read(None, after=before)
            assert kept_of(events, found.events) == (len(events), len(events))
            assert len(events) >= 30

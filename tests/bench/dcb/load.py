"""The load on an event store, in a process of its own: decisions about boundaries, each checked, and then all counted.

A boundary has at most ten events, so that a decision reads a few. Each event says how many its writer had seen of its
boundary: two winners of one race would write the same event, and it would be there twice. After each measurement the
store is read and compared with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from tests.bench.dcb.stores import STORES, Found, Store
from tests.bench.peers.load import Load, Measurement, Window, run_load
from tests.bench.peers.system import LANES

BOUNDARY_EVENTS = 10
RACERS = 16


@dataclass(frozen=True)
class Workload:
    name: str
    clients: int
    reads: bool
    """Whether each append follows a read of its boundary, on the condition that nothing came between."""
    is_shared: bool = False
    """Whether all clients want the same boundary."""


WORKLOADS = (
    Workload("append, one client", 1, reads=False),
    Workload(f"append, {LANES} clients", LANES, reads=False),
    Workload("read and append, one client", 1, reads=True),
    Workload(f"read and append, {LANES} clients", LANES, reads=True),
    Workload(f"one boundary, {RACERS} clients", RACERS, reads=True, is_shared=True),
)
WARM_UP = Workload("warm-up", LANES, reads=True)


class WrongReadError(Exception):
    """A read that is not complete, or a conflict where nobody else writes."""


class Writer:
    """Decisions of one client: which boundary, and which event comes next there."""

    def __init__(self, name: str, size: int, *, is_shared: bool = False) -> None:
        """`name`: the beginning of its boundaries; clients whose writers have one name race."""
        self._name = name
        self._size = size
        self._is_shared = is_shared
        self._boundary_number = 0
        self._written = 0

    @property
    def boundary(self) -> str:
        return f"{self._name}-{self._boundary_number}"

    def next_event(self) -> bytes:
        """Return the next event of a client that does not read."""
        if self._written == BOUNDARY_EVENTS:
            self._turn()
        self._written += 1
        return self._event(self._written - 1)

    def decide(self, events: Sequence[bytes]) -> bytes | None:
        """Return the event that follows what was read; None if the boundary is full, and the client turns to the next."""
        expected = [f"{self.boundary}/{number}" for number in range(len(events))]
        if [identity(event) for event in events] != expected or len(events) > BOUNDARY_EVENTS:
            raise WrongReadError(
                f"{self.boundary}: {len(events)} events were read, which are not the first ones, each once"
            )
        if len(events) == BOUNDARY_EVENTS:
            self._turn()
            return None
        return self._event(len(events))

    def lose(self) -> None:
        """Accept that another client was faster."""
        if not self._is_shared:
            raise WrongReadError(f"{self.boundary}: an append was refused, and nobody else writes there")

    def _turn(self) -> None:
        self._boundary_number, self._written = self._boundary_number + 1, 0

    def _event(self, number: int) -> bytes:
        return f"{self.boundary}/{number}\n".encode().ljust(self._size, b".")


def identity(event: bytes) -> str:
    return event.partition(b"\n")[0].decode()


def kept_of(acknowledged: Iterable[bytes], found: Sequence[bytes]) -> tuple[int, int]:
    """Return how many different events were acknowledged, and how many are kept. They are equal if each is there once and
    nothing else is. Lost events count first: those that are too many do not make up for them."""
    wanted = set(acknowledged)
    lost = len(wanted.difference(found))
    return len(wanted), len(wanted) - lost if lost else len(found)


# -- clients: what they ask of a store, and then how they are run


Calls: TypeAlias = Generator[Callable[[Any], Any], Any, bytes]
"""Calls of a store, one after the other; each is answered with its result, or with the awaited result."""


def append_next(writer: Writer) -> Calls:
    event = writer.next_event()
    yield lambda store: store.append(writer.boundary, event)
    return event


def read_and_append(writer: Writer) -> Calls:
    while True:
        found: Found = yield lambda store: store.read(writer.boundary)
        if (event := writer.decide(found.events)) is None:
            continue
        if (yield partial(_append_after, writer.boundary, event, found.head)):
            return event
        writer.lose()


def _append_after(boundary: str, event: bytes, head: int | None, store: Store) -> Any:
    return store.append_after(boundary, event, head)


def client(
    workload: Workload, writer: Writer, window: Window, take: Callable[[bytes, float], None]
) -> Generator[Callable[[Any], Any], Any, None]:
    """Append until the window is over; `take` gets each acknowledged event, and the seconds that it took."""
    try:
        while not window.is_over:
            begun = time.perf_counter()
            event = yield from (read_and_append(writer) if workload.reads else append_next(writer))
            take(event, time.perf_counter() - begun)
    finally:
        window.is_over = True  # if one fails, the others end as well


def next_call(calls: Generator[Any, Any, None], answer: Any) -> Callable[[Any], Any] | None:
    try:
        found: Callable[[Any], Any] = calls.send(answer)
    except StopIteration:
        return None
    return found


async def run_client(store: Store, calls: Generator[Any, Any, None]) -> None:
    answer = None
    while call := next_call(calls, answer):
        answer = await call(store)


def run_client_blocking(store: Store, calls: Generator[Any, Any, None]) -> None:
    answer = None
    while call := next_call(calls, answer):
        answer = call(store)


class StoreLoad(Load[Store, Workload]):
    workloads = WORKLOADS
    warm_up = WARM_UP

    async def measure(self, workload: Workload, size: int) -> Measurement:
        window, events, lock = Window(), list[bytes](), threading.Lock()

        def take(event: bytes, seconds: float) -> None:
            with lock:
                events.append(event)
                window.done(1, seconds)

        before = (await self._answer(self._client.read(None))).head
        name = f"{workload.name}-{size}"
        names = [name if workload.is_shared else f"{name}-{number}" for number in range(workload.clients)]
        writers = [Writer(one, size, is_shared=workload.is_shared) for one in names]
        clients = [client(workload, writer, window, take) for writer in writers]
        with ThreadPoolExecutor(workload.clients) as threads:
            running = [self._run(one, threads) for one in clients]
            await asyncio.gather(self._keep_time(window), *running)
        found = await self._answer(self._client.read(None, after=before))
        acknowledged, kept = kept_of(events, found.events)
        return window.measured(workload.name, size, acknowledged=acknowledged, kept=kept)

    async def _run(self, calls: Generator[Any, Any, None], threads: ThreadPoolExecutor) -> None:
        if self._client.is_blocking:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(threads, run_client_blocking, self._client, calls)
        else:
            await run_client(self._client, calls)

    async def _answer(self, answer: Any) -> Found:
        found: Found = answer if self._client.is_blocking else await answer
        return found


if __name__ == "__main__":
    sys.exit(run_load(StoreLoad, STORES))

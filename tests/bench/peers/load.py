"""The load: one process, one loop, the same closed loops for every system; it writes a line of JSON for each measurement.

A measurement is a window in time. What is acknowledged inside it counts; what warms up before it and what is still under
way after it does not, but has to be kept all the same: after each measurement the servers are asked how much they hold.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import uvloop

from tests.bench.peers.etcd import EtcdSession
from tests.bench.peers.floor import FloorSession
from tests.bench.peers.jetstream import JetStreamSession
from tests.bench.peers.postgres import PostgresSession
from tests.bench.peers.process import cpu_seconds
from tests.bench.peers.redis_streams import RedisSession
from tests.bench.peers.system import LANES, LANES_MANY, Session, until_it_works
from tests.bench.peers.waltz import WaltzSession
from waltzctl.bench.command import Latencies

SESSIONS: dict[str, Callable[[tuple[str, ...]], Session]] = {
    "waltz": WaltzSession,
    "floor": FloorSession,
    "jetstream": JetStreamSession,
    "jetstream-always": JetStreamSession,
    "etcd": EtcdSession,
    "postgres": PostgresSession,
    "redis": RedisSession,
}
ONE, CLIENTS, MANY = "one at a time", "64 clients", "many in flight"
WORKLOADS = (ONE, CLIENTS, MANY)


@dataclass(frozen=True)
class Plan:
    """What one load process does, one measurement after the other."""

    system: str
    address: tuple[str, ...]
    pids: tuple[int, ...]
    """Of the servers, whose CPU is counted."""
    sizes: tuple[int, ...]
    seconds: float
    warm_seconds: float
    in_flight: int

    @staticmethod
    def from_json(words: str) -> Plan:
        fields: dict[str, Any] = json.loads(words)
        tuples = {name: tuple(fields[name]) for name in ("address", "pids", "sizes")}
        return Plan(**{**fields, **tuples})


@dataclass(frozen=True)
class Measurement:
    workload: str
    size: int
    count: int
    """Acknowledged inside the window."""
    seconds: float
    p50: float
    p99: float
    """In seconds; 0 where transactions travel together, because then they say nothing of a single one."""
    server_cpu: float
    client_cpu: float
    """Seconds, inside the window."""
    acknowledged: int
    """Since the system was started."""
    kept: int
    """What the servers say they hold."""

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def missing(self) -> int:
        """0 when exactly what was acknowledged is kept; more than it would be as wrong as less."""
        return self.acknowledged - self.kept

    @staticmethod
    def from_json(words: str) -> Measurement:
        return Measurement(**json.loads(words))


@dataclass
class Window:
    """Counts between its two ends."""

    count: int = 0
    acknowledged: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    is_over: bool = False
    _begun: tuple[float, float, float] | None = None
    _ended: tuple[float, float, float] | None = None

    def begin(self, now: float, server_cpu: float, client_cpu: float) -> None:
        self._begun = (now, server_cpu, client_cpu)

    def end(self, now: float, server_cpu: float, client_cpu: float) -> None:
        self._ended = (now, server_cpu, client_cpu)
        self.is_over = True

    def done(self, times: int, seconds: float) -> None:
        """So many were acknowledged just now, this long after they were sent."""
        self.acknowledged += times
        if self._begun is not None and not self.is_over:
            self.count += times
            self.latencies.add(seconds, times)

    def measured(self, workload: str, size: int, *, acknowledged: int, kept: int) -> Measurement:
        assert self._begun is not None
        assert self._ended is not None
        seconds, server_cpu, client_cpu = (end - begin for begin, end in zip(self._begun, self._ended, strict=True))
        tells = workload != MANY
        return Measurement(
            workload=workload,
            size=size,
            count=self.count,
            seconds=seconds,
            p50=self.latencies.percentile(50) if tells else 0.0,
            p99=self.latencies.percentile(99) if tells else 0.0,
            server_cpu=server_cpu,
            client_cpu=client_cpu,
            acknowledged=acknowledged,
            kept=kept,
        )


class Opened(Protocol):
    """Client of the system that is measured."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...


T = TypeVar("T", bound=Opened)
W = TypeVar("W")


class Load(ABC, Generic[T, W]):
    """The frame of a load process: the window of a measurement, and one measurement after the other."""

    workloads: Sequence[W]
    warm_up: W
    """Workload of the first measurement, which is thrown away: what a start leaves behind is not the load's."""

    def __init__(self, plan: Plan, client: T) -> None:
        self._plan = plan
        self._client = client

    @abstractmethod
    async def measure(self, workload: W, size: int) -> Measurement: ...

    async def run(self, tell: Callable[[Measurement], None]) -> None:
        await self._client.open()
        try:
            await self.measure(self.warm_up, self._plan.sizes[0])
            for size in self._plan.sizes:
                for workload in self.workloads:
                    tell(await self.measure(workload, size))
        finally:
            await self._client.close()

    async def _keep_time(self, window: Window) -> None:
        await asyncio.sleep(self._plan.warm_seconds)
        window.begin(*self._clocks())
        await asyncio.sleep(self._plan.seconds)
        window.end(*self._clocks())

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), cpu_seconds(self._plan.pids), time.process_time()


def run_load(load: Callable[[Plan, T], Load[T, Any]], clients: Mapping[str, Callable[[tuple[str, ...]], T]]) -> int:
    """Carry out the plan in the arguments of this process; print a line of JSON for each measurement."""
    plan = Plan.from_json(sys.argv[1])

    def tell(measurement: Measurement) -> None:
        fields: dict[str, Any] = asdict(measurement)
        print(json.dumps(fields), flush=True)

    uvloop.run(load(plan, clients[plan.system](plan.address)).run(tell))
    return 0


class PeerLoad(Load[Session, str]):
    workloads = WORKLOADS
    warm_up = CLIENTS

    def __init__(self, plan: Plan, client: Session) -> None:
        super().__init__(plan, client)
        self._acknowledged = 0

    async def measure(self, workload: str, size: int) -> Measurement:
        window = Window()
        payload = bytes(byte & 0xFF for byte in range(size))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time(window))
            for send, times in self._senders(workload, payload):
                group.create_task(_repeat(send, times, window))
        self._acknowledged += window.acknowledged
        return window.measured(workload, size, acknowledged=self._acknowledged, kept=await self._kept())

    def _senders(self, workload: str, payload: bytes) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        """What is sent again and again, and how many transactions each sending is."""
        session = self._client
        if workload != MANY:
            clients = 1 if workload == ONE else LANES
            return [(partial(session.append, slot, payload), 1) for slot in range(clients)]
        each = self._plan.in_flight // LANES_MANY
        lanes = [(lane, range(lane * each, (lane + 1) * each)) for lane in range(LANES_MANY)]
        return [(partial(session.append_all, lane, slots, payload), each) for lane, slots in lanes]

    async def _kept(self) -> int:
        """Replicas may be a moment behind; what is not there in the end is missing."""
        found = 0

        async def all_of_them() -> int:
            nonlocal found
            found = await self._client.kept()
            if found < self._acknowledged:
                raise LookupError
            return found

        try:
            return await until_it_works("everything is kept", all_of_them, LookupError)
        except TimeoutError:
            return found


async def _repeat(send: Callable[[], Awaitable[None]], times: int, window: Window) -> None:
    while not window.is_over:
        begun = time.perf_counter()
        await send()
        window.done(times, time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(run_load(PeerLoad, SESSIONS))

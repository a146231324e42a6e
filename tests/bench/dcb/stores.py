"""The event stores that are compared: how each is started, and the same three questions to each.

Waltz is asked in two ways: by the asyncio client, and by the recorder of the library `eventsourcing` in threads, which is
how the recorder of the library for PostgreSQL is asked. The client of umadb blocks as well.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tests.bench.peers import postgres, waltz
from tests.bench.peers.process import HOST, Process
from tests.bench.peers.system import LANES, Facts, System, find_program, missing_of
from waltzd.client.blocking import BlockingClient
from waltzd.client.client import Client
from waltzd.dcb import ALL, AppendCondition, Event, EventStore, Query, QueryItem
from waltzd.errors import AppendConditionFailed

if TYPE_CHECKING:
    import umadb
    from eventsourcing.dcb.api import DCBRecorder

TYPE = "Joined"
LIBRARY = "eventsourcing"


# -- servers


class Waltz(waltz.Waltz):
    @property
    def facts(self) -> Facts:
        return replace(super().facts, caveat="one partition; the asyncio client, all clients in one loop")


class WaltzRecorder(waltz.Waltz):
    name = "waltz-recorder"
    package = f"pip install {LIBRARY}"

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or missing_of([], [LIBRARY])

    @property
    def facts(self) -> Facts:
        return replace(super().facts, caveat=f"one partition; the recorder of `{LIBRARY}`, a thread for each client")


class Umadb(System):
    name = "umadb"
    package = "pip install umadb"

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(["umadb"], ["umadb"])

    def start(self) -> None:
        self._port = next(self.ports)
        command = [find_program("umadb"), "--listen", f"{HOST}:{self._port}", "--db-path", self.home / "events"]
        self.run(Process("umadb", command, self.home, port=self._port)).wait_listening()

    @property
    def address(self) -> tuple[str, ...]:
        return (f"http://{HOST}:{self._port}",)

    @property
    def facts(self) -> Facts:
        return Facts(
            version=importlib.metadata.version("umadb"),
            durability="synchronous mode, one copy: what is lost with its disk is lost",
            caveat="one process without fail-over; its client blocks, a thread for each client",
        )


class Postgres(postgres.Postgres):
    """One synchronous standby."""

    package = f"apt-get install postgresql; pip install {LIBRARY} 'psycopg[binary,pool]'"

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or missing_of([], [LIBRARY, "psycopg_pool"])

    @property
    def address(self) -> tuple[str, ...]:
        return (str(self.port),)

    @property
    def facts(self) -> Facts:
        return replace(super().facts, caveat=f"the recorder of `{LIBRARY}`, a thread and a connection for each client")


class LonePostgres(Postgres):
    """No standby."""

    name = "postgres-alone"
    wants_standby = False


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Waltz, WaltzRecorder, Umadb, LonePostgres, Postgres)}


# -- clients


@dataclass(frozen=True)
class Found:
    events: Sequence[bytes]
    head: int | None
    """Position up to which the read is complete, to give back; None if the store is empty."""


class Store(ABC):
    """Client of an event store. Its methods `read`, `append` and `append_after` return a result, or an awaitable of one."""

    is_blocking: ClassVar[bool] = True

    def __init__(self, address: tuple[str, ...]) -> None:
        self._address = address

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    def read(self, boundary: str | None, after: int | None = None) -> Any:
        """Return a `Found` with the events of a boundary, or with all events, above a position."""

    @abstractmethod
    def append(self, boundary: str, event: bytes) -> Any:
        """Append an event without a condition."""

    @abstractmethod
    def append_after(self, boundary: str, event: bytes, head: int | None) -> Any:
        """Append an event if the boundary has none above `head`; return whether it was appended."""

    @abstractmethod
    async def close(self) -> None: ...


class WaltzStore(Store):
    is_blocking = False

    async def open(self) -> None:
        self._client = Client(self._address[0])
        await self._client.open()
        self._store = EventStore(self._client, partition=0)

    async def read(self, boundary: str | None, after: int | None = None) -> Found:
        found = await self._store.read(ALL if boundary is None else _query(boundary), after=after)
        return Found([one.event.data for one in found.events], found.head)

    async def append(self, boundary: str, event: bytes) -> None:
        await self._store.append([Event(TYPE, event, [boundary])])

    async def append_after(self, boundary: str, event: bytes, head: int | None) -> bool:
        try:
            await self._store.append([Event(TYPE, event, [boundary])], AppendCondition(_query(boundary), head))
        except AppendConditionFailed:
            return False
        return True

    async def close(self) -> None:
        await self._client.close()


def _query(boundary: str) -> Query:
    return Query([QueryItem([TYPE], [boundary])])


class RecorderStore(Store):
    """Client by a recorder of the library `eventsourcing`."""

    _recorder: DCBRecorder

    def read(self, boundary: str | None, after: int | None = None) -> Found:
        found = self._recorder.read(_library_query(boundary), after=after)
        events = [bytes(one.event.data) for one in found]
        return Found(events, found.head)

    def append(self, boundary: str, event: bytes) -> None:
        from eventsourcing.dcb.api import DCBEvent

        self._recorder.append([DCBEvent(TYPE, event, [boundary])])

    def append_after(self, boundary: str, event: bytes, head: int | None) -> bool:
        from eventsourcing.dcb.api import DCBAppendCondition, DCBEvent
        from eventsourcing.persistence import IntegrityError

        condition = DCBAppendCondition(_library_query(boundary), head)
        try:
            self._recorder.append([DCBEvent(TYPE, event, [boundary])], condition)
        except IntegrityError:
            return False
        return True


def _library_query(boundary: str | None) -> Any:
    from eventsourcing.dcb.api import DCBQuery, DCBQueryItem

    return DCBQuery([] if boundary is None else [DCBQueryItem([TYPE], [boundary])])


class WaltzRecorderStore(RecorderStore):
    async def open(self) -> None:
        from waltzd.eventsourcing import WaltzDcbRecorder

        self._client = BlockingClient(self._address[0])
        self._client.open()
        self._recorder = WaltzDcbRecorder(self._client, "dcb", partition=0)

    async def close(self) -> None:
        self._client.close()


class PostgresStore(RecorderStore):
    async def open(self) -> None:
        from eventsourcing.dcb.postgres_tt import PostgresDCBRecorderTT
        from eventsourcing.postgres import PostgresDatastore

        (port,) = self._address
        self._datastore = PostgresDatastore("postgres", HOST, port, postgres.USER, "", pool_size=LANES)
        recorder = PostgresDCBRecorderTT(self._datastore)
        recorder.create_table()
        self._recorder = recorder

    async def close(self) -> None:
        self._datastore.close()


class UmadbStore(Store):
    async def open(self) -> None:
        import umadb

        self._client = umadb.Client(self._address[0])

    def read(self, boundary: str | None, after: int | None = None) -> Found:
        query = None if boundary is None else _umadb_query(boundary)
        start = None if after is None else after + 1
        found, head = self._client.read(query, start=start).collect_with_head()
        return Found([bytes(one.event.data) for one in found], head)

    def append(self, boundary: str, event: bytes) -> None:
        import umadb

        self._client.append([umadb.Event(TYPE, event, [boundary])])

    def append_after(self, boundary: str, event: bytes, head: int | None) -> bool:
        import umadb

        condition = umadb.AppendCondition(_umadb_query(boundary), after=head)
        try:
            self._client.append([umadb.Event(TYPE, event, [boundary])], condition)
        except umadb.IntegrityError:
            return False
        return True

    async def close(self) -> None:
        self._client.close()


def _umadb_query(boundary: str) -> umadb.Query:
    import umadb

    return umadb.Query([umadb.QueryItem([TYPE], [boundary])])


STORES: dict[str, Callable[[tuple[str, ...]], Store]] = {
    Waltz.name: WaltzStore,
    WaltzRecorder.name: WaltzRecorderStore,
    Umadb.name: UmadbStore,
    Postgres.name: PostgresStore,
    LonePostgres.name: PostgresStore,
}

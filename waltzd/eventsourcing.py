"""Persistence module for the Python library `eventsourcing`, found by `PERSISTENCE_MODULE=waltzd.eventsourcing`: 9.5, and
the pre-release 10.0.0a7.

Every recorder is an `EventStore` of `waltzd.dcb` with a name of its own: aggregate events, snapshots and tracking ids are
events with tags. An event of an aggregate has two tags, one for the aggregate and one for its version. That no event has
the tag of a version yet is the condition of its append, so of two programs that write one version, one gets an
`IntegrityError`. A tracking id is a tag of the events that were recorded with it, or an event of its own; both are one
atomic append. Notification ids are positions of the store: they rise, and have gaps if others share the partition.

In version 10 an event has a UUID and metadata, too. They stand in front of its data, behind `_MARK`. Both versions write
and read one store, and 9.5 does not show them. The id of an aggregate is a text in version 10; one that looks like a UUID
names the aggregate that 9.5 knows by this UUID.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from eventsourcing.dcb import api
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    InfrastructureFactory,
    InfrastructureFactoryError,
    IntegrityError,
    ListenNotifySubscription,
    Notification,
    ProcessRecorder,
    ProgrammingError,
    StoredEvent,
    Tracking,
    TrackingRecorder,
)
from eventsourcing.utils import Environment, EnvType, resolve_topic

from waltzd.client.blocking import BlockingClient
from waltzd.client.settings import Tls
from waltzd.dcb import (
    ALL,
    AppendCondition,
    BlockingEventStore,
    Event,
    Query,
    QueryItem,
    ReadResult,
    SequencedEvent,
    _id_before,
)
from waltzd.errors import AppendConditionFailed, BadArgument, TooLarge, WaltzError
from waltzd.protocol.positions import Position

IS_10 = hasattr(api, "DcbEvent")
"""Whether the installed library has version 10, which names some classes in another way."""
if TYPE_CHECKING or not IS_10:
    from eventsourcing.dcb.api import (
        DCBAppendCondition,
        DCBEvent,
        DCBQuery,
        DCBReadResponse,
        DCBRecorder,
        DCBSequencedEvent,
    )
    from eventsourcing.dcb.persistence import DCBInfrastructureFactory, DCBListenNotifySubscription
    from eventsourcing.persistence import OperationalError
else:
    from eventsourcing.dcb.api import DcbAppendCondition as DCBAppendCondition
    from eventsourcing.dcb.api import DcbEvent as DCBEvent
    from eventsourcing.dcb.api import DcbQuery as DCBQuery
    from eventsourcing.dcb.api import DcbReadResponse as DCBReadResponse
    from eventsourcing.dcb.api import DcbRecorder as DCBRecorder
    from eventsourcing.dcb.api import DcbSequencedEvent as DCBSequencedEvent
    from eventsourcing.dcb.persistence import DcbInfrastructureFactory as DCBInfrastructureFactory
    from eventsourcing.dcb.persistence import DcbListenNotifySubscription as DCBListenNotifySubscription
    from eventsourcing.errors import OperationalError

__all__ = [
    "WaltzAggregateRecorder",
    "WaltzApplicationRecorder",
    "WaltzDcbRecorder",
    "WaltzFactory",
    "WaltzProcessRecorder",
    "WaltzTrackingRecorder",
]

TRACKING = "waltzd:tracking"
"""Type of an event that has only a tracking id."""
_TRACKED = "tracking"
_MARK = b"\0waltz:es10\0"
"""Start of data behind a UUID and metadata."""
_FRONT = struct.Struct(f">{len(_MARK)}s16sI")


@contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of Waltz as errors of the library."""
    try:
        yield
    except AppendConditionFailed as error:
        raise IntegrityError(error.message) from error
    except (BadArgument, TooLarge) as error:
        raise ProgrammingError(error.message) from error
    except WaltzError as error:
        raise OperationalError(f"{error.code} {error.message}") from error


def _wrapped(data: bytes, given: Any) -> bytes:
    """Return the data to store for an event of the library, behind its UUID and metadata if it has any."""
    uuid, metadata = (given.uuid, given.metadata) if IS_10 else (UUID(int=0), {})
    if not uuid.int and not metadata and not data.startswith(_MARK):
        return data
    text = json.dumps(metadata, separators=(",", ":")).encode() if metadata else b""
    return _FRONT.pack(_MARK, uuid.bytes, len(text)) + text + data


def _unwrapped(stored: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the data of an event, and the fields that only version 10 has."""
    uuid, text, data = bytes(16), b"", stored
    if stored.startswith(_MARK):
        _, uuid, size = _FRONT.unpack_from(stored)
        text, data = stored[_FRONT.size : _FRONT.size + size], stored[_FRONT.size + size :]
    return data, {"uuid": UUID(bytes=uuid), "metadata": json.loads(text) if text else {}} if IS_10 else {}


class _Recorder:
    """Recorder in an event store."""

    def __init__(self, client: BlockingClient, name: str, partition: int | None = None) -> None:
        """Create a recorder.

        Args:
            client: Client of the partition.
            name: Name of the event store; recorders of one name have the same events.
            partition: Partition of the store; that of the key `name` if it is not given.
        """
        self._client = client
        self._store = BlockingEventStore(client, partition=partition, name=name)

    def _read(self, query: Query = ALL, *, after: int | None = None, **options: Any) -> ReadResult:
        """Read events above a position. The library keeps positions as plain integers: those are of the current log."""
        with _translated():
            return self._store._read(query, _id_before(after), **options)

    def _watch(self, subscription: ListenNotifySubscription[Any] | DCBListenNotifySubscription[Any]) -> Future[None]:
        """Notify a subscription of each new event, until the future is cancelled. An error ends the subscription."""
        store, signal = self._store._inner, subscription._has_been_notified

        async def watch() -> None:
            try:
                head = (await store.read(newest_first=True, limit=1)).head
                signal.set()
                async with aclosing(store.subscribe(after=head)) as events:
                    async for _ in events:
                        signal.set()
            finally:
                signal.set()

        def ended(watching: Future[None]) -> None:
            if not watching.cancelled() and (error := watching.exception()) is not None:
                subscription._thread_error = subscription._thread_error or error
                subscription.stop()

        watching = asyncio.run_coroutine_threadsafe(watch(), self._client._thread.loop)
        watching.add_done_callback(ended)
        return watching


# -- aggregates ------------------------------------------------------------------------------------------------------------


def _stream(originator_id: UUID | str) -> str:
    """Return the tag of all events of an aggregate."""
    is_uuid = isinstance(originator_id, UUID) or (IS_10 and _is_uuid(originator_id))
    return f"uuid:{originator_id}" if is_uuid else f"text:{originator_id}"


def _is_uuid(text: str) -> bool:
    """Return whether a text is what a UUID is written as."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


def _version(originator_id: UUID | str, version: int) -> str:
    """Return the tag of one version of an aggregate."""
    return f"version:{version}:{_stream(originator_id)}"


def _version_of(stored: StoredEvent) -> str:
    return _version(stored.originator_id, stored.originator_version)


def _place(event: Event) -> tuple[UUID | str, int]:
    """Return originator id and version of an event."""
    kind, _, text = event.tags[0].partition(":")
    return UUID(text) if kind == "uuid" and not IS_10 else text, int(event.tags[1].split(":", 2)[1])


def _fields(event: Event) -> dict[str, Any]:
    originator_id, version = _place(event)
    data, more = _unwrapped(event.data)
    return {"originator_id": originator_id, "originator_version": version, "topic": event.type, "state": data, **more}


def _events_of(stored_events: Sequence[StoredEvent], tags: Sequence[str] = ()) -> list[Event]:
    return [
        Event(one.topic, _wrapped(bytes(one.state), one), [_stream(one.originator_id), _version_of(one), *tags])
        for one in stored_events
    ]


def _versions_of(stored_events: Sequence[StoredEvent]) -> list[QueryItem]:
    """Return items that match events of the same versions. Refuse a version that is given twice."""
    tags = [_version_of(one) for one in stored_events]
    if len(set(tags)) < len(tags):
        raise IntegrityError(f"the events have a version twice: {', '.join(tags)}")
    return [QueryItem(tags=[tag]) for tag in tags]


class WaltzAggregateRecorder(_Recorder, AggregateRecorder):
    """Recorder of the events of aggregates, or of their snapshots."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Append events if the store has none of their versions; return None.

        Raises:
            IntegrityError: The store has an event of the same aggregate and version. Nothing was appended.
            OperationalError: The partition did not answer, or the outcome is not known.
        """
        self._insert(stored_events)
        return None

    def _insert(self, stored_events: Sequence[StoredEvent]) -> Sequence[int]:
        if not stored_events:
            return []
        condition = AppendCondition(Query(_versions_of(stored_events)))
        with _translated():
            last = self._store.append(_events_of(stored_events), condition)
        return range(last - len(stored_events) + 1, last + 1)

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """Return the events of an aggregate with versions above `gt` and up to `lte`, in the order of versions. What was
        recorded before version `gt`, which a snapshot has, is not read."""
        query, after = Query([QueryItem(tags=[_stream(originator_id)])]), None
        if gt is not None:
            known = self._read(Query([QueryItem(tags=[_version(originator_id, gt)])]), limit=1).events
            after = known[0].position if known else None
        is_cut = limit is not None and limit > 0 and (gt is None or after is not None) and lte is None
        found = self._read(query, after=after, limit=limit if is_cut else None, newest_first=desc).events
        stored = [StoredEvent(**_fields(one.event)) for one in found]
        return [
            one
            for one in stored
            if (gt is None or one.originator_version > gt) and (lte is None or one.originator_version <= lte)
        ][:limit]


class WaltzApplicationRecorder(WaltzAggregateRecorder, ApplicationRecorder):
    """Recorder of the events of an application, in the order in which they were recorded."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Append events as `WaltzAggregateRecorder` does; return their notification ids."""
        return list(self._insert(stored_events))

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        """Return at most `limit` events with notification ids from `start` on, or above it, and up to `stop`."""
        query = Query([QueryItem(types=topics)]) if topics else ALL
        after: int | None = start
        if start and inclusive_of_start:
            after = Position(start - 1, start.timeline) if isinstance(start, Position) else start - 1
        found: list[Notification] = []
        while len(found) < limit and (stop is None or (after or 0) < stop):
            wanted = limit - len(found)
            events = self._read(query, after=after, limit=wanted).events
            found += [_notification(one) for one in events if one.event.type != TRACKING]
            if len(events) < wanted:
                break
            after = events[-1].position
        return [one for one in found if stop is None or one.id <= stop]

    def max_notification_id(self) -> int | None:
        """Return the notification id of the last event; None if there is none."""
        found = self._read(newest_first=True, limit=1).events
        return found[0].position if found else None

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> WaltzSubscription:
        """Iterate over the events with notification ids above `gt`, and then over each new one."""
        return WaltzSubscription(self, gt=gt, topics=topics)


def _notification(one: SequencedEvent) -> Notification:
    return Notification(**_fields(one.event), id=one.position)


class WaltzSubscription(ListenNotifySubscription[WaltzApplicationRecorder]):
    """Subscription to the events of an application."""

    def __init__(self, recorder: WaltzApplicationRecorder, gt: int | None = None, topics: Sequence[str] = ()) -> None:
        super().__init__(recorder=recorder, gt=gt, topics=topics)
        self._watching = recorder._watch(self)

    def stop(self) -> None:
        """Stop the subscription."""
        super().stop()
        self._watching.cancel()


# -- tracking --------------------------------------------------------------------------------------------------------------


def _tracked(application_name: str) -> str:
    """Return the tag of all tracking ids of an application."""
    return f"{_TRACKED}:{application_name}"


def _followed(tracking: Any) -> str:
    """Return the name of the application whose events were processed."""
    name: str = tracking.context_name if IS_10 else tracking.application_name
    return name


def _tags_of(tracking: Tracking) -> list[str]:
    return [_tracked(_followed(tracking)), f"{_TRACKED}-id:{tracking.notification_id}"]


class WaltzTrackingRecorder(_Recorder, TrackingRecorder):
    """Recorder of how far a program has processed the events of other applications."""

    def insert_tracking(self, tracking: Tracking) -> None:
        """Record a tracking id.

        Raises:
            IntegrityError: An id that is not lower was recorded.
            OperationalError: The partition did not answer, or the outcome is not known.
        """
        self._insert_tracked([], tracking)

    def _insert_tracked(self, stored_events: Sequence[StoredEvent], tracking: Tracking) -> int:
        """Append events together with a tracking id; return the position of the last of them."""
        items, name = _versions_of(stored_events), _followed(tracking)
        while True:
            recorded, head = self._newest(name)
            if recorded is not None and recorded >= tracking.notification_id:
                raise IntegrityError(f"tracking id {tracking.notification_id} of {name} is not above {recorded}")
            if items and self._read(Query(items), limit=1).events:
                raise IntegrityError("the store has an event of one of these versions")
            tags = _tags_of(tracking)
            events = _events_of(stored_events, tags) or [Event(TRACKING, tags=tags)]
            item = QueryItem(tags=[_tracked(name)])
            try:
                with _translated():
                    return self._store.append(events, AppendCondition(Query([*items, item]), after=head))
            except IntegrityError:
                continue  # another program was faster: look which id it has recorded

    def _newest(self, application_name: str) -> tuple[int | None, int]:
        """Return the highest tracking id, and the position up to which that is known."""
        query = Query([QueryItem(tags=[_tracked(application_name)])])
        found = self._read(query, newest_first=True, limit=1)
        if not found.events:
            return None, found.head
        tags = found.events[0].event.tags
        return int(tags[tags.index(_tracked(application_name)) + 1].partition(":")[2]), found.head

    def max_tracking_id(self, application_name: str) -> int | None:
        """Return the highest tracking id of an application; None if there is none."""
        return self._newest(application_name)[0]


class WaltzProcessRecorder(WaltzTrackingRecorder, WaltzApplicationRecorder, ProcessRecorder):
    """Recorder of the events of an application that processes those of other applications: each event and the tracking id
    of its cause are recorded together, exactly once."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Append events, together with the tracking id of the argument `tracking`; return their notification ids.

        Raises:
            IntegrityError: The store has an event of the same aggregate and version, or a tracking id that is not lower.
                Nothing was appended.
            OperationalError: The partition did not answer, or the outcome is not known.
        """
        tracking: Tracking | None = kwargs.get("tracking")
        if tracking is None:
            return super().insert_events(stored_events, **kwargs)
        last = self._insert_tracked(stored_events, tracking)
        return list(range(last - len(stored_events) + 1, last + 1))


# -- dynamic consistency boundaries ----------------------------------------------------------------------------------------


class _ReadResponse(DCBReadResponse):
    def __init__(self, events: Sequence[SequencedEvent], head: int | None) -> None:
        self._head = head
        self._events = iter([_sequenced(one) for one in events])

    @property
    def head(self) -> int | None:
        return self._head

    def __next__(self) -> DCBSequencedEvent:
        return next(self._events)


def _sequenced(one: SequencedEvent) -> DCBSequencedEvent:
    data, more = _unwrapped(one.event.data)
    return DCBSequencedEvent(DCBEvent(type=one.event.type, data=data, tags=list(one.event.tags), **more), one.position)


def _query(query: DCBQuery | None) -> Query:
    return Query([QueryItem(item.types, item.tags) for item in query.items]) if query is not None else ALL


class WaltzDcbRecorder(_Recorder, DCBRecorder):
    """Recorder of events with types and tags."""

    def head(self) -> int | None:
        """Return the position of the last event; None if there is none."""
        found = self._read(newest_first=True, limit=1).events
        return found[0].position if found else None

    def read(self, query: DCBQuery | None = None, *, after: int | None = None, limit: int | None = None) -> DCBReadResponse:
        """Return the events that match a query; see `EventStore.read`."""
        if limit is not None and limit < 1:
            return _ReadResponse([], None)
        with _translated():
            found = self._read(_query(query), after=after, limit=limit)
        head = found.head or None
        if limit is not None:
            head = found.events[-1].position if found.events else None
        return _ReadResponse(found.events, head)

    def append(self, events: Sequence[DCBEvent], condition: DCBAppendCondition | None = None) -> int:
        """Append events atomically, unless the condition fails; see `EventStore.append`."""
        if not events:
            raise ProgrammingError("an append needs at least one event")
        with _translated():
            given = [Event(one.type, _wrapped(one.data, one), one.tags) for one in events]
            checked = None
            if condition is not None:
                checked = AppendCondition(_query(condition.fail_if_events_match), condition.after)
            return self._store.append(given, checked)

    def subscribe(self, query: DCBQuery | None = None, *, after: int | None = None) -> WaltzDcbSubscription:
        """Iterate over the events that match a query, and then over each new one."""
        return WaltzDcbSubscription(self, query, after)


class WaltzDcbSubscription(DCBListenNotifySubscription[WaltzDcbRecorder]):
    """Subscription to the events of a query."""

    def __init__(self, recorder: WaltzDcbRecorder, query: DCBQuery | None = None, after: int | None = None) -> None:
        super().__init__(recorder=recorder, query=query, after=after)
        self._watching = recorder._watch(self)

    def stop(self) -> None:
        """Stop the subscription."""
        super().stop()
        self._watching.cancel()


# -- the factory -----------------------------------------------------------------------------------------------------------


class WaltzFactory(InfrastructureFactory[TrackingRecorder], DCBInfrastructureFactory[TrackingRecorder]):
    """Factory of the recorders of an application.

    It reads from the environment: `WALTZ_SERVERS` (`host:port,host:port`); `WALTZ_PARTITION`, the partition of all events,
    which the name of the application chooses if it is not set; `WALTZ_TLS_CERTIFICATE`, `WALTZ_TLS_KEY` and
    `WALTZ_TLS_CA` for a cluster with TLS.
    """

    WALTZ_SERVERS = "WALTZ_SERVERS"
    """Name of the variable with addresses of servers."""
    WALTZ_PARTITION = "WALTZ_PARTITION"
    """Name of the variable with the number of the partition."""
    WALTZ_TLS = ("WALTZ_TLS_CERTIFICATE", "WALTZ_TLS_KEY", "WALTZ_TLS_CA")
    """Names of the variables with the files for TLS."""

    def __init__(self, env: Environment | EnvType | None) -> None:
        """Connect to the cluster.

        Raises:
            InfrastructureFactoryError: A variable is missing or wrong.
            OperationalError: No server answered in time.
        """
        super().__init__(env)
        servers, partition = self.env.get(self.WALTZ_SERVERS), self.env.get(self.WALTZ_PARTITION)
        if not servers:
            raise InfrastructureFactoryError(f"{self.WALTZ_SERVERS} is not set: give it as host:port,host:port")
        if partition and not partition.isdecimal():
            raise InfrastructureFactoryError(f"{self.WALTZ_PARTITION} must be a number, not {partition!r}")
        files = [self.env.get(name) or "" for name in self.WALTZ_TLS]
        if any(files) and not all(files):
            raise InfrastructureFactoryError(f"give all of {', '.join(self.WALTZ_TLS)}, or none")
        self._partition = int(partition) if partition else None
        with _translated():
            self._client: BlockingClient = BlockingClient(
                servers,
                partitions="all" if self._partition is None else [self._partition],
                tls=Tls(certificate=files[0], key=files[1], ca=files[2]) if all(files) else None,
            )
            self._client.open()

    def _name(self, purpose: str) -> str:
        """Return the name of an event store of the application."""
        name = self.env.name or "eventsourcing"
        return name if purpose == "events" else f"{name}.{purpose}"

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """Return a recorder of events of aggregates, or of what `purpose` names, such as snapshots."""
        return WaltzAggregateRecorder(self._client, self._name(purpose), self._partition)

    def application_recorder(self) -> ApplicationRecorder:
        """Return a recorder of the events of the application."""
        return WaltzApplicationRecorder(self._client, self._name("events"), self._partition)

    def tracking_recorder(self, tracking_recorder_class: type[TrackingRecorder] | None = None) -> TrackingRecorder:
        """Return a recorder of tracking ids, of a subclass of `WaltzTrackingRecorder` if one is given or configured."""
        topic = self.env.get(self.TRACKING_RECORDER_TOPIC)
        found: Any = tracking_recorder_class
        if found is None:
            found = resolve_topic(topic) if topic else WaltzTrackingRecorder
        if found is None or not issubclass(found, WaltzTrackingRecorder):
            raise InfrastructureFactoryError(f"{found} is no subclass of WaltzTrackingRecorder")
        recorder_class: type[WaltzTrackingRecorder] = found
        return recorder_class(self._client, self._name("tracking"), self._partition)

    def process_recorder(self) -> ProcessRecorder:
        """Return a recorder of events together with tracking ids."""
        return WaltzProcessRecorder(self._client, self._name("events"), self._partition)

    def dcb_recorder(self) -> DCBRecorder:
        """Return a recorder of events with types and tags."""
        return WaltzDcbRecorder(self._client, self._name("dcb"), self._partition)

    def close(self) -> None:
        """Close the connections. An application that is garbage closes its factory, on any thread: that of the event
        loop does not wait."""
        thread = self._client._thread
        if threading.current_thread() is thread.thread:
            asyncio.run_coroutine_threadsafe(self._client._inner.close(), thread.loop)
        else:
            self._client.close()

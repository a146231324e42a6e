"""Event store with dynamic consistency boundaries (dcb.events): events have a type and tags, a decision reads the events of
a query, and an append fails if events that the decision has not seen match a query.

A store is one partition, where locks hold. The position of an event is its id + 1. An event marks locks by which it is
found: one for each pair of its type or any type, and one of its tags or no tag.

    event Joined {course:7, student:3}  marks  Joined·course:7  Joined·student:3  Joined·
                                               any·course:7     any·student:3     any·

An event that matches an item of a query has marked, for one type of the item, the locks with each of its tags. So a read
asks the owner for the transactions that marked all locks of such a group, and decodes what it gets: the type and all tags
are compared exactly. A condition is READ locks against the position that the decision has seen. A lock is only necessary
for a match, not sufficient: it is coarser than an item with several tags, other names may have the same 48 bits, and an
owner refuses what its lock table has forgotten. So a refusal is looked into: what was appended above the position is read.
If an event matches, the condition has failed. If none does, the position rises to the end of what was examined, never
further, and the append is tried again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any

from waltzd.client.blocking import BlockingClient, _batches, blocking, declared_by
from waltzd.client.client import Client
from waltzd.client.routes import pause_seconds
from waltzd.client.submits import deadline_of
from waltzd.client.view import POSITION_MAX
from waltzd.errors import AppendConditionFailed, BadArgument, CannotConnect, NotSent, OutcomeUnknown
from waltzd.protocol.locks import (
    MARKED_LOCKS_MAX,
    AppendOutcome,
    Committed,
    Lock,
    Reason,
    Rejected,
    append_lock,
    lock_hash,
    read_lock,
    write_lock,
)
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY

__all__ = [
    "AppendCondition",
    "BlockingEventStore",
    "Event",
    "EventStore",
    "Query",
    "QueryItem",
    "ReadResult",
    "SequencedEvent",
]

NAME = "dcb"
TAGS_MAX = 100
"""Limit of the tags of an event: a transaction may have 1000 locks unless the servers are configured otherwise."""
CONDITION_LOCKS_MAX = 500
"""Limit of the READ locks of a condition. A condition that needs more is checked by one lock, which each event marks."""
PAGE_EVENTS = 500
"""Events that are fetched at once."""
HEADS_KEPT, HEAD_KEPT_BYTES = 4096, 256
"""How many decoded heads of payloads are kept, and the largest of them. The events of a boundary have equal ones."""
_MAGIC = b'{"dcb":1,'
"""Beginning of each payload. Other transactions of the partition are no events."""


@dataclass(frozen=True)
class Event:
    """Event of an application.

    Raises:
        BadArgument: The type is empty, a tag is no text, the data is not bytes, or there are more than 100 tags.

    Example:
        ```python
        Event("CourseDefined", b'{"capacity": 20}', ["course:7"])
        ```
    """

    type: str
    """Name of its type."""
    data: bytes = b""
    """Content, in a form of the application."""
    tags: Sequence[str] = ()
    """Things that the event concerns, such as `course:7`."""

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not self.type or not _is_sound(self.type):
            raise BadArgument(f"an event needs a type, which is a text, not {self.type!r:.100}")
        if not isinstance(self.data, bytes):
            raise BadArgument(f"the data of an event must be bytes, not {type(self.data).__name__}")
        object.__setattr__(self, "tags", _texts("tags", self.tags))
        if len(self.tags) > TAGS_MAX:
            raise BadArgument(f"an event may have {TAGS_MAX} tags; this {self.type} has {len(self.tags)}")


@dataclass(frozen=True)
class SequencedEvent:
    """Event with its position in the store."""

    event: Event
    """The event that was appended."""
    position: int
    """Position, from 1 on: higher for later events, with gaps if the partition has other transactions. It is a `Position`,
    with the timeline of the log."""


@dataclass(frozen=True)
class QueryItem:
    """Description of events: an event matches if it has one of the types, or the item has none, and all of the tags.

    Raises:
        BadArgument: A type or a tag is no text.
    """

    types: Sequence[str] = ()
    """Types of which the event has one; empty for any type."""
    tags: Sequence[str] = ()
    """Tags of which the event has all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", _texts("types", self.types))
        object.__setattr__(self, "tags", _texts("tags", self.tags))

    def matches(self, event: Event) -> bool:
        return (not self.types or event.type in self.types) and set(event.tags).issuperset(self.tags)


@dataclass(frozen=True)
class Query:
    """Query for the events that match at least one of its items; without items, for all events.

    Example:
        ```python
        Query([QueryItem(["Joined", "Left"], ["course:7"]), QueryItem(tags=["student:3"])])
        ```
    """

    items: Sequence[QueryItem] = ()
    """Items of which an event matches one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        if not all(isinstance(item, QueryItem) for item in self.items):
            raise BadArgument(f"a query has items of the class QueryItem, not {self.items!r:.100}")

    def matches(self, event: Event) -> bool:
        """Return whether an event matches one of the items."""
        return not self.items or any(item.matches(event) for item in self.items)


ALL = Query()


@dataclass(frozen=True)
class AppendCondition:
    """Condition of an append: no event after a position matches the query.

    Example:
        ```python
        found = await store.read(query)
        await store.append(decide(found.events), AppendCondition(query, after=found.head))
        ```
    """

    fail_if_events_match: Query = ALL
    """Query that no event may match."""
    after: int | None = None
    """Position that the decision has seen: events up to it are ignored. None: no event at all may match."""


@dataclass(frozen=True)
class ReadResult:
    """Events that match a query."""

    events: Sequence[SequencedEvent]
    """Events in the order of their positions."""
    head: int
    """Position up to which the read is complete, to give as `after`: that of the last event if `limit` cut the read, else
    that of the last transaction of the store; 0 if the store is empty. It is a `Position`, with the timeline of the log."""


def _texts(what: str, given: Iterable[str]) -> tuple[str, ...]:
    found = () if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not all(isinstance(one, str) and _is_sound(one) for one in found):
        raise BadArgument(f"{what} must be a sequence of texts, not {given!r:.100}")
    return found


def _is_sound(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)


def _encode(event: Event) -> bytes:
    """Return the payload of an event: one line of JSON with type and tags, then the data."""
    head = json.dumps({"type": event.type, "tags": list(event.tags)}, ensure_ascii=False, separators=(",", ":"))
    return _MAGIC + head[1:].encode() + b"\n" + event.data


def _decode(payload: bytes) -> Event | None:
    """Return the event of a payload; None if it is none of a store."""
    if not payload.startswith(_MAGIC):
        return None
    head, _, data = payload.partition(b"\n")
    found = _kept_head(head) if len(head) <= HEAD_KEPT_BYTES else _decode_head(head)
    if found is None:
        return None
    event = object.__new__(Event)  # its type and tags are those of `found`, which were checked
    event.__dict__.update(type=found.type, data=data, tags=found.tags)
    return event


def _decode_head(head: bytes) -> Event | None:
    """Return an event without data that has the type and the tags of a payload; None if they are none."""
    try:
        fields = json.loads(head)
        return Event(fields["type"], b"", fields["tags"])
    except (ValueError, KeyError, TypeError, BadArgument):  # another program wrote it
        return None


_kept_head = lru_cache(HEADS_KEPT)(_decode_head)


@lru_cache(1 << 14)
def _lock_id(type: str | None, tag: str | None) -> str:
    """Return the id of the lock of a type, or None for any type, and a tag, or None for no tag."""
    return json.dumps([type, tag], ensure_ascii=False)


def _marks(event: Event) -> list[str]:
    """Return the ids of the locks that an event marks."""
    return list(dict.fromkeys(_lock_id(type, tag) for type in (event.type, None) for tag in (*event.tags, None)))


def _candidates(query: Query) -> list[tuple[str, ...]]:
    """Return the ids of the locks that matching events have marked: of each entry all, so any one of them is enough."""
    items = query.items or (QueryItem(),)
    found = [tuple(_lock_id(type, tag) for tag in item.tags or (None,)) for item in items for type in item.types or (None,)]
    return list(dict.fromkeys(found))


class EventStore:
    """Event store in one partition of a cluster, for an asyncio client.

    Example:
        ```python
        async with Client(servers, partitions=[0]) as client:
            store = EventStore(client, partition=0)
            joined = Query([QueryItem(["Joined"], ["course:7"])])
            found = await store.read(joined)
            if len(found.events) < 20:
                event = Event("Joined", tags=["course:7", "student:3"])
                await store.append([event], AppendCondition(joined, after=found.head))
        ```
    """

    def __init__(self, client: Client[bytes], *, partition: int | None = None, name: str = NAME) -> None:
        """Create a store; nothing is sent.

        Args:
            client: Client of the partition, without a serializer.
            partition: Partition of the store; that of the key `name` if it is not given.
            name: Name of the locks of the store. Its part before the first dot is the namespace that a policy can name.
                A store must keep it, because events are found by it.

        Raises:
            BadArgument: The client has a serializer, or `name` is no name of locks.
        """
        if client._serializer is not None:
            raise BadArgument("an event store needs a client without a serializer: it writes bytes of its own")
        append_lock(name)
        self._client = client
        self._partition = partition
        self._name = name

    @property
    def partition(self) -> int:
        """Partition of the store."""
        return self._client.partition_of(self._name) if self._partition is None else self._partition

    # -- reading

    async def read(
        self,
        query: Query = ALL,
        *,
        after: int | None = None,
        limit: int | None = None,
        newest_first: bool = False,
        timeout: float | None = None,
    ) -> ReadResult:
        """Return the events that match a query. They include every event that was appended before the call.

        Args:
            query: Query that the events match; all events if it is not given.
            after: Position before the first event; the beginning if it is not given. A plain integer is a position of the
                first timeline of the log (`Position`).
            limit: Largest number of events; all if it is not given.
            newest_first: Whether to begin with the last event; `after` stays the lower bound.
            timeout: Seconds for each question to the owner; `submit_seconds` if it is not given.

        Raises:
            NeedsBatches: The partition has records of format 0, which have no locks.
            OtherTimeline: `after` is above the fork of its timeline: an operator ended the log below it.
            OnlyInArchive, ArchiveAway, Trimmed: Events are below the trim floor, and could not be read.
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: A position is wrong, there is no such partition, or the client is not open.
        """
        return await self._read(query, Position(_id_before(after)), limit, newest_first, timeout)

    async def _read(
        self, query: Query, after: int, limit: int | None = None, newest_first: bool = False, timeout: float | None = None
    ) -> ReadResult:
        """Read as `read` does, above the id `after`. A plain integer is an id of the current log."""
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise BadArgument(f"limit must be an integer of at least 1, not {limit!r}")
        found: list[SequencedEvent] = []
        end = Position(EMPTY)
        async with aclosing(self._pages(query, after, timeout, limit, newest_first)) as pages:
            async for events, end in pages:
                found += events
                if limit is not None and len(found) >= limit:
                    found = found[:limit]
                    return ReadResult(found, _position_of(end) if newest_first else found[-1].position)
        return ReadResult(found, _position_of(end))

    async def _pages(
        self, query: Query, after: int, timeout: float | None, limit: int | None = None, newest_first: bool = False,
        reach: int = EMPTY,
    ) -> AsyncGenerator[tuple[list[SequencedEvent], Position], None]:  # fmt: skip
        """Iterate over the matching events with ids above `after`, in pages; each comes with the end of the log, up to
        which the whole is complete. `limit`: how many events are wanted. `reach`: an id to wait for a moment until it is
        committed."""
        client, name = self._client, self._name
        client._check_reading(self.partition)
        groups = [tuple(lock_hash(name, one) for one in group) for group in _candidates(query)]
        if sum(map(len, groups)) > MARKED_LOCKS_MAX:
            groups = [(lock_hash(name, _lock_id(None, None)),)]
        pages = client._reader.marked(
            self.partition,
            groups,
            after=after,
            limit=min(PAGE_EVENTS, limit or PAGE_EVENTS),
            newest_first=newest_first,
            reach=reach,
            since=after if isinstance(after, Position) and after != EMPTY else None,
            timeout=timeout,
        )
        async with aclosing(pages):
            async for transactions, end in pages:
                found = [(id_, _decode(payload)) for id_, payload in transactions]
                yield (
                    [
                        SequencedEvent(event, Position(id_ + 1, end.timeline))
                        for id_, event in found
                        if event is not None and query.matches(event)
                    ],
                    end,
                )

    # -- appending

    async def append(
        self, events: Sequence[Event], condition: AppendCondition | None = None, *, timeout: float | None = None
    ) -> int:
        """Append events atomically: all of them, in a row, or none.

        Args:
            events: One event or more.
            condition: Condition under which they are appended; without one they are always appended.
            timeout: Seconds for the call; `submit_seconds` if it is not given.

        Returns:
            Position of the last of the events.

        Raises:
            AppendConditionFailed: An event matches the query of the condition. Nothing was appended.
            OutcomeUnknown: The events were sent, and it is not known whether they are in the log.
            NotSent: The partition took nothing in time, or other appends were faster until the time was over. Nothing was
                appended.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The events are above the limits of the servers. Nothing was sent.
            OtherTimeline: `after` is above the fork of its timeline: an operator ended the log below it. Decide anew.
            BadArgument: There is no event, or `after` is above the end of the log.
            NotMounted, ClientClosed: The partition is not a partition of the client, or the client is not open.
        """
        events = tuple(events)
        if not events:
            raise BadArgument("an append needs at least one event")
        deadline = deadline_of(self._client.settings.submit_seconds if timeout is None else timeout)
        assert deadline is not None
        clock = asyncio.get_running_loop().time
        payloads, marks = [_encode(event) for event in events], [_marks(event) for event in events]
        if condition is None:
            return self._position(await self._send(payloads, marks, [], None, deadline - clock()))
        query, candidates = condition.fail_if_events_match, _candidates(condition.fail_if_events_match)
        position: int = _id_before(condition.after)
        for attempt in count():
            locks = [one[attempt % len(one)] for one in candidates]
            if len(locks) > CONDITION_LOCKS_MAX:
                locks = [_lock_id(None, None)]
            outcome = await self._send(payloads, marks, locks, position, deadline - clock())
            if not isinstance(outcome, Rejected):
                return self._position(outcome)
            before = position
            if outcome.reason is not Reason.NOT_IN_LOG:
                try:
                    position = await self._examined(query, position, outcome.conflict_id, deadline - clock())
                except CannotConnect as error:
                    raise self._overtaken(attempt) from error
            has_progressed = position > before or attempt == 0
            pause = 0.0 if has_progressed else pause_seconds(attempt, self.partition, self._client.client_id)
            if clock() + pause >= deadline:
                raise self._overtaken(attempt)
            await asyncio.sleep(pause)
        raise AssertionError("the loop does not end")

    async def _send(
        self, payloads: list[bytes], marks: list[list[str]], reads: list[str], position: int | None, seconds: float
    ) -> AppendOutcome:
        name, checked = self._name, dict.fromkeys(reads)
        own = dict.fromkeys(marks[0])
        first = [write_lock(name, one) if one in checked else append_lock(name, one) for one in own]
        first += [read_lock(name, one) for one in checked if one not in own]
        locks: list[list[Lock]] = [first, *([append_lock(name, one) for one in each] for each in marks[1:])]
        if seconds <= 0:
            raise NotSent("the time of the append was over before it was sent", partition=self.partition)
        if len(payloads) == 1:
            return await self._client.append(
                payloads[0], partition=self.partition, locks=locks[0], position=position, timeout=seconds
            )
        return await self._client.append_atomic(
            payloads, partition=self.partition, locks=locks, position=position, timeout=seconds
        )

    def _overtaken(self, attempt: int) -> NotSent:
        why = f"other appends were faster than this one in {attempt + 1} attempts, and its time is over"
        return NotSent(why, partition=self.partition)

    async def _examined(self, query: Query, position: int, conflict_id: int, seconds: float) -> int:
        """Return the position up to which no event matches; raise `AppendConditionFailed` if one does. Only what is above
        `position` is read. It stays the same while the transaction that caused the refusal is not decided."""
        examined = position
        async with aclosing(self._pages(query, position, max(seconds, 0.001), reach=conflict_id)) as pages:
            async for events, end in pages:
                examined = max(position, end)
                for one in events:
                    raise AppendConditionFailed(
                        f"the event {one.event.type} at position {one.position} matches the condition",
                        position=one.position,
                    )
        return examined

    def _position(self, outcome: AppendOutcome) -> int:
        if isinstance(outcome, Committed):
            return outcome.ids[-1] + 1
        if isinstance(outcome, Rejected):
            raise NotSent("a fail-over came between, and the events are not in the log", partition=self.partition)
        raise OutcomeUnknown("the events were sent, and no outcome came in time", partition=self.partition)

    # -- following

    def subscribe(self, query: Query = ALL, *, after: int | None = None) -> AsyncGenerator[SequencedEvent, None]:
        """Iterate over the events that match a query, in order, and then over each new one, until the client is closed.

        Events that were appended before are found by the query; after them the log is followed, and each event of the
        partition is fed. Nothing is left out between the two.

        Args:
            query: Query that the events match; all events if it is not given.
            after: See `read`.

        Raises:
            See `read` and `Client.feed`: while iterating.

        Example:
            ```python
            async for one in store.subscribe(Query([QueryItem(["Joined"])]), after=projection.position):
                projection.apply(one.event, one.position)
            ```
        """
        return self._each(query, after)

    async def _each(self, query: Query, after: int | None) -> AsyncGenerator[SequencedEvent, None]:
        start = Position(_id_before(after))
        async with aclosing(self._pages(query, start, None)) as pages:
            async for events, end in pages:
                start = max(start, end)
                for event in events:
                    yield event
        async with aclosing(self._client.feed(self.partition, after=start)) as feed:
            async for transaction in feed:
                fed = _decode(transaction.payload)
                if fed is not None and query.matches(fed):
                    yield SequencedEvent(fed, _position_of(transaction.position))


def _id_before(after: int | None) -> int:
    """Return the id of a position, in the same timeline if the position has one."""
    if after is not None and (not isinstance(after, int) or isinstance(after, bool) or not 0 <= after <= POSITION_MAX):
        raise BadArgument(f"a position of an event store is an integer from 0 on, not {after!r}")
    return EMPTY if after is None else Position(after - 1, after.timeline) if isinstance(after, Position) else after - 1


def _position_of(id: Position) -> Position:
    """Return the position of an id, in the same timeline."""
    return Position(int(id) + 1, id.timeline)


class BlockingEventStore:
    """`EventStore` for a `BlockingClient`: the same calls, and each blocks until it has its result.

    Example:
        ```python
        with BlockingClient(servers, partitions=[0]) as client:
            store = BlockingEventStore(client, partition=0)
            store.append([Event("CourseDefined", tags=["course:7"])])
        ```
    """

    def __init__(self, client: BlockingClient[bytes], *, partition: int | None = None, name: str = NAME) -> None:
        """Create a store; the arguments are those of `EventStore`."""
        self._inner = EventStore(client._inner, partition=partition, name=name)
        self._thread = client._thread

    @property
    def partition(self) -> int:
        """Partition of the store."""
        return self._inner.partition

    read = blocking(EventStore.read)
    """Return the events that match a query; see `EventStore.read`."""
    _read = blocking(EventStore._read)
    append = blocking(EventStore.append)
    """Append events atomically; see `EventStore.append`."""

    @declared_by(EventStore.subscribe)
    def subscribe(self, query: Query = ALL, **options: Any) -> Generator[SequencedEvent, None, None]:
        return _batches(self._thread, partial(self._inner.subscribe, query, **options))

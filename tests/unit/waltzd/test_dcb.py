"""The event store beside a list and a loop: conditions hold exactly, among racers and whatever shares a lock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import decision_race
from tests.unit.waltzd.testing.test_cluster import with_cluster
from waltzd import dcb
from waltzd.dcb import AppendCondition, BlockingEventStore, Event, EventStore, Query, QueryItem, SequencedEvent
from waltzd.errors import (
    AppendConditionFailed,
    BadArgument,
    NeedsBatches,
    NotSent,
    OtherTimeline,
    OutcomeUnknown,
)
from waltzd.protocol.locks import Committed, MarkedPage, MarkedQuery, Reason, Rejected, append_lock
from waltzd.serializers import Json
from waltzd.testing import BlockingCluster, LocalCluster
from waltzd.testing.ports import ServerPort


class Twin:
    """A list and a loop."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, query: Query, after: int | None = None, limit: int | None = None) -> list[SequencedEvent]:
        found = [SequencedEvent(event, at + 1) for at, event in enumerate(self.events) if at + 1 > (after or 0)]
        return [one for one in found if self.does_match(query, one.event)][:limit]

    @staticmethod
    def does_match(query: Query, event: Event) -> bool:
        if not query.items:
            return True
        for item in query.items:
            if (not item.types or event.type in item.types) and all(tag in event.tags for tag in item.tags):
                return True
        return False

    def append(self, events: Sequence[Event], condition: AppendCondition | None) -> int | None:
        if condition is not None and self.read(condition.fail_if_events_match, condition.after):
            return None
        self.events += events
        return len(self.events)


names = st.sampled_from(["a", "b", "c"])
tags = st.lists(st.sampled_from(["x", "y", "z"]), max_size=3)
events = st.builds(Event, names, st.binary(max_size=3), tags)
queries = st.builds(Query, st.lists(st.builds(QueryItem, st.lists(names, max_size=2), tags), max_size=3))
afters = st.none() | st.integers(0, 20)
steps = st.lists(
    st.tuples(st.lists(events, min_size=1, max_size=3), st.none() | st.tuples(queries, afters))
    | st.tuples(queries, afters, st.none() | st.integers(1, 3)),
    max_size=12,
)


async def append(store: EventStore, given: Sequence[Event], condition: AppendCondition | None = None) -> int | None:
    try:
        return await store.append(given, condition)
    except AppendConditionFailed:
        return None


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps, page=st.sampled_from([1, 2, 1000]), bits=st.sampled_from([1, 48]))
def test_it_does_what_a_list_and_a_loop_do(steps: list[Any], page: int, bits: int) -> None:
    """Also with pages of one id, and when most locks are the same because their hashes collide."""
    twin = Twin()
    whole = dcb._lock_id

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            for one, *rest in steps:
                if isinstance(one, Query):
                    after, limit = rest
                    found = await store.read(one, after=after, limit=limit)
                    expected = twin.read(one, after, limit)
                    assert list(found.events) == expected
                    newest = await store.read(one, after=after, limit=limit, newest_first=True)
                    assert list(newest.events) == twin.read(one, after)[::-1][:limit]
                    assert newest.head == len(twin.events)
                    cut = limit is not None and len(expected) == limit
                    assert found.head == (expected[-1].position if cut else len(twin.events))
                else:
                    (condition,) = rest
                    if condition is not None and (condition[1] or 0) > len(twin.events):
                        condition = condition[0], len(twin.events)
                    checked = None if condition is None else AppendCondition(*condition)
                    assert await append(store, one, checked) == twin.append(one, checked)
            assert [one.event for one in (await store.read()).events] == twin.events

    def colliding(type: str | None, tag: str | None) -> str:
        return whole(type, tag) if bits == 48 else str(len(whole(type, tag)) % 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcb, "PAGE_EVENTS", page)
        patch.setattr(dcb, "_lock_id", colliding)
        with_cluster(story)


JOINED = Query([QueryItem(["Joined"], ["course:7"])])


def test_of_sixteen_racers_one_wins_while_owners_are_killed() -> None:
    tally = asyncio.run(decision_race.race(40, seed=7))
    assert tally.rounds == 40
    assert tally.kills >= 5
    assert not tally.faults


@pytest.mark.parametrize("seed", range(6))
def test_drawn_racers_keep_to_the_sentence_of_the_specification(seed: int) -> None:
    """Decisions over boundaries that overlap, by type, by tag, by both or by anything, race while connections break and
    owners are replaced. The sentence, on the final log: what was appended under a condition has no event between the
    position of the condition and itself that matches the query, and what was refused has one."""
    chance = random.Random(seed)
    names, marks = ["a", "b", "c"], ["x", "y", "z"]

    def some(among: list[str], most: int) -> list[str]:
        return chance.sample(among, chance.randrange(most + 1))

    async def story(cluster: LocalCluster) -> None:
        told: dict[bytes, tuple[AppendCondition, int | str | None]] = {}

        async def race(store: EventStore, name: bytes, size: int, condition: AppendCondition) -> None:
            mine = [Event(chance.choice(names), b"%b %d" % (name, at), some(marks, 2)) for at in range(size)]
            try:
                told[name] = condition, await append(store, mine, condition)
            except (NotSent, OutcomeUnknown) as error:
                told[name] = condition, error.code

        async with cluster.client() as one, cluster.client() as other:
            stores = [EventStore(client, partition=0) for client in (one, other)]
            for turn in range(5):
                head = (await stores[0].read(limit=None)).head or 0
                racers = []
                for number in range(12):
                    items = [QueryItem(some(names, 2), some(marks, 1)) for _ in range(chance.randrange(1, 3))]
                    after = chance.choice([None, head, head, max(0, head - 2)])
                    condition = AppendCondition(Query(items), after)
                    name = b"%d-%d" % (turn, number)
                    racers.append(race(stores[number % 2], name, chance.randrange(1, 3), condition))
                racing = asyncio.gather(*racers)
                await asyncio.sleep(0)
                fault = chance.randrange(3)
                if fault == 0:
                    await cluster.start_server(await cluster.kill_owner(0))
                elif fault == 1:
                    cluster.break_connections(0)
                await racing
            log = (await stores[0].read()).events
        places: dict[bytes, list[int]] = {}
        for event in log:
            places.setdefault(event.event.data.split()[0], []).append(event.position)
        for name, (condition, outcome) in told.items():
            mine = places.get(name, [])
            if isinstance(outcome, int):
                assert mine == list(range(outcome - len(mine) + 1, outcome + 1)), "it is there, in a row"
            before = mine[0] if mine else len(log) + 1
            against = [
                event.position
                for event in log
                if (condition.after or 0) < event.position < before
                and Twin.does_match(condition.fail_if_events_match, event.event)
            ]
            assert not (mine and against), f"{name!r} was appended at {mine}, in spite of {against}"
            assert outcome is not None or (against and not mine), f"{name!r} was refused without a reason"
        assert {type(outcome) for _, outcome in told.values()} >= {int, type(None)}, "some win and some lose"

    with_cluster(story)


def test_of_a_pair_with_write_skew_one_fails() -> None:
    """One decision is bounded by a type, the other one by a tag, and each appends what the other must not miss."""

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            for number in range(10):
                by_type, by_tag = Query([QueryItem([f"Closed {number}"])]), Query([QueryItem(tags=[f"course:{number}"])])
                found = await asyncio.gather(
                    append(store, [Event("Joined", tags=[f"course:{number}"])], AppendCondition(by_type)),
                    append(store, [Event(f"Closed {number}")], AppendCondition(by_tag)),
                )
                assert sum(position is not None for position in found) == 1

    with_cluster(story)


def test_a_refusal_is_looked_into_and_only_a_match_fails_the_condition() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            both = Query([QueryItem(tags=["course:7", "student:3"])])
            for student in (1, 2):
                await store.append([Event("Joined", tags=["course:7", f"student:{student}"])])
            await store.append([Event("Left", tags=["student:3"])])
            await client.append(b"no event", partition=0, locks=[append_lock("dcb", '["Joined", "course:7"]')])
            same = [append_lock("dcb", dcb._lock_id(None, tag)) for tag in ("course:7", "student:3")]
            await client.append(dcb._encode(Event("Paid", tags=["other names"])), partition=0, locks=same)
            joined = Event("Joined", tags=["course:7", "student:3"])
            assert await store.append([joined], AppendCondition(both)) == 6, "the locks were marked, and nothing matches"
            with pytest.raises(AppendConditionFailed, match="the event Joined at position 6 matches") as caught:
                await store.append([joined], AppendCondition(both))
            assert caught.value.number("position") == 6
            assert await store.append([joined], AppendCondition(both, after=6)) == 7

    with_cluster(story)


def test_a_transaction_that_only_begins_like_an_event_is_none() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            await store.append([Event("Joined")])
            for text in (b"", b"}\n", b'"type":7,"tags":[]}\n', b'"type":"Joined","tags":3}\n', b'"\xff":1}\n'):
                await client.append(b'{"dcb":1,' + text, partition=0, locks=[append_lock("dcb", "[null, null]")])
            assert [one.event for one in (await store.read()).events] == [Event("Joined")]

    with_cluster(story)


def test_a_position_rises_only_over_what_was_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a refusal is looked into, a matching event is appended behind the end of the answer."""
    right, asked = ServerPort.fetch_marked, list[MarkedQuery]()

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            await store.append([Event("Joined", tags=["course:7", "student:1"])])

            async def fetch_marked(self: ServerPort, partition: int, query: MarkedQuery, **options: Any) -> MarkedPage:
                asked.append(query)
                page = await right(self, partition, query, **options)
                if page.end == 0:
                    await store.append([Event("Joined", tags=["course:7", "student:3"])])
                return page

            monkeypatch.setattr(ServerPort, "fetch_marked", fetch_marked)
            query = Query([QueryItem(["Joined"], ["course:7", "student:3"])])
            assert await append(store, [Event("Joined", tags=["course:7", "student:3"])], AppendCondition(query)) is None
            assert [one.first_id for one in asked] == [0, 1], "only what is new is read"

    with_cluster(story)


def test_a_read_is_confirmed_by_a_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ServerPort.fetch_marked

    async def fetch_marked(self: ServerPort, partition: int, query: MarkedQuery, **options: Any) -> MarkedPage:
        """Answer as an owner that was replaced before the last two events, unless a majority is asked."""
        query = query if options["confirmed"] else replace(query, last_id=0)
        return await right(self, partition, query, **options)

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            for number in range(3):
                await store.append([Event("Joined", tags=["course:7", f"student:{number}"])])
            monkeypatch.setattr(ServerPort, "fetch_marked", fetch_marked)
            assert [one.position for one in (await store.read(JOINED)).events] == [1, 2, 3]

    with_cluster(story)


def test_a_decision_from_above_a_fork_is_refused() -> None:
    """Events that it has not seen have the positions of those that it has seen."""

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            for _ in range(3):
                await store.append([Event("Joined", tags=["course:7"])])
            found = await store.read(JOINED)
            assert found.events[-1].position == found.head == 3
        await cluster.rescue(0, 0)
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            for _ in range(3):
                await store.append([Event("Joined", b"anew", ["course:7"])])
            for after in (found.head, found.events[-1].position):
                with pytest.raises(OtherTimeline):
                    await store.append([Event("Joined")], AppendCondition(JOINED, after=after))
                with pytest.raises(OtherTimeline):
                    await store.read(JOINED, after=after)
            assert len((await store.read(JOINED, after=found.events[0].position)).events) == 3, "at the fork it goes on"

    with_cluster(story)


def test_a_projection_that_kept_a_bare_number_above_a_fork_is_refused() -> None:
    """A plain integer is a position of the first timeline, as for `feed`: the events of another one would be left out."""

    async def story(cluster: LocalCluster) -> None:
        for count in (3, 5):
            async with cluster.client() as client:
                store = EventStore(client, partition=0)
                for _ in range(count):
                    await store.append([Event("Joined", tags=["course:7"])])
            if count == 3:
                await cluster.rescue(0, 0)
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            with pytest.raises(OtherTimeline):
                await store.read(JOINED, after=3)
            with pytest.raises(OtherTimeline):
                await anext(store.subscribe(JOINED, after=3))
            assert len((await store.read(JOINED, after=1)).events) == 5, "at the fork it goes on"
            assert await store.append([Event("Left")], AppendCondition(JOINED, after=6)) == 7, "an id of the current log"

    with_cluster(story)


def test_an_append_that_others_overtake_for_ever_ends_at_its_time() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store, sent = EventStore(client, partition=0), list[int]()

            loop, patches = asyncio.get_running_loop(), pytest.MonkeyPatch()
            right = loop.time
            patches.setattr(loop, "time", lambda: right() + (120 if len(sent) >= 3 else 0))

            async def lost(*_arguments: Any, position: int, **_options: Any) -> Rejected:
                sent.append(position)
                return Rejected(Reason.IN_FLIGHT, 7, 1)

            client.append = lost  # type: ignore[assignment,method-assign]
            with pytest.raises(NotSent, match="other appends were faster"):
                await store.append([Event("Joined")], AppendCondition(JOINED), timeout=60)
            patches.undo()
            assert sent == [-1, -1, -1], "there was nothing to examine"

    with_cluster(story)


def test_a_subscription_has_what_was_and_what_comes() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            store, found = EventStore(client, partition=0), list[int]()
            for number in range(3):
                await store.append([Event("Joined", tags=["course:7"]), Event("Left", tags=[f"course:{number}"])])
            async with aclosing(store.subscribe(JOINED, after=1)) as subscription:
                async for one in subscription:
                    found.append(one.position)
                    if len(found) == 2:
                        await client.append(b"no event", partition=0)
                        await store.append([Event("Left"), Event("Joined", tags=["course:7"])])
                    if len(found) == 3:
                        break
            assert found == [3, 5, 9]

    with_cluster(story)


def test_what_a_store_refuses() -> None:
    with pytest.raises(BadArgument, match="100 tags; this Joined has 200"):
        Event("Joined", tags=[str(number) for number in range(200)])
    for wrong in (
        {"type": ""},
        {"type": 7},
        {"type": "a", "data": "text"},
        {"type": "a", "tags": "text"},
        {"type": "a", "tags": [7]},
        {"type": "a\ud800"},
        {"type": "a", "tags": ["\udfff"]},
    ):
        with pytest.raises(BadArgument):
            Event(**wrong)
    with pytest.raises(BadArgument, match="types must be a sequence of texts"):
        QueryItem(types="Joined")
    with pytest.raises(BadArgument, match="items of the class QueryItem"):
        Query(["Joined"])  # type: ignore[list-item]

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(serializer=Json[Any]()) as other:
            with pytest.raises(BadArgument, match="without a serializer"):
                EventStore(other)
        async with cluster.client() as client:
            store = EventStore(client, partition=0)
            with pytest.raises(BadArgument, match="at least one event"):
                await store.append([])
            for position in (-1, "1", True, 1 << 63):
                with pytest.raises(BadArgument, match="a position of an event store"):
                    await store.read(after=position)  # type: ignore[arg-type]
            for limit in (0, 1.5, True):
                with pytest.raises(BadArgument, match="limit must be an integer of at least 1"):
                    await store.read(limit=limit)  # type: ignore[arg-type]
            with pytest.raises(BadArgument, match="above the end of partition 0"):
                await store.append([Event("Joined")], AppendCondition(after=9))
            wide = Query([QueryItem([f"type {number}"], [f"tag {number}"]) for number in range(600)])
            await store.append([Event("type 9", tags=["tag 8"])], AppendCondition(wide))
            assert await append(store, [Event("type 9", tags=["tag 9"])], AppendCondition(wide)) == 2
            assert await append(store, [Event("type 9", tags=["tag 9"])], AppendCondition(wide)) is None
            assert [one.position for one in (await store.read(Query(wide.items[:200]))).events] == [2]
            assert await store.append([Event("Smiled", tags=["\U0001f600"])]) == 3

    with_cluster(story)


def test_a_partition_of_format_0_has_no_store() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            with pytest.raises(NeedsBatches):
                await EventStore(client, partition=0).append([Event("a"), Event("b")])

    with_cluster(story, format=0)


def test_a_store_has_the_partition_of_its_name_and_shares_it(blocking_waltz_cluster: BlockingCluster) -> None:
    with blocking_waltz_cluster.client() as client:
        one, other = (
            BlockingEventStore(client),
            BlockingEventStore(client, partition=client.partition_of("dcb"), name="other"),
        )
        assert one.partition == client.partition_of("dcb")
        joined = Event("Joined", b"\n{", ["course:7", "kürs"])
        assert one.append([joined]) == 1
        assert isinstance(client.append(b"{}", partition=one.partition), Committed)
        assert one.append([Event("Left")], AppendCondition(Query([QueryItem(["Left"])]))) == 3
        assert [found.event for found in one.read().events] == [
            Event("Joined", b"\n{", ["course:7", "kürs"]),
            Event("Left"),
        ]
        assert other.read().events == [], "a store finds what was marked under its own name"
        subscription = one.subscribe(after=1)
        assert next(subscription).position == 3
        subscription.close()
        with pytest.raises(AppendConditionFailed):
            one.append([Event("Left")], AppendCondition())

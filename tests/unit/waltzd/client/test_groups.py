"""Groups, times and locks, as an application meets them: a group is one outcome and one step of the view."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.unit.fake_server import FakeCluster
from tests.unit.timeless import run
from tests.unit.told import told
from tests.unit.waltzd.client.test_client import SETTINGS, Increment, View, until, with_client
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Builder, Command, Transaction, end_of_part
from waltzd.errors import BadArgument, NeedsBatches, NotSent, TooLarge
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Declined, LoggedLock, Mode, Reason, Rejected, read_lock, write_lock

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def us(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND


def cluster(**options: Any) -> FakeCluster:
    fake = FakeCluster(format=1, **options)
    fake.now = us(NOON)
    return fake


class BatchView(View):
    """Takes several at once; remembers what came together."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[int]] = []
        self.times: list[datetime | None] = []
        self.failures = 0

    async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the database is away")
        self.parts.append([transaction.id for transaction in transactions])
        self.times += [transaction.time for transaction in transactions]
        for transaction in transactions:
            await self.apply(transaction)


class Move(Command):
    """A transaction of a group; it takes no part when it is told so."""

    def __init__(self, data: bytes, lock: str = "", partition: int = 0) -> None:
        self.data, self.lock, self.number = data, lock, partition
        self.story: list[object] = []
        self.takes_part = True

    def partition(self, count: int) -> int:
        return self.number

    def build(self, builder: Builder) -> bool:
        self.story.append(f"built at {builder.position}")
        builder.payload = self.data
        builder.locks = [write_lock(self.lock)] if self.lock else []
        return self.takes_part

    def on_lock_failure(self, rejected: Rejected) -> None:
        self.story.append(rejected.reason)

    def on_outcome(self, outcome: object) -> None:
        self.story.append(outcome)

    def on_applied(self, id: int) -> None:
        self.story.append(id)


# -- one outcome


def test_a_group_is_committed_in_a_row_under_one_outcome() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"before", partition=0)
        outcome = await client.append_atomic([b"a", b"b", b"c"], partition=0, kinds=[1, 2, 3])
        assert outcome == Committed(1, count=3)
        assert outcome.or_raise().ids == range(1, 4)
        assert Committed(4).ids == range(4, 5)
        assert await client.append_atomic([b"one"], key=b"k") == Committed(4, count=1)

    log = with_client(test, cluster=cluster()).partitions[0].log
    assert [(entry.payload, entry.header, entry.follows) for entry in log] == [
        (b"before", 0, False), (b"a", 1, False), (b"b", 2, True), (b"c", 3, True), (b"one", 0, False),
    ]  # fmt: skip


@told(with_client, given=2, cluster=cluster(), partitions=[0])
async def test_a_group_that_makes_no_sense_is_refused_at_the_call(client: Client, fake: FakeCluster) -> None:
    with pytest.raises(BadArgument, match="at least one"):
        await client.append_atomic([], partition=0)
    with pytest.raises(BadArgument, match="3 payloads and 2 kinds"):
        await client.append_atomic([b"a", b"b", b"c"], partition=0, kinds=[1, 2])
    with pytest.raises(BadArgument, match="needs a position"):
        await client.append_atomic([b"a", b"b"], partition=0, locks=[[], [read_lock("x")]])
    with pytest.raises(BadArgument, match="at least one"):
        await client.submit_atomic([])


def test_a_group_is_in_one_partition() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        with pytest.raises(BadArgument, match="have the partitions 0, 2"):
            await client.submit_atomic([Move(b"a"), Move(b"b", partition=2), Move(b"c")])

    assert with_client(test, cluster=cluster(partitions=3)).partitions[0].taken == 0


def test_only_the_group_that_is_larger_than_a_frame_is_refused() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        large = client.append_atomic([b"x" * 600] * 3 + [b"y" * 41], partition=0)
        others = [client.append_atomic([b"x" * 600] * 3 + [b"y" * 40], partition=0), client.append(b"small", partition=0)]
        refused, *outcomes = await asyncio.gather(large, *others, return_exceptions=True)
        assert isinstance(refused, TooLarge)
        assert "an atomic append of 4 transactions has 2001 bytes; the servers allow 2000 " in refused.message
        assert refused.facts == {"frame_bytes_max": "2000"}
        assert outcomes == [Committed(0, 4), Committed(4)]

    with_client(test, cluster=cluster())


def test_only_the_group_is_refused_by_a_partition_of_format_0() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        work = [client.append_atomic([b"a", b"b"], partition=0), client.append(b"c", partition=0)]
        refused, outcome = await asyncio.gather(*work, return_exceptions=True)
        assert isinstance(refused, NeedsBatches)
        assert outcome == Committed(0)
        assert await client.append_atomic([b"alone"], partition=0) == Committed(1)
        assert client.status()[0].mounts == 1

    with_client(test)


def test_a_group_whose_second_lock_fails_is_not_in_the_log() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"first", partition=0, locks=[write_lock("b")], position=-1)
        locks = [[write_lock("a")], [write_lock("b")], []]
        outcome = await client.append_atomic([b"x", b"y", b"z"], partition=0, locks=locks, position=-1)
        assert outcome == Rejected(Reason.CONFLICT, 0, write_lock("b").hash)
        # Nothing of it marked a lock, either; and its own transactions do not stand in each other's way.
        locks = [[write_lock("a")], [write_lock("a")]]
        assert await client.append_atomic([b"x", b"y"], partition=0, locks=locks, position=-1) == Committed(1, 2)

    assert with_client(test, cluster=cluster()).partitions[0].payloads == [b"first", b"x", b"y"]


# -- built again as a whole


def test_a_group_is_built_again_as_a_whole_when_the_lock_of_one_fails() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.hold = asyncio.Event()
        await client.append(b"other", partition=0, locks=[write_lock("b")], position=-1)
        moves = [Move(b"a", "a"), Move(b"b", "b")]
        submitting = asyncio.create_task(client.submit_atomic(moves, fresh=False))
        await until(lambda: Reason.CONFLICT in moves[0].story)
        view.hold.set()
        outcome = await submitting
        assert outcome == Committed(1, 2)
        await until(lambda: len(view.payloads()) == 3)
        await asyncio.sleep(1)
        for number, move in enumerate(moves):
            assert move.story == ["built at -1", Reason.CONFLICT, "built at 0", outcome, 1 + number]

    assert with_client(test, cluster=cluster(), view=view).partitions[0].payloads == [b"other", b"a", b"b"]


def test_nothing_is_sent_when_one_declines() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        moves = [Move(b"a"), Move(b"b"), Move(b"c")]
        moves[1].takes_part = False
        assert await client.submit_atomic(moves) == Declined()
        assert [move.story for move in moves] == [["built at -1", Declined()]] * 2 + [[Declined()]]

    assert with_client(test, cluster=cluster(), view=View()).partitions[0].taken == 0


@pytest.mark.parametrize("fault", ["crash", "move", "drop", "drop after"])
def test_a_group_that_was_lost_is_built_again(fault: str) -> None:
    faults = [fault]
    fake = cluster(fault=lambda moment: faults.pop() if faults and moment.endswith("AppendBatch") else None)

    async def test(client: Client, fake: FakeCluster) -> None:
        assert await client.submit_atomic([Move(b"a"), Move(b"b")]) == Committed(0, 2)

    assert with_client(test, cluster=fake, view=View()).partitions[0].payloads == [b"a", b"b"]


def test_the_counter_counts_beside_groups() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        done = await asyncio.gather(*[client.submit_atomic([Increment(view)]) for _ in range(5)])
        assert sorted(outcome.id for outcome in done if isinstance(outcome, Committed)) == list(range(5))

    assert with_client(test, cluster=cluster(), view=view).partitions[0].payloads == [b"1", b"2", b"3", b"4", b"5"]


# -- views


@pytest.mark.parametrize("feed", [FeedMode.RECORDS, FeedMode.HEADS])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("apply_batch_max", [1, 3, 100])
def test_a_view_is_given_groups_whole_however_the_feed_is_cut(apply_batch_max: int, cut: int, feed: FeedMode) -> None:
    view, fake = BatchView(), cluster()
    fake.feed_records = cut
    partition = fake.partitions[0]

    async def test(client: Client, fake: FakeCluster) -> None:
        partition.write(b"single")
        partition.write_group(*[b"first"] * 5)
        fake.now += 1
        partition.write_group(*[b"second"] * 3)
        partition.write(b"single", b"single")
        await until(lambda: len(view.payloads()) == 11)
        assert client.position(0) == 10

    settings = ClientSettings(apply_batch_max=apply_batch_max)
    with_client(test, cluster=fake, view=view, feed=feed, settings=settings)
    assert all(partition.whole(part[-1]) == part[-1] and partition.whole(part[0] - 1) == part[0] - 1 for part in view.parts)
    assert view.times == [NOON] * 6 + [NOON + MICROSECOND] * 5


def test_where_the_client_stands_is_never_inside_a_group() -> None:
    """Also where the view takes one transaction after the other."""
    marks: set[int] = set()
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        apply = view.apply

        async def look(transaction: Transaction) -> None:
            marks.add(client.position(0))
            await apply(transaction)

        view.apply = look  # type: ignore[method-assign]
        for size in (1, 3, 2):
            fake.partitions[0].write_group(*[b"x"] * size)
        await until(lambda: client.position(0) == 5)
        assert marks == {-1, 0, 3}

    with_client(test, cluster=cluster(), view=view)


def test_a_group_that_fails_is_tried_again_together() -> None:
    view = BatchView()
    view.failures = 3

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.feed_records = 100
        fake.partitions[0].write(b"a")
        fake.partitions[0].write_group(b"b", b"c", b"d")
        await until(lambda: len(view.payloads()) == 4)

    with_client(test, cluster=cluster(), view=view)
    assert view.parts == [[1, 2, 3]]  # the single one went through `apply`


def test_a_group_that_is_larger_than_the_credit_of_the_feed_arrives() -> None:
    view = BatchView()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write_group(*[b"x" * 100] * 12)
        await until(lambda: len(view.payloads()) == 12)

    with_client(test, cluster=cluster(), view=view, settings=ClientSettings(feed_bytes_max=300))
    assert view.parts == [list(range(12))]


def test_a_view_that_stands_inside_a_group_is_given_the_rest() -> None:
    view = BatchView()
    view.start = 1

    fake = cluster()
    fake.partitions[0].write_group(b"0", b"1", b"2", b"3")

    async def test(client: Client, fake: FakeCluster) -> None:
        await until(lambda: len(view.payloads()) == 2)

    with_client(test, cluster=fake, view=view)
    assert view.parts == [[2, 3]]


@pytest.mark.parametrize("most", range(1, 7))
def test_parts_end_between_groups(most: int) -> None:
    class One:
        def __init__(self, follows: bool) -> None:
            self.follows = follows

    flags = [False, True, True, False, False, True, False, False, True, True, True, True]
    ones = [One(follows) for follows in flags]
    edges, at = [], 0
    while at < len(ones):
        at = end_of_part(ones, at, most)
        edges.append(at)
    starts = [number for number, follows in enumerate(flags) if not follows] + [len(flags)]
    expected, at = [], 0
    while at < len(flags):  # the highest edge within reach, or the next one
        within = [edge for edge in starts if at < edge <= at + most]
        at = within[-1] if within else min(edge for edge in starts if edge > at)
        expected.append(at)
    assert edges == expected


# -- times


def test_transactions_have_times_and_on_request_locks() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        fake.now = us(NOON)
        locks = [[read_lock("a"), write_lock("b", 7)], []]
        await client.append_atomic([b"x", b"y"], partition=0, locks=locks, position=-1)
        first, second = await client.read_some(0, with_locks=True)
        assert (first.time, first.time_us, first.follows, second.follows) == (NOON, us(NOON), False, True)
        assert first.locks == (
            LoggedLock(read_lock("a").hash, Mode.READ), LoggedLock(write_lock("b", 7).hash, Mode.WRITE),
        )  # fmt: skip
        assert second.locks == ()
        assert (await client.read(0, 0)).locks is None

    with_client(test, cluster=cluster(), partitions=[0])


def test_what_was_written_in_format_0_has_no_time_and_is_before_all_times() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"a", b"b")
        found = await client.read(0, 0, with_locks=True)
        assert (found.time, found.time_us, found.locks) == (None, None, None)
        with pytest.raises(NeedsBatches):
            await client.position_at(0, 0)
        fake.partitions[0].format = 1
        fake.partitions[0].write(b"c")
        assert await client.position_at(0, 0) == 1
        assert await client.position_at(0, datetime(1960, 1, 1, tzinfo=UTC)) == 1
        assert [found.time_us for found in await client.read_some(0)] == [None, None, fake.now]
        assert [found.id for found in await client.read_some(0, since=0)] == [2]
        assert [found.id for found in await client.read_some(0, before=fake.now)] == [0, 1]

    with_client(test, partitions=())


def test_reading_begins_and_ends_at_a_time() -> None:
    fake = cluster()
    for minute in range(10):
        fake.now = us(NOON + timedelta(minutes=minute))
        fake.partitions[0].write_group(b"%d" % minute, b"%d" % minute)
    fake.run_records = 3

    async def test(client: Client, fake: FakeCluster) -> None:
        async def ids(**named: Any) -> list[int]:
            return [found.id for found in await client.read_some(0, **named)]

        def at(minutes: float) -> datetime:
            return NOON + timedelta(minutes=minutes)

        assert await ids(since=at(2), before=at(4)) == [4, 5, 6, 7]
        assert await ids(since=at(1.5), before=at(3.5)) == [4, 5, 6, 7]
        assert await ids(since=us(at(8))) == [16, 17, 18, 19]
        assert await ids(since=at(8), through=17) == [16, 17]
        assert await ids(after=2, before=at(2)) == [3]
        assert await ids(after=3, before=at(2)) == []
        assert await ids(since=at(9.5)) == []
        assert await ids(since=at(5), before=at(3)) == []
        assert await ids(since=datetime(1960, 1, 1, tzinfo=UTC), through=0) == [0]
        assert await ids(after=17) == [18, 19]
        assert await client.position_at(0, at(3)) == 5
        for broken in (
            {"after": 0, "since": 0}, {"after": 0, "through": 1, "before": 0}, {"after": -2},
            {"since": datetime(2026, 1, 1)}, {"since": "noon"}, {"since": -1}, {"since": 1.5},
        ):  # fmt: skip
            with pytest.raises(BadArgument):
                await client.read_some(0, **broken)
        with pytest.raises(BadArgument, match="has no time zone"):
            await client.position_at(0, datetime(2026, 1, 1))

    with_client(test, cluster=fake, partitions=())


def test_a_view_begins_at_a_time() -> None:
    fake = cluster()
    for minute in range(5):
        fake.now = us(NOON + timedelta(minutes=minute))
        fake.partitions[0].write(b"%d" % minute)

    class Late(View):
        async def position(self, partition: int) -> int:  # type: ignore[override]
            self.start = await clients[0].position_at(partition, NOON + timedelta(minutes=3))
            return self.start

    view, clients = Late(), []

    async def work() -> None:
        clients.append(Client("s0:1", connect=fake.connect, view=view, settings=SETTINGS))
        async with clients[0]:
            await until(lambda: len(view.payloads()) == 2)

    run(work())
    assert view.payloads() == [b"3", b"4"]


# -- cause and effect


@pytest.mark.parametrize("has_view", [True, False])
def test_an_effect_is_not_earlier_than_its_cause_in_another_partition(has_view: bool) -> None:
    """Whether the client was fed the cause, was told its outcome, or read it."""
    fake = cluster(partitions=3)
    fake.partitions[0].ahead = 10_000_000

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"cause", partition=0)
        await client.append(b"effect", partition=1)
        assert fake.partitions[1].log[0].time == fake.partitions[0].log[0].time

    with_client(test, cluster=fake, **({"view": View()} if has_view else {}))

    async def reading(client: Client, fake: FakeCluster) -> None:
        await client.read(0, 0)
        await client.append(b"effect", partition=2)
        assert fake.partitions[2].log[0].time == fake.partitions[0].log[0].time

    with_client(reading, cluster=fake)


@pytest.mark.parametrize("feed", [FeedMode.RECORDS, FeedMode.HEADS])
def test_what_was_fed_was_seen(feed: FeedMode) -> None:
    fake, view = cluster(partitions=2), View()
    fake.partitions[0].ahead = 10_000_000
    fake.partitions[0].write(b"cause")

    async def test(client: Client, fake: FakeCluster) -> None:
        await until(lambda: view.seen.get(0))
        await client.append(b"effect", partition=1)
        assert fake.partitions[1].log[0].time == fake.partitions[0].log[0].time

    with_client(test, cluster=fake, view=view, feed=feed)


def test_a_wrong_clock_of_one_owner_does_not_keep_clients_from_writing_elsewhere() -> None:
    fake = cluster(partitions=2)
    fake.partitions[0].ahead = 3_600_000_000

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"cause", partition=0)
        assert await client.append(b"effect", partition=1) == Committed(0)
        assert fake.partitions[1].log[0].time == fake.now, "and the wrong time does not spread"
        assert "its clock is far behind those of other servers" in client.status()[1].sentence
        assert await client.append(b"again", partition=1) == Committed(1)
        assert client.status()[1].mounts == 2
        fake.now += 7_200_000_000
        fake.partitions[0].ahead = 0  # the clocks are right again
        await client.append(b"later", partition=1)
        assert "clock" not in client.status()[1].sentence
        await client.append(b"cause", partition=0)
        fake.partitions[1].ahead = -5_000_000
        await client.append(b"last", partition=1)
        assert fake.partitions[1].log[-1].time == fake.partitions[0].log[-1].time

    with_client(test, cluster=fake)


def test_a_group_whose_partition_stays_away_was_not_sent() -> None:
    fake = cluster()

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"x", partition=0)
        fake.partitions[0].stays_down = True
        fake.partitions[0].end_session()
        with pytest.raises(NotSent):
            await client.append_atomic([b"a", b"b"], partition=0)

    assert with_client(test, cluster=fake).partitions[0].payloads == [b"x"]

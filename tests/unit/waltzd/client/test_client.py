"""The client against a fake cluster with a true log: every outcome that a caller is told must be what the log says."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import pytest

from tests.unit.fake_server import FakeCluster, FakeServer
from tests.unit.timeless import run
from tests.unit.told import told
from waltzd.client import reader
from waltzd.client.client import Client
from waltzd.client.mount_connection import MountConnection
from waltzd.client.outbox import Outbox
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Builder, Command, Decision, Transaction, partition_by_hash
from waltzd.errors import (
    BadArgument,
    BeyondLog,
    CannotConnect,
    ClientAhead,
    ClientClosed,
    ForeignCluster,
    NotMounted,
    NotSent,
    TooLarge,
    ViewStopped,
)
from waltzd.protocol.batches import SEQUENCE_MAX, FeedMode
from waltzd.protocol.locks import Committed, Declined, Lock, Reason, Rejected, Unknown, append_lock, read_lock, write_lock
from waltzd.protocol.positions import Position


class View:
    """A view that keeps what it was given."""

    def __init__(self, start: int = -1) -> None:
        self.start = start
        self.seen: dict[int, list[tuple[int, bytes]]] = {}
        self.asked: list[int] = []
        self.hold: asyncio.Event | None = None

    def position(self, partition: int) -> int:
        self.asked.append(partition)
        seen = self.seen.get(partition)
        return seen[-1][0] if seen else self.start

    async def apply(self, transaction: Transaction) -> None:
        if self.hold is not None:
            await self.hold.wait()
        data = await transaction.fetch()
        self.seen.setdefault(transaction.partition, []).append((transaction.id, data))

    def payloads(self, partition: int = 0) -> list[bytes]:
        seen = self.seen.get(partition, [])
        assert [id_ for id_, _ in seen] == list(range(self.start + 1, self.start + 1 + len(seen)))
        return [data for _, data in seen]


class Increment(Command):
    """One more than the last payload, under one lock."""

    def __init__(self, view: View, name: str = "counter") -> None:
        self.view = view
        self.name = name
        self.builds = 0
        self.story: list[object] = []

    def partition(self, count: int) -> int:
        return 0

    def build(self, builder: Builder) -> bool:
        self.builds += 1
        seen = self.view.payloads()
        builder.payload = str(int(seen[-1]) + 1 if seen else 1).encode()
        builder.locks = [write_lock(self.name)]
        return True

    def on_lock_failure(self, rejected: Rejected) -> None:
        self.story.append(rejected)

    def on_outcome(self, outcome: object) -> None:
        self.story.append(outcome)

    def on_applied(self, id: int) -> None:
        self.story.append(("applied", id))


SETTINGS = ClientSettings(submit_seconds=20, call_seconds=2, close_seconds=3)


def with_client(
    test: Callable[[Client[Any], FakeCluster], Awaitable[Any]],
    *,
    cluster: FakeCluster | None = None,
    **options: Any,
) -> FakeCluster:
    """Run the test with a client, and see that nothing is left of it."""
    fake = cluster or FakeCluster()

    async def work() -> None:
        async with Client("s0:1", connect=fake.connect, **{"settings": SETTINGS, **options}) as client:
            await test(client, fake)
        assert (fake.open_ports, fake.open_mounts) == (0, 0)

    run(work())
    return fake


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(1000):
        while not condition():
            await asyncio.sleep(0.01)


# -- what it does when all is well


def test_what_is_appended_comes_back_in_order() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        outcomes = await asyncio.gather(*[client.append(b"%d" % i, partition=0, kind=i) for i in range(50)])
        assert outcomes == [Committed(i) for i in range(50)]
        await until(lambda: len(view.payloads()) == 50)
        assert client.status()[0].is_ready
        assert client.status()[0].applied == 49
        assert not client.has_pending

    fake = with_client(test, view=view)
    assert view.payloads() == fake.partitions[0].payloads == [b"%d" % i for i in range(50)]
    assert [entry.header for entry in fake.partitions[0].log] == list(range(50))


@told(with_client, given=2)
async def test_many_at_once_share_frames_and_one_alone_does_not_wait(client: Client, fake: FakeCluster) -> None:
    await client.append(b"alone", partition=0)
    await asyncio.gather(*[client.append(b"x", partition=0) for _ in range(40)])
    assert fake.partitions[0].taken <= 4


def test_behind_one_alone_the_next_one_leaves_in_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    send_now = MountConnection.send_now

    def noting(connection: MountConnection) -> None:
        waiting.append(connection._mount.outbox.rows)
        send_now(connection)

    monkeypatch.setattr(MountConnection, "send_now", noting)

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"alone", partition=0)
        for first in (1, 40):  # behind one alone, behind one with company
            waiting.clear()
            await asyncio.gather(*[client.append(b"x", partition=0) for _ in range(40)])
            assert waiting[0] == first

    with_client(test)


@told(with_client, given=2)
async def test_append_many_is_told_as_columns(client: Client, fake: FakeCluster) -> None:
    fake.partitions[0].marks[write_lock("a").hash] = 5
    payloads = [b"%d" % i * 10 for i in range(100)]
    locks = [[write_lock("a")] if i == 7 else [append_lock("b", i)] if i % 3 == 0 else [] for i in range(100)]
    outcomes = await client.append_many(payloads, partition=0, kinds=range(100), locks=locks, position=-1)
    assert outcomes.committed == 99
    assert outcomes[6] == Committed(6)
    assert outcomes[7] == Rejected(Reason.IN_FLIGHT, 5, write_lock("a").hash)
    assert outcomes[8] == Committed(7)
    assert fake.partitions[0].payloads == payloads[:7] + payloads[8:]
    assert [entry.header for entry in fake.partitions[0].log] == [*range(7), *range(8, 100)]
    assert fake.partitions[0].log[8].locks == ((append_lock("b", 9).hash, 3),)
    assert fake.partitions[0].taken > 1  # it does not fit into one frame
    assert len(await client.append_many([], partition=0)) == 0


def test_a_view_of_heads_fetches_payloads_when_it_wants_them() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"a", b"b")
        assert await client.append(b"c", partition=0) == Committed(2)
        await until(lambda: len(view.payloads()) == 3)

    with_client(test, view=view, feed=FeedMode.HEADS)
    assert view.payloads() == [b"a", b"b", b"c"]


def test_a_view_may_begin_in_the_middle() -> None:
    view = View(start=1)
    fake = FakeCluster()

    async def test(client: Client, fake: FakeCluster) -> None:
        await until(lambda: len(view.payloads()) == 1)
        assert (await client.read(0, 0)).payload == b"a"
        assert await client.end_position(0) == 2
        with pytest.raises(BeyondLog):
            await client.read(0, 3)

    async def before() -> None:
        fake.partitions[0].write(b"a", b"b", b"c")

    run(before())
    with_client(test, cluster=fake, view=view)
    assert view.payloads() == [b"c"]


def test_a_serializer_and_a_partitioner_of_the_application() -> None:
    class Numbers:
        def encode(self, value: int) -> bytes:
            return value.to_bytes(4, "big")

        def decode(self, data: bytes) -> int:
            return int.from_bytes(data, "big")

    class Sum:
        total = 0

        def position(self, partition: int) -> int:
            return -1

        def apply(self, transaction: Transaction[int]) -> None:
            self.total += transaction.value

    view = Sum()

    async def test(client: Client[int], fake: FakeCluster) -> None:
        await client.append(17, key=1)
        await client.append(4, key=2)
        await until(lambda: view.total == 21)
        assert [len(partition.log) for partition in fake.partitions] == [0, 1, 1]

    cluster = FakeCluster(partitions=3)
    with_client(test, cluster=cluster, view=view, serializer=Numbers(), partitioner=lambda key, count: key % count)


# -- commands


def test_a_command_is_built_again_when_a_lock_fails_and_told_in_order() -> None:
    view = View()
    command = Increment(view)

    async def test(client: Client, fake: FakeCluster) -> None:
        view.hold = asyncio.Event()
        fake.partitions[0].write(b"41")
        fake.partitions[0].marks[write_lock("counter").hash] = 0
        submitted = asyncio.create_task(client.submit(command, fresh=False))
        await until(lambda: command.story)
        assert command.builds == 1  # it waits for the view to see what it conflicted with
        view.hold.set()
        assert await submitted == Committed(1)
        await until(lambda: len(command.story) == 3)

    fake = with_client(test, view=view)
    assert fake.partitions[0].payloads == [b"41", b"42"]
    lock = write_lock("counter").hash
    assert command.story == [Rejected(Reason.CONFLICT, 0, lock), Committed(1), ("applied", 1)]


def test_clients_that_race_for_a_lock_all_get_their_turn() -> None:
    fake = FakeCluster()

    async def one() -> None:
        view = View()
        async with Client("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client:
            for _ in range(5):
                assert isinstance(await client.submit(Increment(view)), Committed)

    async def all_of_them() -> None:
        await asyncio.gather(*[one() for _ in range(6)])

    run(all_of_them())
    assert fake.partitions[0].payloads == [b"%d" % i for i in range(1, 31)]


def test_a_command_may_decline_and_what_it_raises_comes_out() -> None:
    class Nothing(Command):
        key = "k"
        told: object = None

        def build(self, builder: Builder) -> bool:
            return False

        def on_outcome(self, outcome: object) -> None:
            self.told = outcome
            raise RuntimeError("the application's own trouble is logged")

    class Broken(Nothing):
        def build(self, builder: Builder) -> bool:
            raise ZeroDivisionError

    class Empty(Nothing):
        def build(self, builder: Builder) -> bool:
            return True

    async def test(client: Client, fake: FakeCluster) -> None:
        nothing = Nothing()
        assert await client.submit(nothing) == Declined()
        assert nothing.told == Declined()
        with pytest.raises(ZeroDivisionError):
            await client.submit(Broken())
        with pytest.raises(BadArgument, match="without a payload"):
            await client.submit(Empty())
        assert not client.has_pending
        assert await client.append(b"x", partition=0) == Committed(0)  # no place was lost

    settings = ClientSettings(pending_max=1)
    with_client(test, settings=settings)


def test_attempts_are_bounded() -> None:
    view = View()

    class Hopeless(Increment):
        def build(self, builder: Builder) -> bool:
            fake.partitions[0].marks[write_lock("counter").hash] = 0  # somebody is always faster
            builder.position = -1
            return super().build(builder)

    command = Hopeless(view)
    fake = FakeCluster()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"1")
        outcome = await client.submit(command)
        assert outcome == Rejected(Reason.CONFLICT, 0, write_lock("counter").hash)

    settings = ClientSettings(attempts_max=7)
    with_client(test, cluster=fake, view=view, settings=settings)
    assert command.builds == 7
    assert fake.partitions[0].payloads == [b"1"]


def test_a_conflict_that_never_arrives_ends_with_the_rejection() -> None:
    view = View()
    command = Increment(view)

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].marks[write_lock("counter").hash] = 77
        assert await client.submit(command) == Rejected(Reason.IN_FLIGHT, 77, write_lock("counter").hash)

    with_client(test, view=view)
    assert command.builds == 1


def test_a_conflict_that_was_lost_in_a_fail_over_does_not_hold_up_the_next_attempt() -> None:
    view = View()
    command = Increment(view)

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].marks[write_lock("counter").hash] = 77
        submitted = asyncio.create_task(client.submit(command))
        await until(lambda: command.story)
        started = asyncio.get_running_loop().time()
        fake.partitions[0].end_session()
        assert await submitted == Committed(0)
        assert asyncio.get_running_loop().time() - started < SETTINGS.submit_seconds / 2  # of the simulated clock

    with_client(test, view=view)


def test_a_fail_over_between_the_rejection_and_the_wait_is_noticed() -> None:
    view = View()

    class Slow(Increment):
        client: Client

        async def on_lock_failure(self, rejected: Rejected) -> None:  # type: ignore[override]
            mounts = self.client.status()[0].mounts
            fake.partitions[0].end_session()
            await until(lambda: self.client.status()[0].mounts > mounts and self.client.status()[0].is_ready)

    command = Slow(view)
    fake = FakeCluster()

    async def test(client: Client, fake: FakeCluster) -> None:
        command.client = client
        fake.partitions[0].marks[write_lock("counter").hash] = 77
        assert await client.submit(command) == Committed(0)

    with_client(test, cluster=fake, view=view)


def test_the_position_of_an_append_is_that_of_the_call() -> None:
    """What was read from the view before the call must not be taken for what the view became meanwhile."""
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"a", partition=0)
        await until(lambda: client.position(0) == 0)
        work = client.append(b"b", partition=0, locks=[write_lock("x")])
        fake.partitions[0].marks[write_lock("x").hash] = 1
        fake.partitions[0].write(b"somebody else")
        await until(lambda: client.position(0) == 1)
        assert await work == Rejected(Reason.CONFLICT, 1, write_lock("x").hash)
        many = client.append_many([b"c"], partition=0, locks=[[write_lock("x")]])
        fake.partitions[0].marks[write_lock("x").hash] = 2
        fake.partitions[0].write(b"somebody else")
        await until(lambda: client.position(0) == 2)
        assert (await many)[0] == Rejected(Reason.CONFLICT, 2, write_lock("x").hash)

    with_client(test, view=view)


@told(with_client, given=2)
async def test_without_a_view_a_lock_needs_a_position(client: Client, fake: FakeCluster) -> None:
    fake.partitions[0].write(b"a")
    for lock in (read_lock("x"), write_lock("x")):
        with pytest.raises(BadArgument, match="position"):
            await client.append(b"b", partition=0, locks=[lock])
    assert await client.append(b"b", partition=0, locks=[append_lock("x")]) == Committed(1)
    assert await client.append(b"c", partition=0, locks=[read_lock("x")], position=1) == Committed(2)
    assert await client.append(b"c", partition=0, locks=[read_lock("x")], position=0) == Rejected(
        Reason.CONFLICT, 1, read_lock("x").hash
    )


# -- the application's view


def test_a_view_that_fails_is_asked_and_tried_again_with_the_same_transaction(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Shaky(View):
        failures = 0

        async def apply(self, transaction: Transaction) -> None:
            if transaction.id == 1 and self.failures < 3:
                self.failures += 1
                raise OSError("disk")
            await super().apply(transaction)

        def failed(self, transaction: Transaction, error: Exception) -> Decision:
            assert (transaction.id, str(error)) == (1, "disk")
            return Decision.RETRY

    view = Shaky()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"a", b"b", b"c")
        await until(lambda: len(view.payloads()) == 3)

    with caplog.at_level(logging.WARNING, "waltz.client"):
        with_client(test, view=view)
    assert view.failures == 3
    said = [record for record in caplog.records if "transaction 1 of partition 0" in record.getMessage()]
    assert [bool(record.exc_info) for record in said] == [True, False, False], "the traceback once, a count, and the end"
    assert "could not be applied 2 times since" in said[1].getMessage()
    assert "taken transaction 1 of partition 0 after 3 failures" in said[2].getMessage()


def test_a_partition_that_is_parked_stops_alone_and_can_be_taken_up_again() -> None:
    class Picky(View):
        is_mended = False

        async def apply(self, transaction: Transaction) -> None:
            if await transaction.fetch() == b"poison" and not self.is_mended:
                raise ValueError("no")
            await super().apply(transaction)

        def failed(self, transaction: Transaction, error: Exception) -> Decision:
            return Decision.STOP

    view = Picky()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        under_way = asyncio.create_task(client.append(b"under way", partition=0))
        await until(lambda: fake.partitions[0].log)
        fake.partitions[0].commit()
        fake.partitions[0].log.append(fake.partitions[0].log[0].__class__(1, 1, 0, b"poison", -1, ()))
        fake.partitions[0].is_holding = False
        assert await under_way == Committed(0)
        fake.partitions[0].commit()
        await until(lambda: client.status()[0].stopped)
        for _ in range(2):
            with pytest.raises(ViewStopped, match=r"transaction 1 of partition 0 .*ValueError\('no'\)"):
                await client.append(b"x", partition=0)
        assert await client.append(b"x", partition=1) == Committed(0)
        view.is_mended = True
        await client.set_partitions([1])
        await client.set_partitions("all")
        assert view.asked == [0, 1, 0]
        assert await client.append(b"y", partition=0) == Committed(2)
        await until(lambda: len(view.payloads()) == 3)

    with_client(test, cluster=FakeCluster(partitions=2), view=view)


def test_parking_still_tells_what_became_of_what_was_sent() -> None:
    class No(View):
        async def apply(self, transaction: Transaction) -> None:
            raise ValueError("no")

        def failed(self, transaction: Transaction, error: Exception) -> Decision:
            raise RuntimeError("not even that")  # counts as PARK

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        task = asyncio.create_task(client.append(b"x", partition=0))
        await until(lambda: fake.partitions[0].log)
        fake.partitions[0].log.insert(0, fake.partitions[0].log[0].__class__(9, 9, 0, b"poison", -1, ()))
        fake.partitions[0].mounts[1].sequences = {1: 0}
        fake.partitions[0].commit(0)
        await until(lambda: client.status()[0].stopped)
        fake.partitions[0].commit(1)
        assert await task == Committed(1)

    with_client(test, view=No())


def test_batches_are_applied_together_and_one_by_one_when_that_fails() -> None:
    class Batches(View):
        sizes: list[int]

        def __init__(self) -> None:
            super().__init__()
            self.sizes = []

        async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
            self.sizes.append(len(transactions))
            for transaction in transactions:
                if transaction.id == 5 and len(self.sizes) < 5:
                    raise ValueError("together it does not work")  # what came before it is in the view
                await super().apply(transaction)

    view = Batches()
    cluster = FakeCluster()
    cluster.feed_records = 8

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(*[b"%d" % i for i in range(20)])
        await until(lambda: len(view.payloads()) == 20)

    settings = ClientSettings(apply_batch_max=4)
    with_client(test, cluster=cluster, view=view, settings=settings)
    assert view.sizes[:2] == [4, 4]
    assert max(view.sizes) == 4
    assert 0 in view.asked


def test_a_view_that_goes_back_is_not_fed_twice() -> None:
    class Back(View):
        errors: list[str]

        def __init__(self) -> None:
            super().__init__()
            self.errors = []

        def position(self, partition: int) -> int:
            return -1

        def apply_batch(self, transactions: Sequence[Transaction]) -> None:
            if transactions[0].id > 0:
                raise OSError("gone")
            self.seen[0] = [(transaction.id, b"") for transaction in transactions]

        def failed(self, transaction: Transaction, error: Exception) -> Decision:
            self.errors.append(str(error))
            return Decision.STOP

    view = Back()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(*[b"x"] * 8)
        await until(lambda: client.status()[0].stopped)

    with_client(test, view=view)
    assert view.errors == ["the view's position of partition 0 went back from 2 to -1"]


def test_a_view_may_submit_to_its_own_partition() -> None:
    class Echo(View):
        client: Client

        async def apply(self, transaction: Transaction) -> None:
            await super().apply(transaction)
            if transaction.id < 30 and transaction.id % 2 == 0:
                assert isinstance(await self.client.append(b"echo" * 20, partition=0), Committed)

    view = Echo()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.client = client
        fake.partitions[0].write(*[b"x" * 50] * 31)
        await until(lambda: len(view.payloads()) == 46)

    settings = ClientSettings(feed_bytes_max=200)  # the feed stands still while the view waits for its own outcome
    with_client(test, view=view, settings=settings)


def test_a_view_that_waits_for_its_own_outcome_survives_a_fail_over() -> None:
    class Echo(View):
        client: Client
        outcome: object = None

        async def apply(self, transaction: Transaction) -> None:
            await super().apply(transaction)
            if transaction.id == 0:
                self.outcome = await self.client.append(b"echo", partition=0)

    view = Echo()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.client = client
        partition = fake.partitions[0]
        partition.is_holding = True
        partition.log += [partition_entry(b"x" * 90) for _ in range(100)]
        partition.commit(0)
        await until(lambda: len(partition.log) == 101)
        partition.end_session(keep=100)
        await until(lambda: view.outcome is not None)
        assert view.outcome == Committed(100)
        await until(lambda: len(view.payloads()) == 101)

    settings = ClientSettings(feed_bytes_max=200)
    with_client(test, view=view, settings=settings)


def partition_entry(payload: bytes) -> Any:
    from tests.unit.fake_server import Entry

    return Entry(9999, 0, 0, payload, -1, ())


def test_a_position_of_the_application_is_checked() -> None:
    async def work() -> None:
        for mark in (-2, "3", None):
            view = View(start=mark)  # type: ignore[arg-type]
            client = Client("s0:1", connect=FakeCluster().connect, view=view)
            with pytest.raises(BadArgument, match=r"the view returned the position .* of partition 0"):
                await client.open()

    run(work())


# -- limits


def test_what_waits_is_bounded_and_goes_on_in_order() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        tasks = [asyncio.create_task(client.append(b"%03d" % i, partition=0)) for i in range(100)]
        await until(lambda: fake.partitions[0].log)
        for _ in range(200):
            await asyncio.sleep(0.01)
            assert client.status()[0].pending <= 10
            fake.partitions[0].commit()
        assert await asyncio.gather(*tasks) == [Committed(i) for i in range(100)]

    fake = with_client(test, settings=ClientSettings(pending_max=10))
    assert fake.partitions[0].payloads == [b"%03d" % i for i in range(100)]


@told(with_client, given=2, settings=ClientSettings(pending_bytes_max=2000))
async def test_bytes_that_wait_are_bounded(client: Client, fake: FakeCluster) -> None:
    fake.partitions[0].is_holding = True
    tasks = [asyncio.create_task(client.append(b"x" * 500, partition=0)) for _ in range(20)]
    await until(lambda: fake.partitions[0].log)
    assert client.status()[0].pending_bytes <= 2000 + 540
    fake.partitions[0].is_holding = False
    fake.partitions[0].commit()
    assert len(await asyncio.gather(*tasks)) == 20


def test_frames_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Outbox.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "worth_bytes", 0)  # whatever there is goes beside others

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        tasks = []
        for i in range(30):
            tasks.append(asyncio.create_task(client.append(b"%d" % i, partition=0)))
            await asyncio.sleep(0.05)
        assert fake.partitions[0].taken == 3
        fake.partitions[0].is_holding = False
        fake.partitions[0].commit()
        await asyncio.gather(*tasks)
        assert fake.partitions[0].taken == 4  # all that had gathered, as one

    with_client(test, settings=ClientSettings(messages_in_flight_max=3))


def test_a_reader_that_does_not_read_gets_no_more_than_its_credit() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.hold = asyncio.Event()
        fake.partitions[0].write(*[b"x" * 60] * 200)
        await asyncio.sleep(5)
        received = client.status()[0].received
        assert 0 < received <= 10 + fake.feed_records
        assert await client.append(b"y", partition=0) == Committed(200)  # outcomes still come
        view.hold.set()
        await until(lambda: len(view.payloads()) == 201)

    with_client(test, view=view, settings=ClientSettings(feed_bytes_max=1000))


def test_what_is_too_large_is_refused_alone_and_before_it_is_sent() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        results = await asyncio.gather(
            client.append(b"a", partition=0),
            client.append(b"x" * 1001, partition=0),
            client.append(b"b", partition=0, locks=[append_lock("l", i) for i in range(5)]),
            client.append_many([b"c", b"x" * 1001], partition=0),
            client.append(b"d" * 1000, partition=0),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [Committed, TooLarge, TooLarge, TooLarge, Committed]

    fake = with_client(test)
    assert fake.partitions[0].payloads == [b"a", b"d" * 1000]


def test_arguments_are_checked_before_anything_is_sent() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        bad: list[dict[str, Any]] = [
            {"partition": 1},
            {"partition": -1},
            {},
            {"partition": 0, "key": "k"},
            {"partition": 0, "kind": 1 << 31},
            {"partition": 0, "position": -2},
            {"key": 1.5},
        ]
        for options in bad:
            with pytest.raises(BadArgument):
                await client.append(b"x", **options)
        with pytest.raises(BadArgument, match="serializer"):
            await client.append("text", partition=0)  # type: ignore[arg-type]
        uneven: list[dict[str, Any]] = [{"kinds": [1]}, {"locks": [[]]}, {"kinds": [1, 1 << 31]}]
        for columns in uneven:
            with pytest.raises(BadArgument):
                await client.append_many([b"a", b"b"], partition=0, **columns)
        with pytest.raises(BadArgument):
            await client.read(0, -1)
        assert fake.partitions[0].log == []

    with_client(test)
    for options in ({"feed": FeedMode.RECORDS}, {"view": View(), "feed": FeedMode.NONE}):
        with pytest.raises(BadArgument):
            Client("s0:1", **options)
    for servers in ("", "nonsense", "host:0", ":1", [","]):
        with pytest.raises(BadArgument):
            Client(servers)
    with pytest.raises(BadArgument, match="submit_seconds"):
        ClientSettings(submit_seconds=0)
    for wrong in ("x" * 129, "two\nlines", 7):
        with pytest.raises(BadArgument, match="instance must be a printable text"):
            ClientSettings(instance=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="exclusive must be True or False"):
        ClientSettings(exclusive=1)  # type: ignore[arg-type]
    assert ClientSettings().introduction.instance.endswith(f":{os.getpid()}")
    with pytest.raises(BadArgument, match="apply_batch_max must be an integer above 0"):
        ClientSettings(apply_batch_max=1.5)  # type: ignore[arg-type]


# -- patience


def test_what_was_never_sent_is_an_error_and_what_was_sent_is_unknown() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        partition = fake.partitions[0]
        partition.is_holding = True
        sent = asyncio.create_task(client.append(b"sent", partition=0))
        await until(lambda: partition.log)
        partition.stays_down = True
        partition.end_session(keep=0)
        await until(lambda: not client.status()[0].is_ready)
        unsent = asyncio.create_task(client.append(b"unsent", partition=0))
        many = asyncio.create_task(client.append_many([b"unsent", b"too"], partition=0))
        assert await sent == Unknown()
        with pytest.raises(NotSent, match="recovering") as caught:
            await unsent
        with pytest.raises(NotSent):
            await many
        assert caught.value.facts == {"partition": "0"}
        partition.stays_down = partition.is_holding = False
        partition.reopen()
        assert await client.append(b"later", partition=0) == Committed(1)
        assert client.status()[0].pending == 0

    fake = with_client(test)
    assert fake.partitions[0].payloads == [b"sent", b"later"]


def test_a_bundle_that_was_sent_in_part_is_told_what_is_known() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        outcomes = await client.append_many([b"x" * 900] * 5, partition=0)
        assert [outcomes[i] for i in range(5)] == [Unknown(), Unknown(), *[Rejected(Reason.NOT_IN_LOG)] * 3]
        fake.partitions[0].is_holding = False
        fake.partitions[0].commit()
        await client.flush()

    settings = ClientSettings(submit_seconds=5, messages_in_flight_max=1)
    fake = with_client(test, settings=settings)
    assert len(fake.partitions[0].log) == 2


@told(with_client, given=2, settings=ClientSettings(submit_seconds=5, pending_max=1, close_seconds=1))
async def test_waiting_for_a_place_has_a_deadline(client: Client, fake: FakeCluster) -> None:
    fake.partitions[0].is_holding = True
    tasks = [asyncio.create_task(client.append(data, partition=0)) for data in (b"a", b"b")]
    assert await tasks[0] == Unknown()
    with pytest.raises(NotSent, match="waits for 1 transactions to be decided"):
        await tasks[1]


def test_a_caller_that_goes_away_takes_its_transaction_along_if_it_was_not_sent() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        first = asyncio.create_task(client.append(b"first", partition=0))
        await until(lambda: fake.partitions[0].log)
        second = asyncio.create_task(client.append(b"second", partition=0))
        await asyncio.sleep(1)
        third = asyncio.create_task(client.append(b"third", partition=0))
        await asyncio.sleep(1)
        first.cancel()
        second.cancel()
        await asyncio.sleep(0)
        fake.partitions[0].is_holding = False
        fake.partitions[0].commit()
        assert await third == Committed(1)
        assert not client.has_pending

    fake = with_client(test, settings=ClientSettings(messages_in_flight_max=1))
    assert fake.partitions[0].payloads == [b"first", b"third"]


# -- servers come and go


def test_a_client_is_patient_through_a_fail_over_and_follows_the_hint() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"a", partition=0)
        partition = fake.partitions[0]
        partition.end_session(move=True)
        looks = len(fake.mount_requests)
        await until(lambda: not client.status()[0].is_ready)
        assert await client.append(b"b", partition=0) == Committed(1)
        assert len(fake.mount_requests) - looks < 30
        await until(lambda: len(view.payloads()) == 2)

    fake = with_client(test, view=view)
    assert fake.mount_requests[-1].generation == 2


def test_any_server_that_answers_is_enough_to_begin_with() -> None:
    fake = FakeCluster(servers=3)
    fake.down = {"s0:1", "s1:1"}
    fake.partitions[0].owner = 2

    async def work() -> None:
        async with Client("s0:1,s1:1,s2:1", connect=fake.connect, settings=SETTINGS) as client:
            assert client.cluster == "fake"
            assert await client.append(b"x", partition=0) == Committed(0)
            fake.down = {"s2:1", "s1:1"}
            fake.partitions[0].end_session(move=True)
            await until(lambda: not client.status()[0].is_ready)
            assert await client.append(b"y", partition=0) == Committed(1)
        assert fake.open_ports == 0

    run(work())


def test_no_server_at_all_is_said_with_the_addresses() -> None:
    fake = FakeCluster()
    fake.down = {"s0:1", "s1:1"}

    async def work() -> None:
        client = Client("s0:1,s1:1", connect=fake.connect, settings=SETTINGS)
        with pytest.raises(CannotConnect, match=r"20 seconds: no server answers \(s0:1 is down; s1:1"):
            await client.open()
        assert fake.open_ports == 0

    run(work())


def test_a_server_that_does_not_answer_is_passed_over() -> None:
    class Silent(FakeServer):
        async def _reach(self) -> None:
            await asyncio.sleep(1e6)

    fake = FakeCluster()

    def connect(address: str, key: UUID | None) -> FakeServer:
        return Silent(fake, address) if address == "silent:1" else FakeServer(fake, address)

    async def work() -> None:
        async with Client("silent:1,s0:1", connect=connect, settings=SETTINGS) as client:
            assert await client.append(b"x", partition=0) == Committed(0)

    run(work())


def test_a_server_of_another_cluster_is_an_error_and_not_a_choice() -> None:
    fake, other = FakeCluster(), FakeCluster(partitions=2)
    other.addresses = ["other:1"]
    other.partitions[1].owner = other.partitions[0].owner = 0

    def connect(address: str, key: UUID | None) -> FakeServer:
        return FakeServer(other if address == "other:1" else fake, address)

    async def work() -> None:
        async with Client("s0:1,other:1", connect=connect, settings=SETTINGS) as client:
            await client.append(b"x", partition=0)
            fake.down = {"s0:1", "s1:1"}
            fake.partitions[0].end_session()
            await until(lambda: not client.status()[0].is_ready)
            with pytest.raises(ForeignCluster, match="2 partitions"):
                await client.append(b"y", partition=0)

    run(work())


def test_a_refusal_that_would_come_again_stops_the_partition() -> None:
    view = View(start=10)

    async def test(client: Client, fake: FakeCluster) -> None:
        with pytest.raises(ClientAhead):
            await client.append(b"x", partition=0)
        (state,) = client.status()
        assert not state.is_ready
        assert "mark 10" in state.sentence
        assert len(fake.mount_requests) == 1

    with_client(test, view=view)


def test_damage_on_the_way_is_noticed_and_another_link_does_better() -> None:
    view = View()
    fake = FakeCluster()
    partition = fake.partitions[0]
    sound = partition.run
    damaged = 0

    def run_with_damage(first_id: int, last_id: int) -> Any:
        nonlocal damaged
        found = sound(first_id, last_id)
        if first_id == 3 and damaged < 3:
            damaged += 1
            raw = bytearray(found.data)
            raw[-7] ^= 1
            return type(found)(first_id, memoryview(bytes(raw)), found.bounds)
        return found

    partition.run = run_with_damage  # type: ignore[assignment, method-assign]

    async def test(client: Client, fake: FakeCluster) -> None:
        partition.write(*[b"%d" % i * 10 for i in range(9)])
        await until(lambda: len(view.payloads()) == 9)
        assert client.status()[0].mounts == 4

    with_client(test, cluster=fake, view=view)
    assert view.payloads() == partition.payloads


@told(with_client, given=2)
async def test_sequence_numbers_that_are_used_up_bring_a_new_client_id(client: Client, fake: FakeCluster) -> None:
    await client.append(b"first", partition=0)
    client._active_client(0).outbox.next_sequence = SEQUENCE_MAX - 3
    outcomes = await asyncio.gather(*[client.append(b"%d" % i, partition=0) for i in range(10)])
    assert sorted(outcome.id for outcome in outcomes if isinstance(outcome, Committed)) == list(range(1, 11))
    log = fake.partitions[0].log
    assert {entry.client for entry in log} == {1, 2}
    assert max(entry.sequence for entry in log) == SEQUENCE_MAX - 1
    assert len({(entry.client, entry.sequence) for entry in log}) == 11


@told(with_client, given=2, partitions=())
async def test_reading_needs_no_client_id(client: Client, fake: FakeCluster) -> None:
    """No server gives one out while the coordinator does not answer."""
    partition = fake.partitions[0]
    partition.write(*[b"%d" % i * 100 for i in range(30)])
    assert (fake.clients, client.partitions, await client.end_position(0)) == (0, (), 29)
    assert (await client.read(0, 7)).payload == b"7" * 100
    assert [found.id for found in await client.read_some(0, after=2, through=29)] == list(range(3, 30))
    with pytest.raises(BeyondLog):
        await client.read_some(0, after=2, through=30)
    assert await client.read_some(0, after=3, through=2) == []
    for after, through in ((-2, 2), (0, 1 << 64), (0, -2)):
        with pytest.raises(BadArgument):
            await client.read_some(0, after=after, through=through)
    assert fake.clients == 0
    await client.set_partitions([0])
    assert (fake.clients, client.client_id) == (1, 1)


@told(with_client, given=2, partitions=())
async def test_no_more_is_read_at_once_than_is_good_for_the_memory(
    client: Client, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_IDS_MAX", 10)
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    fake.run_records = 2
    fake.partitions[0].write(*[b"x" * (100 if i < 10 else 700) for i in range(30)])
    sizes: list[int] = []
    while (next_id := sum(sizes)) < 30:
        found = await client.read_some(0, after=next_id - 1, through=29)
        assert found[0].id == next_id
        sizes.append(len(found))
    assert sizes == [8, 4, *[2] * 9]


# -- partitions and the end


def test_partitions_can_be_changed_while_it_runs() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        assert list(client.partitions) == [1]
        with pytest.raises(NotMounted):
            await client.append(b"x", partition=0)
        fake.partitions[1].is_holding = True
        task = asyncio.create_task(client.append(b"drains", partition=1))
        await until(lambda: fake.partitions[1].log)
        change = asyncio.create_task(client.set_partitions([0, 2]))
        await asyncio.sleep(0.1)
        with pytest.raises(NotMounted):
            await client.append(b"late", partition=1)
        fake.partitions[1].commit()
        await change
        assert await task == Committed(0)
        assert list(client.partitions) == [0, 2]
        assert await client.append(b"y", partition=2) == Committed(0)
        await client.set_partitions("all")
        fake.partitions[1].is_holding = False
        assert await client.append(b"z", partition=1) == Committed(1)
        assert {entry.sequence for entry in fake.partitions[1].log} == {0, 1}  # they go on where they were
        with pytest.raises(BadArgument):
            await client.set_partitions([3])

    with_client(test, cluster=FakeCluster(partitions=3), view=view, partitions=[1])


def test_closing_waits_a_while_and_then_says_unknown() -> None:
    results: list[object] = []

    async def test(client: Client, fake: FakeCluster) -> None:
        for partition in fake.partitions:
            partition.is_holding = True
        tasks = [asyncio.create_task(client.append(b"x", partition=i)) for i in (0, 1)]
        waiting = asyncio.create_task(client.append(b"y", partition=1))
        await until(lambda: all(partition.log for partition in fake.partitions))
        asyncio.get_running_loop().call_later(1, fake.partitions[0].commit)
        await client.close()
        results.extend(await asyncio.gather(*tasks, waiting, return_exceptions=True))
        with pytest.raises(ClientClosed):
            await client.append(b"z", partition=0)
        with pytest.raises(ClientClosed):
            await client.end_position(0)

    settings = ClientSettings(close_seconds=3, pending_max=1)
    with_client(test, cluster=FakeCluster(partitions=2), settings=settings)
    assert results[:2] == [Committed(0), Unknown()]
    assert isinstance(results[2], ClientClosed)


def test_closing_does_not_wait_for_ever_for_a_view() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.hold = asyncio.Event()
        fake.partitions[0].write(b"a")
        await until(lambda: client.status()[0].received == 0)
        await client.close()
        assert view.seen == {}

    with_client(test, view=view)


def test_closing_may_be_cut_short() -> None:
    results: list[object] = []

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].is_holding = True
        task = asyncio.create_task(client.append(b"x", partition=0))
        await until(lambda: fake.partitions[0].log)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.close()
        results.append(await task)
        await asyncio.sleep(10)

    with_client(test, view=View(), settings=ClientSettings(close_seconds=5))
    assert results == [Unknown()]


def test_partitions_share_connections_and_those_to_servers_that_are_gone_are_closed() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await asyncio.gather(*[client.append(b"x", partition=i) for i in range(9)])
        assert fake.open_ports == 3
        fake.addresses[0] = "moved:1"
        for number in (0, 3, 6):
            fake.partitions[number].end_session()
        await until(lambda: not client.status()[0].is_ready)
        assert await client.append(b"x", partition=0) == Committed(1)
        await client.flush()
        await until(lambda: all(state.is_ready for state in client.status()))
        assert fake.open_ports <= 4  # the first address was given, and stays known

    with_client(test, cluster=FakeCluster(partitions=9, servers=3))


def test_a_client_that_is_not_open_says_so() -> None:
    async def work() -> None:
        client = Client("s0:1", connect=FakeCluster().connect)
        with pytest.raises(ClientClosed):
            await client.append(b"x", partition=0)
        await client.close()

    run(work())


@told(with_client, given=2)
async def test_flush_waits_for_all_that_was_submitted_before(client: Client, fake: FakeCluster) -> None:
    partition = fake.partitions[0]
    partition.is_holding = True
    tasks = [asyncio.create_task(client.append(b"x", partition=0)) for _ in range(5)]
    await until(lambda: partition.log)
    assert client.has_pending
    with pytest.raises(CannotConnect, match="partitions 0 are undecided"):
        await client.flush(timeout=1)
    flush = asyncio.create_task(client.flush())
    await asyncio.sleep(1)
    assert not flush.done()
    partition.commit()
    await flush
    assert all(task.done() for task in tasks)
    assert not client.has_pending
    await client.flush()


@told(with_client, given=2, settings=ClientSettings(pending_max=2, submit_seconds=20))
async def test_flush_waits_for_what_waits_for_a_place(client: Client, fake: FakeCluster) -> None:
    partition = fake.partitions[0]
    partition.is_holding = True
    tasks = [asyncio.create_task(client.append(b"x", partition=0)) for _ in range(5)]
    await until(lambda: partition.log)
    partition.is_holding = False
    partition.commit()
    await client.flush()
    assert all(task.done() for task in tasks)
    assert not client.has_pending


def test_flush_waits_for_an_append_that_reads_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        may_answer, find_time = asyncio.Event(), FakeServer.find_time

        async def slow(port: FakeServer, partition: int, time: int) -> Position:
            await may_answer.wait()
            return await find_time(port, partition, time)

        monkeypatch.setattr(FakeServer, "find_time", slow)
        appending = asyncio.create_task(client.append(b"x", partition=0, idempotency_key="k"))
        await until(lambda: client.has_pending)
        flush = asyncio.create_task(client.flush())
        await asyncio.sleep(1)
        assert not flush.done()
        may_answer.set()
        await flush
        assert appending.done()

    with_client(test, cluster=FakeCluster(format=1))


def test_taking_a_partition_away_may_be_given_up_and_it_may_come_back() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"1", partition=0)
        await until(lambda: len(view.payloads()) == 1)
        view.hold = asyncio.Event()
        await client.append(b"2", partition=0)  # the view is at work on it
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.set_partitions([])
        hold, view.hold = view.hold, None
        hold.set()
        await client.set_partitions([0])
        assert await client.append(b"3", partition=0) == Committed(2)
        await until(lambda: len(view.payloads()) == 3)
        assert view.payloads() == [b"1", b"2", b"3"]

    with_client(test, view=view)


def test_whoever_reads_while_the_client_is_closed_is_told_so() -> None:
    fake = FakeCluster()

    async def work() -> None:
        client = Client("s0:1", connect=fake.connect, settings=SETTINGS)
        await client.open()
        place = client._routes._places[0]
        client._routes.forget(0, place)
        reading = asyncio.create_task(client.end_position(0))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ClientClosed):
            await reading

    run(work())


# -- the partition that follows from locks


class Move(Command):
    """Says its locks at first, or as it is built."""

    def __init__(self, *locks: Lock, built: Sequence[Lock] | None = None) -> None:
        self.locks, self._built = locks, built

    def build(self, builder: Builder) -> bool:
        builder.payload = b"moved"
        if self._built is not None:
            builder.locks = self._built
        return True


def test_locks_of_one_name_meet_in_one_partition() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        home = fake.partitions[client.partition_of("account")]
        one, other, rate = append_lock("account", 7), append_lock("account", "savings"), read_lock("rate")
        await client.append(b"one", locks=[one])
        await client.append_many([b"two", b"three"], locks=[[one], [other]])
        await client.submit(Move(one, other))
        await client.submit(Move(one, built=[other]))
        assert len(home.log) == 5
        for locks in ([one, rate], []):
            with pytest.raises(BadArgument, match=r"give no default key|has no partition, key or locks"):
                await client.append(b"x", locks=locks)
            with pytest.raises(BadArgument, match=r"give no default key|has no partition, key or locks"):
                await client.submit(Move(*locks))
        with pytest.raises(BadArgument, match="account, chose the partition"):
            await client.submit(Move(one, built=[one, rate]))
        assert len(home.log) == 5
        together = Move(one, built=[one, rate])
        together.key = "account"
        await client.submit(together)
        await client.append(b"x", key="account", locks=[one, rate])
        assert len(home.log) == 7
        for _ in range(2):
            await client.submit(Move(one), idempotency_key="moved")
            await client.append(b"x", locks=[other], idempotency_key="appended")
        assert len(home.log) == 9

    with_client(test, cluster=FakeCluster(partitions=5, format=1), view=View())


def test_a_uuid_is_a_key_as_its_text_is() -> None:
    uuid = UUID(int=7)
    assert partition_by_hash(uuid, 1000) == partition_by_hash(str(uuid), 1000)

"""A client whose log an operator ends below what it has seen: what it goes over to, what it refuses, and what it tells."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from tests.tiers import tiers
from tests.unit.fake_server import FakeCluster, FakePartition
from waltzd import (
    Client,
    ClientSettings,
    Committed,
    Outcomes,
    Position,
    PositionFile,
    Rejected,
    Token,
    Transaction,
    Unknown,
)
from waltzd.client.keys import now_us
from waltzd.client.mount import Mount, MountState
from waltzd.client.outbox import Outbox
from waltzd.client.pending import Request
from waltzd.client.view import Builder, Command
from waltzd.errors import BadArgument, NotMounted, OtherTimeline, WaltzError
from waltzd.format.record import HEAD
from waltzd.protocol.batches import FeedMode, Limits, Mounted, MountRequest, PartitionLocation, Registration
from waltzd.protocol.locks import Reason, write_lock
from waltzd.protocol.positions import lineage_of_text, lineage_text
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage

SETTINGS = ClientSettings(submit_seconds=5.0, call_seconds=2.0, close_seconds=1.0)
SECOND = UUID(int=2)


class Listing:
    """A view that is the list of what it was given."""

    def __init__(self, *, forgets_timelines: bool = False) -> None:
        self.payloads: list[bytes] = []
        self.at = Position(-1)
        self.forgets = forgets_timelines

    def position(self, partition: int) -> int:
        return int(self.at) if self.forgets else self.at

    def apply(self, transaction: Transaction) -> None:
        assert transaction.id == len(self.payloads)
        self.payloads.append(transaction.payload)
        self.at = transaction.position

    def mend(self, lineage: Lineage) -> None:
        """Undo what is not in the log. A view that keeps no timelines can only go back to the first one."""
        kept = [lineage.shared_to(timeline) for timeline in ({FIRST} if self.forgets else set()) | {self.at.timeline}]
        self.cut(min([self.at, *(one for one in kept if one is not None)]))

    def cut(self, fork: int) -> None:
        del self.payloads[fork + 1 :]
        self.at = Position(fork, self.at.timeline)


class Held(Listing):
    """A view that is busy with id 5 while more is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = asyncio.Event()
        self.asked = asyncio.Event()

    def position(self, partition: int) -> int:
        self.asked.set()
        return super().position(partition)

    async def apply(self, transaction: Transaction) -> None:  # type: ignore[override]
        if transaction.id == 5:
            await self.may_go_on.wait()
        super().apply(transaction)


def client_of(fake: FakeCluster, view: Listing | None = None) -> Client:
    return Client(fake.addresses, connect=fake.connect, view=view, settings=SETTINGS)


async def stopped(client: Client) -> WaltzError:
    with pytest.raises(OtherTimeline) as found:
        await client.wait_stopped(timeout=5)
    return found.value


async def commit(client: Client, payload: bytes) -> Committed:
    """Append it again while a fail-over loses it."""
    while not isinstance(outcome := await client.append(payload, partition=0), Committed):
        assert outcome == Rejected(Reason.NOT_IN_LOG), client._clients[0].mount.story
    return outcome


def contents(partition: FakePartition) -> list[bytes]:
    return partition.payloads[: partition.committed + 1]


def test_a_position_is_an_integer_that_keeps_its_timeline() -> None:
    one = Position(19, SECOND)
    assert (one, f"{one}", str(one), one + 1) == (19, "19", "19", 20)
    assert [copy(one).timeline, deepcopy([one])[0].timeline, Position(one).timeline] == [SECOND] * 3
    for position in (one, Position(-1), Position(0), Position(1 << 62, UUID(int=3))):
        assert (Position.parse(position.text), Position.parse(position.text).timeline) == (position, position.timeline)
    for text in ("", "-2", "x", "19@", "19@2", "19@" + SECOND.hex, " 19", "19\n"):
        with pytest.raises(BadArgument):
            Position.parse(text)
    assert Token.parse(str(Token(3, 17, SECOND))) == Token(3, 17, SECOND)
    assert (str(Token(3, 17)), Token.parse("3-17").timeline) == ("3-17", FIRST)


def test_a_lineage_is_one_line_of_text() -> None:
    lineage = NEVER_FORKED
    assert (lineage_text(lineage), lineage_of_text(None), lineage_of_text("")) == (None, NEVER_FORKED, NEVER_FORKED)
    for number in range(3):
        lineage = lineage.forked(
            identity=UUID(int=number + 1), fork=9 - number, session=number, cause="c", began="b", who="w"
        )
        assert lineage_of_text(lineage_text(lineage)) == lineage


@pytest.mark.parametrize("forgets", [False, True])
def test_a_view_below_the_fork_goes_over_by_itself_and_above_it_the_partition_stops(forgets: bool) -> None:
    async def story() -> None:
        fake, view = FakeCluster(), Listing(forgets_timelines=forgets)
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            await client.wait_caught_up()
            partition.fork(9)
            partition.write(b"new")
            await client.wait_caught_up()
            assert (view.payloads, view.at.timeline) == (contents(partition), partition.lineage.current)
            assert client.position(0).timeline == partition.lineage.current
            partition.fork(5)
            error = await stopped(client)
            assert error.facts == {
                "partition": "0",
                "fork": "5",
                "position": "10",
                "timeline": str(partition.lineage.current),
            }
            assert client.status()[0].stopped is not None
            mounts = len(fake.mount_requests)
            await asyncio.sleep(0.2)
            assert len(fake.mount_requests) == mounts, "no endless retry"
            await client.set_partitions([])
            await client.set_partitions([0])
            await stopped(client)
            view.cut(5)
            await client.set_partitions([])
            await client.set_partitions([0])
            partition.write(b"newer")
            await client.wait_caught_up()
            assert view.payloads == contents(partition)

    asyncio.run(story())


def test_who_waits_for_the_end_of_the_log_is_not_cancelled_by_a_fork() -> None:
    """The view goes on below what it was fed, and nobody has cancelled the caller."""

    async def story() -> None:
        fake, view = FakeCluster(), Held()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            question, asked, answer = client._clients[0]._end, asyncio.Event(), asyncio.Event()
            ask = question._ask

            async def ask_late() -> int:
                asked.set()
                await answer.wait()
                return await ask()

            question._ask = ask_late
            waiting = asyncio.create_task(client.wait_caught_up())
            async with asyncio.timeout(5):
                await asked.wait()
                while len(view.payloads) < 5 or client.status()[0].received < 9:
                    await asyncio.sleep(0.01)
                partition.fork(6)
                partition.write(b"new")
                await asyncio.sleep(0.1)
                view.may_go_on.set()
                while view.payloads != contents(partition):
                    await asyncio.sleep(0.01)
            assert not waiting.done()
            answer.set()
            await waiting

    asyncio.run(story())


@pytest.mark.parametrize("turns", range(4))
def test_a_partition_that_is_removed_while_it_goes_below_a_fork_leaves_nobody_waiting(turns: int) -> None:
    async def story() -> None:
        fake, view = FakeCluster(), Held()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            async with asyncio.timeout(5):
                while len(view.payloads) < 5 or client.status()[0].received < 9:
                    await asyncio.sleep(0.01)
                one = client._clients[0]
                view.asked.clear()
                partition.fork(6)
                await asyncio.sleep(0.1)
                view.may_go_on.set()
                await view.asked.wait()
                for _ in range(turns):
                    await asyncio.sleep(0)
                waiting = asyncio.create_task(one.ready_epoch(asyncio.get_running_loop().time() + 60))
                await asyncio.sleep(0)
                await client.set_partitions([])
                assert one.mount.state is MountState.IDLE
                (told,) = await asyncio.gather(waiting, return_exceptions=True)
                assert isinstance(told, NotMounted | int)
                await client.set_partitions([0])
                partition.write(b"new")
                await client.wait_caught_up()
            assert view.payloads == contents(partition)

    asyncio.run(story())


class Slow(Command):
    """Decides from the view as it was when the build began."""

    key = "account"
    locks = (write_lock("account"),)

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def build(self, builder: Builder) -> bool:
        self.begun.set()
        await self.may_end.wait()
        builder.payload = b"from what is gone"
        return True


@pytest.mark.parametrize(("fork", "count"), [(5, 4), (5, 1), (9, 0)])
def test_a_build_that_began_above_a_fork_is_not_sent_below_it(fork: int, count: int) -> None:
    """Its position is an id of the log before, and names other transactions now."""

    async def story() -> None:
        fake, view, command = FakeCluster(), Listing(), Slow()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            await client.wait_caught_up()
            submitting = asyncio.create_task(client.submit(command))
            await command.begun.wait()
            partition.fork(fork)
            async with client_of(fake) as other:
                for _ in range(count):
                    await other.append(b"new", partition=0, locks=[write_lock("account")], position=partition.committed)
            if fork < 9:
                await stopped(client)
            await client.set_partitions([])
            view.mend(partition.lineage)
            await client.set_partitions([0])
            await client.wait_caught_up()
            command.may_end.set()
            if fork == 9:
                assert await submitting == Committed(10, timeline=partition.lineage.current)
            else:
                with pytest.raises(OtherTimeline, match="stands at id 9"):
                    await submitting
                assert contents(partition)[fork + 1 :] == [b"new"] * count

    asyncio.run(story())


def test_an_append_with_a_key_keeps_the_timeline_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        fake, view = FakeCluster(format=1), Listing()
        fake.now = now_us()
        partition, asked, answer = fake.partitions[0], asyncio.Event(), asyncio.Event()
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            await client.wait_caught_up()
            ask = client._reader.position_at

            async def ask_late(*arguments: Any, **options: Any) -> Position:
                asked.set()
                await answer.wait()
                return await ask(*arguments, **options)

            monkeypatch.setattr(client._reader, "position_at", ask_late)
            locks = [write_lock("account")]
            appending = asyncio.create_task(client.append(b"x", partition=0, locks=locks, idempotency_key="k"))
            await asked.wait()
            partition.fork(5)
            async with client_of(fake) as other:
                for _ in range(4):
                    await other.append(b"new", partition=0, locks=locks, position=partition.committed)
            await stopped(client)
            await client.set_partitions([])
            view.mend(partition.lineage)
            await client.set_partitions([0])
            await client.wait_caught_up()
            answer.set()
            with pytest.raises(OtherTimeline, match="stands at id 9"):
                await appending
            assert contents(partition)[6:] == [b"new"] * 4

    asyncio.run(story())


@pytest.mark.parametrize("call", ["append", "append_many"])
def test_an_append_that_was_not_sent_keeps_the_timeline_of_its_call(call: str) -> None:
    """Its position is that of the view at the call."""

    async def story() -> None:
        fake, view, locks = FakeCluster(), Listing(), [write_lock("account")]
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            await client.wait_caught_up()
            if call == "append":
                appending: Coroutine[Any, Any, object] = client.append(b"x", partition=0, locks=locks)
            else:
                appending = client.append_many([b"x"], partition=0, locks=[locks])
            partition.fork(5)
            async with client_of(fake) as other:
                for _ in range(4):
                    await other.append(b"new", partition=0, locks=locks, position=partition.committed)
            await stopped(client)
            await client.set_partitions([])
            view.mend(partition.lineage)
            await client.set_partitions([0])
            await client.wait_caught_up()
            with pytest.raises(OtherTimeline, match="stands at id 9"):
                await appending
            assert contents(partition)[6:] == [b"new"] * 4

    asyncio.run(story())


def test_a_view_that_another_process_has_taken_below_the_fork_and_on_goes_on() -> None:
    """It is on the log as it is now, although this client was fed what is gone."""

    class Shared(Held):
        async def apply(self, transaction: Transaction) -> None:  # type: ignore[override]
            if transaction.id == 5:
                await self.may_go_on.wait()
            if transaction.id >= len(self.payloads):
                await super().apply(transaction)

    async def story() -> None:
        fake, view, told = FakeCluster(), Shared(), list[int]()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            async with asyncio.timeout(5):
                while len(view.payloads) < 5 or client.status()[0].received < 9:
                    await asyncio.sleep(0.01)
            for id in (6, 7):
                client._clients[0].announce(id, told.append)
            partition.fork(6)
            partition.write(b"new", b"newer")
            view.payloads = contents(partition)
            view.at = Position(8, partition.lineage.current)
            await asyncio.sleep(0.1)
            view.may_go_on.set()
            partition.write(b"newest")
            await client.wait_caught_up()
            assert view.payloads == contents(partition)
            assert told == [6], "7 is another transaction now"

    asyncio.run(story())


def test_who_waits_for_a_timeline_that_the_mount_does_not_know_yet_waits_for_the_next_mount() -> None:
    """The owner of the mount was replaced, and the link to it is not lost yet; others have asked its successor."""

    async def story() -> None:
        fake, view = FakeCluster(), Listing()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake, view) as client:
            await client.wait_caught_up()
            timeline = UUID(int=1000)
            partition.lineage = partition.lineage.forked(
                identity=timeline, fork=9, session=partition.session, cause="a test", began="", who=""
            )
            waits = [
                asyncio.create_task(wait) for wait in (client.wait_caught_up(), client.wait_applied(Token(0, 4, timeline)))
            ]
            await asyncio.sleep(0.1)
            assert not any(wait.done() for wait in waits), waits
            partition.end_session(silently=True)
            await asyncio.gather(*waits)
            with pytest.raises(OtherTimeline):
                await client.wait_applied(Token(0, 4, SECOND))

    asyncio.run(story())


def test_a_view_that_takes_longer_than_a_close_goes_on_below_the_fork() -> None:
    """It is at the fork when it has applied what it was busy with. The partition was stopped for good before."""

    async def story() -> None:
        fake, view = FakeCluster(), Held()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(7)])
        settings = replace(SETTINGS, close_seconds=0.05)
        async with Client(fake.addresses, connect=fake.connect, view=view, settings=settings) as client:
            async with asyncio.timeout(5):
                while len(view.payloads) < 5 or client.status()[0].received < 6:
                    await asyncio.sleep(0.01)
            partition.fork(5)
            partition.write(b"new")
            await client.wait_stopped(timeout=0.5)
            view.may_go_on.set()
            await client.wait_caught_up()
            assert view.payloads == contents(partition)

    asyncio.run(story())


def test_a_client_without_a_view_stops_where_it_knew_of_more() -> None:
    async def story() -> None:
        fake = FakeCluster()
        partition = fake.partitions[0]
        async with client_of(fake) as client:
            for _ in range(4):
                await client.append(b"x", partition=0)
            partition.fork(3)
            outcome = await commit(client, b"y")
            assert (outcome.id, outcome.timeline) == (4, partition.lineage.current)
            assert outcome.token == Token(0, 4, partition.lineage.current)
            partition.fork(1)
            await stopped(client)
            with pytest.raises(OtherTimeline):
                await client.append(b"z", partition=0)
            await client.set_partitions([])
            await client.set_partitions([0])
            await commit(client, b"z")
            assert contents(partition) == [b"x", b"x", b"z"]

    asyncio.run(story())


def test_a_position_a_token_a_feed_and_a_scan_of_what_was_given_up_are_refused() -> None:
    async def story() -> None:
        fake, view = FakeCluster(format=1), Listing()
        partition = fake.partitions[0]
        partition.write(*[b"old %d" % number for number in range(10)])
        async with client_of(fake) as client:
            old = await client.end_position(0)
            assert [(one.position, one.timeline) async for one in client.scan(0, after=8)] == [(9, FIRST)]
            partition.fork(5)
            partition.write(*[b"new %d" % number for number in range(10)])
            async with client_of(fake, view) as viewing:
                await viewing.wait_caught_up()
                await viewing.wait_applied(Token(0, 5))
                for token in (Token(0, 6), Token(0, 6, SECOND)):
                    with pytest.raises(OtherTimeline):
                        await viewing.wait_applied(token)
                await viewing.wait_applied(Token(0, 15, partition.lineage.current))
            await stopped(client)
            await again(client)
            end = await client.end_position(0)
            assert (end, end.timeline) == (15, partition.lineage.current)
            with pytest.raises(OtherTimeline):
                await client.append(b"x", partition=0, position=old)
            assert isinstance(await client.append(b"x", partition=0, position=end), Committed)
            for position in (old, 9, Position(9, SECOND)):
                with pytest.raises(OtherTimeline):
                    await anext(client.scan(0, after=position))
                with pytest.raises(OtherTimeline):
                    await anext(client.feed(0, after=position))
            for position in (5, Position(5, FIRST), Position(5, end.timeline)):
                found = [one.position async for one in client.scan(0, after=position)]
                assert (found, {one.timeline for one in found}) == (list(range(6, 17)), {end.timeline})
            assert (await anext(client.feed(0, after=Position(12, end.timeline)))).payload == b"new 7"

    asyncio.run(story())


def test_what_is_read_up_to_the_end_or_from_a_time_on_has_the_timeline_of_the_log() -> None:
    async def story() -> None:
        fake = FakeCluster(format=1)
        partition = fake.partitions[0]
        partition.write(*[b"old"] * 10)
        partition.fork(5)
        partition.write(*[b"new"] * 10)
        async with client_of(fake) as client:
            for found in (await client.read_some(0, after=6), await client.read_some(0, since=0, before=1 << 60)):
                assert found[-1].position.timeline == partition.lineage.current
                ids = [one.id async for one in client.scan(0, after=found[-2].position)]
                assert ids == [found[-1].id]

    asyncio.run(story())


def test_a_key_that_was_given_up_is_not_found_again() -> None:
    async def story() -> None:
        fake = FakeCluster(format=1)
        fake.now = now_us()
        partition = fake.partitions[0]
        async with client_of(fake) as client:
            first = await client.append(b"a", partition=0, idempotency_key="k")
            assert await client.append(b"a", partition=0, idempotency_key="k") == first
            assert await client.append(b"a", partition=0, idempotency_key="k", position=0) == first
            partition.fork(-1)
            await stopped(client)
            await client.set_partitions([])
            await client.set_partitions([0])
            partition.write(*[b"other"] * 3)
            again = await client.append(b"a", partition=0, idempotency_key="k")
            assert isinstance(again, Committed)
            assert (again.id, contents(partition)) == (3, [b"other"] * 3 + [b"a"])

    asyncio.run(story())


def test_a_file_keeps_timelines_and_reads_what_was_written_before(tmp_path: Any) -> None:
    path, cluster = tmp_path / "positions", UUID(int=1)
    file = PositionFile(path, cluster)
    file.save(0, 17)
    before = path.read_bytes()
    assert b'"0": 17' in before, "as it was before there were timelines"
    file.save(1, Position(4, SECOND))
    again = PositionFile(path, cluster)
    assert [(one, one.timeline) for one in (again.position(0), again.position(1))] == [(17, FIRST), (4, SECOND)]
    with pytest.raises(BadArgument):
        again.save(0, Position(5, SECOND))
    again.reset(0, Position(5, SECOND))
    assert PositionFile(path, cluster).position(0).timeline == SECOND


def mount_of(mark: int = 9) -> Mount:
    made = Mount(0, FeedMode.RECORDS, feed_bytes_max=1000, outbox=Outbox(messages_max=4, bytes_max=10_000))
    made.registered(Registration(5, b"token"))
    made.activated(mark)
    return made


def begin(made: Mount, lineage: Lineage = NEVER_FORKED, barrier: int = 9) -> MountRequest:
    if made.state is MountState.LOCATING:
        made.located(PartitionLocation(generation=4, server="s", address="s:1"))
    asked = made.request(UUID(int=3))
    limits = Limits(payload_bytes_max=1000, locks_max=3, frame_bytes_max=500)
    made.answered(Mounted(session=1, barrier=barrier, limits=limits, timelines=lineage.later))
    made.check()
    return asked


def handed(made: Mount, mark: int) -> list[Any]:
    """Hand in one request; what it is told."""
    told: list[Any] = []

    class Waiter:
        def done(self) -> bool:
            return bool(told)

        def cancelled(self) -> bool:
            return False

        def set_result(self, outcome: Any, /) -> None:
            told.append(outcome)

        set_exception = set_result

    made.outbox.add(Request(mark, b"x", 0, (), (), Waiter(), 1.0))
    return told


def forked(fork: int) -> Lineage:
    return NEVER_FORKED.forked(identity=SECOND, fork=fork, session=1, cause="c", began="b", who="w")


def test_a_client_that_begins_anew_forgets_which_timelines_there_were() -> None:
    """Else a position above the fork, which the owner has just reported, is refused until the log is mounted."""
    made = mount_of()
    begin(made)
    made.ended()
    made.forget()
    made.activated(Position(9, SECOND))
    assert (made.timeline, made.lineage) == (SECOND, None)
    begin(made, forked(5))
    assert made.lineage == forked(5)


def test_a_client_looks_itself_where_the_server_does_not() -> None:
    with pytest.raises(OtherTimeline):
        begin(mount_of(), forked(8))
    made = mount_of()
    begin(made, forked(9))
    made.link_lost()
    assert begin(made, forked(9)).timeline == SECOND
    made.link_lost()
    with pytest.raises(OtherTimeline, match="never had"):
        begin(made, NEVER_FORKED)


def test_what_is_undecided_is_asked_of_the_log_from_the_fork_on() -> None:
    made = mount_of()
    begin(made)
    told = handed(made, 9)
    made.take()
    made.link_lost()
    made.located(PartitionLocation(generation=4, server="s", address="s:1"))
    asked = made.request(UUID(int=3))
    assert (asked.asks, asked.mark, asked.timeline) == (True, 9, None)
    limits = Limits(payload_bytes_max=1000, locks_max=3, frame_bytes_max=500)
    made.answered(Mounted(session=1, barrier=6, limits=limits, timelines=forked(4).later))
    made.check()
    heads = np.zeros(2, HEAD)
    heads["id"], heads["client"] = [5, 6], 99
    made.told(heads)
    assert told == [Rejected(Reason.NOT_IN_LOG)]


def test_what_waits_and_relies_on_what_was_given_up_is_lost() -> None:
    made = mount_of(4)
    told, kept = handed(made, 7), handed(made, 4)
    begin(made, forked(4))
    assert (told, kept) == ([Rejected(Reason.NOT_IN_LOG)], [])
    assert made.outbox.rows == 1


class Forker:
    """Appends, reads and forks by chance; keeps every log that there was, by timeline."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.fake = FakeCluster(format=seed % 2, fault=self.fault, choose=lambda count: self.chance.randrange(count + 1))
        self.partition = self.fake.partitions[0]
        self.rate = self.chance.choice((0.0, 0.02, 0.1))
        self.told: list[tuple[bytes, Any]] = []
        self.count = 0

    def fault(self, moment: str) -> str | None:
        faults = ("drop", "drop after", "late", "end", "crash", "move")
        return self.chance.choice(faults) if self.chance.random() < self.rate else None

    @property
    def lineage(self) -> Lineage:
        return self.partition.lineage

    def payload(self) -> bytes:
        self.count += 1
        return b"%d" % self.count

    async def one(self, client: Client) -> None:
        payload = self.payload()
        try:
            self.told.append((payload, await client.append(payload, partition=0)))
        except WaltzError:
            assert payload not in self.partition.payloads, "an error says that nothing was sent"

    async def many(self, client: Client) -> None:
        payloads = [self.payload() for _ in range(self.chance.randrange(1, 12))]
        try:
            outcomes: Outcomes = await client.append_many(payloads, partition=0)
        except WaltzError:
            assert not {*payloads} & {*self.partition.payloads}
        else:
            self.told += [(payload, outcomes[row]) for row, payload in enumerate(payloads)]

    async def group(self, client: Client) -> None:
        if self.partition.format == 0:
            return
        payloads = [self.payload() for _ in range(self.chance.randrange(1, 5))]
        try:
            outcome = await client.append_atomic(payloads, partition=0)
        except WaltzError:
            assert not {*payloads} & {*self.partition.payloads}
            return
        for row, payload in enumerate(payloads):
            told = Committed(outcome.id + row, timeline=outcome.timeline) if isinstance(outcome, Committed) else outcome
            self.told.append((payload, told))

    def fork(self) -> None:
        mark = self.partition.whole(self.chance.randint(-1, self.partition.committed))
        if self.partition.is_ready and self.lineage.number < 5:
            self.partition.fork(mark)

    def check(self) -> None:
        log = self.partition.payloads
        for payload, outcome in self.told:
            match outcome:
                case Committed() if self.lineage.covers(outcome.timeline, outcome.id):
                    assert log[outcome.id] == payload, (payload, outcome)
                case Committed() | Rejected(Reason.NOT_IN_LOG):
                    assert payload not in log, (payload, outcome)
                case Unknown():
                    pass
                case _:
                    raise AssertionError(outcome)
        assert len({*log}) == len(log), "nothing is sent twice"


async def again(client: Client) -> None:
    await client.set_partitions([])
    await client.set_partitions([0])


@pytest.mark.parametrize("seed", tiers(range(40), quick=4, short=20))
def test_whatever_forks_when_the_view_is_the_log_and_outcomes_are_facts(seed: int) -> None:
    async def story() -> None:
        run, view = Forker(seed), Listing(forgets_timelines=seed % 3 == 0)
        async with client_of(run.fake, view) as client, client_of(run.fake) as writer:
            tasks: list[asyncio.Task[None]] = []
            for _ in range(60):
                for each in (client, writer):
                    state = each.status()[0]
                    if state.stopped is not None:
                        assert isinstance(state.stopped, OtherTimeline), state.stopped
                        if each is client:
                            is_left = view.forgets or not run.lineage.covers(view.at.timeline, view.at)
                            assert is_left, "below the fork it goes on by itself"
                            view.mend(run.lineage)
                        await again(each)
                work = run.chance.choice((run.one, run.many, run.group))
                tasks.append(asyncio.create_task(work(run.chance.choice((client, writer)))))
                if run.chance.random() < 0.08:
                    run.fork()
                await asyncio.sleep(run.chance.choice((0, 0.001, 0.005)))
            run.rate = 0.0
            await asyncio.gather(*tasks)
            while True:
                try:
                    await client.wait_caught_up()
                    break
                except OtherTimeline:
                    view.mend(run.lineage)
                    await again(client)
            assert view.payloads == contents(run.partition)
            run.check()

    asyncio.run(asyncio.wait_for(story(), 60))

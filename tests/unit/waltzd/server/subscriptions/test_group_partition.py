"""Groups at work on a real log, with members that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from tests.unit.waltzd.server.subscriptions.room import Hand, Room
from waltzd.client import client
from waltzd.client.client import Client
from waltzd.cluster.groups import GroupMeta, GroupStart
from waltzd.errors import (
    BadArgument,
    Displaced,
    GroupBeyondLog,
    GroupExists,
    GroupLogAway,
    NoSuchChannel,
    NoSuchGroup,
    NoSuchPartition,
    NotGranted,
    NotInGroup,
    NotReady,
    NotSent,
    OnlyInArchive,
    WaltzError,
)
from waltzd.errors.operations import BadFrame, ChangedMeanwhile, GroupStateDamaged, SessionEnded
from waltzd.format.record import Run
from waltzd.protocol.batches import PROBE_KIND
from waltzd.protocol.channels import Parts
from waltzd.protocol.groups import (
    EPOCHS_OF_A_RESET,
    RESET_DRAWS,
    AckKind,
    Change,
    Changed,
    Exhausted,
    GroupTotals,
    JoinRequest,
    KeyedBy,
    Mode,
    ParkedTransaction,
    reset_epoch,
)
from waltzd.protocol.locks import AppendOutcome, Committed, Lock, Unknown, append_lock, write_lock
from waltzd.protocol.policy import Amount, Quotas
from waltzd.protocol.positions import Position
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.clients.registry import QuotaUsage, principal_of
from waltzd.server.groups import state_log, state_writer
from waltzd.server.groups.delivery_tracker import DeliveryTracker
from waltzd.server.groups.state import GroupState, Parked
from waltzd.server.groups.state_log import WHOLE_GROUP, Key, group_entry, lock_of, state_entry
from waltzd.server.subscriptions import group_partition
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.server.subscriptions.group_log import GroupLog
from waltzd.server.subscriptions.group_partition import GroupPartition
from waltzd.testing.cluster import LocalServer


def test_members_share_a_queue_and_what_is_acknowledged_comes_never_again() -> None:
    async def story(room: Room) -> None:
        await room.append(10)
        await room.make("mailer")
        async with room.member("mailer", "a", room=2) as a, room.member("mailer", "b", room=2) as b:
            assert {one.id for one in [*await a.take(2), *await b.take(2)]} == {0, 1, 2, 3}
            for hand in (a, b):
                assert [one.payload for one in hand.given] == [b"%d" % id for id in hand.ids]
                answer = await hand.acknowledge(*hand.ids)
                assert (answer.taken, answer.late, answer.unknown) == (2, 0, 0)
            assert {one.id for one in [*await a.take(2), *await b.take(2)]} == {4, 5, 6, 7}
            again = await a.acknowledge(0, 1, 2, 3)
            assert (again.taken, again.done) == (0, 4)
            await a.kept(again.number)
            await b.kept(1)
        await room.cluster.kill_owner()
        async with room.member("mailer", "c", room=100) as c:
            assert {one.id for one in await c.take(6)} == {4, 5, 6, 7, 8, 9}
            assert c.epoch > a.epoch

    Room.run(story)


def test_a_member_that_goes_in_order_has_failed_in_nothing_and_one_that_breaks_off_has() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        await room.make("mailer")
        async with room.member("mailer", "a") as a:
            assert [one.attempt for one in await a.take(2)] == [1, 1]
            await a.leave()
            async with room.member("mailer", "b") as b:
                assert [one.attempt for one in await b.take(2)] == [1, 1]
        async with room.member("mailer", "c") as c:
            assert [one.attempt for one in await c.take(2)] == [2, 2]

    Room.run(story)


def test_a_member_that_goes_is_told_what_is_kept_and_then_its_stream_ends() -> None:
    async def story(room: Room) -> None:
        await room.make("g")
        await room.append(3)
        async with room.member("g", "a") as hand:
            await hand.take(3)
            await hand.acknowledge(0, 1)
            await hand.leave()
            await hand.ended()
            assert hand.kept_number == 1
            assert hand.error is None

    Room.run(story)


def test_a_newer_stream_of_a_member_takes_the_place_of_the_older() -> None:
    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer")
        async with room.member("mailer", "a") as old:
            await old.take(1)
            async with room.member("mailer", "a") as new:
                assert isinstance(await old.dismissed(), Displaced)
                assert [one.attempt for one in await new.take(1)] == [2]
                assert (await new.acknowledge(0)).taken == 1

    Room.run(story)


def test_what_is_put_aside_is_on_disks_before_that_is_answered() -> None:
    async def story(room: Room) -> None:
        await room.append(3)
        await room.make("mailer", deliver_max=2)
        async with room.member("mailer", "a") as a:
            await a.take(3)
            coordinator, log = room.coordinator(), room.coordinator().group_log
            coordinator.group_log = Away(log)
            rejecting = asyncio.create_task(a.say(AckKind.REJECT, 0, reason="it is spam"))
            await room.until(lambda: len(room.parked("mailer")) == 1)
            assert (await a.acknowledge(2)).taken == 1
            assert not rejecting.done()
            room.cluster.luck.lost_answers[room.cluster.meta.partitions] = 1
            coordinator.group_log = log
            assert (await rejecting).taken == 1
            assert [one.reason for one in await room.parked_in_log("mailer")] == ["it is spam"]
            await a.say(AckKind.REFUSE, 1, reason="once")
            assert [(one.id, one.attempt) for one in await a.take(1)] == [(1, 2)]
            await a.say(AckKind.REFUSE, 1, reason="twice")
            assert await room.parked_in_log("mailer") == [Parked(1, "a", "it is spam"), Parked(2, "a", "twice")]

    Room.run(story)


def test_operators_replay_skip_and_reset() -> None:
    async def story(room: Room) -> None:
        await room.append(6)
        made_at = (await room.make("mailer")).made_at
        coordinator = room.coordinator()
        async with room.member("mailer", "a", room=2) as a:
            await a.take(2)
            await a.say(AckKind.REJECT, 0, 1, reason="later")
            await a.take(2)
            replayed = await coordinator.change("mailer", made_at, 0, Change.REPLAY, [0])
            assert replayed.count == 1
            assert room.parked("mailer") == [ParkedTransaction(0, 1, 1, "a", "later")]
            assert (await a.acknowledge(2)).taken == 1
            assert [(one.id, one.attempt) for one in await a.take(1)] == [(0, 1)]
            assert (await coordinator.change("mailer", made_at, 0, Change.SKIP, [4])).floor == 4
            assert (await a.acknowledge(0, 3)).done == 2, "they are not to be done any more"
            assert [one.id for one in await a.take(1)] == [5]
            assert (await coordinator.change("mailer", made_at, 0, Change.RESET, [1])).floor == 1
            assert isinstance(await a.dismissed(), NotReady)
        async with room.member("mailer", "a") as again:
            assert [one.id for one in await again.take(4)] == [2, 3, 4, 5]
            assert (await again.say(AckKind.ACKNOWLEDGE, 2, epoch=a.epoch)).is_old
        assert [one.id for one in room.parked("mailer")] == [1]
        with pytest.raises(GroupBeyondLog):
            await coordinator.change("mailer", made_at, 0, Change.SKIP, [6])
        with pytest.raises(NoSuchGroup):
            await coordinator.change("mailer", made_at + 1, 0, Change.SKIP, [1])

    Room.run(story)


@pytest.mark.parametrize("is_owner_lost", [False, True])
def test_a_reset_that_is_repeated_because_its_answer_was_lost_is_done_once(is_owner_lost: bool) -> None:
    """What was acknowledged between both is not delivered again."""

    async def story(room: Room) -> None:
        await room.append(4)
        made_at = (await room.make("mailer")).made_at
        async with room.member("mailer", "a") as a:
            await a.take(4)
            await a.acknowledge(0, 1, 2, 3)
            epoch = reset_epoch(a.epoch, 7)

            async def reset() -> Changed:
                return await room.coordinator().change("mailer", made_at, 0, Change.RESET, [-1], epoch)

            first = await reset()
            assert (first.count, first.epoch, first.floor) == (4, epoch, -1)
            assert isinstance(await a.dismissed(), NotReady)
        async with room.member("mailer", "a") as again:
            await again.take(4)
            await again.kept((await again.acknowledge(0, 1, 2)).number)
            if is_owner_lost:
                await room.cluster.kill_owner()
            else:
                assert [(one.count, one.floor) for one in (await reset(), await reset())] == [(0, 2), (0, 2)]
        repeated = await room.again_and_again(reset)
        assert (repeated.count, repeated.epoch, repeated.floor) == (0, epoch + is_owner_lost, 2)
        async with room.member("mailer", "a") as last:
            assert [one.id for one in await last.take(1)] == [3]

    Room.run(story, servers=2 if is_owner_lost else 1)


def test_a_reset_that_is_repeated_while_it_is_written_waits_for_it() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        made_at = (await room.make("mailer")).made_at
        async with room.member("mailer", "a") as a:
            await a.take(2)
            coordinator, log, epoch = room.coordinator(), room.coordinator().group_log, reset_epoch(a.epoch, 0)
            coordinator.group_log = Away(log)
            resets = [
                asyncio.create_task(coordinator.change("mailer", made_at, 0, Change.RESET, [0], epoch)) for _ in range(2)
            ]
            assert isinstance(await a.dismissed(), NotReady)
            assert (await asyncio.wait(resets, timeout=0.2))[0] == set()
            coordinator.group_log = log
            assert [(one.epoch, one.floor) for one in await asyncio.gather(*resets)] == [(epoch, 0)] * 2

    Room.run(story)


def test_a_reset_is_refused_after_one_of_another_operator() -> None:
    async def story(room: Room) -> None:
        await room.append(4)
        made_at = (await room.make("mailer")).made_at
        async with room.member("mailer", "a") as a:
            seen = a.epoch

        async def reset(after: int, epoch: int) -> Changed:
            return await room.coordinator().change("mailer", made_at, 0, Change.RESET, [after], epoch)

        assert (await reset(1, reset_epoch(seen, 5))).floor == 1
        for drawn in (0, 4):
            with pytest.raises(ChangedMeanwhile, match="was reset in partition 0 after this command read its state"):
                await reset(3, reset_epoch(seen, drawn))
        with pytest.raises(BadArgument):
            await reset(3, reset_epoch(reset_epoch(seen, 5), RESET_DRAWS - 1) + 1)
        assert room.group_partition("mailer").floor == 1
        assert (await reset(0, reset_epoch(seen, 6))).floor == 0, "the later one of two counts"
        assert (await reset(2, 0)).epoch == reset_epoch(seen, 6) + 1, "an older tool names no epoch"

    Room.run(story)


def test_the_epoch_of_a_reset_is_above_those_of_owners_that_came_since_it_was_decided() -> None:
    for seen in (0, 1, EPOCHS_OF_A_RESET - 1, EPOCHS_OF_A_RESET, reset_epoch(9, RESET_DRAWS - 1)):
        assert reset_epoch(seen, 0) > seen + EPOCHS_OF_A_RESET
        assert reset_epoch(seen, 1) >= reset_epoch(seen, 0) + EPOCHS_OF_A_RESET


def test_a_group_that_stops_goes_on_when_an_operator_says_so() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        made_at = (await room.make("mailer", deliver_max=1, exhausted=Exhausted.STOP)).made_at
        async with room.member("mailer", "a", room=1) as a:
            await a.take(1)
            await a.say(AckKind.REFUSE, 0, reason="no")
            await a.until(lambda: "id 0: no" in a.paused)
            assert (await room.coordinator().change("mailer", made_at, 0, Change.GO_ON, [])).count == 1
            assert [(one.id, one.attempt) for one in await a.take(1)] == [(0, 2)]
            await a.until(lambda: a.paused == "")

    Room.run(story)


def test_one_member_has_an_ordered_group_and_is_told_what_is_kept_when_all_before_it_is() -> None:
    async def story(room: Room) -> None:
        await room.append(4)
        await room.make("index", mode=Mode.ORDERED)
        async with room.member("index", "a") as a, room.member("index", "b") as b:
            assert [one.id for one in await a.take(4)] == [0, 1, 2, 3]
            later = await a.acknowledge(2)
            first = await a.acknowledge(0)
            await room.write("index")
            await a.say(AckKind.EXTEND, 1)
            assert (a.kept_number, b.given) == (0, []), "2 is not done for as long as 1 is not"
            assert later.number < first.number
            last = await a.acknowledge(1)
            await a.kept(last.number)
        async with room.member("index", "c") as c:
            assert [one.id for one in await c.take(1)] == [3]

    Room.run(story)


def test_what_an_ordered_group_has_done_is_kept_when_it_is_written_and_not_before() -> None:
    async def story(room: Room) -> None:
        await room.append(3)
        await room.make("index", mode=Mode.ORDERED)
        async with room.member("index", "a") as a:
            await a.take(3)
            await room.write("index")
            coordinator, log = room.coordinator(), room.coordinator().group_log
            coordinator.group_log = Away(log)
            for id in (1, 0):
                assert (await a.acknowledge(id)).taken == 1
            last = await a.say(AckKind.EXTEND, 2)
            assert (room.group_partition("index").reach, a.kept_number) == (2, 0), (
                "both are done, and nothing of it is written"
            )
            coordinator.group_log = log
            await a.kept(last.number)

    Room.run(story)


@pytest.mark.parametrize("deliver_max", [1, 1000])
def test_what_expired_is_written_down(deliver_max: int) -> None:
    """Another owner would read it there, while the member has said nothing."""

    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer", deliver_max=deliver_max, ack_wait_ms=1000)
        async with room.member("mailer", "a") as a, asyncio.timeout(20):
            await a.take(1)
            await room.write("mailer")  # that it was offered: nothing else is to be written
            while not await is_written(room):
                await asyncio.sleep(0.05)

    async def is_written(room: Room) -> bool:
        coordinator = room.coordinator()
        await coordinator.level()
        state = coordinator.state_log.state("mailer", 0)
        assert state is not None
        return len(state.parked) == 1 if deliver_max == 1 else bool(state.open.get(0))

    Room.run(story)


def test_deliveries_are_paid_for_by_the_quota_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:

    async def story(room: Room) -> None:
        await room.append(20, size=1000)
        await room.make("mailer")
        quotas = {"bytes_per_second": 4000}
        grant = {"names": ["*"], "may": ["append", "read", "subscribe"], "groups": ["*"], "quotas": quotas}
        room.cluster.set_policy([grant])
        server = room.cluster._running(room.cluster.owner(0))
        async with room.member("mailer", "a", room=8) as a:
            await a.take(8)
            usage = server.clients.usage_of(principal_of(""), Quotas(bytes_per_second=Amount(4000)))
            assert usage.feed_wait() > 0
            monkeypatch.setattr(QuotaUsage, "feed_wait", lambda self: 3600.0)
            await a.until(lambda: len(a.given) == 8)
            await a.acknowledge(*a.ids)
            await a.say(AckKind.EXTEND, 8)
            assert len(a.given) == 8, "the debt is not paid yet"

    Room.run(story)


def test_transactions_of_one_key_are_done_one_after_the_other() -> None:
    async def story(room: Room) -> None:
        await room.append(6, header=lambda id: id % 2)
        await room.make("mailer", mode=Mode.KEYED)
        async with room.member("mailer", "a", room=1) as a, room.member("mailer", "b", room=1) as b:
            assert {*[one.id for one in await a.take(1)], *[one.id for one in await b.take(1)]} == {0, 1}
            one = a if a.ids == [0] else b
            await one.acknowledge(0)
            await a.until(lambda: 2 in {*a.ids, *b.ids})
            assert {*a.ids, *b.ids} == {0, 1, 2}

    Room.run(story)


def test_the_keys_of_a_group_may_be_locks() -> None:
    async def story(room: Room) -> None:
        for lock in ("x", "y", "x", None):
            locks = [] if lock is None else [append_lock(lock)]
            await room.client.append(b"", partition=0, locks=locks, position=-1)
        await room.make("mailer", mode=Mode.KEYED, key=KeyedBy.LOCK)
        async with room.member("mailer", "a") as a:
            assert [one.id for one in await a.take(3)] == [0, 1, 3]
            await a.acknowledge(0)
            assert [one.id for one in await a.take(1)] == [2]

    Room.run(story)


def test_a_filter_leaves_out_what_a_group_does_not_want_and_probes_are_wanted_by_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "checked_kind", lambda header: header)

    async def story(room: Room) -> None:
        await room.append(300, header=lambda id: id % 3)
        await room.client.append(b"", partition=0, kind=PROBE_KIND)
        await room.append(1, header=lambda id: 7)
        await room.make("some", kinds=(2, 7), max_in_flight=1000)
        await room.make("all", max_in_flight=1000)
        async with room.member("some", "a", room=200) as a, room.member("all", "b", room=400) as b:
            assert [one.id for one in await a.take(101)] == [*range(2, 300, 3), 301]
            await a.acknowledge(*a.ids)
            assert [one.id for one in await b.take(301)] == [*range(300), 301]
        assert room.group_partition("some").floor == 301

    Room.run(story)


@pytest.mark.slow
def test_what_has_left_the_memory_of_the_server_is_read_from_storages() -> None:
    async def story(room: Room) -> None:
        tail = room.cluster._running(room.cluster.owner(0)).owner.pipeline(0, None).session.cache
        tail._bytes_max = 1 << 20
        for _ in range(10):
            await room.append(100, size=20_000)
        assert tail.first_id > 500
        await room.make("mailer", max_in_flight=1000)
        async with room.member("mailer", "a") as a:
            assert [one.id for one in await a.take(1000)] == [*range(1000)]
            assert a.given[17].payload.startswith(b"17\0")
            assert a.frames >= 20, "a frame has at most a mebibyte"

    Room.run(story)


@pytest.mark.parametrize("change", [Change.SKIP, Change.RESET])
def test_a_group_goes_on_behind_what_cannot_be_read_once_an_operator_moves_it(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable:
        async def read(self, first: int, last: int) -> Run:
            await asyncio.sleep(5)
            raise OnlyInArchive(f"id {first} is only in the archive", partition=0, first_id=first)

    async def story(room: Room) -> None:
        tail = room.cluster._running(room.cluster.owner(0)).owner.pipeline(0, None).session.cache
        tail._bytes_max = 1 << 20
        for _ in range(3):
            await room.append(50, size=20_000)
        assert 0 < tail.first_id < 148
        monkeypatch.setattr(Pipeline, "cold_reader", lambda self, *, with_locks=False: Unreadable())
        made_at = (await room.make("mailer")).made_at
        async with room.member("mailer", "a") as a:
            await a.until(lambda: "only in the archive" in a.paused)
            await asyncio.sleep(1)  # it is being tried again
            await room.coordinator().change("mailer", made_at, 0, change, [148])
            if change is Change.SKIP:
                await goes_on(room, a)
        if change is Change.RESET:  # it sends all members away
            async with room.member("mailer", "b") as b:
                await goes_on(room, b)

    async def goes_on(room: Room, member: Hand) -> None:
        assert [one.id for one in await member.take(1)] == [149]
        await asyncio.sleep(10)
        await room.append(1)
        assert [one.id for one in await member.take(1)] == [150]

    Room.run(story)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_is_made_once_changed_and_removed_while_members_work() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        first = await room.make("mailer")
        assert first.is_new
        assert await room.make("mailer") == replace(first, is_new=False)
        assert await room.make("mailer", starts=(GroupStart(0, 1),)) == replace(first, is_new=False), "it has begun"
        with pytest.raises(GroupExists):
            await room.make("mailer", mode=Mode.ORDERED)
        coordinator = room.coordinator()
        async with room.member("mailer", "a", room=1) as a:
            await a.take(1)
            await coordinator.set(replace(first.meta, deliver_max=7), first.made_at)
            assert isinstance(await a.dismissed(), NotReady)
        with pytest.raises(GroupExists):
            await coordinator.set(replace(first.meta, partitions=Parts("0")), first.made_at)
        async with room.member("mailer", "a", room=1) as a:
            await a.take(1)
            await coordinator.remove("mailer", first.made_at)
            assert isinstance(await a.dismissed(), NoSuchGroup)
        with pytest.raises(NoSuchGroup):
            await coordinator.remove("mailer", first.made_at)
        again = await room.make("mailer", starts=(GroupStart(0, 0),))
        assert again.made_at > first.made_at
        async with room.member("mailer", "a") as a:
            assert [one.id for one in await a.take(1)] == [1]

    Room.run(story)


def test_a_deletion_that_is_committed_with_an_unknown_outcome_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(room: Room) -> None:
        made, coordinator = await room.make("mailer"), room.coordinator()
        append = coordinator.group_log.append

        async def lose_outcome(data: bytes, lock: Lock, position: Position) -> AppendOutcome:
            assert isinstance(await append(data, lock, position), Committed)
            return Unknown()

        monkeypatch.setattr(coordinator.group_log, "append", lose_outcome)
        await coordinator.remove("mailer", made.made_at)
        assert "mailer" not in coordinator.state_log.groups

    Room.run(story)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"partitions": Parts("0-3")}, NoSuchPartition),
        ({"partitions": Parts("orders")}, NoSuchChannel),
        ({"starts": (GroupStart(0, 5),)}, GroupBeyondLog),
        ({"starts": (GroupStart(9, 5),)}, NoSuchPartition),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], error: type[WaltzError]) -> None:
    async def story(room: Room) -> None:
        with pytest.raises(error):
            await room.make("mailer", **settings)

    Room.run(story)


def test_a_member_is_told_why_it_cannot_join() -> None:
    async def story(room: Room) -> None:
        await room.make("mailer", partitions=Parts("0"))
        with pytest.raises(NoSuchGroup):
            async with room.member("other", "a"):
                pass
        with pytest.raises(NotInGroup):
            async with room.member("mailer", "a", partition=1):
                pass
        room.cluster.set_policy([{"names": ["*"], "may": ["subscribe"], "groups": ["index-*"]}])
        with pytest.raises(NotGranted):
            async with room.member("mailer", "a"):
                pass
        room.cluster.set_policy([{"names": ["*"], "may": ["subscribe"], "groups": ["mail*"]}])
        async with room.member("mailer", "a") as a:
            room.cluster.set_policy([{"names": ["*"], "may": ["append"], "groups": ["mail*"]}])
            assert isinstance(await a.dismissed(), NotGranted)

    Room.run(story, partitions=2)


def test_nonsense_ends_the_stream_of_who_says_it() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        await room.make("mailer")
        async with room.member("mailer", "a", room=1) as a, room.member("mailer", "b", room=1) as b:
            await a.take(1)
            await b.take(1)
            with pytest.raises(BadFrame):
                await a.say(AckKind.ACKNOWLEDGE, -3)
            assert (await b.acknowledge(*b.ids)).taken == 1

    Room.run(story)


def test_a_place_that_nobody_needs_is_written_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_partition, "IDLE_SECONDS", 0.0)

    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer")
        coordinator, log = room.coordinator(), room.coordinator().group_log
        async with room.member("mailer", "a") as a:
            await a.take(1)
            coordinator.group_log = Away(log)
            await a.acknowledge(0)
            await a.leave()
        (at_work,) = coordinator.active
        await room.until(lambda: at_work.describe().members == ())  # type: ignore[union-attr]
        at_work.tend()
        assert at_work.error is None, "what was acknowledged is only here"
        coordinator.group_log = log
        await room.until(lambda: not list(room.coordinator().active))
        await coordinator.level()
        assert (room.group_partition("mailer").floor, room.group_partition("mailer").is_at_work) == (0, False)

    Room.run(story)


@pytest.mark.slow
def test_the_group_log_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "SLACK_BYTES", 2000)

    async def story(room: Room) -> None:
        await room.append(200)
        for name in ("one", "two", "three"):
            await room.make(name)
        async with room.member("one", "a"):
            pass
        async with room.member("two", "a", room=1) as a:
            for _ in range(200):
                (given,) = await a.take(1)
                await a.acknowledge(given.id)
                await room.write("two")
        known = room.coordinator().state_log
        await room.until(lambda: known.overdue is None)
        assert known.floor > 100, "what was written first was written anew"
        assert set(known.groups) == {"one", "two", "three"}
        assert room.coordinator().needed_from() == known.floor <= known.reach

    Room.run(story)


def test_the_group_log_stays_short_when_a_partition_has_left_the_channel_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_log, "SLACK_BYTES", 2000)

    async def story(room: Room) -> None:
        room.cluster.set_channels({"orders": "0", "rest": "0-1"})
        await room.append(200)
        await room.make("one", partitions=Parts("orders"))
        await room.make("two", partitions=Parts("rest"))
        async with room.member("one", "a") as a:
            await a.take(1)
        await room.until(lambda: not list(room.coordinator().active))
        room.cluster.set_channels({"orders": "1", "rest": "0-1"})
        async with room.member("two", "a", room=1) as a:
            for _ in range(200):
                (given,) = await a.take(1)
                await a.acknowledge(given.id)
                await room.write("two")
        known = room.coordinator().state_log
        await room.until(lambda: known.overdue is None)
        assert known.floor > 100
        assert known.state("one", 0) is not None, "it may come back"

    Room.run(story, partitions=2)


def test_a_group_is_missed_before_its_first_member_and_not_in_a_partition_that_has_left_its_channel() -> None:
    async def story(room: Room) -> None:
        room.cluster.set_channels({"orders": "0"})
        coordinator = room.coordinator()

        async def totals() -> GroupTotals:
            coordinator._totals_until = 0.0
            found = coordinator.totals()
            assert found is not None
            return found

        await room.append(3)
        await room.make("mailer", partitions=Parts("orders"), starts=(GroupStart(0, 0),))
        alone = await totals()
        assert (alone.unattended, alone.lag) == (1, 2), "nobody has ever joined, and two transactions wait"
        assert [(one.name, one.partition, one.is_unattended) for one in alone.troubles] == [("mailer", 0, True)]
        async with room.member("mailer", "a") as a:
            await a.take(1)
            assert (await totals()).unattended == 0
            await a.say(AckKind.REJECT, 1, reason="no")
        await room.until(lambda: not list(coordinator.active))
        assert ((await totals()).unattended, (await totals()).parked) == (1, 1)
        room.cluster.set_channels({"orders": "1"})
        left = await totals()
        assert (left.unattended, left.lag, left.parked, left.troubles) == (0, 0, 0, ()), "nobody can join there any more"
        room.cluster.set_channels({"others": "0"})
        assert (await totals()).unattended == 1, "where it was is what is known of a channel that is gone"

    Room.run(story, partitions=2)


class Removed:
    """The group log, where another server removes a group between what this one has read and what it writes."""

    def __init__(self, log: GroupLog, key: Key) -> None:
        self._log, self._key, self._is_done = log, key, False
        self.follow, self.read, self.close = log.follow, log.read, log.close

    async def _remove(self) -> None:
        if not self._is_done:
            self._is_done = True
            data = state_log.deletion_entry(self._key.name, self._key.made_at)
            assert isinstance(await self._log.append(data, lock_of(self._key.name), await self._log.end()), Committed)

    async def append(self, data: bytes, lock: Lock, position: Position) -> AppendOutcome:
        await self._remove()
        return await self._log.append(data, lock, position)

    async def end(self) -> Position:
        await self._remove()
        return await self._log.end()


def test_a_group_that_was_removed_meanwhile_does_not_come_back_when_its_entry_is_written_anew() -> None:
    async def story(room: Room) -> None:
        await room.make("mailer")
        coordinator = room.coordinator(room.client.partition_count)  # of the owner of the group log
        await coordinator.level()
        key = Key("mailer", coordinator.state_log.groups["mailer"][1], WHOLE_GROUP)
        coordinator.group_log = cast(GroupLog, Removed(coordinator.group_log, key))
        assert await coordinator._rewrite(key), "this server writes such entries"
        await coordinator.level()
        assert coordinator.state_log.groups == {}

    Room.run(story)


# -- the group log -----------------------------------------------------------------------------------------------------


class Away:
    """The group log, while it takes nothing."""

    def __init__(self, log: GroupLog) -> None:
        self.follow, self.read, self.end, self.close = log.follow, log.read, log.end, log.close

    async def append(self, data: bytes, lock: Lock, position: int) -> AppendOutcome:
        raise NotSent("its owner is away")


def test_without_the_group_log_a_group_goes_on_to_a_bound_and_nothing_that_was_said_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_writer, "UNWRITTEN_MAX", 5)

    async def story(room: Room) -> None:
        await room.append(10)
        await room.make("mailer")
        async with room.member("mailer", "a", room=1) as a:
            await a.take(1)
            coordinator, log = room.coordinator(), room.coordinator().group_log
            coordinator.group_log = Away(log)
            for id in range(5):
                assert (await a.acknowledge(id)).taken == 1
                if id < 4:
                    await a.take(1)
            await a.until(lambda: a.paused != "")
            assert (a.ids, a.kept_number) == ([0, 1, 2, 3, 4], 0)
            with pytest.raises(GroupLogAway):
                await room.make("other")
            coordinator.group_log = log
            await a.take(1)
            await a.kept(5)
            assert a.paused == ""

    Room.run(story)


def test_nobody_joins_a_group_that_was_reset_before_that_is_written() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        made_at = (await room.make("mailer")).made_at
        async with room.member("mailer", "a") as a:
            await a.take(2)
            coordinator, log, before = room.coordinator(), room.coordinator().group_log, a.epoch
            coordinator.group_log = Away(log)
            resetting = asyncio.create_task(coordinator.change("mailer", made_at, 0, Change.RESET, [-1]))
            assert isinstance(await a.dismissed(), NotReady)

            async def come_again() -> int:
                async with room.member("mailer", "b") as b:
                    await b.take(2)
                    return b.epoch

            coming = asyncio.create_task(come_again())
            done, _ = await asyncio.wait((coming, resetting), timeout=0.5)
            assert done == set()
            coordinator.group_log = log
            assert (await resetting).floor == -1
            assert await coming == before + 1

    Room.run(story)


def test_a_member_that_joins_while_the_group_is_claimed_and_reset_is_given_what_is_there() -> None:
    async def story(room: Room) -> None:
        await room.append(2)
        made_at = (await room.make("mailer")).made_at
        coordinator, log = room.coordinator(), room.coordinator().group_log
        coordinator.group_log = Away(log)
        resetting = asyncio.create_task(coordinator.change("mailer", made_at, 0, Change.RESET, [-1]))
        await room.until(lambda: bool(list(coordinator.active)))

        async def come() -> list[int]:
            async with room.member("mailer", "a") as a:
                await a.take(2)
                return a.ids

        coming = asyncio.create_task(come())
        await asyncio.sleep(0.1)
        coordinator.group_log = log
        assert (await resetting).floor == -1
        assert await coming == [0, 1], "although nothing else happens in the partition"

    Room.run(story)


def test_a_group_above_the_end_of_the_log_is_moved_by_a_reset() -> None:
    """Its server does not own every partition, so it could not know: the error says to reset the group."""

    async def story(room: Room) -> None:
        await room.append(3)
        coordinator = room.coordinator()
        meta = GroupMeta(name="mailer", partitions=None, mode=Mode.QUEUE, starts=(GroupStart(0, 99),))
        assert await coordinator._written(group_entry(meta), lock_of("mailer")) is not None
        for _ in range(2):
            with pytest.raises(GroupBeyondLog):
                async with room.member("mailer", "a"):
                    raise AssertionError("it would pass over what gets these ids")
        with pytest.raises(GroupBeyondLog):
            await coordinator.change("mailer", None, 0, Change.SKIP, [1])
        assert "no id above 2" in room.group_partition("mailer").stopped
        assert (await coordinator.change("mailer", None, 0, Change.RESET, [0])).floor == 0
        async with room.member("mailer", "a") as a:
            assert [one.id for one in await a.take(2)] == [1, 2]
        assert room.group_partition("mailer").stopped == ""

    Room.run(story)


def test_a_replay_of_thousands_does_not_hold_up_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took seconds in one turn, and a server whose loop stands loses its partitions."""
    count, turns, sorted_again, offered = 1500, list[tuple[int, int]](), 0, 0
    turn, offer = GroupPartition._turn, DeliveryTracker.offer

    def again(tracker: DeliveryTracker) -> list[int]:
        nonlocal sorted_again
        sorted_again += 1
        return sorted(tracker._again)

    def one_more(tracker: DeliveryTracker, id: int, key: object = None, *, is_wanted: bool = True) -> None:
        nonlocal offered
        offered += 1
        offer(tracker, id, is_wanted=is_wanted)

    def in_turn(self: GroupPartition) -> None:
        before = sorted_again, offered
        turn(self)
        turns.append((sorted_again - before[0], offered - before[1]))

    async def story(room: Room) -> None:
        await room.append(count)
        made_at = (await room.make("mailer", max_in_flight=count)).made_at
        async with room.member("mailer", "a") as a:
            await a.take(count)
            await a.say(AckKind.REJECT, *range(count), reason="not now")
            for name, value in {"again": property(again), "offer": one_more}.items():
                monkeypatch.setattr(DeliveryTracker, name, value)
            monkeypatch.setattr(GroupPartition, "_turn", in_turn)
            assert (await room.coordinator().change("mailer", made_at, 0, Change.REPLAY, ())).count == count
            assert [one.id for one in await a.take(count)] == [*range(count)]
        assert max(turns, key=lambda one: one[0])[0] <= 1
        assert max(turns, key=lambda one: one[1])[1] <= group_partition.AGAIN_MAX

    Room.run(story)


def test_long_reasons_do_not_keep_a_group_from_writing_its_whole_state() -> None:
    async def story(room: Room) -> None:
        await room.append(1200)
        await room.make("mailer", max_in_flight=1200)
        async with room.member("mailer", "a") as a:
            await a.take(1200)
            answer = await a.say(AckKind.REJECT, *range(1200), reason="x" * 1024)
            assert answer.taken == 1200
            async with asyncio.timeout(10):
                await room.write("mailer")
        assert len(await room.parked_in_log("mailer")) == 1200

    Room.run(story)


@pytest.mark.parametrize("data", [b"hello", b"", bytes(100), b"\xff" * 40, b"\x01\x01\x00\x05" + bytes(60)])
def test_an_entry_of_the_group_log_that_is_none_of_ours_is_passed_over_and_counted(data: bytes) -> None:
    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer")
        coordinator = room.coordinator()
        async with room.member("mailer", "a") as a:
            await a.take(1)
            assert isinstance(await coordinator.group_log.append(data, write_lock("x"), -1), Committed)
            await coordinator.level()
            answer = await a.acknowledge(0)
            await a.kept(answer.number)
        assert coordinator.damage is None
        found = coordinator.totals()
        assert found is not None
        assert (found.foreign, found.trouble) == (1, "")
        assert (await coordinator.make(GroupMeta(name="other", partitions=None, mode=Mode.QUEUE))).is_new
        await room.cluster.kill_owner()
        await room.make("third")

    Room.run(story)


def test_a_group_log_that_cannot_be_understood_stops_groups_and_nothing_else() -> None:
    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer")
        coordinator = room.coordinator()
        async with room.member("mailer", "a") as a:
            await a.take(1)
            await coordinator.group_log.append(OF_A_LATER_VERSION, write_lock("x"), -1)
            assert isinstance(await a.dismissed(), GroupStateDamaged)
        with pytest.raises(GroupStateDamaged):
            await coordinator.make(GroupMeta(name="other", partitions=None, mode=Mode.QUEUE))
        with pytest.raises(GroupStateDamaged):
            async with room.member("mailer", "a"):
                pass
        assert "kind" in coordinator.trouble
        assert coordinator.needed_from() == 0, "nothing of it is trimmed"
        with pytest.raises(GroupStateDamaged):  # before an operator says so
            await coordinator._begin_again()
        await room.append(1)

    Room.run(story)


def test_an_operator_lets_groups_go_on_without_an_entry_that_cannot_be_understood() -> None:
    async def story(room: Room) -> None:
        await room.append(3)
        await room.make("mailer")
        coordinators = [server.groups for server in room.cluster._servers.values() if server is not None]
        coordinator = room.coordinator()
        async with room.member("mailer", "a", room=1) as a:
            await a.take(1)
            await a.kept((await a.acknowledge(0)).number)
            outcome = await coordinator.group_log.append(OF_A_LATER_VERSION, write_lock("x"), -1)
            second = await coordinator.group_log.append(OF_A_LATER_VERSION, write_lock("y"), -1)
            assert isinstance(outcome, Committed)
            assert isinstance(second, Committed)
            assert f"entry {outcome.id} of the group log" in (await a.dismissed()).message
        for wrong in (outcome.id - 1, second.id + 1):
            with pytest.raises(BadArgument, match="does not stop the groups"):
                await coordinator.pass_over(wrong)
        with pytest.raises(GroupStateDamaged):
            await coordinator.level()
        with pytest.raises(GroupStateDamaged, match=f"entry {second.id} of"):
            await coordinator.pass_over(outcome.id)
        await coordinator.pass_over(second.id)
        for other in coordinators:
            assert other is not None
            await room.until(partial(_is_well, other))
        async with room.member("mailer", "b") as b:
            assert {one.id for one in await b.take(2)} == {1, 2}, "what was done before stays done"
        await room.cluster.kill_owner()
        await room.make("other")

    Room.run(story)


def _is_well(coordinator: GroupCoordinator) -> bool:
    return coordinator.damage is None and not coordinator.trouble


OF_A_LATER_VERSION = state_log._HEAD.pack(9, 1, 6, -1, 0) + b"mailer"


def test_what_an_owner_says_that_was_replaced_is_never_kept() -> None:
    async def story(room: Room) -> None:
        await room.append(3)
        made_at = (await room.make("mailer")).made_at
        async with room.member("mailer", "a", room=1) as a:
            await a.take(1)
            await a.kept((await a.acknowledge(0)).number)
            await a.take(1)
            coordinator = room.coordinator()
            await coordinator.level()
            state = GroupState.of(coordinator.state_log.state("mailer", 0).snapshot())  # type: ignore[union-attr]
            state.begin_epoch()
            data = state_entry("mailer", 0, made_at, state.delta() or b"")
            (at_work,) = coordinator.active
            at_work.look = lambda: None  # type: ignore[method-assign]  # it has not heard of the other one
            assert isinstance(
                await coordinator.group_log.append(data, lock_of("mailer", 0), coordinator.state_log.reach), Committed
            ), "another owner has claimed it"
            answer = await a.acknowledge(1)
            assert answer.taken == 1
            assert isinstance(await a.dismissed(), NotReady)
            assert a.kept_number < answer.number
        async with room.member("mailer", "b") as b:
            assert [one.id for one in await b.take(2)] == [1, 2]
            assert b.epoch == state.epoch + 1

    Room.run(story)


def test_an_owner_that_was_replaced_without_noticing_claims_no_group() -> None:
    """It deposed the owner that has the log, and told its member for good that the group is above the end of the log."""

    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer")
        cluster, name = room.cluster, room.cluster.owner(0)
        old, new = cluster._running(name), cluster._running(cluster.owner(1))
        assert old is not new, "the old owner still reaches the group log"
        old._coordinator.disconnect()
        old._coordinator.lapse()
        for port in old._ports:
            port.cut()
        await room.again_and_again(_owning(new))
        async with Client([new.meta.listen], connect=cluster.connect) as client:
            await client.append_many([b"1", b"2"], partition=0)
        async with _member(room, new, "a") as a:
            await a.kept((await a.acknowledge(*[one.id for one in await a.take(3)])).number)
            joining = asyncio.create_task(_member(room, old, "b").__aenter__())
            assert old.groups is not None
            while not (at_work := list(old.groups.active)) or not at_work[0]._checkpointer.trouble:
                assert not joining.done(), joining
                await asyncio.sleep(0.02)
            assert a.error is None
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            assert new.groups is not None
            assert new.groups.describe("mailer")[0].places[0].epoch == a.epoch

    Room.run(story)


def _owning(server: LocalServer) -> Callable[[], Awaitable[Pipeline]]:
    async def look() -> Pipeline:
        return server.owner.pipeline(0, None)

    return look


@asynccontextmanager
async def _member(room: Room, server: LocalServer, name: str) -> AsyncIterator[Hand]:
    """Join through this server, whatever the other servers say of the partition."""
    hand = Hand(room.cluster.connect(server.meta.listen, room.cluster.meta.key).attend(), name)
    try:
        generation = server.owner.topology().places[0].generation
        key = room.cluster.meta.key
        await hand.join(
            JoinRequest(cluster_key=key, partition=0, generation=generation, group="mailer", member=name, room=None)
        )
        yield hand
    finally:
        await hand.close()


def test_a_place_ends_with_its_pipeline() -> None:
    async def story(room: Room) -> None:
        await room.append(1)
        await room.make("mailer")
        async with room.member("mailer", "a") as a:
            await a.take(1)
            (at_work,) = room.coordinator().active
            at_work.pipeline.close(SessionEnded("it is over"))
            assert isinstance(await a.dismissed(), SessionEnded)
            assert not list(room.coordinator().active)
            assert not at_work.pipeline._listeners

    Room.run(story)

"""A member and an owner that says what a test wants: lost streams, late answers, other epochs, damage on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from tests.unit.fake_server import FakeCluster, FakeServer
from tests.unit.timeless import run
from tests.unit.waltzd.client.test_client import until
from waltzd.client.client import Client
from waltzd.client.delivery import Delivery
from waltzd.client.settings import ClientSettings
from waltzd.client.subscription import Subscription
from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import CannotConnect, ClientClosed, DeliveryLate, NoSuchGroup, NotReady, WaltzError
from waltzd.format.checksum import crc32
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    Joined,
    JoinRequest,
    Leave,
    MemberFrame,
    Mode,
    Paused,
)
from waltzd.protocol.timelines import Fork, Timeline

MADE = 7
SETTINGS = ClientSettings(submit_seconds=100, call_seconds=5, close_seconds=3)


class Stream:
    """Both ends of a stream of a member."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.said: list[Ack] = []
        """Without `begun`."""
        self.begun: list[Ack] = []
        self.messages = 0
        self.request: JoinRequest | None = None
        self.has_left = self.is_over = False
        self._frames: asyncio.Queue[Sequence[DeliveryFrame] | WaltzError | None] = asyncio.Queue()

    async def send(self, frames: Sequence[MemberFrame]) -> None:
        await asyncio.sleep(0.001)
        if self.is_over:
            raise CannotConnect("the stream is over")
        self.messages += 1
        for frame in frames:
            match frame:
                case JoinRequest():
                    self.request = frame
                    self.owner.streams.append(self)
                    owner = self.owner
                    about = (owner.made_at, owner.epoch, owner.mode, owner.ack_wait_ms, 100, owner.hears_begun)
                    self.push(Joined(*about, owner.timelines))
                case Ack(verb=AckKind.BEGIN):
                    self.begun.append(frame)
                case Ack():
                    self.said.append(frame)
                    if self.owner.answers is not None:
                        self.push(*self.owner.answers(frame))
                case Leave():
                    self.has_left = True
                    self._frames.put_nowait(None)

    async def receive(self) -> Sequence[DeliveryFrame] | None:
        found = await self._frames.get()
        if isinstance(found, WaltzError):
            self.is_over = True
            raise found
        return found

    def cancel(self) -> None:
        self.is_over = True

    # -- what a test does

    def push(self, *frames: DeliveryFrame) -> None:
        if frames:
            self._frames.put_nowait(frames)

    def break_off(self) -> None:
        self._frames.put_nowait(CannotConnect("the cable was cut"))

    def give(self, *ids: int, tag: int, attempt: int = 1, damage: bool = False) -> None:
        payloads = [b"payload %d" % id for id in ids]
        self.push(
            Deliveries(
                epoch=self.owner.epoch,
                tag=tag,
                ids=np.array(ids, np.int64),
                attempts=np.full(len(ids), attempt, np.int32),
                headers=np.zeros(len(ids), np.int32),
                times=np.full(len(ids), -1, np.int64),
                lengths=np.array([len(one) for one in payloads], np.uint32),
                data_crcs=np.array([crc32(one) + damage for one in payloads], np.uint32),
                payloads=b"".join(payloads),
            )
        )


class Owner(FakeCluster):
    """The owner of one partition, for members of one group."""

    def __init__(self, mode: Mode = Mode.QUEUE, *, ack_wait_ms: int = 30_000, hears_begun: bool = True) -> None:
        super().__init__()
        self.hears_begun = hears_begun
        self.mode = mode
        self.epoch = 1
        self.made_at = MADE
        self.timelines: tuple[Timeline, ...] = ()
        self.ack_wait_ms = ack_wait_ms
        self.streams: list[Stream] = []
        self.answers: Callable[[Ack], Sequence[DeliveryFrame]] | None = all_is_well

    def connect(self, address: str, key: Any) -> FakeServer:
        return Server(self, address)

    async def stream(self, number: int = 0) -> Stream:
        await until(lambda: len(self.streams) > number)
        return self.streams[number]


class Server(FakeServer):
    def attend(self) -> Stream:
        assert isinstance(self.cluster, Owner)
        return Stream(self.cluster)

    async def get_group(self, name: str) -> MadeGroup:
        assert isinstance(self.cluster, Owner)
        if name != "mailer":
            raise NoSuchGroup("there is none")
        return MadeGroup(GroupMeta(name=name, partitions=None, mode=self.cluster.mode), MADE)


def count_of(said: Ack) -> int:
    return int((said.lasts - said.firsts + 1).sum())


def all_is_well(said: Ack) -> Sequence[DeliveryFrame]:
    return [AckResult(said.number, taken=count_of(said)), AcksDurable(said.number)]


def with_owner(
    test: Callable[[Owner, Subscription[Any]], Awaitable[Any]],
    mode: Mode = Mode.QUEUE,
    *,
    ack_wait_ms: int = 30_000,
    hears_begun: bool = True,
) -> Owner:
    """Run the test with a member, and see that nothing is left of it."""
    owner = Owner(mode, ack_wait_ms=ack_wait_ms, hears_begun=hears_begun)

    async def work() -> None:
        async with Client("s0:1", connect=owner.connect, partitions=[], settings=SETTINGS) as client:
            subscription = client.subscribe("mailer")
            with suppress(ClientClosed):
                async with subscription:
                    await test(owner, subscription)
        assert owner.open_ports == 0
        assert all(stream.is_over for stream in owner.streams)

    run(work())
    return owner


async def taken(subscription: Subscription[Any], count: int) -> list[Delivery[Any]]:
    found: list[Delivery[Any]] = []
    while len(found) < count:
        found += await subscription.take(count - len(found))
    return found


def test_what_is_said_in_one_turn_travels_together_as_stretches() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(*range(50), tag=50)
        stream.give(60, tag=51)
        found = await taken(subscription, 51)
        before = stream.messages
        await asyncio.gather(*[one.ack() for one in found])
        assert stream.messages == before + 1
        (said,) = stream.said
        assert (said.verb, said.epoch, said.tag) == (AckKind.ACKNOWLEDGE, 1, 51)
        assert (said.firsts.tolist(), said.lasts.tolist()) == ([0, 60], [49, 60])

    with_owner(test)


def test_after_a_lost_stream_the_owner_is_asked_again_what_it_has_heard() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        owner.answers = None
        stream = await owner.stream()
        stream.give(0, 1, 2, 3, tag=4)
        first, second, third, fourth = await taken(subscription, 4)
        stream.give(4, tag=5)
        said = [asyncio.create_task(one) for one in (first.ack(), second.nack(), third.reject("no"), fourth.extend())]
        await until(lambda: len(stream.said) == 4)
        owner.answers = lambda one: (
            [AckResult(one.number, done=1)] if one.firsts[0] == 0 else [AckResult(one.number, late=1)]
        )
        stream.break_off()
        newer = await owner.stream(1)
        results = await asyncio.gather(*said, return_exceptions=True)
        assert [(one.verb, one.firsts.tolist()) for one in newer.said] == [
            (AckKind.ACKNOWLEDGE, [0]),
            (AckKind.REJECT, [2]),
        ]
        assert results[:2] == [None, None]
        assert [type(one) for one in results[2:]] == [DeliveryLate, DeliveryLate]
        await first.ack()
        assert len(newer.said) == 2
        newer.give(7, tag=9)
        assert [one.id for one in await taken(subscription, 1)] == [7]  # 4 was given to somebody again

    with_owner(test)


def test_in_another_epoch_nothing_that_was_said_before_counts() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        owner.answers = lambda one: [AckResult(one.number, taken=1)] if one.firsts[0] == 1 else []
        stream = await owner.stream()
        stream.give(0, 1, 2, tag=3)
        first, second, third = await taken(subscription, 3)
        said = [asyncio.create_task(first.ack())]
        await until(lambda: len(stream.said) == 1)
        said.append(asyncio.create_task(second.ack(durable=True)))
        await until(lambda: second._is_settled)
        owner.epoch = 2
        stream.push(Dismissed(NotReady("another owner")))
        newer = await owner.stream(1)
        results = await asyncio.gather(*said, return_exceptions=True)
        assert [type(one) for one in results] == [DeliveryLate, DeliveryLate]
        assert all("or the group a reset or other settings" in str(one) for one in results), "what may have ended the epoch"
        with pytest.raises(DeliveryLate, match="another epoch"):
            await third.ack()
        assert newer.said == []

    with_owner(test)


def test_on_another_timeline_nothing_that_was_said_before_counts_in_an_epoch_of_the_same_number() -> None:
    """The ids are other transactions above the fork. A rescue of the group log may have taken the epoch back as well."""

    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        owner.answers = None
        stream = await owner.stream()
        stream.give(4, 5, tag=2)
        first, second = await taken(subscription, 2)
        said = asyncio.create_task(first.ack())
        await until(lambda: len(stream.said) == 1)
        owner.timelines = (Timeline(identity=UUID(int=9), number=2, parent=1, fork=Fork(3), session=1),)
        stream.break_off()
        newer = await owner.stream(1)
        newer.give(4, tag=1)
        with pytest.raises(DeliveryLate):
            await said
        with pytest.raises(DeliveryLate):
            await second.ack()
        assert newer.said == []

    with_owner(test)


def test_of_many_those_that_were_too_late_are_found_one_by_one() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        def answers(said: Ack) -> Sequence[DeliveryFrame]:
            ids = [id for first, last in zip(said.firsts, said.lasts, strict=True) for id in range(first, last + 1)]
            late = sum(id in (2, 5) for id in ids)
            unknown = sum(id == 7 for id in ids)
            return [
                AckResult(said.number, taken=len(ids) - late - unknown, late=late, unknown=unknown),
                AcksDurable(said.number),
            ]

        owner.answers = answers
        stream = await owner.stream()
        stream.give(*range(8), tag=8)
        found = await taken(subscription, 8)
        with pytest.raises(DeliveryLate) as caught:
            await subscription.ack(found, durable=True)
        assert caught.value.number("deliveries") == 3
        assert [one.id for one in found if not one._is_settled] == [2, 5, 7]
        for late, why in ((found[2], "`ack_wait` has passed"), (found[7], "the group has never delivered it")):
            with pytest.raises(DeliveryLate, match=why):
                await late.ack()

    with_owner(test)


def test_one_that_was_given_to_the_same_member_again_is_too_late_in_the_older_hand() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, tag=1)
        (older,) = await taken(subscription, 1)
        stream.give(0, tag=2, attempt=2)
        (newer,) = await taken(subscription, 1)
        with pytest.raises(DeliveryLate, match="given to this member again"):
            await older.ack()
        await newer.ack()
        assert [one.tag for one in stream.said] == [2]

    with_owner(test)


def test_what_was_damaged_on_its_way_is_never_handed_out() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        (await owner.stream()).give(0, tag=1, damage=True)
        (await owner.stream(1)).give(0, tag=2)
        (one,) = await taken(subscription, 1)
        assert (one.payload, one._tag) == (b"payload 0", 2)

    with_owner(test)


@pytest.mark.parametrize("is_parked", [True, False])
def test_after_a_failure_in_an_ordered_group_the_owner_says_what_comes_next(is_parked: bool) -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        owner.answers = lambda one: []
        stream = await owner.stream()
        stream.give(0, 1, 2, tag=3)
        (one,) = await taken(subscription, 1)
        failing = asyncio.create_task(one.nack())
        following = asyncio.create_task(taken(subscription, 1))
        await until(lambda: len(stream.said) == 1)
        stream.push(AckResult(stream.said[0].number, taken=1))
        await failing
        await until(lambda: len(stream.said) == 2)
        asked = stream.said[1]
        assert (asked.verb, asked.firsts.tolist(), asked.lasts.tolist()) == (AckKind.EXTEND, [1], [2])
        assert not following.done()
        if is_parked:
            stream.push(AckResult(asked.number, taken=2))
            assert [one.id for one in await following] == [1]
            return
        owner.answers = lambda one: [AckResult(one.number, late=1)]
        stream.push(AckResult(asked.number, late=2))
        await until(lambda: len(stream.said) == 4)
        stream.give(0, 1, tag=5, attempt=2)
        assert [(one.id, one.attempt) for one in await following] == [(0, 2)]

    with_owner(test, Mode.ORDERED)


def test_in_an_ordered_group_what_comes_again_takes_the_place_of_what_waits() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, 1, 2, tag=3)
        await taken(subscription, 1)
        stream.give(0, 1, tag=5, attempt=2)
        await asyncio.sleep(1)
        assert [(one.id, one.attempt) for one in await taken(subscription, 2)] == [(0, 2), (1, 2)]

    with_owner(test, Mode.ORDERED)


def test_what_waits_is_extended_while_somebody_takes_and_is_given_up_when_nobody_does() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, 1, 2, tag=3)
        for _ in range(2):
            (one,) = await taken(subscription, 1)
            await asyncio.sleep(0.8)
            await one.ack()
        assert [said.firsts.tolist() for said in stream.said if said.verb is AckKind.EXTEND][-1] == [2]
        await asyncio.sleep(5)
        count = len(stream.said)
        await asyncio.sleep(5)
        assert len(stream.said) == count
        stream.give(9, tag=4)
        assert [one.id for one in await taken(subscription, 1)] == [9]  # 2 is in other hands by now

    with_owner(test, ack_wait_ms=1000)


def test_a_group_that_was_removed_ends_its_members() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.push(Paused("the group log is away"))
        await until(lambda: subscription.troubles == {0: "the group log is away"})
        stream.push(Paused(""))
        await until(lambda: subscription.troubles == {})
        waiting = asyncio.create_task(subscription.take(1))
        stream.push(Dismissed(NoSuchGroup("it was removed")))
        with pytest.raises(NoSuchGroup):
            await waiting

    with_owner(test)


def test_settling_waits_for_an_owner_as_long_as_the_subscription_lives() -> None:
    """Ten minutes without an owner ended the loop of an application after one."""

    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        owner.answers = None
        stream = await owner.stream()
        stream.give(0, 1, tag=1)
        first, second = await taken(subscription, 2)
        said = asyncio.create_task(first.ack())
        await asyncio.sleep(600)
        assert not said.done()
        owner.answers = all_is_well
        stream.break_off()
        await said
        owner.answers = None
        never = asyncio.create_task(second.ack())
        await asyncio.sleep(600)
        await subscription.close()
        with pytest.raises(DeliveryLate, match="the subscription was closed"):
            await never

    with_owner(test)


def test_a_subscription_that_fails_ends_the_wait_of_whoever_settles() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        owner.answers = None
        stream = await owner.stream()
        stream.give(0, tag=1)
        (one,) = await taken(subscription, 1)
        said = asyncio.create_task(one.ack())
        await until(lambda: stream.said)
        stream.push(Dismissed(NoSuchGroup("it was removed")))
        with pytest.raises(DeliveryLate, match="it was removed"):
            await said

    with_owner(test)


def test_what_is_handed_to_the_application_is_reported_before_and_what_waits_is_not() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, 1, 2, tag=3)
        assert [one.id for one in await subscription.take(2)] == [0, 1]
        assert [(one.verb, one.firsts.tolist(), one.lasts.tolist()) for one in stream.begun] == [(AckKind.BEGIN, [0], [1])]

    with_owner(test)


def test_what_was_lost_with_its_stream_before_it_was_reported_is_not_handed_out() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, tag=1)
        await until(lambda: bool(subscription._ready))
        stream.is_over = True  # what is sent from now on fails
        taking = asyncio.create_task(subscription.take(1))
        again = await owner.stream(1)
        assert not taking.done()
        again.give(0, tag=2, attempt=1)
        (one,) = await taking
        assert [said.tag for said in again.begun] == [2]
        await one.ack()

    with_owner(test)


def test_a_cancelled_take_loses_nothing() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, 1, tag=1)
        await until(lambda: bool(subscription._ready))
        taking = asyncio.create_task(subscription.take(2))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert [one.id for one in await taken(subscription, 2)] == [0, 1]

    with_owner(test)


def test_an_owner_of_an_older_version_is_told_nothing_of_it() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, tag=1)
        await taken(subscription, 1)
        assert stream.begun == []

    with_owner(test, hears_begun=False)


def test_who_goes_says_so_behind_all_that_it_has_said_and_may_go_twice() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        stream.give(0, 1, tag=2)
        (one,) = await taken(subscription, 1)
        said = asyncio.create_task(one.ack())
        await asyncio.sleep(0)
        await asyncio.gather(subscription.close(), subscription.close())
        await said
        assert stream.has_left
        assert [one.firsts.tolist() for one in stream.said] == [[0]]
        assert await subscription.take(1) == []

    with_owner(test)


def test_a_handler_goes_on_in_order_after_its_stream_was_lost_in_the_middle() -> None:
    seen: list[tuple[int, int]] = []

    async def handler(delivery: Delivery[Any]) -> None:
        seen.append((delivery.id, delivery.attempt))
        await asyncio.sleep(2)

    async def work() -> None:
        owner = Owner(Mode.ORDERED)
        async with Client("s0:1", connect=owner.connect, partitions=[], settings=SETTINGS) as client:
            handling = client.handle("mailer", handler, concurrency=2)
            working = asyncio.create_task(handling.run())
            stream = await owner.stream()
            stream.give(0, 1, tag=2)
            await until(lambda: seen == [(0, 1)])
            stream.break_off()
            newer = await owner.stream(1)
            newer.give(0, 1, tag=4, attempt=2)
            await until(lambda: len(seen) == 3)
            handling.stop()
            await working
            assert seen == [(0, 1), (0, 2), (1, 2)]
            assert newer.has_left

    run(work())


def test_another_group_under_the_same_name_is_not_the_one_that_was_meant() -> None:
    async def test(owner: Owner, subscription: Subscription[Any]) -> None:
        stream = await owner.stream()
        owner.made_at = 8
        stream.break_off()
        with pytest.raises(NoSuchGroup, match="a new one with its name was created"):
            await subscription.take(1)

    with_owner(test)

"""Who is connected, who is the newest of its name, and who waits because of its quota: on a clock that moves only when all
tasks wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest

from tests.unit.mounting import FakeSession, Reader, Room, batch_of, mount_request
from tests.unit.timeless import run
from waltzd.errors import CannotConnect, NotPermitted, NotReady, Superseded
from waltzd.errors.operations import BadFrame, Disconnected, IncompatibleVersion, TooManyCallers
from waltzd.protocol.batches import FeedMode, Introduction, Registration
from waltzd.protocol.descriptions import ClientInstance, ClientUse
from waltzd.protocol.locks import Mode
from waltzd.protocol.policy import NO_QUOTAS, Amount, Grant, Pattern, Policy, Quotas, Verb
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.calls import token_of
from waltzd.server.clients.registry import (
    GONE_MAX,
    GONE_SECONDS,
    SLOWED_SECONDS,
    ClientRegistry,
    Principal,
    QuotaUsage,
    principal_of,
)

KEY = mount_request().cluster_key
ANN, BOB = (Identity(KEY, Role.CLIENT, name).uri for name in ("ann", "bob"))


def timeless(test: Callable[[Room], Coroutine[Any, Any, None]], session: Any = FakeSession, **settings: Any) -> None:
    async def story() -> None:
        room = Room(session(), **settings)
        try:
            await test(room)
        finally:
            await room.close()

    run(story())


def now() -> float:
    return asyncio.get_running_loop().time()


def seen(room: Room, instance: str) -> ClientInstance:
    return next(one for one in room.registry.describe().clients if one.instance == instance)


def usage(room: Room, name: str) -> ClientUse:
    return next(one for one in room.registry.describe().names if one.name == name)


# -- who is there ------------------------------------------------------------------------------------------------------


def test_an_instance_is_live_hangs_and_is_gone() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(1, name="ann", instance="box:1")
        await one.say(batch_of(b"a", b"b"))
        await one.until(lambda reader: len(reader.committed) == 2)
        found = seen(room, "box:1")
        assert (found.name, found.role, found.state, found.partitions) == ("ann", "client", "live", (3,))
        assert (found.appended, found.appended_bytes) == (2, 82)
        await asyncio.sleep(15)
        assert seen(room, "box:1").state == "live", "where its connection does not tell"
        one.link.quiet_seconds = 13.0
        assert seen(room, "box:1").state == "hangs"
        one.link.quiet_seconds = 1.0
        assert (seen(room, "box:1").state, seen(room, "box:1").quiet_ms) == ("live", 1000)
        await one.leave()
        await asyncio.sleep(5)
        found = seen(room, "box:1")
        assert (found.state, found.partitions, found.age_ms, found.appended) == ("gone", (), 5000, 2)
        await asyncio.sleep(GONE_SECONDS)
        assert room.registry.describe().clients == ()

    timeless(test)


def test_what_is_kept_of_those_that_are_gone_is_bounded() -> None:
    async def test(room: Room) -> None:
        registry, link = ClientRegistry(), (await room.mount(1)).link
        registry.usage_of(principal_of(ANN), NO_QUOTAS)
        with registry.connect(principal_of(ANN), mount_request(instance="stays"), link):
            for number in range(GONE_MAX + 50):
                with registry.connect(principal_of(ANN), mount_request(instance=f"{number}"), link):
                    pass
            found = [one.instance for one in registry.describe().clients]
        assert len(found) == GONE_MAX + 1
        assert found[0] == "stays"
        assert found[-1] == f"{GONE_MAX + 49}"

    timeless(test)


def test_without_a_certificate_all_are_anonymous_and_a_client_that_says_nothing_is_its_number() -> None:
    async def test(room: Room) -> None:
        await room.mount(7)
        assert (seen(room, "client 7").name, usage(room, "anonymous").mounts) == ("anonymous", 1)

    timeless(test)


@pytest.mark.parametrize("instance", ["x" * 129, "two\nlines", "\x1b[2J"])
def test_what_an_instance_calls_itself_can_be_shown(instance: str) -> None:
    async def test(room: Room) -> None:
        reader = await room.knock(mount_request(instance=instance))
        await reader.hear()
        assert isinstance(reader.end, BadFrame)

    timeless(test)


def test_an_operator_disconnects_an_instance_or_a_name() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1, name="ann", instance="a"), await room.mount(2, name="ann", instance="b")
        other = await room.mount(3, name="bob", instance="a")
        assert room.registry.disconnect("ann", "a") == 1
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, Disconnected)
        assert room.registry.disconnect("ann") == 1, "one of them is ending already"
        await two.until(lambda reader: reader.end is not None)
        await other.say(batch_of(b"a"))
        await other.until(lambda reader: bool(reader.committed))

    timeless(test)


# -- the newest instance -----------------------------------------------------------------------------------------------

EXCLUSIVE = Introduction(is_exclusive=True)


def confirming(room: Room) -> list[int]:
    """The storages of a room always confirm; returns how often they were asked."""
    asked: list[int] = []

    async def confirm() -> None:
        asked.append(1)
        await asyncio.sleep(0)

    room.pipe.confirm = confirm  # type: ignore[method-assign]
    return asked


def slow() -> FakeSession:
    return FakeSession(commits_at_once=False)


def test_a_newer_instance_displaces_the_older_behind_what_has_an_id() -> None:
    async def test(room: Room) -> None:
        asked = confirming(room)
        older = await room.mount(1, name="ann", epoch=1)
        await older.say(batch_of(b"taken"))
        await room.quiet()
        newer = await room.mount(2, name="ann", epoch=2)
        assert newer.mounted is not None
        assert newer.mounted.barrier == 0
        await older.say(batch_of(b"late", first=1))
        await older.until(lambda reader: reader.end is not None)
        assert isinstance(older.end, Superseded)
        assert older.untaken == 1
        await newer.say(batch_of(b"new"))
        await room.quiet()
        assert room.session.payloads() == [b"taken", b"new"]
        assert len(asked) == 2

    timeless(test, slow)


def test_what_waits_for_a_step_when_a_newer_instance_comes_gets_no_id() -> None:
    async def test(room: Room) -> None:
        confirming(room)
        older = await room.mount(1, name="ann", epoch=1)
        await older.say(batch_of(b"a" * 3000))
        await room.quiet()
        await older.say(batch_of(b"waits", first=1))
        await room.quiet()
        assert room.queued_bytes > 0
        await room.mount(2, name="ann", epoch=2)
        room.session.commit(0)
        await room.quiet()
        assert room.session.payloads() == [b"a" * 3000]

    timeless(test, slow, inflight_bytes_max=2000)


@pytest.mark.parametrize("is_known_here", [True, False])
def test_an_older_instance_never_mounts_again(is_known_here: bool) -> None:
    """Also where this owner has just come, and knows of the newer one by the coordinator only."""

    async def test(room: Room) -> None:
        confirming(room)
        if is_known_here:
            await room.mount(2, name="ann", epoch=2)
        else:
            room.epochs["ann"] = 2
        token = token_of(room.client_secret, 1, ANN, 1)
        zombie = await room.knock(mount_request(1, epoch=1, token=token), identity=ANN)
        await zombie.hear()
        assert isinstance(zombie.end, Superseded)
        assert zombie.mounted is None

    timeless(test)


def test_a_mount_with_an_epoch_stands_only_when_the_storages_confirm_the_owner() -> None:
    async def test(room: Room) -> None:
        async def confirm() -> None:
            raise NotReady("no majority")

        room.pipe.confirm = confirm  # type: ignore[method-assign]
        token = token_of(room.client_secret, 1, ANN, 1)
        reader = await room.knock(mount_request(1, epoch=1, token=token), identity=ANN)
        await reader.hear()
        assert isinstance(reader.end, NotReady)
        assert reader.mounted is None

    timeless(test)


def test_while_the_coordinator_is_silent_a_new_owner_lets_nobody_with_an_epoch_in() -> None:
    async def test(room: Room) -> None:
        async def newest_epoch(name: str) -> int:
            raise CannotConnect("the coordinator does not answer")

        confirming(room)
        room.newest_epoch = newest_epoch  # type: ignore[method-assign]
        token = token_of(room.client_secret, 1, ANN, 1)
        reader = await room.knock(mount_request(1, epoch=1, token=token), identity=ANN)
        await reader.hear()
        assert isinstance(reader.end, CannotConnect)
        await room.mount(2, name="ann")

    timeless(test)


def test_an_instance_that_comes_while_another_one_is_being_let_in() -> None:
    """The older one was found to be the newest, and waits for storages; when they answer it is not any more."""

    async def test(room: Room) -> None:
        gate = asyncio.Event()

        async def confirm() -> None:
            await gate.wait()

        room.pipe.confirm = confirm  # type: ignore[method-assign]
        older = await room.knock(mount_request(1, epoch=1, token=token_of(room.client_secret, 1, ANN, 1)), identity=ANN)
        await room.quiet()
        newer = await room.knock(mount_request(2, epoch=2, token=token_of(room.client_secret, 2, ANN, 2)), identity=ANN)
        await room.quiet()
        gate.set()
        await older.hear()
        await newer.hear()
        assert isinstance(older.end, Superseded)
        assert newer.mounted is not None

    timeless(test)


def test_an_older_instance_that_learned_the_newest_epoch_too_late_does_not_bring_its_own_back() -> None:
    """It asked the coordinator before the newer one was registered, and hears the answer when that one has mounted."""

    async def test(room: Room) -> None:
        confirming(room)
        gate, asked = asyncio.Event(), 0

        async def newest_epoch(name: str) -> int:
            nonlocal asked
            asked += 1
            if asked > 1:
                return 2
            await gate.wait()
            return 1

        room.newest_epoch = newest_epoch  # type: ignore[method-assign]
        older = await room.knock(mount_request(1, epoch=1, token=token_of(room.client_secret, 1, ANN, 1)), identity=ANN)
        await room.quiet()
        newer = await room.knock(mount_request(2, epoch=2, token=token_of(room.client_secret, 2, ANN, 2)), identity=ANN)
        await newer.hear()
        assert newer.mounted is not None
        gate.set()
        await older.hear()
        assert isinstance(older.end, Superseded)
        again = await room.knock(mount_request(3, epoch=1, token=token_of(room.client_secret, 3, ANN, 1)), identity=ANN)
        await again.hear()
        assert isinstance(again.end, Superseded)

    timeless(test)


def test_an_epoch_cannot_be_made_up_and_names_have_their_own() -> None:
    async def test(room: Room) -> None:
        confirming(room)
        first = await room.calls.register(KEY, ANN, EXCLUSIVE)
        assert first.epoch == 1
        forged = mount_request(first.client, epoch=99, token=first.token)
        reader = await room.knock(forged, identity=ANN)
        await reader.hear()
        assert isinstance(reader.end, NotPermitted)
        other = await room.mount(8, name="bob", epoch=1)
        second = await room.calls.register(KEY, ANN, EXCLUSIVE)
        assert second.epoch == 2
        await room.mount(second.client, name="ann", epoch=2)
        await other.say(batch_of(b"a"))
        await other.until(lambda reader: bool(reader.committed))

    timeless(test)


def test_another_client_id_for_the_same_instance_keeps_its_epoch() -> None:
    async def test(room: Room) -> None:
        first = await room.calls.register(KEY, ANN, EXCLUSIVE)
        again = await room.calls.register(KEY, ANN, Introduction(is_exclusive=True, before=first))
        assert (again.epoch, again.client) == (1, 2)
        with pytest.raises(NotPermitted):
            await room.calls.register(KEY, ANN, Introduction(is_exclusive=True, before=Registration(1, first.token, 5)))
        await room.calls.register(KEY, ANN, EXCLUSIVE)
        with pytest.raises(Superseded):
            await room.calls.register(KEY, ANN, Introduction(is_exclusive=True, before=again))

    timeless(test)


def test_a_grant_asks_for_one_instance_and_those_without_an_epoch_end() -> None:
    async def test(room: Room) -> None:
        confirming(room)
        before = await room.mount(11, name="ann")
        room.authorizer.adopt(Policy([Grant(names=(Pattern("*"),), may=tuple(Verb), one_instance=True)]))
        found = await room.calls.register(KEY, ANN)
        assert found.epoch == 1
        await room.mount(found.client, name="ann", epoch=1)
        await before.until(lambda reader: reader.end is not None)
        assert isinstance(before.end, Superseded)
        again = await room.knock(mount_request(11, number=2, token=token_of(room.client_secret, 11, ANN)), identity=ANN)
        await again.hear()
        assert isinstance(again.end, Superseded)
        with pytest.raises(NotPermitted, match="only applications"):
            await room.calls.register(KEY, Identity(KEY, Role.OPERATOR, "ann").uri, EXCLUSIVE)

    timeless(test)


# -- quotas ------------------------------------------------------------------------------------------------------------


def limited(room: Room, name: str, **quotas: int) -> None:
    """By the policy. Others may do everything."""
    bounds = Quotas(**{key: Amount(value) for key, value in quotas.items()})
    everybody = Grant(names=(Pattern("*"),), may=tuple(Verb))
    room.authorizer.adopt(Policy([everybody, Grant(names=(Pattern(name),), may=(Verb.APPEND,), quotas=bounds)]))


def test_a_flooder_is_slowed_to_its_quota_and_nobody_else_is() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", bytes_per_second=10_000, transactions_per_second=1_000_000)
        flooder, quiet = await room.mount(1, name="ann"), await room.mount(2, name="bob")
        began = now()
        for number in range(100):
            await flooder.say(batch_of(b"x" * 960, first=number))
        for number in range(10):
            await quiet.say(batch_of(b"y", first=number))
            await quiet.until(lambda reader, number=number: number in reader.committed)  # type: ignore[misc]
        assert now() - began < 1e-6, "whoever is below its quota does not wait"
        await flooder.until(lambda reader: len(reader.committed) == 100)
        assert 8.9 <= now() - began <= 9.1, "100,000 bytes, of which 10,000 at once"
        assert flooder.refused == {}
        assert usage(room, "ann").slowed_ms > 8000
        assert usage(room, "bob").slowed_ms == 0

    timeless(test)


def test_transactions_count_too_and_all_mounts_of_a_name_together() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", transactions_per_second=10)
        mounts = [await room.mount(number, name="ann") for number in range(5)]
        began = now()
        for reader in mounts:
            await reader.say(*[batch_of(b"a", b"b", first=2 * number) for number in range(5)])
        for reader in mounts:
            await reader.until(lambda reader: len(reader.committed) == 10)
        assert 3.9 <= now() - began <= 4.1, "50 transactions, of which 10 at once"

    timeless(test)


@pytest.mark.slow
@pytest.mark.parametrize("has_quota", [False, True])
def test_a_squatter_with_a_quota_leaves_its_victim_getting_through(has_quota: bool) -> None:
    """It marks the lock again as soon as it is told. Without a quota its victim never has seen the newest mark."""
    lasts = 5.0

    async def rewrite(room: Room, client: int, name: str, think: float, pause: float) -> Reader:
        """Look at the log, think, write, and again."""
        reader = await room.mount(client, name=name)
        for number in count():
            if now() >= lasts:
                break
            mark = room.pipe.committed
            await asyncio.sleep(think)
            await reader.say(batch_of(b"mine", first=number, marks=mark, locks=[[(9, Mode.WRITE)]]))
            await reader.until(lambda reader, number=number: len(reader.committed) + len(reader.refused) > number)  # type: ignore[misc]
            await asyncio.sleep(pause)
        return reader

    async def test(room: Room) -> None:
        if has_quota:
            limited(room, "ann", lock_marks_per_second=5)
        squatting = asyncio.create_task(rewrite(room, 1, "ann", think=0.0, pause=0.001))
        victim = await rewrite(room, 2, "bob", think=0.02, pause=0.0)
        squatter = await squatting
        if has_quota:
            assert len(victim.committed) > 200, "of 250"
            assert len(squatter.committed) <= 5 * (lasts + 2)
        else:
            assert len(victim.committed) <= 1, "at the end, when nobody squats any more"

    timeless(test)


def test_other_locks_and_read_locks_of_a_squatter_do_not_wait() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", lock_marks_per_second=1)
        one = await room.mount(1, name="ann")
        began = now()
        await one.say(batch_of(*[b"x"] * 50, locks=[[(100 + number, Mode.WRITE)] for number in range(50)]))
        await one.until(lambda reader: len(reader.committed) == 50)
        await one.say(batch_of(*[b"x"] * 50, first=50, marks=49, locks=[[(7, Mode.READ)]] * 50))
        await one.until(lambda reader: len(reader.committed) == 100)
        assert now() - began < 1e-6

    timeless(test)


def test_a_name_has_no_more_mounts_than_its_quota_and_its_share() -> None:
    async def test(room: Room) -> None:
        limited(room, "bob", mounts=2)
        for number in range(8):
            await room.mount(number, name="ann")
        with pytest.raises(AssertionError):
            await room.mount(8, name="ann")
        refused = room.readers[-1].end
        assert isinstance(refused, TooManyCallers)
        assert "left to others" in refused.message
        await room.mount(20, name="bob")
        await room.mount(20, number=2, name="bob")
        await room.mount(21, name="bob")
        assert (usage(room, "ann").mounts, usage(room, "ann").refused_mounts) == (8, 1)

    timeless(test, callers_max=10)


def test_a_quota_of_mounts_says_that_it_is_one() -> None:
    async def test(room: Room) -> None:
        limited(room, "bob", mounts=2)
        await room.mount(20, name="bob")
        await room.mount(21, name="bob")
        token = token_of(room.client_secret, 22, BOB)
        reader = await room.knock(mount_request(22, token=token), identity=BOB)
        await reader.hear()
        assert isinstance(reader.end, TooManyCallers)
        assert "its grants allow 2" in reader.end.message

    timeless(test)


def test_the_feed_waits_by_credit_and_loses_nothing() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", bytes_per_second=10_000)
        reader = await room.mount(1, name="ann", feed=FeedMode.RECORDS)
        writer = await room.mount(2, name="bob")
        began = now()
        for number in range(20):
            await writer.say(batch_of(b"x" * 4960, first=number))
            await writer.until(lambda reader, number=number: number in reader.committed)  # type: ignore[misc]
            await reader.settle()
        await reader.until(lambda reader: len(reader.ids) == 20)
        assert reader.ids == list(range(20))
        assert now() - began >= 3.0
        assert usage(room, "ann").slowed_ago_ms is not None

    timeless(test, feed_frame_bytes=5000)


def test_what_a_name_has_in_flight_is_bounded_over_all_its_mounts() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", inflight_bytes=5000)
        mounts = [await room.mount(number, name="ann") for number in range(3)]
        for reader in mounts:
            await reader.say(batch_of(b"x" * 2000), batch_of(b"x" * 2000, first=1))
        await room.quiet()
        assert usage(room, "ann").inflight_bytes <= 3 * 3100, "one frame of each mount always may"
        assert len(room.session.runs) < 6
        assert sum(map(len, room.session.runs)) == 3
        for _ in range(6):
            await room.quiet()
            room.session.commit(room.pipe.last_id)
        for reader in mounts:
            await reader.until(lambda reader: len(reader.committed) == 2)
        assert usage(room, "ann").inflight_bytes == 0

    timeless(test, slow)


def test_a_mount_that_ends_gives_back_what_it_had_in_flight() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(1, name="ann")
        await one.say(batch_of(b"x" * 2000))
        await room.quiet()
        assert usage(room, "ann").inflight_bytes > 0
        await one.leave()
        assert usage(room, "ann").inflight_bytes == 0

    timeless(test, slow)


def test_another_quota_counts_at_once_also_for_who_waits() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", bytes_per_second=1)
        one = await room.mount(1, name="ann")
        await one.say(batch_of(b"x" * 10_000))
        await one.settle()
        assert one.committed == {}
        began = now()
        room.authorizer.adopt(None)
        await one.until(lambda reader: bool(reader.committed))
        assert now() - began <= 1.0

    timeless(test)


def test_a_frame_without_a_quota_costs_nothing_to_speak_of() -> None:
    """Not even the clock is looked at, and no column."""

    def clock() -> float:
        raise AssertionError("nobody needs the time")

    free = QuotaUsage(principal_of(ANN), clock)
    assert free.wait(batch_of(b"x" * 100, locks=[[(1, Mode.WRITE)]]), 100) == 0
    assert free.feed_wait() == 0


def test_mounts_that_only_write_are_not_woken_by_the_commits_of_others() -> None:
    async def test(room: Room) -> None:
        idle = [await room.mount(number, name="ann") for number in range(10)]
        hungry = await room.mount(20, name="bob", feed=FeedMode.RECORDS, credit=0)
        fed = await room.mount(21, name="bob", feed=FeedMode.RECORDS)
        await room.quiet()
        woken = {member.client for member in room.pipe._mounts.values() if member.is_fed}
        assert woken == {21}
        await idle[0].say(batch_of(b"x"))
        await fed.until(lambda reader: reader.ids == [0])
        assert hungry.ids == []

    timeless(test)


def test_totals_name_who_had_to_wait_lately() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", transactions_per_second=10)
        one = await room.mount(1, name="ann")
        await room.mount(2, name="bob")
        await one.say(batch_of(*[b"x"] * 20))
        await one.until(lambda reader: len(reader.committed) == 20)
        found = room.registry.totals()
        assert (found.instances, found.slowed, found.slowed_ms) == (2, ("ann",), 1000)
        await asyncio.sleep(SLOWED_SECONDS)
        assert room.registry.totals().slowed == ()

    timeless(test)


def test_names_of_which_nothing_would_be_seen_are_forgotten_and_their_numbers_are_not() -> None:
    async def test(room: Room) -> None:
        limited(room, "ann", transactions_per_second=10)
        one = await room.mount(1, name="ann")
        await one.say(batch_of(*[b"x"] * 20))
        await one.until(lambda reader: len(reader.committed) == 20)
        await one.leave()
        await asyncio.sleep(2 * GONE_SECONDS)
        assert room.registry.describe().clients == ()
        for number in range(GONE_MAX + 10):
            room.registry.usage_of(Principal(Role.CLIENT, f"name-{number}"), NO_QUOTAS)
        found = room.registry.describe().names
        assert len(found) <= GONE_MAX
        assert "ann" not in {usage.name for usage in found}
        assert room.registry.totals().slowed_ms == 1000

    timeless(test)


def test_a_client_of_another_major_version_gets_no_id() -> None:
    async def test(room: Room) -> None:
        assert (await room.calls.register(KEY, ANN, Introduction(version="0.99.0"))).client == 1
        with pytest.raises(IncompatibleVersion, match="client library has version 1"):
            await room.calls.register(KEY, ANN, Introduction(version="1.0.0"))
        assert (await room.calls.register(KEY, ANN, Introduction(version=""))).client == 2

    timeless(test)

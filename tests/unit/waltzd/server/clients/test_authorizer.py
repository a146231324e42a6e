"""Every door asks for the right, and a mount that loses one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.unit.mounting import KEY, FakeSession, Reader, Room, batch_of, in_room, mount_request
from waltzd.errors import NotGranted, WaltzError
from waltzd.errors.operations import BadFrame, GroupLogClosed, PolicyUnreadable
from waltzd.protocol.batches import FeedMode, HeadFeed
from waltzd.protocol.channels import Parts
from waltzd.protocol.locks import Mode, lock_hash
from waltzd.protocol.policy import Grant, Pattern, Policy, Prefix, Rights, Verb
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.authorizer import Authorizer, check_append, check_read

APP, ANN = Identity(KEY, Role.CLIENT, "app").uri, Identity(KEY, Role.OPERATOR, "app").uri
"""The operator has the name of an application: it is not that one."""
FEEDS = FeedMode.RECORDS, FeedMode.HEADS


def policy(*may: Verb, partitions: str = "3", locks: tuple[str, ...] | None = None, name: str = "app") -> Policy:
    prefixes = None if locks is None else tuple(Prefix(prefix) for prefix in locks)
    grant = Grant(names=(Pattern(name),), may=may, partitions=Parts(partitions), lock_prefixes=prefixes)
    return Policy([grant] if may else [])


async def knock(room: Room, *, identity: str = APP, **about: Any) -> Reader:
    reader = await room.knock(mount_request(identity=identity, **about), identity=identity)
    await reader.hear()
    return reader


async def ended(reader: Reader) -> WaltzError:
    await reader.until(lambda reader: reader.end is not None)
    assert reader.end is not None
    return reader.end


async def refusal(call: Coroutine[Any, Any, object]) -> type[WaltzError] | None:
    try:
        await call
    except WaltzError as error:
        return type(error)
    return None


async def fetched(room: Room, identity: str) -> int:
    return len([run async for run in room.calls.fetch(KEY, 3, 0, None, identity=identity)])


@pytest.mark.parametrize("number", range(8))
def test_each_call_with_each_set_of_verbs(number: int) -> None:
    may = tuple(verb for at, verb in enumerate(Verb) if number >> at & 1)

    async def test(room: Room) -> None:
        room.authorizer.adopt(policy(*may))
        sees = bool(may)
        reads, feeds = Verb.READ in may, Verb.READ in may or Verb.SUBSCRIBE in may
        calls: list[tuple[Callable[[str], Coroutine[Any, Any, object]], bool]] = [
            (lambda who: room.calls.register(KEY, who), sees),
            (lambda who: room.calls.high_water_mark(KEY, 3, identity=who), sees),
            (lambda who: fetched(room, who), reads),
        ]
        for call, is_allowed in calls:
            assert await refusal(call(APP)) is (None if is_allowed else NotGranted)
            assert await refusal(call(ANN)) is None
            assert await refusal(call("")) is NotGranted, "anonymous has no grant"
        assert (await refusal(room.calls.find_time(KEY, 3, 0, identity=APP)) is NotGranted) is not reads
        assert room.calls.locate(APP).places[3].is_hidden is not sees
        assert (room.calls.locate(APP).places[3].address is not None) is sees
        assert not room.calls.locate(ANN).places[3].is_hidden
        for feed in (*FEEDS, FeedMode.NONE):
            reader = await knock(room, number=1 + feed, feed=feed)
            is_allowed = Verb.APPEND in may if feed is FeedMode.NONE else feeds
            assert (reader.mounted is not None) is is_allowed
            assert isinstance(reader.end, NotGranted) is not is_allowed
            if reader.mounted is not None:
                await reader.say(batch_of(b"x"))
                if Verb.APPEND in may:
                    await reader.until(lambda reader: bool(reader.committed))
                else:
                    assert isinstance(await ended(reader), NotGranted)
                    assert reader.untaken == 0

    in_room(test)


def test_a_grant_elsewhere_is_none_here() -> None:
    async def test(room: Room) -> None:
        for there in (policy(*Verb, partitions="2"), policy(*Verb, name="ap"), policy(*Verb, name="appl*")):
            room.authorizer.adopt(there)
            assert isinstance((await knock(room)).end, NotGranted)
            assert await refusal(fetched(room, APP)) is NotGranted
        room.authorizer.adopt(policy(*Verb, name="anonymous"))
        assert (await knock(room, identity="")).mounted is not None

    in_room(test)


def test_a_refusal_says_who_what_where_and_what_to_do() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(policy(Verb.READ))
        error = (await knock(room)).end
        assert error is not None
        assert error.lines() == [
            "W2036 app may not append to partition 3: no grant of the policy allows it",
            "Not done: nothing was read or written",
            "Next: `waltzctl policy explain app 3` says what is granted; an operator grants more with "
            "`waltzctl policy set FILE`",
        ]

    in_room(test)


def test_locks_of_other_prefixes_are_refused() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(policy(Verb.APPEND, locks=("account",)))
        mine, other = lock_hash("account.eur", 7), lock_hash("order", 7)
        reader = await knock(room)
        await reader.say(batch_of(b"a", b"b", locks=[[(mine, Mode.WRITE)], []]))
        await reader.until(lambda reader: len(reader.committed) == 2)
        for mode in Mode:
            reader = await knock(room, number=reader.frames and 1 + mode + 1)
            await reader.say(batch_of(b"a", b"b", locks=[[(mine, Mode.WRITE)], [(other, mode)]]))
            assert f"{other:016x}" in (await ended(reader)).message
            assert reader.untaken == 0, "the whole batch"
            assert reader.committed == {}

    in_room(test)


@pytest.mark.parametrize("feed", [FeedMode.NONE, *FEEDS])
def test_a_right_that_is_gone_ends_the_mounts_that_used_it(feed: FeedMode) -> None:
    async def test(room: Room) -> None:
        for lost, has_appended in ((Verb.APPEND, True), (Verb.APPEND, False), (Verb.SUBSCRIBE, True)):
            room.authorizer.adopt(policy(*Verb))
            reader = await knock(room, number=1000 + room.registered, feed=feed)
            room.registered += 1
            if has_appended:
                await reader.say(batch_of(b"x"))
                await reader.until(lambda reader: bool(reader.committed))
            room.authorizer.adopt(policy(Verb.APPEND) if lost is Verb.SUBSCRIBE else policy(Verb.READ))
            await room.quiet()
            needs_it = feed is not FeedMode.NONE if lost is Verb.SUBSCRIBE else has_appended or feed is FeedMode.NONE
            await reader.settle()
            assert isinstance(reader.end, NotGranted) is needs_it
            if not needs_it and lost is Verb.APPEND:
                await reader.say(batch_of(b"x"))
                assert isinstance(await ended(reader), NotGranted), "asked for with the first frame that needs it"
            await reader.leave()

    in_room(test)


def test_what_was_decided_is_told_and_what_was_not_is_not_taken() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(policy(Verb.APPEND))
        reader = await knock(room)
        await reader.say(batch_of(b"a", b"b"))
        await room.quiet()
        room.session.commit(1)
        room.pipe.hold()
        await reader.say(batch_of(b"c", first=2))
        await room.quiet()
        room.authorizer.adopt(policy(Verb.READ))
        assert isinstance(await ended(reader), NotGranted)
        assert reader.committed == {0: 0, 1: 1}
        assert reader.untaken == 2
        await room.quiet()
        assert room.session.payloads() == [b"a", b"b"]

    in_room(test, lambda: FakeSession(commits_at_once=False))


def test_a_policy_that_takes_nothing_from_a_mount_leaves_it_alone() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(policy(*Verb))
        reader = await knock(room, feed=FeedMode.RECORDS)
        for more in (policy(Verb.APPEND, Verb.SUBSCRIBE, partitions="0-7"), policy(*Verb, name="*")):
            room.authorizer.adopt(more)
        room.authorizer.adopt(None)
        await reader.say(batch_of(b"x", locks=[[(1, Mode.WRITE)]]))
        await reader.until(lambda reader: bool(reader.payloads))

    in_room(test)


def test_a_mount_may_lock_what_the_newest_policy_grants() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(policy(Verb.APPEND, locks=("account",)))
        account, order = lock_hash("account.eur", 7), lock_hash("order", 7)
        reader = await knock(room)
        await reader.say(batch_of(b"a", locks=[[(account, Mode.WRITE)]]))
        await reader.until(lambda reader: len(reader.committed) == 1)
        room.authorizer.adopt(policy(Verb.APPEND, locks=("order",)))
        await reader.say(batch_of(b"b", first=1, locks=[[(order, Mode.WRITE)]]))
        await reader.until(lambda reader: len(reader.committed) == 2)
        await reader.say(batch_of(b"c", first=2, locks=[[(account, Mode.WRITE)]]))
        assert f"{account:016x}" in (await ended(reader)).message
        assert len(reader.committed) == 2

    in_room(test)


def test_a_reader_by_id_loses_its_right_between_two_pieces() -> None:
    async def test(room: Room) -> None:
        writer = await room.mount()
        for number in range(20):
            await writer.say(batch_of(bytes(1000), first=number))
        await writer.until(lambda reader: len(reader.committed) == 20)
        room.authorizer.adopt(policy(Verb.READ))
        runs = room.calls.fetch(KEY, 3, 0, None, identity=APP)
        assert len(await anext(runs)) < 20
        room.authorizer.adopt(policy(Verb.SUBSCRIBE))
        with pytest.raises(NotGranted):
            await anext(runs)

    in_room(test, cold_chunk_bytes=4000)


def test_who_may_append_may_ask_what_became_of_it_and_sees_no_more() -> None:
    async def test(room: Room) -> None:
        writer = await room.mount(9)
        await writer.say(batch_of(b"secret", header=77))
        await writer.until(lambda reader: bool(reader.committed))
        room.authorizer.adopt(policy(Verb.APPEND))
        own = await knock(room, client=2)
        await own.say(batch_of(b"mine", header=5))
        await own.until(lambda reader: bool(reader.committed))
        asking = await knock(room, client=2, number=2, feed=FeedMode.HEADS, asks=True)
        assert asking.mounted is not None
        assert asking.mounted.barrier == 1
        await asking.until(lambda reader: len(reader.ids) == 2)
        found = [row for frame in asking.frames if isinstance(frame, HeadFeed) for row in frame.heads.tolist()]
        assert found[0] == (0, 0, 0, 0, 0, 0, 0, 0), "of others nothing but the id"
        assert found[1][:2] == (1, 2)
        assert found[1][5:7] == (5, 4)
        room.authorizer.adopt(None)
        writer = await room.mount(10)
        await writer.say(batch_of(b"more"))
        await writer.until(lambda reader: bool(reader.committed))
        await asking.settle()
        assert asking.ids == [0, 1], "nothing behind the barrier"
        for feed in (FeedMode.RECORDS, FeedMode.NONE):
            refused = await knock(room, client=2, number=3, feed=feed, asks=True)
            assert isinstance(refused.end, BadFrame)

    in_room(test)


def test_before_a_policy_is_known_only_operators_get_in() -> None:
    async def test(room: Room) -> None:
        room.authorizer = Authorizer()
        room.calls._authorizer = room.authorizer
        assert await refusal(room.calls.register(KEY, APP)) is PolicyUnreadable
        assert await refusal(room.calls.register(KEY, "")) is PolicyUnreadable
        assert isinstance((await knock(room)).end, PolicyUnreadable)
        with pytest.raises(PolicyUnreadable):
            room.calls.locate(APP)
        assert await refusal(room.calls.register(KEY, ANN)) is None
        room.authorizer.close("/policy is nonsense")
        with pytest.raises(PolicyUnreadable, match="/policy is nonsense"):
            room.calls.locate(APP)
        room.authorizer.adopt(policy(*Verb))
        room.authorizer.close("/policy is nonsense again")
        assert (await knock(room)).mounted is not None, "the last good one stays"

    in_room(test)


def test_thousands_of_mounts_are_told_in_one_turn() -> None:
    class Heard:
        def __init__(self) -> None:
            self.rights: Rights | None = None

        def review(self, rights: Rights) -> None:
            self.rights = rights

    async def work() -> None:
        access = Authorizer.free()
        mounts = [Heard() for _ in range(5000)]
        names = [Identity(KEY, Role.CLIENT, f"app-{number % 50}").uri for number in range(5000)]
        with_all = [access.reviewing(mount, name) for mount, name in zip(mounts, names, strict=True)]
        for one in with_all:
            one.__enter__()
        access.adopt(policy(Verb.APPEND, name="app-7"))
        allowed = [mount.rights is not None and mount.rights.may_append(3) for mount in mounts]
        assert allowed == [number % 50 == 7 for number in range(5000)]
        for one in with_all:
            one.__exit__(None, None, None)
        access.adopt(None)
        assert all(mount.rights is not None and not mount.rights.may_append(0) for mount in mounts), "they have gone"

    asyncio.run(work())


def test_operators_read_the_group_log_and_only_servers_append_to_it() -> None:
    access = Authorizer.free()

    def rights(identity: str) -> Rights:
        return access.rights_in(identity, 8, group_log=8)

    of = {role: Identity(KEY, role, "one").uri for role in Role}
    check_append(rights(of[Role.SERVER]), 8)
    check_append(rights(""), 8)  # without certificates nobody can be told apart
    for role in (Role.OPERATOR, Role.STORAGE):
        check_read(rights(of[role]), 8)
        with pytest.raises(GroupLogClosed, match="only servers append"):
            check_append(rights(of[role]), 8)
    with pytest.raises(GroupLogClosed):
        rights(of[Role.CLIENT])

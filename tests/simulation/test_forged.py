"""Somebody writes into a replica what no owner ever wrote: real owners over real storages notice, and the log stays."""

from __future__ import annotations

from tests.simulation.cell import Appender, Cell, cell, story
from waltzd.format.record import encode_payloads
from waltzd.protocol.descriptions import DIVERGED
from waltzd.server.session.owned import OwnedLog


def forge(c: Cell, name: str, session: int, first_id: int, count: int) -> None:
    """With the key of a server, before secrets; or with that of the storage."""
    payloads = [b"forged %d" % number for number in range(count)]
    c.replica(name).append(session, [encode_payloads(first_id, payloads)], -1)


def state(owned: OwnedLog[Appender], name: str) -> str:
    return next(one.state for one in owned.describe().replicas if one.storage == name)


async def is_out(c: Cell, owned: OwnedLog[Appender], name: str, last_id: int) -> None:
    """Its owner says so, the document says so, and nothing of it is cut."""
    await c.until(lambda: state(owned, name) == DIVERGED)
    assert not next(one.counts for one in owned.describe().replicas if one.storage == name)
    assert owned.is_troubled
    while not ((await c.meta()).replicas[name].is_diverged):
        await c.until(lambda: True)
    assert c.last_id(name) == last_id


async def set_aside(c: Cell, name: str) -> None:
    """As `waltzctl storage recover` does it; its owner makes an empty replica in its place."""
    calls = c.storages[name].calls
    assert calls is not None
    await calls.remove_partition(0, delete_files=False)


@story
async def test_other_bytes_under_an_id_of_the_open_session_put_a_replica_out_until_it_is_set_aside() -> None:
    async with cell() as c:
        first, log = await c.holding(20)
        first.task.cancel()
        owned = await c.own(generation=2)
        log = await c.opened(owned)
        forge(c, "s2", log.session.session, 20, 3)
        await log.committed(log.append(10))
        await is_out(c, owned, "s2", 22)
        await log.committed(log.append(5))
        owned.task.cancel()
        second = await c.own(generation=3)
        log = await c.opened(second)
        await is_out(c, second, "s2", 22)
        await log.committed(log.append(5))
        await set_aside(c, "s2")
        await c.all_hold(39)
        await c.until(lambda: state(second, "s2") == "LIVE")
        assert not second.is_troubled
        c.check_equal()


@story
async def test_the_same_last_id_with_other_bytes_is_not_level_for_the_next_owner() -> None:
    async with cell() as c:
        owned, log = await c.holding(10)
        c.storages["s2"].hang()
        await log.committed(log.append(5))
        owned.task.cancel()
        forge(c, "s2", log.session.session, 10, 5)
        c.storages["s2"].go_on()
        second = await c.own(generation=2)
        log = await c.opened(second)
        await is_out(c, second, "s2", 14)
        await log.committed(log.append(5))
        assert c.last_id("s2") == 14


@story
async def test_a_storage_that_comes_back_in_the_open_session_with_other_bytes_does_not_count_again() -> None:
    """The last of them is right, and nothing else is sent to it that it could refuse."""
    async with cell() as c:
        owned, log = await c.holding(10)
        c.storages["s2"].kill()
        await log.committed(log.append(5))
        await c.storages["s2"].start()
        calls = c.storages["s2"].calls
        assert calls is not None
        forge(c, "s2", log.session.session, 10, 4)
        right = log.session.cache.runs_from(14, 14, 1 << 20)
        c.replica("s2").append(log.session.session, right, -1)
        await is_out(c, owned, "s2", 14)


@story
async def test_one_against_one_opens_nothing_and_says_why() -> None:
    async with cell() as c:
        owned, log = await c.holding(10)
        c.storages["s2"].hang()
        await log.committed(log.append(5))
        owned.task.cancel()
        forge(c, "s2", log.session.session, 10, 5)
        c.storages["s2"].go_on()
        c.storages["s1"].kill()
        second = await c.own(generation=2)
        await c.until(lambda: "have different ends at id 14" in second.describe().waiting)
        assert (c.last_id("s0"), c.last_id("s2")) == (14, 14)
        await c.storages["s1"].start()
        await c.opened(second)
        await is_out(c, second, "s2", 14)

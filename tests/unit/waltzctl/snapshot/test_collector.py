"""Connections to daemons that stay open from one look to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tests.unit.snapshots import KEY, owned, replica, server, storage, well
from waltzctl.health.status import obstacles
from waltzctl.snapshot import collector
from waltzctl.snapshot.collector import AdminConnections
from waltzd.cluster.documents import Membership, ServerMeta
from waltzd.errors import CannotConnect


class Client:
    made: ClassVar[list[Client]] = []

    def __init__(self, address: str, *_: object, **__: object) -> None:
        self.address, self.is_closed = address, False
        self.made.append(self)

    async def close(self) -> None:
        self.is_closed = True


class Server(Client):
    made: ClassVar[list[Client]] = []


class Storage(Client):
    made: ClassVar[list[Client]] = []


META, OTHER = server("a").meta, server("b").meta


@pytest.fixture(autouse=True)
def nobody_asked() -> None:
    Server.made.clear()
    Storage.made.clear()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def call(
    contacts: AdminConnections, meta: Any = META, kind: Any = Server, error: BaseException | None = None
) -> Client:
    found: Client
    async with contacts.to(kind, meta, KEY, None, 1.0) as found:
        assert not found.is_closed
        if error is not None:
            raise error
    return found


def test_one_look_after_the_other_uses_the_same() -> None:
    async def work() -> None:
        async with AdminConnections() as contacts:
            first = await call(contacts)
            await contacts.rest()
            assert await call(contacts) is first
            assert [one.is_closed for one in Server.made] == [False]
        assert first.is_closed

    run(work())


def test_over_which_a_call_failed_is_not_used_again() -> None:
    async def work() -> None:
        async with AdminConnections() as contacts:
            first = await call(contacts)
            for error in (CannotConnect("gone"), asyncio.CancelledError()):
                with pytest.raises(type(error)):
                    await call(contacts, error=error)
            assert [one.is_closed for one in Server.made] == [True, True]
            assert await call(contacts) is not first

    run(work())


def test_what_a_look_had_no_use_for_is_closed() -> None:
    async def work() -> None:
        async with AdminConnections() as contacts:
            first, second = await call(contacts), await call(contacts, OTHER)
            await contacts.rest()
            await call(contacts)
            await contacts.rest()
            assert (first.is_closed, second.is_closed) == (False, True)

    run(work())


def test_a_daemon_that_moved_or_is_another_one_has_its_own() -> None:
    async def work() -> None:
        moved = ServerMeta(name="a", listen="x:1", admin_listen="x:2", instance=META.instance, version="1")
        same_name = storage("a").meta
        async with AdminConnections() as contacts:
            found = [await call(contacts), await call(contacts, moved), await call(contacts, same_name, Storage)]
            assert len({id(one) for one in found}) == 3
            assert found[1].address == "x:2"

    run(work())


def test_a_look_by_itself_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(collector, "ServerAdminClient", Server)
        monkeypatch.setattr(collector, "AdminClient", Storage)

        async def describe(_self: Client) -> Any:
            raise CannotConnect("gone")

        monkeypatch.setattr(Client, "describe", describe, raising=False)
        found = await collector.snapshot_from_daemons(well().meta, [META], [storage("s1").meta], {})
        assert [view.error is not None for view in found.nodes] == [True, True]
        assert all(one.is_closed for one in (*Server.made, *Storage.made))

    run(work())


def test_without_documents_the_replicas_are_those_that_the_owner_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are remembered may have moved since. One that is leaving is in no document any more."""
    leaving = replace(replica("s4"), role="leaving")
    here = owned(0, (replica("s1"), replica("s2"), replace(replica("s3"), role="learner"), leaving))
    silent = owned(1, ())
    reported = server("a", partitions=(here, silent)).reported
    monkeypatch.setattr(collector, "ServerAdminClient", Server)
    monkeypatch.setattr(collector, "AdminClient", Storage)

    async def describe(self: Client) -> Any:
        if isinstance(self, Storage):
            raise CannotConnect("gone")
        return reported

    monkeypatch.setattr(Client, "describe", describe, raising=False)
    remembered = dict.fromkeys(("s7", "s8", "s9"), Membership.MEMBER)
    names = ("s1", "s2", "s3", "s4")
    found = asyncio.run(
        collector.snapshot_from_daemons(
            well().meta, [META], [storage(name).meta for name in names], {0: remembered, 1: remembered, 2: remembered}
        )
    )
    assert found.partitions[0].replicas == {"s1": "member", "s2": "member", "s3": "learner"}
    assert [found.partitions[number].replicas for number in (1, 2, 3)] == [remembered, remembered, {}]
    with_nothing = asyncio.run(collector.snapshot_from_daemons(well().meta, [META], [], {}))
    assert with_nothing.partitions[0].replicas == found.partitions[0].replicas


def test_whether_a_storage_may_stop_is_not_judged_by_where_replicas_once_were(monkeypatch: pytest.MonkeyPatch) -> None:
    catching_up = replica("s2", counts=False, state="CATCHING_UP")
    here = owned(0, (replica("s1"), catching_up, replica("s3")))
    reports = {"a": server("a", partitions=(here,)).reported} | {
        name: storage(name).reported for name in ("s1", "s2", "s3")
    }
    monkeypatch.setattr(collector, "ServerAdminClient", Server)
    monkeypatch.setattr(collector, "AdminClient", Storage)

    async def describe(self: Client) -> Any:
        return reports[self.address.partition(":")[0]]

    monkeypatch.setattr(Client, "describe", describe, raising=False)
    before = {0: dict.fromkeys(("s1", "s2", "s4"), Membership.MEMBER)}
    metas = [storage(name).meta for name in ("s1", "s2", "s3")]
    found = asyncio.run(collector.snapshot_from_daemons(replace(well().meta, partitions=1), [META], metas, before))
    (obstacle,) = obstacles(found, "s3")
    assert "1 of 3 members level" in obstacle

"""One storage under two names: its acknowledgements would be on one disk, and count twice."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from tests.unit.snapshots import KEY, STORAGES, held, storage, well
from tests.unit.typed_command import typed_command
from waltzctl.placement import storage as command
from waltzctl.placement.daemons import Daemons
from waltzctl.shell.progress import unreported
from waltzctl.shell.safety import Danger
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import NameInUse

META = ClusterMeta(name="trial", key=KEY, partitions=4, created="2026-01-01")
NEW = StorageMeta(name="s4", listen="s9:1", admin_listen="s9:2", group="s4")


class Seen(Daemons):
    async def take_snapshot(self, cluster: Cluster) -> Any:
        return well()


async def made() -> Cluster:
    return await Cluster.create(MemoryTree().connect(), META, storages=[view.meta for view in well().storages])


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_address_that_was_given_to_another_storage_while_a_person_was_asked(
    is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reached(*_: object) -> Any:
        return storage("s1").reported

    typed = typed_command()
    monkeypatch.setattr(command, "Daemons", Seen)
    monkeypatch.setattr(command, "check_storage", reached)
    command.set_(name="s1", listen=NEW.listen, command=typed)

    async def work() -> None:
        cluster = await made()
        planned = await typed.prepare(cluster)
        if not is_taken:
            await planned.do(cluster, unreported)
            assert (await cluster.storages())["s1"].listen == NEW.listen
            return
        await cluster.add_storage(NEW)
        with pytest.raises(NameInUse, match="is an address of the storage s4 already"):
            await planned.do(cluster, unreported)
        assert (await cluster.storages())["s1"].listen == "s1:1"

    asyncio.run(work())


@pytest.mark.parametrize("there", ["same", "empty", "other"])
def test_a_storage_that_would_be_another_one_at_the_new_address_is_counted_as_lost(
    there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with the right key may answer there that holds nothing, or replicas that were made anew."""
    replicas = [held(number, incarnation=UUID(int=9)) if there == "other" else held(number) for number in range(4)]

    async def reached(*_: object) -> Any:
        return storage("s1", assigned=() if there == "empty" else tuple(replicas)).reported

    typed = typed_command()
    monkeypatch.setattr(command, "Daemons", Seen)
    monkeypatch.setattr(command, "check_storage", reached)
    command.set_(name="s1", listen=NEW.listen, command=typed)

    async def work() -> None:
        sets = ReplicaSets(partitions=dict.fromkeys(range(4), dict.fromkeys(STORAGES, Membership.MEMBER)))
        storages = [view.meta for view in well().storages]
        cluster = await Cluster.create(MemoryTree().connect(), META, storages=storages, replicas=sets)
        plan = (await typed.prepare(cluster)).plan
        worse = [(one.partition, one.after.level) for one in plan.margins if one.is_worse]
        if there == "same":
            assert (worse, plan.danger) == ([], Danger.ASK)
        else:
            assert (worse, plan.danger) == ([(number, 2) for number in range(4)], Danger.TYPED)

    asyncio.run(work())


def test_two_that_add_one_storage_under_two_names() -> None:
    async def work() -> None:
        cluster = await made()
        await cluster.add_storage(NEW)
        for listen, admin in (("s9:1", "s8:2"), ("s8:1", "s9:2"), ("s9:2", "s9:1")):
            with pytest.raises(NameInUse, match="is an address of the storage s4 already"):
                await cluster.add_storage(StorageMeta(name="s5", listen=listen, admin_listen=admin, group="s5"))
        assert "s5" not in await cluster.storages()

    asyncio.run(work())

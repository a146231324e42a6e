"""An owner of many partitions recovers a few at a time, so that the first ones are open long before the last one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.cell import KEY, Appender, SimPort, SimStorage, story
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets
from waltzd.cluster.memory import MemoryTree
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.session import Session
from waltzd.server.session.settings import RECOVERY_SECONDS_MAX, SessionSettings

PARTITIONS, AT_ONCE = 8, 2


@pytest.mark.parametrize("stuck", [None, 0, 5])
def test_partitions_are_recovered_in_order(stuck: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that cannot be recovered gives its turn to another one after a while."""
    begun: list[int] = []
    running = set[int]()
    recover = Session.recover

    async def watched(session: Session) -> None:
        number = session.log.partition
        begun.append(number)
        running.add(number)
        assert len(running - {stuck}) <= AT_ONCE
        if number == stuck:
            await asyncio.Event().wait()
        await recover(session)
        running.remove(number)

    monkeypatch.setattr(Session, "recover", watched)

    @story
    async def test() -> None:
        storages = {f"s{n}": SimStorage(f"s{n}", partitions=PARTITIONS, seed=n) for n in range(3)}
        for storage in storages.values():
            await storage.start(create=True)
        cluster = Cluster(MemoryTree().connect())
        await Cluster.create(
            cluster.coordinator,
            ClusterMeta(name="test", key=KEY, partitions=PARTITIONS, created="2026-01-01T00:00:00Z"),
            storages=[storage.meta for storage in storages.values()],
            replicas=ReplicaSets(partitions={n: dict.fromkeys(storages, Membership.MEMBER) for n in range(PARTITIONS)}),
        )
        settings = replace(SessionSettings(partitions=PARTITIONS, key=KEY), recoveries=asyncio.Semaphore(AT_ONCE))
        logs: list[OwnedLog[Appender]] = [
            OwnedLog(
                number, 1, cluster=cluster, connect=lambda meta: SimPort(storages[meta.name]), settings=settings,
                timer=PeriodicTimer(1.0), make_pipeline=Appender, say=lambda sentence: None,
            )
            for number in range(PARTITIONS)
        ]  # fmt: skip
        clock = asyncio.get_running_loop().time
        try:
            since = clock()
            for owned in logs:
                await owned.start()
            while not all(owned._pipeline or owned.partition == stuck for owned in logs):
                await asyncio.sleep(0.01)
            assert begun == list(range(PARTITIONS))
            assert clock() - since < RECOVERY_SECONDS_MAX * (2 if stuck is not None else 1)
            await asyncio.sleep(2 * RECOVERY_SECONDS_MAX)
            assert settings.recoveries._value == AT_ONCE, "each turn was given back, and once"
        finally:
            for owned in logs:
                await owned.close(hand_over=False)
            for storage in storages.values():
                await storage.stop()

    test()

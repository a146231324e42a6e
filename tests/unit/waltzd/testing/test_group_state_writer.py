"""The fence of consumer groups on a real log: clients, owners, locks and storages. Answers are lost, and owners die."""

from __future__ import annotations

from waltzd.client.client import Client
from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.groups import Mode
from waltzd.protocol.locks import Committed
from waltzd.server.groups.state_log import GroupStateLog, Key, group_entry, lock_of
from waltzd.server.groups.state_writer import GroupStateWriter
from waltzd.testing import LocalCluster

MAILER = GroupMeta(name="mailer", partitions=None, mode=Mode.QUEUE)


class Owner:
    """Of a partition, with what it takes to write down where the group stands in it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.state_log = GroupStateLog()

    async def read_on(self) -> GroupStateLog:
        async for transaction in self.client.scan(0, after=self.state_log.reach):
            self.state_log.read(transaction.id, transaction.payload)
        return self.state_log

    async def claim(self) -> None:
        await self.read_on()
        key = Key("mailer", self.state_log.groups["mailer"][1], 7)
        self.writer = GroupStateWriter(key, self.state_log, after=-1, now=0)
        await self.write()

    async def acknowledge(self, count: int = 1) -> None:
        state = self.writer.state
        for _ in range(count):
            state.reach_to(state.reach + 1, is_open=True)
            state.settle(state.reach, state.reach)
        self.writer.changed(0, count)
        await self.write()

    async def write(self) -> None:
        write = self.writer.write(0, self.state_log, is_urgent=True)
        while write is not None:
            outcome = await self.client.append(write.data, partition=0, locks=[write.lock], position=write.position)
            if isinstance(outcome, Committed):
                self.writer.committed(outcome.id)
                return
            self.writer.doubtful()
            write = self.writer.look(await self.read_on())


def test_an_owner_that_was_replaced_writes_nothing_and_the_others_lose_nothing() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as one, cluster.client() as other:
            assert isinstance(
                await one.append(group_entry(MAILER), partition=0, locks=[lock_of("mailer")], position=-1), Committed
            )
            first = Owner(one)
            await first.claim()
            await first.acknowledge(3)
            cluster.lose_next_acknowledgement()
            await first.acknowledge()
            cluster.force_next_lock_failure()
            await first.acknowledge()
            await cluster.kill_owner()
            await first.acknowledge()
            assert (first.writer.is_deposed, first.writer.state.reach) == (False, 5)
            assert first.writer.kept == 7, "the claim and six acknowledgements"
            second = Owner(other)
            await second.claim()
            assert second.writer.is_claimed
            assert (second.writer.state.epoch, second.writer.state.floor) == (first.writer.state.epoch + 1, 5)
            await first.read_on()
            await first.acknowledge()
            assert first.writer.is_deposed
            assert first.writer.kept == 7, "nobody is told that it was written"
            await second.acknowledge(2)
            third = Owner(one)
            await third.read_on()
            assert third.state_log.state("mailer", 7) == second.writer.state
            assert second.writer.state.floor == 7

    LocalCluster(partitions=1, storage_seconds=5.0).run(story)

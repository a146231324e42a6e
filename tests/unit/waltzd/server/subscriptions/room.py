"""A cluster in this process with groups, and members that say what a test wants them to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from tests.unit.timeless import run_cluster
from waltzd.client.client import Client
from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import NotReady, WaltzError
from waltzd.errors.operations import NotOwner
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    GroupPartitionStatus,
    Joined,
    JoinRequest,
    Leave,
    Mode,
    ParkedTransaction,
    Paused,
)
from waltzd.protocol.peers import AttendPort
from waltzd.server.groups.state import Parked
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.testing import LocalCluster

SECONDS = 30.0
"""So long a test waits for what has to come."""


class Given(NamedTuple):
    id: int
    attempt: int
    header: int
    payload: bytes
    tag: int
    epoch: int


class Hand:
    """One member. What it was given and told gathers here."""

    def __init__(self, port: AttendPort, name: str) -> None:
        self.name = name
        self.given: list[Given] = []
        self.joined: Joined | None = None
        self.answers: dict[int, AckResult] = {}
        self.kept_number = 0
        self.paused = ""
        self.error: WaltzError | None = None
        self.frames = 0
        self._port = port
        self._number = 0
        self._changed = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None

    async def join(self, request: JoinRequest) -> None:
        await self._port.send([request])
        self._reading = asyncio.create_task(self._read())
        await self.until(lambda: self.joined is not None or self.error is not None)
        if self.joined is None:
            assert self.error is not None
            raise self.error

    async def _read(self) -> None:
        try:
            while (frames := await self._port.receive()) is not None:
                for frame in frames:
                    self._take(frame)
                async with self._changed:
                    self._changed.notify_all()
        except WaltzError as error:
            self.error = self.error or error
        async with self._changed:
            self._changed.notify_all()

    def _take(self, frame: DeliveryFrame) -> None:
        match frame:
            case Joined():
                self.joined = frame
            case Deliveries():
                self.frames += 1
                ends = np.cumsum(frame.lengths, dtype=np.int64).tolist()
                for at, end in enumerate(ends):
                    start = end - int(frame.lengths[at])
                    self.given.append(
                        Given(
                            int(frame.ids[at]),
                            int(frame.attempts[at]),
                            int(frame.headers[at]),
                            bytes(frame.payloads[start:end]),
                            frame.tag,
                            frame.epoch,
                        )
                    )
            case AckResult():
                self.answers[frame.number] = frame
            case AcksDurable():
                self.kept_number = frame.number
            case Paused():
                self.paused = frame.reason
            case Dismissed():
                self.error = frame.error

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS), self._changed:
            await self._changed.wait_for(is_so)

    @property
    def epoch(self) -> int:
        assert self.joined is not None
        return self.joined.epoch

    @property
    def ids(self) -> list[int]:
        return [one.id for one in self.given]

    async def take(self, count: int) -> list[Given]:
        """So many more that it was given, beyond those that were taken."""
        taken = self._taken
        await self.until(lambda: len(self.given) >= taken + count or self.error is not None)
        if self.error is not None and len(self.given) < taken + count:
            raise self.error
        self._taken = taken + count
        return self.given[taken : taken + count]

    _taken = 0

    async def say(
        self,
        verb: AckKind,
        *ids: int,
        epoch: int | None = None,
        tag: int | None = None,
        reason: str = "",
        delay_ms: int | None = None,
    ) -> AckResult:
        self._number += 1
        number = self._number
        column = np.array(sorted(ids), np.int64)
        highest = max((one.tag for one in self.given), default=0)
        said = Ack(
            number=number,
            verb=verb,
            epoch=self.epoch if epoch is None else epoch,
            tag=highest if tag is None else tag,
            firsts=column,
            lasts=column,
            reason=reason,
            delay_ms=delay_ms,
        )
        await self._port.send([said])
        await self.until(lambda: number in self.answers or self.error is not None)
        if number not in self.answers:
            assert self.error is not None
            raise self.error
        return self.answers[number]

    async def acknowledge(self, *ids: int) -> AckResult:
        return await self.say(AckKind.ACKNOWLEDGE, *ids)

    async def kept(self, number: int) -> None:
        await self.until(lambda: self.kept_number >= number or self.error is not None)
        if self.kept_number < number:
            assert self.error is not None
            raise self.error

    async def dismissed(self) -> WaltzError:
        await self.until(lambda: self.error is not None)
        assert self.error is not None
        return self.error

    async def leave(self) -> None:
        await self._port.send([Leave()])

    async def ended(self) -> None:
        """The owner has no more to say."""
        assert self._reading is not None
        async with asyncio.timeout(SECONDS):
            await asyncio.shield(self._reading)

    async def close(self) -> None:
        self._port.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


class Room:
    """The cluster. Groups are in partition 0."""

    def __init__(self, cluster: LocalCluster, client: Client) -> None:
        self.cluster = cluster
        self.client = client

    @staticmethod
    def run(story: Callable[[Room], Awaitable[None]], **settings: Any) -> None:
        async def play(cluster: LocalCluster) -> None:
            async with cluster.client() as client:
                await story(Room(cluster, client))

        run_cluster(LocalCluster(**{"partitions": 1, "groups": True, **settings}), play)

    def coordinator(self, partition: int = 0) -> GroupCoordinator:
        coordinator = self.cluster._running(self.cluster.owner(partition)).groups
        assert coordinator is not None
        return coordinator

    async def append(self, count: int, *, header: Callable[[int], int] = lambda number: 0, size: int = 0) -> None:
        """Their payloads are their ids, when nobody else writes, and zeros behind."""
        first = await self.client.end_position(0) + 1
        await self.client.append_many(
            [b"%d" % (first + number) + bytes(size) for number in range(count)],
            partition=0,
            kinds=[header(first + number) for number in range(count)],
        )

    async def make(self, name: str, **settings: Any) -> MadeGroup:
        meta = GroupMeta(name=name, **{"partitions": None, "mode": Mode.QUEUE, "back_off_ms": (), **settings})
        found = await self.again_and_again(lambda: self.coordinator().make(meta))
        assert isinstance(found, MadeGroup)
        return found

    def parked(self, name: str) -> list[ParkedTransaction]:
        return list(self.coordinator().parked(name, None, None, 100)[0])

    async def parked_in_log(self, name: str) -> list[Parked]:
        """In partition 0, as another server would read it now."""
        coordinator = self.coordinator()
        await coordinator.level()
        state = coordinator.state_log.state(name, 0)
        assert state is not None
        return [state.parked[id] for id in sorted(state.parked)]

    def group_partition(self, name: str) -> GroupPartitionStatus:
        """In partition 0."""
        return self.coordinator().describe(name)[0].places[0]

    async def write(self, name: str) -> None:
        """What has changed is on disks afterwards."""
        (group_partition,) = (
            group_partition for group_partition in self.coordinator().active if group_partition.key.name == name
        )
        await group_partition.rewrite()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not is_so():
                await asyncio.sleep(0.02)

    async def again_and_again(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Until no fail-over is in the way."""
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    return await call()
                except (NotOwner, NotReady):
                    await asyncio.sleep(0.02)

    @asynccontextmanager
    async def member(self, group: str, name: str, *, partition: int = 0, room: int | None = None) -> AsyncIterator[Hand]:
        async def join() -> Hand:
            owner = self.cluster._running(self.cluster.owner(partition))
            group_partition = owner.owner.topology().places[partition]
            if group_partition.address is None:
                raise NotReady("nobody owns it")
            hand = Hand(self.cluster.connect(group_partition.address, self.cluster.meta.key).attend(), name)
            request = JoinRequest(
                cluster_key=self.cluster.meta.key,
                partition=partition,
                generation=group_partition.generation,
                group=group,
                member=name,
                room=room,
            )
            try:
                await hand.join(request)
            except BaseException:
                await hand.close()
                raise
            return hand

        hand = await self.again_and_again(join)
        try:
            yield hand
        finally:
            await hand.close()

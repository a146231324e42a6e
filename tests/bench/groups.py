"""What consumer groups cost: acknowledgements, the way from a commit to a member, and groups that nobody works in.

Servers, storages and members are in one process, without a network: the processor time is that of all of them together.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Callable

import numpy as np

from tests.bench.machine import use_of
from waltzd.cluster.groups import GroupMeta
from waltzd.format.checksum import I64
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    Change,
    Deliveries,
    DeliveryFrame,
    Joined,
    JoinRequest,
    MemberFrame,
    Mode,
)
from waltzd.protocol.locks import Committed
from waltzd.protocol.peers import AttendPort
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import lock_of, state_entry
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.testing import LocalCluster

BATCH = 1000
SIZE = 100
STRETCHES = 4096
AT_ONCE = 200


def _coordinator(cluster: LocalCluster) -> GroupCoordinator:
    coordinator = cluster._running(cluster.owner(0)).groups
    assert coordinator is not None
    return coordinator


async def _join(cluster: LocalCluster, group: str, name: str, room: int) -> AttendPort:
    place = cluster._running(cluster.owner(0)).owner.topology().places[0]
    assert place.address is not None
    port = cluster.connect(place.address, cluster.meta.key).attend()
    request = JoinRequest(
        cluster_key=cluster.meta.key, partition=0, generation=place.generation, group=group, member=name, room=room
    )
    await port.send([request])
    return port


class _Worker:
    """A member that acknowledges what it gets as it gets it."""

    def __init__(self, port: AttendPort, *, is_single: bool, seen: Callable[[I64], None]) -> None:
        self.done = 0
        self._port = port
        self._is_single = is_single
        self._seen = seen
        self._epoch = self._number = 0

    async def work(self) -> None:
        while (frames := await self._port.receive()) is not None:
            answers: list[MemberFrame] = []
            for frame in frames:
                self._take(frame, answers)
            if answers:
                await self._port.send(answers)

    def _take(self, frame: DeliveryFrame, answers: list[MemberFrame]) -> None:
        match frame:
            case Joined():
                self._epoch = frame.epoch
            case AckResult():
                self.done += frame.taken
            case Deliveries():
                self._seen(frame.ids)
                cuts = np.flatnonzero(np.diff(frame.ids) != 1)
                firsts, lasts = frame.ids[np.append(0, cuts + 1)], frame.ids[np.append(cuts, len(frame.ids) - 1)]
                if self._is_single:
                    firsts = lasts = frame.ids
                step = 1 if self._is_single else STRETCHES
                for at in range(0, len(firsts), step):
                    self._number += 1
                    part = slice(at, at + step)
                    answers.append(
                        Ack(self._number, AckKind.ACKNOWLEDGE, self._epoch, frame.tag, firsts[part], lasts[part])
                    )


async def acknowledgements(cluster: LocalCluster, mode: Mode, *, members: int, count: int, is_single: bool) -> None:
    async with cluster.client() as client:
        after = await client.end_position(0)
        for _ in range(count // BATCH):
            await client.append_many([bytes(SIZE)] * BATCH, partition=0)
    name = f"{mode}-{members}-{is_single}".lower()
    coordinator = _coordinator(cluster)
    made = await coordinator.make(GroupMeta(name=name, partitions=None, mode=mode, max_in_flight=BATCH))
    await coordinator.change(name, made.made_at, 0, Change.RESET, [after])
    ports = [await _join(cluster, name, f"member-{number}", BATCH) for number in range(members)]
    workers = [_Worker(port, is_single=is_single, seen=lambda ids: None) for port in ports]
    begun, used = time.perf_counter(), time.process_time()
    tasks = [asyncio.create_task(worker.work()) for worker in workers]
    while sum(worker.done for worker in workers) < count:
        await asyncio.sleep(0.005)
    took, used = time.perf_counter() - begun, time.process_time() - used
    for task, port in zip(tasks, ports, strict=True):
        task.cancel()
        port.cancel()
    how = "one by one" if is_single else "as stretches"
    print(f"  {mode:8} {members} members, {how:12}  {count / took:9,.0f} /s  {count / used:9,.0f} /s of processor time")


async def latencies(cluster: LocalCluster, seconds: float) -> None:
    """From the outcome of an append to the arrival at a member, at 200 appends a second."""
    committed: dict[int, float] = {}
    arrived: dict[int, float] = {}

    def seen(ids: I64) -> None:
        now = time.perf_counter()
        arrived.update((id, now) for id in ids.tolist())

    async with cluster.client() as client:
        coordinator = _coordinator(cluster)
        made = await coordinator.make(GroupMeta(name="latency", partitions=None, mode=Mode.QUEUE))
        await coordinator.change("latency", made.made_at, 0, Change.RESET, [await client.end_position(0)])
        port = await _join(cluster, "latency", "member", 100)
        task = asyncio.create_task(_Worker(port, is_single=False, seen=seen).work())
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            outcome = await client.append(bytes(SIZE), partition=0)
            assert isinstance(outcome, Committed)
            committed[outcome.id] = time.perf_counter()
            await asyncio.sleep(0.005)
        while len(arrived) < len(committed):
            await asyncio.sleep(0.005)
        task.cancel()
        port.cancel()
    late = np.array([arrived[id] - at for id, at in committed.items()]) * 1000
    median, p99 = np.percentile(late, (50, 99))
    print(f"  delivered after its commit was told, ms: median {median:.2f}, p99 {p99:.2f} ({len(late)} transactions)")


async def idle(groups: int, seconds: float) -> None:
    """Each group has begun in one partition, and nobody works in it."""
    async with LocalCluster(partitions=1, servers=1) as cluster:
        coordinator = _coordinator(cluster)
        gc.collect()
        before = _rss()
        log = coordinator.group_log
        for first in range(0, groups, AT_ONCE):
            names = [f"group-{number}" for number in range(first, min(groups, first + AT_ONCE))]
            found = await asyncio.gather(
                *[coordinator.make(GroupMeta(name=name, partitions=None, mode=Mode.QUEUE)) for name in names]
            )
            await asyncio.gather(
                *[
                    log.append(state_entry(name, 0, one.made_at, GroupState(after=-1).snapshot()), lock_of(name, 0), -1)
                    for name, one in zip(names, found, strict=True)
                ]
            )
        await coordinator.level()
        gc.collect()
        grown = _rss() - before
        used, begun = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (time.process_time() - used) / (time.perf_counter() - begun)
        print(
            f"  {groups:,} idle groups: {100 * share:.1f} % of a core for the whole process, {grown / 1e6:.0f} MB more, "
            f"with {coordinator.state_log.bytes / 1e6:.1f} MB of the log in memory three times"
        )


def _rss() -> int:
    found = use_of(os.getpid())
    assert found is not None
    return found.memory_bytes


async def _all(options: argparse.Namespace) -> None:
    print("rest")
    await idle(options.groups, options.seconds)  # first: what the others leave behind would be taken for its own
    async with LocalCluster(partitions=1) as cluster:
        print("acknowledgements")
        for mode, members, is_single in (
            (Mode.QUEUE, 1, False),
            (Mode.QUEUE, 4, False),
            (Mode.QUEUE, 4, True),
            (Mode.ORDERED, 1, False),
        ):
            await acknowledgements(cluster, mode, members=members, count=options.count, is_single=is_single)
        print("deliveries")
        await latencies(cluster, options.seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench groups", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="transactions of each run")
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    asyncio.run(_all(parser.parse_args(arguments)))
    return 0

"""Members of consumer groups race in a cluster of this process, while they, the servers and storages fail; then a verdict.

    ./dev groups [--seconds 600] [--members 16] [--mode queue|keyed|ordered] [--seed N]
    ./dev groups --real [--seconds 600] [--members 16] [--seed N]

A fifth of the members crash, again and again; owners are killed, storages are away; operators replay, skip and reset. In
the end everything is mended, and the group has to come to the end of the log. Nothing may be skipped. `--real`: members are
processes that work through the library in three groups at once, on real daemons (`tests/group_daemons.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.checker.group_history import Changed, GroupHistory, Standing, Written
from tests.checker.group_verdict import judge_group
from tests.checker.recorder import payload_key
from tests.checker.verdict import Verdict
from tests.group_daemons import race_on_daemons
from tests.group_members import CALM, GOOD, WINDOW, Clock, GroupMemory, Habits, Member, is_calm
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import WaltzError
from waltzd.protocol.groups import Change, GroupPartitionStatus, Mode
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.testing import LocalCluster

GROUP = "racers"
HEADERS = 4
PATIENCE_SECONDS = 120.0
CHANGES = {"replay": Change.REPLAY, "discard": Change.DISCARD, "skip": Change.SKIP, "reset": Change.RESET}


@dataclass(frozen=True, kw_only=True)
class Course:
    mode: Mode
    seed: int
    seconds: float
    members: int = 16
    partitions: int = 2
    rate: float = 150.0
    """Transactions a second."""
    habits: Habits = field(default_factory=Habits)
    ack_wait: float = 2.0
    operators: bool = True
    kills: bool = True


class Race:
    def __init__(self, cluster: LocalCluster, course: Course, say: Callable[[str], None] = lambda line: None) -> None:
        self.cluster, self.course = cluster, course
        self.chance = random.Random(course.seed)
        self.meta = GroupMeta(
            name=GROUP,
            partitions=None,
            mode=course.mode,
            ack_wait_ms=round(course.ack_wait * 1000),
            max_in_flight=20,
            deliver_max=4,
            back_off_ms=(20, 200),
            kinds=tuple(range(HEADERS - 1)),
        )
        self.history = GroupHistory(
            course.mode,
            room=self.meta.max_in_flight,
            deliver_max=self.meta.deliver_max,
            headers=self.meta.kinds,
            window=WINDOW,
        )
        self.notes = GroupMemory(self.history, say)
        self.clock = Clock(time.monotonic)
        self.is_racing = True
        self.began = time.monotonic()
        self.lives = 0

    async def run(self) -> Verdict:
        made = await self.cluster.connect(self.cluster.servers[0], self.cluster.meta.key).make_group(self.meta)
        self.made_at = made.made_at
        members = [asyncio.create_task(self._live(number)) for number in range(self.course.members)]
        others = [asyncio.create_task(self._load())]
        if self.course.kills:
            others.append(asyncio.create_task(self._kill()))
        if self.course.operators:
            others.append(asyncio.create_task(self._operate()))
        try:
            await asyncio.sleep(self.course.seconds)
            self.is_racing = False
            await asyncio.gather(*others)
            await self._come_to_the_end(members)
        finally:
            for task in (*members, *others):
                task.cancel()
            await asyncio.gather(*members, *others, return_exceptions=True)
        return judge_group(self.history)

    # -- who runs

    async def _live(self, number: int) -> None:
        """A process of a member. A fifth of them crash, again and again."""
        while True:
            self.lives += 1
            life = asyncio.gather(*(self._member(number, partition) for partition in range(self.course.partitions)))
            crashes = number % 5 == 0 and self.is_racing
            try:
                await asyncio.wait_for(life, 0.2 + 1.5 * self.chance.random() if crashes else None)
            except TimeoutError:
                await asyncio.sleep(0.3 * self.chance.random())

    def _member(self, number: int, partition: int) -> asyncio.Task[None]:
        member = Member(
            f"m{number}",
            GROUP,
            partition,
            key=self.cluster.meta.key,
            addresses=self.cluster.servers,
            connect=lambda address: self.cluster.connect(address, self.cluster.meta.key),
            notes=self.notes,
            clock=self.clock,
            pick=random.Random(f"{self.course.seed} {number} {partition} {self.lives}"),
            habits=self._habits,
            life=f".{self.lives}",
        )
        return asyncio.create_task(member.run())

    @property
    def _is_calm(self) -> bool:
        return is_calm(time.monotonic() - self.began)

    def _habits(self) -> Habits:
        return GOOD if not self.is_racing else CALM if self._is_calm else self.course.habits

    async def _load(self) -> None:
        """Keyed ones take turns at a few headers, by which the group orders them."""
        count = 0
        async with self.cluster.client() as client:
            while self.is_racing:
                count += 1
                payload = f"{self.course.seed} {count} ".encode() + secrets.token_bytes(self.chance.choice((0, 8, 300)))
                partition = self.chance.randrange(self.course.partitions)
                await client.append(payload, partition=partition, kind=self.chance.randrange(HEADERS))
                await asyncio.sleep(2 * self.chance.random() / self.course.rate)

    async def _kill(self) -> None:
        """An owner of a partition or of the group log, or a storage."""
        cluster, chance = self.cluster, self.chance
        while self.is_racing:
            await asyncio.sleep((2.5 if self._is_calm else 0.5) + chance.random())
            await cluster.wait_until_ready()
            if chance.random() < 0.6:
                began, keeper = self.clock(), cluster.owner(self.course.partitions)
                name = await cluster.kill_owner(chance.randrange(self.course.partitions + 1))
                await asyncio.sleep(0.5 * chance.random())
                await cluster.start_server(name)
                if name == keeper:
                    await cluster.wait_until_ready()
                    self.history.outages.append((began, self.clock()))
            else:
                number = chance.randrange(3)
                cluster.pause_storage(number)
                await asyncio.sleep(chance.random())
                cluster.resume_storage(number)
        await cluster.wait_until_ready()

    # -- operators

    def _coordinator(self, partition: int) -> GroupCoordinator | None:
        for server in self.cluster._living():
            if partition in server.owner.owned and server.groups is not None:
                return server.groups
        return None

    def _place(self, partition: int) -> GroupPartitionStatus | None:
        coordinator = self._coordinator(partition)
        if coordinator is None or GROUP not in coordinator.state_log.groups:
            return None
        return next((one for one in coordinator.describe(GROUP)[0].places if one.partition == partition), None)

    async def _operate(self) -> None:
        chance = self.chance
        while self.is_racing:
            await asyncio.sleep(0.4 + chance.random())
            partition = chance.randrange(self.course.partitions)
            coordinator, place = self._coordinator(partition), self._place(partition)
            if coordinator is None or place is None or self._is_calm:
                continue
            parked = [one.id for one in coordinator.parked(GROUP, partition, None, 1000)[0]]
            verb = chance.choice(("replay", "replay", "discard", "skip", "reset"))
            if verb in ("replay", "discard") and parked:
                ids = chance.sample(parked, chance.randrange(1, len(parked) + 1))
                await self._change(coordinator, Changed(self.clock(), verb, partition, ids=tuple(ids)))
            elif verb in ("skip", "reset") and chance.random() < 0.2:
                up_to = max(-1, place.floor + chance.randrange(-30, 10))
                await self._change(coordinator, Changed(self.clock(), verb, partition, up_to=min(up_to, place.reach)))

    async def _change(self, coordinator: GroupCoordinator, change: Changed) -> None:
        ids = change.ids or (change.up_to,)
        try:
            async with asyncio.timeout(5):
                done = await coordinator.change(GROUP, self.made_at, change.partition, CHANGES[change.verb], ids)
            change.returned, change.epoch = self.clock(), done.epoch
        except (WaltzError, TimeoutError):
            pass
        self.notes.changed(change)

    # -- the end

    async def _come_to_the_end(self, members: Sequence[asyncio.Task[None]]) -> None:
        await self.cluster.wait_until_ready()
        ends = {partition: self.cluster.end_position(partition) for partition in range(self.course.partitions)}
        for partition in ends:
            runs = await self.cluster.log(partition)
            self.history.log[partition] = {
                record.id: Written(payload_key(bytes(record.payload)), record.header, str(record.header)) for record in runs
            }
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            for task in members:
                if task.done():
                    task.result()
            places = {partition: self._place(partition) for partition in ends}
            if all(place is not None and place.floor >= ends[partition] for partition, place in places.items()):
                break
            await asyncio.sleep(0.05)
        for partition in ends:
            coordinator, place = self._coordinator(partition), self._place(partition)
            if coordinator is not None and place is not None:
                parked = {one.id: one.failures for one in coordinator.parked(GROUP, partition, None, 1000)[0]}
                self.history.standings[partition] = Standing(place.floor, place.stopped, parked)


def race(course: Course, say: Callable[[str], None] = lambda line: None) -> tuple[GroupHistory, Verdict]:
    history: list[GroupHistory] = []

    async def story(cluster: LocalCluster) -> Verdict:
        one = Race(cluster, course, say)
        history.append(one.history)
        return await one.run()

    verdict = LocalCluster(partitions=course.partitions, servers=3).run(story)
    return history[0], verdict


def _real(seed: int, seconds: float, members: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="waltz-groups-"))
    print(f"seed {seed}; everything is in {folder}", flush=True)
    report = race_on_daemons(folder, seed=seed, seconds=seconds, members=members)
    print(report, flush=True)
    if report.is_sound:
        shutil.rmtree(folder)
    return int(not report.is_sound)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev groups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mode")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--mode", type=Mode, default=None, choices=list(Mode), help="one after the other, if not given")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--real", action="store_true", help="processes on real daemons, all modes at once")
    parser.add_argument("--trace", action="store_true", help="tell all that members saw")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 30)
    if arguments.real:
        return _real(seed, arguments.seconds, arguments.members)
    code = 0
    for mode in [arguments.mode] if arguments.mode else list(Mode):
        print(f"{mode}, seed {seed}", flush=True)
        course = Course(mode=mode, seed=seed, seconds=arguments.seconds, members=arguments.members)
        _, verdict = race(course, print if arguments.trace else lambda line: None)
        print(verdict, flush=True)
        code = code or int(not verdict.is_sound)
    return code


if __name__ == "__main__":
    sys.exit(main())

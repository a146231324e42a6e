"""Nemeses of disks: full, slow, failing, without power, damaged, emptied.

What a damaged storage does by itself is in docs/storage.md; what is left to an operator is done here, with the calls that
waltzctl makes.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from tests.chaos import disks, preload
from tests.chaos.nemesis import Nemesis, a_kind
from tests.chaos.plan import SERVERS, STORAGES, STORAGES_AT_ONCE
from tests.chaos.preload import DiskTrouble
from tests.chaos.world import PARTITIONS
from waltzctl.local_cluster.daemon import Daemon
from waltzd.errors import EXIT_FINDINGS, CannotConnect, WaltzError
from waltzd.errors.operations import DaemonEnded
from waltzd.format.finding import Finding

SOUND_SECONDS = 60
READY_SECONDS = 30
FLIPS_MAX = 3
LIED, LIE_SECONDS_MAX = 100, 60
"""So many transactions a storage acknowledges and does not keep: more than can be under way at once."""


@a_kind("disk-full", STORAGES, refusal=disks.refusal)
class DiskFull(Nemesis):
    """There is no space, and then there is again."""

    async def begin(self) -> None:
        self.world.disks[self.target].fill()

    async def end(self) -> None:
        self.world.disks[self.target].free()


class PoorDisk(Nemesis):
    def trouble(self) -> DiskTrouble:
        raise AssertionError("each of these has its own trouble")

    async def begin(self) -> None:
        self.world.preload.spoil(self.target, self.trouble())

    async def end(self) -> None:
        self.world.preload.spoil(self.target, DiskTrouble())


@a_kind("disk-slow", STORAGES, refusal=preload.refusal)
class DiskSlow(PoorDisk):
    def trouble(self) -> DiskTrouble:
        delay = self.pick.choice((20, 100, 500, 3000))
        self.remarks.append(f"{delay} ms")
        return DiskTrouble(flush_delay_ms=delay, write_delay_ms=delay // 20)


@a_kind("short-writes", STORAGES, refusal=preload.refusal)
class ShortWrites(PoorDisk):
    def trouble(self) -> DiskTrouble:
        return DiskTrouble(short_percent=50)


@a_kind("flush-error", STORAGES, refusal=preload.refusal)
class FlushError(PoorDisk):
    """One flush fails, and the storage ends: it cannot know what is on its disk."""

    def trouble(self) -> DiskTrouble:
        self.world.may_end(self.target)
        return DiskTrouble(flush_fails=1)

    async def end(self) -> None:
        if self.world.preload.flush_fails(self.target) == 0:
            await self.world.cluster.gone(self.target)
            self.remarks.append("it ended")
        await super().end()
        self.world.look_for_deaths()


class PowerCut(Nemesis):
    """Its machine stops, and what was not flushed is gone. No flush is under way when the file system ends: one that is
    could report success falsely, which no real disk would do."""

    async def begin(self) -> None:
        for name in self.names:
            self.world.cluster.local.daemons[name].send(signal.SIGSTOP)
        for name in self.names:
            self.world.disks[name].cut_power()
        for name in self.names:
            self.world.kill(name)

    async def end(self) -> None:
        for name in self.names:
            await asyncio.to_thread(self.world.disks[name].restore_power)
            self.world.spawn(name)


@a_kind("power-cut", STORAGES, refusal=disks.refusal)
class PowerCutOfOne(PowerCut):
    pass


@a_kind("power-cuts", (STORAGES_AT_ONCE,), refusal=disks.refusal)
class PowerCutOfAll(PowerCut):
    pass


@a_kind("lying-disks", (STORAGES_AT_ONCE,), refusal=lambda: disks.refusal() or preload.refusal())
class LyingDisks(PowerCut):
    """Flushes do nothing, on all storages, and then the power is cut, and nobody is left who remembers: no log survives
    that. It shows that a run notices."""

    is_fair = False

    async def begin(self) -> None:
        for name in self.names:
            self.world.preload.spoil(name, DiskTrouble(flush_lies=1))
        before = await self._held()
        async with asyncio.timeout(LIE_SECONDS_MAX):
            while (await self._held()) < before + LIED:
                await asyncio.sleep(0.1)
        await super().begin()
        for name in SERVERS:
            self.world.kill(name)

    async def _held(self) -> int:
        """How many transactions the storage says it has that has the fewest."""
        counts = []
        for name in self.names:
            async with self.world.admin(name) as admin:
                replicas = (await admin.describe()).assigned
            counts.append(sum(found.status.last_id + 1 for found in replicas if found.status is not None))
        return min(counts)

    async def end(self) -> None:
        for name in self.names:
            self.world.preload.spoil(name, DiskTrouble())
        await super().end()
        for name in SERVERS:
            self.world.spawn(name)


# -- damage: of one storage at a time


class Damage(Nemesis):
    """Done while the storage is down. At the end it is started; then an operator looks at it until it is sound again."""

    is_of_promises: ClassVar[bool] = False
    """Whether it may happen that the storage does not know any more what it promised, and has to begin anew."""

    async def begin(self) -> None:
        self.world.kill(self.target)
        await asyncio.to_thread(self.harm, self.world.storage_directory(self.target))

    def harm(self, directory: Path) -> None:
        raise AssertionError("each of these has its own way")

    async def end(self) -> None:
        self.world.spawn(self.target)

    async def heal(self) -> None:
        """What an operator does, and then what the others do. Nothing else is broken while this lasts."""
        await self._be_ready()
        deadline = asyncio.get_running_loop().time() + SOUND_SECONDS
        while (wrong := await self._wrong()) is not None:
            assert asyncio.get_running_loop().time() < deadline, f"{self.target} does not become sound: {wrong}"
            await asyncio.sleep(0.3)

    async def _be_ready(self) -> None:
        """A storage that does not know its cluster does not start: it goes on as a new one."""
        daemon = self.world.cluster.local.daemons[self.target]
        self.world.may_end(self.target)
        deadline = asyncio.get_running_loop().time() + READY_SECONDS
        while not await self._answers():
            assert asyncio.get_running_loop().time() < deadline, f"{self.target} does not answer: {daemon.words()[-2000:]}"
            end = how_it_ended(daemon)
            if end is not None:
                assert self.is_of_promises, end
                assert f"exit code {EXIT_FINDINGS}" in end, end
                self.remarks.append("it did not start, and was emptied")
                await asyncio.to_thread(empty, self.world.storage_directory(self.target))
                self.world.spawn(self.target)
            await asyncio.sleep(0.1)

    async def _answers(self) -> bool:
        async with self.world.admin(self.target) as admin:
            try:
                await admin.describe()
            except CannotConnect:
                return False
        return True

    async def _wrong(self) -> str | None:
        """What is still wrong. Verifying is all that it needs, but for a replica that is refused for good."""
        try:
            async with self.world.admin(self.target) as admin:
                described = await admin.describe()
                refused = [found.partition for found in described.assigned if found.status is None]
                if refused:
                    assert self.is_of_promises, f"{self.target} refuses {refused}: {described}"
                    self.remarks.append(f"refused {refused}, made anew")
                    await admin.remove_partitions(refused)
                    await admin.create_partitions(refused)
                findings = [found async for found in admin.verify() if isinstance(found, Finding)]
        except WaltzError as error:
            return str(error)
        sound = [found.partition for found in described.assigned if found.status is not None and found.status.is_sound]
        if findings:
            return findings[0].sentence()  # the storage knows of it now, and its owner heals it
        is_whole = len(sound) == len(described.assigned) and set(sound) >= set(PARTITIONS)  # and the group log
        return None if is_whole else f"only {sound} are sound"


@a_kind("flip-segment", STORAGES, is_damaging=True)
class FlipSegment(Damage):
    """Bits of sealed segments, or of their indexes."""

    def harm(self, directory: Path) -> None:
        suffix = self.pick.choice(("seg", "seg", "idx"))
        sealed = [path for folder in numbered(directory) for path in sorted(folder.glob(f"*.{suffix}"))[:-1]]
        if not sealed:
            self.remarks.append("nothing was sealed yet")
        for path in self.pick.choices(sealed, k=self.pick.randint(1, FLIPS_MAX)) if sealed else ():
            self.remarks.append(
                f"{path.parent.name}/{path.name} at {flip(path, self.pick.random(), self.pick.randrange(8))}"
            )


@a_kind("flip-control", STORAGES, is_damaging=True)
class FlipControl(Damage):
    """A bit of a small file that says what the storage had promised."""

    is_of_promises = True

    def harm(self, directory: Path) -> None:
        files = [*directory.glob("waltz-storage.ctl"), *directory.glob("waltz-storage.id")]
        files += [path for folder in numbered(directory) for path in folder.glob("promise")]
        path = self.pick.choice(sorted(files))
        at = flip(path, self.pick.random(), self.pick.randrange(8))
        self.world.flipped.add(self.target)
        self.remarks.append(f"{path.relative_to(directory)} at {at}")


@a_kind("wipe", STORAGES, is_damaging=True)
class Wipe(Damage):
    """Its disk was replaced by an empty one."""

    def harm(self, directory: Path) -> None:
        empty(directory)


def how_it_ended(daemon: Daemon) -> str | None:
    try:
        daemon.check_running()
    except DaemonEnded as error:
        return error.message
    return None


def numbered(directory: Path) -> Iterable[Path]:
    """The folders of partitions."""
    return sorted(path for path in directory.iterdir() if path.name.isdigit())


def flip(path: Path, place: float, bit: int) -> int:
    """Where."""
    with path.open("r+b", buffering=0) as file:
        at = int(place * path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return at


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

"""The machine of a storage: its disk, what can happen to that, and the daemon on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from tests.simulation.loop import LIFE, Life
from tests.simulation.machines import Exited, Machine, World
from tests.simulation.versions import BEFORE
from waltzd.cluster.cluster import partition_path
from waltzd.cluster.documents import PartitionMeta, StorageMeta
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import WaltzError
from waltzd.errors.operations import FlushFailed
from waltzd.format.batch import Head as BatchHead
from waltzd.format.finding import Code, Finding
from waltzd.format.layout import BATCHES, CONTROL_NAME, HARD_STATE_NAME, HEADER_BYTES, SEGMENT_SUFFIX, FileHeader
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, encode_payloads, id_and_length
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.document import decode
from waltzd.protocol.peers import NOBODY, Contact, Link, RecordsFrame, secret_of
from waltzd.protocol.timelines import Lineage
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings


@dataclass
class Answers:
    """What the processes on one disk have answered, by partition."""

    promised: dict[int, int] = field(default_factory=dict)
    """The newest session that it has promised itself to."""
    durable: dict[int, int] = field(default_factory=dict)
    """Up to here every id was said to be on the disk, and nobody had it cut since."""
    fenced: dict[int, int] = field(default_factory=dict)
    """The newest session that a process on any disk of this machine has promised itself to."""


T = TypeVar("T")


class _Promiser(StorageCalls):
    """Remembers what it answered: the next process on the same disk is held to it."""

    answers: Answers

    async def open_session(
        self, number: int, session: int, partitions: int, *, create: bool = False, caller: int = 0, secret: bytes = b""
    ) -> ReplicaStatus:
        status = await super().open_session(number, session, partitions, create=create, caller=caller, secret=secret)
        for promised in (self.answers.promised, self.answers.fenced):
            promised[number] = max(session, promised.get(number, session))
        return status

    async def truncate(self, number: int, session: int, mark: int, *, contact: Contact = NOBODY) -> ReplicaStatus:
        durable = self.answers.durable
        durable[number] = min(mark, durable.get(number, -1))  # it may be cut, even if the answer is lost
        return await super().truncate(number, session, mark, contact=contact)

    async def fork(self, number: int, session: int, lineage: Lineage, *, contact: Contact = NOBODY) -> ReplicaStatus:
        durable, shared = self.answers.durable, lineage.shared_to(self._directory.partition(number).lineage.current)
        if shared is not None:
            durable[number] = min(shared, durable.get(number, -1))
        return await super().fork(number, session, lineage, contact=contact)

    async def remove_partition(self, number: int, *, delete_files: bool) -> str | None:
        aside = await super().remove_partition(number, delete_files=delete_files)
        self.answers.promised.pop(number, None)  # the next one here is another replica
        self.answers.durable.pop(number, None)
        return aside

    async def append(self, number: int, session: int, link: Link, *, contact: Contact = NOBODY) -> None:
        await super().append(number, session, _Heard(link, lambda mark: self._said(number, mark)), contact=contact)

    def _said(self, number: int, mark: int) -> None:
        durable = self.answers.durable
        durable[number] = max(mark, durable.get(number, -1))


def _at_once(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


class _Heard:
    """The link of an append stream; a listener is told the marks."""

    def __init__(self, link: Link, listener: Callable[[int], None]) -> None:
        self._link = link
        self._listener = listener

    async def receive(self) -> RecordsFrame | None:
        return await self._link.receive()

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        self._link.hear(taker)

    async def send(self, durable_id: int) -> None:
        self._listener(durable_id)
        await self._link.send(durable_id)

    @property
    def may_post(self) -> bool:
        return False  # nothing arrives at once

    def post(self, durable_id: int) -> None:
        raise AssertionError("it may not")

    async def refuse(self, error: WaltzError) -> None:
        await self._link.refuse(error)


class _Forgery:
    """An append stream with one record that its owner never wrote."""

    def __init__(self, first_id: int) -> None:
        self._frames = [RecordsFrame(encode_payloads(first_id, [b"forged"]), -1)]

    async def receive(self) -> RecordsFrame | None:
        return self._frames.pop() if self._frames else None

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        """Ignore the taker: the frame is received."""

    @property
    def may_post(self) -> bool:
        return False

    def post(self, durable_id: int) -> None:
        raise AssertionError("it may not")

    async def send(self, durable_id: int) -> None:
        return None

    async def refuse(self, error: WaltzError) -> None:
        return None


class StorageMachine(Machine):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.calls: StorageCalls | None = None
        self.disks = 0
        self.disk = self.blank_disk()
        self.disk_seconds = 0.0
        """How much longer everything takes on a slow disk, at most."""
        self.disk_hangs_until = 0.0
        """Nothing that is begun comes to its end before."""
        self.photograph: SimDisk | None = None
        self._renewals = self._renewals_before = 0
        """How often its directory was opened, or left in order, with room for that; and when it was photographed."""
        self.is_damaged = False
        self.has_lost_data = False
        """Bytes of its disk were damaged, or it was given another one."""
        self.is_torn = False
        """A power cut left sound records behind a hole in its last write."""
        self._has_lost_power = False
        self._was_cut = False
        """Its power, since the last process opened its files."""
        self._is_rotten = False
        """Its newest segment, since then."""
        self.answers = Answers()
        self.refuses: WaltzError | None = None
        """Why it did not start the last time."""

    @property
    def meta(self) -> StorageMeta:
        return StorageMeta(name=self.name, listen=self.name, admin_listen=f"{self.name} admin", group=self.name)

    def _disk_seed(self) -> int:
        self.disks += 1
        return self.world.pick.getrandbits(64)

    def blank_disk(self) -> SimDisk:
        disk = SimDisk(self._disk_seed())
        disk._numbers = self.disks << 32  # no file of it is one that was there before
        disk.make_directory(self.name)
        disk.flush_directory("")
        return disk

    def open(self) -> StorageCalls:
        """The daemon's way from its directory to its calls."""
        world, setup = self.world, self.world.setup
        version = "" if world.versions is None or self.life is None else world.versions.begins(self.life).version
        shown = "" if version == BEFORE.version else version
        directory = self._directory(self.disk, say=lambda sentence: world.say(self.name, sentence), version=shown)
        config = StorageConfig(directory=self.name, segment_bytes_max=max(1024, setup.segment_bytes), free_bytes_min=0)
        calls = _Promiser(
            self.disk,
            directory,
            config,
            run_writing=self._write,
            run_reading=self._read,
            on_fatal=self._on_fatal,
            run_here=_at_once if "here" in setup.faults else None,
            clock=lambda: int(1e9 * world.loop.now),
            store=world.store,
        )
        for replica in directory.partitions():
            promised = self.answers.promised.get(replica.number, replica.promised_session)
            assert promised <= replica.promised_session, f"{self.name} has forgotten that it promised session {promised}"
        self.is_torn = self._has_lost_power and any(self._is_torn(replica) for replica in directory.partitions())
        self._was_cut = self._is_rotten = False
        self._count_renewal()
        calls.answers = self.answers
        calls._version = version or calls._version
        calls.start()
        return calls

    def _directory(self, disk: SimDisk, *, say: Callable[[str], None], version: str = "") -> Directory:
        setup, archives = self.world.setup, self.world.store is not None
        settings = PartitionSettings(segment_bytes_max=setup.segment_bytes, say=say, archives=archives, version=version)
        key, partitions = self.world.meta.key, setup.partitions
        return Directory.open(disk, self.name, key=key, partitions=partitions, settings=settings, reserve_bytes=0)

    def _count_renewal(self) -> None:
        self._renewals += self.disk.room() > 1 << 20

    def _is_torn(self, replica: Partition) -> bool:
        """Nothing is wrong with what it has acknowledged, and something behind it."""
        durable = self.answers.durable.get(replica.number, -1)
        return bool(replica.findings) and all(
            finding.code is Code.DAMAGED_RECORD and finding.first_id is not None and finding.first_id > durable
            for finding in replica.findings
        )

    async def _live(self, life: Life) -> None:
        try:
            calls = self.open()
        except FlushFailed as error:
            self._exit(life, error.message)
        except WaltzError as error:
            self.refuses = error
            self._exit(life, f"does not start: {error.code} {error.message}")
        except Exception as mistake:  # noqa: BLE001  any mistake ends the whole run
            self.world.mistake(mistake)
            return
        self.refuses = None
        self.calls = calls
        self.world.network.joined(life)

    async def create_partitions(self) -> None:
        assert self.calls is not None
        for partition in range(self.world.log_count):
            await self.calls.create_partition(partition)

    def serving(self, life: Life) -> StorageCalls | None:
        return self.calls if self.life is life else None

    # -- the disk below it

    def _seconds(self) -> float:
        pick = self.world.pick
        return 0.0001 + pick.random() * (0.0005 + self.disk_seconds)

    def hang(self, seconds: float) -> None:
        self.disk_hangs_until = self.world.loop.now + seconds

    async def _wait_for_disk(self) -> None:
        while (left := self.disk_hangs_until - self.world.loop.now) > 0:
            await asyncio.sleep(max(left, 0.0001))  # by a clock that may run faster than the true one

    async def _write(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(self._seconds())
        await self._wait_for_disk()
        result = function(*arguments)
        await asyncio.sleep(0.00005)
        return result

    async def _read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0.00005 + self.disk_seconds * self.world.pick.random())
        await self._wait_for_disk()
        return function(*arguments)

    def _on_fatal(self, error: BaseException) -> NoReturn:
        life = LIFE.get()
        assert life is not None
        if isinstance(error, Exited):
            raise error
        if not isinstance(error, FlushFailed):
            self.world.mistake(error)
        self._exit(life, f"ends by itself: {error}")

    def _exit(self, life: Life, why: str) -> NoReturn:
        self.exits(life, why)
        raise Exited(why)

    def end(self, why: str) -> None:
        if self.life is not None:
            self.calls = None
            self.disk.observer = None
            self.disk.kill()
        super().end(why)

    def stop(self) -> None:
        """In order: what is queued is done first."""
        self.is_wanted = False
        if self.life is not None and self.calls is not None:
            self.world.say(self.name, "is told to stop")
            self.world.loop.run_in(self.life, self._stop(self.life, self.calls), f"end of {self.name}")

    async def _stop(self, life: Life, calls: StorageCalls) -> None:
        calls.refuse_new()
        try:
            await calls.close()
        except FlushFailed as error:
            self._on_fatal(error)
        self._count_renewal()
        if self.life is life:
            self.end("has stopped")
            self.again()  # it may be wanted by now

    def cut_power(self, *, is_scattered: bool) -> None:
        self.is_wanted = False
        if self._is_rotten and not self._was_cut:  # after a power cut rot of several bytes cannot be told from a torn write
            self.end("is killed")
            return
        self.end("loses power")
        self._was_cut = True
        self.disk.power_cut(Loss.SCATTERED if is_scattered else Loss.ORDERED)
        self._has_lost_power = True

    def die_at(self, operations: int) -> None:
        """Lose power in front of the n-th disk operation from now on."""
        left = operations
        disk = self.disk

        def count(kind: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                disk.observer = None
                self.cut_power(is_scattered=bool(operations % 2))
                raise Exited(f"in front of {kind} {path}")

        disk.observer = count

    def fail_next_flush(self) -> None:
        disk = self.disk

        def look(kind: str, path: str) -> None:
            if kind == "flush":
                disk.observer = None
                disk.faults[disk.steps] = Fault.IO_ERROR

        disk.observer = look

    def fill(self) -> None:
        self.disk.capacity_bytes -= max(0, self.disk.room() - self.world.pick.randrange(2000))

    def make_room(self) -> None:
        self.disk.capacity_bytes = 1 << 40

    def flip(self, where: float) -> str:
        """One byte of one file; `where` says which."""
        files = [(path, size) for path, size in self._files() if size]
        if not files or self.is_up:
            return "nothing to damage"
        number, rest = divmod(where * len(files), 1)
        path, size = files[int(number)]
        offset = int(rest * size)
        self.is_damaged = self.has_lost_data = True
        self.disk.corrupt(path, offset, bytes([self.disk.content(path)[offset] ^ 0x40]))
        return f"byte {offset} of {path} is damaged"

    def rot(self, where: float) -> str:
        """In a newest segment, mostly in its last record or batch; `where` says where. One byte where the machine may have
        lost power, or goes on: no more is told from a write that a power cut tore. Else several; in format 0 no length with
        others, because then nothing tells that the record was whole."""
        if self._is_rotten:
            return "rots no further before somebody has looked"
        found = [f"{path}/{max(names)}" for path in self._replicas() if (names := self._segments(path))]
        found = [path for path in found if self.disk.size(path) > HEADER_BYTES]
        if not found:
            return "nothing to rot"
        number, rest = divmod(where * len(found), 1)
        path = found[int(number)]
        content = bytes(self.disk.content(path))
        kind, rest = divmod(rest * 6, 1)
        has_batches = FileHeader.decode(content, path).version == BATCHES
        start = HEADER_BYTES if kind == 0 else (_last_batch if has_batches else _last_record)(content)
        places = [start + int(rest * (len(content) - start))]
        if kind > 2 and not self.is_up and not self._was_cut:
            near = range(places[0], min(len(content), places[0] + 9), 4)
            places = [at for at in near if has_batches or at - start not in range(28, 32)]
        self._is_rotten = self.is_damaged = self.has_lost_data = True
        for at in places:
            self.disk.corrupt(path, at, bytes([content[at] ^ 1 << (at % 8)]))
        return f"bytes {', '.join(map(str, places))} of {len(content)} in {path} rot; the last of them starts at {start}"

    def _replicas(self) -> list[str]:
        return [f"{self.name}/{entry.name}" for entry in self.disk.list(self.name) if entry.is_directory]

    def _segments(self, path: str) -> list[str]:
        return [name for name in self.disk.names(path) if name.endswith(SEGMENT_SUFFIX)]

    def start_verifying(self) -> None:
        calls, life = self.calls, self.life
        if calls is not None and life is not None:
            self.world.loop.run_in(life, self._verify(calls), f"an operator verifies {self.name}")

    async def _verify(self, calls: StorageCalls) -> None:
        for replica in calls.directory.partitions():
            try:
                for finding in await self.verified(calls, replica.number):
                    self.world.say(self.name, f"an operator is told: {finding}")
            except WaltzError as error:
                self.world.say(self.name, f"an operator is told: {error.message}")

    def start_forging(self) -> None:
        calls, life = self.calls, self.life
        if calls is not None and life is not None:
            self.world.loop.run_in(life, self._forge(calls), f"somebody writes into {self.name}")

    async def _forge(self, calls: StorageCalls) -> None:
        """With the key of a server, in the sessions of others: their numbers are known, their secrets are not."""
        for replica in calls.directory.partitions():
            number, session = replica.number, replica.promised_session
            contact = Contact(replica.contact, secret_of(b"somebody", number, session))
            for attempt in (
                calls.append(number, session, _Forgery(replica.last_id + 1), contact=contact),
                calls.truncate(number, session, -1, contact=contact),
                calls.set_low_mark(number, session, replica.last_id, contact=contact),
                calls.trim(number, session, 0, contact=contact),
            ):
                try:
                    await attempt
                except WaltzError as error:
                    self.world.say(self.name, f"somebody is refused: {error.code}")
                else:
                    self.world.mistake(AssertionError(f"{self.name} obeys somebody who does not know the secret"))

    async def verified(self, calls: StorageCalls, partition: int) -> list[Finding]:
        return [found async for found in calls.verify(partition) if isinstance(found, Finding)]

    def _files(self) -> list[tuple[str, int]]:
        """Sealed segments with their indexes, control and hard-state files."""
        found: list[tuple[str, int]] = []
        for entry in self.disk.list(self.name):
            path = f"{self.name}/{entry.name}"
            if entry.name == CONTROL_NAME:
                found.append((path, self.disk.size(path)))
            elif entry.is_directory:
                names = self.disk.names(path)
                newest = max((name.partition(".")[0] for name in names if name != HARD_STATE_NAME), default="")
                kept = [name for name in names if name.partition(".")[0] != newest]
                found += [(f"{path}/{name}", self.disk.size(f"{path}/{name}")) for name in kept]
        return found

    def replace_disk(self, disk: SimDisk) -> None:
        assert not self.is_up
        self.disk = disk
        self.answers = Answers(fenced=self.answers.fenced)
        self.is_damaged = self._has_lost_power = self._is_rotten = False
        self._was_cut = self.has_lost_data = True

    def take_photograph(self) -> None:
        if not self.is_damaged:
            self.photograph = self.disk.clone(self._disk_seed())
            self._renewals_before = self._renewals

    @property
    def may_forget(self) -> bool:
        """That documents went back is known from storages that remember. Where one has forgotten since the backup, and
        another is away, nobody knows."""
        return not self.world.zookeeper.has_backup

    def lose_disk(self) -> None:
        if self.may_forget:
            self.replace_disk(self.blank_disk())

    def put_back_photograph(self) -> None:
        if self.photograph is not None and self.may_forget:
            self.replace_disk(self.photograph.restored(self._disk_seed()))

    def put_back_in_place(self) -> None:
        """Over the files that are there. A storage notices that when it was opened anew, or stopped in order, since."""
        copy = self.photograph
        if copy is None or self._renewals == self._renewals_before or not self.may_forget:
            return
        self.world.say(self.name, "an old copy of its directory is put back in place")
        self.replace_disk(copy.restored(self._disk_seed(), over=self.disk))

    def put_back_snapshot(self) -> None:
        """Below the file system. Nothing of the storage tells: only where the documents do, it is done."""
        if self.photograph is None or self.is_damaged or self.world.zookeeper.went_back or not self.may_forget:
            return
        copy = self.photograph.clone(self._disk_seed())
        copy.kill()
        try:
            now, then = self._stands(self.disk), self._stands(copy)
        except WaltzError:
            return
        if all(self._is_noticed(status, now.get(number)) for number, status in then.items()):
            self.world.say(self.name, "a snapshot of its volume is put back")
            self.replace_disk(copy)

    def _stands(self, disk: SimDisk) -> dict[int, ReplicaStatus]:
        disk = disk.clone(0)
        disk.kill()
        return {one.number: one.status() for one in self._directory(disk, say=lambda sentence: None).partitions()}

    def _is_noticed(self, then: ReplicaStatus, now: ReplicaStatus | None) -> bool:
        """By each owner that there is. That of an older session than this storage has promised itself to, on any disk,
        would not read the document."""
        number = then.partition
        found = self.world.zookeeper.tree.find(partition_path(number))
        if found is None:
            return False
        for server in self.world.servers.values():
            for owned in server.server.owner.describe() if server.server is not None else ():
                if owned.partition == number and owned.session < self.answers.fenced.get(number, 0):
                    return False
        return is_told(decode(PartitionMeta, found.data, ""), self.name, then, now)


def is_told(meta: PartitionMeta, name: str, then: ReplicaStatus, now: ReplicaStatus | None) -> bool:
    """Whether the partition's document says that a replica like `then` has no vote, or `then` has forgotten nothing of
    `now`, which is on the disk. That one may be another replica, or none: it tells nothing about the one that joined."""
    state = meta.replicas.get(name)
    if state is None or name not in meta.joined or then.incarnation != state.incarnation:
        return True
    if meta.decision is not None or then.session != meta.opened or then.last_id < state.acknowledged:
        return True
    if now is None or not now.is_sound or (now.incarnation, now.session) != (then.incarnation, then.session):
        return False
    return then.last_id >= now.last_id


def _last_batch(content: bytes) -> int:
    """Where it starts; a footer behind it is no batch."""
    at = start = HEADER_BYTES
    while (head := BatchHead.decode(content, at)) is not None:
        start, at = at, at + head.size
    return start


def _last_record(content: bytes) -> int:
    """Where it starts."""
    at = start = HEADER_BYTES
    while at + OVERHEAD_BYTES <= len(content):
        start, at = at, at + OVERHEAD_BYTES + max(0, id_and_length(content[at : at + HEAD_BYTES])[1])
    return start

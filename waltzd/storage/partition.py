"""One replica of one partition: segments, marks, and the promises made about them.

Rule 1: a call returns only when what it says is on the disk. Marks in memory move after the flush, never before.
Rule 2: bytes that were not proven are not vouched for. Damage is remembered as findings; the ids in it are refused, the
rest is served, nothing is cut, and the replica says that it is not sound.
Rule 3: only `open_session` raises the session; every other call must carry exactly the promised one.

The calls that change something come one at a time (the service has one lane per partition). `read` may run beside them:
what it reads is immutable, and `cuts` tells it when a truncation came between. Opening is in `waltzd.storage.opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from waltzd.disk import Disk
from waltzd.errors import (
    BadArgument,
    BelowFloor,
    BeyondLog,
    DiskFull,
    Diverged,
    FlushFailed,
    NotNextId,
    NotOpened,
    PartitionDamaged,
    PartitionOffline,
    StaleSession,
    WaltzError,
)
from waltzd.finding import Code, Finding
from waltzd.layout import CHECKPOINT_TRANSACTIONS
from waltzd.record import Run
from waltzd.replica import ReplicaStatus
from waltzd.storage.control import ControlFile
from waltzd.storage.promise import PromiseFile
from waltzd.storage.repair import examine_segment
from waltzd.storage.segment import Segment, Suspect
from waltzd.storage.shelf import Shelf


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    segment_bytes_max: int = 64 << 20
    free_bytes_min: int = 0
    say: Callable[[str], None] = lambda sentence: None
    """Told in plain sentences what happened that an operator should know."""


class Partition:
    def __init__(
        self,
        disk: Disk,
        directory: str,
        number: int,
        *,
        control: ControlFile,
        promise: PromiseFile,
        settings: PartitionSettings,
        shelf: Shelf,
        findings: list[Finding],
        proven_from: int,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self.number = number
        self._control = control
        self._promise = promise
        self._settings = settings
        self._shelf = shelf
        self._findings = findings
        self._failed: WaltzError | None = None
        self._proven_from = proven_from
        self.is_full = False
        self.cuts = 0
        self.committed = promise.value.committed
        self._checkpoint_id = promise.value.durable

    # -- what it says of itself

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def key(self) -> UUID:
        return self._control.header.key

    @property
    def last_id(self) -> int:
        """The highest id that is on the disk."""
        return self._shelf.last_id

    @property
    def promised_session(self) -> int:
        return self._promise.value.session

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self._findings)

    @property
    def floor(self) -> int:
        """The highest id that this replica is known to have had on disk."""
        promise = self._promise.value
        return max(self._control.info(self.number).local_low_mark, promise.committed, promise.durable)

    def status(self) -> ReplicaStatus:
        info, promise = self._control.info(self.number), self._promise.value
        sizes = [entry.size for entry in self._disk.list(self._directory) if not entry.is_directory]
        return ReplicaStatus(
            partition=self.number,
            incarnation=promise.incarnation,
            promised_session=promise.session,
            session=info.session,
            low_mark=info.low_mark,
            local_low_mark=info.local_low_mark,
            committed=self.committed,
            last_id=self.last_id,
            is_available=info.is_available,
            is_full=self.is_full,
            segments=len(self._shelf.first_ids),
            bytes=sum(sizes),
            findings=self.findings,
        )

    def describe(self) -> str:
        if self._failed is not None:
            return f"partition {self.number}: stopped, {self._failed.message}"
        if self._findings:
            return f"partition {self.number}: damaged, {self._findings[0].sentence()}"
        if not self._control.info(self.number).is_available:
            return f"partition {self.number}: taken offline by an operator"
        full = "; writes wait for disk space" if self.is_full else ""
        return f"partition {self.number}: holds ids up to {self.last_id}, session {self.promised_session}{full}"

    # -- sessions

    def open_session(self, session: int) -> ReplicaStatus:
        """Fence every lower session, durably, and prove what this replica will vouch for."""
        self._check_usable()
        if session < 0:
            raise BadArgument(f"a session id is never negative: {session}")
        if session < self.promised_session:
            raise self._stale(session)
        if session > self.promised_session:
            with self._fatal():
                self._promise.change(session=session, committed=self.committed)
        self.prove()
        return self.status()

    def check_session(self, session: int) -> None:
        self._check_usable()
        if session < self.promised_session:
            raise self._stale(session)
        if session > self.promised_session:
            raise NotOpened(
                f"session {session} was not opened on partition {self.number}; the storage promised itself to session "
                f"{self.promised_session}"
            )

    def _stale(self, session: int) -> StaleSession:
        return StaleSession(
            f"session {session} of partition {self.number} is over: the storage promised itself to session "
            f"{self.promised_session}",
            promised_session=self.promised_session,
        )

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._control.info(self.number).is_available:
            raise PartitionOffline(f"partition {self.number} was taken offline on this storage")

    def _check_sound(self) -> Segment:
        if self._findings or self._shelf.active is None:
            raise self._damaged(self._findings)
        return self._shelf.active

    def _damaged(self, findings: Sequence[Finding]) -> PartitionDamaged:
        first = findings[0] if findings else None
        if first is None:
            return PartitionDamaged(f"partition {self.number} is damaged: its last segment cannot be read")
        return PartitionDamaged(
            f"partition {self.number} is damaged: {first.sentence()}", first_id=first.first_id, last_id=first.last_id
        )

    def _fatal(self) -> _Fatal:
        return _Fatal(self)

    def fail(self, error: WaltzError) -> None:
        """Nothing is known of the disk any more: this replica answers nothing until the process has ended."""
        self._failed = error

    def prove(self) -> None:
        """Check every record above the low-water mark that was not checked since this process opened the files."""
        low_mark = self._control.info(self.number).low_mark
        for position in range(len(self._shelf.first_ids) - 1, -1, -1):
            first_id = self._shelf.first_ids[position]
            if first_id >= self._proven_from:
                continue
            if self._shelf.last_id_of(position) <= low_mark or self._proven_from <= low_mark + 1:
                break
            self.examine(first_id)
            self._proven_from = first_id

    # -- appending

    def append(self, session: int, runs: Sequence[Run], committed: int) -> int:
        """Write consecutive runs and flush once. Returns the highest id that is now on the disk.

        Each run was checked (`record.first_bad`) by whoever took it from the wire."""
        self.check_session(session)
        active = self._check_sound()
        fresh = self._only_new(runs)
        if fresh:
            self._check_space(sum(len(run.data) for run in fresh))
            with self._fatal():
                try:
                    for run in fresh:
                        active = self._write(active, run)
                    active.flush()
                except DiskFull as error:
                    raise self._take_back(error) from error
            self._shelf.last_id = active.next_id - 1
            self.is_full = False
        if self._control.info(self.number).session == session:
            self.committed = max(self.committed, min(committed, self.last_id))
        return self.last_id

    def _only_new(self, runs: Sequence[Run]) -> list[Run]:
        """What is not here yet. The same record again is fine, another one under its id is not."""
        next_id = self.last_id + 1
        fresh: list[Run] = []
        for run in runs:
            if run.first_id > next_id:
                raise NotNextId(
                    f"an append to partition {self.number} starts at id {run.first_id}; the next id here is {next_id}",
                    next_id=next_id,
                )
            known = min(next_id - run.first_id, len(run))
            if known:
                self._check_same(run.part(0, known))
            if known < len(run):
                fresh.append(run.part(known, len(run)) if known else run)
                next_id = fresh[-1].last_id + 1
        return fresh

    def _check_same(self, run: Run) -> None:
        at = 0
        while at < len(run):
            stored = self.read_examined(run.first_id + at, run.last_id, len(run.data))
            part = run.part(at, at + len(stored))
            if part.data != stored.data:
                raise Diverged(
                    f"partition {self.number} already holds ids {part.first_id} to {part.last_id} with other content"
                )
            at += len(stored)

    def _write(self, active: Segment, run: Run) -> Segment:
        """A record goes to the next segment when the one before it ended above the threshold."""
        while len(run):
            starts = active.end + run.bounds[:-1]
            fits = int(np.searchsorted(starts, self._settings.segment_bytes_max, "right"))
            if fits:
                active.write([run.part(0, fits)])
            if fits < len(run):
                active = self._roll()
            run = run.part(fits, len(run))
        return active

    def _roll(self) -> Segment:
        new = self._shelf.start_segment()
        self._promise.change(durable=self.last_id, newest=new.first_id, committed=self.committed)
        self._checkpoint_id = self.last_id
        return new

    def _check_space(self, size: int) -> None:
        """Stop before the disk is full; go on when there is an eighth more than the least, so as not to flap."""
        least = self._settings.free_bytes_min
        if least == 0:
            return
        free = self._disk.free_bytes(self._directory)
        if free - size < (least + least // 8 if self.is_full else least):
            self.is_full = True
            raise DiskFull(
                f"partition {self.number}: {free} bytes are free, {size} are to be written and {least} must stay free",
                durable_id=self.last_id,
            )

    def _take_back(self, error: DiskFull) -> DiskFull:
        assert self._shelf.active is not None
        self._shelf.active.take_back()
        self.is_full = True
        return DiskFull(
            f"partition {self.number}: {error.message}; everything above id {self.last_id} was taken back",
            durable_id=self.last_id,
        )

    @property
    def wants_checkpoint(self) -> bool:
        return self.last_id // CHECKPOINT_TRANSACTIONS > self._checkpoint_id // CHECKPOINT_TRANSACTIONS

    def checkpoint(self) -> None:
        """Flush the index and write down the marks: the next start trusts both up to here."""
        if self._failed is not None or self._shelf.active is None or self._findings:
            return
        with self._fatal():
            self._shelf.active.index.flush()
            self._promise.change(durable=self.last_id, committed=self.committed)
        self._checkpoint_id = self.last_id

    # -- marks

    def set_low_mark(self, session: int, low_mark: int) -> ReplicaStatus:
        """The session begins: everything up to `low_mark` is decided, and this replica holds nothing above it."""
        self.check_session(session)
        active = self._check_sound()
        if self.last_id > low_mark:
            raise BadArgument(
                f"partition {self.number} holds ids up to {self.last_id}, above the low-water mark {low_mark}",
                not_done="the mark was not set",
                next_step="truncate to the mark first",
            )
        with self._fatal():
            active.flush()
            active.index.flush()
            self._promise.change(durable=self.last_id, committed=self.committed)
            self._checkpoint_id = self.last_id
            self._control.start_session(self.number, session=session, low_mark=low_mark, local_low_mark=self.last_id)
        return self.status()

    def truncate(self, session: int, mark: int) -> ReplicaStatus:
        """Cut everything above `mark`. Only what nobody can have relied on may go, and only before the session begins."""
        self.check_session(session)
        if mark < -1:
            raise BadArgument(f"a mark is never below -1: {mark}")
        info = self._control.info(self.number)
        floor = max(info.low_mark, self.committed, self._promise.value.committed)
        if mark >= self.last_id and not self._findings:
            return self.status()
        if mark < floor:
            raise BelowFloor(
                f"partition {self.number} was asked to cut above id {mark}, but ids up to {floor} are committed",
                floor=floor,
            )
        if info.session == session:
            raise BelowFloor(
                f"partition {self.number}: session {session} has set its low-water mark; nothing is cut after that",
                floor=self.last_id,
            )
        with self._fatal():
            self._cut(mark)
        return self.status()

    def _cut(self, mark: int) -> None:
        shelf = self._shelf
        position = shelf.position_of(mark + 1)
        if shelf.active is None and position == len(shelf.first_ids) - 1 > 0:
            position -= 1  # the last segment is not usable at all: the one in front becomes the last
        damaged_here = [f for f in self._findings if f.first_id is None or f.first_id <= mark]
        if damaged_here:
            raise self._damaged(damaged_here)
        end = self._end_of(position, mark)
        durable = min(self._promise.value.durable, mark)
        self._promise.change(durable=durable, newest=shelf.first_ids[position], committed=self.committed)
        self._checkpoint_id = durable
        self.cuts += 1
        shelf.cut(position, end=end, next_id=mark + 1)
        self._findings = []
        self._settings.say(f"partition {self.number}: cut above id {mark}")

    def _end_of(self, position: int, mark: int) -> int | None:
        """Where the record behind `mark` starts in its segment; None when nothing in that segment stands above it."""
        for finding in self._findings:
            if finding.first_id == mark + 1 and finding.code is Code.DAMAGED_RECORD:
                return finding.first_byte
        if mark >= self._shelf.last_id_of(position):
            return None
        try:
            return self._shelf.segment(position).offset_of(mark + 1)
        except Suspect as question:
            self.examine(question.first_id)
            return self._shelf.segment(position).offset_of(mark + 1)

    # -- reading

    def read(self, first_id: int, last_id: int, bytes_max: int, *, session: int | None) -> Run:
        """Sound records from `first_id` on, at most up to `last_id` and `bytes_max`, at least one.

        Without a session only what is known to be committed. Raises `Suspect` when the segment must be examined first."""
        if self._failed is not None:
            raise self._failed
        if session is not None:
            self.check_session(session)
        limit = self.last_id if session is not None else min(self.last_id, self.visible_mark)
        if not 0 <= first_id <= last_id:
            raise BadArgument(f"ids {first_id} to {last_id} are no range")
        if first_id > limit:
            raise BeyondLog(
                f"partition {self.number}: id {first_id} is not here; ids up to {limit} can be read", last_id=limit
            )
        last_id = min(last_id, limit)
        for finding in self._findings:
            if finding.first_id is None or finding.last_id is None or finding.last_id < first_id:
                continue
            if finding.first_id <= first_id:
                raise self._damaged([finding])
            last_id = min(last_id, finding.first_id - 1)
        position = self._shelf.position_of(first_id)
        last_id = min(last_id, self._shelf.last_id_of(position))
        cuts = self.cuts
        try:
            return self._shelf.segment(position).read(first_id, last_id, bytes_max)
        except Suspect:
            if cuts != self.cuts:
                raise BeyondLog(f"partition {self.number}: id {first_id} was cut while it was read") from None
            raise

    @property
    def visible_mark(self) -> int:
        """What a reader without a session may see: never above what is known to be committed."""
        return max(self.committed, min(self._control.info(self.number).low_mark, self.last_id))

    def read_examined(self, first_id: int, last_id: int, bytes_max: int) -> Run:
        """`read` for callers that hold the lane."""
        try:
            return self.read(first_id, last_id, bytes_max, session=self.promised_session)
        except Suspect as question:
            self.examine(question.first_id)
            return self.read(first_id, last_id, bytes_max, session=self.promised_session)

    def sealed_segments(self) -> list[tuple[int, int]]:
        return self._shelf.sealed()

    def sealed_path(self, first_id: int) -> str:
        """The data file of a segment that takes no more records, to be sent as it is."""
        if first_id not in self._shelf.first_ids[:-1]:
            raise BeyondLog(f"partition {self.number} has no sealed segment that starts at id {first_id}")
        path = self._shelf.path_of(first_id)
        damage = [f for f in self._findings if f.path == path]
        if damage:
            raise self._damaged(damage)
        return path

    def examine(self, first_id: int) -> None:
        """Read a whole segment, find out what is wrong with it, and make its index right again."""
        shelf = self._shelf
        shelf.forget(first_id)
        with self._fatal():
            found = examine_segment(
                self._disk,
                self._directory,
                expected=shelf.header(first_id),
                next_id=shelf.last_id_of(shelf.first_ids.index(first_id)) + 1,
                active=shelf.active if shelf.is_active(first_id) else None,
                say=self._settings.say,
            )
        path = shelf.path_of(first_id)
        self._findings = [f for f in self._findings if f.path != path] + found
        self._findings.sort(key=lambda f: -1 if f.first_id is None else f.first_id)
        for finding in found:
            self._settings.say(f"partition {self.number}: {finding.sentence()}")

    # -- the end

    def close(self) -> None:
        """Flush everything and leave a mark that says so: the next start has nothing to prove again."""
        active = self._shelf.active
        if self._failed is None and active is not None and not self._findings:
            with self._fatal():
                active.flush()
                active.index.flush()
                self._promise.change(durable=self.last_id, committed=self.committed, is_clean=True)
        if active is not None:
            active.close()
        self._promise.close()
        self._failed = NotOpened(f"partition {self.number} is closed")


class _Fatal:
    """A failed flush or write inside ends the replica before anybody can see its state."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FlushFailed):
            error.facts["partition"] = str(self._partition.number)
            error.facts["last_durable_id"] = str(self._partition.last_id)
            error.message += f"; partition {self._partition.number}, last durable id {self._partition.last_id}"
            error.args = (error.message,)
            self._partition.fail(error)

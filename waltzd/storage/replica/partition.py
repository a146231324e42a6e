"""One replica of one partition: a log that does what the owner of the highest session says.

A partition has several replicas and one owner at a time, who holds a *session*, a number that only rises. An owner may be
replaced while its last calls are still on their way, so a replica never asks who is the owner: it compares sessions.

- *Fencing.* `open_session` promises durably that every lower session is refused, before it answers. From then on the
  replica holds still for the new owner, who reads how far it is and decides with a majority which end the log has.
- *Settling.* Until its session begins, the owner may `truncate` above that end, or install segment files. `set_low_mark`
  begins the session: everything up to the mark is decided, the replica holds nothing above it, and nothing is cut any more.
- *Appending.* The log has no gaps and a record is never rewritten: the same bytes under a known id are fine, which makes a
  repeated append idempotent; other bytes are another history and refused. The owner counts an id as committed when a
  majority has it on disk, and says so with the next append; that mark is believed only from the session that has begun.

Rule 1: a call returns only when its effect is on the disk. Marks in memory move after the flush, never before.
Rule 2: a replica vouches only for bytes that it has proven. Damage is kept as findings; the ids in it are refused, the rest
is served, nothing is cut, and the replica says that it is not sound.
Rule 3: only `open_session` raises the session; every other call must carry exactly the promised one.
Rule 4: below the *floor* (the ids that it once had on disk) a loss is damage; below the *cut floor* (the ids that are known
to be committed) nothing is cut, whoever asks.

The calls that change something come one at a time (the service has one lane for each partition). `read` may run beside
them: the bytes that it reads are immutable, and `cuts` tells it when a truncation came between. A failed flush ends the
replica: the disk may hold less than the cache shows, and a second flush could succeed all the same. Opening is in
`waltzd.storage.replica.opening`, segment files and damage in `healing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from uuid import UUID

import numpy as np

from waltzd.errors import (
    BadArgument,
    BadFrame,
    BelowFloor,
    BeyondLog,
    DirectoryGone,
    DiskFull,
    Diverged,
    FlushFailed,
    NotNextId,
    NotOpened,
    PathMissing,
    WaltzError,
)
from waltzd.format.batch import Piece
from waltzd.format.finding import Finding
from waltzd.format.layout import CHECKPOINT_TRANSACTIONS
from waltzd.format.record import Run
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import Content, LockHistory
from waltzd.storage.replica.examine import Quarantine
from waltzd.storage.replica.healing import Healing, Installation
from waltzd.storage.replica.promise import Fence, PromiseFile
from waltzd.storage.replica.segment import Segment, Suspect
from waltzd.storage.replica.shelf import Shelf
from waltzd.storage.replica.site import Room, Site

T = TypeVar("T")
ReadStored = Callable[[int, int, int], Run]
"""Stored records from a first id on: up to a last id, up to some bytes, at least one."""


def only_new(runs: Sequence[Run], *, partition: int, last_id: int, stored: ReadStored) -> list[Run]:
    """The runs without the records that are stored, or came earlier among these runs, with the same bytes."""
    next_id = last_id + 1
    fresh: list[Run] = []
    for run in runs:
        if run.first_id > next_id:
            raise NotNextId(
                f"an append to partition {partition} starts at id {run.first_id}; the next id here is {next_id}",
                next_id=next_id,
            )
        known = min(next_id - run.first_id, len(run))
        at = 0
        while at < known:
            id_ = run.first_id + at
            if id_ <= last_id:
                same = stored(id_, min(last_id, run.last_id), len(run.data))
            else:
                whole = next(other for other in fresh if id_ <= other.last_id)
                same = whole.part(id_ - whole.first_id, min(len(whole), run.last_id + 1 - whole.first_id))
            part = run.part(at, at + len(same))
            if part.data != same.data:
                raise Diverged(
                    f"partition {partition} already holds ids {part.first_id} to {part.last_id} with other content"
                )
            at += len(same)
        if known < len(run):
            fresh.append(run.part(known, len(run)) if known else run)
            next_id = fresh[-1].last_id + 1
    return fresh


class Writer:
    """Writes at the end of the log: from one segment to the next, flushed once, taken back whole on a full disk."""

    def __init__(self, shelf: Shelf, promise: PromiseFile, *, segment_bytes_max: int) -> None:
        self._shelf = shelf
        self._promise = promise
        self._segment_bytes_max = segment_bytes_max
        self.checkpoint_id = promise.value.durable
        """Up to here the next start trusts index and marks."""

    def write(self, runs: Sequence[Run], *, committed: int) -> None:
        """The records are on the disk when this returns. `DiskFull`: those of the last segment are not there any more."""
        active = self._shelf.active
        assert active is not None
        try:
            for run in runs:
                active = self._write(active, run, committed)
            active.flush()
        except DiskFull as error:
            assert self._shelf.active is not None
            self._shelf.active.take_back()
            last_id = self._shelf.last_id
            raise DiskFull(
                f"partition {self._promise.value.partition}: {error.message}; everything above id {last_id} was taken back",
                durable_id=last_id,
            ) from error
        self._shelf.last_id = active.next_id - 1

    def _write(self, active: Segment, run: Run, committed: int) -> Segment:
        """A record goes to the next segment when the one in front of it ended above the threshold."""
        while active.end + int(run.bounds[-2]) > self._segment_bytes_max:
            fits = int(np.searchsorted(active.end + run.bounds[:-1], self._segment_bytes_max, "right"))
            if active.next_id == active.first_id:
                fits = max(1, fits)  # however small the threshold is, a segment holds a record
            if fits:
                active.write([run.part(0, fits)])
            if fits == len(run):
                return active
            active = self._roll(committed)
            run = run.part(fits, len(run))
        active.write([run])
        return active

    def _roll(self, committed: int) -> Segment:
        new, promise, last_id = self._shelf.start_segment(), self._promise.value, self._shelf.last_id
        self._promise.change(
            durable=max(promise.durable, last_id),
            newest=max(promise.newest, new.first_id),
            segments=len(self._shelf.first_ids),
            committed=committed,
        )
        self.checkpoint_id = last_id
        return new

    @property
    def wants_checkpoint(self) -> bool:
        return self._shelf.last_id // CHECKPOINT_TRANSACTIONS > self.checkpoint_id // CHECKPOINT_TRANSACTIONS

    def checkpoint(self, *, committed: int) -> None:
        """Flush the index and write down the marks: the next start trusts both up to here."""
        assert self._shelf.active is not None
        self._shelf.active.index.flush()
        self._promise.change(durable=max(self._promise.value.durable, self._shelf.last_id), committed=committed)
        self.checkpoint_id = self._shelf.last_id


class Partition:
    def __init__(self, site: Site, promise: PromiseFile, shelf: Shelf, quarantine: Quarantine, *, proven_from: int) -> None:
        self.number = site.number
        self.directory = site.directory
        self._site = site
        self._promise = promise
        self._shelf = shelf
        self._quarantine = quarantine
        self._failed: WaltzError | None = None
        self._fence = Fence(site.number, site.control, promise)
        self._room = Room(site)
        self._healing = Healing(site, shelf, quarantine, promise, self._room, proven_from=proven_from)
        self._writer = Writer(shelf, promise, segment_bytes_max=site.settings.segment_bytes_max)
        self.concerned = shelf.concerned
        self.cuts = 0
        self.committed = promise.value.committed

    # -- its state

    @property
    def key(self) -> UUID:
        return self._site.key

    @property
    def last_id(self) -> int:
        """The highest id on the disk."""
        return self._shelf.last_id

    @property
    def promised_session(self) -> int:
        return self._promise.value.session

    @property
    def contact(self) -> int:
        return self._fence.contact

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self._quarantine.findings

    @property
    def floor(self) -> int:
        """The highest id that this replica is known to have had on disk."""
        return self._healing.floor

    def status(self) -> ReplicaStatus:
        info, promise = self._site.info, self._promise.value
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
            is_full=self._room.is_full,
            segments=len(self._shelf.first_ids),
            findings=self.findings,
            damaged_segments=self._healing.damaged_segments,
            contact=self.contact,
        )

    @property
    def is_in_place(self) -> bool:
        return self._promise.is_in_place

    def describe(self) -> str:
        if self._failed is not None:
            return f"partition {self.number}: stopped, {self._failed.message}"
        return self.status().sentence()

    # -- sessions

    def open_session(self, session: int, caller: int = 0) -> ReplicaStatus:
        """Fence every lower session, durably, and prove the records that this replica vouches for."""
        self.fence(session, caller)
        self.prove()
        return self.status()

    def fence(self, session: int, caller: int = 0, *, by_operator: bool = False) -> int:
        """Promise durably to refuse every lower session, and begin a new contact of this caller."""
        self._check_alive()
        with self._fatal():
            return self._fence.open(session, committed=self.committed, caller=caller, by_operator=by_operator)

    def check_session(self, session: int, contact: int = 0) -> None:
        """The session must be exactly the promised one, and the contact the latest."""
        self._check_alive()
        self._fence.check(session, contact)

    def _check_alive(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _check_sound(self, *, may_be_short: bool = False) -> Segment:
        if self._shelf.active is None or (self._quarantine and not (may_be_short and self._quarantine.is_only_short)):
            raise self._quarantine.error()
        return self._shelf.active

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """A failed flush or write inside ends the replica before any call can see its state."""
        try:
            yield
        except PathMissing as error:
            if self.is_in_place:
                raise
            self._failed = DirectoryGone(f"{self.directory} is gone: {error.message}; lost up to id {self.last_id}")
            raise self._failed from error
        except FlushFailed as error:
            error.facts.update(partition=str(self.number), last_durable_id=str(self.last_id))
            error.message += f"; partition {self.number}, last durable id {self.last_id}"
            error.args = (error.message,)
            self._failed = error
            raise

    def prove(self) -> None:
        """Check every record above the low-water mark, once since this process opened the files."""
        while self.prove_next():
            continue

    def prove_next(self) -> bool:
        """Check one segment of them, the newest first. False when there is none left."""
        with self._fatal():
            return self._healing.prove_next(self._site.info.low_mark)

    # -- appending

    def append(self, session: int, pieces: Sequence[Piece], committed: int, contact: int = 0) -> int:
        """Write consecutive runs or batches, which the lane has checked, and flush once. Returns the highest id on the
        disk."""
        self.check_session(session, contact)
        self._check_sound(may_be_short=True)
        runs = [piece for piece in pieces if isinstance(piece, Run)]
        if len(runs) < len(pieces):
            raise BadFrame("batches cannot be written yet")
        fresh = only_new(runs, partition=self.number, last_id=self.last_id, stored=self.read_examined)
        if fresh:
            self._room.check(sum(len(run.data) for run in fresh))
            with self._fatal():
                try:
                    self._writer.write(fresh, committed=self.committed)
                except DiskFull:
                    self._room.is_full = True
                    raise
                if self._quarantine:
                    self._healing.end_moved(is_indexed=False)
            self._room.is_full = False
        known = min(committed, self.last_id)
        if known > self.committed and self._site.info.session == session:
            self.committed = known
            with self._fatal():
                self._promise.note(committed=known)
        return self.last_id

    @property
    def wants_checkpoint(self) -> bool:
        return self._writer.wants_checkpoint

    def checkpoint(self) -> None:
        """Flush the index and write down the marks, unless damage makes them worthless."""
        if self._failed is None and self._shelf.active and (not self._quarantine or self._quarantine.is_only_short):
            with self._fatal():
                self._writer.checkpoint(committed=self.committed)

    # -- marks

    def set_low_mark(self, session: int, low_mark: int, contact: int = 0) -> ReplicaStatus:
        """The session begins: everything up to `low_mark` is decided, and this replica holds nothing above it. Committed
        records above it are the exception: the replica had begun this session before, and lost the control struct."""
        self.check_session(session, contact)
        active, settled = self._check_sound(), self._promise.value.settled
        if low_mark < settled:
            raise BelowFloor(
                f"session {session} of partition {self.number} was to begin at {low_mark}, and ids up to {settled} were "
                "committed before it",
                not_done="the session was not begun",
                floor=settled,
            )
        if self.last_id > max(low_mark, self.committed):
            raise BadArgument(
                f"partition {self.number} holds ids up to {self.last_id}, above the low-water mark {low_mark}",
                not_done="the mark was not set",
                next_step="truncate to the mark first",
            )
        with self._fatal():
            active.flush()
            active.index.flush()
            self._promise.change(durable=self.last_id, committed=self.committed)
            self._writer.checkpoint_id = self.last_id
            control = self._site.control
            control.start_session(self.number, session=session, low_mark=low_mark, local_low_mark=self.last_id)
        return self.status()

    def truncate(self, session: int, mark: int, contact: int = 0) -> ReplicaStatus:
        """Cut everything above `mark`: nothing that is known to be committed, and nothing after the session has begun."""
        self.check_session(session, contact)
        if mark < -1:
            raise BadArgument(f"a mark is never below -1: {mark}")
        info, floor = self._site.info, self._cut_floor
        if mark >= self.last_id and not self._quarantine:
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

    @property
    def _cut_floor(self) -> int:
        """Nothing up to here is ever cut."""
        return max(self._site.info.low_mark, self.committed, self._promise.value.committed)

    def _cut(self, mark: int) -> None:
        shelf = self._shelf
        position = shelf.position_of(mark + 1)
        if shelf.active is None and position == len(shelf.first_ids) - 1 > 0:
            position -= 1  # the last segment is not usable at all: the one in front becomes the last
        self._quarantine.check_up_to(mark)
        mark = min(mark, self.last_id)
        end = self._healing.end_of(position, mark)
        durable = min(self._promise.value.durable, mark)
        self._promise.change(
            durable=durable, newest=shelf.first_ids[position], segments=position + 1, committed=self.committed
        )
        self._writer.checkpoint_id = durable
        self.cuts += 1
        shelf.cut(position, end=end, next_id=mark + 1)
        self._quarantine.heal()
        self._site.say(f"cut above id {mark}")

    # -- whole segments

    def begin_installation(self, session: int, first_id: int, file_bytes: int, contact: int = 0) -> Installation:
        """Take in a segment file, beside the log and beside the lane; `install` gives it its place."""
        self.check_session(session, contact)
        begun_at = (contact or self.contact, *self._moment(session))
        floor = self._loss_floor(session)
        return self._healing.begin(first_id, file_bytes=file_bytes, cut_floor=floor, begun_at=begun_at)

    def check_installation(self, session: int, installation: Installation) -> None:
        """A file belongs to the moment in which it was begun. Once the replica was opened again, was cut, or has begun the
        session, its owner has decided without the file, which may hold records that were given up."""
        contact, *moment = installation.begun_at
        self.check_session(session, contact)
        if (*moment,) != self._moment(session):
            raise NotOpened(
                f"partition {self.number} was cut, or began the session, since the file for the segment at id "
                f"{installation.first_id} was announced",
                not_done="nothing of this file was kept",
            )

    def _moment(self, session: int) -> tuple[int, bool]:
        return self.cuts, self._site.info.session == session

    def install(self, session: int, installation: Installation) -> ReplicaStatus:
        """Give a proven file its place, behind the last id or where a segment is damaged or missing."""
        self.check_installation(session, installation)
        before = self.last_id
        with self._fatal():
            self._healing.put(installation, cut_floor=self._loss_floor(session))
        if self.last_id < before:
            self.cuts += 1
        self._writer.checkpoint_id = min(self._promise.value.durable, self.last_id)
        ids = f"{installation.first_id} to {installation.next_id - 1}"
        self._site.say(f"took the ids {ids} as a file")
        return self.status()

    def _loss_floor(self, session: int) -> int | None:
        """Before the session begins its owner may cut, so a new file may be shorter, too; None afterwards."""
        return None if self._site.info.session == session else self._cut_floor

    # -- reading

    def read(self, first_id: int, last_id: int, bytes_max: int, *, session: int | None, with_locks: bool = False) -> Run:
        """Sound records from `first_id` on, at most up to `last_id` and `bytes_max`, at least one.

        Without a session only committed ones. Raises `Suspect` when the segment must be examined first."""
        return self._read(first_id, last_id, session, lambda segment, last: segment.read(first_id, last, bytes_max))

    def read_whole(self, first_id: int, last_id: int, bytes_max: int, *, session: int) -> Content:
        """The same for another replica: whole batches where the log has them, from the beginning of one on."""
        return self.read(first_id, last_id, bytes_max, session=session)

    def read_locks(self, last_id: int, bytes_max: int, *, session: int) -> LockHistory | None:
        """The locks of transactions up to `last_id`, where a batch ends; None where the log has no batch there."""
        self._check_alive()
        self.check_session(session)
        return None

    def find_time(self, time: int, *, session: int) -> int:
        """The highest id in front of the first transaction whose time is `time` or later. Those of format 0 have none, and
        count as earlier than any."""
        self._check_alive()
        self.check_session(session)
        return self.last_id

    def _read(self, first_id: int, last_id: int, session: int | None, read: Callable[[Segment, int], T]) -> T:
        if self._failed is not None:
            raise self._failed
        if session is not None:
            self.check_session(session)
        limit = self.readable_to(session)
        if not 0 <= first_id <= last_id:
            raise BadArgument(f"ids {first_id} to {last_id} are no range")
        if first_id > limit:
            raise BeyondLog(
                f"partition {self.number}: id {first_id} is not here; ids up to {limit} can be read", last_id=limit
            )
        last_id = self._quarantine.sound_part(first_id, min(last_id, limit))
        cuts = self.cuts
        try:
            segment, last_here = self._shelf.segment_with(first_id)
            return read(segment, min(last_id, last_here))
        except Suspect:
            if cuts != self.cuts:
                raise BeyondLog(f"partition {self.number}: id {first_id} was cut while it was read") from None
            raise

    def readable_to(self, session: int | None) -> int:
        """The last id for a reader with or without a session."""
        return self.last_id if session is not None else min(self.last_id, self.visible_mark)

    @property
    def visible_mark(self) -> int:
        """The highest id for a reader without a session: never above the known committed mark."""
        return max(self.committed, min(self._site.info.low_mark, self.last_id))

    def read_examined(self, first_id: int, last_id: int, bytes_max: int) -> Run:
        """`read` for callers that hold the lane."""
        try:
            return self.read(first_id, last_id, bytes_max, session=self.promised_session)
        except Suspect as question:
            self.examine(question.first_id)
            return self.read(first_id, last_id, bytes_max, session=self.promised_session)

    def sealed_segments(self) -> list[tuple[int, int]]:
        """First and last id of each, damaged and missing ones too: all that this replica should have."""
        return self._shelf.sealed()

    def bytes_of(self, first_id: int) -> int:
        """How large the file of a segment is; 0 for one that is missing."""
        path = self._site.path(first_id)
        return self._site.disk.size(path) if self._site.disk.exists(path) else 0

    def sealed_path(self, first_id: int) -> str:
        """The data file of a sealed segment, to be sent as it is."""
        if first_id not in self._shelf.first_ids[:-1]:
            raise BeyondLog(f"partition {self.number} has no sealed segment that starts at id {first_id}")
        path = self._site.path(first_id)
        self._quarantine.check_file(path)
        return path

    def examine(self, first_id: int) -> None:
        """A read met wrong bytes in this segment: find out which, and make its index right."""
        with self._fatal():
            self._healing.examine(first_id)

    # -- the end

    def close(self) -> None:
        """Flush everything and leave a clean mark: the next start has nothing to prove again."""
        active = self._shelf.active
        if self._failed is None and active is not None and not self._quarantine:
            with self._fatal():
                active.flush()
                active.index.flush()
                self._promise.make_anew(durable=self.last_id, committed=self.committed, is_clean=True)
        elif self._failed is None:
            with self._fatal():
                self._promise.make_anew(committed=self.committed)
        if active is not None:
            active.close()
        self._promise.close()
        self._failed = NotOpened(f"partition {self.number} is closed")

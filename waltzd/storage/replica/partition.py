"""Replica of one partition: a log that obeys the owner with the highest session.

A partition has several replicas and one owner at a time. The owner holds a *session*, a number that only rises. An owner
may be replaced while its last calls are in flight, so a replica never asks which server is the owner: it compares sessions.

- *Fencing.* `open_session` promises durably to refuse every lower session, before it answers. From then on the log does
  not change, while the new owner reads how far each replica is, and decides with a majority where the log ends.
- *Settling.* Until its session begins, the owner may `truncate` above that end, or install segment files. `set_low_mark`
  begins the session: everything up to the mark is decided, the replica holds nothing above it, and nothing more is cut.
- *Appending.* The log has no gaps, and a record is never rewritten. Equal bytes under a known id are accepted, which makes
  a repeated append idempotent; other bytes belong to another history and are refused. The owner counts an id as committed
  when a majority has it on disk, and sends that mark with the next append. The mark is believed only from the session that
  has begun.

Rule 1: a call returns only when its effect is on the disk. Marks in memory move after the flush, never before.
Rule 2: a replica vouches only for bytes that it has proven. Damage is kept as findings: the ids in it are refused, all
other ids are served, nothing is cut, and the replica reports that it is not sound.
Rule 3: only `open_session` raises the session; every other call must carry exactly the promised session.
Rule 4: below the *floor* (the ids that the replica once had on disk) a loss is damage. Below the *cut floor* (the ids that
are known to be committed) nothing is cut for any caller.

Calls that change the replica come one at a time: the daemon has one queue for each partition. `read` may run beside them,
because the bytes that it reads are immutable, and `cuts` shows whether a truncation came between. A failed flush ends the
replica: the disk may hold less than the cache shows, and a second flush could report success. Opening a replica is in
`waltzd.storage.replica.directory`, segment files and damage are in `repair`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar
from uuid import UUID

from waltzd.errors import BadArgument, BeyondLog, OtherTimeline, Trimmed, WaltzError
from waltzd.errors.operations import (
    BadFrame,
    BelowFloor,
    DirectoryGone,
    DiskFull,
    FlushFailed,
    NotOpened,
    PathMissing,
    Unsafe,
)
from waltzd.format.batch import Batch, Head, Piece
from waltzd.format.finding import Finding
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.layout import ID_MAX
from waltzd.format.record import TAIL_RECORDS, LockColumns, Run, join_locks, tail_hash
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import Contact, Content, LockHistory
from waltzd.protocol.timelines import Lineage
from waltzd.storage.replica.aside import set_segments_aside
from waltzd.storage.replica.examine import DamageReport
from waltzd.storage.replica.hard_state import Fence, HardStateFile, lineage_of
from waltzd.storage.replica.key_indexes import KeyIndexes
from waltzd.storage.replica.repair import Healing, Installation
from waltzd.storage.replica.replica_context import FreeSpaceGuard, ReplicaContext
from waltzd.storage.replica.segment import BatchSegment, Segment, Suspect
from waltzd.storage.replica.segment_list import SegmentList
from waltzd.storage.replica.trimmer import Trimming
from waltzd.storage.replica.writer import Writer, only_new, only_new_batches

T = TypeVar("T")
NO_TAIL = (-1, "")
TAIL_BYTES = 1 << 20
"""Bytes of the last records that are read at once."""
HASH_BYTES_MIN = 64 << 10
"""Largest number of bytes that are hashed beside the next append: hashing them costs less than a switch to another
thread."""


class Partition:
    def __init__(
        self,
        context: ReplicaContext,
        hard_state: HardStateFile,
        segments: SegmentList,
        damage: DamageReport,
        *,
        proven_from: int,
    ) -> None:
        self.number = context.number
        self.directory = context.directory
        self._context = context
        self._hard_state = hard_state
        self._segments = segments
        self._damage = damage
        self._failed: WaltzError | None = None
        self._fence = Fence(context.number, context.control, hard_state)
        self._free_space = FreeSpaceGuard(context)
        self._healing = Healing(context, segments, damage, hard_state, self._free_space, proven_from=proven_from)
        self._writer = Writer(context, segments, hard_state)
        self._trimming = Trimming(context, segments, damage, hard_state)
        self._keys = KeyIndexes(context, segments)
        self.concerned = segments.concerned
        self.lineage = lineage_of(hard_state.value)
        """Timelines of the log; what this replica holds is the log of the last one."""
        self.cuts = 0
        self._replaced = 0
        """Number of segments that were replaced by files, which may hold other records than stood there."""
        self.committed = self._noted = hard_state.value.committed
        self._untrimmed = ""
        """Why it keeps what is below the floor that its owner named last; empty where it keeps nothing of it."""
        self._tail = NO_TAIL
        """A hash of the last records, and up to which id."""

    def stand(self) -> None:
        """See where the log ends, and finish its last segment."""
        with self._fatal():
            self._healing.stand()

    # -- its state

    @property
    def key(self) -> UUID:
        return self._context.key

    @property
    def last_id(self) -> int:
        """The highest id on the disk."""
        return self._segments.last_id

    @property
    def first_id(self) -> int:
        """The first id of the log that this replica has to have: its trim floor."""
        return self._segments.first_ids[0]

    @property
    def promised_session(self) -> int:
        return self._hard_state.value.session

    @property
    def contact(self) -> int:
        return self._fence.contact

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self._damage.findings

    @property
    def floor(self) -> int:
        """The highest id that this replica is known to have had on disk."""
        return self._healing.floor

    def status(self) -> ReplicaStatus:
        info, hard_state = self._context.info, self._hard_state.value
        return ReplicaStatus(
            partition=self.number,
            incarnation=hard_state.incarnation,
            promised_session=hard_state.session,
            session=info.session,
            low_mark=info.low_mark,
            local_low_mark=info.local_low_mark,
            committed=self.committed,
            last_id=self.last_id,
            is_available=info.is_available,
            is_full=self._free_space.is_still_full(),
            segments=len(self._segments.first_ids),
            findings=self.findings,
            damaged_segments=self._healing.damaged_segments,
            contact=self.contact,
            end=self._segments.end,
            tail=self._tail[1] if self._tail[0] == self.last_id else "",
            archives=self._context.settings.archives,
            floor=self.first_id,
            timelines=self.lineage.later,
            untrimmed=self._untrimmed,
            version=self._context.settings.version,
        )

    def _look_at_tail(self) -> None:
        """Hash the last records, if they are of format 0, for the next status, by which owners compare replicas.
        Records that cannot be read are left out; the next reader finds the damage."""
        last_id = self.last_id
        if self._segments.end is not None or last_id < 0 or self._tail[0] == last_id or self._damage:
            return
        runs: list[Run] = []
        at = max(0, last_id - TAIL_RECORDS + 1)
        try:
            while at <= last_id:
                runs.append(self.read(at, last_id, TAIL_BYTES, session=self.promised_session))
                at = runs[-1].last_id + 1
        except (WaltzError, Suspect):
            return
        self._tail = last_id, tail_hash(runs)

    @property
    def is_in_place(self) -> bool:
        return self._hard_state.is_in_place

    def describe(self) -> str:
        if self._failed is not None:
            return f"partition {self.number}: stopped, {self._failed.message}"
        return self.status().sentence()

    # -- sessions

    def open_session(self, session: int, caller: int = 0, secret: bytes = b"") -> ReplicaStatus:
        """Fence every lower session, durably, and prove the records that this replica vouches for."""
        self.fence(session, caller, secret)
        self.prove()
        return self.status()

    def fence(self, session: int, caller: int = 0, secret: bytes = b"", *, by_operator: bool = False) -> int:
        """Promise durably to refuse every lower session, and begin a new contact of this caller."""
        self._check_alive()
        with self._fatal():
            return self._fence.open(
                session, committed=self.committed, caller=caller, secret=secret, by_operator=by_operator
            )

    def check_contact(self, session: int, contact: Contact) -> None:
        """For each call that comes from outside: it is of the latest contact, and shows the owner's secret."""
        self._check_alive()
        self._fence.check_secret(session, contact)

    def check_session(self, session: int, contact: int = 0) -> None:
        """Raise unless the session is the promised one and the contact the latest one."""
        self._check_alive()
        self._fence.check(session, contact)

    def _check_alive(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _check_sound(self, *, may_be_short: bool = False) -> Segment:
        if self._segments.active is None or (self._damage and not (may_be_short and self._damage.is_only_short)):
            raise self._damage.error()
        return self._segments.active

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Stop serving the replica after a failed flush or write, before any call can see its state."""
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
        """Check the next segment that is not proven yet, the newest first. Return False if none is left."""
        with self._fatal():
            if self._healing.prove_next(self._context.info.low_mark):
                return True
        self._look_at_tail()
        return False

    # -- appending

    def append(self, session: int, pieces: Sequence[Piece], committed: int, contact: int = 0) -> int:
        """Write, and note the committed mark."""
        last_id = self.write(session, pieces, committed, contact)
        self.note_committed()
        return last_id

    def write(self, session: int, pieces: Sequence[Piece], committed: int, contact: int = 0) -> int:
        """Write consecutive runs or batches, which the queue has checked, and flush once. Returns the highest id on the
        disk."""
        self.check_session(session, contact)
        self._check_sound(may_be_short=True)
        fresh = self._only_new(pieces)
        if fresh:
            size = sum(len(piece.data) if isinstance(piece, Run) else piece.size for piece in fresh)
            self._free_space.check(size)
            with self._fatal():
                try:
                    self._write(fresh)
                except DiskFull:
                    self._free_space.note_refused(size)
                    raise
                if self._damage:
                    self._healing.end_moved(is_indexed=False)
            self._free_space.is_full = False
        known = min(committed, self.last_id)
        if known > self.committed and self._context.info.session == session:
            self.committed = known
        return self.last_id

    def note_archived(self, session: int, mark: int) -> ReplicaStatus:
        """Know durably that ids up to this one are committed: what was taken from the archive is, because only committed
        records get there."""
        self.check_session(session)
        self.committed = max(self.committed, min(mark, self.last_id))
        self.note_committed()
        with self._fatal():
            self._hard_state.change(durable=self.last_id, committed=self.committed)
        return self.status()

    @property
    def wants_noting(self) -> bool:
        return self.committed > self._noted

    def note_committed(self) -> None:
        """Write down the committed mark so that it outlives this process. No append waits for that."""
        if self.wants_noting and self._failed is None:
            self._noted = self.committed
            with self._fatal():
                self._hard_state.note(committed=self.committed)

    @property
    def wants_hashing(self) -> bool:
        active = self._segments.active
        return isinstance(active, BatchSegment) and active.unhashed_bytes >= HASH_BYTES_MIN

    def hash_flushed(self) -> None:
        """Prepare the footer of the segment that is written; see `BatchSegment.hash_flushed`."""
        if isinstance(self._segments.active, BatchSegment):
            self._segments.active.hash_flushed()

    def _only_new(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the records that are not stored yet. Records of format 0 may stand before batches, never after them."""
        runs = [piece for piece in pieces if isinstance(piece, Run)]
        batches = [piece for piece in pieces if isinstance(piece, Batch)]
        are_in_order = [*runs, *batches] == list(pieces)
        new_runs = only_new(runs, partition=self.number, last_id=self.last_id, stored=self.read_examined) if runs else []
        if not are_in_order or (new_runs and self._segments.end is not None):
            raise BadFrame(
                f"an append to partition {self.number} has records of format 0 behind batches",
                next_step="use a server of this version",
            )
        if not batches:
            return new_runs
        place = (new_runs[-1].last_id, None) if new_runs else (self.last_id, self._segments.end)
        if self._segments.is_empty_above_zero and not new_runs:
            raise BadFrame(
                f"partition {self.number} begins at its floor {self.first_id}: a segment of batches there comes as a file, "
                "with a footer that names the one in front of it",
                next_step="nothing: an owner of this version copies it from another replica",
            )
        new_batches = only_new_batches(batches, partition=self.number, place=place, stored=self._batch_with)
        return [*new_runs, *new_batches]

    def _write(self, fresh: Sequence[Piece]) -> None:
        try:
            self._writer.write(fresh, committed=self.committed)
        except Suspect as question:  # of the footer in front of a segment that is full; what was written is on the disk
            self._healing.examine(question.first_id)
            self._check_sound(may_be_short=True)
            self._segments.finish()
            self._write([piece for piece in fresh if piece.first_id > self.last_id])

    @property
    def wants_checkpoint(self) -> bool:
        return self._writer.wants_checkpoint

    def checkpoint(self) -> None:
        """Flush the index and write down the marks, unless damage makes them worthless. On a full disk the checkpoint stays
        due."""
        if self._failed is None and self._segments.active and (not self._damage or self._damage.is_only_short):
            with self._fatal(), suppress(DiskFull):
                self._writer.checkpoint(committed=self.committed)

    # -- marks

    def set_low_mark(self, session: int, low_mark: int, contact: int = 0) -> ReplicaStatus:
        """Begin the session: everything up to `low_mark` is decided, and this replica holds nothing above it.
        Committed records above it are an exception: the replica had begun this session before, and lost the control
        struct."""
        self.check_session(session, contact)
        active, settled = self._check_sound(), self._hard_state.value.settled
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
            self._hard_state.change(durable=self.last_id, committed=self.committed)
            self._writer.checkpoint_id = self.last_id
            control = self._context.control
            control.start_session(self.number, session=session, low_mark=low_mark, local_low_mark=self.last_id)
        self._look_at_tail()
        return self.status()

    def truncate(self, session: int, mark: int, contact: int = 0) -> ReplicaStatus:
        """Cut everything above `mark`: nothing that is known to be committed, and nothing after the session has begun. A
        batch goes as a whole: what the replica holds then may end below `mark`."""
        self.check_session(session, contact)
        if mark < -1:
            raise BadArgument(f"a mark is never below -1: {mark}")
        info, floor = self._context.info, self._cut_floor
        if mark >= self.last_id and not self._damage:
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

    def fork(self, session: int, lineage: Lineage, contact: int = 0) -> ReplicaStatus:
        """Go over to the newest timeline of the log: an operator ended the log of this replica's timeline at a fork.

        What stands above the fork is set aside first, or above the damage below it: the other replicas have that. Only here
        do committed records leave the log. The timeline is written last, so a replica that names it holds nothing else."""
        self.check_session(session, contact)
        own, info = self.lineage, self._context.info
        if own.current == lineage.current:
            return self.status()
        fork = lineage.shared_to(own.current)
        if own.current not in lineage or fork is None or info.session == session:
            raise OtherTimeline(
                f"partition {self.number} was to go over to timeline {lineage.current}, and holds the log of timeline "
                f"{own.current} in session {info.session}, which that one never had",
                not_done="nothing was cut or set aside",
            )
        if self.first_id > fork + 1:
            raise Trimmed(
                f"partition {self.number} begins at id {self.first_id}, above the fork behind id {fork}: it holds nothing "
                "of the log that goes on",
                not_done="nothing was cut or set aside",
                next_step="set the replica aside with `waltzctl storage recover`; its owner then makes another one",
                floor=self.first_id,
            )
        with self._fatal():
            end = min([fork, *(first_id - 1 for first_id in self._healing.damaged_segments)])
            is_above = self.last_id > fork or bool(self._damage)
            if is_above:
                above = self._segments.first_ids[self._segments.position_of(end + 1) :]
                set_segments_aside(self._context, above, f"it holds ids above the fork behind id {fork}")
            if is_above or max(info.low_mark, self.committed) > end:  # the marks of a replica that copies are above its end
                self.committed = self._noted = min(self.committed, end)
                self._context.control.lower_marks(self.number, end)
                hard_state = self._hard_state.value
                self._hard_state.change(committed=self.committed, settled=min(hard_state.settled, end))
            if is_above:
                self._cut(end)
            self._hard_state.change(timelines=lineage.encode())
            self._hard_state.change()
            self.lineage = Lineage(one.bare for one in lineage.later)
        self._context.say(f"goes over to timeline {lineage.number}, which forks behind id {fork}")
        return self.status()

    @property
    def _cut_floor(self) -> int:
        """Return the highest id that may never be cut."""
        return max(self._context.info.low_mark, self.committed, self._hard_state.value.committed, self.first_id - 1)

    def _cut(self, mark: int) -> None:
        segments = self._segments
        position = segments.position_of(mark + 1)
        first_id = segments.first_ids[position]
        if segments.active is None and position == len(segments.first_ids) - 1 > 0:
            position -= 1  # the last segment is not usable at all: the one in front becomes the last
        elif mark + 1 == first_id and position > 0 and segments.preceding_footer_hash(first_id) is None:
            position -= 1  # the one in front is not full: it was replaced by one that ends there, and takes what follows
        self._damage.check_up_to(mark)
        end, next_id = self._healing.end_of(position, min(mark, self.last_id))
        mark = next_id - 1
        if mark < self._cut_floor:
            raise BelowFloor(
                f"partition {self.number} was asked to cut inside the batch at id {next_id}, but ids up to "
                f"{self._cut_floor} are committed",
                floor=self._cut_floor,
            )
        durable = min(self._hard_state.value.durable, mark)
        self._tail = NO_TAIL
        self._hard_state.change(
            durable=durable, newest=segments.first_ids[position], segments=position + 1, committed=self.committed
        )
        self._writer.checkpoint_id = durable
        self.cuts += 1
        segments.cut(position, end=end, next_id=next_id)
        self._damage.heal()
        self._healing.stand()
        self._context.say(f"cut above id {mark}")

    def trim(
        self,
        session: int,
        floor: int,
        contact: int = 0,
        *,
        proven: int = ID_MAX,
        damaged: Sequence[int] = (),
        why: str = "",
    ) -> ReplicaStatus:
        """Let the log begin at this floor, or at the segment that holds it: what is below is in the archive. `unlink_next`
        removes the files. `proven`, `damaged` and `why`: results of `Archiver.proven`."""
        self.check_session(session, contact)
        info = self._context.info
        if info.session == session and floor - 1 > info.low_mark:
            raise Unsafe(
                f"partition {self.number} was to be trimmed up to id {floor - 1}, above the low-water mark "
                f"{info.low_mark} of its session",
                not_done="nothing was trimmed",
            )
        before = self.last_id
        untrimmed = f"ids from {proven} on are not let go: {why}" if why and floor <= before + 1 else ""
        if untrimmed and untrimmed != self._untrimmed:
            self._context.say(f"the floor is {floor}; {untrimmed}")
        self._untrimmed = untrimmed
        with self._fatal():
            self._trimming.begin(floor, committed=self.committed, proven=proven, damaged=damaged)
            if self.last_id != before:
                self.cuts += 1
                self._tail = NO_TAIL
                self._writer.checkpoint_id = self.last_id
                self._healing.end_moved(is_indexed=True)
        return self.status()

    def unlink_next(self) -> bool:
        """Remove some of the files below the floor. False when there is none left."""
        with self._fatal():
            return self._trimming.unlink_next()

    # -- whole segments

    def begin_installation(self, session: int, first_id: int, file_bytes: int, contact: int = 0) -> Installation:
        """Take in a segment file, beside the log and beside the queue; `install` gives it its place."""
        self.check_session(session, contact)
        begun_at = (contact or self.contact, *self._moment(session))
        floor = self._loss_floor(session)
        return self._healing.begin(first_id, file_bytes=file_bytes, cut_floor=floor, begun_at=begun_at)

    def check_installation(self, session: int, installation: Installation) -> None:
        """Raise unless a segment file that arrives still fits the replica. After another opening, a cut or the
        beginning of the session, the owner has decided without the file, which may hold records that were given up."""
        contact, *moment = installation.begun_at
        self.check_session(session, contact)
        if (*moment,) != self._moment(session):
            raise NotOpened(
                f"partition {self.number} was cut, or began the session, since the file for the segment at id "
                f"{installation.first_id} was announced",
                not_done="nothing of this file was kept",
            )

    def _moment(self, session: int) -> tuple[int, bool]:
        return self.cuts, self._context.info.session == session

    def install(self, session: int, installation: Installation) -> ReplicaStatus:
        """Give a proven file its place, behind the last id or where a segment is damaged or missing."""
        self.check_installation(session, installation)
        before, is_replaced = self.last_id, installation.first_id in self._segments.first_ids
        try:
            with self._fatal():
                self._healing.put(installation, cut_floor=self._loss_floor(session))
        finally:
            self._replaced += is_replaced
        if self.last_id < before:
            self.cuts += 1
        self._writer.checkpoint_id = min(self._hard_state.value.durable, self.last_id)
        self._tail = NO_TAIL
        self._look_at_tail()
        ids = f"{installation.first_id} to {installation.next_id - 1}"
        self._context.say(f"took the ids {ids} as a file")
        return self.status()

    def _loss_floor(self, session: int) -> int | None:
        """Return the lowest id at which a new file may end below the old end: until its session begins, the owner may cut.
        Return None once the session has begun."""
        return None if self._context.info.session == session else self._cut_floor

    # -- reading

    def read(self, first_id: int, last_id: int, bytes_max: int, *, session: int | None, with_locks: bool = False) -> Run:
        """Sound records from `first_id` on, at most up to `last_id` and `bytes_max`, at least one.

        Without a session only committed ones. Raises `Suspect` when the segment must be examined first."""
        return self._read(
            first_id, last_id, session, lambda segment, last: segment.read(first_id, last, bytes_max, with_locks=with_locks)
        )

    def read_whole(self, first_id: int, last_id: int, bytes_max: int, *, session: int) -> Content:
        """Read for another replica: whole batches, from the beginning of a batch on, where the log has batches. The
        last batch may end after `last_id`."""

        def read(segment: Segment, last_here: int) -> Content:
            if isinstance(segment, BatchSegment):
                return segment.read_whole(first_id, last_here, bytes_max)
            return segment.read(first_id, last_here, bytes_max)

        return self._read(first_id, last_id, session, read)

    def read_locks(self, last_id: int, bytes_max: int, *, session: int) -> LockHistory | None:
        """Return the locks of transactions up to `last_id`, where a batch ends: of as many of the last batches as fit,
        and of at least one; None if the log has no batch there."""
        self.check_session(session)
        if not -1 <= last_id <= self.last_id:
            raise BeyondLog(f"partition {self.number}: id {last_id} is not here", last_id=self.last_id)
        self._damage.sound_part(last_id, last_id)
        damaged = [finding.last_id for finding in self._damage.findings if finding.last_id is not None]
        low = max((id_ for id_ in damaged if id_ < last_id), default=-1)
        found: list[tuple[Head, LockColumns]] = []
        size = 0
        with self._uncut():
            for head, locks in self._locks_up_to(last_id):
                if not found and head.last_id != last_id:
                    raise BadArgument(
                        f"no batch of partition {self.number} ends at id {last_id}: one goes on to {head.last_id}"
                    )
                size += head.lead + head.records  # the answer has a count for each record, whatever the batch has
                if found and size > bytes_max:
                    break
                found.append((head, locks))
                if head.first_id - 1 <= low:
                    break
        if not found:
            return None
        found.reverse()
        return LockHistory(found[0][0].first_id, join_locks([locks for _, locks in found]))

    def _locks_up_to(self, last_id: int) -> Iterator[tuple[Head, LockColumns]]:
        """Yield the locks of each batch, backwards, down to records of format 0."""
        while last_id >= self.first_id:
            with self._segments.suspecting(last_id):
                segment, _ = self._segments.segment_with(last_id)
                if not isinstance(segment, BatchSegment):
                    return
                yield from segment.locks_up_to(last_id)
            last_id = segment.first_id - 1

    def find_marks(self, query: LockQuery, *, session: int) -> LockMarks:
        """Return transactions that marked a lock: an answer to the start of the query, for at least one id."""
        self.check_session(session)
        if query.is_done or query.first_id < 0:
            raise BadArgument(f"ids {query.first_id} to {query.last_id}, at most {query.limit}, are no range")
        if query.last_id > self.last_id:
            raise BeyondLog(f"partition {self.number}: id {query.last_id} is not here", last_id=self.last_id)
        last_id = self._damage.sound_part(query.next_id, query.last_id)
        low = query.first_id
        if query.newest_first:
            ends = [finding.last_id for finding in self._damage.findings if finding.last_id is not None]
            low = max([low, *(end + 1 for end in ends if end < last_id)])
        with self._uncut():
            return self._keys.find(query.within(low, last_id), cuts=self.cuts + self._replaced)

    def unwritten_keys(self) -> list[int]:
        """Return the first ids of sealed segments whose key index was missing or wrong when it was needed."""
        return list(self._keys.unwritten)

    def missing_keys(self) -> list[int]:
        """Return the first ids of sealed segments of format 1 without a key index; none if the replica was removed, or its
        directory cannot be listed."""
        try:
            return self._keys.missing()
        except WaltzError:
            return []

    def segment_bytes(self, first_id: int) -> int:
        """Return the size of a segment file; 0 if there is none any more."""
        try:
            return self._context.disk.size(self._context.path(first_id))
        except PathMissing:
            return 0

    def write_key(self, first_id: int) -> None:
        """Write the key index of a sealed segment. A segment that cannot be read gets none: its next reader examines it."""
        try:
            self._keys.write(first_id)
        except (Suspect, Trimmed, PathMissing):
            return

    def find_time(self, time: int, *, session: int) -> int:
        """Return the highest id before the first transaction whose time is `time` or later. Transactions of format 0
        have no time and count as earlier than any."""
        self.check_session(session)
        last_id, first_ids = self.last_id, self._segments.first_ids
        if last_id < 0:
            return last_id

        def is_later(position: int) -> bool:
            """Return whether the segment at this position begins at that time or later."""
            first_id = first_ids[position]
            if first_id > last_id:
                return True
            with self._segments.suspecting(first_id):
                segment, _ = self._segments.segment_with(first_id)
                return isinstance(segment, BatchSegment) and segment.time_of(first_id) >= time

        with self._uncut():
            behind = bisect_left(range(len(first_ids)), x=True, key=is_later)
            if behind == 0 and first_ids[0] > 0:
                raise self._segments.trimmed(first_ids[0] - 1)
            if behind == 0:
                return -1
            with self._segments.suspecting(first_ids[behind - 1]):
                segment, last_here = self._segments.segment_with(first_ids[behind - 1])
                last_here = min(last_here, last_id)
                return segment.first_since(time, last_here) - 1 if isinstance(segment, BatchSegment) else last_here

    def _batch_with(self, id_: int) -> Batch | None:
        """For a call that holds the queue. None where that record is in no batch."""

        def read(segment: Segment, last_here: int) -> Batch | None:
            return segment.flushed_batch(id_) if isinstance(segment, BatchSegment) else None

        try:
            return self._read(id_, id_, self.promised_session, read)
        except Suspect as question:
            self.examine(question.first_id)
            return self._read(id_, id_, self.promised_session, read)

    def _read(self, first_id: int, last_id: int, session: int | None, read: Callable[[Segment, int], T]) -> T:
        self._check_alive()
        if session is not None:
            self.check_session(session)
        limit = self.readable_to(session)
        if not 0 <= first_id <= last_id:
            raise BadArgument(f"ids {first_id} to {last_id} are no range")
        if first_id > limit:
            raise BeyondLog(
                f"partition {self.number}: id {first_id} is not here; ids up to {limit} can be read", last_id=limit
            )
        last_id = self._damage.sound_part(first_id, min(last_id, limit))
        with self._uncut(), self._segments.suspecting(first_id):
            segment, last_here = self._segments.segment_with(first_id)
            return read(segment, min(last_id, last_here))

    @contextmanager
    def _uncut(self) -> Iterator[None]:
        """Raise `Trimmed` or `BeyondLog` in place of `Suspect` if a reader meets the traces of a trim or a cut."""
        cuts = self.cuts
        try:
            yield
        except Suspect as question:
            if question.first_id < self.first_id:
                raise self._segments.trimmed(question.first_id) from None
            if cuts != self.cuts:
                raise BeyondLog(f"partition {self.number} was cut while it was read", last_id=self.last_id) from None
            raise

    def readable_to(self, session: int | None) -> int:
        """Return the last id that a reader with or without a session may read."""
        return self.last_id if session is not None else min(self.last_id, self.visible_mark)

    @property
    def visible_mark(self) -> int:
        """The highest id for a reader without a session: never above the known committed mark."""
        return max(self.committed, min(self._context.info.low_mark, self.last_id))

    def decided_to(self, session: int, committed: int) -> int:
        """Return the last id here that is certainly committed. `committed`: the committed mark of the owner. Before its
        session begins, records of this replica above the low-water mark may still be cut."""
        return min(committed, self.readable_to(session if self._context.info.session == session else None))

    def read_examined(self, first_id: int, last_id: int, bytes_max: int) -> Run:
        """`read` for callers that hold the queue."""
        try:
            return self.read(first_id, last_id, bytes_max, session=self.promised_session)
        except Suspect as question:
            self.examine(question.first_id)
            return self.read(first_id, last_id, bytes_max, session=self.promised_session)

    def sealed_segments(self) -> list[tuple[int, int]]:
        """First and last id of each, damaged and missing ones too: all that this replica should have."""
        return self._segments.sealed()

    def segments_with(self, first_id: int, last_id: int) -> list[int]:
        """Return the first ids of the segments that hold these ids."""
        first_ids = self._segments.first_ids
        return first_ids[max(0, bisect_right(first_ids, first_id) - 1) : bisect_right(first_ids, last_id)]

    def bytes_of(self, first_id: int) -> int:
        """Return the bytes of a segment file; 0 if it is missing."""
        path = self._context.path(first_id)
        return self._context.disk.size(path) if self._context.disk.exists(path) else 0

    def sealed_path(self, first_id: int) -> str:
        """Return the path of a sealed segment file, for sending it unchanged."""
        if first_id < self.first_id:
            raise self._segments.trimmed(first_id)
        if first_id not in self._segments.first_ids[:-1]:
            raise BeyondLog(f"partition {self.number} has no sealed segment that starts at id {first_id}")
        path = self._context.path(first_id)
        self._damage.check_file(path)
        return path

    def examine(self, first_id: int) -> None:
        """Examine a segment in which a read met wrong bytes, and repair its index; do nothing if it was trimmed or cut
        since."""
        if first_id not in self._segments.first_ids:
            return
        with self._fatal():
            self._healing.examine(first_id)

    # -- the end

    def close(self) -> None:
        """Flush everything and leave a clean mark: the next start has nothing to prove again."""
        active = self._segments.active
        if self._failed is None and active is not None and not self._damage:
            with self._fatal():
                active.flush()
                active.index.flush()
                self._hard_state.make_anew(durable=self.last_id, committed=self.committed, is_clean=True)
        elif self._failed is None:
            with self._fatal():
                self._hard_state.make_anew(committed=self.committed)
        if active is not None:
            active.close()
        self._hard_state.close()
        self._failed = NotOpened(f"partition {self.number} is closed")

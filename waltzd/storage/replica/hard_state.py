"""Hard-state file of one replica: its promised session and its marks, on the disk before they are answered.

Two slots take turns, each in a page of its own. A change writes a whole slot and flushes it before it counts. The file
stores its own inode, and is created anew at each opening and each orderly end. So a copy that was put back detects that it
is another file, even if it was written over the file that it was taken from.

`Fence` admits one caller: the owner of the promised session, in its latest *contact*. A contact begins with each opening of
the replica, and ends the earlier contact of the same caller. An owner opens the replica again after a timeout, and decides
by the answer; so nothing that an earlier contact began may take effect later.

The number of a session is no secret. So the first opening of a session sets a *secret*, and a caller that does not show
this secret can neither open the session again nor use it. The secret is in memory only: after a restart the owner opens
again.
"""

from __future__ import annotations

import contextlib
import hmac
from dataclasses import replace
from typing import Any
from uuid import UUID

from waltzd.disk.seam import Disk, File, Inode, join, read_whole
from waltzd.errors import BadArgument
from waltzd.errors.operations import (
    DiskFull,
    NotOpened,
    NotRegularFile,
    PartitionDamaged,
    PartitionOffline,
    PathMissing,
    ReadFailed,
    SessionTooFar,
    StaleSession,
    TooManyFiles,
)
from waltzd.format.finding import Code, Finding, unreadable
from waltzd.format.layout import (
    HARD_STATE_BYTES,
    HARD_STATE_NAME,
    NEW_SUFFIX,
    NO_MARK,
    NO_SESSION,
    ControlStruct,
    HardState,
    read_hard_state_file,
)
from waltzd.protocol.peers import Contact
from waltzd.protocol.timelines import Lineage
from waltzd.storage.replica.control import ControlFile, write_new_file


def floor_of(info: ControlStruct | None, hard_state: HardState | None) -> int:
    """Return the highest id that a replica is known to have had on its disk."""
    marks = () if hard_state is None else (hard_state.committed, hard_state.durable)
    return max(NO_MARK if info is None else info.local_low_mark, *marks, NO_MARK)


def lineage_of(hard_state: HardState) -> Lineage:
    """Return the timelines of the log that this replica holds. Raise `PartitionDamaged` if the hard state, whose checksum
    is right, names no valid lineage."""
    found = Lineage.decode(hard_state.timelines)
    if found is None:
        raise PartitionDamaged(f"the hard state of partition {hard_state.partition} names timelines that are no lineage")
    return found


def read_hard_state(
    disk: Disk, directory: str, partition: int | None, key: UUID | None, *, is_expected: bool
) -> tuple[HardState | None, list[Finding]]:
    """Return the hard state of a partition directory, and all findings about its file."""
    path = join(directory, HARD_STATE_NAME)
    if not disk.exists(path):
        detail = "the hard-state file is missing, and the storage's identity file says that there is one"
        missing = Finding(Code.HARD_STATE_FILE, path, detail, partition=partition)
        return None, [missing] if is_expected else []
    try:
        return read_hard_state_file(read_whole(disk, path, HARD_STATE_BYTES + 1), path, key, partition)
    except (NotRegularFile, ReadFailed) as error:
        return None, [unreadable(path, error)]


def _fresh_inode(disk: Disk, directory: str) -> Inode:
    """Return the inode of the file that `write_new_file` will fill and rename."""
    path = join(directory, HARD_STATE_NAME + NEW_SUFFIX)
    disk.create(path).close()
    return disk.inode(path)


class HardStateFile:
    def __init__(self, disk: Disk, directory: str, file: File, hard_state: HardState, inode: Inode) -> None:
        self._disk = disk
        self._directory = directory
        self._file = file
        self._inode = inode
        self.value = hard_state

    @staticmethod
    def create(disk: Disk, directory: str, hard_state: HardState) -> None:
        """Create the first hard state of a replica. The caller flushes the directory."""
        inode = _fresh_inode(disk, directory)
        hard_state = replace(hard_state, inode=inode.number, inode_generation=inode.generation)
        write_new_file(disk, directory, HARD_STATE_NAME, hard_state.encode().ljust(HARD_STATE_BYTES, b"\0"))

    @staticmethod
    def open(disk: Disk, directory: str, *, key: UUID, partition: int) -> HardStateFile:
        path = join(directory, HARD_STATE_NAME)
        file = disk.open(path, write=True)
        hard_state, findings = read_hard_state_file(file.read(0, HARD_STATE_BYTES), path, key, partition)
        if hard_state is None:
            raise next(finding for finding in findings if finding.is_damage).error()
        return HardStateFile(disk, directory, file, hard_state, disk.inode(path))

    @property
    def is_copy(self) -> bool:
        """True if these bytes were written to another file: the directory was copied or restored."""
        return not self._inode.is_same(Inode(self.value.inode, self.value.inode_generation))

    @property
    def is_in_place(self) -> bool:
        try:
            return self._disk.inode(join(self._directory, HARD_STATE_NAME)).is_same(self._inode)
        except PathMissing:
            return False
        except TooManyFiles:  # then nothing is known of the file, and the next look may tell
            return True

    def promise(self, *, session: int, committed: int) -> None:
        """Promise a session in both slots: damage of one slot must not bring a lower session back."""
        self.change(session=session, committed=committed, settled=committed)
        self.change()

    def change(self, **fields: Any) -> None:
        new = replace(self.value, sequence=self.value.sequence + 1, **fields)
        self._file.write(new.slot_offset, new.encode())
        self._file.flush()
        self.value = new

    def note(self, *, committed: int) -> None:
        """Write the committed mark without a flush: it survives an end of the process, not of the machine. The slot of the
        next change takes it, so the current slot stays whole."""
        new = replace(self.value, sequence=self.value.sequence + 1, committed=committed)
        with contextlib.suppress(DiskFull):
            self._file.write(new.slot_offset, new.encode())

    def make_anew(self, **fields: Any) -> None:
        """Replace the file by a new one with these changes in both slots. On a full disk this file is changed instead,
        so that a storage can start and stop there."""
        try:
            self._write_beside(fields)
        except DiskFull:
            path = join(self._directory, HARD_STATE_NAME + NEW_SUFFIX)
            if self._disk.exists(path):
                self._disk.remove(path)
            self.change(inode=self._inode.number, inode_generation=self._inode.generation, **fields)
            self.change()

    def _write_beside(self, fields: dict[str, Any]) -> None:
        inode = _fresh_inode(self._disk, self._directory)
        stamp: dict[str, Any] = {"inode": inode.number, "inode_generation": inode.generation}
        first = replace(self.value, sequence=self.value.sequence + 1, **stamp, **fields)
        second = replace(first, sequence=first.sequence + 1)
        content = bytearray(HARD_STATE_BYTES)
        for slot in (first, second):
            content[slot.slot_offset : slot.slot_offset + slot.slot_bytes] = slot.encode()
        write_new_file(self._disk, self._directory, HARD_STATE_NAME, bytes(content))
        self._disk.flush_directory(self._directory)
        self._file.close()  # it stays open until here, so that the new file has another inode number
        self._file = self._disk.open(join(self._directory, HARD_STATE_NAME), write=True)
        self._inode, self.value = inode, second

    def close(self) -> None:
        self._file.close()


SESSIONS_MAX = 1_000_000
"""Largest distance of an opened session above the promised one; a replica that was away for years stays below it."""
FIRST_SESSION_MAX = 1 << 40
"""For a replica that has promised nothing yet: more sessions than there are seconds in thirty thousand years."""
CALLERS_MAX = 8
"""Largest number of callers in one session. More callers are an accident, and the contact of the first one ends."""
_CONTACTS = 1 << 20
_NO_CALLER = -1
"""The caller until the first opening since the process started."""


def check_jump(promised: int, session: int) -> None:
    """Refuses a session so high that no real owner could follow it."""
    limit = FIRST_SESSION_MAX if promised == NO_SESSION else promised + SESSIONS_MAX
    if session > limit:
        raise SessionTooFar(
            f"session {session} was to be opened: the newest that is known here is {promised}, {limit} may follow at most"
        )


class Fence:
    def __init__(self, partition: int, control: ControlFile, hard_state: HardStateFile) -> None:
        self._partition = partition
        self._control = control
        self._hard_state = hard_state
        self.contact = hard_state.value.sequence * _CONTACTS
        """The latest one. Contacts of this process are above those of every earlier one, because the sequence has risen."""
        self._contacts: dict[int, int] = {_NO_CALLER: self.contact}
        """The contact of each caller in this session; two callers are two names that lead to one storage."""
        self._secret: bytes | None = None
        """Secret of the owner of the promised session; None until the owner opens it."""

    def open(self, session: int, *, committed: int, caller: int, secret: bytes, by_operator: bool = False) -> int:
        """Promise durably to refuse every lower session, and begin a new contact. An operator may take back a hard
        state to a
        session that has not begun here."""
        if session < 0:
            raise BadArgument(f"a session id is never negative: {session}")
        promised = self._hard_state.value.session
        is_taken_back = by_operator and self._control.info(self._partition).session < session < promised
        self.check_current(promised if is_taken_back else session)
        is_known = session == promised and self._secret is not None
        if is_known and not by_operator and not self._is_shown(secret):
            raise StaleSession(
                f"session {session} of partition {self._partition} was opened by another owner, whose secret the caller "
                "does not know",
                promised_session=promised,
            )
        if session > promised or is_taken_back:
            check_jump(promised, session)
            self._hard_state.promise(session=session, committed=committed)
            self._contacts.clear()
        self._secret = None if by_operator else secret
        self.contact += 1
        self._contacts.pop(_NO_CALLER, None)
        self._contacts.pop(caller, None)
        if len(self._contacts) >= CALLERS_MAX:
            del self._contacts[next(iter(self._contacts))]
        self._contacts[caller] = self.contact
        return self.contact

    def _is_shown(self, secret: bytes) -> bool:
        return self._secret is not None and hmac.compare_digest(self._secret, secret)

    def check_secret(self, session: int, contact: Contact) -> None:
        """Refuse a caller that did not open the promised session."""
        self.check(session, contact.number)
        if not self._is_shown(contact.secret):
            raise NotOpened(
                f"session {session} of partition {self._partition} was not opened here by this caller: it does not show "
                "the secret"
            )

    def check(self, session: int, contact: int) -> None:
        """Refuses every session but the promised one; a contact of 0 means any."""
        self.check_current(session)
        promised = self._hard_state.value.session
        if session > promised:
            raise NotOpened(
                f"session {session} was not opened on partition {self._partition}; the storage promised itself to session "
                f"{promised}"
            )
        if contact != 0 and contact not in self._contacts.values():
            raise NotOpened(
                f"partition {self._partition} was opened again by session {session}; this belongs to an earlier opening"
            )

    def check_current(self, session: int) -> None:
        if not self._control.info(self._partition).is_available:
            raise PartitionOffline(f"partition {self._partition} was taken offline on this storage")
        promised = self._hard_state.value.session
        if session < promised:
            raise StaleSession(
                f"session {session} of partition {self._partition} is over: the storage promised itself to session "
                f"{promised}",
                promised_session=promised,
            )

"""What the small files of a storage directory say, and whether they can be believed.

The control file, the identity file and the promise files hold everything that a replica has bound itself to; the segments
must live up to it. This module reads them all the way through, where the daemon would stop at the first thing that is
wrong, and turns each doubt into a finding with its byte range. It never decides what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import ControlDamaged, NotRegularFile, PathMissing, ReadFailed, UnknownVersion
from waltzd.format.checksum import single_byte_error
from waltzd.format.finding import Code, Finding
from waltzd.format.layout import (
    CONTROL_INFO_BYTES,
    CONTROL_NAME,
    CONTROL_STRUCT_BYTES,
    HEADER_BYTES,
    IDENTITY_BYTES,
    IDENTITY_NAME,
    NO_MARK,
    PARTITIONS_MAX,
    PROMISE_BYTES,
    PROMISE_NAME,
    PROMISE_SLOT_BYTES,
    PROMISE_SLOT_SPACING,
    ControlHeader,
    ControlStruct,
    Identity,
    Promise,
    control_bytes,
    control_struct_offset,
)


@dataclass(kw_only=True)
class Ledger:
    """The storage directory's own account: of which cluster it is, and what each partition's current struct says."""

    key: UUID | None = None
    has_identity: bool = False
    structs: dict[int, ControlStruct] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def assigned(self) -> list[int]:
        return [number for number, struct in self.structs.items() if struct.is_assigned]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How far a replica's log must reach, and who says so."""

    named: tuple[tuple[str, int], ...] = ()
    newest: int = NO_MARK
    """A segment that starts here or later must exist."""

    @property
    def floor(self) -> int:
        return max((mark for _, mark in self.named), default=NO_MARK)


def read_whole(disk: Disk, path: str, limit: int) -> bytes:
    file = disk.open(path)
    try:
        return file.read(0, limit)
    finally:
        file.close()


def changed_byte(raw: bytes, start: int, what: str) -> str:
    """The one byte that explains a failed checksum of a small structure, as a phrase."""
    error = single_byte_error(raw) if len(raw) >= 4 else None
    if error is None:
        return ""
    position, right = error
    return f"; byte {start + position} is 0x{raw[position]:02x}, a sound {what} has 0x{right:02x}"


# -- control file and identity file ------------------------------------------------------------------------------------


def read_ledger(disk: Disk, directory: str, control: File | None = None) -> Ledger:
    """`control` is the open control file of a caller who holds its lock: closing another one would let the lock go."""
    ledger = Ledger()
    identity = _read_identity(disk, directory, ledger)
    header = _read_control(disk, join(directory, CONTROL_NAME), control, ledger)
    if header is not None and identity is not None:
        _compare(directory, header, identity.control, ledger)
    known = identity.control if identity is not None else header
    ledger.key = known.key if known is not None else None
    return ledger


def _read_identity(disk: Disk, directory: str, ledger: Ledger) -> Identity | None:
    path = join(directory, IDENTITY_NAME)
    if not disk.exists(path):
        return None
    ledger.has_identity = True
    try:
        raw = read_whole(disk, path, IDENTITY_BYTES + 1)
        return Identity.decode(raw, path)
    except UnknownVersion as error:
        ledger.findings.append(Finding(code=Code.UNKNOWN_VERSION, path=path, detail=error.message))
    except ControlDamaged as error:
        detail = error.message.removeprefix(path).strip() + changed_byte(raw, 0, "identity file")
        ledger.findings.append(
            Finding(code=Code.CONTROL_FILE, path=path, detail=detail, first_byte=0, last_byte=max(0, len(raw) - 1))
        )
    except (NotRegularFile, ReadFailed) as error:
        ledger.findings.append(_not_readable(path, error))
    return None


def _not_readable(path: str, error: NotRegularFile | ReadFailed) -> Finding:
    code = Code.NOT_A_FILE if isinstance(error, NotRegularFile) else Code.UNREADABLE
    return Finding(code=code, path=path, detail=error.message)


def _read_control(disk: Disk, path: str, control: File | None, ledger: Ledger) -> ControlHeader | None:
    def bad(detail: str, first: int = 0, last: int = HEADER_BYTES - 1, partition: int | None = None) -> None:
        ledger.findings.append(
            Finding(code=Code.CONTROL_FILE, path=path, detail=detail, first_byte=first, last_byte=last, partition=partition)
        )

    limit = control_bytes(PARTITIONS_MAX) + 1
    try:
        raw = control.read(0, limit) if control is not None else read_whole(disk, path, limit)
    except PathMissing:
        ledger.findings.append(Finding(code=Code.CONTROL_FILE, path=path, detail="the control file is missing"))
        return None
    except (NotRegularFile, ReadFailed) as error:
        ledger.findings.append(_not_readable(path, error))
        return None
    try:
        header = ControlHeader.decode(raw, "the control file")
    except UnknownVersion as error:
        ledger.findings.append(
            Finding(code=Code.UNKNOWN_VERSION, path=path, detail=error.message, first_byte=0, last_byte=3)
        )
        return None
    except ControlDamaged as error:
        bad(error.message)
        return None
    expected = control_bytes(header.partitions)
    if len(raw) != expected:
        bad(f"has {len(raw)} bytes; for {header.partitions} partitions it must have {expected}", 28, 31)
    for number in range(header.partitions):
        start = HEADER_BYTES + CONTROL_INFO_BYTES * number
        record = raw[start : start + CONTROL_INFO_BYTES]
        if len(record) == CONTROL_INFO_BYTES:
            _read_info(record, number, path, ledger)
        else:
            bad("ends before the record of this partition", len(raw), start + CONTROL_INFO_BYTES - 1, number)
    return header


def _read_info(record: bytes, number: int, path: str, ledger: Ledger) -> None:
    def finding(code: Code, detail: str, first: int, size: int) -> Finding:
        return Finding(code=code, path=path, detail=detail, partition=number, first_byte=first, last_byte=first + size - 1)

    offsets = [control_struct_offset(number, slot) for slot in (0, 1)]
    raws = [record[4 + CONTROL_STRUCT_BYTES * slot :][:CONTROL_STRUCT_BYTES] for slot in (0, 1)]
    structs = [ControlStruct.decode(raw) for raw in raws]
    claimed = int.from_bytes(record[:4], "big", signed=True)
    if claimed != number:
        detail = f"the record of this partition says partition {claimed}"
        ledger.findings.append(finding(Code.CONTROL_FILE, detail, offsets[0] - 4, 4))
    bad = [slot for slot in (0, 1) if structs[slot] is None]
    for slot in bad:
        code = Code.CONTROL_FILE if len(bad) == 2 else Code.CONTROL_STRUCT
        which = "both structs fail their checksum" if len(bad) == 2 else f"struct {slot + 1} fails its checksum"
        detail = which + changed_byte(raws[slot], offsets[slot], "struct")
        ledger.findings.append(finding(code, detail, offsets[slot], CONTROL_STRUCT_BYTES))
    sound = [struct for struct in structs if struct is not None]
    if len(sound) == 2 and sound[0].sequence == sound[1].sequence:
        detail = f"both structs have sequence {sound[0].sequence}, so neither can be said to be current"
        ledger.findings.append(finding(Code.CONTROL_FILE, detail, offsets[0], 2 * CONTROL_STRUCT_BYTES))
    if sound:
        ledger.structs[number] = max(sound, key=lambda struct: struct.sequence)


_CONTROL_FIELDS = (
    ("created_ms", "creation date", 4, 8),
    ("key", "cluster key", 12, 16),
    ("partitions", "partitions", 28, 4),
)


def _compare(directory: str, header: ControlHeader, identity: ControlHeader, ledger: Ledger) -> None:
    for name, called, first, size in _CONTROL_FIELDS:
        ours, theirs = getattr(header, name), getattr(identity, name)
        if ours != theirs:
            ledger.findings.append(
                Finding(
                    code=Code.CONTROL_FILE,
                    path=join(directory, CONTROL_NAME),
                    detail=f"{called}: the control file says {ours}, the identity file {theirs}",
                    first_byte=first,
                    last_byte=first + size - 1,
                )
            )


# -- promise file ------------------------------------------------------------------------------------------------------


def read_promise(
    disk: Disk, directory: str, partition: int | None, key: UUID | None, *, is_expected: bool
) -> tuple[Promise | None, list[Finding]]:
    """The newest believable promise of a partition directory. A slot of zeros was never written and is fine."""
    path = join(directory, PROMISE_NAME)
    findings: list[Finding] = []

    def bad(code: Code, detail: str, first: int | None = None, last: int | None = None) -> None:
        findings.append(Finding(code=code, path=path, detail=detail, partition=partition, first_byte=first, last_byte=last))

    if not disk.exists(path):
        if is_expected:
            bad(Code.PROMISE_FILE, "the promise file is missing, and the storage's identity file says that there is one")
        return None, findings
    try:
        raw = read_whole(disk, path, PROMISE_BYTES + 1)
    except (NotRegularFile, ReadFailed) as error:
        findings.append(_not_readable(path, error))
        return None, findings
    if len(raw) != PROMISE_BYTES:
        bad(Code.PROMISE_FILE, f"has {len(raw)} bytes or more, {PROMISE_BYTES} are right", 0, max(0, len(raw) - 1))
    sound: list[Promise] = []
    damaged: list[tuple[int, int, str]] = []
    for slot in (0, 1):
        page = raw[PROMISE_SLOT_SPACING * slot :][:PROMISE_SLOT_SPACING]
        if not any(page):
            continue
        problem = _read_slot(page, slot, path, sound)
        if problem:
            first = PROMISE_SLOT_SPACING * slot
            damaged.append((first, first + len(page) - 1, problem))
    for first, last, problem in damaged:
        bad(Code.PROMISE_SLOT if sound else Code.PROMISE_FILE, problem, first, last)
    if not sound and not damaged:
        bad(Code.PROMISE_FILE, "neither slot holds a promise")
    promise = max(sound, key=lambda slot: slot.sequence, default=None)
    if promise is not None and key is not None and promise.key != key:
        bad(Code.PROMISE_FILE, f"belongs to the cluster {promise.key}, not to {key}")
        return None, findings
    if promise is not None and partition is not None and promise.partition != partition:
        bad(Code.PROMISE_FILE, f"belongs to partition {promise.partition}")
        return None, findings
    return promise, findings


def _read_slot(page: bytes, slot: int, path: str, sound: list[Promise]) -> str:
    """Adds the promise of a slot to `sound`, or says what is wrong; a slot can be sound and have bytes behind it."""
    start = PROMISE_SLOT_SPACING * slot
    raw = page[:PROMISE_SLOT_BYTES]
    try:
        promise = Promise.decode(raw, path)
    except UnknownVersion as error:
        return f"slot {slot + 1}: {error.message}"
    if promise is None:
        return f"slot {slot + 1} fails its checksum" + changed_byte(raw, start, "slot")
    if promise.slot_offset != start:
        return f"slot {slot + 1} holds the promise number {promise.sequence}, which belongs in the other slot"
    sound.append(promise)
    rest = page[PROMISE_SLOT_BYTES:]
    zeros = len(rest) - len(rest.lstrip(b"\0"))
    if zeros < len(rest):
        at = start + PROMISE_SLOT_BYTES + zeros
        return f"byte {at}, behind slot {slot + 1}, is 0x{rest[zeros]:02x}; it must be zero"
    return ""


def marks_of(struct: ControlStruct | None, promise: Promise | None) -> Marks:
    named: list[tuple[str, int]] = []
    if struct is not None:
        named.append(("the control file's local low-water mark", struct.local_low_mark))
    if promise is not None:
        named.append(("the promised committed mark", promise.committed))
        named.append(("the promised durable mark", promise.durable))
    return Marks(named=tuple(named), newest=NO_MARK if promise is None else promise.newest)

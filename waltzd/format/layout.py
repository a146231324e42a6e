"""The layout of a storage directory: all bytes except records, batches and footers.

    <directory>/waltz-storage.ctl      control file: cluster key, and per partition two alternating checksummed structs
    <directory>/waltz-storage.id       identity: a checksummed copy of the control header (not in the original Waltz)
    <directory>/waltz-storage.reserve  space that is freed to start on a full disk (not in the original Waltz)
    <directory>/<partition>/<first id, 19 digits>.seg, .idx and .key
    <directory>/<partition>/promise    two alternating checksummed slots: promised session, marks, incarnation (not in the
                                       original Waltz)

All integers are big-endian. `docs/format.md` describes the same in prose. Pure: bytes in, values out.

A `decode` function raises an error for wrong bytes; a `read_*` function returns the value and all that is wrong, as
findings."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from uuid import UUID

from waltzd.errors.operations import ControlDamaged, HeaderDamaged, UnknownVersion
from waltzd.format.checksum import single_byte_error
from waltzd.format.finding import Code, Finding, Findings

VERSION = 0
"""Version of all files but segments and indexes, which may have a newer version. Readers reject unknown versions."""
BATCHES = 1
"""Version of segments that hold batches (`waltzd.format.batch`), and of their indexes."""
VERSIONS = (VERSION, BATCHES)
"""All versions of segments and indexes."""

HEADER_BYTES = 128
CONTROL_NAME = "waltz-storage.ctl"
GROUPS_NAME = "waltz-groups.ctl"
"""Control file of the group log, whose partition number follows those in the first control file."""
IDENTITY_NAME = "waltz-storage.id"
RESERVE_NAME = "waltz-storage.reserve"
SCRUB_NAME = "scrub.json"
HARD_STATE_NAME = "promise"
SEGMENT_SUFFIX = ".seg"
INDEX_SUFFIX = ".idx"
KEY_SUFFIX = ".key"
FILES_OF_SEGMENT = (SEGMENT_SUFFIX, INDEX_SUFFIX, KEY_SUFFIX)
NEW_SUFFIX = ".new"
"""Suffix of a file that is being written, which is renamed once it is complete. A start of the storage removes such
files."""

ASIDE = ".set-aside-"
"""Separator in the name of a directory that was set aside: partition number, separator, and a number from 1 on."""
_ASIDE_BUILD = f"{ASIDE}new"
_ASIDE_NAME = re.compile(rf"(0|[1-9][0-9]{{0,9}}){re.escape(ASIDE)}[1-9][0-9]{{0,9}}")

INDEX_ENTRY_BYTES = 8
CHECKPOINT_TRANSACTIONS = 1000
ID_MAX = (1 << 63) - 1
NO_MARK = -1
NO_SESSION = -1


def segment_name(first_id: int) -> str:
    return f"{first_id:019d}{SEGMENT_SUFFIX}"


def index_name(first_id: int) -> str:
    return f"{first_id:019d}{INDEX_SUFFIX}"


def key_index_name(first_id: int) -> str:
    return f"{first_id:019d}{KEY_SUFFIX}"


def first_id_of(name: str, suffixes: tuple[str, ...] = (SEGMENT_SUFFIX, INDEX_SUFFIX)) -> int | None:
    """Return the first transaction id in the name of a segment or index file; None for any other name."""
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix not in suffixes or len(stem) != 19 or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem) if int(stem) <= ID_MAX else None


def segment_ids(names: Iterable[str]) -> list[int]:
    """Return the first ids of the segments among these names, in ascending order."""
    return sorted(id_ for name in names if name.endswith(SEGMENT_SUFFIX) and (id_ := first_id_of(name)) is not None)


def aside_name(partition: int, taken: Collection[str]) -> str:
    """Return a free name for the directory of a partition whose files are kept and no longer used."""
    return next(name for turn in range(1, len(taken) + 2) if (name := f"{partition}{ASIDE}{turn}") not in taken)


def aside_build_name(partition: int) -> str:
    """Return the name of the directory in which segments are copied before it is renamed to `aside_name`."""
    return f"{partition}{_ASIDE_BUILD}"


def is_aside_build(name: str) -> bool:
    return name.endswith(_ASIDE_BUILD)


def aside_partition(name: str) -> int | None:
    """Return the partition whose files were set aside in the directory of this name; None for any other directory."""
    found = _ASIDE_NAME.fullmatch(name)
    return None if found is None else int(found[1])


def index_offset(entry: int) -> int:
    return HEADER_BYTES + INDEX_ENTRY_BYTES * entry


def index_entries(size: int) -> int:
    """Return the number of whole entries in an index file of this size."""
    return max(0, size - HEADER_BYTES) // INDEX_ENTRY_BYTES


_CRC = struct.Struct(">I")


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _unsealed(raw: bytes, size: int) -> bytes | None:
    """Return the first `size` bytes; None if the checksum after them is wrong or missing."""
    body = raw[:size]
    return body if raw[size : size + _CRC.size] == _CRC.pack(zlib.crc32(body)) else None


def _check_version(version: int, where: str, known: tuple[int, ...] = (VERSION,)) -> None:
    if version not in known:
        said = " and ".join(map(str, known))
        raise UnknownVersion(
            f"{where} has format version {version}; this program knows version{'s' * (len(known) > 1)} {said}"
        )


# -- segment and index header ------------------------------------------------------------------------------------------

_FILE_HEADER = struct.Struct(">iq16siq")


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """The header of a segment or index file, in its first 128 bytes."""

    created_ms: int
    key: UUID
    partition: int
    first_id: int
    version: int = VERSION

    def encode(self) -> bytes:
        packed = _FILE_HEADER.pack(self.version, self.created_ms, self.key.bytes, self.partition, self.first_id)
        return packed.ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def decode(raw: bytes, where: str) -> FileHeader:
        if len(raw) < HEADER_BYTES:
            raise HeaderDamaged(f"{where} ends inside its header: {len(raw)} of {HEADER_BYTES} bytes are there")
        version, created_ms, key, partition, first_id = _FILE_HEADER.unpack_from(raw)
        _check_version(version, where, VERSIONS)
        return FileHeader(
            created_ms=created_ms, key=UUID(bytes=key), partition=partition, first_id=first_id, version=version
        )


def read_header(
    raw: bytes, path: str, key: UUID | None, partition: int | None, first_id: int
) -> tuple[FileHeader | None, list[Finding]]:
    """Read the header of a segment or an index, and compare it with its place. A key or a partition of None matches any."""
    findings = Findings(path, partition)
    try:
        header = FileHeader.decode(raw, "the file")
    except HeaderDamaged as error:
        findings.find(Code.DAMAGED_HEADER, error.message, 0, HEADER_BYTES)
        return None, findings
    except UnknownVersion as error:
        findings.find(Code.UNKNOWN_VERSION, error.message, 0, 4)
        return None, findings
    if key is not None and header.key != key:
        findings.find(Code.FOREIGN_KEY, f"belongs to the cluster {header.key}, not to {key}", 12, 16)
    if partition is not None and header.partition != partition:
        detail = f"the header states partition {header.partition}, the directory {partition}"
        findings.find(Code.DAMAGED_HEADER, detail, 28, 4)
    if header.first_id != first_id:
        detail = f"the header states first id {header.first_id}, the file name {first_id}"
        findings.find(Code.DAMAGED_HEADER, detail, 32, 8)
    filled = [at for at in range(_FILE_HEADER.size, HEADER_BYTES) if raw[at]]
    if filled:
        detail = "the reserved part of the header must be zero"
        findings.find(Code.DAMAGED_HEADER, detail, filled[0], filled[-1] - filled[0] + 1)
    return header, findings


def check_header(raw: bytes, path: str, expected: FileHeader) -> FileHeader:
    """Return the header; raise the error of a finding if it belongs to another place. Its date and reserved part are
    free."""
    header, findings = read_header(raw, path, expected.key, expected.partition, expected.first_id)
    for finding in misplaced(findings):
        raise finding.error()
    assert header is not None
    return header


def misplaced(findings: list[Finding]) -> list[Finding]:
    """Return those findings of a header that show that the file belongs elsewhere: all but those of its reserved part."""
    return [finding for finding in findings if finding.first_byte is None or finding.first_byte < _FILE_HEADER.size]


# -- control file ------------------------------------------------------------------------------------------------------

_CONTROL_HEADER = struct.Struct(">iq16si")
_CONTROL_STRUCT = struct.Struct(">qqqii")
CONTROL_STRUCT_BYTES = 36
CONTROL_INFO_BYTES = 4 + 2 * CONTROL_STRUCT_BYTES
FLAG_AVAILABLE = 0x1
FLAG_ASSIGNED = 0x4
GROUP_SEGMENT_BYTES = 1 << 20
"""Size at which a segment of the group log is sealed. Small, because the group log is trimmed by whole segments."""
PARTITIONS_MAX = 1 << 16
"""Limit of partitions, far above any real cluster: a control file that claims more is damaged."""


def control_bytes(partitions: int) -> int:
    return HEADER_BYTES + CONTROL_INFO_BYTES * partitions


def control_struct_offset(partition: int, slot: int) -> int:
    return HEADER_BYTES + CONTROL_INFO_BYTES * partition + 4 + CONTROL_STRUCT_BYTES * slot


@dataclass(frozen=True, kw_only=True)
class ControlHeader:
    created_ms: int
    key: UUID
    partitions: int

    def encode(self) -> bytes:
        packed = _CONTROL_HEADER.pack(VERSION, self.created_ms, self.key.bytes, self.partitions)
        return packed.ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def decode(raw: bytes, where: str) -> ControlHeader:
        if len(raw) < HEADER_BYTES:
            raise ControlDamaged(f"{where} ends inside its header: {len(raw)} of {HEADER_BYTES} bytes are there")
        version, created_ms, key, partitions = _CONTROL_HEADER.unpack_from(raw)
        _check_version(version, where)
        if any(raw[_CONTROL_HEADER.size : HEADER_BYTES]):
            raise ControlDamaged(f"{where} has bytes in the reserved part of its header, which must be zero")
        if not 0 < partitions <= PARTITIONS_MAX:
            raise ControlDamaged(f"{where} claims {partitions} partitions")
        return ControlHeader(created_ms=created_ms, key=UUID(bytes=key), partitions=partitions)


@dataclass(frozen=True, kw_only=True)
class ControlStruct:
    """Session and marks of one partition. Each partition has two structs: the sound one with the higher sequence counts."""

    session: int
    low_mark: int
    local_low_mark: int
    flags: int
    sequence: int

    @property
    def is_available(self) -> bool:
        return bool(self.flags & FLAG_AVAILABLE)

    @property
    def is_assigned(self) -> bool:
        return bool(self.flags & FLAG_ASSIGNED)

    def encode(self) -> bytes:
        return _sealed(_CONTROL_STRUCT.pack(self.session, self.low_mark, self.local_low_mark, self.flags, self.sequence))

    @staticmethod
    def decode(raw: bytes) -> ControlStruct | None:
        """Decode the struct; return None if its checksum fails."""
        body = _unsealed(raw, _CONTROL_STRUCT.size)
        if body is None or len(raw) != CONTROL_STRUCT_BYTES:
            return None
        session, low, local_low, flags, sequence = _CONTROL_STRUCT.unpack(body)
        return ControlStruct(session=session, low_mark=low, local_low_mark=local_low, flags=flags, sequence=sequence)


def initial_structs() -> tuple[ControlStruct, ControlStruct]:
    """Return the two structs of a partition that was never assigned."""
    blank = ControlStruct(session=NO_SESSION, low_mark=NO_MARK, local_low_mark=NO_MARK, flags=FLAG_AVAILABLE, sequence=-1)
    return blank, ControlStruct(**{**blank.__dict__, "sequence": 0})


@dataclass(frozen=True, kw_only=True)
class ControlInfo:
    """The record of one partition: its two structs, None for a struct whose checksum fails."""

    partition: int
    structs: tuple[ControlStruct | None, ControlStruct | None]

    def encode(self) -> bytes:
        first, second = self.structs
        assert first
        assert second
        return self.partition.to_bytes(4, "big") + first.encode() + second.encode()

    @property
    def current_slot(self) -> int:
        first, second = self.structs
        assert first or second
        return int(first is None or (second is not None and second.sequence > first.sequence))

    @property
    def current(self) -> ControlStruct:
        struct_ = self.structs[self.current_slot]
        assert struct_ is not None
        return struct_


def read_control_header(raw: bytes, path: str) -> tuple[ControlHeader | None, list[Finding]]:
    """Read the header of a whole control file, and compare the size of the file with it."""
    findings = Findings(path)
    try:
        header = ControlHeader.decode(raw, "the control file")
    except UnknownVersion as error:
        findings.find(Code.UNKNOWN_VERSION, error.message, 0, 4)
        return None, findings
    except ControlDamaged as error:
        findings.find(Code.CONTROL_FILE, error.message, 0, HEADER_BYTES)
        return None, findings
    expected = control_bytes(header.partitions)
    if len(raw) != expected:
        detail = f"has {len(raw)} bytes; for {header.partitions} partitions it must have {expected}"
        findings.find(Code.CONTROL_FILE, detail, 28, 4)
    return header, findings


def read_control_info(raw: bytes, partition: int, path: str) -> tuple[ControlInfo | None, list[Finding]]:
    """Read the record of one partition in a whole control file; the record is None if neither struct is sound."""
    findings = Findings(path, partition)
    start = control_struct_offset(partition, 0) - 4
    record = raw[start : start + CONTROL_INFO_BYTES]
    if len(record) < CONTROL_INFO_BYTES:
        missing = start + CONTROL_INFO_BYTES - len(raw)
        findings.find(Code.CONTROL_FILE, f"ends before the record of partition {partition}", len(raw), missing)
        return None, findings
    (number,) = struct.unpack_from(">i", record)
    if number != partition:
        findings.find(Code.CONTROL_FILE, f"the record of partition {partition} states partition {number}", start, 4)
    raws = record[4 : 4 + CONTROL_STRUCT_BYTES], record[4 + CONTROL_STRUCT_BYTES :]
    first, second = structs = ControlStruct.decode(raws[0]), ControlStruct.decode(raws[1])
    for slot in (0, 1):
        if structs[slot] is None:
            offset = control_struct_offset(partition, slot)
            changed = changed_byte(raws[slot], offset, "struct")
            if structs[1 - slot] is None:
                detail = f"both structs of partition {partition} fail their checksum{changed}"
                findings.find(Code.CONTROL_FILE, detail, offset, CONTROL_STRUCT_BYTES)
            else:
                detail = f"struct {slot + 1} fails its checksum{changed}"
                findings.find(Code.CONTROL_STRUCT, detail, offset, CONTROL_STRUCT_BYTES)
    if first and second and first.sequence == second.sequence:
        detail = f"both structs of partition {partition} have sequence {first.sequence}, so neither is known to be current"
        findings.find(Code.CONTROL_FILE, detail, start + 4, 2 * CONTROL_STRUCT_BYTES)
    return ControlInfo(partition=partition, structs=structs) if first or second else None, findings


def decode_control_info(raw: bytes, partition: int, path: str) -> ControlInfo:
    """Return the record of one partition; raise an error if more than one of its structs is wrong."""
    info, findings = read_control_info(raw, partition, path)
    for finding in findings:
        if finding.is_damage:
            raise finding.error()
    assert info is not None
    return info


def changed_byte(raw: bytes, start: int, what: str) -> str:
    """Return a phrase about the one byte that explains a failed checksum; "" if no single byte does."""
    error = single_byte_error(raw) if len(raw) >= 4 else None
    if error is None:
        return ""
    position, right = error
    return f"; byte {start + position} is 0x{raw[position]:02x}, a sound {what} has 0x{right:02x}"


# -- identity file -----------------------------------------------------------------------------------------------------

_IDENTITY = struct.Struct(">8siq16si16s64s")
_IDENTITY_MAGIC = b"WALTZID\0"
IDENTITY_BYTES = _IDENTITY.size + 4


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A checksummed copy of the control header, the id of the directory, and the name of its storage.

    It shows every flipped bit of the control header. If the file exists, each assigned partition must have a hard-state
    file; if not, the directory was written by the original Waltz."""

    control: ControlHeader
    directory: UUID
    name: str = ""
    """Name of the storage; "" until it is known."""

    def encode(self) -> bytes:
        c, name = self.control, self.name.encode("ascii")
        fields = c.created_ms, c.key.bytes, c.partitions, self.directory.bytes, name
        return _sealed(_IDENTITY.pack(_IDENTITY_MAGIC, VERSION, *fields))

    @staticmethod
    def decode(raw: bytes, where: str) -> Identity:
        body = _unsealed(raw, _IDENTITY.size)
        if body is None or len(raw) != IDENTITY_BYTES:
            raise ControlDamaged(f"{where} fails its checksum")
        magic, version, created_ms, key, partitions, directory, name = _IDENTITY.unpack(body)
        if magic != _IDENTITY_MAGIC:
            raise ControlDamaged(f"{where} is not an identity file")
        _check_version(version, where)
        if not name.isascii():
            raise ControlDamaged(f"{where} has a name that is not ASCII")
        control = ControlHeader(created_ms=created_ms, key=UUID(bytes=key), partitions=partitions)
        return Identity(control=control, directory=UUID(bytes=directory), name=name.rstrip(b"\0").decode("ascii"))


def read_identity(raw: bytes, path: str) -> tuple[Identity | None, list[Finding]]:
    findings = Findings(path)
    try:
        return Identity.decode(raw, "the identity file"), findings
    except UnknownVersion as error:
        findings.find(Code.UNKNOWN_VERSION, error.message)
    except ControlDamaged as error:
        findings.find(Code.CONTROL_FILE, error.message + changed_byte(raw, 0, "identity file"), 0, max(1, len(raw)))
    return None, findings


def compare_identity(header: ControlHeader, identity: Identity, path: str) -> list[Finding]:
    """Return findings about fields in which the header of the control file at `path` differs from its copy."""
    findings = Findings(path)
    for name, first_byte, size in (("created_ms", 4, 8), ("key", 12, 16), ("partitions", 28, 4)):
        ours, theirs = getattr(header, name), getattr(identity.control, name)
        if ours != theirs:
            detail = f"this and the identity file disagree about {name}: {ours} and {theirs}"
            findings.find(Code.CONTROL_FILE, detail, first_byte, size)
    return findings


# -- hard-state file ------------------------------------------------------------------------------------------------------

_HARD_STATE = struct.Struct(">8si16si16sqqqqiiqQQ16sq")
_FLOOR = struct.Struct(">q")
_TRIMMED = 1
"""Version of a hard state whose trim floor is above 0, which is its last field. A replica that was never trimmed keeps the
older version. Programs that do not know trimming reject this version, because they would take trimmed records for
damage."""
_FORKED = 2
"""Version of a hard state on a later timeline than the first: floor and timelines are its last fields. Programs that do not
know timelines reject it."""
_TIMELINES = struct.Struct(">qi")
"""Floor, and size of the timelines that follow."""
NO_BOOT = UUID(int=0)
_HARD_STATE_MAGIC = b"WALTZPR\0"
HARD_STATE_SLOT_SPACING = 4096
"""Distance of the two slots: each has a page of its own, so a torn write damages only one."""
HARD_STATE_BYTES = 2 * HARD_STATE_SLOT_SPACING
HARD_STATE_SLOT_BYTES = _HARD_STATE.size + 4


@dataclass(frozen=True, kw_only=True)
class HardState:
    """Promised session and marks of a replica, in addition to the control struct of the original Waltz."""

    key: UUID
    partition: int
    incarnation: UUID
    session: int
    """Calls of lower sessions are rejected."""
    committed: int
    """Highest id in this replica that an owner declared committed."""
    durable: int = NO_MARK
    """Highest id up to which records and index entries are on disk."""
    newest: int = 0
    """First id of the newest segment."""
    segments: int = 0
    """Number of segments."""
    is_clean: bool = False
    """Whether this was the last write of a clean stop. The log on disk then ends at `durable`."""
    sequence: int = 0
    inode: int = 0
    """Inode of the file that this was written to. In a copy of the file it differs from the inode of the copy."""
    inode_generation: int = 0
    boot: UUID = NO_BOOT
    """Boot id of the machine when the replica was last opened; `NO_BOOT` if unknown."""
    settled: int = NO_MARK
    """Committed mark when `session` was promised. The session starts no lower."""
    floor: int = 0
    """First id that the replica must hold. Records below it are in the archive, and may be removed at any moment."""
    timelines: bytes = b""
    """Timelines of the log after the first one, encoded by `waltzd.protocol.timelines`."""

    def encode(self) -> bytes:
        version, rest = VERSION, b""
        if self.timelines:
            version, rest = _FORKED, _TIMELINES.pack(self.floor, len(self.timelines)) + self.timelines
        elif self.floor:
            version, rest = _TRIMMED, _FLOOR.pack(self.floor)
        return _sealed(_HARD_STATE.pack(
            _HARD_STATE_MAGIC, version, self.key.bytes, self.partition, self.incarnation.bytes, self.session,
            self.committed, self.durable, self.newest, self.segments, int(self.is_clean), self.sequence, self.inode,
            self.inode_generation, self.boot.bytes, self.settled,
        ) + rest)  # fmt: skip

    @property
    def slot_bytes(self) -> int:
        return len(self.encode())

    @property
    def slot_offset(self) -> int:
        """Offset of the slot: odd and even sequences take turns."""
        return HARD_STATE_SLOT_SPACING * (self.sequence % 2)

    @staticmethod
    def decode(raw: bytes, where: str) -> HardState | None:
        body = _unsealed(raw, _slot_bytes_of(raw) - 4)
        if body is None:
            return None
        fields = _HARD_STATE.unpack(body[: _HARD_STATE.size])
        magic, version, key, partition, incarnation, session, committed, durable, newest, segments, clean = fields[:11]
        sequence, inode, inode_generation, boot, settled = fields[11:]
        if magic != _HARD_STATE_MAGIC:
            return None
        _check_version(version, where, (VERSION, _TRIMMED, _FORKED))
        rest, floor, timelines = body[_HARD_STATE.size :], 0, b""
        if version == _TRIMMED:
            (floor,) = _FLOOR.unpack(rest)
        elif version == _FORKED:
            floor, timelines = _TIMELINES.unpack_from(rest)[0], rest[_TIMELINES.size :]
        return HardState(
            key=UUID(bytes=key), partition=partition, incarnation=UUID(bytes=incarnation), session=session,
            committed=committed, durable=durable, newest=newest, segments=segments, is_clean=bool(clean), sequence=sequence,
            inode=inode, inode_generation=inode_generation, boot=UUID(bytes=boot), settled=settled,
            floor=floor, timelines=timelines,
        )  # fmt: skip


def _slot_bytes_of(page: bytes) -> int:
    """Return the size of a slot by the version and the lengths in it, which its checksum may prove wrong."""
    version = int.from_bytes(page[8:12], "big")
    if version == _TRIMMED:
        return HARD_STATE_SLOT_BYTES + _FLOOR.size
    if version == _FORKED and len(page) >= _HARD_STATE.size + _TIMELINES.size:
        size = _TIMELINES.unpack_from(page, _HARD_STATE.size)[1]
        least = HARD_STATE_SLOT_BYTES + _TIMELINES.size
        return least + size if 0 <= size <= HARD_STATE_SLOT_SPACING - least else least
    return HARD_STATE_SLOT_BYTES


def read_hard_state_file(
    raw: bytes, path: str, key: UUID | None = None, partition: int | None = None
) -> tuple[HardState | None, list[Finding]]:
    """Return the hard state of the sound slot with the higher sequence, and findings. A slot of zeros was never
    written, which
    is no finding. The hard state is None if a slot has an unknown version, or if it belongs to another cluster or
    partition."""
    findings = Findings(path, partition)
    sound: list[HardState] = []
    wrong: list[tuple[str, int, int]] = []
    for start in (0, HARD_STATE_SLOT_SPACING):
        page, slot = raw[start : start + HARD_STATE_SLOT_SPACING], f"slot {1 + start // HARD_STATE_SLOT_SPACING}"
        if not any(page):
            continue
        try:
            hard_state = HardState.decode(page, slot)
        except UnknownVersion as error:
            findings.find(Code.UNKNOWN_VERSION, error.message, start, len(page))
            continue
        rest = page[HARD_STATE_SLOT_BYTES if hard_state is None else hard_state.slot_bytes :].lstrip(b"\0")
        if hard_state is None:
            detail = f"{slot} fails its checksum" + changed_byte(page[: _slot_bytes_of(page)], start, "slot")
            wrong.append((detail, start, len(page)))
            continue
        sound.append(hard_state)
        if hard_state.slot_offset != start:
            wrong.append(
                (f"{slot} holds the hard state number {hard_state.sequence}, which belongs in the other", start, len(page))
            )
        elif rest:
            at = start + len(page) - len(rest)
            wrong.append((f"byte {at}, behind {slot}, is 0x{rest[0]:02x}; it must be zero", start, len(page)))
    if findings:
        sound = []
    elif not sound and not wrong:
        findings.find(
            Code.HARD_STATE_FILE,
            "neither slot holds a hard state" + ("" if partition is None else f" of partition {partition}"),
        )
    for detail, start, size in wrong:
        findings.find(Code.HARD_STATE_SLOT if sound else Code.HARD_STATE_FILE, detail, start, size)
    if len(raw) != HARD_STATE_BYTES:
        findings.find(
            Code.HARD_STATE_FILE, f"has {len(raw)} bytes or more, {HARD_STATE_BYTES} are right", 0, max(1, len(raw))
        )
    newest = max(sound, key=lambda slot: slot.sequence, default=None)
    if newest is not None and key is not None and newest.key != key:
        findings.find(Code.FOREIGN_KEY, f"belongs to the cluster {newest.key}, not to {key}")
        return None, findings
    if newest is not None and partition is not None and newest.partition != partition:
        findings.find(Code.HARD_STATE_FILE, f"belongs to partition {newest.partition}, not to {partition}")
        return None, findings
    return newest, findings

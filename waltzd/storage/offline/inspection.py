"""One segment and its index, looked at from end to end for a person.

The data decides: every record is proven by its checksum, and the index is then compared with the places of the records. A
task says what is known around the segment (which place it has, how far it must reach, whether a storage may be writing); a
report says its content. Both travel between processes. Nothing is written.

The daemon's own examination (`waltzd.storage.replica.examine`) stands on the same readers, `survey`, `judge_tail` and
`read_header`, and asks another question: which ids it refuses. It knows where the segment must end and mends indexes; this
explains damage by bytes, and judges an end of which nothing is known.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from uuid import UUID

import numpy as np

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import NotRegularFile, PathMissing, ReadFailed
from waltzd.format.checksum import I64
from waltzd.format.explain import describe, explain
from waltzd.format.finding import Code, Finding
from waltzd.format.index import offsets_of, read_index
from waltzd.format.layout import (
    HEADER_BYTES,
    INDEX_ENTRY_BYTES,
    NO_MARK,
    FileHeader,
    index_entries,
    index_name,
    index_offset,
    misplaced,
    read_header,
    segment_name,
)
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, Run, bad_payloads, id_and_length
from waltzd.format.scan import Survey, Tail, judge_tail, survey

FINDINGS_MAX = 1000
"""Of one kind in one segment; further ones are counted in a last finding, so that the memory stays bounded."""


@dataclass(frozen=True, kw_only=True)
class SegmentTask:
    directory: str
    first_id: int
    """Of the file name."""
    partition: int | None
    key: UUID | None
    """Of the partition and cluster that it should belong to, where they are known."""
    next_first_id: int | None = None
    """None for the last segment."""
    floor: int = NO_MARK
    is_live: bool = False
    """A storage may be writing at the end of the last segment: bytes there above the floor are in flight."""
    durable_id: int | None = None
    """Ids above it are not looked at."""
    is_deep: bool = False
    was_cut: bool = True
    """The machine may have lost power since the last segment was written."""


@dataclass(kw_only=True)
class SegmentReport:
    directory: str
    first_id: int
    bytes: int = 0
    records: int = 0
    next_id: int | None = None
    """The id after the last sound record; None when the file could not be read as a segment."""
    reaches: int | None = None
    """The same, with the ids that a finding about the end already names."""
    in_flight_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    header: FileHeader | None = None
    """None unless it is the right one."""


def inspect_segment(disk: Disk, task: SegmentTask) -> SegmentReport:
    return _Inspection(disk, task).run()


class _Places:
    """Findings of one kind, with neighbouring ids in one."""

    def __init__(self, code: Code, path: str, partition: int | None) -> None:
        self._code, self._path, self._partition = code, path, partition
        self._found: list[tuple[int, int, int, int, str]] = []
        self._more = 0

    def add(self, first_id: int, last_id: int, first_byte: int, last_byte: int, detail: str) -> None:
        if self._found and self._found[-1][1] == first_id - 1:
            first = self._found[-1]
            self._found[-1] = (first[0], last_id, first[2], last_byte, first[4])
        elif len(self._found) < FINDINGS_MAX:
            self._found.append((first_id, last_id, first_byte, last_byte, detail))
        else:
            self._more += 1

    def findings(self) -> list[Finding]:
        out: list[Finding] = []
        for first_id, last_id, first_byte, last_byte, detail in self._found:
            if last_id > first_id:
                detail += f"; the {last_id - first_id} ids behind it likewise"
            place = {"first_byte": first_byte, "last_byte": last_byte, "first_id": first_id, "last_id": last_id}
            out.append(Finding(self._code, self._path, detail, partition=self._partition, **place))
        if self._more:
            out.append(Finding(self._code, self._path, f"{self._more} more places like these", partition=self._partition))
        return out


class _Inspection:
    def __init__(self, disk: Disk, task: SegmentTask) -> None:
        self._disk = disk
        self._task = task
        self._path = join(task.directory, segment_name(task.first_id))
        self._index_path = join(task.directory, index_name(task.first_id))
        self._report = SegmentReport(directory=task.directory, first_id=task.first_id)
        self._partition = task.partition
        self._index: File | None = None
        self._entries = 0
        self._payloads = _Places(Code.DAMAGED_PAYLOAD, self._path, task.partition)
        self._twin = _Places(Code.DAMAGED_RECORD, self._path, task.partition)
        self._wrong = _Places(Code.WRONG_INDEX_ENTRY, self._index_path, task.partition)
        self._missing = _Places(Code.MISSING_INDEX_ENTRY, self._index_path, task.partition)

    @property
    def _is_last(self) -> bool:
        return self._task.next_first_id is None

    def _find(self, code: Code, detail: str, *, in_index: bool = False, **place: int | None) -> None:
        path = self._index_path if in_index else self._path
        self._report.findings.append(Finding(code, path, detail, partition=self._partition, **place))

    def run(self) -> SegmentReport:
        report = self._report
        try:
            file = self._disk.open(self._path)
        except PathMissing:
            self._find(Code.LONE_INDEX, "there is an index, and no segment that it belongs to", in_index=True)
            return report
        except NotRegularFile as error:
            self._find(Code.NOT_A_FILE, error.message)
            return report
        try:
            self._run_on(file)
        except ReadFailed as error:
            self._find(Code.UNREADABLE, error.message)
        finally:
            file.close()
            if self._index is not None:
                self._index.close()
        for places in (self._payloads, self._twin, self._wrong, self._missing):
            report.findings += places.findings()
        return report

    def _run_on(self, file: File) -> None:
        task, report = self._task, self._report
        end = file.size()
        first_id = self._check_header(file)
        self._open_index()
        if first_id is None:
            return
        found = survey(
            file, first_id=first_id, end=end, id_limit=task.next_first_id, index=self._index, on_run=self._on_run
        )
        report.bytes, report.next_id, report.reaches = end, found.next_id, found.next_id
        self._report_gaps(file, found)
        tail = self._report_tail(file, found)
        self._report_index_end(found, tail)

    # -- headers

    def _check_header(self, file: File) -> int | None:
        """The id to start with; None when the file cannot be read as a segment."""
        task, raw = self._task, file.read(0, HEADER_BYTES)
        header, findings = self._read_header(raw, self._path)
        self._report.findings += findings
        if header is None:
            return None
        if not misplaced(findings):
            self._report.header = header
        if self._partition is None:
            self._partition = header.partition
        if header.first_id != task.first_id:  # the first record decides between name and header
            head = file.read(HEADER_BYTES, HEAD_BYTES)
            if len(head) == HEAD_BYTES and id_and_length(head)[0] == header.first_id:
                return header.first_id
        return task.first_id

    def _read_header(self, raw: bytes, path: str) -> tuple[FileHeader | None, list[Finding]]:
        return read_header(raw, path, self._task.key, self._partition, self._task.first_id)

    def _open_index(self) -> None:
        try:
            index = self._disk.open(self._index_path)
        except PathMissing:
            self._find(Code.MISSING_INDEX, "the index file is missing", in_index=True)
            return
        except NotRegularFile as error:
            self._find(Code.NOT_A_FILE, error.message, in_index=True)
            return
        self._index = index
        raw = index.read(0, HEADER_BYTES)
        for finding in self._read_header(raw, self._index_path)[1]:
            self._report.findings.append(replace(finding, code=Code.DAMAGED_INDEX))
        if len(raw) < HEADER_BYTES:  # there are no entries to say more about
            index.close()
            self._index = None
            return
        self._entries = index_entries(index.size())

    # -- each run of sound records

    def _on_run(self, offset: int, run: Run) -> None:
        limit = self._task.durable_id
        if limit is not None and run.last_id > limit:
            if run.first_id > limit:
                return
            run = run.part(0, limit - run.first_id + 1)
        self._report.records += len(run)
        offsets = offsets_of(offset, run)
        if self._index is not None:
            self._compare_index(self._index, run.first_id, offsets)
        for number in bad_payloads(run).tolist():
            id_ = run.first_id + number
            first, last = offset + int(run.bounds[number]), offset + int(run.bounds[number + 1]) - 1
            self._payloads.add(id_, id_, first, last, "the payload does not have the checksum that the client gave it")
        if self._task.is_deep:
            self._check_one_by_one(offset, run)

    def _compare_index(self, index: File, first_id: int, offsets: I64) -> None:
        found = read_index(index, first_id - self._task.first_id, len(offsets))
        here = offsets[: len(found)]
        for number in np.flatnonzero(found != here).tolist():
            id_ = first_id + number
            at = index_offset(id_ - self._task.first_id)
            detail = f"the entry says {int(found[number])}, the record starts at {int(here[number])}"
            self._wrong.add(id_, id_, at, at + INDEX_ENTRY_BYTES - 1, detail)
        if len(found) < len(offsets):
            first, last = first_id + len(found), first_id + len(offsets) - 1
            if self._is_in_flight:
                last = min(last, self._floor)
            if first <= last:
                start = index_offset(first - self._task.first_id)
                stop = index_offset(last + 1 - self._task.first_id) - 1
                self._missing.add(first, last, start, stop, "the index has no entry for this record")

    def _check_one_by_one(self, offset: int, run: Run) -> None:
        """Record by record, with the checksum of zlib: no arithmetic shared with the fast way."""
        for number in range(len(run)):
            start, stop = int(run.bounds[number]), int(run.bounds[number + 1])
            if zlib.crc32(run.data[start : stop - 4]) != int.from_bytes(run.data[stop - 4 : stop], "big"):
                id_ = run.first_id + number
                detail = f"record {id_} fails its checksum when it is checked by itself"
                self._twin.add(id_, id_, offset + start, offset + stop - 1, detail)

    # -- damage

    @property
    def _is_in_flight(self) -> bool:
        return self._is_last and (self._task.is_live or self._task.durable_id is not None)

    @property
    def _floor(self) -> int:
        durable = self._task.durable_id
        return self._task.floor if durable is None else max(self._task.floor, durable)

    def _report_gaps(self, file: File, found: Survey) -> None:
        limit = self._task.durable_id
        for gap in found.gaps:
            if limit is not None and gap.first_id > limit:
                continue
            if gap.last_id < gap.first_id:
                detail = f"{gap.last_byte - gap.first_byte + 1} bytes that are no record, in front of record {gap.first_id}"
                self._find(
                    Code.DAMAGED_RECORD, detail, first_byte=gap.first_byte, last_byte=gap.last_byte,
                    first_id=gap.first_id, last_id=gap.first_id,
                )  # fmt: skip
                continue
            self._report_damage(file, gap.first_byte, gap.last_byte, gap.first_id, gap.last_id, gap.last_id)

    def _report_damage(
        self, file: File, first_byte: int, last_byte: int, first_id: int, last_id: int, known_last: int | None
    ) -> None:
        records = explain(
            file, first_byte=first_byte, last_byte=last_byte, first_id=first_id, last_id=known_last,
            segment_first_id=self._task.first_id, index=self._index,
        )  # fmt: skip
        self._find(
            Code.DAMAGED_RECORD, describe(records), first_byte=first_byte, last_byte=last_byte,
            first_id=first_id, last_id=last_id,
        )  # fmt: skip

    def _report_tail(self, file: File, found: Survey) -> Tail:
        task, report = self._task, self._report
        assert report.next_id is not None
        verdict = judge_tail(found, is_last=self._is_last, floor=self._floor, was_cut=task.was_cut)
        if verdict is not Tail.CLEAN and self._is_in_flight and found.next_id > self._floor:
            report.in_flight_bytes = found.tail_bytes
            return Tail.TORN
        last_byte = found.end + found.tail_bytes - 1
        if verdict is Tail.DAMAGED and task.next_first_id is not None and found.next_id >= task.next_first_id:
            detail = f"{found.tail_bytes} bytes that are no record, behind record {found.next_id - 1}"
            before = found.next_id - 1
            self._find(
                Code.DAMAGED_RECORD, detail, first_byte=found.end, last_byte=last_byte, first_id=before, last_id=before
            )
        elif verdict is Tail.DAMAGED:
            last_id = self._last_id_of_tail(found)
            report.reaches = last_id + 1
            known_last = None if task.next_first_id is None else last_id
            self._report_damage(file, found.end, last_byte, found.next_id, last_id, known_last)
        elif verdict is Tail.TORN:
            detail = f"{found.tail_bytes} bytes behind the last whole record; nobody was told that they are stored"
            self._find(
                Code.TORN_TAIL, detail, first_byte=found.end, last_byte=last_byte,
                first_id=found.next_id, last_id=found.next_id,
            )  # fmt: skip
        return verdict

    def _last_id_of_tail(self, found: Survey) -> int:
        """The last id that the damage at the end has taken, by the next segment, the floor or the index."""
        if self._task.next_first_id is not None:
            return self._task.next_first_id - 1
        room = found.tail_bytes // OVERHEAD_BYTES
        by_index = self._task.first_id + self._entries - 1
        likely = by_index if found.next_id <= by_index < found.next_id + room else found.next_id
        return max(likely, self._floor)

    def _report_index_end(self, found: Survey, tail: Tail) -> None:
        if self._index is None or tail is Tail.DAMAGED or self._is_in_flight:
            return
        size = self._index.size()
        expected = index_offset(found.next_id - self._task.first_id)
        if size > max(expected, HEADER_BYTES):
            entries = self._entries - (found.next_id - self._task.first_id)
            rest = max(0, size - HEADER_BYTES) % INDEX_ENTRY_BYTES
            detail = f"{entries} entries for ids that the segment does not hold"
            if rest:
                detail = (detail + ", and " if entries > 0 else "") + f"{rest} bytes at the end that are no whole entry"
            ids = {"first_id": found.next_id, "last_id": found.next_id + entries - 1} if entries > 0 else {}
            first_byte = max(expected, size - rest if entries <= 0 else 0)
            self._find(Code.EXTRA_INDEX_ENTRY, detail, in_index=True, first_byte=first_byte, last_byte=size - 1, **ids)

"""Inspects one segment and its index from end to end, and explains all damage.

The data decides: every record is checked by its checksum, and the index is then compared with the offsets of the records. A
task states what is known about the segment: its place, the ids that it must reach, whether a storage may be writing it. A
report states what was found. Both are sent between processes. Nothing is written.

A daemon examines its own segments in `waltzd.storage.replica.examine`, with the same functions `survey`, `judge_tail` and
`read_header`, to decide which ids it refuses. It knows where the segment must end, and repairs indexes. The inspection here
explains damage byte by byte, and judges the end of a segment without that knowledge.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from uuid import UUID

import numpy as np

from waltzd.disk.seam import Disk, File, join
from waltzd.errors.operations import NotRegularFile, PathMissing, ReadFailed, TooManyFiles
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import End, Head
from waltzd.format.checksum import I64
from waltzd.format.explain import describe, explain
from waltzd.format.finding import Code, Finding
from waltzd.format.footer import Footer, FooterBuilder
from waltzd.format.index import places_of, read_index
from waltzd.format.layout import (
    BATCHES,
    HEADER_BYTES,
    INDEX_ENTRY_BYTES,
    NO_MARK,
    VERSION,
    FileHeader,
    index_entries,
    index_name,
    index_offset,
    misplaced,
    read_header,
    segment_name,
)
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, Run, bad_payloads, id_and_length
from waltzd.format.scan import Survey, Tail, judge_tail, survey, version_behind
from waltzd.format.span import BatchSpan, Span

FINDINGS_MAX = 1000
"""Number of findings of one kind in one segment. Further ones are counted in a last finding, to bound the memory."""


@dataclass(frozen=True, kw_only=True)
class SegmentTask:
    directory: str
    first_id: int
    """First id by the file name."""
    partition: int | None
    key: UUID | None
    """Key of the cluster that the segment should belong to. Key and partition are None if unknown."""
    next_first_id: int | None = None
    """First id of the next segment; None for the last segment."""
    floor: int = NO_MARK
    is_live: bool = False
    """Whether a storage may be writing the last segment: bytes at its end above the floor are in flight."""
    durable_id: int | None = None
    """Highest id that is checked; None for all."""
    is_deep: bool = False
    was_cut: bool = True
    """Whether the machine may have lost power since the last segment was written."""
    before: End | None = None
    """End of the segment in front; None if unknown, so that `Links` are compared afterwards."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Statements of a segment of format 1 about the segment before it, and what the next segment has to state about
    it."""

    before: int = 0
    """Checksum of the head before the first batch, as the first batch states it."""
    first_time: int = 0
    end: End | None = None
    """End of the segment; None if it is not sound."""
    footer_before: bytes | None = None
    """Hash of the footer before, as the footer states it; None without a sound footer."""
    footer_hash: bytes | None = None


@dataclass(kw_only=True)
class SegmentReport:
    directory: str
    first_id: int
    bytes: int = 0
    records: int = 0
    next_id: int | None = None
    """Id after the last sound record; None if the file could not be read as a segment."""
    reaches: int | None = None
    """Id after the last one in the file: `next_id`, or the id after the damage at the end."""
    in_flight_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    header: FileHeader | None = None
    """Header of the segment; None unless it is right."""
    links: Links | None = None
    """Links to the segments around it; None in format 0, and if the first batch is not sound."""


def inspect_segment(disk: Disk, task: SegmentTask) -> SegmentReport:
    return _Inspection(disk, task).run()


class _FindingGroup:
    """Findings of one kind. Findings about consecutive ids are merged."""

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
                detail += f"; the {last_id - first_id} ids after it likewise"
            place = {"first_byte": first_byte, "last_byte": last_byte, "first_id": first_id, "last_id": last_id}
            out.append(Finding(self._code, self._path, detail, partition=self._partition, **place))
        if self._more:
            out.append(
                Finding(self._code, self._path, f"{self._more} more findings of this kind", partition=self._partition)
            )
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
        self._payloads = _FindingGroup(Code.DAMAGED_PAYLOAD, self._path, task.partition)
        self._twin = _FindingGroup(Code.DAMAGED_RECORD, self._path, task.partition)
        self._wrong = _FindingGroup(Code.WRONG_INDEX_ENTRY, self._index_path, task.partition)
        self._missing = _FindingGroup(Code.MISSING_INDEX_ENTRY, self._index_path, task.partition)
        self._version = VERSION
        self._first: Head | None = None
        self._footer: FooterBuilder | None = None
        """The footer of the batches that were read; None before the first one."""

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
        except TooManyFiles:
            raise
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
            file, first_id=first_id, end=end, version=self._version, before=task.before, id_limit=task.next_first_id,
            index=self._index, on_span=self._on_span,
        )  # fmt: skip
        report.bytes, report.next_id, report.reaches = end, found.next_id, found.next_id
        self._report_gaps(file, found)
        tail = self._report_tail(file, found)
        self._report_index_end(found, tail)
        if self._version == BATCHES:
            self._report_footer(found, tail)

    # -- headers

    def _check_header(self, file: File) -> int | None:
        """Check the header; return the first id, or None if the file cannot be read as a segment."""
        task, raw = self._task, file.read(0, HEADER_BYTES)
        header, findings = self._read_header(raw, self._path)
        self._report.findings += findings
        if header is None:
            return None
        self._version = version_behind(file, header.version, header.first_id)
        if self._version != header.version:
            detail = f"the header states format {header.version}, and the data has format {self._version}"
            self._find(Code.DAMAGED_HEADER, detail, first_byte=0, last_byte=3)
        elif not misplaced(findings):
            self._report.header = header
        if self._partition is None:
            self._partition = header.partition
        if _first_id(file, self._version) == header.first_id:  # the first record decides if name and header differ
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
        header, findings = self._read_header(raw, self._index_path)
        for finding in findings:
            self._report.findings.append(replace(finding, code=Code.DAMAGED_INDEX))
        if header is not None and self._report.header is not None and header.version != self._version:
            detail = f"the header states format {header.version}, the header of the segment {self._version}"
            self._find(Code.DAMAGED_INDEX, detail, in_index=True, first_byte=0, last_byte=3)
        if len(raw) < HEADER_BYTES:  # it has no entries
            index.close()
            self._index = None
            return
        self._entries = index_entries(index.size())

    # -- sound records

    def _on_span(self, span: Span) -> None:
        if isinstance(span, BatchSpan):
            self._note_batches(span)
        run, entries, limit = span.run, span.entries, self._task.durable_id
        if limit is not None and run.last_id > limit:
            if run.first_id > limit:
                return
            run = run.part(0, limit - run.first_id + 1)
            entries = entries[: len(run)]
        self._report.records += len(run)
        if self._index is not None:
            self._compare_index(self._index, run.first_id, entries)
        places, sizes = self._places(entries), np.diff(run.bounds)
        for number in bad_payloads(run).tolist():
            id_, first = run.first_id + number, int(places[number])
            what = "the payload does not have the checksum that the client gave it"
            self._payloads.add(id_, id_, first, first + int(sizes[number]) - 1, what)
        if self._task.is_deep:
            self._check_one_by_one(run, places)

    def _note_batches(self, span: BatchSpan) -> None:
        if self._footer is None:
            self._first, header = span.head_of(0), self._report.header
            raw = bytes(HEADER_BYTES) if header is None else self._right_header(header, self._first).encode()
            self._footer = FooterBuilder(raw, is_hashing=self._task.is_deep)
        self._footer.add_span(span)

    def _right_header(self, header: FileHeader, first: Head) -> FileHeader:
        """Return the header with the right creation time, which in format 1 follows from the first batch."""
        right = replace(header, created_ms=first.time // 1000)
        if first.first_id == header.first_id and header != right:
            detail = f"the creation time is {header.created_ms}, that of the first batch is {right.created_ms}"
            self._find(Code.DAMAGED_HEADER, detail, first_byte=4, last_byte=11)
        return right

    def _places(self, entries: I64) -> I64:
        return places_of(entries)[0] if self._version == BATCHES else entries

    def _compare_index(self, index: File, first_id: int, entries: I64) -> None:
        found = read_index(index, first_id - self._task.first_id, len(entries))
        here = entries[: len(found)]
        for number in np.flatnonzero(found != here).tolist():
            id_ = first_id + number
            at = index_offset(id_ - self._task.first_id)
            detail = f"the entry points to {self._said(found[number])}, the record starts at {self._said(here[number])}"
            self._wrong.add(id_, id_, at, at + INDEX_ENTRY_BYTES - 1, detail)
        if len(found) < len(entries):
            first, last = first_id + len(found), first_id + len(entries) - 1
            if self._is_in_flight:
                last = min(last, self._floor)
            if first <= last:
                start = index_offset(first - self._task.first_id)
                stop = index_offset(last + 1 - self._task.first_id) - 1
                self._missing.add(first, last, start, stop, "the index has no entry for this record")

    def _said(self, entry: np.int64) -> str:
        if self._version != BATCHES:
            return str(int(entry))
        start, head = places_of(np.array([entry], np.int64))
        return f"{int(start[0])} in the batch at {int(head[0])}"

    def _check_one_by_one(self, run: Run, places: I64) -> None:
        """Check record by record with the checksum of zlib, which shares no code with the fast checks."""
        for number in range(len(run)):
            start, stop = int(run.bounds[number]), int(run.bounds[number + 1])
            if zlib.crc32(run.data[start : stop - 4]) != int.from_bytes(run.data[stop - 4 : stop], "big"):
                id_ = run.first_id + number
                detail = f"record {id_} fails its checksum when it is checked by itself"
                first = int(places[number])
                self._twin.add(id_, id_, first, first + stop - start - 1, detail)

    # -- damage

    @property
    def _unit(self) -> str:
        return "batch" if self._version == BATCHES else "record"

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
                size = gap.last_byte - gap.first_byte + 1
                detail = f"{size} bytes that are no {self._unit}, in front of record {gap.first_id}"
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
            segment_first_id=self._task.first_id, index=self._index, version=self._version,
        )  # fmt: skip
        is_chain = bool(records) and all(record.is_whole for record in records)
        code = Code.BROKEN_CHAIN if is_chain else Code.DAMAGED_RECORD
        self._find(
            code, describe(records), first_byte=first_byte, last_byte=last_byte,
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
            detail = f"{found.tail_bytes} bytes that are no {self._unit}, behind record {found.next_id - 1}"
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
            detail = f"{found.tail_bytes} bytes behind the last whole {self._unit}; they were never acknowledged"
            self._find(
                Code.TORN_TAIL, detail, first_byte=found.end, last_byte=last_byte,
                first_id=found.next_id, last_id=found.next_id,
            )  # fmt: skip
        return verdict

    def _last_id_of_tail(self, found: Survey) -> int:
        """Return the last id that a damaged tail held: by the next segment, the floor, or the index."""
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

    # -- footer and links

    def _report_footer(self, found: Survey, tail: Tail) -> None:
        footer, is_whole = found.footer, not found.gaps and not found.tail_bytes
        if tail is Tail.UNFINISHED and not (self._is_in_flight and found.next_id > self._floor):
            if found.footer_bytes:
                last_byte = found.end + found.footer_bytes - 1
                detail = f"the {found.footer_bytes} bytes behind the last batch are no sound footer"
                self._find(Code.DAMAGED_FOOTER, detail, first_byte=found.end, last_byte=last_byte)
            else:
                detail = "no footer follows the last batch"
                self._find(Code.FOOTER_MISSING, detail, first_byte=found.end, last_byte=found.end)
        if footer is not None and is_whole and (wrong := self._differences(footer)):
            detail = f"the footer is not that of this segment: {', '.join(wrong)}"
            last_byte = found.end + found.footer_bytes - 1
            self._find(Code.WRONG_FOOTER, detail, first_byte=found.end, last_byte=last_byte)
            footer = None
        if self._first is not None and self._first.first_id == self._task.first_id:
            self._report.links = Links(
                before=self._first.before,
                first_time=self._first.time,
                end=found.end_of_log if not found.tail_bytes else None,
                footer_before=None if footer is None else footer.before,
                footer_hash=None if footer is None else footer.hash,
            )

    def _differences(self, footer: Footer) -> list[str]:
        """Return the names of the fields in which the footer differs from that of the batches."""
        assert self._footer is not None
        right = self._footer.footer(footer.before)
        same = {
            "first id": footer.first_id == right.first_id,
            "last id": footer.last_id == right.last_id,
            "first time": footer.first_time == right.first_time,
            "last time": footer.last_time == right.last_time,
            "places of batches": footer.batches.tolist() == right.batches.tolist(),
            "hash": not self._task.is_deep or footer.digest == right.digest,
        }
        return [word for word, is_same in same.items() if not is_same]


def _first_id(file: File, version: int) -> int | None:
    """Return the first id by the first record or batch; None if it cannot be read."""
    if version == BATCHES:
        head = Head.decode(file.read(HEADER_BYTES, BATCH_HEAD_BYTES))
        return None if head is None else head.first_id
    raw = file.read(HEADER_BYTES, HEAD_BYTES)
    return id_and_length(raw)[0] if len(raw) == HEAD_BYTES else None

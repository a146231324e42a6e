"""Damage in one replica: a wrong index is rebuilt from the data; damaged data is reported and never changed.

`examine_segment` reads a whole segment and returns its findings. `DamageReport` keeps the findings of a replica: the ids in
them are refused, all other ids are served, and the replica is healed from the other replicas. The report has two kinds:
damage in files, which includes a missing segment, and `short`, a log that ends before an id that this replica once had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from waltzd.disk.seam import File, join
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.errors.operations import (
    DiskFull,
    HeaderDamaged,
    PartitionDamaged,
    PathMissing,
    ReadFailed,
    TooManyFiles,
    UnknownVersion,
)
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import End, Head
from waltzd.format.finding import Code, Finding
from waltzd.format.footer import FooterBuilder
from waltzd.format.index import IndexChecker, IndexWriter
from waltzd.format.layout import BATCHES, HEADER_BYTES, FileHeader, index_entries, index_name, read_header
from waltzd.format.scan import Gap, Survey, survey
from waltzd.format.span import BatchSpan, Span
from waltzd.storage.replica.replica_context import ReplicaContext
from waltzd.storage.replica.segment import UNUSABLE, BatchSegment, Segment, header_of


class DamageReport:
    """The findings of a replica, in order of their ids; findings without ids come first. It is truthy if there are any."""

    def __init__(self, partition: int, in_files: Iterable[Finding], short: Finding | None) -> None:
        self._partition = partition
        self._in_files = tuple(in_files)
        self.short = short

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = (*self._in_files, self.short) if self.short else self._in_files
        return tuple(sorted(found, key=lambda f: -1 if f.first_id is None else f.first_id))

    def __bool__(self) -> bool:
        return bool(self._in_files) or self.short is not None

    @property
    def is_only_short(self) -> bool:
        """True if all records here are sound and only the end of the log is missing, which appends restore."""
        return self.short is not None and not self._in_files

    def error(self, findings: Sequence[Finding] = ()) -> PartitionDamaged:
        chosen = findings or self.findings
        if not chosen:
            return PartitionDamaged(f"partition {self._partition} is damaged: its last segment cannot be read")
        first = chosen[0]
        return PartitionDamaged(
            f"partition {self._partition} is damaged: {first.sentence()}", first_id=first.first_id, last_id=first.last_id
        )

    def sound_part(self, first_id: int, last_id: int) -> int:
        """Return the last id that can be read from `first_id` on; raise `PartitionDamaged` if `first_id` is damaged."""
        for finding in self.findings:
            if finding.first_id is None or finding.last_id is None or finding.last_id < first_id:
                continue
            if finding.first_id <= first_id:
                raise self.error([finding])
            last_id = min(last_id, finding.first_id - 1)
        return last_id

    def last_sound(self, first_id: int, last_id: int) -> int:
        """Return the highest sound id of the range, or `first_id` - 1 if there is none."""
        while last_id >= first_id:
            starts = [
                finding.first_id
                for finding in self._in_files
                if finding.first_id is not None
                and finding.last_id is not None
                and finding.first_id <= last_id <= finding.last_id
            ]
            if not starts:
                return last_id
            last_id = min(starts) - 1
        return first_id - 1

    def holds(self, path: str) -> bool:
        return any(finding.path == path for finding in self._in_files)

    def check_file(self, path: str) -> None:
        here = [finding for finding in self._in_files if finding.path == path]
        if here:
            raise self.error(here)

    def check_up_to(self, mark: int) -> None:
        below = [finding for finding in self.findings if finding.first_id is not None and finding.first_id <= mark]
        if below:
            raise self.error(below)

    def replace(self, path: str, found: Sequence[Finding]) -> None:
        """Replace all findings of one file."""
        self._in_files = (*(finding for finding in self._in_files if finding.path != path), *found)

    def heal(self) -> None:
        self._in_files, self.short = (), None


_HEADER_CODES: dict[type[WaltzError], Code] = {
    HeaderDamaged: Code.DAMAGED_HEADER,
    UnknownVersion: Code.UNKNOWN_VERSION,
    ForeignCluster: Code.FOREIGN_KEY,
    PathMissing: Code.SEGMENT_GAP,
}


def header_finding(context: ReplicaContext, error: WaltzError, first_id: int, last_id: int) -> Finding:
    """Return the finding about a segment whose file is unusable, with all its ids."""
    return context.finding(
        _HEADER_CODES[type(error)], context.path(first_id), error.message,
        first_byte=0, last_byte=HEADER_BYTES - 1, first_id=first_id, last_id=last_id,
    )  # fmt: skip


def unreadable_finding(context: ReplicaContext, error: ReadFailed, first_id: int, last_id: int) -> Finding:
    """Return the finding about a segment with an unreadable sector, with all its ids."""
    last_id = max(first_id, last_id)
    return context.finding(Code.UNREADABLE, context.path(first_id), error.message, first_id=first_id, last_id=last_id)


def gap_finding(context: ReplicaContext, path: str, gap: Gap, next_id: int) -> Finding:
    """Return the finding about a gap in a segment that ends in front of `next_id`. Bytes between two consecutive records
    were inserted later, possibly with the records after them, so the finding covers these records too."""
    ids_missing = gap.last_id >= gap.first_id
    return context.finding(
        Code.DAMAGED_RECORD,
        path,
        "fails its checks, and sound records stand behind it"
        if ids_missing
        else "bytes that are no record stand in front of it",
        first_byte=gap.first_byte,
        last_byte=gap.last_byte,
        first_id=gap.first_id,
        last_id=gap.last_id if ids_missing else max(gap.first_id, next_id - 1),
    )


def tail_finding(context: ReplicaContext, path: str, found: Survey, last_id: int) -> Finding:
    detail = "the segment has no sound record from here on" if found.tail_bytes else "the segment ends too early"
    return context.finding(
        Code.DAMAGED_RECORD, path, detail, first_byte=found.end,
        last_byte=max(found.end, found.end + found.tail_bytes - 1), first_id=found.next_id, last_id=last_id,
    )  # fmt: skip


def missing_finding(context: ReplicaContext, first_id: int, last_id: int) -> Finding:
    """Return the finding about ids that no segment holds. Its path is that of the segment that should start there."""
    detail = "the segment that should hold these ids is missing"
    return context.finding(Code.SEGMENT_GAP, context.path(first_id), detail, first_id=first_id, last_id=last_id)


def short_finding(context: ReplicaContext, next_id: int, last_id: int) -> Finding:
    """Return the finding about a log that ends in front of `next_id`, and that once reached `last_id`."""
    detail = f"the log ends at id {next_id - 1}, but this replica had ids up to {last_id} on disk"
    return context.finding(Code.SHORT_LOG, context.directory, detail, first_id=next_id, last_id=last_id)


def _rest_finding(context: ReplicaContext, path: str, found: Survey) -> Finding:
    """Return the finding about a sealed segment whose records are sound, and are followed by other bytes."""
    return context.finding(
        Code.DAMAGED_RECORD, path, "bytes that are no record stand behind the last one",
        first_byte=found.end, last_byte=found.end + found.tail_bytes - 1,
    )  # fmt: skip


@dataclass(frozen=True)
class PrecedingEnd:
    """The known facts about the end of the segment before a segment of format 1."""

    end: End | None = None
    """End of its last batch; None if unknown."""
    footer: bytes | None = None
    """Hash of its footer; None if it cannot be read."""


def examine_segment(
    context: ReplicaContext,
    first_id: int,
    *,
    next_id: int,
    is_last: bool = False,
    active: Segment | None = None,
    preceding: PrecedingEnd | None = None,
) -> list[Finding]:
    """Read a whole segment that should end in front of `next_id`, and return its damage. Repair its index, the reserved
    part of its header, and its footer if all batches are there.

    If sound records end early and another segment follows, this segment is sound, and one after it is missing. A segment
    with an unreadable sector is damaged as a whole: a copy of it gets other sectors."""
    try:
        return _examine(context, first_id, next_id, is_last, active, preceding or PrecedingEnd())
    except ReadFailed as error:
        if is_last and isinstance(error, TooManyFiles):
            raise
        return [unreadable_finding(context, error, first_id, next_id - 1)]


def _examine(
    context: ReplicaContext, first_id: int, next_id: int, is_last: bool, active: Segment | None, preceding: PrecedingEnd
) -> list[Finding]:
    path, expected = context.path(first_id), context.header(first_id)
    try:
        data = active.data if active and context.disk.exists(path) else context.disk.open(path)
        header = header_of(data, expected)
    except UNUSABLE as error:
        return [header_finding(context, error, first_id, next_id - 1)]
    first = Head.decode(data.read(HEADER_BYTES, BATCH_HEAD_BYTES)) if header.version == BATCHES else None
    if first is not None:
        header = replace(header, created_ms=first.time // 1000)
    if data.read(0, HEADER_BYTES) != header.encode():
        _write_header(context, active.data if active else context.disk.open(path, write=True), header)
    builder = FooterBuilder(header.encode())

    if active:
        found = _survey_active(context, active, header, preceding.end, builder)
    else:
        found = _survey_sealed(context, data, header, next_id, preceding.end, builder)
    if found.is_sealed and found.next_id == next_id and not found.tail_bytes and not found.gaps:
        return _examine_footer(context, active, path, found, builder, preceding.footer)
    findings = [gap_finding(context, path, gap, next_id) for gap in found.gaps]
    if found.next_id < next_id and not is_last and not found.tail_bytes and found.next_id > first_id:
        findings.append(missing_finding(context, found.next_id, next_id - 1))
    elif found.next_id < next_id:
        findings.append(tail_finding(context, path, found, next_id - 1))
    elif found.tail_bytes:
        findings.append(_rest_finding(context, path, found))
    return findings


def _examine_footer(
    context: ReplicaContext, active: Segment | None, path: str, found: Survey, builder: FooterBuilder, before: bytes | None
) -> list[Finding]:
    """Examine the footer of a segment whose batches are all sound. A missing or damaged footer is rebuilt from them. A
    sound footer with other content shows that the history was changed, and is damage."""
    if found.footer is not None:
        right = builder.footer(found.footer.before if before is None else before)
        if right.encode() == found.footer.encode():
            return []
        last_byte = found.end + found.footer_bytes - 1
        return [
            context.finding(
                Code.WRONG_FOOTER, path, "its footer is sound, and not that of these batches behind the segment in front",
                first_byte=found.end, last_byte=last_byte,
            )
        ]  # fmt: skip
    if before is None:
        return []
    file = active.data if active else context.disk.open(path, write=True)
    try:
        file.truncate(found.end)
        file.write(found.end, builder.footer(before).encode())
        file.flush()
    except DiskFull:
        file.truncate(found.end)
        raise
    if isinstance(active, BatchSegment):
        active.has_footer = True
    context.settings.say(f"the footer of {path} was made again from the data")
    return []


def _survey_active(
    context: ReplicaContext, active: Segment, header: FileHeader, before: End | None, builder: FooterBuilder
) -> Survey:
    """Survey the last segment. Its index is open for writing, and is overwritten."""
    data, index = active.data, active.index
    if not _has_right_header(index, header):
        _write_header(context, active.index, header)

    def on_span(span: Span) -> None:
        if isinstance(span, BatchSpan):
            builder.add_span(span)
        active.write_index(span.first_id, span.entries)

    return survey(
        data, first_id=header.first_id, end=data.size(), version=header.version, before=before, index=index,
        on_span=on_span,
    )  # fmt: skip


def _survey_sealed(
    context: ReplicaContext, data: File, header: FileHeader, next_id: int, before: End | None, builder: FooterBuilder
) -> Survey:
    """Survey a sealed segment. A wrong index is replaced."""
    disk, first_id = context.disk, header.first_id

    def look(index: File | None, entries: IndexChecker | IndexWriter, builder: FooterBuilder | None = None) -> Survey:
        def on_span(span: Span) -> None:
            entries.add(span.first_id, span.entries)
            if builder is not None and isinstance(span, BatchSpan):
                builder.add_span(span)

        return survey(
            data, first_id=first_id, end=data.size(), version=header.version, before=before, id_limit=next_id, index=index,
            on_span=on_span,
        )  # fmt: skip

    path = join(context.directory, index_name(first_id))
    index = disk.open(path) if disk.exists(path) else None
    writer: IndexWriter | None = None
    try:
        if index is not None and not _has_right_header(index, header):
            index.close()
            index = None  # its entries are not used as hints either
        if index is not None:
            checker = IndexChecker(index, first_id)
            found = look(index, checker, builder)
            if checker.is_right and index_entries(index.size()) == found.next_id - first_id:
                return found
        is_first = index is None
        writer = IndexWriter(disk, context.directory, header)
        found = look(index, writer, builder if is_first else None)
        # It ends where the data ends, even if more was expected: its size then shows the next start that ids are missing.
        writer.finish(found.next_id)
    except (DiskFull, ReadFailed):
        if writer is not None:
            writer.abandon()
        raise
    finally:
        if index is not None:
            index.close()
    context.settings.say(f"{path} was made again from the data")
    return found


def _has_right_header(index: File, header: FileHeader) -> bool:
    """Return whether the header of an index is right in all bytes except its date."""
    raw = index.read(0, HEADER_BYTES)
    found, findings = read_header(raw, index.path, header.key, header.partition, header.first_id)
    return not findings and found is not None and found.version == header.version


def _write_header(context: ReplicaContext, file: File, header: FileHeader) -> None:
    """Write the right header: its fields are known, and its reserved part is zero in every file."""
    file.write(0, header.encode())
    file.flush()
    context.settings.say(f"the header of {file.path} was made right again")

"""What is wrong with one replica: which ids may not be served because their bytes are damaged, and how that is said.

Two kinds. `findings` of files: bytes that are not what was written, or a segment that is missing between others. And the
end: `short` says that the log is shorter than this replica once had it on disk.

What a storage does when bytes are not what they should be: find out whether the data or only the index is wrong.

A wrong index is made again from the data, at once. Damaged data is never touched: it is described, so that the ids in it
are refused and the replica can be rebuilt from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import DiskFull, ForeignCluster, HeaderDamaged, PartitionDamaged, PathMissing, UnknownVersion, WaltzError
from waltzd.format.finding import Code, Finding
from waltzd.format.index import IndexChecker, IndexWriter, offsets_of
from waltzd.format.layout import (
    HEADER_BYTES,
    FileHeader,
    check_header,
    index_entries,
    index_name,
    read_header,
    segment_name,
)
from waltzd.format.scan import Gap, Survey, survey
from waltzd.storage.replica.segment import UNUSABLE, Segment


class Quarantine:
    """Findings in the order of their ids; those without ids (bytes too many) first. Truthy when there are any."""

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
        """What is here is sound, and the end is missing: whatever is appended brings it nearer."""
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
        """The last id of the range that can be read from `first_id` on; refused when that one is damaged itself."""
        for finding in self.findings:
            if finding.first_id is None or finding.last_id is None or finding.last_id < first_id:
                continue
            if finding.first_id <= first_id:
                raise self.error([finding])
            last_id = min(last_id, finding.first_id - 1)
        return last_id

    def last_sound(self, first_id: int, last_id: int) -> int:
        """The highest id of the range that can be served, or the one in front of the range."""
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
        """Whether something is wrong with this file."""
        return any(finding.path == path for finding in self._in_files)

    def check_file(self, path: str) -> None:
        here = [finding for finding in self._in_files if finding.path == path]
        if here:
            raise self.error(here)

    def check_up_to(self, mark: int) -> None:
        """Refused when a record at or below the mark is damaged."""
        below = [finding for finding in self.findings if finding.first_id is not None and finding.first_id <= mark]
        if below:
            raise self.error(below)

    def replace(self, path: str, found: Sequence[Finding]) -> None:
        """What was found in a file now takes the place of what was known of it."""
        self._in_files = (*(finding for finding in self._in_files if finding.path != path), *found)

    def heal(self) -> None:
        self._in_files, self.short = (), None


_HEADER_CODES: dict[type[WaltzError], Code] = {
    HeaderDamaged: Code.DAMAGED_HEADER,
    UnknownVersion: Code.UNKNOWN_VERSION,
    ForeignCluster: Code.FOREIGN_KEY,
    PathMissing: Code.SEGMENT_GAP,
}


def header_finding(error: WaltzError, path: str, *, partition: int, first_id: int, last_id: int) -> Finding:
    """A segment that cannot be used at all, as a finding for all its ids."""
    return Finding(
        code=_HEADER_CODES[type(error)],
        path=path,
        partition=partition,
        detail=error.message,
        first_byte=0,
        last_byte=HEADER_BYTES - 1,
        first_id=first_id,
        last_id=last_id,
    )


def gap_finding(gap: Gap, path: str, partition: int, next_id: int) -> Finding:
    """`next_id` is where the segment ends. Bytes too many between two ids that follow each other are no damage of a
    record: something else was put there, and the records behind it may belong to it. None of them is believed."""
    ids_missing = gap.last_id >= gap.first_id
    return Finding(
        code=Code.DAMAGED_RECORD,
        path=path,
        partition=partition,
        first_byte=gap.first_byte,
        last_byte=gap.last_byte,
        first_id=gap.first_id,
        last_id=gap.last_id if ids_missing else max(gap.first_id, next_id - 1),
        detail="fails its checks, and sound records stand behind it"
        if ids_missing
        else "bytes that are no record stand in front of it",
    )


def tail_finding(found: Survey, path: str, partition: int, last_id: int) -> Finding:
    return Finding(
        code=Code.DAMAGED_RECORD,
        path=path,
        partition=partition,
        first_byte=found.end,
        last_byte=max(found.end, found.end + found.tail_bytes - 1),
        first_id=found.next_id,
        last_id=last_id,
        detail="the segment has no sound record from here on" if found.tail_bytes else "the segment ends too early",
    )


def missing_finding(directory: str, partition: int, first_id: int, last_id: int) -> Finding:
    """No segment has these ids. The path is that of the one that should start there."""
    return Finding(
        code=Code.SEGMENT_GAP,
        path=join(directory, segment_name(first_id)),
        partition=partition,
        first_id=first_id,
        last_id=last_id,
        detail="the segment that should hold these ids is missing",
    )


def short_finding(directory: str, partition: int, next_id: int, last_id: int) -> Finding:
    """The log ends in front of `next_id`, and once went up to `last_id` at least."""
    return Finding(
        code=Code.SHORT_LOG,
        path=directory,
        partition=partition,
        first_id=next_id,
        last_id=last_id,
        detail=f"the log ends at id {next_id - 1}, but this replica had ids up to {last_id} on disk",
    )


def _rest_finding(found: Survey, path: str, partition: int) -> Finding:
    """All ids of a sealed segment are sound; only bytes that do not belong there stand behind them."""
    return Finding(
        code=Code.DAMAGED_RECORD,
        path=path,
        partition=partition,
        first_byte=found.end,
        last_byte=found.end + found.tail_bytes - 1,
        detail="bytes that are no record stand behind the last one",
    )


def examine_segment(
    disk: Disk,
    directory: str,
    *,
    expected: FileHeader,
    next_id: int,
    is_last: bool,
    active: Segment | None,
    say: Callable[[str], None],
) -> list[Finding]:
    """Read all of a segment that should end in front of `next_id`. Its index is right afterwards, and so is the part of its
    header that means nothing; damage is returned.

    Where sound records end early and another segment follows, nothing is wrong with this one: one behind it is missing."""
    path = join(directory, segment_name(expected.first_id))
    number = expected.partition
    try:
        data = active.data if active and disk.exists(path) else disk.open(path)
        header = check_header(data.read(0, HEADER_BYTES), path, expected)
    except UNUSABLE as error:
        return [header_finding(error, path, partition=number, first_id=expected.first_id, last_id=next_id - 1)]
    if data.read(0, HEADER_BYTES) != header.encode():
        _write_header(active.data if active else disk.open(path, write=True), header, say)
    if active:
        if not _has_right_header(active.index, header):
            _write_header(active.index, header, say)
        found = survey(
            data,
            first_id=expected.first_id,
            end=data.size(),
            index=active.index,
            on_run=lambda offset, run: active.write_index(run.first_id, offsets_of(offset, run)),
        )
    else:
        found = _with_right_index(disk, directory, header, next_id, say)
    findings = [gap_finding(gap, path, number, next_id) for gap in found.gaps]
    if found.next_id < next_id and not is_last and not found.tail_bytes and found.next_id > expected.first_id:
        findings.append(missing_finding(directory, number, found.next_id, next_id - 1))
    elif found.next_id < next_id:
        findings.append(tail_finding(found, path, number, next_id - 1))
    elif found.tail_bytes:
        findings.append(_rest_finding(found, path, number))
    return findings


def _with_right_index(disk: Disk, directory: str, header: FileHeader, next_id: int, say: Callable[[str], None]) -> Survey:
    data = disk.open(join(directory, segment_name(header.first_id)))
    index = _open_index(disk, directory, header)
    writer: IndexWriter | None = None
    try:
        if index is not None:
            checker = IndexChecker(index, header.first_id)
            found = survey(
                data, first_id=header.first_id, end=data.size(), id_limit=next_id, index=index, on_run=checker.add
            )
            if checker.is_right and index_entries(index.size()) == found.next_id - header.first_id:
                return found
        writer = IndexWriter(disk, directory, header)
        found = survey(data, first_id=header.first_id, end=data.size(), id_limit=next_id, index=index, on_run=writer.add)
        # It ends where the data ends, also when more was expected: the next start sees by its size that ids are missing.
        writer.finish(found.next_id)
    except DiskFull:
        if writer is not None:
            writer.abandon()
        raise
    finally:
        if index is not None:
            index.close()
    say(f"{join(directory, index_name(header.first_id))} was made again from the data")
    return found


def _open_index(disk: Disk, directory: str, header: FileHeader) -> File | None:
    """The present index where its header is right. Another header says nothing that the data does not say."""
    path = join(directory, index_name(header.first_id))
    if not disk.exists(path):
        return None
    index = disk.open(path)
    if not _has_right_header(index, header):
        index.close()
        return None
    return index


def _has_right_header(index: File, header: FileHeader) -> bool:
    """In every byte, apart from its date, which is its own."""
    raw, place = index.read(0, HEADER_BYTES), (header.key, header.partition, header.first_id)
    return not read_header(raw, index.path, *place)[1]


def _write_header(file: File, header: FileHeader, say: Callable[[str], None]) -> None:
    """All that means anything is known; what stands behind it is zero in every file that anybody has ever written."""
    file.write(0, header.encode())
    file.flush()
    say(f"the header of {file.path} was made right again")

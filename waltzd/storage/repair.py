"""What a storage does when bytes are not what they should be: find out whether the data or only the index is wrong.

A wrong index is made again from the data, at once. Damaged data is never touched: it is described, so that the ids in it
are refused and the replica can be rebuilt from the others.
"""

from __future__ import annotations

from collections.abc import Callable

from waltzd.disk import Disk, File, join
from waltzd.errors import DiskFull, ForeignCluster, HeaderDamaged, PathMissing, UnknownVersion, WaltzError
from waltzd.finding import Code, Finding
from waltzd.index import IndexChecker, IndexWriter, offsets_of
from waltzd.layout import HEADER_BYTES, FileHeader, index_entries, index_name, segment_name
from waltzd.scan import Gap, Survey, survey
from waltzd.storage.segment import Segment, check_header

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
        header = FileHeader.decode(data.read(0, HEADER_BYTES), path)
        check_header(header, expected, path)
    except (HeaderDamaged, UnknownVersion, ForeignCluster, PathMissing) as error:
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
    raw = index.read(0, HEADER_BYTES)
    try:
        found = FileHeader.decode(raw, index.path)
        check_header(found, header, index.path)
    except (HeaderDamaged, UnknownVersion, ForeignCluster):
        return False
    return raw == found.encode()


def _write_header(file: File, header: FileHeader, say: Callable[[str], None]) -> None:
    """All that means anything is known; what stands behind it is zero in every file that anybody has ever written."""
    file.write(0, header.encode())
    file.flush()
    say(f"the header of {file.path} was made right again")

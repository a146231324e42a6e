"""Files that leave a log and are kept: directories of partitions that are renamed, and segments that are copied.

What was acknowledged once is never deleted by a daemon because the log goes on without it. It gets a directory of its own
beside the partition's, which status and `waltzctl storage` list until an operator deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from waltzd.disk.seam import Disk, File, join
from waltzd.errors.operations import ReadFailed
from waltzd.format.layout import aside_build_name, aside_name, aside_partition, segment_name
from waltzd.storage.replica.replica_context import ReplicaContext

COPIED_AT_ONCE = 1 << 20
"""Bytes."""
PAGE_BYTES = 4096
"""Bytes that are left out of a copy where a sector cannot be read."""


def set_aside(disk: Disk, home: str, number: int) -> str | None:
    """Give the directory of a partition a name that says so, durably; None where there is none."""
    path = join(home, str(number))
    if not disk.exists(path):
        return None
    aside = join(home, aside_name(number, set(disk.names(home))))
    disk.rename(path, aside)
    disk.flush_directory(home)
    return aside


def set_segments_aside(context: ReplicaContext, first_ids: Iterable[int], why: str) -> str:
    """Copy the segments with these first ids into a directory of their own, durably, and return its path. They stay where
    they are, too: a crash at any point leaves the log whole. A copy that an earlier attempt has completed, to its last
    byte, is not made again; one that it has not completed is replaced."""
    disk = context.disk
    home = context.directory.rpartition("/")[0]
    names = [segment_name(first_id) for first_id in first_ids if disk.exists(context.path(first_id))]
    number, taken = context.number, set(disk.names(home))
    for name in sorted(name for name in taken if aside_partition(name) == number):
        aside = join(home, name)
        if names and all(_holds(disk, join(context.directory, one), join(aside, one)) for one in names):
            disk.flush_directory(home)
            return aside
    build = join(home, aside_build_name(number))
    if disk.exists(build):
        remove_with_files(disk, build)
    disk.make_directory(build)
    for one in names:
        _copy(disk, join(context.directory, one), join(build, one))
    disk.flush_directory(build)
    aside = join(home, aside_name(number, taken))
    disk.rename(build, aside)
    disk.flush_directory(home)
    context.say(f"{why}: its segments were copied to {aside}, and leave the log")
    return aside


def remove_with_files(disk: Disk, path: str) -> None:
    """Remove a directory and the files in it."""
    for name in disk.names(path):
        disk.remove(join(path, name))
    disk.remove_directory(path)


def _holds(disk: Disk, source: str, target: str) -> bool:
    """Return whether the file `target` begins with all bytes of `source`: an attempt that cut the log may have been ended
    behind the copy, so the source may be shorter now."""
    if not disk.exists(target) or disk.size(target) < (size := disk.size(source)):
        return False
    with closing(disk.open(source)) as old, closing(disk.open(target)) as new:
        spans = ((offset, min(COPIED_AT_ONCE, size - offset)) for offset in range(0, size, COPIED_AT_ONCE))
        return all(_readable(old, *span) == new.read(*span) for span in spans)


def _copy(disk: Disk, source: str, target: str) -> None:
    size = disk.size(source)
    with closing(disk.open(source)) as old, closing(disk.create(target)) as new:
        for offset in range(0, size, COPIED_AT_ONCE):
            new.write(offset, _readable(old, offset, min(COPIED_AT_ONCE, size - offset)))
        new.flush()


def _readable(file: File, offset: int, size: int) -> bytes:
    """Read a span, with zeros for the pages that cannot be read: a bad sector must not keep the rest from being copied."""
    try:
        return file.read(offset, size)
    except ReadFailed:
        if size <= PAGE_BYTES:
            return bytes(size)
    end = offset + size
    return b"".join(_readable(file, at, min(PAGE_BYTES, end - at)) for at in range(offset, end, PAGE_BYTES))

"""Files that leave a log and are kept: directories of partitions that are renamed, and segments that are copied.

What was acknowledged once is never deleted by a daemon because the log goes on without it. It gets a directory of its own
beside the partition's, which status and `waltzctl storage` list until an operator deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from waltzd.disk.seam import Disk, join
from waltzd.format.layout import aside_name, segment_name
from waltzd.storage.replica.site import Site

COPIED_AT_ONCE = 1 << 20
"""Bytes."""


def set_aside(disk: Disk, home: str, number: int) -> str | None:
    """Give the directory of a partition a name that says so, durably; None where there is none."""
    path = join(home, str(number))
    if not disk.exists(path):
        return None
    aside = join(home, aside_name(number, set(disk.names(home))))
    disk.rename(path, aside)
    disk.flush_directory(home)
    return aside


def set_segments_aside(site: Site, first_ids: Iterable[int], why: str) -> str:
    """Copy the segments with these first ids into a directory of their own, durably, and return its path. They stay where
    they are, too: a crash at any point leaves the log whole."""
    disk = site.disk
    home = site.directory.rpartition("/")[0]
    aside = join(home, aside_name(site.number, set(disk.names(home))))
    disk.make_directory(aside)
    for first_id in first_ids:
        if disk.exists(site.path(first_id)):
            _copy(disk, site.path(first_id), join(aside, segment_name(first_id)))
    disk.flush_directory(aside)
    disk.flush_directory(home)
    site.say(f"{why}: its segments were copied to {aside}, and leave the log")
    return aside


def _copy(disk: Disk, source: str, target: str) -> None:
    size = disk.size(source)
    with closing(disk.open(source)) as old, closing(disk.create(target)) as new:
        for offset in range(0, size, COPIED_AT_ONCE):
            new.write(offset, old.read(offset, min(COPIED_AT_ONCE, size - offset)))
        new.flush()

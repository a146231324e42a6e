"""Replica made from an archive: from a folder of proven segments to a replica that counts.

The hard state is written in the folder, then the folder gets the name of the replica, and the control file records it
last. After a crash before that, the folder is continued by the next attempt, or set aside. The replica is a new
incarnation in the state after an orderly end of a session that closed at its last id. That session is above every
session that the cluster is known to have had, so earlier owners of the log are refused.
"""

from __future__ import annotations

from waltzd.disk.seam import Disk, join
from waltzd.errors.operations import TargetNotEmpty
from waltzd.format.layout import NEW_SUFFIX, HardState
from waltzd.storage.replica.aside import set_aside
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.hard_state import HardStateFile


def folder_for(home: str, number: int) -> str:
    """Return the directory in which a partition is restored. Files that are found there are proven and kept."""
    return join(home, f"{number}{NEW_SUFFIX}")


def give_name(
    disk: Disk,
    home: str,
    control: ControlFile,
    number: int,
    *,
    session: int,
    last_id: int,
    newest: int,
    segments: int,
    timelines: bytes = b"",
) -> None:
    """Give a restored replica its name and its record; the replica counts when this returns."""
    control.make_record(number)
    if control.info(number).is_assigned:
        raise TargetNotEmpty(f"partition {number} has a replica in {home} already")
    folder = folder_for(home, number)
    hard_state = HardState(
        key=control.header.key,
        partition=number,
        incarnation=disk.fresh_id(),
        session=session,
        committed=last_id,
        durable=last_id,
        newest=newest,
        segments=segments,
        is_clean=True,
        settled=last_id,
        timelines=timelines,
    )
    HardStateFile.create(disk, folder, hard_state)
    disk.flush_directory(folder)
    set_aside(disk, home, number)
    disk.rename(folder, join(home, str(number)))
    disk.flush_directory(home)
    control.restore(number, session=session, mark=last_id)

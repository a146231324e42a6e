"""Trimming a replica: what is below its floor is only in the archive, and leaves the disk.

The floor stands in the hard state before the first file goes. So a start that finds files below it removes them, and a log
that begins above id 0 is right where the hard state says so, and damage everywhere else. The floor of a replica is the
first id of one of its segments: segments go whole, and one that the owner's floor lies within stays.

A replica whose whole log is below the floor, an empty one too, begins anew at the floor: it ends in front of it then, as if
it had had everything and been trimmed.

The archiver proves first, segment by segment, that the archive has the bytes that are here (`Archiver.proven`). What is not
proven stays, and the log begins there. A replica that begins anew cannot keep it: such segments are set aside, because they
may be the last copy. So are damaged ones, which can be compared with nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from waltzd.disk.seam import Disk, join
from waltzd.errors import BadArgument
from waltzd.format.layout import FILES_OF_SEGMENT, first_id_of, index_name, key_index_name, segment_name
from waltzd.storage.replica.aside import set_segments_aside
from waltzd.storage.replica.examine import DamageReport
from waltzd.storage.replica.hard_state import HardStateFile
from waltzd.storage.replica.replica_context import ReplicaContext
from waltzd.storage.replica.segment import Segment
from waltzd.storage.replica.segment_list import SegmentList

UNLINKED_AT_ONCE = 16
"""Maximum number of segments that are removed between two appends."""


def names_below(disk: Disk, directory: str, floor: int) -> list[str]:
    """Return the names of files whose first id is below the floor, the oldest first."""
    found = [
        (first_id, name) for name in disk.names(directory) if (first_id := first_id_of(name, FILES_OF_SEGMENT)) is not None
    ]
    return [name for first_id, name in sorted(found) if first_id < floor]


class Trimming:
    def __init__(
        self, context: ReplicaContext, segments: SegmentList, damage: DamageReport, hard_state: HardStateFile
    ) -> None:
        self._context = context
        self._segments = segments
        self._damage = damage
        self._hard_state = hard_state
        self._left: list[str] = []
        """Files below the floor that are still there, the oldest last."""

    def begin(self, floor: int, *, committed: int, proven: int, damaged: Sequence[int]) -> None:
        """Let the log begin at this floor, or at the segment that holds it, durably. Never below where it begins. `proven`:
        ids in front of this one are in the archive, except for the damaged segments with the first ids `damaged`."""
        if floor < 0:
            raise BadArgument(f"a floor is never below 0: {floor}")
        segments = self._segments
        if floor <= self._hard_state.value.floor:
            return
        if floor > segments.last_id + 1:
            position = bisect_right(segments.first_ids, proven) - 1
            is_all = proven > segments.last_id
            self._keep_aside([*damaged, *(() if is_all else segments.first_ids[max(0, position) :])])
            self._begin_anew(floor, committed)
            return
        position = bisect_right(segments.first_ids, min(floor, proven)) - 1
        kept = segments.first_ids[position:]
        if position <= 0:
            return
        self._keep_aside([first_id for first_id in damaged if first_id < kept[0]])
        self._hard_state.change(floor=kept[0], segments=len(kept), committed=committed)
        gone = segments.first_ids[:position]
        segments.first_ids = kept
        self._forget(gone)
        self._context.say(f"ids below {kept[0]} are only in the archive from now on")

    def _begin_anew(self, floor: int, committed: int) -> None:
        """First the hard state, then the files: a start in between goes on from the hard state."""
        segments, hard_state = self._segments, self._hard_state.value
        newest, durable = max(hard_state.newest, floor), max(hard_state.durable, floor - 1)
        self._hard_state.change(floor=floor, newest=newest, durable=durable, segments=1, committed=committed)
        last_id = segments.last_id
        segments.empty(floor)
        self._damage.heal()
        self._left = []
        for name in names_below(self._context.disk, self._context.directory, floor):
            self._context.disk.remove(join(self._context.directory, name))
        segments.set_active(Segment.create(self._context.disk, self._context.directory, self._context.header(floor)))
        self._context.say(f"begins at the floor {floor}; it held ids up to {last_id}")

    def _keep_aside(self, first_ids: Sequence[int]) -> None:
        """Set aside the segments that may be the only copy. Call it before the hard state permits their removal."""
        if first_ids:
            why = "nothing proves that the archive has what stands below the floor"
            set_segments_aside(self._context, dict.fromkeys(sorted(first_ids)), why)

    def _forget(self, gone: list[int]) -> None:
        self._segments.forget()
        for first_id in gone:
            self._damage.replace(self._context.path(first_id), [])
            self._left = [index_name(first_id), segment_name(first_id), key_index_name(first_id), *self._left]

    def unlink_next(self) -> bool:
        """Remove some of the files below the floor, the oldest first. False when there is none left."""
        if not self._left:
            return False
        disk, directory = self._context.disk, self._context.directory
        for _ in range(3 * UNLINKED_AT_ONCE):
            if self._left and disk.exists(path := join(directory, self._left.pop())):
                disk.remove(path)
        disk.flush_directory(directory)
        return bool(self._left)

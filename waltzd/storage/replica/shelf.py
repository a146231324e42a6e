"""The segments of one replica, in the order of their ids: the one that is written, and a few sealed ones kept open.

It knows names and files; sessions, marks and promises are the business of `waltzd.storage.replica.partition`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from waltzd.disk.seam import join
from waltzd.format.finding import Finding
from waltzd.format.layout import first_id_of, index_name, segment_name
from waltzd.storage.replica.segment import UNUSABLE, Segment, Suspect
from waltzd.storage.replica.site import Site

OPEN_SEGMENTS_MAX = 4
"""Sealed segments kept open for reading, per partition: with 64 partitions still below the usual limit of open files."""


class Shelf:
    def __init__(self, site: Site, *, first_ids: list[int], active: Segment | None) -> None:
        assert first_ids
        assert active is None or active.first_id == first_ids[-1]
        self._site = site
        self._disk = site.disk
        self._directory = site.directory
        self.first_ids = first_ids
        self.active = active
        """The last segment, open for writing; None when it is damaged beyond use."""
        self.last_id = active.next_id - 1 if active else first_ids[-1] - 1
        """The highest id on the disk. It moves after a flush, never before."""
        self._sealed: OrderedDict[int, Segment] = OrderedDict()

    def position_of(self, id_: int) -> int:
        return max(0, bisect_right(self.first_ids, id_) - 1)

    def last_id_of(self, position: int, first_ids: list[int] | None = None) -> int:
        first_ids = first_ids or self.first_ids
        return first_ids[position + 1] - 1 if position + 1 < len(first_ids) else self.last_id

    def is_active(self, first_id: int) -> bool:
        return self.active is not None and first_id == self.active.first_id

    def sealed(self) -> list[tuple[int, int]]:
        """First and last id of each segment that takes no more records."""
        return [(first_id, self.last_id_of(at)) for at, first_id in enumerate(self.first_ids[:-1])]

    def concerned(self, finding: Finding) -> list[int]:
        """The first ids of the segments that a finding names, or that hold its ids."""
        found = {first_id_of(finding.path.rpartition("/")[2])} & set(self.first_ids)
        if finding.first_id is not None and finding.last_id is not None and finding.first_id <= self.last_id:
            found.update(self.first_ids[self.position_of(finding.first_id) : self.position_of(finding.last_id) + 1])
        return sorted(first_id for first_id in found if first_id is not None)

    def segment_with(self, id_: int) -> tuple[Segment, int]:
        """The segment that holds this id, and the last id of that segment.

        Readers call this beside the lane: it looks at the list once, and the lane replaces lists instead of changing
        them."""
        first_ids = self.first_ids
        position = max(0, bisect_right(first_ids, id_) - 1)
        first_id, last_id = first_ids[position], self.last_id_of(position, first_ids)
        active = self.active
        if active is not None and first_id == active.first_id:
            return active, last_id
        found = self._sealed.pop(first_id, None)
        if found is None:
            found = Segment.open(self._disk, self._directory, expected=self._site.header(first_id), next_id=last_id + 1)
        self._keep_open(found)
        return found, last_id

    def _keep_open(self, segment: Segment) -> None:
        self._sealed[segment.first_id] = segment
        while len(self._sealed) > OPEN_SEGMENTS_MAX:
            self._sealed.popitem(last=False)

    def forget(self, first_id: int) -> None:
        """The next reader opens the segment anew."""
        self._sealed.pop(first_id, None)

    def start_segment(self) -> Segment:
        """A new last segment behind the active one, which is sealed."""
        old = self.seal()
        new = Segment.create(self._disk, self._directory, self._site.header(old.next_id))
        self.stand_last(new)
        return new

    def seal(self) -> Segment:
        """Flush the active segment, so that another one can stand behind it."""
        old = self.active
        assert old is not None
        old.flush()
        self.last_id = old.next_id - 1
        old.index.flush()
        return old

    def stand_last(self, new: Segment) -> None:
        """Behind the last segment, or in its place."""
        old, self.active = self.active, new
        if new.first_id not in self.first_ids:
            self.first_ids = [*self.first_ids, new.first_id]
            if old is not None:
                self._keep_open(old)
        self.last_id = new.next_id - 1

    def miss_for(self, finding: Finding) -> None:
        """Keep the place of a missing segment, so that no other claims its ids."""
        first_id = first_id_of(finding.path.rpartition("/")[2])
        if first_id is not None and first_id not in self.first_ids:
            self.first_ids = sorted([*self.first_ids, first_id])

    def _reopen(self, first_id: int, *, is_emptied: bool) -> Segment:
        """A sealed segment becomes the last one. One that keeps no record may be unreadable."""
        expected = self._site.header(first_id)
        try:
            return Segment.open(self._disk, self._directory, expected=expected, next_id=None, write=True)
        except (*UNUSABLE, Suspect):
            if not is_emptied:
                raise
            return Segment.create(self._disk, self._directory, expected)

    def cut(self, position: int, *, end: int, next_id: int) -> None:
        """Make the segment at `position` the last one, ending at byte `end`, in front of `next_id`.

        It is opened before anything goes. Then the newest goes first, and each is gone durably before the next: a crash
        between leaves a log, never a hole."""
        kept = self.first_ids[position]
        active = self.active
        if active is None or active.first_id != kept:
            active = self._reopen(kept, is_emptied=next_id == kept)
        for first_id in reversed(self.first_ids[position + 1 :]):
            for name in (segment_name(first_id), index_name(first_id)):
                path = join(self._directory, name)
                if self._disk.exists(path):
                    self._disk.remove(path)
            self._disk.flush_directory(self._directory)
            self.forget(first_id)
        self.first_ids = self.first_ids[: position + 1]
        self.forget(kept)
        self.active = active
        active.cut(end=end, next_id=next_id)
        self.last_id = next_id - 1

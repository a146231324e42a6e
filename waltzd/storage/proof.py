"""Checking what a replica holds: a whole segment at a time, because a read met wrong bytes or because somebody asks what it
vouches for. What is found wrong goes into quarantine; nothing is changed but indexes.
"""

from __future__ import annotations

from collections.abc import Callable

from waltzd.disk import Disk
from waltzd.errors import PartitionDamaged
from waltzd.layout import HEADER_BYTES
from waltzd.storage.healing import Healing
from waltzd.storage.quarantine import Quarantine
from waltzd.storage.repair import examine_segment
from waltzd.storage.segment import Suspect
from waltzd.storage.shelf import Shelf


class Proof:
    def __init__(
        self,
        disk: Disk,
        shelf: Shelf,
        quarantine: Quarantine,
        healing: Healing,
        *,
        partition: int,
        proven_from: int,
        say: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._disk = disk
        self._shelf = shelf
        self._quarantine = quarantine
        self._healing = healing
        self._partition = partition
        self._proven_from = proven_from
        self._say, self._complain = say, complain

    def next_segment(self, low_mark: int) -> int | None:
        """The first id of the newest segment above the mark that was not checked since the files were opened."""
        shelf = self._shelf
        for position in range(len(shelf.first_ids) - 1, -1, -1):
            first_id = shelf.first_ids[position]
            if first_id >= self._proven_from:
                continue
            if shelf.last_id_of(position) <= low_mark or self._proven_from <= low_mark + 1:
                return None
            return first_id
        return None

    def prove(self, first_id: int) -> None:
        self.examine(first_id)
        self._proven_from = first_id

    def examine(self, first_id: int) -> None:
        """Read a whole segment, find out what is wrong with it, and make its index right again."""
        shelf = self._shelf
        shelf.forget(first_id)
        position = shelf.first_ids.index(first_id)
        is_last = position == len(shelf.first_ids) - 1
        last_id = shelf.last_id_of(position)
        if is_last and self._quarantine.short is None:
            last_id = max(last_id, self._healing.floor)
        found = examine_segment(
            self._disk,
            shelf.directory,
            expected=shelf.header(first_id),
            next_id=last_id + 1,
            is_last=is_last,
            active=shelf.active if shelf.is_active(first_id) else None,
            say=self._say,
        )
        if found and is_last:
            self._healing.owe(last_id)
        known = self._quarantine.findings
        self._quarantine.replace(shelf.path_of(first_id), found)
        for finding in found:
            shelf.miss_for(finding)
            if finding in known:  # said already
                continue
            self._complain(f"{PartitionDamaged.code} partition {self._partition}: {finding.sentence()}")

    def end_of(self, position: int, mark: int) -> int:
        """Where the record `mark` ends in its segment, or the header where that record is in the segment before."""
        shelf = self._shelf
        if mark < shelf.first_ids[position]:
            return HEADER_BYTES
        try:
            return shelf.segment_with(mark)[0].end_of(mark)
        except Suspect as question:
            self.examine(question.first_id)
            self._quarantine.check_up_to(mark)
            return shelf.segment_with(mark)[0].end_of(mark)

"""Mutants of reading by lock: key indexes, histories below the trim floor, and locks that are looked up for a decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutant import BUSY, Aim, Patches, mutant
from waltzd import dcb
from waltzd.archive.reader import ArchiveReader
from waltzd.dcb import Event, EventStore, Query
from waltzd.format.key_index import HEADER_BYTES, KeyIndex, LockMarks, LockQuery
from waltzd.protocol.quorum import EMPTY
from waltzd.server.clients import pipeline
from waltzd.server.clients.lookups import LockLookups
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.core.locks import LockTable, Lookup
from waltzd.server.core.log_cache import LogCache
from waltzd.server.core.recent_marks import RecentMarks, join_marks
from waltzd.server.session.archive_fetcher import ArchiveFetcher

KEYS = Aim(faults=("crash",), format=1, setup={**BUSY, "segment_bytes": 1500, "locks": 3})
"""Every run ends with the histories of some locks, before and after key indexes are lost, damaged and swapped."""
TRIMMED = Aim(
    faults=("trim", "archive", "crash"), format=1, seconds=8.0,
    setup={**BUSY, "segment_bytes": 1500, "locks": 3, "keep_local": "1KB"},
)  # fmt: skip
LOOKUPS = Aim(
    faults=("lookups", "slow", "pause"), format=1,
    setup={**BUSY, "rate": 200.0, "callers": 3, "locks": 12, "lock_table_size": 1},
)  # fmt: skip
"""Callers pretend to be behind, and the table is small: most of what they want is looked up."""
DECISIONS = Aim(
    faults=("decisions", "crash"), format=1, seconds=3.0,
    setup={**BUSY, "segment_bytes": 1500, "tail_bytes": 2000, "lock_table_size": 1},
)  # fmt: skip
"""Boundaries overlap, most of the log has left the memory of its owner, and its lock table is small."""


# -- key indexes -------------------------------------------------------------------------------------------------------


@mutant(0, 1, aim=KEYS)
def believes_the_key_index_of_another_segment(patches: Patches) -> None:
    """Whatever stands in the file beside a segment answers for it."""

    def make(right: Any) -> Any:
        def read(file: Any, header: Any) -> KeyIndex:
            raw = file.read(0, HEADER_BYTES)
            theirs = replace(
                header, first_id=int.from_bytes(raw[24:32], "big"), last_id=int.from_bytes(raw[32:40], "big"),
                footer=raw[40:72],
            )  # fmt: skip
            found: KeyIndex = right.__func__(file, theirs)
            return found

        return staticmethod(read)

    patches.wrap(KeyIndex, "read", make)


@mutant(0, 1, aim=KEYS)
def reads_no_checksum_of_a_page_of_a_key_index(patches: Patches) -> None:
    """A page is what stands on the disk."""
    patches.set(KeyIndex, "_page", lambda self, file, offset, size: memoryview(file.read(offset, size))[: size - 4])


@mutant(0, 1, aim=KEYS)
def has_a_filter_that_says_no_too_often(patches: Patches) -> None:
    """It denies a quarter of the locks that it has."""

    def make(right: Any) -> Any:
        def may_have(self: KeyIndex, file: Any, lock: int) -> Any:
            return right(self, file, lock) and lock % 4 > 0

        return may_have

    patches.wrap(KeyIndex, "_may_have", make)


@mutant(0, 1, aim=TRIMMED)
def ends_a_history_at_the_trim_floor(patches: Patches) -> None:
    """What storages have trimmed was marked by nobody."""

    async def find_marks(self: ArchiveFetcher, partition: int, known: Any, query: LockQuery) -> LockMarks:
        return LockMarks(ids=(), through=query.first_id if query.newest_first else query.last_id)

    patches.set(ArchiveFetcher, "find_marks", find_marks)


@mutant(0, 1, aim=TRIMMED)
def checks_no_hash_of_an_archived_key_index(patches: Patches) -> None:
    """What stands in the store under the right name was archived."""

    def make(right: Any) -> Any:
        def fetch(self: ArchiveReader, name: str, size: int, expected: str, file: Any) -> str:
            trouble: str = right(self, name, size, expected, file)
            return "" if "/key/" in name else trouble

        return fetch

    patches.wrap(ArchiveReader, "_fetch", make)


@mutant(0, 1, aim=TRIMMED)
def takes_a_lost_key_index_for_a_segment_without_marks(patches: Patches) -> None:
    """The key index that the manifest names is not in the store: nobody marked anything."""

    class NoMarks:
        def __init__(self, entry: Any) -> None:
            self.entry = entry

        def find_marks(self, query: LockQuery) -> LockMarks:
            here = query.within(self.entry.first, self.entry.last)
            return LockMarks(ids=(), through=here.first_id if here.newest_first else here.last_id)

    def make(right: Any) -> Any:
        def key_index(self: ArchiveReader, partition: int, entry: Any) -> Any:
            return right(self, partition, entry) or NoMarks(entry)

        return key_index

    patches.wrap(ArchiveReader, "_key_index", make)


# -- marks in the memory of an owner ------------------------------------------------------------------------------------


@mutant(0, 1, aim=KEYS)
def leaves_a_gap_in_the_marks_in_memory(patches: Patches) -> None:
    """What has left the log cache before a question counts as marked by no transaction."""

    def make(right: Any) -> Any:
        def add(self: RecentMarks, batches: Any) -> None:
            if batches and self.next_id > 0:
                self.next_id = batches[0].first_id
            right(self, batches)
            self.first_id = 0

        return add

    patches.wrap(RecentMarks, "add", make)


@mutant(0, 1, aim=KEYS)
def ends_a_page_of_marks_where_one_lock_ends(patches: Patches) -> None:
    """The lock that was followed furthest says how far a page reaches."""

    def joined(groups: Any, marks: Any, *, newest_first: bool) -> LockMarks:
        found = join_marks(groups, marks, newest_first=newest_first)
        ends = [one.through for one in marks.values()]
        return replace(found, through=min(ends) if newest_first else max(ends))

    patches.set(pipeline, "join_marks", joined)


@mutant(0, 1, aim=KEYS)
def reads_the_record_in_front_of_the_one_that_marked(patches: Patches) -> None:
    """The records of a page are counted from the wrong end of their batch."""

    def make(right: Any) -> Any:
        def record(self: LogCache, id_: int) -> Any:
            return right(self, max(self.first_id, id_ - 1))

        return record

    patches.wrap(LogCache, "record", make)


# -- locks that are looked up ------------------------------------------------------------------------------------------


@mutant(0, 3, aim=LOOKUPS)
def believes_a_lookup_over_a_mark_that_was_evicted_since(patches: Patches) -> None:
    """A lock was marked while it was looked up, and the table has forgotten that: the answer of the log counts."""

    def make(right: Any) -> Any:
        def learn(self: LockTable, lookup: Lookup, mark: int | None) -> None:
            self._sought[lookup.lock] = -1
            right(self, lookup, mark)

        return learn

    patches.wrap(LockTable, "learn", make)


@mutant(3, aim=LOOKUPS)
def uses_the_lookup_of_an_older_session(patches: Patches) -> None:
    """What was found once is kept beside the session."""
    known: dict[tuple[int, int], int] = {}

    def make(right: Any) -> Any:
        async def last_mark(self: LockLookups[Any], lookup: Lookup) -> int:
            log: Any = self._log
            name = log.partition, lookup.lock
            if name not in known:
                known[name] = await right(self, lookup)
            return known[name] if known[name] >= lookup.first_id else EMPTY

        return last_mark

    patches.wrap(LockLookups, "_last_mark", make)


@mutant(3, 1, aim=LOOKUPS)
def takes_no_answer_for_no_mark(patches: Patches) -> None:
    """A lock that the log says nothing of was never marked."""

    def make(right: Any) -> Any:
        def learn(self: LockTable, lookup: Lookup, mark: int | None) -> None:
            right(self, lookup, EMPTY if mark is None else mark)

        return learn

    patches.wrap(LockTable, "learn", make)


# -- decisions over boundaries -----------------------------------------------------------------------------------------


@mutant(0, 1, aim=DECISIONS)
def lets_the_position_of_a_decision_rise_without_a_look(patches: Patches) -> None:
    """An append that was refused is tried again from the end of the log."""

    async def examined(self: EventStore, query: Query, position: int, conflict_id: int, seconds: float) -> int:
        return max(position, await self._client.end_position(self.partition))

    patches.set(EventStore, "_examined", examined)


@mutant(0, 1, aim=DECISIONS)
def marks_no_lock_of_any_type(patches: Patches) -> None:
    """An event marks only locks of its own type."""

    def marks(event: Event) -> list[str]:
        return [dcb._lock_id(event.type, tag) for tag in (*event.tags, None)]

    patches.set(dcb, "_marks", marks)


@mutant(0, 1, aim=DECISIONS)
def answers_for_marks_that_have_left_the_memory_of_an_owner(patches: Patches) -> None:
    """What is not in memory was marked by nobody."""

    def make(right: Any) -> Any:
        def find_recent(self: Pipeline, query: LockQuery) -> LockMarks | None:
            found: LockMarks | None = right(self, query)
            return found or LockMarks(ids=(), through=query.first_id if query.newest_first else query.last_id)

        return find_recent

    patches.wrap(Pipeline, "_find_recent", make)

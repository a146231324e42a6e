"""Look-ups of locks: by any replica, and in the archive below the trim floor."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from tests.unit.waltzd.server.session.test_replicated_log import Replica, Replicas
from waltzd.errors import CannotConnect, NeedsBatches, NotReady, OnlyInArchive, Trimmed, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.protocol.descriptions import Archived
from waltzd.server.session.archive_fetcher import ArchiveFetcher

MARKS = range(0, 20, 3)


def answer(query: LockQuery, low: int) -> LockMarks:
    """The answer of a log that begins at `low`, at most ten ids at once."""
    if query.next_id < low:
        raise Trimmed("only in the archive", floor=low)
    if query.newest_first:
        low = max(low, query.first_id, query.last_id - 9)
        ids = [id_ for id_ in MARKS if low <= id_ <= query.last_id][::-1]
        return LockMarks(ids=tuple(ids), through=low)
    high = min(query.last_id, query.first_id + 9)
    return LockMarks(ids=tuple(id_ for id_ in MARKS if query.first_id <= id_ <= high), through=high)


class Marked(Replica):
    def __init__(self, *, floor: int = 0, fails: WaltzError | None = None, lies: LockMarks | None = None) -> None:
        super().__init__(fails=fails)
        self.floor = floor
        self.lies = lies

    async def find_marks(self, partition: int, query: LockQuery, *, session: int) -> LockMarks:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return self.lies or answer(query, self.floor)


class Lane:
    async def find_marks(self, partition: int, known: Archived, query: LockQuery) -> LockMarks:
        assert query.last_id <= known.last_id
        return answer(query, 0)


def history(*, newest_first: bool = False, has_archive: bool = True, **replicas: Marked) -> list[int]:
    async def run() -> list[int]:
        log = Replicas(cast("dict[str, Replica]", replicas), 0)
        known = Archived(number=1, sha256="0" * 64, last_id=14)

        async def ask_archived() -> Archived:
            return known

        log.ask_archived = ask_archived
        if has_archive:
            log.settings = replace(log.settings, archive=cast(ArchiveFetcher, Lane()))
        query, found = LockQuery(lock=1, last_id=19, limit=100, newest_first=newest_first), list[int]()
        while not query.is_done:
            part = await log.find_marks(query, asyncio.Semaphore(1))
            found += part.ids
            query = query.after(part)
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_history_goes_on_below_the_trim_floor(newest_first: bool) -> None:
    right = list(MARKS)[::-1] if newest_first else list(MARKS)
    assert history(a=Marked(), newest_first=newest_first) == right
    assert history(a=Marked(floor=10), newest_first=newest_first) == right
    assert history(a=Marked(floor=10), b=Marked(floor=13), newest_first=newest_first) == right
    with pytest.raises(OnlyInArchive):
        history(a=Marked(floor=10), newest_first=newest_first, has_archive=False)


def test_another_replica_is_asked_where_one_failed() -> None:
    assert history(a=Marked(fails=CannotConnect("gone")), b=Marked()) == list(MARKS)
    with pytest.raises(NotReady, match="a: W4001 gone"):
        history(a=Marked(fails=CannotConnect("gone")))
    with pytest.raises(NeedsBatches):
        history(a=Marked(fails=NeedsBatches("format 0")), b=Marked())


@pytest.mark.parametrize("ids", [(), (3, 25), (-1, 3)])
def test_the_marks_of_other_ids_are_not_taken(ids: tuple[int, ...]) -> None:
    lies = LockMarks(ids=ids, through=19 if ids else 20)
    assert history(a=Marked(lies=lies), b=Marked()) == list(MARKS)
    with pytest.raises(NotReady, match=BadFrame.code):
        history(a=Marked(lies=lies))

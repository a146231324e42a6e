"""The index of the newest marks beside a list of all marks, and answers for several locks beside a loop over the log."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batches import batches_of
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.protocol.locks import Mode
from waltzd.server.core import recent_marks
from waltzd.server.core.recent_marks import OlderMarks, RecentMarks, join_marks

LOCKS = range(5)
rows = st.lists(st.tuples(st.sampled_from(LOCKS), st.sampled_from([int(mode) for mode in Mode])), max_size=4)
logs = st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=15)
"""Batches of transactions, each with its locks."""


def marked(log: list[Any], lock: int) -> list[int]:
    flat = [row for batch in log for row in batch]
    return [id_ for id_, row in enumerate(flat) if any(one == lock and mode != Mode.READ for one, mode in row)]


def answer(ids: list[int], query: LockQuery, *, last: int | None = None) -> LockMarks:
    """The answer of a loop. `last`: where the answer ends, in the direction of the query."""
    end = query.first_id if query.newest_first else query.last_id
    found = [id_ for id_ in ids if query.first_id <= id_ <= query.last_id]
    found = found[::-1] if query.newest_first else found
    if last is not None:
        end = last
        found = [id_ for id_ in found if (id_ >= last if query.newest_first else id_ <= last)]
    if len(found) >= query.limit:
        found = found[: query.limit]
        end = found[-1]
    return LockMarks(ids=tuple(found), through=end)


@settings(max_examples=200)
@given(log=logs, draw=st.data(), block=st.integers(1, 6), blocks=st.integers(1, 3), new=st.integers(1, 12))
def test_it_answers_what_a_loop_answers(log: list[Any], draw: st.DataObject, block: int, blocks: int, new: int) -> None:
    """Whatever is evicted from the log cache between two questions, and however small the blocks are."""
    batches = batches_of([[b""] * len(batch) for batch in log], locks=log)
    recent, at = RecentMarks(), 0
    with (
        patch.object(recent_marks, "BLOCK_MARKS", block),
        patch.object(recent_marks, "BLOCKS_MAX", blocks),
        patch.object(recent_marks, "NEW_MARKS_MAX", new),
    ):
        while at < len(batches):
            start = at if draw.draw(st.booleans()) else draw.draw(st.integers(at, len(batches) - 1))
            at = draw.draw(st.integers(start + 1, len(batches)))
            recent.add(batches[start:at])
            recent.check()
            assert recent.next_id == batches[at - 1].last_id + 1
            assert recent.first_id <= batches[at - 1].first_id
            for lock in (*LOCKS, 99):
                first_id = draw.draw(st.integers(recent.first_id, recent.next_id - 1))
                last_id = draw.draw(st.integers(first_id, recent.next_id - 1))
                query = LockQuery(
                    lock=lock, first_id=first_id, last_id=last_id, limit=draw.draw(st.integers(1, 5)),
                    newest_first=draw.draw(st.booleans()),
                )  # fmt: skip
                assert recent.find(query) == answer(marked(log, lock), query)


def test_it_begins_anew_behind_a_gap_and_keeps_what_follows() -> None:
    batches = batches_of([[b""]] * 6, locks=[[[(7, int(Mode.WRITE))]]] * 6)
    recent = RecentMarks()
    recent.add(batches[:2])
    recent.add(batches[2:3])
    assert (recent.first_id, recent.next_id) == (0, 3)
    recent.add(batches[4:])
    assert (recent.first_id, recent.next_id) == (4, 6)
    assert recent.find(LockQuery(lock=7, first_id=4, last_id=5, limit=9)).ids == (4, 5)


@settings(max_examples=300)
@given(
    log=logs,
    groups=st.lists(st.lists(st.sampled_from(LOCKS), min_size=1, max_size=3), min_size=1, max_size=3),
    limit=st.integers(1, 6),
    newest_first=st.booleans(),
    draw=st.data(),
)
def test_joined_answers_leave_nothing_out(
    log: list[Any], groups: list[list[int]], limit: int, newest_first: bool, draw: st.DataObject
) -> None:
    """Answers for single locks end anywhere. What marked all locks of a group is there up to the joined end, what did not
    mark one lock of any group is not, and where all answers are whole there is nothing else."""
    ids = [id_ for id_, _ in enumerate(row for batch in log for row in batch)]
    query = LockQuery(lock=0, last_id=ids[-1], limit=limit, newest_first=newest_first)
    last = ids[0] if newest_first else ids[-1]
    marks = {lock: answer(marked(log, lock), query, last=draw.draw(st.sampled_from([last, *ids]))) for lock in LOCKS}
    joined = join_marks(groups, marks, newest_first=newest_first)
    assert list(joined.ids) == sorted(set(joined.ids), reverse=newest_first)
    of_all = {id_ for group in groups for id_ in ids if all(id_ in marked(log, lock) for lock in group)}
    of_any = {id_ for group in groups for lock in group for id_ in marked(log, lock)}
    reached = {id_ for id_ in ids if (id_ >= joined.through if newest_first else id_ <= joined.through)}
    assert of_all & reached <= set(joined.ids) <= of_any & reached
    if all(found.through == last for found in marks.values()):
        assert set(joined.ids) == of_all


@settings(max_examples=200)
@given(log=logs, draw=st.data(), locks_max=st.integers(1, 4), ids_max=st.integers(0, 6))
def test_what_was_learned_is_answered_up_to_where_it_was_learned(
    log: list[Any], draw: st.DataObject, locks_max: int, ids_max: int
) -> None:
    older, last_id = OlderMarks(), sum(map(len, log)) - 1
    with patch.object(recent_marks, "OLDER_LOCKS_MAX", locks_max), patch.object(recent_marks, "OLDER_IDS_MAX", ids_max):
        for _ in range(8):
            lock, end = draw.draw(st.sampled_from(LOCKS)), draw.draw(st.integers(0, last_id))
            ids = [id_ for id_ in marked(log, lock) if id_ <= end]
            older.learn(lock, end, ids)
            assert len(older._known) <= locks_max
            first_id = draw.draw(st.integers(0, last_id))
            query = LockQuery(
                lock=lock, first_id=first_id, last_id=draw.draw(st.integers(first_id, last_id)),
                limit=draw.draw(st.integers(1, 5)), newest_first=draw.draw(st.booleans()),
            )  # fmt: skip
            found = older.find(query)
            if len(ids) <= ids_max and query.next_id <= end:
                assert found == answer(marked(log, lock), query.within(0, end))
            elif found is not None:  # of an answer that was learned before
                assert found == answer(marked(log, lock), query.within(0, older._known[lock][0]))

"""What is said of a lock, against what the table then decides."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.mounting import Room, batch_of, in_room
from tests.unit.waltzd.server.clients.test_pipeline import slow
from tests.unit.waltzd.server.core.test_locks import Row, row
from waltzd.errors.operations import BadFrame, SessionEnded
from waltzd.protocol.locks import LockExplanation, LockId, Mode, Reason, append_lock, read_lock, write_lock
from waltzd.server.core.locks import LockTable
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import to_message, to_value

READ, WRITE, APPEND = Mode.READ, Mode.WRITE, Mode.APPEND


def explained(table: LockTable, lock: int, *, committed: int, low_mark: int, last_id: int) -> LockExplanation:
    mark, reason = table.explain(lock, committed)
    return LockExplanation(
        lock=lock, mark=mark, reason=reason, committed=committed, last_id=last_id, session=1, low_mark=low_mark,
        floor=table.floor, locks=len(table), locks_max=4,
    )  # fmt: skip


@pytest.mark.slow
@given(
    size=st.integers(1, 6),
    low_mark=st.integers(-1, 3),
    batches=st.lists(st.lists(row, min_size=1, max_size=5), max_size=8),
    lock=st.integers(0, 9),
    mode=st.sampled_from([READ, WRITE, APPEND]),
    lag=st.integers(0, 12),
)
def test_it_is_what_would_be_decided(
    size: int, low_mark: int, batches: list[list[Row]], lock: int, mode: Mode, lag: int
) -> None:
    table, next_id = LockTable(size, low_mark), low_mark + 1
    for rows in batches:
        marks = [max(-1, next_id - 1 - behind) for behind, _ in rows]
        batch = batch_of(*[b"x"] * len(rows), marks=marks, locks=[locks for _, locks in rows])
        next_id += len(rows) - len(table.decide(batch, next_id, next_id - 3).sequences)
    committed, seen = max(low_mark, next_id - 3), max(-1, next_id - 1 - lag)
    found = explained(table, lock, committed=committed, low_mark=low_mark, last_id=next_id - 1)
    decision = table.decide(batch_of(b"x", marks=[seen], locks=[[(lock, mode)]]), next_id, committed)
    assert found.accepts(mode, seen) is (len(decision.sequences) == 0)
    if len(decision.sequences):
        assert (found.reason, found.mark) == (decision.reasons[0], decision.conflict_ids[0])
        assert found.is_in_flight is (found.reason is Reason.IN_FLIGHT)


def test_the_four_things_that_can_be_known_of_a_lock() -> None:
    table = LockTable(1, -1)

    def look(lock: int) -> tuple[int, Reason, bool, int | None]:
        found = explained(table, lock, committed=0, low_mark=-1, last_id=1)
        return found.mark, found.reason, found.is_exact, found.marker

    assert look(1) == (-1, Reason.OWNER_CHANGED, True, None), "nothing has marked it, and nothing can have"
    table.decide(batch_of(b"", locks=[[(1, WRITE)]]), 0, -1)
    assert look(1) == (0, Reason.CONFLICT, True, 0)
    table.decide(batch_of(b"", locks=[[(2, APPEND)]]), 1, 0)
    assert look(2) == (1, Reason.IN_FLIGHT, True, 1)
    assert look(1) == (0, Reason.TOO_FAR_BEHIND, False, None), "it was pushed out; an estimate names no transaction"
    table = LockTable(1, 5)
    assert look(1) == (5, Reason.OWNER_CHANGED, False, None)


def test_to_look_changes_nothing() -> None:
    table = LockTable(2, -1)
    table.decide(batch_of(b"", b"", locks=[[(1, WRITE)], [(2, WRITE)]]), 0, -1)
    table.explain(1, 1)
    table.decide(batch_of(b"", locks=[[(3, WRITE)]]), 2, 1)
    assert table.explain(1, 2) == (0, Reason.TOO_FAR_BEHIND), "it is still the oldest that goes"


def test_a_pipeline_explains_and_one_that_has_ended_does_not() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a", marks=6, locks=[[(1 << 63, WRITE)]]))
        await room.quiet()
        found = room.pipe.explain(1 << 63)
        assert (found.mark, found.reason, found.committed, found.last_id) == (7, Reason.IN_FLIGHT, 6, 7)
        assert (found.low_mark, found.floor, found.locks, found.session) == (6, 6, 1, 11)
        assert room.pipe.explain(2).reason is Reason.OWNER_CHANGED
        assert to_value(LockExplanation, to_message(wire.LockExplanation, found)) == found
        room.session.commit(7)
        assert room.pipe.explain(1 << 63).reason is Reason.CONFLICT
        room.pipe.close(SessionEnded("over"))
        with pytest.raises(SessionEnded):
            room.pipe.explain(1)

    in_room(test, lambda: slow(next_id=7))


def test_a_reason_that_is_not_known() -> None:
    with pytest.raises(BadFrame, match="unknown value 77 of the field `reason`"):
        to_value(LockExplanation, wire.LockExplanation(reason=77))


def test_an_id_is_an_integer_a_text_or_a_uuid() -> None:
    uuid = UUID("12345678-1234-5678-1234-567812345678")
    assert f"{write_lock('account.eur', 7).hash:016x}" == "9b0822cbb86f5805", "clients in other languages compute the same"
    assert f"{write_lock('seat', '12A').hash:016x}" == "7b71356e9a95e4cd"
    assert write_lock("order", uuid).hash == write_lock("order", str(uuid)).hash
    assert write_lock("order", 7).hash != write_lock("order", "7").hash
    assert read_lock("b", "a").hash != read_lock("ab", "").hash, "where the id ends belongs to it"
    ids: list[LockId] = [7, "7", "", uuid]
    assert len({append_lock("order", id).hash for id in ids} | {append_lock("orders", id).hash for id in ids}) == 8

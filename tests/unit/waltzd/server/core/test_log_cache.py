"""The tail against a plain list: what is read from it is what was put in, what is not committed is never evicted, and a
batch is never cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import batches_of
from tests.unit.mounting import piece_of
from waltzd.disk.seam import Buffer
from waltzd.format.batch import Batch, End, Piece
from waltzd.format.record import NO_TIME, Run, encode_payloads, join_runs
from waltzd.server.core.log_cache import LogCache

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 300), min_size=1, max_size=6)),
        st.tuples(st.just("batch"), st.lists(st.integers(0, 300), min_size=1, max_size=6)),
        st.tuples(st.just("commit"), st.integers(0, 100)),
        st.tuples(st.just("read"), st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(1, 2000))),
        st.tuples(st.just("send"), st.tuples(st.integers(0, 100), st.integers(1, 2000))),
        st.tuples(st.just("find"), st.integers(0, 40)),
    ),
    max_size=40,
)


@given(steps=STEPS, bytes_max=st.integers(0, 4000), first_id=st.integers(0, 5))
def test_a_tail_is_a_list_whose_committed_start_may_be_gone(
    steps: list[tuple[str, object]], bytes_max: int, first_id: int
) -> None:
    """Runs first, and from some id on batches."""
    tail = LogCache(first_id, bytes_max)
    records: dict[int, bytes] = {}
    pieces: list[Piece] = []
    for number, (kind, what) in enumerate(steps):
        if kind in ("append", "batch"):
            assert isinstance(what, list)
            payloads = [bytes([n % 256]) * n for n in what]
            is_batch = kind == "batch" or tail.end is not None
            piece = piece_of(tail, payloads, time=number // 2 if is_batch else None)
            tail.append(piece)
            pieces.append(piece)
            run = piece if isinstance(piece, Run) else piece.run
            records |= {run.first_id + n: bytes(run.part(n, n + 1).data) for n in range(len(run))}
        elif kind == "commit":
            assert isinstance(what, int)
            ends = [tail.committed, *(piece.last_id for piece in pieces if piece.last_id > tail.committed)]
            tail.commit(ends[what * (len(ends) - 1) // 100])
        elif kind == "read":
            assert isinstance(what, tuple)
            low, high, size = what
            at = tail.first_id + low * (tail.next_id - tail.first_id) // 101
            until = at + high * (tail.next_id - at) // 100
            runs = tail.runs_from(at, until, size)
            if at >= tail.next_id or until < at:
                assert runs == []
            else:
                joined = join_runs(runs)
                assert joined.first_id == at
                assert joined.last_id <= until
                assert len(joined) == 1 or len(joined.data) <= size
                assert bytes(joined.data) == b"".join(records[n] for n in range(at, joined.last_id + 1))
                times = {id_: _time(piece) for piece in pieces for id_ in range(piece.first_id, piece.last_id + 1)}
                told = [NO_TIME] * len(joined) if joined.times is None else joined.times.tolist()
                assert told == [times[id_] for id_ in range(at, joined.last_id + 1)]
        elif kind == "send":
            assert isinstance(what, tuple)
            _sends_all(tail, pieces, *what)
        else:
            assert isinstance(what, int)
            _finds(tail, pieces, what)
        tail.check()
        assert tail.first_id <= tail.committed + 1
        newest = pieces[-1].first_id if pieces else first_id
        assert tail.bytes <= bytes_max + tail.pending_bytes or tail.first_id in (newest, tail.committed + 1)
        assert not records or tail.first_id <= newest, "the newest piece stays"


def _time(piece: Piece) -> int:
    return NO_TIME if isinstance(piece, Run) else piece.head.time


def _sends_all(tail: LogCache, pieces: list[Piece], place: int, size: int) -> None:
    """A replica whose log ends where a piece ends is sent the pieces behind, batches as they are."""
    here = [piece for piece in pieces if piece.first_id >= tail.first_id]
    here = here[place * len(here) // 101 :]
    wanted = b"".join(bytes(part) for piece in here for part in _parts(piece))
    at, sent = here[0].first_id if here else tail.next_id, b""
    while (content := tail.content_from(at, tail.next_id - 1, size)) is not None:
        sending = [content] if isinstance(content, Run) else list(content)
        assert sending, "never less than one"
        assert isinstance(content, Run) or all(batch in here for batch in content), "the batches themselves, whole"
        size_sent = sum(len(part) for one in sending for part in _parts(one))
        is_one = len(sending) == 1 and (isinstance(sending[0], Batch) or len(sending[0]) == 1)
        assert is_one or size_sent <= size
        sent += b"".join(bytes(part) for one in sending for part in _parts(one))
        at = sending[-1].last_id + 1
    assert at == tail.next_id
    assert sent == wanted


def _parts(piece: Piece) -> tuple[Buffer, ...]:
    return (piece.data,) if isinstance(piece, Run) else piece.pieces


def _finds(tail: LogCache, pieces: list[Piece], time: int) -> None:
    mark, is_certain = tail.find_time(time)
    late = [piece for piece in pieces if isinstance(piece, Batch) and piece.head.time >= time]
    if is_certain:
        assert mark == (late[0].first_id if late else tail.next_id) - 1
        before = [piece for piece in pieces if piece.last_id == mark]
        assert not before or isinstance(before[0], Batch)
    else:
        assert mark >= (late[0].first_id if late else tail.next_id) - 1, "a replica may know of one in front of it"


def test_what_is_committed_makes_room() -> None:
    tail = LogCache(0, 5000)
    for n in range(100):
        tail.append(encode_payloads(n, [b"x" * 100]))
    assert tail.first_id == 0, "nothing is committed yet"
    tail.commit(99)
    assert tail.bytes <= 5000
    assert tail.pending_bytes == 0
    assert tail.first_id > 80


def test_batches_follow_upon_each_other() -> None:
    tail = LogCache(5, 1 << 20, End(crc=77, time=50, segment_bytes=1000))
    first = piece_of(tail, [b"a"], time=50)
    assert isinstance(first, Batch)
    assert first.head.before == 77
    tail.append(first)
    second = piece_of(tail, [b"b"], time=60)
    for wrong in (piece_of(LogCache(6, 0, End(crc=1, time=50)), [b"b"], time=60), encode_payloads(6, [b"b"])):
        with pytest.raises(AssertionError):
            tail.append(wrong)
    tail.append(second)
    assert tail.end == second.end(first.end(End(crc=77, time=50, segment_bytes=1000))) if isinstance(second, Batch) else 0


def test_half_of_a_batch_is_never_committed() -> None:
    tail = LogCache(0, 1 << 20, End())
    tail.append(piece_of(tail, [b"a", b"b"], time=1))
    tail.commit(0)
    with pytest.raises(AssertionError, match="whole"):
        tail.check()


def test_locks_come_with_the_records_that_are_asked_for_with_them() -> None:
    tail = LogCache(0, 1 << 20, End())
    for lock in range(3):
        tail.append(piece_of(tail, [b"a", b"b"], time=lock, locks=[[(lock, 2)], [(lock, 1), (99, 3)]]))
    run = tail.joined_from(1, 4, 1 << 20, with_locks=True)
    assert run is not None
    assert run.locks is not None
    assert (run.locks.counts.tolist(), run.locks.ids.tolist()) == ([2, 1, 2, 1], [0, 99, 1, 1, 99, 2])
    plain = tail.joined_from(1, 4, 1 << 20)
    assert plain is not None
    assert plain.locks is None


def test_a_replica_is_not_sent_a_batch_that_it_may_not_have_whole() -> None:
    """What came after a session began to give way waits for the next one."""
    tail = LogCache(0, 1 << 20, End())
    for time in range(3):
        tail.append(piece_of(tail, [b"a", b"b"], time=time))
    assert [batch.last_id for batch in tail.batches_from(0, 3, 1 << 20)] == [1, 3]
    assert [batch.last_id for batch in tail.batches_from(0, 4, 1 << 20)] == [1, 3]
    assert tail.content_from(4, 4, 1 << 20) is None


def test_a_replica_gets_what_is_older_than_batches_by_itself() -> None:
    """A session that gives way to one of format 1 has gathered some of the format before."""
    tail = LogCache(0, 1 << 20)
    for time in (None, None, 5):
        tail.append(piece_of(tail, [b"a", b"b"], time=time))
    older, newer = tail.content_from(1, 5, 1 << 20), tail.content_from(4, 5, 1 << 20)
    assert isinstance(older, Run)
    assert (older.first_id, older.last_id) == (1, 3)
    assert isinstance(newer, tuple)
    assert [(batch.first_id, batch.head.before) for batch in newer] == [(4, 0)]
    run = tail.joined_from(1, 5, 1 << 20)
    assert run is not None
    assert run.times is not None
    assert run.times.tolist() == [NO_TIME] * 3 + [5, 5], "a reader gets all of it"


def test_a_tail_knows_with_which_batch_the_log_ended_where_one_ends() -> None:
    tail, log = LogCache(3, 1 << 20), batches_of([[b"a", b"b"], [b"c"], [b"d", b"e"]], first_id=5)
    tail.append(encode_payloads(3, [b"x", b"y"]))
    for batch in log:
        tail.append(batch)
    found = {id_: tail.end_at(id_) for id_ in range(1, 12)}
    assert found[9] == tail.end
    ended = {id_: (end.crc, end.time) for id_, end in found.items() if end is not None}
    assert ended == {batch.last_id: (batch.head.crc, batch.head.time) for batch in log}


@pytest.mark.parametrize(
    ("id_", "count", "first_id"), [(6, 4, 3), (6, 5, None), (4, 2, 3), (6, 1, 6), (7, 1, None), (2, 1, None)]
)
def test_the_last_records_up_to_an_id_are_given_where_all_of_them_are_in_the_tail(
    id_: int, count: int, first_id: int | None
) -> None:
    tail = LogCache(3, 1 << 20)
    tail.append(encode_payloads(3, [b"a", b"b"]))
    tail.append(encode_payloads(5, [b"c", b"d"]))
    for batch in batches_of([[b"e"]], first_id=7):
        tail.append(batch)
    run = tail.records_up_to(id_, count)
    assert (None if run is None else (run.first_id, run.last_id)) == (None if first_id is None else (first_id, id_))

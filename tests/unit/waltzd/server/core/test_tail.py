"""The tail against a plain list: what is read from it is what was put in, and what is not committed is never evicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from waltzd.format.record import encode_payloads, join_runs
from waltzd.server.core.tail import Tail

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 300), min_size=1, max_size=6)),
        st.tuples(st.just("commit"), st.integers(0, 100)),
        st.tuples(st.just("read"), st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(1, 2000))),
    ),
    max_size=40,
)


@given(steps=STEPS, bytes_max=st.integers(0, 4000), first_id=st.integers(0, 5))
def test_a_tail_is_a_list_whose_committed_start_may_be_gone(
    steps: list[tuple[str, object]], bytes_max: int, first_id: int
) -> None:
    tail = Tail(first_id, bytes_max)
    records: dict[int, bytes] = {}
    newest = first_id
    for kind, what in steps:
        if kind == "append":
            assert isinstance(what, list)
            run = encode_payloads(tail.next_id, [bytes([n % 256]) * n for n in what])
            tail.append(run)
            newest = run.first_id
            for n in range(len(run)):
                records[run.first_id + n] = bytes(run.part(n, n + 1).data)
        elif kind == "commit":
            assert isinstance(what, int)
            span = tail.next_id - 1 - tail.committed
            tail.commit(tail.committed + (what * span // 100))
        else:
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
        assert tail.first_id <= tail.committed + 1
        assert tail.bytes <= bytes_max + tail.pending_bytes or tail.first_id in (newest, tail.committed + 1)
        assert not records or tail.first_id <= newest, "the newest run stays"


def test_what_is_committed_makes_room() -> None:
    tail = Tail(0, 5000)
    for n in range(100):
        tail.append(encode_payloads(n, [b"x" * 100]))
    assert tail.first_id == 0, "nothing is committed yet"
    tail.commit(99)
    assert tail.bytes <= 5000
    assert tail.pending_bytes == 0
    assert tail.first_id > 80

"""A lock that the owner has forgotten is looked for in the log, backwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzctl.records import lock as explaining
from waltzctl.records.append import marked_lock
from waltzctl.records.follow import LOOK_BACK, Groups, stretch
from waltzctl.records.lock import search
from waltzctl.shell.moment import Within
from waltzctl.show.records import LogSearch
from waltzd.client.view import Transaction
from waltzd.errors import BadArgument
from waltzd.protocol.locks import Lock, LoggedLock, Mode

OURS, OTHER = 17, 18
READ, WRITE, APPEND = (LoggedLock(OURS, mode) for mode in (Mode.READ, Mode.WRITE, Mode.APPEND))
ELSE = LoggedLock(OTHER, Mode.WRITE)


@pytest.mark.parametrize(
    ("text", "lock"),
    [
        ("order:17", Lock("order", 17)),
        ("append:order:17", Lock("order", 17)),
        ("write:17", Lock("write", 17)),
        ("seat.Hamlet:12A", Lock("seat.Hamlet", "12A")),
        ("a:b:-5", Lock("a:b", -5)),
        ("0123456789ABCDEF", 0x0123456789ABCDEF),
        ("0123456789abcdef:1", Lock("0123456789abcdef", 1)),
    ],
)
def test_a_lock_whose_mode_does_not_matter(text: str, lock: Lock | int) -> None:
    found = marked_lock(text)
    if isinstance(found, Lock) and isinstance(lock, Lock):
        assert (found.name, found.id, found.hash) == (lock.name, lock.id, lock.hash)
    else:
        assert found == lock


@pytest.mark.parametrize("text", ["", "order", "order:", ":17", "0123456789abcde", "0123456789abcdeg", "order:" + "9" * 20])
def test_what_is_not_a_lock(text: str) -> None:
    with pytest.raises(BadArgument):
        marked_lock(text)


def transaction(
    id_: int, *locks: LoggedLock, time: int | None = 1, follows: bool = False, with_locks: bool = True
) -> Transaction:
    return Transaction(0, id_, 0, 0, 0, (0, 0, id_), b"", None, None, time, follows, locks if with_locks else None)


class Log:
    """A client that reads it, a few at a time."""

    def __init__(self, *transactions: Transaction) -> None:
        self._transactions = transactions
        self.calls = 0

    async def read_some(self, _partition: int, *, after: int, through: int, with_locks: bool) -> Sequence[Transaction]:
        self.calls += 1
        assert -1 <= after < through < len(self._transactions)
        return self._transactions[after + 1 : min(through + 1, after + 4)]

    async def position_at(self, _partition: int, time: int) -> int:
        return next((one.id for one in self._transactions if one.time_us is not None and one.time_us >= time), 10) - 1


def looked(log: Any, last_id: int, count: int = 100) -> LogSearch:
    return asyncio.run(search(log, 0, OURS, last_id, count))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "CHUNK", 4)


def test_the_last_transaction_that_marked_it_is_found() -> None:
    log = Log(*(transaction(id_, *((WRITE,) if id_ in (2, 5) else (READ, ELSE))) for id_ in range(12)))
    found = looked(log, 11)
    assert found.marker is not None
    assert (found.marker.id, found.first_id, found.last_id) == (5, 5, 11)
    found = looked(log, 4)
    assert found.marker is not None
    assert found.marker.id == 2


def test_what_was_searched_is_told_where_nothing_is_found() -> None:
    log = Log(*(transaction(id_, *((APPEND,) if id_ == 2 else (READ,))) for id_ in range(12)))
    assert looked(log, 11, 9) == LogSearch(first_id=3, last_id=11)
    assert looked(log, 11, 10).marker is not None, "an append marks it, too"
    assert looked(log, 1) == LogSearch(first_id=0, last_id=1)


def test_in_front_of_format_1_nothing_is_kept() -> None:
    log = Log(*(transaction(id_, time=None if id_ < 5 else 1) for id_ in range(12)))
    assert looked(log, 11) == LogSearch(first_id=5, last_id=11, is_kept=False)
    assert looked(log, 4) == LogSearch(first_id=5, last_id=4, is_kept=False)


@given(
    st.lists(st.sampled_from([(), (READ,), (WRITE,), (ELSE, APPEND), (ELSE,)]), min_size=1, max_size=30),
    st.integers(1, 35),
    st.data(),
)
def test_a_search_agrees_with_looking_at_everything(
    locks: list[tuple[LoggedLock, ...]], count: int, data: st.DataObject
) -> None:
    last_id = data.draw(st.integers(0, len(locks) - 1))
    lowest = max(0, last_id - count + 1)
    marking = [id_ for id_ in range(lowest, last_id + 1) if {WRITE, APPEND} & set(locks[id_])]
    found = looked(Log(*(transaction(id_, *some) for id_, some in enumerate(locks))), last_id, count)
    assert (found.marker.id if found.marker else None) == (marking[-1] if marking else None)
    assert found.first_id == (marking[-1] if marking else lowest)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_the_first_id_of_a_group_is_found_also_from_its_middle() -> None:
    """Reading may begin anywhere in it; in order, nothing is read twice."""
    log = Log(*(transaction(id_, follows=id_ in (3, 4, 5, 8)) for id_ in range(10)))
    all_ = [transaction(id_, follows=id_ in (3, 4, 5, 8)) for id_ in range(10)]

    async def first_of(ids: Sequence[int]) -> list[int]:
        groups = Groups(log)  # type: ignore[arg-type]
        return [await groups.first_of(all_[id_]) for id_ in ids]

    assert asyncio.run(first_of(range(10))) == [0, 1, 2, 2, 2, 2, 6, 7, 7, 9]
    assert log.calls == 0
    assert asyncio.run(first_of([4, 5, 6])) == [2, 2, 6]
    assert asyncio.run(first_of([8, 4])) == [7, 2]


def test_a_group_of_very_many() -> None:
    many = 2 * LOOK_BACK + 5
    log = Log(*(transaction(id_, follows=id_ > 1) for id_ in range(many)))

    async def ask() -> int:
        return await Groups(log).first_of(transaction(many - 1, follows=True))  # type: ignore[arg-type]

    assert asyncio.run(ask()) == 1


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since", "until", "newest", "span"),
    [
        (None, None, None, (0, 9)),
        (None, None, 3, (7, 9)),
        (30, None, None, (3, 9)),
        (31, 60, None, (4, 5)),
        (31, 60, 1, (5, 5)),
        (31, 60, 5, (4, 5)),
        (95, None, None, (10, 9)),
        (None, 0, None, (0, -1)),
    ],
)
def test_the_ids_of_a_time(since: int | None, until: int | None, newest: int | None, span: tuple[int, int]) -> None:
    log: Any = Log(*(transaction(id_, time=10 * id_) for id_ in range(10)))
    assert asyncio.run(stretch(log, 0, Within(since=since, before=until), 9, newest=newest)) == span

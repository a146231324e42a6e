"""What the log says of a lock that its owner has dropped, of groups and of times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from waltzctl.records.follow import LOOK_BACK, Groups, stretch
from waltzctl.records.lock import can_search, search_log
from waltzctl.shell.moment import Within
from waltzd.client.view import Transaction
from waltzd.errors import BadArgument, NeedsBatches
from waltzd.protocol.locks import History, Lock, LockExplanation, LoggedLock, Mode, Reason, marked_lock
from waltzd.protocol.positions import Position

OURS = 17
WRITE = LoggedLock(OURS, Mode.WRITE)


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


# -- what the log says ------------------------------------------------------------------------------------------------


def explanation(mark: int, reason: Reason = Reason.TOO_FAR_BEHIND) -> LockExplanation:
    return LockExplanation(
        lock=OURS, mark=mark, reason=reason, committed=9, last_id=10, session=1, low_mark=9, floor=-1, locks=1, locks_max=1
    )


class Indexed(Log):
    """A log with key indexes."""

    async def history(
        self, lock: int, *, partition: int, after: int, through: int, limit: int, newest_first: bool
    ) -> History:
        assert (lock, partition, limit, newest_first) == (OURS, 0, 1, True)
        batches = next(one.id for one in self._transactions if one.time_us is not None)
        if after < batches - 1:
            raise NeedsBatches("older transactions are of format 0", first_id=batches)
        ids = [one.id for one in self._transactions if after < one.id <= through and one.locks]
        return History(partition=0, ids=tuple(ids[-1:]), end=Position(through))

    async def read_ids(self, _partition: int, ids: Sequence[int], *, with_locks: bool) -> list[Transaction]:
        return [self._transactions[id_] for id_ in ids]


@pytest.mark.parametrize(
    ("found", "marker"),
    [(explanation(9), 5), (explanation(4), 2), (explanation(1), None), (explanation(5, Reason.CONFLICT), 5)],
)
def test_the_last_transaction_that_marked_it_is_found(found: LockExplanation, marker: int | None) -> None:
    log: Any = Indexed(*(transaction(id_, *((WRITE,) if id_ in (2, 5) else ())) for id_ in range(12)))
    assert can_search(found)
    told = asyncio.run(search_log(log, 0, found))
    assert (told.marker and told.marker.id, told.group, told.last_id) == (marker, marker, found.mark)


@pytest.mark.parametrize(("mark", "marker"), [(9, 5), (4, None), (2, None)])
def test_in_front_of_format_1_nothing_is_kept(mark: int, marker: int | None) -> None:
    log: Any = Indexed(
        *(transaction(id_, *((WRITE,) if id_ == 5 else ()), time=None if id_ < 4 else 1) for id_ in range(12))
    )
    told = asyncio.run(search_log(log, 0, explanation(mark)))
    assert (told.marker and told.marker.id, told.first_id, told.last_id) == (marker, 4, mark)


def test_the_log_knows_no_more_of_what_is_in_flight_or_was_never_there() -> None:
    assert not can_search(explanation(10, Reason.IN_FLIGHT))
    assert not can_search(explanation(-1))


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

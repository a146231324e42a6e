"""Outcomes: what they have in common."""

from __future__ import annotations

from uuid import UUID

import pytest

from waltzd.errors import OutcomeUnknown, TransactionDeclined, TransactionRefused, WaltzError
from waltzd.protocol.locks import Committed, Declined, Outcome, Reason, Rejected, Token, Unknown

OTHER = UUID(int=1)
ALL: list[Outcome] = [
    Committed(5, partition=1),
    Committed(5, 2, partition=1),
    Committed(6, partition=1),
    Committed(5, partition=2),
    Committed(5, partition=1, timeline=OTHER),
    Rejected(Reason.CONFLICT, 5, 7, 1),
    Rejected(Reason.CONFLICT, 5, 7, 2),
    Rejected(Reason.IN_FLIGHT, 5, 7, 1),
    Unknown(1),
    Unknown(2),
    Declined("no money", partition=1),
    Declined("no money", partition=2),
    Declined(partition=1),
]


def test_outcomes_of_two_partitions_are_two() -> None:
    assert len(set(ALL)) == len(ALL)
    assert [[one == other for other in ALL].count(True) for one in ALL] == [1] * len(ALL)
    assert Committed(5) != 5


def test_an_outcome_that_a_test_makes_needs_no_partition() -> None:
    assert Committed(5) == Committed(5, partition=1)
    assert Rejected(Reason.NOT_IN_LOG) == Rejected(Reason.NOT_IN_LOG, partition=3)
    assert Declined("no") == Declined("no", Token(1, 4), 1)
    assert Unknown() == Unknown(2)
    assert hash(Committed(5)) == hash(Committed(5, partition=1))
    assert Committed(5, partition=1, is_applied=True) == Committed(5, partition=1)


@pytest.mark.parametrize("outcome", ALL)
def test_an_outcome_is_neither_true_nor_false(outcome: Outcome) -> None:
    with pytest.raises(TypeError, match=r"use `outcome\.ok`"):
        bool(outcome)
    assert outcome.ok is isinstance(outcome, Committed)


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        (
            Rejected(Reason.CONFLICT, 5, 7, 1),
            TransactionRefused,
            "partition 1 rejected the transaction: CONFLICT, lock 0000000000000007, transaction 5",
        ),
        (Rejected(Reason.NOT_IN_LOG), TransactionRefused, "the partition rejected the transaction: NOT_IN_LOG"),
        (Unknown(3), OutcomeUnknown, "partition 3 did not report the outcome of the transaction in time"),
        (Declined("no money"), TransactionDeclined, "no money"),
        (Declined(), TransactionDeclined, "the command declined, and gave no reason"),
    ],
)
def test_what_is_not_committed_can_be_raised(outcome: Outcome, error: type[WaltzError], message: str) -> None:
    with pytest.raises(error) as raised:
        outcome.or_raise()
    assert raised.value.message == message


def test_what_is_committed_is_returned() -> None:
    committed = Committed(5, partition=1)
    assert committed.or_raise() is committed

"""Every error tells a user what was not done and what to do next, and crosses the wire as what it is."""

from __future__ import annotations

from tests.tiers import together
from waltzd.errors import EXIT_MEANING, WaltzError, explain
from waltzd.errors.operations import tree
from waltzd.wire.codec import detail_of, error_of_detail

ALL = list(tree().values())


@together("cls", ALL)
def test_an_error_is_complete(cls: type[WaltzError]) -> None:
    error = cls("it happened")
    assert cls.exit_code in EXIT_MEANING
    assert len(explain(cls)[0]) > 60, "the docstring is what `waltzctl errors lookup` prints"
    happened, not_done, following = error.lines()
    assert happened == f"{cls.code} it happened"
    assert not_done.startswith("Not done: ")
    assert following.startswith("Next: ")


@together("cls", ALL)
def test_an_error_keeps_its_class_and_its_parts_over_the_wire(cls: type[WaltzError]) -> None:
    sent = cls("it happened", next_step="do this", last_id=7)
    came = error_of_detail(detail_of(sent))
    assert type(came) is cls
    assert (came.lines(), came.facts) == (sent.lines(), {"last_id": "7"})


def test_an_error_of_a_newer_waltz_keeps_its_text() -> None:
    detail = detail_of(ALL[0]("something new", not_done="this", next_step="that"))
    detail.code = "W9999"
    came = error_of_detail(detail)
    assert type(came) is WaltzError
    assert came.message == "unknown error W9999 of a newer version: something new"
    assert (came.detail_not_done, came.detail_next_step) == ("this", "that")

"""What is committed in one open session."""

from __future__ import annotations

from waltzd.server.core.progress import Marks, Progress


def test_the_committed_mark_is_what_a_majority_of_all_members_reached() -> None:
    live = Marks({name: Progress() for name in "ABC"}, ("A",), 4)
    assert not live.acknowledge("A", 9)
    assert live.committed == 4, "one of three"
    assert not live.acknowledge("B", 9), "it has not joined"
    assert live.join("B", 7)
    assert live.committed == 7
    live.lose("A")
    assert not live.acknowledge("A", 12)
    assert live.acknowledge("B", 12) is False
    assert live.committed == 7


def test_what_is_missing_for_a_majority_is_said_by_name() -> None:
    live = Marks({name: Progress() for name in "ABC"}, ("A", "B"), 4)
    assert live.missing(["A", "B"]) == ""
    assert live.missing(["A", "C"]) == "no majority takes appends: B, C of A, B, C do not"

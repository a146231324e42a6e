"""What is committed in one open session."""

from __future__ import annotations

from itertools import combinations

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
    assert live.missing(["A", "C"]) == "no majority of A, B, C takes appends: not B, C"


def test_whatever_confirms_a_session_meets_whatever_could_end_it() -> None:
    """In all cases of up to five members and two learners: who confirms has a member in common with any majority."""
    for size in range(1, 6):
        members, everybody = "ABCDE"[:size], "ABCDE"[:size] + "XY"
        quorums = [set(some) for n in range(size // 2 + 1, size + 1) for some in combinations(members, n)]
        for joined in (some for n in range(size + 1) for some in combinations(members, n)):
            marks = Marks({name: Progress() for name in members}, joined, 4)
            for bound in (some for n in range(size + 3) for some in combinations(everybody, n)):
                meets_all = all(set(bound) & set(joined) & quorum for quorum in quorums)
                assert meets_all or not marks.confirms(bound)
                assert marks.confirms(bound) or not meets_all or size % 2 == 0

"""Comparing replicas by hashes, against a brute force that looks at every record."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import ceil, log2
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.snapshots import held, storage, well
from waltzctl.records import compare
from waltzctl.records.compare import (
    Answers,
    Comparison,
    Question,
    Standing,
    Verdict,
    comparison,
    comparison_page,
    differing_byte,
)
from waltzctl.shell.progress import Shown, Waiting
from waltzctl.show.forms import Line
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.errors import CannotConnect, Trimmed, WaltzError
from waltzd.errors.operations import BadMetadata, PartitionDamaged
from waltzd.format.record import Digest

SAME, DIFFERENT, UNKNOWN = Verdict.SAME, Verdict.DIFFERENT, Verdict.UNKNOWN


class Replicas:
    """They answer at most `reach` records at a time, and not from a damaged one on."""

    def __init__(
        self, logs: Mapping[str, Sequence[int]], *, reach: Mapping[str, int] | None = None, silent: Iterable[str] = ()
    ) -> None:
        self.logs = logs
        self.reach = reach or {}
        self.silent = set(silent)
        self.damaged: dict[str, int] = {}
        self.questions: list[Question] = []

    def compare(self, begin: int = 0) -> dict[str, Standing]:
        talk = comparison({name: len(log) - 1 for name, log in self.logs.items()}, begin)
        try:
            question = next(talk)
            while True:
                question = talk.send(self.answer(question))
        except StopIteration as end:
            found: dict[str, Standing] = end.value
            return found

    def answer(self, question: Question) -> Answers:
        self.questions.append(question)
        return {name: self.digest(name, question) for name in question.replicas}

    def digest(self, name: str, question: Question) -> Digest | WaltzError:
        log, first, last = self.logs[name], question.first_id, question.last_id
        assert 0 <= first <= last < len(log), "nobody is asked for what it does not have"
        if name in self.silent:
            return CannotConnect("nobody answers")
        last = min(last, first + self.reach.get(name, 1 << 60) - 1)
        if name in self.damaged:
            if self.damaged[name] == first:
                return PartitionDamaged("damaged")
            if first < self.damaged[name]:
                last = min(last, self.damaged[name] - 1)
        part = log[first : last + 1]
        return Digest(first_id=first, last_id=last, hash=blake2b(repr(part).encode(), digest_size=16).digest(), bytes=0)


def brute(logs: Mapping[str, Sequence[int]]) -> dict[str, tuple[Verdict, int | None]]:
    """Every record of every replica; ids one after the other. Those that agree with most of the rest go on."""
    found: dict[str, tuple[Verdict, int | None]] = {}
    asked = sorted(logs)
    for id_ in itertools.count():
        for name in [name for name in asked if len(logs[name]) <= id_]:
            found[name] = (SAME, None)
            asked.remove(name)
        if len(asked) < 2:
            break
        groups: dict[int, list[str]] = {}
        for name in asked:
            groups.setdefault(logs[name][id_], []).append(name)
        agreed = max(groups.values(), key=len)
        is_majority = 2 * len(agreed) > len(asked)
        for name in list(asked):
            if not is_majority or name not in agreed:
                found[name] = (DIFFERENT, id_)
                asked.remove(name)
    for name in asked:
        is_alone = all(len(log) == 0 for other, log in logs.items() if other != name)
        found[name] = (UNKNOWN, None) if is_alone else (SAME, None)
    return found


def told(standings: Mapping[str, Standing]) -> dict[str, tuple[Verdict, int | None]]:
    found = {}
    for name, standing in standings.items():
        first, last = standing.difference or (None, None)
        assert first == last, "exact, as long as everybody answers"
        found[name] = (standing.verdict, first)
    return found


@pytest.mark.parametrize("reach", [None, 1, 2, 3])
@pytest.mark.parametrize("size", range(6))
def test_every_pair_of_small_logs(size: int, reach: int | None) -> None:
    for other in range(6):
        for flips in itertools.product((0, 1), repeat=min(size, other)):
            logs = {"a": [0] * size, "b": [*flips, *[0] * (other - len(flips))]}
            replicas = Replicas(logs, reach={"a": reach, "b": 2} if reach else None)
            assert told(replicas.compare()) == brute(logs), logs


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    flips=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=1),
    reach=st.lists(st.integers(1, 13), min_size=4, max_size=4),
)
def test_up_to_four_replicas_one_of_which_differs(sizes: list[int], flips: list[tuple[int, int]], reach: list[int]) -> None:
    names = "abcd"[: len(sizes)]
    logs = {name: [0] * size for name, size in zip(names, sizes, strict=True)}
    for number, at in flips:
        if number < len(sizes) and at < sizes[number]:
            logs[names[number]][at] = 1
    found = Replicas(logs, reach=dict(zip("abcd", reach, strict=True))).compare()
    assert told(found) == brute(logs)
    for name, standing in found.items():
        if standing.verdict is SAME:
            others = [len(log) for other, log in logs.items() if other != name and found[other].verdict is not DIFFERENT]
            assert standing.compared <= len(logs[name]) - 1
            assert standing.compared >= min(len(logs[name]), max(others, default=0)) - 1


@pytest.mark.parametrize("at", [0, 1, 499, 500, 999])
def test_a_difference_is_found_in_logarithmically_many_exchanges(at: int) -> None:
    logs = {name: [0] * 1000 for name in "abc"}
    logs["b"][at] = 1
    replicas = Replicas(logs)
    found = replicas.compare()
    assert {name: standing.verdict for name, standing in found.items()} == {"a": SAME, "b": DIFFERENT, "c": SAME}
    assert found["b"].difference == (at, at)
    assert found["b"].compared == at - 1
    assert found["a"].compared == found["c"].compared == 999
    assert len(replicas.questions) <= 1 + ceil(log2(1000))


def test_logs_that_are_the_same_take_one_question() -> None:
    replicas = Replicas({name: list(range(100)) for name in "abc"})
    assert all(standing.verdict is SAME and standing.compared == 99 for standing in replicas.compare().values())
    assert replicas.questions == [Question(("a", "b", "c"), 0, 99)]


def test_who_is_behind_is_compared_as_far_as_it_has_come() -> None:
    found = Replicas({"a": [0] * 10, "b": [0] * 4, "c": []}).compare()
    assert [found[name].verdict for name in "abc"] == [SAME, SAME, SAME]
    assert [found[name].compared for name in "abc"] == [3, 3, -1]


def test_of_two_that_differ_nobody_knows_which_is_right() -> None:
    found = Replicas({"a": [0, 0, 0], "b": [0, 1, 0]}).compare()
    assert [(standing.verdict, standing.difference) for standing in found.values()] == [(DIFFERENT, (1, 1))] * 2


def test_one_that_does_not_answer_is_unknown_and_the_others_are_compared() -> None:
    found = Replicas({"a": [0] * 9, "b": [0] * 9, "c": [0] * 9}, silent="b").compare()
    assert [found[name].verdict for name in "abc"] == [SAME, UNKNOWN, SAME]
    assert isinstance(found["b"].error, CannotConnect)
    assert found["a"].compared == 8
    found = Replicas({"a": [0] * 9, "b": [0] * 9}, silent="ab").compare()
    assert [found[name].verdict for name in "ab"] == [UNKNOWN, UNKNOWN]
    found = Replicas({"a": [0] * 9, "b": [0] * 9}, silent="b").compare()
    assert [found[name].verdict for name in "ab"] == [UNKNOWN, UNKNOWN], "there is nobody to compare it with"


def test_what_stands_in_front_of_damage_is_compared() -> None:
    replicas = Replicas({"a": [0] * 9, "b": [0] * 9, "c": [0] * 9})
    replicas.damaged = {"c": 5}
    found = replicas.compare()
    assert (found["c"].verdict, found["c"].compared) == (UNKNOWN, 4)
    assert isinstance(found["c"].error, PartitionDamaged)
    assert (found["a"].verdict, found["a"].compared) == (SAME, 8)


def test_who_falls_silent_in_the_middle_of_a_search_leaves_a_range() -> None:
    class Fainting(Replicas):
        def digest(self, name: str, question: Question) -> Digest | WaltzError:
            if name == "b" and len(self.questions) > 3:
                return CannotConnect("gone")
            return super().digest(name, question)

    logs = {"a": [0] * 64, "b": [0] * 64, "c": [0] * 64}
    logs["b"][40] = 1
    found = Fainting(logs).compare()
    assert (found["b"].verdict, found["b"].difference, found["b"].compared) == (DIFFERENT, (32, 47), 31)
    assert isinstance(found["b"].error, CannotConnect)
    assert found["a"].verdict is SAME


@pytest.mark.parametrize(
    ("payloads", "at"),
    [([b"abc", b"abd"], 2), ([b"abc", b"ab"], 2), ([b"", b""], None), ([b"x", b"x"], None), ([b"a", b"a", b"b"], 0)],
)
def test_the_first_byte_that_differs(payloads: list[bytes], at: int | None) -> None:
    assert differing_byte(payloads) == at


@pytest.mark.parametrize("begin", [0, 1, 3, 7])
def test_what_is_trimmed_is_not_asked_for(begin: int) -> None:
    logs = {"a": [0] * 7, "b": [0] * 7, "c": [0] * 6}
    logs["c"][5] = 1
    replicas = Replicas(logs)
    found = replicas.compare(begin)
    assert all(question.first_id >= begin for question in replicas.questions)
    assert {name: one.verdict for name, one in found.items()} == {
        "a": SAME, "b": SAME, "c": UNKNOWN if begin > 6 else DIFFERENT
    }  # fmt: skip


class Answering:
    """The admin port of a storage that hashes what it holds, and not below its floor."""

    floors: ClassVar[Mapping[str, int]] = {}

    def __init__(self, *_: object, name: str, **__: object) -> None:
        self._name = name

    async def __aenter__(self) -> Answering:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def digest(self, _partition: int, first_id: int, last_id: int) -> Digest:
        if first_id < self.floors.get(self._name, 0):
            raise Trimmed("trimmed")
        return Digest(first_id=first_id, last_id=last_id, hash=b"the same", bytes=1)


def compared(monkeypatch: pytest.MonkeyPatch, snapshot: ClusterSnapshot) -> Comparison:
    async def take(*_: object, **__: object) -> ClusterSnapshot:
        return snapshot

    monkeypatch.setattr(compare, "take_snapshot", take)
    monkeypatch.setattr(compare, "AdminClient", Answering)
    nowhere: Any = SimpleNamespace(coordinator=None, tls=None)
    return asyncio.run(compare._compare(nowhere, nowhere, 0, (), 1.0, Waiting(Shown.OFF)))


def test_replicas_that_were_trimmed_are_compared_above_their_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    floors = {"s1": 40, "s2": 60, "s3": 0}
    monkeypatch.setattr(Answering, "floors", floors)
    storages = tuple(storage(name, assigned=(held(0, floor=floor),)) for name, floor in floors.items())
    found = compared(monkeypatch, well(storages=storages))
    assert (found.exit_code, found.first_id) == (0, 60)
    (said, *_) = comparison_page(found).page or ()
    assert isinstance(said, Line)
    assert said.text.endswith("3 replicas hold the same, from id 60 up to id 99")


def test_a_replica_on_a_storage_without_a_readable_document_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path, unreadable = "/storages/s3", BadMetadata("no JSON")
    without = well(storages=(storage("s1"), storage("s2")))
    for snapshot in (without, replace(without, unreadable={path: unreadable})):
        found = compared(monkeypatch, snapshot)
        assert found.exit_code == 7
        assert [one.standing.verdict for one in found.replicas] == [SAME, SAME, UNKNOWN]
    assert found.replicas[2].standing.error is unreadable


def test_a_partition_without_known_replicas_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = tuple(replace(one, replicas={}) for one in well().partitions)
    assert compared(monkeypatch, well(partitions=unknown)).exit_code == 7

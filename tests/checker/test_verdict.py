"""The checker accepts what a sound log leaves, notices every kind of wrong, and agrees with its dumb twin."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checker.history import (
    FINAL,
    BadHistory,
    History,
    LogRecord,
    Observed,
    Operation,
    Seen,
    Standing,
    Writer,
    load,
    save,
)
from tests.checker.sample import sample
from tests.checker.twin import judge_slowly
from tests.checker.verdict import EXPLAINED, _locks, judge

LOCK, OTHER = 0xA, 0xB


def ask(number: int, mark: int, *, at: int, **fields: object) -> Operation:
    """Attempt `k<number>`; its checksum is 100 + number."""
    values: dict[str, object] = {"key": f"k{number}", "client": "ann", "partition": 0, "crc": 100 + number, **fields}
    return Operation(invoked=at, mark=mark, **values)  # type: ignore[arg-type]


def committed(number: int, mark: int, id: int, *, at: int, **fields: object) -> Operation:
    return ask(number, mark, at=at, returned=at + 5, kind="committed", id=id, **fields)


def story() -> History:
    """Four transactions that race for a lock, one refused, one lost with its connection, one that nobody heard of again."""
    operations = [
        committed(0, -1, 0, at=0, write=(LOCK,)),
        committed(1, 0, 1, at=10, read=(LOCK,), write=(OTHER,)),
        ask(2, -1, at=20, write=(LOCK,), returned=25, kind="rejected", reason="CONFLICT", conflict=0, lock=LOCK),
        ask(3, 1, at=30, append=(LOCK,)),
        ask(4, 1, at=31, append=(LOCK,)),
        committed(5, 2, 3, at=50, write=(LOCK,)),
        committed(6, 1, 4, at=60, read=(OTHER,)),
        committed(7, 4, 5, at=80, write=(LOCK,), together="k7", time_seen=2),
        committed(8, 4, 6, at=80, write=(LOCK,), together="k7", time_seen=2),
    ]
    history = History(operations=operations, observed=[Observed("bob", 0, 70, 75, 4)])
    locks = {one.key: _locks(one) for one in operations}
    history.log(
        0,
        [
            LogRecord(f"k{number}", 100 + number, 0, generation, generation, number == 8, tuple(locks[f"k{number}"]))
            for number, generation in STORY
        ],
    )
    rows = [(id, f"k{number}", 100 + number) for id, (number, _) in enumerate(STORY)]
    history.seen = [
        Seen("reader", 0, -1, rows[:2]),
        Seen("reader", 0, 0, rows[1:5]),
        Seen("view", 0, 4, rows[5:], times=[2, 2], is_whole=True),
    ]
    history.log(0, [LogRecord("k0", 100, 0, 1, 1)], source="storage 1")
    return history


STORY = [(0, 1), (1, 1), (3, 1), (5, 2), (6, 2), (7, 2), (8, 2)]
"""The log of the story: number of the attempt, generation of the owner, which stands for the time, too. The last two belong
together."""


def put(history: History, id: int, **changes: object) -> None:
    ids = history.logs[FINAL][0]
    ids[id] = dataclasses.replace(ids[id], **changes)  # type: ignore[arg-type]


def change(history: History, number: int, **changes: object) -> None:
    for name, value in changes.items():
        setattr(history.operations[number], name, value)


def remove(history: History, id: int) -> None:
    """The record is gone and what was behind it has moved up."""
    ids = history.logs[FINAL][0]
    records = [record for at, record in sorted(ids.items()) if at != id]
    history.logs[FINAL][0] = dict(enumerate(records))


def swap(history: History, one: int, two: int) -> None:
    ids = history.logs[FINAL][0]
    ids[one], ids[two] = ids[two], ids[one]


def forget_the_seen(change: Callable[[History], None]) -> Callable[[History], None]:
    def mutate(history: History) -> None:
        history.seen.clear()
        change(history)

    return mutate


MUTATIONS: dict[str, tuple[str, Callable[[History], object]]] = {
    "the first acknowledged record is gone": ("lost", forget_the_seen(lambda h: remove(h, 0))),
    "one in the middle is gone": ("lost", forget_the_seen(lambda h: remove(h, 1))),
    "the last is gone": ("lost", forget_the_seen(lambda h: remove(h, 6))),
    "the whole log is gone": ("lost", lambda h: h.logs.clear()),
    "a hole": ("gap", lambda h: h.logs[FINAL][0].pop(1)),
    "two have changed places": ("moved", lambda h: swap(h, 3, 4)),
    "a record of another partition": ("moved", lambda h: change(h, 3, partition=1)),
    "another payload": ("altered", lambda h: put(h, 1, crc=1)),
    "another header": ("altered", lambda h: put(h, 1, header=9)),
    "one more of the same": ("duplicate", lambda h: h.log(0, [LogRecord("k1", 101, 0, 2, 2)], first=7)),
    "the same in another partition": ("duplicate", lambda h: h.log(1, [LogRecord("k1", 101, 0, 2)])),
    "nobody asked for it": ("phantom", lambda h: h.log(0, [LogRecord("k9", 0, 0, 2, 2)], first=7)),
    "the refused one is there": ("rejected present", lambda h: h.log(0, [LogRecord("k2", 102, 0, 2, 2)], first=7)),
    "the one that was called off is there": ("rejected present", lambda h: change(h, 3, kind="declined")),
    "a lock was marked after what was seen": ("lock", lambda h: change(h, 5, mark=1)),
    "a read lock was marked after what was seen": ("lock", lambda h: change(h, 1, mark=-1)),
    "an append lock marks": ("lock", lambda h: change(h, 5, mark=0)),
    "a client from the future": ("mark ahead", lambda h: change(h, 1, mark=1)),
    "acknowledged, then overtaken": ("real time", lambda h: change(h, 5, invoked=66)),
    "observed, then overtaken": ("real time", lambda h: h.observed.append(Observed("bob", 0, 40, 45, 3))),
    "a mark below what was acknowledged": ("observed", lambda h: h.observed.append(Observed("bob", 0, 70, 75, 3))),
    "a mark above the log": ("observed", lambda h: h.observed.append(Observed("bob", 0, 90, 95, 7))),
    "an unconfirmed mark below what its own client was told": (
        "observed",
        lambda h: h.observed.append(Observed(h.operations[5].client, 0, 90, 95, 1, is_confirmed=False)),
    ),
    "an unconfirmed mark went back": (
        "observed",
        lambda h: h.observed.extend(
            [Observed("eve", 0, 70, 72, 4, is_confirmed=False), Observed("eve", 0, 75, 80, 2, is_confirmed=False)]
        ),
    ),
    "fed, then overtaken": ("real time", lambda h: setattr(h.seen[1], "at", 1)),
    "two of a group were given different ones": (
        "group",
        lambda h: h.seen.extend([Seen("one", 0, -1, [(0, "k1", 1)], -1, "g"), Seen("two", 0, -1, [(0, "k9", 1)], -1, "g")]),
    ),
    "an old owner still writes": ("generation", lambda h: put(h, 4, generation=1)),
    "a reader missed one": ("feed", lambda h: h.seen[1].records.pop(1)),
    "a reader got one twice": ("feed", lambda h: h.seen[1].records.insert(1, h.seen[1].records[0])),
    "a reader got another": ("feed", lambda h: h.seen[1].records.__setitem__(1, (2, "k4", 104))),
    "a reader got damaged bytes": ("feed", lambda h: h.seen[1].records.__setitem__(1, (2, "k3", 1))),
    "a reader got what was taken back": ("feed", lambda h: h.seen[1].records.append((5, "k4", 104))),
    "a reader started too far": ("feed", lambda h: setattr(h.seen[1], "start", 1)),
    "refused for a lock that nobody has": ("false conflict", lambda h: change(h, 2, write=(OTHER,), lock=OTHER)),
    "refused for what was seen": ("false conflict", lambda h: change(h, 2, mark=0)),
    "refused for what is not there": ("false conflict", lambda h: change(h, 2, conflict=7)),
    "refused for a lock that it did not name": ("false conflict", lambda h: change(h, 2, lock=OTHER)),
    "half a group is there": ("torn apart", forget_the_seen(lambda h: remove(h, 6))),
    "another stands between the two of a group": ("torn apart", forget_the_seen(lambda h: swap(h, 4, 5))),
    "a group has two outcomes": ("torn apart", lambda h: change(h, 8, kind="unknown")),
    "a view took the first of a group": ("half a group", lambda h: h.seen[2].records.pop()),
    "a view took the second of a group": (
        "half a group",
        lambda h: h.seen.append(dataclasses.replace(h.seen[2], start=5, records=h.seen[2].records[1:])),
    ),
    "a time is before the one in front": ("time fell", lambda h: put(h, 2, time=0)),
    "behind a time comes none": ("time fell", lambda h: put(h, 6, time=-1)),
    "a reader was given a time that is too low": ("time fell", lambda h: setattr(h.seen[2], "times", [2, 1])),
    "a reader was given another time": ("two times", lambda h: setattr(h.seen[2], "times", [2, 3])),
    "a replica holds another time": ("two times", lambda h: h.log(0, [LogRecord("k0", 100, 0, 1, 7)], source="storage 1")),
    "an effect before its cause": ("cause", lambda h: change(h, 7, time_seen=3)),
    "a lock that nobody asked for": ("other locks", lambda h: put(h, 1, locks=((LOCK, 1), (OTHER, 1)))),
    "a lock is missing": ("other locks", lambda h: put(h, 1, locks=())),
    "it goes on with no group": ("other locks", lambda h: put(h, 4, follows=True)),
    "two of a group stand by themselves": ("other locks", lambda h: put(h, 6, follows=False)),
    "an instance that was replaced gets one in": (
        "zombie",
        lambda h: h.standings.extend([Standing("app", "ann", 0, 4, -1), Standing("app", "eve", 0, 5, 3)]),
    ),
    "the newer one of two that replaced it came first": (
        "zombie",
        lambda h: h.standings.extend(
            [Standing("app", "ann", 0, 4, -1), Standing("app", "bob", 0, 5, 9), Standing("app", "eve", 0, 6, 3)]
        ),
    ),
    "a replica differs": ("replica", lambda h: h.log(0, [LogRecord("k4", 104, 0, 1)], source="storage 1")),
}


def test_the_story_is_sound() -> None:
    verdict = judge(story())
    assert verdict.findings == ()
    assert str(verdict) == (
        "sound: 9 attempts, 6 committed, 1 rejected, 2 unknown, 0 declined, 1 of the unknown in the log, 7 records, 8 fed"
    )


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_kind_of_wrong_is_noticed(name: str) -> None:
    kind, mutate = MUTATIONS[name]
    history = story()
    mutate(history)
    verdict = judge(history)
    assert kind in {finding.kind for finding in verdict.findings}, str(verdict)
    assert set(verdict.findings) == judge_slowly(history)


def test_every_kind_has_a_mutation() -> None:
    assert {kind for kind, _ in MUTATIONS.values()} == set(EXPLAINED)


@pytest.mark.parametrize(
    ("id", "where"), [(0, "the log holds k1 there"), (6, "behind the end of the log, which is 5")], ids=["front", "end"]
)
def test_a_loss_says_where(id: int, where: str) -> None:
    history = story()
    remove(history, id)
    assert any(finding.kind == "lost" and where in str(finding) for finding in judge(history).findings)


def test_a_report_is_for_people() -> None:
    history = story()
    del history.operations[-2:]
    for id in (6, 5, 4):
        remove(history, id)
    history.seen.clear()
    history.observed.clear()
    assert str(judge(history)).splitlines()[1:] == [
        "  1 × lost: it was acknowledged and is not in the log",
        "    lost: partition 0, id 4, k6: behind the end of the log, which is 3",
    ]


def test_a_report_of_many_findings_stays_short() -> None:
    history = sample(1, 500)
    history.logs.clear()
    lines = str(judge(history)).splitlines()
    assert len(lines) < 100
    assert any("… and" in line for line in lines)


@given(seed=st.integers(0, 1 << 30), size=st.integers(0, 40))
def test_sound_histories_are_sound(seed: int, size: int) -> None:
    history = sample(seed, size)
    assert judge(history).findings == ()
    assert judge_slowly(history) == set()


@st.composite
def damaged(draw: st.DrawFn) -> History:
    """A small sound history in which one to three things were changed at random: some of them harmless."""
    history = sample(draw(st.integers(0, 1 << 30)), draw(st.integers(3, 9)), partitions=2, locks=2, lag=2)
    for _ in range(draw(st.integers(1, 3))):
        operation = draw(st.sampled_from(history.operations))
        ids = history.logs[FINAL][draw(st.integers(0, 1))]
        match draw(st.integers(0, 13)):
            case 10:
                operation.time_seen = draw(st.integers(-1, 5))
            case 11 if ids:
                record = ids[draw(st.sampled_from(sorted(ids)))]
                record.time, record.follows = draw(st.integers(-1, 5)), draw(st.sampled_from([True, False, None]))
            case 12:
                operation.together = draw(st.sampled_from(["", operation.key, history.operations[0].key]))
            case 13 if history.seen:
                seen = draw(st.sampled_from(history.seen))
                seen.times = [draw(st.integers(-1, 5)) for _ in seen.times]
                seen.is_whole, seen.records = True, seen.records[draw(st.integers(0, 2)) :]
            case 0:
                operation.mark = draw(st.integers(-1, 6))
            case 1:
                operation.write = (draw(st.integers(0, 1)),)
            case 2:
                operation.invoked = draw(st.integers(0, 300))
            case 3 if operation.returned is not None:
                operation.returned = draw(st.integers(0, 300))
            case 4 if operation.kind == "committed":
                operation.id = draw(st.integers(0, 6))
            case 5:
                operation.kind, operation.reason, operation.conflict = "rejected", "CONFLICT", draw(st.integers(-1, 6))
            case 6 if ids:
                ids.pop(draw(st.sampled_from(sorted(ids))))
            case 7:
                record = LogRecord(operation.key, operation.crc, operation.header, draw(st.integers(-1, 2)))
                ids[draw(st.integers(0, 6))] = record
            case 8:
                history.observed.append(
                    Observed(
                        draw(st.sampled_from(["bob", "client 1", "client 2"])),
                        draw(st.integers(0, 1)),
                        at := draw(st.integers(0, 300)),
                        at + 5,
                        draw(st.integers(-1, 6)),
                        draw(st.booleans()),
                    )
                )
            case 10:
                history.standings.append(
                    Standing(
                        draw(st.sampled_from(["app", "other"])),
                        draw(st.sampled_from(["client 0", "client 1", "client 2"])),
                        draw(st.integers(0, 1)),
                        draw(st.integers(1, 3)),
                        draw(st.integers(-1, 6)),
                    )
                )
            case 9 if history.seen:
                seen = draw(st.sampled_from(history.seen))
                match draw(st.integers(0, 2)):
                    case 0:
                        seen.start = draw(st.integers(-1, 3))
                    case 1:
                        seen.at = draw(st.integers(-1, 300))
                    case _:
                        seen.records.insert(0, (draw(st.integers(0, 6)), operation.key, 1))
                        seen.group = draw(st.sampled_from(["", "a group"]))
            case _:
                operation.partition = draw(st.integers(0, 1))
    return history


@settings(max_examples=600)
@given(damaged())
def test_the_checker_agrees_with_its_twin(history: History) -> None:
    assert set(judge(history).findings) == judge_slowly(history)


def test_large_histories_take_no_more_than_a_pass() -> None:
    history = sample(7, 20_000, partitions=4, clients=8, locks=5000, lag=40)
    verdict = judge(history)
    assert verdict.is_sound
    assert verdict.counts["records"] > 10_000


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_history_survives_its_files(tmp_path: Path) -> None:
    history = sample(3, 60)
    history.standings.append(Standing("app", "client 1", 0, 3, 7))
    save(history, tmp_path / "all.jsonl")
    assert load([tmp_path / "all.jsonl"]) == history


def test_lines_of_several_processes_are_one_history(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "client.jsonl")
    operation = ask(0, -1, at=3)
    writer.invoked(operation)
    writer.returned(dataclasses.replace(operation, returned=9, kind="committed", id=0))
    writer.close()
    reader = Writer(tmp_path / "reader.jsonl")
    reader.seen(Seen("reader", 0, -1, [(0, "k0", 100)]))
    reader.log(0, [LogRecord("k0", 100)])
    reader.close()
    verdict = judge(load(tmp_path.iterdir()))
    assert verdict.is_sound
    assert (verdict.counts["committed"], verdict.counts["fed"]) == (1, 1)


def test_a_process_that_was_killed_leaves_an_unknown_attempt_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "client.jsonl"
    writer = Writer(path)
    writer.invoked(ask(0, -1, at=3))
    writer.close()
    with path.open("a") as file:
        file.write('{"type":"return","key":"k0","at":9,"ki')
    (operation,) = load([path]).operations
    assert (operation.kind, operation.returned) == ("unknown", None)


INVOKE = '{"type":"invoke","at":1,"key":"k","client":"a","partition":0,"mark":-1,"read":[],"write":[],"append":[]}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (INVOKE + INVOKE, "the key k was used for two attempts"),
        ('{"type":"return","key":"k","at":1,"kind":"unknown"}\n', "k returned and was never invoked"),
        (INVOKE + '{"type":"return","key":"k","at":1}\n' * 2, "k returned twice"),
        ('{"type":"song"}\n', "no such type of line: song"),
        ('{"type":"seen"}\n', "line 1"),
        ("nonsense\n", "line 1"),
    ],
)
def test_what_is_no_evidence_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(lines)
    with pytest.raises(BadHistory, match=message):
        load([tmp_path / "x.jsonl"])


# -- the command ---------------------------------------------------------------------------------------------------------


def judged(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checker", *arguments], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_recorded_history_can_be_judged_later(tmp_path: Path) -> None:
    save(sample(3, 50), tmp_path / "one.jsonl")
    assert judged(str(tmp_path))[0] == 0
    with Writer(tmp_path / "two.jsonl") as writer:
        writer.log(7, [LogRecord("nobody asked for it", 1)])
    code, said = judged(str(tmp_path))
    assert code == 1
    assert "phantom: partition 7, id 0" in said


def test_what_is_no_history_is_said_so(tmp_path: Path) -> None:
    assert judged(str(tmp_path)) == (2, f"no history: there is no .jsonl file in {tmp_path}\n")
    (tmp_path / "bad.jsonl").write_text("{}\n", encoding="utf-8")
    code, said = judged(str(tmp_path / "bad.jsonl"))
    assert code == 2
    assert said.startswith("no history: bad.jsonl, line 1: ")

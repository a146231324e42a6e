"""Lines name the hash of the line in front, and refusals without end make few of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.tiers import together
from waltzd.protocol import audit
from waltzd.protocol.audit import START, AuditRecord, RefusalCounter, encode, spans

DEED = AuditRecord(
    who="waltz://k/role/operator/ann", peer="10.0.0.1:7", what="StorageAdmin/Fence", partitions="0",
    about='session=9 "\n\u2028',
)  # fmt: skip


def test_a_line_is_one_object_of_json() -> None:
    text = encode(DEED, time_ms=7, before=START)
    assert "\n" not in text
    assert json.loads(text) == {
        "time_ms": 7, "who": DEED.who, "peer": DEED.peer, "what": DEED.what, "partitions": "0", "about": DEED.about,
        "result": "done", "code": None, "times": 1, "before": START,
    }  # fmt: skip
    refused = json.loads(encode(replace(DEED, code="W2024", times=17), time_ms=7, before=START))
    assert (refused["result"], refused["code"], refused["times"]) == ("refused", "W2024", 17)


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = AuditRecord(
    who="eve", peer="10.0.0.9:1", what="StorageAdmin/Fence", partitions="3", about="session=1", code="W2024"
)


def test_the_first_is_told_and_then_a_count() -> None:
    refusals = RefusalCounter()
    assert refusals.record(REFUSED, 0) == [REFUSED]
    for number in range(1, 1000):
        assert refusals.record(replace(REFUSED, peer=f"10.0.0.9:{number}"), number) == []
    assert refusals.expired(59_999) == []
    (count,) = refusals.expired(60_000)
    assert (count.times, count.peer, count.partitions, count.code) == (999, "10.0.0.9:999", "", "W2024")
    assert refusals.record(REFUSED, 60_001) == [REFUSED], "a new minute"
    assert refusals.expired(10**9) == [], "there was only one"


def test_each_name_call_and_code_is_counted_apart() -> None:
    refusals = RefusalCounter()
    for other in (
        REFUSED, replace(REFUSED, who="bob"), replace(REFUSED, what="StorageAdmin/Digest"), replace(REFUSED, code="W2002"),
    ):  # fmt: skip
        assert refusals.record(other, 0) == [other]
        assert refusals.record(other, 1) == []
    assert [one.times for one in refusals.expired(2, is_end=True)] == [1, 1, 1, 1]


def test_names_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "NAMES_MAX", 10)
    refusals = RefusalCounter()
    lines = [line for number in range(1000) for line in refusals.record(replace(REFUSED, who=str(number)), number)]
    assert len(lines) == 11
    assert lines[-1].who == "others"
    assert [one.times for one in refusals.expired(10**6)] == [989], "none is forgotten"


@together("seed", range(20))
def test_no_refusal_is_forgotten_and_none_is_counted_twice(seed: int) -> None:
    drawn, refusals, now, told, count = random.Random(seed), RefusalCounter(), 0, 0, 300
    for _ in range(count):
        now += drawn.choice((0, 1, 1000, 70_000))
        one = replace(REFUSED, who=drawn.choice("abc"), code=drawn.choice(("W2024", "W2002")))
        told += sum(line.times for line in refusals.record(one, now))
    assert told + sum(line.times for line in refusals.expired(now, is_end=True)) == count


def test_partitions_in_few_characters() -> None:
    assert spans([7, 0, 1, 2, 3, 3]) == "0-3,7"
    assert spans([]) == ""
    assert len(spans(range(0, 100_000, 2))) <= audit.ABOUT_CHARACTERS_MAX + 1

"""What users may ask for, against a plain filter over all ids, and each way to ask for nonsense."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.log.origin import Catalog, Origin, Span
from waltz_spark.log.selection import EARLIEST, LATEST, Selection, partitions_of, selection_of

from waltzd.errors import BadArgument, BeyondLog, NoSuchPartition, WaltzError

THERE = {0: Span(0, 99), 1: Span(50, 149), 2: Span(0, -1), 7: Span(0, 9)}


def spans(**options: str) -> dict[int, Span]:
    return selection_of({name.lower(): value for name, value in options.items()}).spans(THERE)


def ids(span: Span) -> range:
    return range(span.first, span.last + 1)


def test_everything_is_what_there_is() -> None:
    assert spans() == THERE
    assert spans(startingTxnIds="earliest", endingTxnIds=" Latest ") == THERE


def test_an_ending_is_not_included_as_with_kafka() -> None:
    found = spans(startingTxnIds='{"0": 10, "1": -2}', endingTxnIds='{"0": 20, "1": -1, "7": 0}')
    assert found == {0: Span(10, 19), 1: Span(50, 149), 2: Span(0, -1), 7: Span(0, -1)}


def test_partitions_are_chosen_by_ranges() -> None:
    assert partitions_of("0-3,7") == (0, 1, 2, 3, 7)
    assert partitions_of(" 7 , 0-1,1 ") == (0, 1, 7)
    assert list(spans(partitions="7,0")) == [0, 7]


@given(
    st.dictionaries(st.integers(0, 4), st.tuples(st.integers(0, 30), st.integers(-1, 30)), min_size=1),
    st.dictionaries(st.integers(0, 4), st.integers(-2, 40)),
    st.dictionaries(st.integers(0, 4), st.integers(-2, 40)),
)
def test_spans_are_what_a_filter_would_leave(
    there: dict[int, tuple[int, int]], starting: dict[int, int], ending: dict[int, int]
) -> None:
    log = {number: Span(first, first + count) for number, (first, count) in there.items()}
    starting = {number: id_ for number, id_ in starting.items() if number in log and id_ != LATEST}
    ending = {number: id_ for number, id_ in ending.items() if number in log and id_ != EARLIEST}
    options = {"startingtxnids": json.dumps(starting), "endingtxnids": json.dumps(ending), "failondataloss": "false"}
    first = {n: log[n].first if starting.get(n, EARLIEST) == EARLIEST else starting[n] for n in log}
    end = {n: log[n].last + 1 if ending.get(n, LATEST) == LATEST else ending[n] for n in log}
    if any(end[number] < first[number] and ending.get(number, LATEST) != LATEST for number in log):
        with pytest.raises(BadArgument, match="lies before"):
            selection_of(options).spans(log)
        return
    found = selection_of(options).spans(log)
    assert list(found) == sorted(log)
    for number, span in found.items():
        assert list(ids(span)) == [id_ for id_ in ids(log[number]) if first[number] <= id_ < end[number]]
    is_there = all(log[n].first <= first[n] <= log[n].last + 1 and end[n] <= log[n].last + 1 for n in log)
    strict = {**options, "failondataloss": "true"}
    if is_there:
        assert selection_of(strict).spans(log) == found
    else:
        with pytest.raises(BeyondLog):
            selection_of(strict).spans(log)


def test_times_are_the_ids_that_the_log_has_there() -> None:
    """Half open, as ids are: nothing is read twice, nor left out, where one reading ends and the next begins."""
    asked: list[tuple[int, int]] = []

    def first_at(_catalog: Catalog, partition: int, time: int) -> int:
        asked.append((partition, time))
        return THERE[partition].first + 3

    since, hour = "2026-11-23T14:00", 3_600_000_000
    options = {"startingtime": since, "endingtime": "2026-11-23T16:00+01:00", "partitions": "0-1"}
    found = selection_of(options).timed(
        cast(Origin, SimpleNamespace(first_at=first_at)), Catalog(key=UUID(int=1), spans=THERE, extents=())
    )
    noon = 1_795_435_200_000_000
    assert asked == [(number, noon + hours * hour) for hours in (2, 3) for number in (0, 1)]
    assert found.spans(THERE) == {number: Span(THERE[number].first + 3, THERE[number].first + 2) for number in (0, 1)}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"startingTxnIds": '{"1": 40}'},
            BeyondLog,
            "partition 1: ids 40 to 49 are not there any more; the first id is 50",
        ),
        (
            {"endingTxnIds": '{"0": 101}'},
            BeyondLog,
            "partition 0: endingTxnIds is 101, and the last id that can be read is 99",
        ),
        ({"startingTxnIds": '{"0": 101}'}, BeyondLog, "partition 0: startingTxnIds is 101, and the last id"),
        ({"endingTxnIds": '{"2": 1}'}, BeyondLog, "partition 2: endingTxnIds is 1, and nothing is there to read yet"),
        ({"partitions": "0-3"}, NoSuchPartition, "partitions: there is no partition 3"),
        (
            {"partitions": "0", "startingTxnIds": '{"1": 60}'},
            NoSuchPartition,
            "startingTxnIds names partition 1, which is not",
        ),
        ({"startingTxnIds": '{"0": 9}', "endingTxnIds": '{"0": 8}'}, BadArgument, "endingTxnIds is 8, which lies before 9"),
        ({"startingTxnIds": "latest"}, BadArgument, "startingTxnIds: nothing lies behind the latest id"),
        ({"startingTxnIds": '{"0": -1}'}, BadArgument, "startingTxnIds: nothing lies behind the latest id"),
        ({"endingTxnIds": "earliest"}, BadArgument, "endingTxnIds: nothing lies before the earliest id"),
        ({"startingTime": "noon"}, BadArgument, "startingTime is 'noon', which is no time"),
        ({"endingTime": "2h"}, BadArgument, "endingTime is '2h', which is no time"),
        ({"startingTime": "2026-11-23", "startingTxnIds": "earliest"}, BadArgument, "say the same thing twice"),
        ({"startingTime": "2026-11-23", "endingTime": "2026-11-22"}, BadArgument, "endingTime lies before startingTime"),
        ({"startingTxnIds": "100"}, BadArgument, "startingTxnIds is '100'; it can be earliest, latest, or JSON"),
        ({"startingTxnIds": "{"}, BadArgument, "startingTxnIds is '{'; it can be"),
        ({"startingTxnIds": "[" * 100_000}, BadArgument, "startingTxnIds is"),
        ({"startingTxnIds": '{"0": 1, "0": 2}'}, BadArgument, "startingTxnIds names a partition twice"),
        ({"startingTxnIds": '{"00": 1}'}, BadArgument, "startingTxnIds: '00' is not the number of a partition"),
        ({"startingTxnIds": '{"70000": 1}'}, BadArgument, "startingTxnIds: '70000' is not the number of a partition"),
        ({"startingTxnIds": '{"0": true}'}, BadArgument, "startingTxnIds: true for partition 0 is no transaction id"),
        ({"startingTxnIds": '{"0": 1.5}'}, BadArgument, "startingTxnIds: 1.5 for partition 0 is no transaction id"),
        ({"endingTxnIds": '{"0": -3}'}, BadArgument, "endingTxnIds: -3 for partition 0 is no transaction id"),
        ({"endingTxnIds": '{"0": 9223372036854775808}'}, BadArgument, "endingTxnIds: 9223372036854775808 for partition 0"),
        ({"partitions": ""}, BadArgument, "partitions: '' is no partition and no range"),
        ({"partitions": "3-1"}, BadArgument, "partitions: '3-1' is no partition and no range"),
        ({"partitions": "0-999999"}, BadArgument, "partitions: '0-999999' is no partition"),
        ({"failOnDataLoss": "maybe"}, BadArgument, "failOnDataLoss is 'maybe'; it can be true or false"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_option(
    options: dict[str, str], kind: type[WaltzError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        spans(**options)
    assert message in caught.value.message


def test_a_stream_can_start_at_the_end() -> None:
    found = selection_of({"startingtxnids": "latest"}, is_stream=True).spans(THERE)
    assert all(span.count == 0 for span in found.values())
    assert found[0].first == 100


def test_what_was_lost_can_be_left_out() -> None:
    options = {"startingtxnids": '{"1": 40, "7": 20}', "endingtxnids": '{"0": 500}', "failondataloss": "FALSE"}
    found = selection_of(options).spans(THERE)
    assert (found[0], found[1], found[7].count) == (Span(0, 99), Span(50, 149), 0)
    assert selection_of(options).passed_over(THERE) == [
        "partition 0: endingTxnIds is 500, and the last id that can be read is 99",
        "partition 1: ids 40 to 49 are not there any more; the first id is 50",
        "partition 7: startingTxnIds is 20, and the last id that can be read is 9",
    ]
    assert (
        selection_of({**options, "partitions": "7"} | {"startingtxnids": '{"7": 9}', "endingtxnids": "latest"}).passed_over(
            THERE
        )
        == []
    )
    assert Selection(fails_on_loss=False).passed_over(THERE) == []
    assert Selection().spans({}) == {}

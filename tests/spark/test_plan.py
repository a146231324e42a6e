"""Splits against brute force: whatever is wished for, every id is in exactly one of them."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.log.origin import Catalog, Extent, Span
from waltz_spark.log.plan import SPLITS_MAX, TASK_BYTES_MIN, Sizing, Split, plan, sizing_of

from waltzd.errors import BadArgument

MB = 1 << 20


def catalog(**sizes: list[tuple[int, int]]) -> Catalog:
    """`p0=[(records, bytes), …]`: the extents of each partition, one behind the other."""
    extents, spans = [], {}
    for name, given_sizes in sizes.items():
        number, next_id = int(name[1:]), 0
        for place, (count, size) in enumerate(given_sizes):
            span = Span(next_id, next_id + count - 1)
            extents.append(Extent(partition=number, span=span, bytes=size, place=str(place)))
            next_id += count
        spans[number] = Span(0, next_id - 1)
    return Catalog(key=UUID(int=1), spans=spans, extents=tuple(extents))


def planned(there: Catalog, **wishes: int) -> list[Split]:
    return plan(there, there.spans, Sizing(**wishes))


def ids(splits: list[Split]) -> Counter[tuple[int, int]]:
    return Counter(
        (split.partition, id_)
        for split in splits
        for part in split.parts
        for id_ in range(part.span.first, part.span.last + 1)
    )


CATALOGS = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 100, 40 * MB, 90 * MB, 1000 * MB])), max_size=5),
    min_size=1,
    max_size=4,
).map(lambda partitions: catalog(**{f"p{number}": sizes for number, sizes in enumerate(partitions)}))


@given(
    CATALOGS,
    st.data(),
    st.builds(
        Sizing,
        splits_min=st.integers(1, 200),
        records_max=st.none() | st.integers(1, 10),
        bytes_max=st.none() | st.sampled_from([1, 50, 30 * MB, 100 * MB, 5000 * MB]),
    ),
)
def test_every_id_is_in_exactly_one_split(there: Catalog, data: st.DataObject, sizing: Sizing) -> None:
    spans = {}
    for number, span in there.spans.items():
        first = data.draw(st.integers(0, span.last + 1))
        spans[number] = Span(first, data.draw(st.integers(first - 1, span.last)))
    splits = plan(there, spans, sizing)
    wanted = [(number, id_) for number, span in spans.items() for id_ in range(span.first, span.last + 1)]
    assert ids(splits) == Counter(wanted)
    assert len(splits) >= min(sizing.splits_min, len(wanted))
    for split in splits:
        assert split.span.count == sum(part.span.count for part in split.parts), "no gap inside"
        assert len({part.extent.partition for part in split.parts}) == 1
        for part in split.parts:
            assert part.extent.span.first <= part.span.first <= part.span.last <= part.extent.span.last
        assert sizing.records_max is None or split.span.count <= sizing.records_max
        if sizing.bytes_max is not None:
            size = sum(max(part.extent.bytes / part.extent.span.count, 40) * part.span.count for part in split.parts)
            largest = max(max(part.extent.bytes / part.extent.span.count, 40) for part in split.parts)
            assert size <= sizing.bytes_max + largest + 1 or split.span.count == 1


def test_an_extent_is_a_split_and_small_ones_go_together() -> None:
    small, large = (10, TASK_BYTES_MIN // 4), (100, 500 * MB)
    assert [split.span for split in planned(catalog(p0=[large, large]))] == [Span(0, 99), Span(100, 199)]
    splits = planned(catalog(p0=[small] * 9))
    assert [split.span.count for split in splits] == [40, 40, 10]
    assert [split.span for split in planned(catalog(p0=[(5, 0)] * 4))] == [Span(0, 19)]


def test_the_first_wave_meets_all_partitions() -> None:
    there = catalog(p0=[(1, 100 * MB)] * 3, p3=[(1, 100 * MB)], p5=[(1, 100 * MB)] * 2)
    assert [split.partition for split in planned(there)] == [0, 3, 5, 0, 5, 0]


def test_more_splits_are_cut_out_of_the_largest() -> None:
    splits = planned(catalog(p0=[(100, 900 * MB)], p1=[(100, 100 * MB)]), splits_min=10)
    assert Counter(split.partition for split in splits) == {0: 9, 1: 1}
    assert {split.span.count for split in splits if split.partition == 0} == {11, 12}


def test_limits_by_bytes_and_records() -> None:
    there = catalog(p0=[(100, 1000 * MB)])
    assert [split.span.count for split in planned(there, bytes_max=250 * MB)] == [25] * 4
    assert [split.span.count for split in planned(there, records_max=40)] == [33, 33, 34]
    assert planned(catalog(p0=[])) == []


def test_wishes_are_read_from_options() -> None:
    found = sizing_of({"minpartitions": "8", "maxrecordsperpartition": "1000", "splitbytes": "128MiB"})
    assert found == Sizing(splits_min=8, records_max=1000, bytes_max=128 * MB)
    assert sizing_of({}) == Sizing()
    for name, value in (
        ("minPartitions", "0"),
        ("maxRecordsPerPartition", "ten"),
        ("splitBytes", "-1"),
        ("splitBytes", "0"),
    ):
        with pytest.raises(BadArgument, match=name):
            sizing_of({name.lower(): value})
    with pytest.raises(BadArgument, match="the most that a driver can hold"):
        sizing_of({"minpartitions": str(SPLITS_MAX + 1)})
    with pytest.raises(BadArgument, match="more than a driver can hold"):
        planned(catalog(p0=[(10 * SPLITS_MAX, 0)]), records_max=1)

"""Positions of a stream: what a batch takes, what is new, what is lost; against brute force where there are many cases."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.log.origin import Catalog, Extent, Span
from waltz_spark.table.position import (
    Limit,
    Position,
    advanced,
    between,
    by_bytes,
    by_txns,
    end_of,
    lost,
    readable,
    reconciled,
    weights,
)

from waltzd.errors import ForeignCluster
from waltzd.errors.operations import PositionUnknown, TransactionsGone

KEY, OTHER = UUID(int=1), UUID(int=2)
LAGS = st.dictionaries(st.integers(0, 9), st.integers(1, 1000), min_size=1)


def catalog(spans: Mapping[int, tuple[int, int]], *, key: UUID = KEY, record_bytes: int = 100) -> Catalog:
    extents = [
        Extent(partition=partition, span=Span(*span), bytes=Span(*span).count * record_bytes, place="")
        for partition, span in spans.items()
    ]
    return Catalog(key=key, spans={each: Span(*span) for each, span in spans.items()}, extents=tuple(extents))


@given(LAGS, st.integers(1, 3000), st.integers(0, 100_000))
def test_as_many_ids_as_the_limit_allows_and_one_of_each_partition_when_it_can(
    lags: dict[int, int], limit: int, turn: int
) -> None:
    shares = by_txns(lags, limit, turn=turn)
    assert sum(shares.values()) == min(limit, sum(lags.values()))
    assert all(1 <= share <= lags[each] for each, share in shares.items())
    assert len(shares) == min(limit, len(lags))


@given(LAGS, st.integers(1, 3000))
def test_shares_are_in_proportion(lags: dict[int, int], limit: int) -> None:
    shares = by_txns(lags, limit, turn=0)
    if len(lags) < limit < sum(lags.values()):
        spare, rest = limit - len(lags), sum(lags.values()) - len(lags)
        assert all(abs((share - 1) - (lags[each] - 1) * spare / rest) <= 1 for each, share in shares.items())


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 30), min_size=1), st.integers(1, 12))
def test_no_partition_waits_for_ever(lags: dict[int, int], limit: int) -> None:
    """However the others lag, a partition is served within as many batches as there are partitions."""
    start = Position(KEY, dict.fromkeys(range(10), 0))
    there = catalog(dict.fromkeys(lags, (0, 9_999)))
    waited = dict.fromkeys(lags, 0)
    for _ in range(30):
        after = advanced(start, there, limit=Limit(txns=limit))
        for each in lags:
            waited[each] = 0 if after.next[each] > start.next[each] else waited[each] + 1
        assert max(waited.values()) <= len(lags)
        start = after


@given(LAGS, st.integers(1, 200_000), st.integers(1, 500))
def test_bytes_stay_within_the_limit_except_for_the_one_of_each(lags: dict[int, int], limit: int, record: int) -> None:
    shares = by_bytes(lags, {each: lag * record for each, lag in lags.items()}, limit)
    assert all(1 <= share <= lags[each] for each, share in shares.items())
    assert sum(share * record for share in shares.values() if share > 1) <= limit


def test_what_lies_ahead_is_weighed_by_extent() -> None:
    extents = (
        Extent(partition=0, span=Span(0, 9), bytes=1000, place="a"),
        Extent(partition=0, span=Span(10, 19), bytes=100_000, place="b"),
        Extent(partition=1, span=Span(0, 9), bytes=77, place="c"),
    )
    there = Catalog(key=KEY, spans={0: Span(0, 19), 1: Span(0, 9)}, extents=extents)
    assert weights(there, Position(KEY, {0: 5, 1: 10}), {0: 10}) == {0: 500 + 50_000}


def test_a_batch_ends_where_the_log_ends() -> None:
    there = catalog({0: (0, 99), 1: (50, 59), 2: (0, -1)})
    start = Position(KEY, {0: 10, 1: 60, 2: 0})
    assert advanced(start, there) == Position(KEY, {0: 100, 1: 60, 2: 0})


def test_a_batch_ends_at_its_bound() -> None:
    there = catalog({0: (0, 99), 1: (0, 9), 2: (0, 9)})
    start, bound = Position(KEY, {0: 10, 1: 0}), Position(KEY, {0: 20})
    assert advanced(start, there, bound=bound) == Position(KEY, {0: 20, 1: 0})


def test_both_limits_hold() -> None:
    there = catalog({0: (0, 999), 1: (0, 999)})
    start = Position(KEY, {0: 0, 1: 0})
    assert advanced(start, there, limit=Limit(txns=10, bytes=100_000)).next == {0: 5, 1: 5}
    assert advanced(start, there, limit=Limit(txns=1000, bytes=2000)).next == {0: 10, 1: 10}


def test_a_new_partition_is_seen_by_one_batch_and_read_by_the_next() -> None:
    """So that what a batch is follows from its positions, even when the log was trimmed between two attempts at it."""
    there = catalog({0: (0, 9), 1: (5, 9)})
    seen = advanced(Position(KEY, {0: 10}), there)
    assert seen.next == {0: 10, 1: 5}
    assert between(Position(KEY, {0: 10}), seen) == {}
    assert between(seen, advanced(seen, there)) == {1: Span(5, 9)}


@given(st.dictionaries(st.integers(0, 2000), st.integers(0, 2**63 - 1)))
def test_positions_survive_the_checkpoint(next_: dict[int, int]) -> None:
    position = Position(KEY, next_)
    text = json.dumps(position.to_json())
    assert Position.from_json(json.loads(text)) == position
    assert json.dumps(Position.from_json(json.loads(text)).to_json()) == text


@pytest.mark.parametrize(
    "said",
    [{}, {"v": 2, "cluster": str(KEY), "next": {}}, {"v": 1, "cluster": "x", "next": {}}, {"v": 1, "cluster": str(KEY)},
     {"v": 1, "cluster": str(KEY), "next": {"a": 1}}, {"v": 1, "cluster": str(KEY), "next": {"1": None}},
     {"v": 1, "cluster": str(KEY), "next": [1]}],
)  # fmt: skip
def test_another_position_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(PositionUnknown, match="cannot be understood"):
        Position.from_json(said)


def test_another_cluster_is_refused_whatever_the_user_says() -> None:
    for fail_on_loss in (True, False):
        with pytest.raises(ForeignCluster, match=f"{KEY}, the log is of cluster {OTHER}"):
            reconciled(Position(KEY, {0: 1}), catalog({0: (0, 9)}, key=OTHER), among=None, fail_on_loss=fail_on_loss)


@pytest.mark.parametrize(
    ("span", "said", "goes_on_at"),
    [
        ((20, 29), "ids 10 to 19 of partition 0 were not read yet and are not there any more; it begins at 20", 20),
        ((0, 4), "partition 0 ends at id 4, but ids up to 9 were read from it before", 10),
        (None, "partition 0, of which id 10 comes next, is not in the log any more", 10),
    ],
)
def test_what_is_gone_is_said_or_passed_over(span: tuple[int, int] | None, said: str, goes_on_at: int) -> None:
    start = Position(KEY, {0: 10})
    there = catalog({} if span is None else {0: span})
    with pytest.raises(TransactionsGone, match=said):
        reconciled(start, there, among=None, fail_on_loss=True)
    assert reconciled(start, there, among=None, fail_on_loss=False).next == {0: goes_on_at}
    assert [what.startswith(said) for what in lost(start, there, among=None).values()] == [True]
    assert lost(start, there, among=[1]) == {}
    assert reconciled(start, there, among=[1], fail_on_loss=True) == start


def test_a_batch_that_was_begun_is_read_whole_or_not_at_all() -> None:
    spans = {0: Span(10, 19), 1: Span(0, 4)}
    assert readable(spans, catalog({0: (0, 99), 1: (0, 4)}), fail_on_loss=True) == spans
    trimmed = catalog({0: (15, 99)})
    with pytest.raises(TransactionsGone, match=r"ids 10 to 19 of partition 0 belong to a batch .* only 15 to 19 of them"):
        readable(spans, trimmed, fail_on_loss=True)
    assert readable(spans, trimmed, fail_on_loss=False) == {0: Span(15, 19)}


@given(
    st.dictionaries(st.integers(0, 4), st.integers(0, 60), min_size=1),
    st.integers(1, 20),
    st.integers(1, 4000),
    st.integers(0, 1 << 30),
)
def test_batches_follow_each_other_without_gap_or_duplicate(
    ends: dict[int, int], txns: int, bytes_: int, seed: int
) -> None:
    """The log grows meanwhile; a batch is planned twice now and then, as after a crash."""
    chance, crashes = random.Random(seed), 20
    position = Position(KEY, {})
    rows: list[tuple[int, int]] = []
    for _ in range(1000):
        there = catalog({each: (0, end - 1) for each, end in ends.items()})
        after = advanced(
            reconciled(position, there, among=None, fail_on_loss=True), there, limit=Limit(txns=txns, bytes=bytes_)
        )
        batch = [
            (each, id_)
            for each, span in readable(between(position, after), there, fail_on_loss=True).items()
            for id_ in range(span.first, span.last + 1)
        ]
        assert len(batch) <= txns
        if after == position == end_of(there):
            break
        if crashes and chance.random() < 0.3:
            crashes -= 1
            ends = {each: end + chance.randrange(3) for each, end in ends.items()}
            continue  # it was planned and never written
        rows += batch
        position = after
    else:
        pytest.fail("it never came to its end")
    assert sorted(rows) == [(each, id_) for each in sorted(ends) for id_ in range(ends[each])]

"""Timelines against a slow twin: logs as lists, so that what two histories share is seen by comparing them."""

from __future__ import annotations

from random import Random
from uuid import UUID

import pytest

from tests.tiers import together
from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import OtherTimeline
from waltzd.errors.operations import BadMetadata
from waltzd.protocol.document import decode, encode
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, TIMELINES_MAX, Lineage


def fork(lineage: Lineage, at: int, *, session: int = 5, parent: UUID | None = None) -> Lineage:
    identity = UUID(int=1000 + lineage.number)
    return lineage.forked(identity=identity, fork=at, session=session, parent=parent, cause="rescue", began="now", who="me")


@together("seed", range(300), quick=60)
def test_what_two_histories_share_is_what_their_lists_share(seed: int) -> None:
    random = Random(seed)
    logs: dict[UUID, list[int]] = {FIRST: list(range(random.randrange(1, 9)))}
    fresh = iter(range(100, 10_000))
    lineage = NEVER_FORKED
    for _ in range(random.randrange(1, 7)):
        parent = random.choice(list(logs)) if random.random() < 0.4 else lineage.current
        at = random.randrange(-1, len(logs[parent]))
        lineage = fork(lineage, at, parent=parent)
        logs[lineage.current] = logs[parent][: at + 1] + [next(fresh) for _ in range(random.randrange(9))]
    current = logs[lineage.current]
    for identity, log in logs.items():
        for id_, transaction in enumerate(log):
            is_same = id_ < len(current) and current[id_] == transaction
            assert lineage.covers(identity, id_) == is_same, (identity, id_, lineage.later)
    assert not lineage.covers(UUID(int=7), 0)
    assert Lineage.decode(lineage.encode()) == lineage


def test_a_position_above_the_fork_is_refused_by_name() -> None:
    lineage = fork(fork(NEVER_FORKED, 19), 30)
    lineage.check(FIRST, 19, what="the view", partition=3)
    lineage.check(FIRST, -1, what="the view", partition=3)
    lineage.check(lineage.current, 5000, what="the view", partition=3)
    with pytest.raises(OtherTimeline, match="the view stands at id 20 of partition 3 on timeline 1") as caught:
        lineage.check(FIRST, 20, what="the view", partition=3)
    assert (caught.value.number("fork"), caught.value.number("position")) == (19, 20)
    with pytest.raises(OtherTimeline, match="which this log never had"):
        lineage.check(UUID(int=9), 0, what="the view", partition=3)


def test_a_document_names_its_timelines_and_an_old_one_names_none() -> None:
    meta = PartitionMeta(generation=1, session=9)
    assert b"timelines" not in encode(meta)
    assert meta.lineage == NEVER_FORKED
    lineage = fork(NEVER_FORKED, 19, session=7)
    forked = PartitionMeta(generation=1, session=9, timelines=lineage.later)
    found = decode(PartitionMeta, encode(forked), "/partitions/0")
    assert found.lineage == lineage
    assert found.timelines[0].cause == "rescue"
    later = encode(forked).replace(b'"session": 7', b'"session": 10')
    with pytest.raises(BadMetadata, match="above the newest one"):
        decode(PartitionMeta, later, "/partitions/0")


def test_timelines_are_bounded_and_what_is_no_lineage_is_none() -> None:
    lineage = NEVER_FORKED
    for _ in range(TIMELINES_MAX):
        lineage = fork(lineage, 3)
    with pytest.raises(ValueError, match="more than 64"):
        fork(lineage, 3)
    one = fork(NEVER_FORKED, 3).encode()
    assert Lineage.decode(one + one) is None
    assert Lineage.decode(one[:-1]) is None
    assert Lineage.decode(b"") == NEVER_FORKED

"""Where a session goes on: which format it writes, and behind which batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from waltzd.cluster.documents import ClusterMeta, Membership, PartitionMeta, ReplicaState
from waltzd.errors import CannotConnect
from waltzd.errors.operations import BadMetadata, Diverged, NodeMissing
from waltzd.format.batch import End
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.documents import PartitionDocuments
from waltzd.server.session.session import Session
from waltzd.server.session.settings import SessionSettings

HERE = End(crc=5, time=70, segment_bytes=900)
NAMES = ("a", "b", "c")


def status(last_id: int, end: End | None) -> ReplicaStatus:
    return ReplicaStatus(
        partition=0, incarnation=UUID(int=1), promised_session=7, session=7, low_mark=9, local_low_mark=9, committed=9,
        last_id=last_id, is_available=True, is_full=False, segments=1, findings=(), end=end,
    )  # fmt: skip


class Replica:
    """Behind a link: what it says when it is asked again."""

    def __init__(self, now: ReplicaStatus) -> None:
        self.port = self
        self.now = now
        self.asked = 0

    async def status(self, partition: int) -> ReplicaStatus:
        self.asked += 1
        return self.now


def session_of(found: dict[str, ReplicaStatus], copied: dict[str, ReplicaStatus], mark: int = 9) -> Session:
    """Opened at `mark`, with what level replicas said: `copied` got the rest of the log since then."""
    states = {name: ReplicaState(session=7, closing=None, incarnation=UUID(int=1)) for name in NAMES}
    meta = PartitionMeta(generation=1, session=7, opened=7, low_mark=mark, members=NAMES, replicas=states)
    documents: Any = SimpleNamespace(roles=dict.fromkeys(NAMES, Membership.MEMBER), format=0)
    nobody: Any = None
    session = Session(
        0, meta=meta, documents=documents, connect=nobody, settings=SessionSettings(partitions=1, key=UUID(int=1)),
        timer=PeriodicTimer(1.0), say=lambda sentence: None,
    )  # fmt: skip
    for name, said in {**found, **{name: replace(now, last_id=3, end=None) for name, now in copied.items()}}.items():
        session.log.core.opened(name, said)
    for name, now in copied.items():
        session.log.core.copied(name, now.last_id)
        link: Any = Replica(now)
        session.log.replicators[name] = link
    return session


def end_of(session: Session) -> End | None:
    return asyncio.run(session._find_end())


@pytest.mark.parametrize("end", [None, HERE, replace(HERE, segment_bytes=0)])
def test_a_session_goes_on_where_its_level_replicas_end(end: End | None) -> None:
    assert end_of(session_of({"a": status(9, end), "c": status(9, end)}, {"b": status(9, HERE)})) == end


@pytest.mark.parametrize("other", [None, replace(HERE, crc=6), replace(HERE, time=71), replace(HERE, segment_bytes=901)])
def test_replicas_that_end_otherwise_hold_other_bytes(other: End | None) -> None:
    with pytest.raises(Diverged, match="have different ends at id 9"):
        end_of(session_of({"a": status(9, HERE), "c": status(9, other)}, {}))


def test_a_replica_that_has_copied_is_asked_again() -> None:
    session = session_of({}, {"b": status(9, HERE), "c": status(9, HERE)})
    assert end_of(session) == HERE
    late = session_of({}, {"b": status(9, HERE)})
    link: Any = late.log.replicators["b"]
    link.now = status(8, HERE)
    with pytest.raises(Diverged):
        end_of(late)


def test_an_empty_log_has_no_end() -> None:
    assert end_of(session_of({}, {}, mark=-1)) is None


# -- which format ------------------------------------------------------------------------------------------------------


class FormatOf:
    """The part of a cluster's documents that says it."""

    def __init__(self) -> None:
        self.answer: int | Exception = 0

    async def meta(self) -> ClusterMeta:
        if isinstance(self.answer, Exception):
            raise self.answer
        return ClusterMeta(name="x", key=UUID(int=1), partitions=1, created="", format=self.answer)


@pytest.mark.parametrize("trouble", [CannotConnect("away"), NodeMissing("gone"), BadMetadata("nonsense"), 0])
def test_a_format_rises_and_never_falls_whatever_becomes_of_the_document(trouble: int | Exception) -> None:
    cluster: Any = FormatOf()
    documents = PartitionDocuments(cluster, 0, version=1, retry_seconds=1.0)

    async def read(answer: int | Exception) -> int:
        cluster.answer = answer
        await documents.read_format()
        return documents.format

    async def work() -> None:
        assert await read(trouble) == 0
        assert await read(1) == 1
        assert await read(trouble) == 1

    asyncio.run(work())

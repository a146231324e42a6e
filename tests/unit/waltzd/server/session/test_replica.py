"""Cold reads from replicas: another one when one fails, and what failed never reads as if it were about the partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast
from uuid import UUID

import pytest

from waltzd.client.mount import FINAL
from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import BadFrame, CannotConnect, NoSuchPartition, NotReady, PartitionDamaged, WaltzError
from waltzd.format.record import Run, encode_payloads
from waltzd.server.core.tail import Tail
from waltzd.server.session.replica import Log, ReplicaLink
from waltzd.server.session.settings import SessionSettings


class Replica:
    """A link, and the port behind it."""

    def __init__(self, *, gives: int = 0, fails: WaltzError | None = None, readable: bool = True) -> None:
        self.port = self
        self.is_readable = readable
        self.gives = gives
        """So many records, before it fails."""
        self.fails = fails
        self.asked = 0

    async def read(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int, with_locks: bool
    ) -> AsyncIterator[Run]:
        self.asked += 1
        count = last_id - first_id + 1 if self.fails is None else min(self.gives, last_id - first_id + 1)
        if count:
            yield encode_payloads(first_id, [b"x"] * count)
        if self.fails is not None:
            raise self.fails


class Replicas(Log):
    def __init__(self, replicas: dict[str, Replica], beginnings: int) -> None:
        meta = PartitionMeta(generation=1, session=7, opened=7)
        settings = SessionSettings(partitions=1, key=UUID(int=1), storage_seconds=1.0)
        super().__init__(0, meta, {}, settings, say=lambda sentence: None)
        self.links = cast("dict[str, ReplicaLink]", replicas)
        self.open_tail = Tail(100, 1)
        self.beginnings = beginnings
        for name in replicas:
            self.core.progress(name).held = 99

    @property
    def _is_beginning(self) -> bool:
        """The replicas can be read when this was asked so often."""
        self.beginnings -= 1
        if self.beginnings == 0:
            for link in self.links.values():
                cast(Replica, link).is_readable = True
        return self.beginnings >= 0


def read(*, beginnings: int = 0, **replicas: Replica) -> list[int]:
    async def run() -> list[int]:
        runs = Replicas(replicas, beginnings).read(10, 19, 1 << 20)
        return [id_ async for run in runs for id_ in range(run.first_id, run.last_id + 1)]

    return asyncio.run(run())


@pytest.mark.parametrize("error", [NoSuchPartition("not here"), BadFrame("nonsense"), PartitionDamaged("rot")])
def test_what_one_storage_says_of_itself_is_not_said_of_the_partition(error: WaltzError) -> None:
    with pytest.raises(NotReady) as raised:
        read(a=Replica(fails=error), b=Replica(fails=CannotConnect("gone")), c=Replica(readable=False))
    assert not isinstance(raised.value, FINAL)
    for words in (f"a: {error.code} {error.message}", "b: W4001 gone", "from 10 on"):
        assert words in raised.value.message


def test_another_one_goes_on_where_one_failed() -> None:
    replicas: dict[str, Any] = {"a": Replica(gives=4, fails=CannotConnect("gone")), "b": Replica()}
    assert read(**replicas) == list(range(10, 20))
    assert (replicas["a"].asked, replicas["b"].asked) == (1, 1)


def test_nobody_who_could_be_asked() -> None:
    with pytest.raises(NotReady, match="none that holds them"):
        read(a=Replica(readable=False))


def test_a_reader_waits_for_a_session_that_begins() -> None:
    """The storages refuse the one before, and nobody is there for the new one yet."""
    assert read(a=Replica(readable=False), b=Replica(readable=False), beginnings=3) == list(range(10, 20))

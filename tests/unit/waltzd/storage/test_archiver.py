"""What an archiver proves before bytes leave a disk: the archive names the same ones, of the same timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from tests.archives import Uploads
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.sample import KEY, run_for
from tests.unit.keeping import begun
from waltzd.archive.manifest import Manifest
from waltzd.archive.store import Listed
from waltzd.errors.operations import StoreUnavailable
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.timelines import NEVER_FORKED
from waltzd.storage.append_queue import AppendQueue
from waltzd.storage.archiver import Archiver
from waltzd.storage.replica.partition import Partition

RECORDS = 24


async def at_once(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


class OneQueue:
    def __init__(self, partition: Partition) -> None:
        self.partition = partition


def archived(store: FaultyStore, bounds: Sequence[tuple[int, int]], *, foreign: int | None = None) -> Manifest:
    """Segments with these ids; the one with the number `foreign` has the records of another log."""
    uploads = Uploads(store, cluster=KEY)
    for number, (first, last) in enumerate(bounds):
        uploads.records(run_for(1 if number == foreign else 0, first, last - first + 1))
    return uploads.manifest


def proven(
    partition: Partition, store: FaultyStore, manifest: Manifest, **changes: Any
) -> tuple[int, tuple[int, ...], str]:
    return proven_by(archiver_of(partition, store), partition, manifest, **changes)


def archiver_of(partition: Partition, store: FaultyStore) -> Archiver:
    return Archiver(cast(Any, None), KEY, partition._context.disk, store, at_once)


def proven_by(
    archiver: Archiver, partition: Partition, manifest: Manifest, **changes: Any
) -> tuple[int, tuple[int, ...], str]:
    known = Archived(
        archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last_id=manifest.last, **changes
    )  # fmt: skip
    queue = cast(AppendQueue, OneQueue(partition))
    return asyncio.run(archiver.proven(queue, partition.promised_session, RECORDS, known))


def replica() -> tuple[Partition, list[tuple[int, int]]]:
    _, _, partition = begun(RECORDS, committed=RECORDS - 1)
    sealed = partition.sealed_segments()
    assert len(sealed) > 2
    return partition, sealed


def test_a_segment_is_compared_with_the_manifest_before_it_goes() -> None:
    partition, sealed = replica()
    end = sealed[-1][1]
    store = FaultyStore()
    assert proven(partition, store, archived(store, sealed))[:2] == (end + 1, ())
    store = FaultyStore()
    found = proven(partition, store, archived(store, sealed, foreign=1))
    assert found[:2] == (sealed[1][0], ())
    assert "has other records than this replica" in found[2]


def test_segments_that_end_elsewhere_are_compared_record_by_record() -> None:
    """In format 0 each storage ends its segments where it likes; the last one is not sealed at all."""
    partition, _ = replica()
    bounds = [(0, 6), (7, 14), (15, RECORDS - 1)]
    store = FaultyStore()
    assert proven(partition, store, archived(store, bounds)) == (RECORDS, (), "")
    store = FaultyStore()
    assert proven(partition, store, archived(store, bounds, foreign=2))[0] == 15


def test_what_is_of_another_timeline_or_is_gone_proves_nothing() -> None:
    partition, sealed = replica()
    store = FaultyStore()
    manifest = archived(store, sealed)
    assert "timeline" in proven(partition, store, manifest, timeline=UUID(int=5))[2]
    partition.lineage = NEVER_FORKED.forked(identity=UUID(int=2), fork=3, session=9, cause="rescue", began="now", who=None)
    assert proven(partition, store, manifest)[0] == 0, "the first timeline is the same log up to id 3 only"
    partition.lineage = NEVER_FORKED
    for name in [name for name in store.objects if "/segment/" in name][1:]:
        del store.objects[name]
    assert proven(partition, store, manifest)[0] == sealed[1][0]


def test_a_damaged_segment_is_named_and_does_not_hold_up_the_rest() -> None:
    partition, sealed = replica()
    store = FaultyStore()
    manifest = archived(store, sealed)
    disk = partition._context.disk
    path = partition.sealed_path(sealed[1][0])
    cast(Any, disk).corrupt(path, 150, b"\x7f")
    assert proven(partition, store, manifest)[:2] == (sealed[-1][1] + 1, (sealed[1][0],))


def test_all_segments_that_cannot_be_compared_are_named_where_they_end_elsewhere() -> None:
    """One archived segment may hold the ids of several segments of a replica. If one of these is damaged, nothing is
    compared: each may be the only copy."""
    partition, sealed = replica()
    store = FaultyStore()
    end = sealed[2][1]
    manifest = archived(store, [(0, end), (end + 1, RECORDS - 1)])
    cast(Any, partition._context.disk).corrupt(partition.sealed_path(sealed[1][0]), 150, b"\x7f")
    assert proven(partition, store, manifest)[:2] == (RECORDS, tuple(first_id for first_id, _ in sealed[:3]))


def test_what_was_compared_before_the_store_went_away_stays_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails now and then would else hold up a replica that has much to compare for ever."""
    partition, sealed = replica()
    store = FaultyStore()
    manifest = archived(store, sealed)
    right = store.head

    def head(name: str) -> Listed:
        if name == manifest.entries[2].name(0):
            raise StoreUnavailable("it is away")
        return right(name)

    monkeypatch.setattr(store, "head", head)
    assert proven(partition, store, manifest) == (sealed[2][0], (), "it is away")


def test_a_manifest_that_the_store_has_lost_proves_nothing_whatever_is_remembered_of_it() -> None:
    """The storage that uploaded it, and one that was asked before, remember it."""
    partition, sealed = replica()
    store = FaultyStore()
    manifest, archiver = archived(store, sealed), archiver_of(partition, store)
    assert proven_by(archiver, partition, manifest)[0] == sealed[-1][1] + 1
    del store.objects[manifest.name]
    found = proven_by(archiver, partition, manifest)
    assert found[0] == 0
    assert f"{manifest.name} is not in the store" in found[2]

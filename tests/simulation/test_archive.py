"""An owner and its storages archive to a store that fails, through kills and changes of owners: no hole, no other log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

import pytest

from tests.simulation.cell import KEY, Appender, Cell, cell, story
from tests.simulation.faulty_store import Faults, FaultyStore
from waltzd.archive.archived_segment import segment_entry
from waltzd.archive.manifest import Entry, Manifest, pieces_of
from waltzd.archive.store import Store
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.cluster.cluster import archived
from waltzd.cluster.documents import ArchiveMeta
from waltzd.errors.operations import ForeignArchive, StoreUnavailable
from waltzd.format.layout import FileHeader
from waltzd.protocol.descriptions import Archived
from waltzd.server.core import archive
from waltzd.server.core.archive import FIRST_SECONDS

FAULTY = Faults(lost=20, refused=20, late=10, repeated=20, torn=10, rotten=10)
ROUND_SECONDS = 7200.0
"""Of a round of checks, where one is waited for."""


@asynccontextmanager
async def archiving(store: Store, *names: str) -> AsyncIterator[Cell]:
    async with cell() as c:
        for name, storage in c.storages.items():
            if name in names or not names:
                storage.store = store
                await c.restart(name)
        yield c


async def document(c: Cell) -> ArchiveMeta | None:
    return (await archived(c.cluster.coordinator, 0))[0]


async def reached(c: Cell, last_id: int, *, seconds: float = 3600) -> ArchiveMeta:
    async with asyncio.timeout(seconds):
        while (found := await document(c)) is None or found.last < last_id:
            await asyncio.sleep(1)
    return found


def sealed(c: Cell) -> list[tuple[int, int]]:
    return c.replica("s0").sealed_segments()


async def written(c: Cell, pipeline: Appender, batches: int) -> int:
    """The last id that is sealed, once it is known everywhere to be committed."""
    for _ in range(batches):
        await pipeline.committed(pipeline.append(20))
    last_id = sealed(c)[-1][1]
    await c.until(lambda: all(c.replica(name).visible_mark >= last_id for name in c.storages), seconds=60)
    return last_id


def check(c: Cell, store: FaultyStore, found: ArchiveMeta) -> list[Entry]:
    """By another way than it was made: everything that the document leads to is in the store, and is the log."""
    text = store.objects[f"partition-0/manifest/{found.number:010d}.json"].data
    assert sha256(text).hexdigest() == found.sha256
    manifest = Manifest.decode(text, "here")
    faults, store.faults = store.faults, Faults()
    archive = PartitionArchive(store, label_in(store, KEY, lambda: KEY, found.archive), 0)
    pieces = list(pieces_of(manifest.entries, archive.chunk))
    store.faults = faults
    assert [(piece.first, piece.last) for piece in pieces] == sealed(c)[: len(pieces)]
    assert pieces[-1].last == found.last
    for piece in pieces:
        data = store.objects[piece.name(0)].data
        size = piece.size - piece.index_bytes
        assert sha256(data).hexdigest() == piece.sha256
        expected = FileHeader(created_ms=0, key=KEY, partition=0, first_id=piece.first)
        assert segment_entry(data[:size], data[size:], expected=expected, last_id=piece.last, path="here") == piece
        file = c.storages["s0"].disk.open(c.replica("s0").sealed_path(piece.first))
        assert data[128:size] == file.read(128, file.size())  # the date of a header of format 0 is that of its storage
        file.close()
    return pieces


@story
async def test_sealed_segments_are_archived_by_one_storage_after_the_other() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        last_id = await written(c, pipeline, 60)
        found = await reached(c, last_id)
        assert len(check(c, store, found)) == len(sealed(c)) > 24
        assert found.last == last_id
        said = owned.describe()
        assert (said.archived is not None, said.archive_trouble) == (True, "")
        assert said.archived is not None
        assert said.archived.last_id == last_id
        operations = store.operations
        await asyncio.sleep(600)
        assert store.operations == operations, "nothing is sealed, so nothing is asked of the store"
        manifests = sum(name.startswith("get partition-0/manifest") for name in store.log)
        assert 2 <= manifests <= len(sealed(c)) // 8 + 1, "each turn begins with the manifest of the one before"


@pytest.mark.parametrize("seed", range(6))
@story
async def test_whatever_fails_the_archive_is_the_log(seed: int) -> None:
    """Storages are killed, owners change, and the store does what it likes."""
    pick = random.Random(seed)
    store = FaultyStore(random.Random(seed + 1000), FAULTY)
    async with archiving(store) as c:
        owned = await c.own(1)
        last_id = -1
        for generation in range(2, 6):
            pipeline = await c.opened(owned)
            last_id = await written(c, pipeline, pick.randrange(5, 20))
            await asyncio.sleep(pick.randrange(20))
            await c.restart(f"s{pick.randrange(3)}")
            await asyncio.sleep(pick.randrange(5))
            old, owned = owned, await c.own(generation)
            await c.opened(owned)
            await old.close(hand_over=False)
        found = await reached(c, last_id)
        store.faults = Faults()
        check(c, store, await reached(c, max(found.last, last_id)))


@story
async def test_a_damaged_segment_is_archived_from_another_storage() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        for storage in c.storages.values():
            storage.store = None
        for name in c.storages:
            await c.restart(name)  # nothing is archived yet
        owned = await c.own()
        pipeline = await c.opened(owned)
        last_id = await written(c, pipeline, 12)
        for name in c.storages:
            c.storages[name].store = store
        for name in ("s0", "s1"):
            c.storages[name].disk.corrupt("storage/0/0000000000000000000.seg", 700, b"\x7f")
        for name in c.storages:
            await c.restart(name)
        found = await reached(c, last_id)
        await c.until(lambda: c.is_sound("s0") and c.is_sound("s1"))
        check(c, store, found)
        await owned.close(hand_over=True)


@story
async def test_only_storages_with_a_store_are_asked_and_a_store_that_is_away_is_told() -> None:
    class Away(FaultyStore):
        def get_range(self, name: str, offset: int, size: int) -> bytes:
            raise StoreUnavailable("the store is away", next_step="wait")

    async with archiving(Away(), "s1") as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        await written(c, pipeline, 12)
        await asyncio.sleep(120)
        assert owned.describe().archive_trouble == "s1: W2260 the store is away"
        assert sum("uploads to the archive fail: s1: W2260 the store is away" in line for line in c.log) == 1
        assert await document(c) is None
        store = FaultyStore()
        c.storages["s1"].store = store
        await c.restart("s1")
        check(c, store, await reached(c, sealed(c)[-1][1]))
        await c.until(lambda: owned.describe().archive_trouble == "")
        assert any("uploads to the archive work again" in line for line in c.log)


@story
async def test_another_store_is_not_gone_on_with() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        before = await reached(c, await written(c, pipeline, 12))
        objects, store.objects = store.objects, {}
        for name in c.storages:
            await c.restart(name)
        await written(c, pipeline := await c.opened(owned), 12)
        await c.until(lambda: ForeignArchive.code in owned.describe().archive_trouble, seconds=120)
        assert (await document(c), store.objects) == (before, {})
        store.objects = objects
        check(c, store, await reached(c, sealed(c)[-1][1]))
        assert pipeline.ended is None


@story
async def test_an_object_that_goes_is_missed_within_a_day_and_so_is_a_whole_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A day is two hours here: two whole ones would take long. `unit/waltzd/server/core/test_archive.py` has a day."""
    monkeypatch.setattr(archive, "ROUND_SECONDS", ROUND_SECONDS)
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        found = await reached(c, await written(c, pipeline, 60))
        pieces = check(c, store, found)
        assert owned.describe().archive_check is None
        await asyncio.sleep(FIRST_SECONDS + 60)
        seen = owned.describe().archive_check
        assert seen is not None
        assert (seen.last_id, seen.missing, (seen.age_ms or 0) < 100_000) == (found.last, "", True)
        gone = pieces[7].name(0)
        whole = store.objects.pop(gone)
        await asyncio.sleep(ROUND_SECONDS + 60)
        seen = owned.describe().archive_check
        assert seen is not None
        assert (seen.last_id, gone in seen.missing, seen.age_ms) == (pieces[7].first - 1, True, None)
        assert sum("the archive lacks what was archived" in line for line in c.log) == 1
        store.put_new(gone, whole.data)
        await c.until(lambda: (found := owned.describe().archive_check) is not None and found.missing == "", seconds=3600)
        assert any("has the missing objects again" in line for line in c.log)
        await asyncio.sleep(60)
        store.objects.clear()
        await asyncio.sleep(ROUND_SECONDS + 60)
        seen = owned.describe().archive_check
        assert seen is not None
        assert (seen.last_id, "was emptied" in seen.missing) == (-1, True), "the newest manifest in memory is not believed"


@story
async def test_only_what_is_committed_is_archived() -> None:
    """A storage that was appended to alone has sealed segments that nobody else has."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own()
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        for name in ("s1", "s2"):
            c.storages[name].hang()
        for _ in range(20):
            pipeline.append(20)
        await c.until(lambda: len(c.replica("s0").sealed_segments()) > 5)
        await asyncio.sleep(60)
        assert (await document(c), store.operations) == (None, 0)
        for name in ("s1", "s2"):
            c.storages[name].go_on()
        await pipeline.committed(pipeline.session.cache.next_id - 1)
        check(c, store, await reached(c, sealed(c)[0][1]))


@story
async def test_a_storage_that_lies_is_not_believed() -> None:
    store = FaultyStore()
    async with archiving(store) as c:

        async def lie(*_: object, **__: object) -> Archived:
            return Archived(archive=KEY, number=7, sha256=64 * "0", last_id=10)

        calls = c.storages["s1"].calls
        assert calls is not None
        calls.archiver.add = lie  # type: ignore[method-assign]
        pipeline = await c.opened(await c.own())
        check(c, store, await reached(c, await written(c, pipeline, 40)))

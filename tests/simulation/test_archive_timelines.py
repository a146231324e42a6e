"""Archive and backup of a log that an operator ended: what the new timeline names is its log, and nothing else goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

import tests.simulation.cell as cells
from tests.simulation.cell import KEY, SETTINGS, Appender, Cell, story
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.test_archive import archiving, document, reached, written
from tests.simulation.test_backup import own
from tests.simulation.test_rescue import Hands
from tests.simulation.test_retention import SMALL, floors, keeping, trimmed, under_load
from waltzctl.placement.restore import SESSIONS_AHEAD
from waltzd.archive.archived_segment import footer_in, keyed, unkeyed
from waltzd.archive.cut_point import logs_in
from waltzd.archive.listing import branches_in, label_of, newest_manifests
from waltzd.archive.manifest import Entry, Manifest, pieces_of
from waltzd.archive.unsealed import read_unsealed
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import branch_flaws, check_piece, check_unsealed, survey
from waltzd.cluster.documents import ClusterMeta, Decision, PartitionMeta, ReplicaState
from waltzd.errors.operations import StoreUnavailable
from waltzd.format.batch import End, encode_batch, parse_batches
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import encode_payloads, walk
from waltzd.protocol.descriptions import ReplicaStatus, RestoreOrder, SetAside
from waltzd.protocol.level import ARCHIVED_KEYS
from waltzd.protocol.peers import runs_of
from waltzd.protocol.timelines import FIRST
from waltzd.server.session.owned import OwnedLog
from waltzd.storage.archiver import Archiver


@pytest.fixture(params=[0, 1], autouse=True)
def format_(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Logs of records, and of batches."""
    if request.param:
        monkeypatch.setattr(cells, "ClusterMeta", partial(ClusterMeta, format=1))
        monkeypatch.setattr(Appender, "append", _append_batch)
    return int(request.param)


def _append_batch(self: Appender, count: int, *, size: int = 50) -> int:
    session = self.session
    first_id = session.cache.next_id
    payloads = [f"{session.session}:{first_id + n}".encode().ljust(size, b".") for n in range(count)]
    before = session.cache.end or End()
    time = max(before.time, round(1e6 * asyncio.get_running_loop().time()) + 1)
    session.append(
        encode_batch(
            encode_payloads(first_id, payloads), session=session.session, generation=session.generation,
            committed=session.committed, time=time, before=before, segment_bytes_max=4000,
        )
    )  # fmt: skip
    return first_id + count - 1


def records_in(piece: Entry, data: bytes) -> dict[int, bytes]:
    footer = footer_in(data, piece)
    raw = memoryview(data)[HEADER_BYTES : piece.size - piece.index_bytes if footer is None else footer.offset]
    if footer is None:
        bounds = walk(raw)
        return {piece.first + n: bytes(raw[a:b]) for n, (a, b) in enumerate(pairwise(bounds))}
    return by_id(parse_batches(raw))


def by_id(content: Any) -> dict[int, bytes]:
    return {
        run.first_id + n: bytes(run.data[a:b]) for run in runs_of(content) for n, (a, b) in enumerate(pairwise(run.bounds))
    }


def archived_records(store: FaultyStore, manifest: Manifest | None = None) -> dict[int, bytes]:
    """All that a timeline has in the store, in segments; the current one by default."""
    label, out = label_of(store, not_done=""), dict[int, bytes]()
    manifest = newest_manifests(store, label, [0])[0] if manifest is None else manifest
    archive = PartitionArchive(store, label, 0, manifest.timeline)
    for piece in pieces_of(manifest.entries, archive.chunk):
        out |= records_in(piece, store.objects[piece.name(0)].data)
    return out


def stored(store: FaultyStore) -> dict[int, bytes]:
    """All that the current timeline has in the store, with its tail."""
    label = label_of(store, not_done="")
    manifest = newest_manifests(store, label, [0]).get(0)
    archive = PartitionArchive(store, label, 0, FIRST if manifest is None else manifest.timeline)
    manifest, _, parts = read_unsealed(archive, archive.start())
    out = archived_records(store, manifest)
    for part in parts:
        out |= by_id(part.content())
    return out


def flaws(store: FaultyStore) -> list[str]:
    """What `waltzctl archive verify` finds."""
    found = survey(store)
    checked = [check_piece(store, found.label, 0, piece, is_quick=False) for piece in found.pieces.get(0, ())]
    checked += [check_unsealed(store, found, *branch) for branch in found.unsealed]
    names = [flaw for flaw in (*found.flaws, *checked) if flaw is not None]
    chains = [flaw for one in (*found.manifests.values(), *found.older) for flaw in branch_flaws(store, found.label, one)]
    return [f"{flaw.name} {flaw.detail}" for flaw in (*names, *chains)]


def check_nothing_lost(store: FaultyStore, c: Cell, acknowledged: list[bytes]) -> None:
    """Each acknowledged transaction of the current timeline is on a storage, or is what the archive has of its id."""
    there = archived_records(store)
    lost = [n for n in range(min(floors(c))) if n < len(acknowledged) and there.get(n) != acknowledged[n]]
    assert not lost, f"ids {lost[0]} to {lost[-1]}, {len(lost)} of them"


async def rescued_with_less(c: Cell, *, archived_to: int = 600) -> tuple[OwnedLog[Appender], int]:
    """A log that is archived far above what the only copy at hand holds; the first session of the new timeline."""
    owned = await c.own(settings=SMALL)
    await under_load(c, owned, 10)
    await c.all_hold(199)
    c.storages["s0"].kill()
    await under_load(c, owned, 30)
    await reached(c, archived_to)
    for n, name in enumerate(("s1", "s2")):
        c.storages[name].kill()
        c.storages[name].lose_disk(seed=91 + n)
    await c.storages["s0"].start()
    done = await Hands(c).rescue()
    for name in ("s1", "s2"):
        await c.storages[name].start()
    return owned, done.session


@story
async def test_nothing_is_trimmed_by_the_archive_of_the_timeline_before() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        await keeping(c, "all")
        owned, session = await rescued_with_less(c)
        old = archived_records(store, branches_in(store, label_of(store, not_done=""), [0])[0])
        for _ in range(60):
            pipeline = await c.opened(owned, above=session - 1)
            await pipeline.committed(pipeline.append(20))
            await asyncio.sleep(0.2)
        acknowledged = c.storages["s0"].records()
        await keeping(c, "5KB")
        await under_load(c, owned, 60)
        await trimmed(c, above=1000)
        found = await document(c)
        assert found is not None
        assert found.timeline == (await c.meta()).lineage.current != FIRST
        check_nothing_lost(store, c, acknowledged)
        assert flaws(store) == []
        branches = branches_in(store, label_of(store, not_done=""), [0])
        assert [one.timeline for one in branches] == [FIRST, found.timeline]
        assert archived_records(store, branches[0]) == old, "the old future stays readable"
        fork = branches[1].lineage.fork
        whole = [piece.last for piece in survey(store).pieces[0] if piece.last <= fork]
        assert branches[1].shared == len(dict.fromkeys(whole)) > 0, "what is whole below the fork is shared"


@story
async def test_the_backup_after_a_rescue_is_that_of_the_new_log() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await own(c)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        await c.all_hold(19)
        c.storages["s0"].kill()
        await pipeline.committed(pipeline.append(30))
        await pipeline.committed(pipeline.append(1))
        await asyncio.sleep(40)
        assert len(stored(store)) == 51
        for name in ("s1", "s2"):
            c.storages[name].kill()
            c.storages[name].lose_disk(seed=91)
        await c.storages["s0"].start()
        done = await Hands(c).rescue()
        later = await c.opened(owned, above=done.session)
        await later.committed(later.append(25))
        for name in ("s1", "s2"):
            await c.storages[name].start()
        for _ in range(6):
            await asyncio.sleep(60)
            log = dict(enumerate(c.storages["s0"].records()))
            assert stored(store) == {n: log[n] for n in range(len(stored(store)))}
            said = owned.describe()
            assert (said.backup_trouble, said.archive_trouble, said.backup_lag_ms) == ("", "", 0)
            assert len(stored(store)) == len(log)
            await later.committed(later.append(40))
        assert flaws(store) == []


async def aside(c: Cell, name: str) -> list[SetAside]:
    calls = c.storages[name].calls
    assert calls is not None
    return list((await calls.describe()).set_aside)


@pytest.mark.parametrize("is_lost", [True, False])
@story
async def test_a_replica_below_the_floor_is_emptied_only_where_the_archive_has_its_bytes(is_lost: bool) -> None:
    """An old copy of a disk comes back. Where the archive has lost the segments, its bytes are the only ones."""
    store = FaultyStore()
    async with archiving(store) as c:
        await keeping(c, "5KB")
        owned = await c.own(settings=SMALL)
        await under_load(c, owned, 5)
        await c.all_hold(99)
        await c.storages["s2"].stop()
        copy = c.storages["s2"].disk.clone(77)
        await c.storages["s2"].start()
        await under_load(c, owned, 80)
        floor = await trimmed(c, above=300)
        if is_lost:
            store.objects = {name: one for name, one in store.objects.items() if "/segment/" not in name}
        c.storages["s2"].kill()
        c.storages["s2"].disk = copy
        before = files(c, "storage/0")
        await c.storages["s2"].start()
        await c.until(lambda: c.replica("s2").first_id >= floor)
        kept = await aside(c, "s2")
        if not is_lost:
            assert kept == []
            return
        (one,) = kept
        assert before.items() <= files(c, f"storage/{one.name}").items()


def files(c: Cell, folder: str) -> dict[str, bytes]:
    disk = c.storages["s2"].disk
    return {name: bytes(disk.content(f"{folder}/{name}")) for name in disk.names(folder) if name.endswith(".seg")}


@story
async def test_a_segment_that_is_not_what_the_manifest_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive holds another log under the ids of this one, as after the disks of two clusters were mixed up."""
    store = FaultyStore()
    async with archiving(store) as c:
        await keeping(c, "all")
        owned = await c.own(settings=SMALL)
        await under_load(c, owned, 30)
        await reached(c, 400)
        for name in c.storages:
            calls = c.storages[name].calls
            assert calls is not None
            monkeypatch.setattr(
                calls.archiver, "_is_same", lambda archive, partition, session, piece, *_: piece.first < 200
            )
        await keeping(c, "5KB")
        await under_load(c, owned, 40)
        await c.until(lambda: bool(owned.describe().archive_trouble), seconds=120)
        await asyncio.sleep(60)
        found = await document(c)
        assert found is not None
        assert found.floor > 300
        assert all(100 < first < 250 for first in floors(c)), "each keeps what is from the first wrong segment on"
        assert "has other records than this replica" in owned.describe().archive_trouble


@story
async def test_a_timeline_begins_with_what_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has, nothing counts as archived, and nothing is trimmed."""
    store = FaultyStore()

    def away(*_: object) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(Archiver, "_begun", away)
        async with archiving(store) as c:
            owned, session = await rescued_with_less(c)
            await c.opened(owned, above=session - 1)
            await keeping(c, "5KB")
            await under_load(c, owned, 30)
            await asyncio.sleep(60)
            assert owned.describe().archived is None
            assert "the store is away" in owned.describe().archive_trouble
            assert floors(c) == [0, 0, 0]
            patched.undo()
            found = await document(c)
            while found is None or found.timeline == FIRST:
                await asyncio.sleep(0.1)
                found = await document(c)
            manifest = newest_manifests(store, label_of(store, not_done=""), [0])[0]
            pieces = list(pieces_of(manifest.entries, PartitionArchive(store, label_of(store, not_done=""), 0).chunk))
            assert 0 < manifest.shared < len(pieces)
            assert pieces[manifest.shared - 1].last <= 199 < pieces[manifest.shared].last


@story
async def test_a_rescue_brings_back_what_the_archive_proves() -> None:
    """The same scene, and nothing that is archived is given up."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own(settings=SMALL)
        await under_load(c, owned, 10)
        await c.all_hold(199)
        c.storages["s0"].kill()
        await under_load(c, owned, 30)
        last = (await reached(c, 600)).last
        acknowledged = c.storages["s1"].records()[: last + 1]
        for n, name in enumerate(("s1", "s2")):
            c.storages[name].kill()
            c.storages[name].lose_disk(seed=91 + n)
        await c.storages["s0"].start()
        hands = Hands(c)
        scene = await hands.scene(without_archive=False)
        assert (scene.mark, scene.end, scene.taker) == (199, last, "s0")
        assert f"the archive proves ids 200 to {last}: restore them to s0 first" in scene.steps
        done = await hands.rescue(without_archive=False)
        assert done.mark == last
        pipeline = await c.opened(owned, above=done.session - 1)
        for name in ("s1", "s2"):
            await c.storages[name].start()
        await pipeline.committed(pipeline.append(20))
        await c.all_hold(last + 20)
        assert c.check_equal()[: last + 1] == acknowledged
        assert (await c.meta()).lineage.fork == last
        assert flaws(store) == []


@story
async def test_a_second_rescue_brings_back_what_only_the_timeline_before_has_archived() -> None:
    """The only copy is lost while the others copy from it. The store was away, so nothing of its timeline is archived."""
    store = FaultyStore()
    async with archiving(store) as c:
        rate = 0
        settings = replace(SMALL, backup_seconds=10.0, catch_up_bytes_per_second=lambda: rate)
        owned = await c.own(settings=settings)
        await under_load(c, owned, 30)
        await asyncio.sleep(40)
        acknowledged = c.storages["s0"].records()
        for n, name in enumerate(("s1", "s2")):
            await c.restart(name, empty_disk=91 + n)
            c.storages[name].kill()
        rate, store.faults = 2000, Faults(refused=100)
        first = await Hands(c).rescue()
        await c.opened(owned, above=first.session)
        for name in ("s1", "s2"):
            await c.storages[name].start()
        await c.until(lambda: c.last_id("s1") > 0)
        c.storages["s0"].kill()
        rate, store.faults = 0, Faults()
        await c.until(lambda: "s0" not in [one.storage for one in owned.describe().replicas if one.state != "DOWN"])
        assert c.last_id("s1") < first.mark == 599
        done = await Hands(c).rescue(without_archive=False)
        assert done.mark == 599
        pipeline = await c.opened(owned, above=done.session)
        await pipeline.committed(pipeline.append(20))
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 619)
        assert c.check_equal("s1", "s2")[:600] == acknowledged
        assert [one.fork for one in (await c.meta()).timelines] == [599, 599]


@story
async def test_a_second_rescue_takes_nothing_that_the_first_has_given_up() -> None:
    """The archive has more of the timeline that was ended than the log shares with it, and nothing of the new one."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own(settings=replace(SMALL, backup_seconds=10.0))
        await under_load(c, owned, 10)
        c.storages["s0"].kill()
        await under_load(c, owned, 20)
        await asyncio.sleep(40)
        for n, name in enumerate(("s1", "s2")):
            await c.restart(name, empty_disk=91 + n)
            c.storages[name].kill()
        store.faults = Faults(refused=100)
        await c.storages["s0"].start()
        first = await Hands(c).rescue()
        assert first.mark == 199
        pipeline = await c.opened(owned, above=first.session)
        await pipeline.committed(pipeline.append(20))
        acknowledged = c.storages["s0"].records()
        for name in ("s1", "s2"):
            await c.storages[name].start()
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 219)
        for name in ("s0", "s1"):
            c.storages[name].kill()
        store.faults = Faults()
        done = await Hands(c).rescue(without_archive=False)
        assert done.mark == 219
        await c.opened(owned, above=done.session)
        assert c.storages["s2"].records() == acknowledged


@story
async def test_a_second_rescue_asks_the_archive_for_a_replica_that_never_heard_of_the_first() -> None:
    """The only copy is lost before the log opens again, and an older one comes back."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await c.own(settings=replace(SMALL, backup_seconds=10.0))
        await under_load(c, owned, 10)
        await c.all_hold(199)
        c.storages["s1"].kill()
        await under_load(c, owned, 20)
        await asyncio.sleep(40)
        acknowledged = c.storages["s0"].records()
        c.storages["s2"].kill()
        c.storages["s2"].lose_disk(seed=91)
        first = await Hands(c).rescue()
        c.storages["s0"].kill()
        for name in ("s1", "s2"):
            await c.storages[name].start()
        assert first.mark == 599
        assert c.replica("s1").lineage.current == FIRST
        done = await Hands(c).rescue(without_archive=False)
        assert done.mark == 599
        await c.opened(owned, above=done.session)
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 599)
        assert c.check_equal("s1", "s2") == acknowledged


@story
async def test_a_rescue_brings_back_the_tail_and_what_it_is_not_certain_of_has_to_be_the_same() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await own(c)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        await c.all_hold(19)
        c.storages["s0"].kill()
        await pipeline.committed(pipeline.append(30))
        await pipeline.committed(pipeline.append(1))
        await asyncio.sleep(40)
        acknowledged = c.storages["s1"].records()
        for name in ("s1", "s2"):
            c.storages[name].kill()
            c.storages[name].lose_disk(seed=91)
        await c.storages["s0"].start()
        done = await Hands(c).rescue(without_archive=False)
        assert done.mark == 50
        await c.opened(owned, above=done.session - 1)
        assert c.storages["s0"].records() == acknowledged


async def restored(c: Cell, store: FaultyStore, mark: int) -> int:
    """All storages are new ones, under the same key: orders as `waltzctl cluster restore` gives them, and its documents."""
    label = label_of(store, not_done="")
    log = logs_in(store, label, 1)[0]
    point, session = log.at_mark(mark), log.session + SESSIONS_AHEAD
    lineage = log.tree.forked(
        identity=UUID(int=session), fork=point.mark, session=session, cause="cluster restore", began="now", who="me",
        parent=log.archive.timeline,
    )  # fmt: skip
    order = RestoreOrder(
        store="there", archive=label.archive, cluster=KEY, partition=0, number=log.manifest.number,
        sha256=log.manifest.sha256 if log.manifest.number else "", mark=point.mark, session=session,
        timelines=lineage.later, source=log.archive.timeline,
    )  # fmt: skip
    found: dict[str, ReplicaStatus] = {}
    for number, (name, storage) in enumerate(c.storages.items()):
        storage.kill()
        storage.lose_disk(seed=500 + session + number)
        await storage.start()
        assert storage.calls is not None
        storage.calls.restorer._open_store = lambda place: store
        async for state in storage.calls.restorer.restore(order):
            if state.status is not None:
                found[name] = state.status
    meta, version = await c.cluster.partition(0)
    assert meta is not None
    meta = PartitionMeta(
        generation=meta.generation, session=session, opened=session, low_mark=point.mark, members=tuple(sorted(found)),
        replicas={
            name: ReplicaState(session=session, closing=None, incarnation=status.incarnation, acknowledged=point.mark)
            for name, status in found.items()
        },
        decision=Decision(mark=point.mark, session=session), timelines=lineage.later,
    )  # fmt: skip
    await c.cluster.save_partition(0, meta, version)
    return point.mark


@pytest.mark.parametrize("is_sealed", [False, True])
@story
async def test_the_backup_after_restores_under_the_same_key_is_that_of_the_new_log(is_sealed: bool) -> None:
    """Twice: the second one from what the first one has backed up. The cut is within the tail, and within segments."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await own(c)
        for _ in range(12 if is_sealed else 2):
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(30))
            await asyncio.sleep(15)
        await pipeline.committed(pipeline.append(1))
        await asyncio.sleep(30)
        before, shared = stored(store), 50
        for generation, mark in ((6, 50), (7, 35)):
            await owned.close(hand_over=False)
            cut = await restored(c, store, mark)
            assert 29 <= cut <= mark + 1
            shared = min(shared, cut)
            owned = await own(c, generation)
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(8))
            await asyncio.sleep(120)
            said, log = owned.describe(), dict(enumerate(c.storages["s0"].records()))
            assert (said.backup_trouble, said.archive_trouble, said.backup_lag_ms) == ("", "", 0)
            assert stored(store) == log
            assert len(log) == cut + 9
            assert {n: log[n] for n in range(shared + 1)} == {n: before[n] for n in range(shared + 1)}
        assert flaws(store) == []
        label = label_of(store, not_done="")
        assert [one.lineage.number for one in branches_in(store, label, [0])][-2:] == [2, 3]
        assert logs_in(store, label, 1, {0: 1})[0].last >= 60, "the first life can still be restored"


@story
async def test_key_indexes_are_archived_from_the_level_on_at_which_all_can_read_their_names(format_: int) -> None:
    """Before, manifests have the bytes that older versions read. The cluster is finalized while its owner is at work."""
    store, level = FaultyStore(), 0
    async with archiving(store) as c:
        pipeline = await c.opened(await c.own(settings=replace(SETTINGS, level=lambda: level)))
        before = await reached(c, await written(c, pipeline, 20))
        assert not [name for name in store.objects if "/key/" in name]
        assert all(b'"version": 1,' in one.data for name, one in store.objects.items() if name.endswith(".json"))
        level = ARCHIVED_KEYS
        found = await reached(c, await written(c, pipeline, 20))
        manifest = Manifest.decode(store.objects[f"partition-0/manifest/{found.number:010d}.json"].data, "here")
        archive = PartitionArchive(store, label_of(store, not_done=""), 0)
        pieces = list(pieces_of(manifest.entries, archive.chunk))
        assert [piece.key_bytes > 0 for piece in pieces] == [bool(format_) and piece.last > before.last for piece in pieces]
        for piece in [piece for piece in pieces if piece.key_bytes]:
            data = store.objects[piece.name(0)].data
            assert keyed(unkeyed(piece), data, KEY, 0) == (piece, store.objects[piece.key_name(0)].data)

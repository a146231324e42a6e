"""Archiving over a store that fails in every way that it may: what a manifest names is there, whatever happened."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.faulty_store import Faults, FaultyStore, Killed
from tests.tiers import tiers, together
from waltzd.archive import manifest as manifests
from waltzd.archive.manifest import Entry, Manifest
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectExists, StoreUnavailable, UnknownVersion
from waltzd.protocol.descriptions import Archived

CLUSTER, ARCHIVE = UUID(int=2), UUID(int=9)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FAN_OUT", 3)


INDEXES = (b"index", b"Index")
"""Of two storages: their segments of format 0 differ in more than the records."""


def segment(number: int, *, history: bytes = b"", cut: int = 10, index: bytes = INDEXES[0]) -> tuple[Entry, bytes, bytes]:
    """The ids from 10 times the number on, with a key index. `history`: of another log; `cut`: how many ids."""
    records = b"records of segment %d %s" % (number, history)
    data, key = records + index, records + b"locks"
    return Entry(
        level=0, first=10 * number, last=10 * number + cut - 1, record_bytes=len(records), crc=crc32(records), segments=1,
        stored_bytes=len(data), size=len(data), index_bytes=5, sha256=sha256(data).hexdigest(),
        key_bytes=len(key), key_sha256=sha256(key).hexdigest(),
    ), data, key  # fmt: skip


def known(manifest: Manifest) -> Archived:
    return Archived(
        archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last_id=manifest.last
    )  # fmt: skip


@dataclass
class Room:
    """A cluster that archives: its document of the partition, and storages that are killed and start again."""

    store: FaultyStore = field(default_factory=FaultyStore)
    document: Archived = field(default_factory=Archived)
    archived: int = 0
    """Segments, as far as the document says."""

    def archive(self) -> PartitionArchive:
        return PartitionArchive(self.store, label_in(self.store, CLUSTER, lambda: ARCHIVE, self.document.archive), 0)

    def upload(self, archive: PartitionArchive | None = None, index: bytes = INDEXES[0]) -> None:
        """As an owner has it done: the document moves when all of it is there."""
        archive = archive or self.archive()
        found = archive.add(self.document, *segment(self.archived, index=index))
        self.document, self.archived = known(found), self.archived + 1

    def check(self, *, is_whole: bool = False) -> None:
        """Every manifest that is there, of which the document is one, names only what is there, byte for byte."""
        names = [name for name in self.store.objects if "/manifest/" in name]
        texts = [self.store.objects[name].data for name in names]
        found = sorted((Manifest.decode(text, "here") for text in texts), key=lambda one: one.number)
        assert [one.number for one in found] == list(range(1, len(found) + 1))
        assert self.document.number in (len(found), len(found) - 1)
        if self.document.number:
            assert found[self.document.number - 1].sha256 == self.document.sha256
        for one in found:
            self._check(one)
        if is_whole:
            assert self.document.number == self.archived == len(found)

    def _check(self, manifest: Manifest) -> None:
        def fetch(entry: Entry) -> manifests.Chunk:
            return manifests.opened(entry, self.store.objects[entry.name(0)].data, 0, "here")

        pieces = list(manifests.pieces_of(manifest.entries, fetch))
        assert [piece.first for piece in pieces] == [10 * number for number in range(manifest.number)]
        for number, piece in enumerate(pieces):
            stored, key = (self.store.objects[name].data for name in piece.names(0))
            assert (stored, key) in [segment(number, index=index)[1:] for index in INDEXES]
            assert (sha256(stored).hexdigest(), sha256(key).hexdigest()) == (piece.sha256, piece.key_sha256)


def test_a_quiet_store_takes_five_requests_a_segment() -> None:
    room = Room()
    archive = room.archive()
    room.upload(archive)
    room.store.log.clear()
    room.upload(archive)
    assert [what.split("/")[0] + "/" + what.split("/")[1] for what in room.store.log] == [
        "put partition-0/segment", "get partition-0/segment", "put partition-0/key", "get partition-0/key",
        "put partition-0/manifest",
    ]  # fmt: skip
    room.store.log.clear()
    room.upload(PartitionArchive(room.store, archive.label, 0))  # the turn of another storage, which reads the manifest
    assert len([what for what in room.store.log if "chunk" not in what]) == 6
    room.check(is_whole=True)


@together("kill_at", [half / 2 for half in range(120)], quick=10)
def test_a_kill_at_any_operation_leaves_orphans_and_never_holes(kill_at: float) -> None:
    room = Room(FaultyStore(kill_at=kill_at))  # type: ignore[arg-type]
    with contextlib.suppress(Killed):
        while room.archived < 7:
            room.upload()
    room.check()
    room.store.kill_at = None
    while room.archived < 7:
        room.upload()
    room.check(is_whole=True)


FAULTS = st.builds(
    Faults, lost=st.integers(0, 40), refused=st.integers(0, 40), late=st.integers(0, 30), repeated=st.integers(0, 40),
    torn=st.integers(0, 40), rotten=st.integers(0, 40),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(FAULTS, st.integers(0, 1 << 30))
def test_whatever_the_store_does_the_archive_comes_to_be(faults: Faults, seed: int) -> None:
    room = Room(FaultyStore(random.Random(seed), faults))
    for _ in range(10_000):
        if room.archived == 7:
            break
        try:
            room.upload(index=room.store.pick.choice(INDEXES))
        except (StoreUnavailable, ArchiveDamaged, ObjectExists, UnknownVersion):
            continue  # a torn answer looks like damage, and the next does not
    room.check()
    room.store.faults = Faults()
    for index in 7 * INDEXES:
        with contextlib.suppress(ArchiveDamaged):  # the other storage uploaded it, and damaged it since
            if room.archived < 7:
                room.upload(index=index)
    room.check(is_whole=True)


# -- more than one ------------------------------------------------------------------------------------------------------


class Turns:
    """Threads that move one at a time, in an order that a seed decides: a switch before each operation of the store."""

    def __init__(self, seed: int) -> None:
        self._pick = random.Random(seed)
        self._waiting: dict[str, threading.Semaphore] = {}
        self._arrived = threading.Semaphore(0)

    def pause(self) -> None:
        turn = self._waiting[threading.current_thread().name] = threading.Semaphore(0)
        self._arrived.release()
        turn.acquire()

    def run(self, tasks: list[Callable[[], None]]) -> None:
        def work(task: Callable[[], None]) -> None:
            self.pause()
            task()
            self._arrived.release()

        threads = [threading.Thread(target=work, args=(task,), name=str(at)) for at, task in enumerate(tasks)]
        for thread in threads:
            thread.start()
        for _ in threads:
            self._arrived.acquire()
        while self._waiting:
            self._waiting.pop(self._pick.choice(sorted(self._waiting))).release()
            self._arrived.acquire()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("seed", tiers(range(40), quick=4, short=20))
def test_two_owners_make_one_archive(seed: int) -> None:
    """Each with a document as it was read at some time; the coordinator takes what goes forward."""
    turns = Turns(seed)
    room = Room(FaultyStore(random.Random(seed), Faults(lost=10, repeated=10), before_each=turns.pause))
    faults: list[BaseException] = []

    def own() -> None:
        for _ in range(30):
            document, number = room.document, room.archived
            if number == 7:
                return
            try:
                archive = PartitionArchive(
                    room.store, label_in(room.store, CLUSTER, lambda: ARCHIVE, document.archive), 0
                )  # fmt: skip
                found = archive.add(document, *segment(number))
            except StoreUnavailable:
                continue
            except BaseException as error:  # noqa: BLE001  told by the test
                faults.append(error)
                return
            if room.document == document:
                room.document, room.archived = known(found), number + 1

    turns.run([own, own])
    room.store.before_each = lambda: None
    assert faults == []
    assert room.archived == 7
    room.check(is_whole=True)


def test_two_storages_that_begin_at_once_begin_one_archive() -> None:
    store = FaultyStore()
    first = label_in(store, CLUSTER, lambda: UUID(int=3), None)
    assert label_in(store, CLUSTER, lambda: UUID(int=4), None) == first == label_in(store, CLUSTER, UUID, first.archive)
    raced = FaultyStore()
    put, raced.put_new = raced.put_new, lambda name, data: (put(name, first.text), put(name, data))[1]  # type: ignore[method-assign]
    assert label_in(raced, CLUSTER, lambda: UUID(int=4), None) == first


# -- what is not taken ---------------------------------------------------------------------------------------------------


def test_a_store_of_another_cluster_or_an_emptied_one_is_refused() -> None:
    room = Room()
    room.upload()
    with pytest.raises(ForeignArchive, match=f"this is the cluster {UUID(int=7)}"):
        label_in(room.store, UUID(int=7), lambda: ARCHIVE, None)
    with pytest.raises(ForeignArchive, match=f"this is the archive {UUID(int=7)}"):
        label_in(room.store, CLUSTER, lambda: ARCHIVE, UUID(int=7))
    room.store.objects.clear()
    with pytest.raises(ForeignArchive, match="was emptied"):
        room.archive()
    assert room.store.objects == {}


def test_another_history_is_not_taken_over() -> None:
    """Another owner has archived what this log does not have."""
    room = Room()
    room.upload()
    other = Room(room.store, room.document, 1)
    other.upload()
    archive = room.archive()
    with pytest.raises(ArchiveDamaged, match="has other records from id 10 to 19"):
        archive.add(room.document, *segment(1, history=b"another"))
    with pytest.raises(ObjectExists, match="ends at id 19, and the segment of this replica at id 14"):
        archive.add(room.document, *segment(1, cut=5))
    assert archive.add(room.document, *segment(1)).number == 2  # the same: it is taken over


def test_a_manifest_that_is_not_the_known_one_is_not_built_upon() -> None:
    room = Room()
    room.upload()
    room.upload()
    with pytest.raises(ArchiveDamaged, match="is not the manifest that the cluster knows"):
        room.archive().add(Archived(archive=ARCHIVE, number=1, sha256=room.document.sha256, last_id=9), *segment(1))
    last = room.store.objects[manifests.manifest_name(0, 2)]
    last.data = last.data.replace(b'"number": 2', b'"number": 3')
    with pytest.raises(ArchiveDamaged):
        room.archive().newest(Archived(archive=ARCHIVE))
    with pytest.raises(ArchiveDamaged):
        room.archive().add(Archived(archive=ARCHIVE, number=1, sha256=first_sha256(room), last_id=9), *segment(1))


def first_sha256(room: Room) -> str:
    return sha256(room.store.objects[manifests.manifest_name(0, 1)].data).hexdigest()


def test_the_newest_is_found_from_any_that_is_known() -> None:
    room = Room()
    for _ in range(5):
        room.upload()
    newest = room.archive().newest(Archived(archive=ARCHIVE))
    assert known(newest) == room.document == known(room.archive().newest(room.document))


def test_what_rotted_under_its_name_is_written_again() -> None:
    room = Room()
    piece, data, key = segment(0)
    room.store.put_new(piece.name(0), data[:-1] + b"?")
    room.store.put_new(piece.key_name(0), key[:-1] + b"?")
    room.upload()
    room.check(is_whole=True)


def test_one_wrong_answer_replaces_nothing() -> None:
    """A write that fails would damage what a manifest names."""
    room = Room()
    room.upload()
    archive, sound = room.archive(), dict(room.store.objects)
    faults = iter([Faults(), Faults(torn=100)])  # of the attempt to create the object, and of the read that follows

    def draw() -> None:
        room.store.faults = next(faults, Faults())

    room.store.before_each = draw
    archive.put_back(*segment(0)[:2])
    assert room.store.objects == sound


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_manifest_of_another_storage_counts_while_its_objects_are_sound(is_gone: bool) -> None:
    room = Room()
    room.upload()
    other = Room(room.store, room.document, 1)
    other.upload()
    name = segment(1)[0].name(0)
    sound = room.store.objects[name]
    room.store.objects[name] = replace(sound, data=sound.data[:-1] + b"?")
    if is_gone:
        del room.store.objects[name]
    with pytest.raises(ArchiveDamaged, match=f"{name} has other bytes than its manifest states"):
        room.upload(index=INDEXES[1])
    room.upload()  # by the storage that has them: it puts them back
    assert room.document == other.document
    room.check(is_whole=True)

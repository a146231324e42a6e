"""Beside a cluster, an archive gives what the storages uploaded; damage is named, and little is fetched for little.

That its rows are those of the storages is told by `test_batch_segment.py`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from waltz_spark.export.destination import LocalDestination
from waltz_spark.log import archive_segments
from waltz_spark.log.archive_segments import ArchiveSegments, ObjectFile
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import JoinedOrigin, LiveOrigin
from waltz_spark.log.origin import Catalog, Origin, Span

from tests.simulation.faulty_store import FaultyStore
from tests.spark.archiving import archive_of, archived, joined, make_small, only_archived, plain, rows
from tests.spark.batches import KEY, Log, microseconds, mixed_log
from tests.spark.exporting import Exporting
from tests.spark.growing import GrowingStorage
from waltzctl.main import run
from waltzd.archive import manifest
from waltzd.archive.location import open_archive
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, StoreRefused, StoreUnavailable

NUMBERS = iter(range(1_000_000))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultyStore, ArchiveSegments]]:
    """A store in memory, and an origin that reads it."""
    store = FaultyStore()
    monkeypatch.setattr(archive_segments, "open_archive", lambda _: store)
    yield store, ArchiveSegments(place=f"memory {next(NUMBERS)}")
    archive_segments._opened.cache_clear()


def test_little_is_fetched_for_little(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_segments, "READ_BYTES", 16 << 20)
    log = mixed_log(tmp_path / "s" / "0", 1, batches=120, plain=False)
    store, archive = kept
    archived([log.directory], store)
    origin = joined(log, archive)
    catalog = only_archived(origin.catalog())
    assert len(catalog.extents) > 9
    extent = catalog.extents[4]
    store.log.clear()
    assert len(rows(origin, catalog, extent.span)) == extent.span.count
    (fetched,) = set(store.log)
    assert "/segment/" in fetched, "one segment, and nothing else"
    assert len(store.log) == 2, "its records and its index"
    store.log.clear()
    one = Span(extent.span.last, extent.span.last)
    assert len(rows(origin, catalog, one)) == 1
    assert len(store.log) <= 4, "its header, its index, and where the index says that it is"
    assert {what.split()[1] for what in store.log} == {fetched.split()[1]}


def test_whatever_bit_is_wrong_no_wrong_row_is_given_and_the_object_and_its_ids_are_named(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments]
) -> None:
    log = mixed_log(tmp_path / "s" / "0", 2, batches=30)
    store, archive = kept
    archived([log.directory], store)
    origin = joined(log, archive)
    catalog = only_archived(origin.catalog())
    expected = rows(origin, catalog, catalog.spans[0])
    chance, refused = random.Random(3), 0
    for extent in catalog.extents:
        name = next(name for name in store.objects if f"/segment/{extent.span.first:019d}-" in name)
        whole = store.objects[name].data
        own = expected[extent.span.first : extent.span.last + 1]
        for _ in range(12):
            at = chance.randrange(len(whole))
            store.objects[name].data = whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
            error = damage(origin, catalog, extent.span, own)
            if error is not None:
                refused += 1
                ids = f"ids {extent.span.first} to {extent.span.last} of partition 0"
                assert error.message.startswith(f"a faulty store: {name}, {ids}: ")
                assert error.facts["first_id"] == str(extent.span.first)
        store.objects[name].data = whole
    assert refused > 10


def damage(origin: Origin, catalog: Catalog, span: Span, expected: list[dict[str, Any]]) -> ArchiveDamaged | None:
    """None where what is damaged is only an index."""
    try:
        assert rows(origin, catalog, span) == expected
    except ArchiveDamaged as error:
        return error
    return None


def test_what_was_exchanged_cut_short_or_removed_is_named(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments]
) -> None:
    store, archive = kept
    storage, other = (GrowingStorage(tmp_path / name, key=KEY, partitions=1, assigned=[0]) for name in "ab")
    for number in range(3):
        storage.append(0, [b"ours %d" % number] * 5)
        other.append(0, [b"else %d" % number] * 5)
    archived([storage.directory / "0"], store, open_segments=0)
    storage.commit()
    live = DirectoryOrigin(storages=(str(storage.directory),))
    origin = JoinedOrigin(archive=archive, live=cast(LiveOrigin, live))
    catalog = origin.catalog()
    (name,) = [name for name in store.objects if f"/segment/{5:019d}-" in name]
    ours = store.objects[name].data
    theirs = b"".join((other.directory / "0" / f"{5:019d}.{kind}").read_bytes() for kind in ("seg", "idx"))
    assert len(theirs) == len(ours)
    for data, what in (
        (theirs, "it holds other records than its manifest states"),
        (ours[: len(ours) // 2], "ids .* of partition 0"),
        (None, "it is not in the store"),
    ):
        if data is None:
            del store.objects[name]
        else:
            store.objects[name].data = data
        with pytest.raises(ArchiveDamaged, match=rf"{name}, ids 5 to 9 of partition 0: .*{what}"):
            rows(origin, catalog, Span(0, 14))
    assert len(rows(origin, catalog, Span(0, 4)) + rows(origin, catalog, Span(10, 14))) == 10, "all others are there"


def test_what_is_no_archive_and_one_that_is_damaged(tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments]) -> None:
    store, archive = kept
    log = mixed_log(tmp_path / "s" / "0", 2)
    origin, alone = joined(log, archive), plain(log).catalog()
    with pytest.raises(ForeignArchive, match="holds no archive"):
        origin.catalog()
    store.put_new("archive.json", manifest.Label(archive=KEY, cluster=KEY).text)
    assert origin.catalog() == alone, "an archive without a segment gives nothing"
    del store.objects["archive.json"]
    archived([log.directory], store)
    newest = max(name for name in store.objects if "/manifest/" in name)
    store.objects[newest].data = store.objects[newest].data.replace(b'"', b"'", 1)
    with pytest.raises(ArchiveDamaged, match=newest):
        origin.catalog()


def test_a_directory_that_is_not_mounted_is_no_empty_archive(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="there is no directory") as found:
        ArchiveSegments(place=str(tmp_path / "missing")).contents([0])
    assert found.value.detail_not_done == "nothing was read"


def test_a_store_that_is_away_is_no_writer_s_trouble(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = mixed_log(tmp_path / "s" / "0", 2)
    store, archive = kept
    archived([log.directory], store)
    origin = joined(log, archive)
    catalog = origin.catalog()

    def away(*_: object) -> bytes:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "get_range", away)
    for ask in (origin.catalog, lambda: rows(origin, catalog, Span(3, 9))):
        with pytest.raises(StoreUnavailable) as found:
            ask()
        assert "written" not in found.value.detail_not_done
        assert "read again" in found.value.detail_next_step


def test_a_stream_does_not_list_the_store_with_every_look(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_segments, "REMEMBERED_SECONDS", 1e9)
    log = mixed_log(tmp_path / "s" / "0", 2)
    store, archive = kept
    archived([log.directory], store)
    first = archive.contents([0])
    store.log.clear()
    assert archive.contents([0]) == first
    assert store.log == []
    assert archive.contents([0, 1]).pieces == first.pieces
    assert store.log != [], "other partitions are another question"
    store.log.clear()
    assert copy.deepcopy(archive).contents([0]) == first
    assert store.log != [], "a copy remembers nothing"


def test_bytes_are_fetched_once(kept: tuple[FaultyStore, ArchiveSegments]) -> None:
    store, _ = kept
    data = random.Random(1).randbytes(10_000)
    store.put_new("a", data)
    file = ObjectFile(store, "a", 100, 9000, 1000)
    chance, fetched, offset = random.Random(2), 0, 0
    get = store.get_range

    def counted(name: str, offset: int, size: int) -> bytes:
        nonlocal fetched
        fetched += size
        return get(name, offset, size)

    store.get_range = counted  # type: ignore[method-assign]
    while offset < 9000:  # as segments are read: a window, and on from the last whole batch in it
        assert file.read(offset, 700) == data[100 + offset : 100 + min(9000, offset + 700)]
        offset += chance.randrange(1, 700)
    assert fetched == 9000
    assert file.read(8990, 100) == data[9090:9100]
    assert file.read(9000, 5) == file.read(10_000, 5) == b""


# -- beside a cluster --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_what_is_archived_comes_from_there_and_the_rest_from_the_cluster(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments], seed: int
) -> None:
    log = mixed_log(tmp_path / "s" / "0", seed)
    store, archive = kept
    archived([log.directory], store)
    both, theirs = joined(log, archive), plain(log)
    catalog, whole = both.catalog(), theirs.catalog()
    last = archive.contents([0]).pieces[0][-1].last
    assert catalog.spans == whole.spans
    for path in log.directory.iterdir():  # what is archived leaves
        if int(path.name[:19]) <= last:
            path.unlink()
    assert [row["txid"] for row in rows(both, catalog, Span(0, 10**9))] == list(range(len(log.rows)))
    for row in log.rows[:: 1 + len(log.rows) // 20]:
        if row["time"] is not None:
            time = microseconds(row["time"])
            expected = next(each["txid"] for each in log.rows if each["time"] and microseconds(each["time"]) >= time)
            assert both.first_at(catalog, 0, time) == expected
    assert both.first_at(catalog, 0, 1 << 62) == len(log.rows)
    assert [both.header(extent) is not None for extent in catalog.extents] == [
        extent.span.last <= last for extent in catalog.extents
    ]


def test_a_cluster_says_how_far_its_log_goes(tmp_path: Path, kept: tuple[FaultyStore, ArchiveSegments]) -> None:
    store, archive = kept
    storage = GrowingStorage(tmp_path / "s", key=KEY, partitions=2, assigned=[0, 1])
    for number in range(4):
        storage.append(0, [b"%d" % number] * 5)
    archived([storage.directory / "0"], store, open_segments=0)
    storage.ends[0] = 12
    storage.commit()
    live = DirectoryOrigin(storages=(str(storage.directory),))
    catalog = JoinedOrigin(archive=archive, live=cast(LiveOrigin, live)).catalog()
    assert catalog.spans == {0: Span(0, 11), 1: Span(0, -1)}
    assert [extent.span for extent in catalog.extents] == [Span(0, 4), Span(5, 9), Span(10, 11)]
    foreign = GrowingStorage(tmp_path / "f", key=UUID(int=5), partitions=2, assigned=[0])
    with pytest.raises(ForeignArchive, match=str(foreign.key)):
        JoinedOrigin(archive=archive, live=cast(LiveOrigin, DirectoryOrigin(storages=(str(foreign.directory),)))).catalog()


# -- exports -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class WithAnArchive(Exporting):
    log: Log
    place: Path

    @property
    def origin(self) -> Any:
        return joined(self.log, ArchiveSegments(place=str(self.place)))


def test_an_export_with_an_archive_is_that_of_the_storage_file_by_file(tmp_path: Path) -> None:
    log = mixed_log(tmp_path / "s" / "0", 1)
    storage = cast(GrowingStorage, SimpleNamespace(directory=log.directory.parent))
    place = archive_of([log.directory], tmp_path / "archive")
    one, other = (LocalDestination(str(tmp_path / name)) for name in ("one", "other"))
    ours = Exporting(storage=storage, destination=one, allows_uncommitted=True, file_data_bytes=None).export()
    exporting = WithAnArchive(storage=storage, destination=other, file_data_bytes=None, log=log, place=place)
    theirs = exporting.export()
    exporting.check_proof(theirs)

    def proofs(found: Any) -> list[Any]:
        return [replace(piece, path="") for piece in found.pieces]

    assert proofs(ours) == proofs(theirs)
    assert (ours.partitions[0].crc, ours.partitions[0].span) == (theirs.partitions[0].crc, theirs.partitions[0].span)


def test_an_archive_without_its_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = mixed_log(tmp_path / "s" / "0", 1)
    archive = str(archive_of([log.directory], tmp_path / "archive"))
    for words, next_step in (
        (["spark-export", str(tmp_path / "out"), "--source", archive], f"`waltzctl cluster restore {archive}`"),
        (["spark-export", str(tmp_path / "out"), "--source", "s3://b/f"], "--archive of the command"),
        (["export", "verify", archive], f"`waltzctl archive verify {archive}`"),
    ):
        assert run(words) == 2
        assert next_step in " ".join(capsys.readouterr().err.split())


def test_a_bucket_that_holds_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server", reason="the S3 server comes with the packages of developers")
    import boto3

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        endpoint = "http://{}:{}".format(*running.get_host_and_port())
        settings = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "DEFAULT_REGION": "us-east-1"}
        for name, value in {**settings, "ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="archives")
        log, place = mixed_log(tmp_path / "s" / "0", 3), "s3://archives/orders"
        archived([log.directory], open_archive(place))
        origin, theirs = joined(log, ArchiveSegments(place=place)), plain(log)
        catalog = only_archived(origin.catalog())
        span = catalog.spans[0]
        assert rows(origin, catalog, span) == rows(theirs, theirs.catalog(), span)
    finally:
        running.stop()

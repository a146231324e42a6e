"""An archive gives what the storages gave that uploaded it, damage is named, and little is fetched for little."""

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
from waltz_spark.export.destination import LocalDestination, destination_of
from waltz_spark.export.export import Range
from waltz_spark.export.options import Asked
from waltz_spark.export.origin_options import is_archive
from waltz_spark.log import archive_origin
from waltz_spark.log.archive_origin import ArchiveOrigin, ObjectFile
from waltz_spark.log.decode import record_batch
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.groups import read_grouped
from waltz_spark.log.joined_origin import JoinedOrigin
from waltz_spark.log.live_origin import LiveOrigin
from waltz_spark.log.origin import Catalog, Origin, Span
from waltz_spark.log.plan import Sizing
from waltz_spark.table.columns import columns_of
from waltz_spark.table.pushdown import Filters, Ranges
from waltz_spark.table.read_task import Reading, tasks

from tests.simulation.faulty_store import FaultyStore
from tests.spark.archiving import archive_of, archived
from tests.spark.batches import KEY, Log, microseconds, mixed_log
from tests.spark.exporting import Exporting
from tests.spark.growing import GrowingStorage
from waltzctl.main import run
from waltzctl.shell.reach import ClusterOptions
from waltzd.archive import manifest
from waltzd.archive.metadata import save_metadata
from waltzd.archive.place import open_archive
from waltzd.cluster.cluster import ROOT
from waltzd.cluster.documents import ClusterMeta
from waltzd.cluster.metadata import Saved, write
from waltzd.errors import (
    ArchiveDamaged,
    BadArgument,
    ForeignArchive,
    NoSuchPartition,
    NothingHere,
    StoreRefused,
    StoreUnavailable,
)
from waltzd.format.record import NO_TIME

NUMBERS = iter(range(1_000_000))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks after a few segments, and windows that end anywhere."""
    monkeypatch.setattr(manifest, "FAN_OUT", 3)
    monkeypatch.setattr(archive_origin, "READ_BYTES", 1500)
    monkeypatch.setattr(archive_origin, "LOOK_BYTES", 200)
    monkeypatch.setattr(archive_origin, "REMEMBERED_SECONDS", 0.0)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultyStore, ArchiveOrigin]]:
    """A store in memory, and an origin that reads it."""
    store = FaultyStore()
    monkeypatch.setattr(archive_origin, "open_archive", lambda _: store)
    yield store, ArchiveOrigin(place=f"memory {next(NUMBERS)}")
    archive_origin._opened.cache_clear()


def rows(origin: Origin, catalog: Catalog, span: Span, *, batch_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for extent in catalog.extents:
        part = extent.span.cut(span)
        if part.count:
            runs = read_grouped(origin, extent, part, batch_bytes=batch_bytes, with_locks=True)
            found += [row for run, groups in runs for row in record_batch(run, extent.partition, groups).to_pylist()]
    return found


def plain(log: Log) -> DirectoryOrigin:
    return DirectoryOrigin(storages=(str(log.directory.parent),), allows_uncommitted=True)


@pytest.mark.parametrize("seed", range(5))
def test_any_ids_of_an_archive_are_those_of_the_storage(tmp_path: Path, seed: int) -> None:
    log = mixed_log(tmp_path / "s" / "0", seed, plain=seed != 4)
    origin = ArchiveOrigin(place=str(archive_of([log.directory], tmp_path / "archive")))
    origin, catalog = copy.deepcopy((origin, origin.catalog()))
    last = max(extent.span.last for extent in catalog.extents)
    assert (catalog.key, catalog.spans) == (KEY, {0: Span(0, last)})
    assert 0 < last < len(log.rows) - 1, "what is not sealed is not archived"
    theirs = plain(log)
    expected = rows(theirs, theirs.catalog(), catalog.spans[0])
    chance = random.Random(seed)
    for batch_bytes in (1, 300, 1 << 20):
        assert rows(origin, catalog, catalog.spans[0], batch_bytes=batch_bytes) == expected
        for _ in range(6):
            first = chance.randrange(last + 1)
            some = Span(first, chance.randrange(first, last + 1))
            assert rows(origin, catalog, some, batch_bytes=batch_bytes) == expected[some.first : some.last + 1]


@pytest.mark.parametrize("seed", range(3))
def test_the_first_of_each_time_and_what_filters_let_through(tmp_path: Path, seed: int) -> None:
    log = mixed_log(tmp_path / "s" / "0", seed)
    origin = ArchiveOrigin(place=str(archive_of([log.directory], tmp_path / "archive")))
    catalog = origin.catalog()
    count = catalog.spans[0].count
    times = [NO_TIME if row["time"] is None else microseconds(row["time"]) for row in log.rows[:count]]
    for time in {0, *(time + more for time in times if time > 0 for more in (-1, 0, 1))}:
        expected = next((number for number, when in enumerate(times) if when >= time), count)
        assert origin.first_at(catalog, 0, time) == expected
    names = ("partition", "txid", "data", "time")
    since = sorted(times)[count // 2]
    filters = Filters(time=Ranges([(since, since + 5_000_000)]))
    given = tasks(origin, catalog, catalog.spans, Sizing(), filters)
    reading = Reading(origin, columns_of(names), filters)
    found = [row for task in given for batch in reading.batches(task) for row in batch.to_pylist()]
    inside = zip(log.rows[:count], times, strict=True)
    assert found == [{name: row[name] for name in names} for row, time in inside if since <= time <= since + 5_000_000]


def test_little_is_fetched_for_little(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_origin, "READ_BYTES", 16 << 20)
    log = mixed_log(tmp_path / "s" / "0", 1, batches=120, plain=False)
    store, origin = kept
    archived([log.directory], store)
    catalog = origin.catalog()
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
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin]
) -> None:
    log = mixed_log(tmp_path / "s" / "0", 2, batches=30)
    store, origin = kept
    archived([log.directory], store)
    catalog = origin.catalog()
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


def test_what_was_exchanged_cut_short_or_removed_is_named(tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin]) -> None:
    store, origin = kept
    storage, other = (GrowingStorage(tmp_path / name, key=KEY, partitions=1, assigned=[0]) for name in "ab")
    for number in range(3):
        storage.append(0, [b"ours %d" % number] * 5)
        other.append(0, [b"else %d" % number] * 5)
    archived([storage.directory / "0"], store, open_segments=0)
    catalog = origin.catalog()
    (name,) = [name for name in store.objects if f"/segment/{5:019d}-" in name]
    ours = store.objects[name].data
    theirs = b"".join((other.directory / "0" / f"{5:019d}.{kind}").read_bytes() for kind in ("seg", "idx"))
    assert len(theirs) == len(ours)
    for data, what in (
        (theirs, "it holds other records than its manifest says"),
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


def test_what_is_no_archive_and_what_it_does_not_have(tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin]) -> None:
    store, origin = kept
    with pytest.raises(ForeignArchive, match="holds no archive"):
        origin.catalog()
    store.put_new("archive.json", manifest.Label(archive=KEY, cluster=KEY).text)
    with pytest.raises(NothingHere, match="has no segment yet"):
        origin.catalog()
    log = mixed_log(tmp_path / "s" / "0", 2)
    del store.objects["archive.json"]
    archived([log.directory], store)
    assert origin.catalog([0]).spans == origin.catalog().spans
    with pytest.raises(NoSuchPartition, match="has nothing of partition 4"):
        origin.catalog([0, 4])
    newest = max(name for name in store.objects if "/manifest/" in name)
    store.objects[newest].data = store.objects[newest].data.replace(b'"', b"'", 1)
    with pytest.raises(ArchiveDamaged, match=newest):
        origin.catalog()


def test_a_directory_that_is_not_mounted_is_no_empty_archive(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="there is no directory") as found:
        ArchiveOrigin(place=str(tmp_path / "missing")).catalog()
    assert found.value.detail_not_done == "nothing was read"


def test_a_store_that_is_away_is_no_writer_s_trouble(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = mixed_log(tmp_path / "s" / "0", 2)
    store, origin = kept
    archived([log.directory], store)
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
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_origin, "REMEMBERED_SECONDS", 1e9)
    log = mixed_log(tmp_path / "s" / "0", 2)
    store, origin = kept
    archived([log.directory], store)
    first = origin.catalog()
    store.log.clear()
    assert origin.catalog() == first
    assert store.log == []
    assert origin.catalog([0]).spans == first.spans
    assert store.log != [], "other partitions are another question"
    store.log.clear()
    assert copy.deepcopy(origin).catalog() == first
    assert store.log != [], "a copy remembers nothing"


def test_bytes_are_fetched_once(kept: tuple[FaultyStore, ArchiveOrigin]) -> None:
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


def joined(log: Log, archive: ArchiveOrigin) -> JoinedOrigin:
    """Directories in place of the cluster: an origin like any other."""
    return JoinedOrigin(archive=archive, live=cast(LiveOrigin, plain(log)))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_archived_comes_from_there_and_the_rest_from_the_cluster(
    tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin], seed: int
) -> None:
    log = mixed_log(tmp_path / "s" / "0", seed)
    store, archive = kept
    archived([log.directory], store)
    both, theirs = joined(log, archive), plain(log)
    catalog, whole = both.catalog(), theirs.catalog()
    last = archive.catalog().spans[0].last
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


def test_a_cluster_says_how_far_its_log_goes(tmp_path: Path, kept: tuple[FaultyStore, ArchiveOrigin]) -> None:
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
class OfAnArchive(Exporting):
    place: Path

    @property
    def origin(self) -> Any:
        return ArchiveOrigin(place=str(self.place))


def exports(tmp_path: Path) -> tuple[Exporting, OfAnArchive]:
    """Of a storage, and of an archive of what it has sealed."""
    log = mixed_log(tmp_path / "s" / "0", 1)
    storage = cast(GrowingStorage, SimpleNamespace(directory=log.directory.parent))
    place = archive_of([log.directory], tmp_path / "archive")
    one, other = (LocalDestination(str(tmp_path / name)) for name in ("one", "other"))
    return (
        Exporting(storage=storage, destination=one, allows_uncommitted=True, file_data_bytes=None),
        OfAnArchive(storage=storage, destination=other, file_data_bytes=None, place=place),
    )


def test_an_export_of_an_archive_is_that_of_the_storage_file_by_file(tmp_path: Path) -> None:
    one, other = exports(tmp_path)
    theirs = other.export()
    last = theirs.partitions[0].span.last
    ours = one.export(Range(last={0: last}))
    other.check_proof(theirs)

    def proofs(found: Any) -> list[Any]:
        return [replace(piece, path="") for piece in found.pieces]

    assert proofs(ours) == proofs(theirs)
    assert (ours.partitions[0].crc, ours.partitions[0].span) == (theirs.partitions[0].crc, theirs.partitions[0].span)
    survey = ArchiveOrigin(place=str(other.place)).contents().pieces[0]
    assert manifest.total_of(survey).crc == ours.partitions[0].crc, "the archive's own manifest says the same"


def test_commands_understand_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, other = exports(tmp_path)
    archive, output = str(other.place), str(tmp_path / "other")
    assert run(["spark-export", output, "--source", archive, "--dry-run"]) == 0
    assert f"the archive {archive}" in capsys.readouterr().out
    other.export()
    assert run(["spark-export", output, "--source", archive]) == 0, "nothing is new"
    assert run(["export", "verify", output, "--against-log", "--source", archive]) == 0
    capsys.readouterr()
    assert run(["export", "verify", archive, "--progress", "off"]) == 8
    told = capsys.readouterr().out
    assert "the store has no saved documents" in told, "nobody saved any here"
    assert "segment/" not in told
    segment = next(Path(archive).glob("partition-0/segment/*"))
    segment.write_bytes(b"x" + segment.read_bytes()[1:])
    assert run(["export", "verify", archive]) == 8
    assert segment.name in capsys.readouterr().out
    assert run(["export", "verify", output, "--against-log", "--source", archive]) == 8
    assert run(["export", "verify", archive, "--against-log", "--source", archive]) == 2
    assert run(["spark-export", str(tmp_path / "new"), "--source", archive, "--archive", archive]) == 2
    assert run(["spark-export", str(other.place / "inside"), "--source", archive]) == 2


def test_options_name_an_archive_alone_or_beside_a_cluster(tmp_path: Path) -> None:
    _, other = exports(tmp_path)
    alone = ArchiveOrigin(place=str(other.place))
    assert Asked(sources=(str(other.place),), cluster=ClusterOptions()).origin() == alone
    with pytest.raises(BadArgument, match="allowUncommitted"):
        Asked(sources=(str(other.place),), allow_uncommitted=True, cluster=ClusterOptions()).origin()


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
        origin = Asked(sources=(place,), cluster=ClusterOptions()).origin()
        assert origin == ArchiveOrigin(place=place), "no option says that it is no export"
        catalog, theirs = origin.catalog(), plain(log)
        span = catalog.spans[0]
        assert rows(origin, catalog, span) == rows(theirs, theirs.catalog(), span)
        exported = "s3://archives/export"
        Exporting(
            storage=cast(GrowingStorage, SimpleNamespace(directory=log.directory.parent)), allows_uncommitted=True,
            destination=destination_of(f"{exported}?scheme=http&endpoint_override={endpoint.partition('//')[2]}"),
        ).export()  # fmt: skip
        assert (is_archive(place), is_archive(exported)) == (True, False)
        with pytest.raises(BadArgument, match="is no directory of a storage"):
            Asked(sources=(exported,), cluster=ClusterOptions()).origin()
    finally:
        running.stop()


def test_the_group_log_is_left_out_where_the_documents_say_which_one_it_is(tmp_path: Path) -> None:
    """It holds nothing of applications."""
    logs = [mixed_log(tmp_path / "s" / str(number), 1, partition=number, plain=False).directory for number in (0, 1)]
    place = str(archive_of(logs, tmp_path / "archive"))
    assert sorted(ArchiveOrigin(place=place).catalog().spans) == [0, 1]
    meta = ClusterMeta(name="orders", key=KEY, partitions=1, created="2026", format=1)
    save_metadata(open_archive(place), write(Saved(moment="2026-11-24T10:00:00+00:00", documents={ROOT: meta})))
    origin = ArchiveOrigin(place=place)
    assert sorted(origin.catalog().spans) == [0]
    with pytest.raises(NoSuchPartition):
        origin.catalog([1])

"""A real cluster, read while it works: from replicas, from owners, through the end of a storage."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest
from waltz_spark.export.origin_options import open_origin
from waltz_spark.log.archive_segments import ArchiveSegments
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import FRAME_BYTES, LiveOrigin, Route, _Memory, extents_of
from waltz_spark.log.origin import CREDIT_SECONDS, Catalog, Extent, Origin, Span, Throttle
from waltz_spark.log.plan import Sizing, plan, runs
from waltz_spark.table.pushdown import Filters
from waltz_spark.table.read_task import tasks

from waltzctl.local_cluster.local import ROOT, LocalCluster
from waltzctl.shell.blueprint import ZOOKEEPER
from waltzd import BlockingClient, FeedMode
from waltzd.archive.manifest import manifest_name, total_of
from waltzd.errors import BadArgument, CannotConnect, NoSuchPartition, OnlyInArchive, Trimmed
from waltzd.errors.operations import LogUnreadable, NodeMissing, StoreRefused
from waltzd.format.checksum import crc32
from waltzd.format.record import Run
from waltzd.protocol.locks import Committed
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

PARTITIONS, RECORDS = 3, 1500
BATCH = 4 << 20
NOBODY = "127.0.0.1:9"


def payload(partition: int, number: int) -> bytes:
    return b"%d:%d " % (partition, number) + b"x" * (number * 7 % 900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {
        "storage": {"segment_bytes_max": "64KiB", "reserve_bytes": "1MiB"},
        "server": {"segment_bytes_max": "64KiB"},
    }
    home = tmp_path_factory.mktemp("origin")
    made = LocalCluster.make(home / "c", partitions=PARTITIONS, servers=2, archive=str(home / "archive"), settings=settings)
    try:
        made.start()
        for partition in range(PARTITIONS):
            for _ in range(5):  # what is committed, replicas hear with the next records
                append(made, partition, RECORDS // 5)
        wait_until_level(made)
        yield made
    finally:
        made.kill()


LOG: dict[int, list[bytes]] = {partition: [] for partition in range(PARTITIONS)}
"""What the cluster above has taken."""


def append(cluster: LocalCluster, partition: int, count: int) -> None:
    log = LOG[partition]
    payloads = [payload(partition, number) for number in range(len(log), len(log) + count)]
    with BlockingClient(servers(cluster), feed=FeedMode.NONE, partitions=[partition]) as client:
        assert list(client.append_many(payloads, partition=partition).ids) == list(range(len(log), len(log) + count))
    log += payloads


def wait_until_level(cluster: LocalCluster) -> None:
    """Until every storage has everything on its disk: a majority is enough for what was appended."""
    patience, ends = time.monotonic() + 60, {partition: len(log) - 1 for partition, log in LOG.items()}
    for directory in cluster.storage_directories:
        origin = DirectoryOrigin(storages=(str(directory),), allows_uncommitted=True)
        while {partition: span.last for partition, span in origin.catalog().spans.items()} != ends:
            assert time.monotonic() < patience, f"{directory} does not have everything"
            time.sleep(0.02)


def addresses(cluster: LocalCluster, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(cluster.blueprint.addresses(name)[0] for name in names)


def servers(cluster: LocalCluster) -> tuple[str, ...]:
    return addresses(cluster, cluster.blueprint.server_names)


def by_coordinator(cluster: LocalCluster) -> LiveOrigin:
    return LiveOrigin(coordinator=cluster.blueprint.addresses(ZOOKEEPER)[0], root=ROOT)


def payloads_of(found: Iterator[Run]) -> list[bytes]:
    return [run.record(number).payload for run in found for number in range(len(run))]


def read(origin: LiveOrigin | DirectoryOrigin, catalog: Catalog, partition: int, **sizing: int) -> list[bytes]:
    splits = plan(catalog, {partition: catalog.spans[partition]}, Sizing(**sizing))
    return payloads_of(run for split in splits for run in runs(origin, split, batch_bytes=BATCH))


def the_extent(catalog: Catalog, partition: int) -> Extent:
    """All of a partition as one stretch."""
    extents = [extent for extent in catalog.extents if extent.partition == partition]
    return replace(extents[0], span=Span(0, extents[-1].span.last))


def test_all_that_is_committed_from_replicas(cluster: LocalCluster) -> None:
    origin = by_coordinator(cluster)
    catalog = origin.catalog()
    assert catalog.key == cluster.blueprint.key
    assert catalog.spans == {partition: Span(0, len(LOG[partition]) - 1) for partition in LOG}
    for partition in LOG:
        extents = [extent for extent in catalog.extents if extent.partition == partition]
        assert len(extents) > 3, "segments are where one cuts"
        assert 0.9 < sum(extent.bytes for extent in extents) / sum(len(each) + 40 for each in LOG[partition]) < 1.1
        assert len(extents[0].place.replicas) == 3
        assert read(origin, catalog, partition) == LOG[partition]
        assert read(origin, catalog, partition, splits_min=40) == LOG[partition]
    assert list(origin.catalog([1]).spans) == [1]


def test_what_is_archived_is_read_from_there_and_the_rest_from_the_cluster(cluster: LocalCluster) -> None:
    assert cluster.blueprint.archive is not None
    archive = ArchiveSegments(place=cluster.blueprint.archive)
    patience = time.monotonic() + 120
    while not all(os.path.exists(f"{archive.place}/{manifest_name(partition, 1)}") for partition in LOG):
        assert time.monotonic() < patience, "full segments are archived"
        time.sleep(0.1)
    place = {"coordinator": cluster.blueprint.addresses(ZOOKEEPER)[0], "root": ROOT, "archive": archive.place}
    both, live = open_origin(place), by_coordinator(cluster)
    catalog, theirs = both.catalog(), live.catalog()
    assert (catalog.key, catalog.spans) == (theirs.key, theirs.spans)
    assert tasks(both, catalog, catalog.spans, Sizing(), Filters(lock=17)) == [], "owners say that nothing marked it"
    pieces = archive.contents(LOG).pieces
    for partition, log in LOG.items():
        there = Span(pieces[partition][0].first, pieces[partition][-1].last)
        assert (there.first, there.last < len(log) - 1) == (0, True)
        of_cluster = record_bytes(live, theirs, partition, there)
        assert record_bytes(both, catalog, partition, there) == of_cluster, "byte for byte what the cluster gives"
        total = total_of(pieces[partition])
        assert (total.crc, total.record_bytes) == (crc32(of_cluster), len(of_cluster))
        splits = plan(catalog, {partition: catalog.spans[partition]}, Sizing())
        assert payloads_of(run for split in splits for run in runs(both, split, batch_bytes=BATCH)) == log
    foreign = replace(both, archive=ArchiveSegments(place="/missing"))  # type: ignore[type-var]
    with pytest.raises(StoreRefused, match="there is no directory /missing"):
        foreign.catalog()


def record_bytes(origin: Origin, catalog: Catalog, partition: int, span: Span) -> bytes:
    splits = plan(catalog, {partition: span}, Sizing())
    return b"".join(run.data for split in splits for run in runs(origin, split, batch_bytes=BATCH))


def test_ids_that_have_left_the_storages_and_that_nobody_gives(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's word is not the last one: a reader may name the archive itself."""
    live = by_coordinator(cluster)
    extent = the_extent(live.catalog(), 0)

    async def trimmed(*_: object, **__: object) -> AsyncGenerator[Run, None]:
        raise Trimmed("ids below 7 are only in the archive")
        yield

    monkeypatch.setattr(LiveOrigin, "_of_replica", trimmed)
    given = live.read(extent, Span(0, 9), batch_bytes=BATCH)
    assert payloads_of(given) == LOG[0][:10], "the owner gives what replicas have no more"

    async def unknown(*_: object, **__: object) -> AsyncGenerator[Run, None]:
        raise OnlyInArchive("ids below 7 are only in the archive, and this server knows none")
        yield

    monkeypatch.setattr(LiveOrigin, "_of_owner", unknown)
    with pytest.raises(LogUnreadable, match="this server knows none") as found:
        payloads_of(live.read(extent, Span(0, 9), batch_bytes=BATCH))
    assert "name the archive beside the cluster" in found.value.detail_next_step


@pytest.mark.parametrize("knows_storages", [False, True])
def test_servers_are_enough(cluster: LocalCluster, knows_storages: bool) -> None:
    options = {"Bootstrap.Servers": f"{NOBODY},{','.join(servers(cluster))}"}
    if knows_storages:
        options["storages"] = ",".join(addresses(cluster, cluster.blueprint.storage_names))
    origin = open_origin(options)
    assert isinstance(origin, LiveOrigin)
    catalog = origin.catalog()
    assert read(origin, catalog, 2) == LOG[2]
    assert (len(catalog.extents[0].place.replicas) == 3) == knows_storages
    assert (len(catalog.extents) > PARTITIONS) == knows_storages


def test_any_part_and_nothing_above_the_mark(cluster: LocalCluster) -> None:
    origin = pickle.loads(pickle.dumps(by_coordinator(cluster)))  # noqa: S301
    before = origin.catalog()
    append(cluster, 0, 10)
    assert before.spans[0].last == len(LOG[0]) - 11
    assert origin.catalog().spans[0].last == len(LOG[0]) - 1
    extent = the_extent(before, 0)
    assert read(origin, before, 0) == LOG[0][:-10]
    for span in (Span(0, 0), Span(700, 900), Span(len(LOG[0]) - 3, len(LOG[0]) - 1), Span(5, 4)):
        found = payloads_of(origin.read(extent, span, batch_bytes=BATCH))
        assert found == LOG[0][span.first : span.last + 1], (
            "the newest ids, which replicas do not know yet, come from the owner"
        )
    with pytest.raises(
        LogUnreadable, match=f"no storage and no server returned ids {len(LOG[0])} to {len(LOG[0])} of partition 0"
    ):
        list(replace(origin, seconds=1.0).read(extent, Span(len(LOG[0]), len(LOG[0])), batch_bytes=BATCH))


def test_runs_are_about_so_large(cluster: LocalCluster) -> None:
    origin = by_coordinator(cluster)
    extent = the_extent(origin.catalog(), 1)
    for batch_bytes in (50_000, BATCH):
        sizes = [len(run.data) for run in origin.read(extent, extent.span, batch_bytes=batch_bytes)]
        assert max(sizes) <= max(batch_bytes, FRAME_BYTES)
    assert len(sizes) == 1


def test_a_storage_that_is_killed_while_it_is_read(cluster: LocalCluster) -> None:
    """Frames are small, so that most of the partition is still to come when it ends."""
    origin = replace(by_coordinator(cluster), bytes_per_second=4 << 20)
    extent = the_extent(origin.catalog(), 1)
    name, _ = extent.place.in_turn(1, 0)[0]
    assert name is not None
    stream = origin.read(extent, extent.span, batch_bytes=1)
    found = payloads_of(iter([next(stream)]))
    cluster.daemons[name].kill()
    try:
        assert len(found) < len(LOG[1]) / 2
        found += payloads_of(stream)
        assert found == LOG[1]
        catalog = origin.catalog()
        assert read(origin, catalog, 0) == LOG[0], "and readers that come later find it gone"
    finally:
        cluster.start()


def test_a_reader_that_goes_away_leaves_nothing_behind(cluster: LocalCluster) -> None:
    origin = by_coordinator(cluster)
    extent = the_extent(origin.catalog(), 1)
    for _ in range(300):  # more than a storage serves at once
        stream = origin.read(extent, extent.span, batch_bytes=1)
        assert next(stream).first_id == 0
        assert isinstance(stream, Generator)
        stream.close()


def test_who_reads_in_a_process_of_its_own_says_nothing_at_its_end(cluster: LocalCluster) -> None:
    program = (
        "import sys\n"
        "from waltz_spark.export.origin_options import open_origin\n"
        "origin = open_origin({'coordinator': sys.argv[1]})\n"
        "streams = [origin.read(extent, extent.span, batch_bytes=1) for extent in origin.catalog([1]).extents]\n"
        "print(sum(len(next(stream)) for stream in streams))\n"  # and none of them is read to its end
    )
    hosts = cluster.blueprint.addresses(ZOOKEEPER)[0]
    done = subprocess.run([sys.executable, "-c", program, hosts], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0


def test_directories_of_storages_that_run(cluster: LocalCluster) -> None:
    """They vouch for less than the owner, and for all that they say."""
    origin = open_origin({"path": str(cluster.directory)})
    assert isinstance(origin, DirectoryOrigin)
    assert origin.storages == tuple(str(cluster.directory / name / "data") for name in cluster.blueprint.storage_names)
    catalog = origin.catalog()
    assert catalog.key == cluster.blueprint.key
    for partition, span in catalog.spans.items():
        assert 0 < span.count <= len(LOG[partition])
        assert read(origin, catalog, partition) == LOG[partition][: span.count]
    whole = DirectoryOrigin(storages=origin.storages, allows_uncommitted=True)
    assert read(whole, whole.catalog(), 2) == LOG[2]


def test_what_one_replica_has_alone_is_never_given(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Two of three storages are down: what is appended is on a disk, and nobody may see it before it is decided. What is
    committed can be read, and it is said that it may not be all."""
    alone, *others = cluster.blueprint.storage_names
    origin, count = by_coordinator(cluster), len(LOG[2])
    dirty = DirectoryOrigin(storages=(str(cluster.directory / alone / "data"),), allows_uncommitted=True)
    with BlockingClient(servers(cluster), feed=FeedMode.NONE, partitions=[2]) as client, ThreadPoolExecutor(1) as pool:
        for name in others:
            cluster.daemons[name].kill()
        try:
            answer = pool.submit(client.append, payload(2, count), partition=2)
            patience = time.monotonic() + 30
            while dirty.catalog([2]).spans[2].last < count:
                assert time.monotonic() < patience, "it did not reach the disk"
            for source in (origin, LiveOrigin(servers=servers(cluster)), replace(dirty, allows_uncommitted=False)):
                catalog = source.catalog([2])
                assert catalog.spans[2].last < count
                assert read(source, catalog, 2) == LOG[2][: catalog.spans[2].count]
                if isinstance(source, LiveOrigin):
                    assert catalog.spans[2].last == count - 1, "its owner knows all that is committed"
                    assert f"partition 2 is read up to id {count - 1}, which may not be the newest" in caplog.text
                caplog.clear()
            with pytest.raises(LogUnreadable):
                list(
                    replace(origin, seconds=0.5).read(
                        the_extent(origin.catalog([2]), 2), Span(count, count), batch_bytes=BATCH
                    )
                )
        finally:
            cluster.start()
        assert answer.result() == Committed(count)
    LOG[2].append(payload(2, count))
    caplog.clear()
    assert read(replace(origin), origin.catalog(), 2) == LOG[2]
    assert "newest" not in caplog.text, "a majority confirms"


# -- who does not answer ---------------------------------------------------------------------------------------------------


def test_what_does_not_exist(cluster: LocalCluster) -> None:
    hosts = cluster.blueprint.addresses(ZOOKEEPER)[0]
    with pytest.raises(NoSuchPartition, match=f"has no partition 3, 9: it has {PARTITIONS}"):
        by_coordinator(cluster).catalog([1, 3, 9])
    with pytest.raises(NodeMissing):
        LiveOrigin(coordinator=hosts, root="/other").catalog()
    with pytest.raises(CannotConnect, match="the cluster was not found in 1 seconds"):
        LiveOrigin(servers=(NOBODY,), seconds=1.0).catalog()
    with pytest.raises(BadArgument, match="is no address of a server"):
        open_origin({"bootstrap.servers": "somewhere"})


def test_when_nobody_answers_it_is_said_who_was_asked() -> None:
    route = Route(UUID(int=1), (NOBODY,), (("s1", NOBODY), (None, "127.0.0.1:7")))
    extent = Extent(partition=4, span=Span(0, 99), bytes=0, place=route)
    with pytest.raises(LogUnreadable) as caught:
        list(LiveOrigin(servers=(NOBODY,), seconds=0.5).read(extent, Span(7, 20), batch_bytes=BATCH))
    assert caught.value.message.startswith("no storage and no server returned ids 7 to 20 of partition 4. ")
    for who in ("s1: the call failed: unavailable", "127.0.0.1:7: the call failed", "its owner: the cluster was not found"):
        assert who in caught.value.message
    assert [caught.value.number(name) for name in ("partition", "first_id", "last_id")] == [4, 7, 20]


# -- decisions -------------------------------------------------------------------------------------------------------------


def test_extents_are_cut_where_segments_are() -> None:
    sealed = [(0, 99, 1000), (100, 149, 0), (150, 299, 1500)]
    found = [(extent.span, extent.bytes) for extent in extents_of(3, 320, sealed, "x")]
    assert found == [(Span(0, 99), 1000), (Span(100, 149), 500), (Span(150, 299), 1500), (Span(300, 320), 210)]
    cut = [(extent.span, extent.bytes) for extent in extents_of(3, 120, sealed, "x")]
    assert cut == [(Span(0, 99), 1000), (Span(100, 120), 210)], "a replica may have more than is committed"
    assert [extent.span for extent in extents_of(3, 9, [], "x")] == [Span(0, 9)]
    assert list(extents_of(3, -1, [], "x")) == []


def test_readers_are_spread_over_replicas() -> None:
    route = Route(UUID(int=1), ("s:1",), tuple((f"s{number}", f"h:{number}") for number in range(3)))
    first = [route.in_turn(0, id_)[0][0] for id_ in range(0, 30_000, 100)]
    assert all(80 < first.count(f"s{number}") < 120 for number in range(3))
    assert {name for name, _ in route.in_turn(1, 7)} == {"s0", "s1", "s2"}


def test_what_was_committed_stays_committed() -> None:
    """An owner that was replaced and does not know it yet says less than was heard from the new one."""
    memory, one, other, later = _Memory(), UUID(int=1), UUID(int=2), UUID(int=3)

    def highest(key: UUID, marks: dict[int, int], timeline: UUID = FIRST) -> dict[int, Position]:
        return memory.highest(key, {number: Position(mark, timeline) for number, mark in marks.items()})

    assert highest(one, {0: 5, 1: -1}) == {0: 5, 1: -1}
    assert highest(one, {0: 3, 1: 2}) == {0: 5, 1: 2}
    assert highest(one, {1: 1}) == {1: 2}
    assert highest(one, {1: 0}, later) == {1: 0}, "on another timeline the log may end earlier"
    assert highest(other, {0: 3, 1: 1}) == {0: 3, 1: 1}, "in another cluster it means other transactions"


def test_a_rate_is_kept_on_the_average() -> None:
    throttle = Throttle(1000)
    now, taken = 50.0, 0
    for number in range(400):
        size = 10 + number * 7 % 90
        now += throttle.delay(size, now) + 0.004 * (number % 5)  # a reader is slow at times
        taken += size
        assert taken <= 1000 * (now - 50.0) + 1000 * CREDIT_SECONDS + 100
    assert taken == pytest.approx(1000 * (now - 50.0), rel=0.05)
    assert throttle.delay(1, now + 100.0) == 0.0
    assert sum(throttle.delay(500, now + 100.0) for _ in range(4)) > 1.5, "what was not used for long is not caught up with"
    assert Throttle(None).delay(1 << 40, 0.0) == 0.0
    fresh = pickle.loads(pickle.dumps(throttle))  # noqa: S301
    assert fresh.delay(500, 3.0) == 0.5

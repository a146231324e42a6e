"""A log that an operator ended at an earlier id: what remembers ids goes on up to the fork, and is refused above it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from waltz_spark import source
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import Run, check_history, planned
from waltz_spark.export.form import form_of
from waltz_spark.export.manifest import Manifest, decode, encode
from waltz_spark.export.tasks import Job
from waltz_spark.log.archive_segments import ArchiveSegments, Contents
from waltz_spark.log.arrow import SCHEMA
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import JoinedOrigin, LiveOrigin, Route
from waltz_spark.log.origin import Catalog, Extent, Span
from waltz_spark.log.plan import Sizing
from waltz_spark.table.columns import Projection
from waltz_spark.table.position import NO_LIMIT, Position, advanced, between, end_of
from waltz_spark.table.read_task import Reading, tasks

from tests.spark.exporting import tasks as one_by_one
from tests.spark.test_directory_origin import hard_state, log_of, read_all, store
from tests.spark.test_manifest import SHAPE, piece_of
from tests.spark.test_stream import FakeLog, batch, reader_of, told
from waltzd.archive.manifest import Entry
from waltzd.client.routes import Routes
from waltzd.disk.simulated import SimDisk
from waltzd.errors import OtherTimeline, WaltzError
from waltzd.errors.operations import ControlDamaged, PositionUnknown
from waltzd.format.layout import CONTROL_NAME, HARD_STATE_BYTES, HARD_STATE_NAME, HEADER_BYTES, IDENTITY_NAME
from waltzd.format.record import Run as Records
from waltzd.format.record import encode_payloads
from waltzd.protocol import positions
from waltzd.protocol.batches import PartitionLocation
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.testing import BlockingCluster

KEY, LATER = UUID(int=1), UUID(int=77)
FORK = 5
FORKED = NEVER_FORKED.forked(identity=LATER, fork=FORK, session=9, cause="partition rescue", began="", who=None)


class ForkedLog(FakeLog):
    """An origin in memory whose partition 0 forks when a test says so."""

    lineage: Lineage = NEVER_FORKED
    forks: frozenset[int] = frozenset({0})
    """Partitions with this lineage; others never forked."""
    checked: int = 0
    """Number of calls of `check`."""
    while_read: Callable[[], None] = staticmethod(lambda: None)
    """Called when the first records were read."""

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        found = super().catalog(partitions)
        timelines = {} if self.lineage.current == FIRST else dict.fromkeys(self.forks, self.lineage.current)
        return Catalog(key=found.key, spans=found.spans, extents=found.extents, timelines=timelines)

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Records]:
        for run in super().read(extent, span, batch_bytes=batch_bytes, with_locks=with_locks):
            yield run
            self.while_read()

    def check(self, partition: int, position: positions.Position, *, route: object = None) -> None:
        self.checked += 1
        lineage = self.lineage if partition in self.forks else NEVER_FORKED
        lineage.check(position.timeline, position, what="the reader", partition=partition)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> ForkedLog:
    log = ForkedLog(spans={0: Span(0, 9), 1: Span(0, 9)})
    monkeypatch.setattr(source, "open_origin", lambda _options: log)
    return log


# -- offsets of a stream ---------------------------------------------------------------------------------------------------


def test_an_offset_keeps_its_timelines() -> None:
    plain = Position(KEY, {1: 7, 0: 3})
    assert plain.to_json() == {"v": 1, "cluster": str(KEY), "next": {"0": 3, "1": 7}}, "as it was before there were any"
    forked = Position(KEY, {1: 7, 0: 3}, {0: LATER})
    said = json.loads(json.dumps(forked.to_json()))
    assert (said["v"], said["timelines"]) == (2, {"0": str(LATER)})
    assert [Position.from_json(each.to_json()) for each in (plain, forked)] == [plain, forked]
    assert {each: last.timeline for each, last in forked.reached.items()} == {0: LATER, 1: FIRST}
    assert forked.reached == {0: 2, 1: 6}


@pytest.mark.parametrize("change", [{"v": 3}, {"timelines": ["0"]}, {"timelines": {"0": "x"}}, {"timelines": None}])
def test_an_offset_with_other_timelines_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(PositionUnknown):
        Position.from_json({**Position(KEY, {0: 3}, {0: LATER}).to_json(), **change})


def test_what_stands_still_keeps_its_offset_though_the_log_forked() -> None:
    """Else Spark would begin a batch without a row."""
    there = Catalog(key=KEY, spans={0: Span(0, 2), 1: Span(0, 9)}, extents=(), timelines={0: LATER, 1: LATER})
    start = Position(KEY, {0: 3, 1: 3})
    after = advanced(start, there, limit=NO_LIMIT)
    assert (after.next, after.timelines) == ({0: 3, 1: 10}, {1: LATER})
    assert advanced(after, there, limit=NO_LIMIT) == after
    assert end_of(there).timelines == {0: LATER, 1: LATER}
    assert between(start, after) == {1: Span(3, 9)}


@pytest.mark.parametrize("next_id", [0, 3, FORK + 1])
def test_a_query_below_the_fork_goes_on(log: ForkedLog, next_id: int) -> None:
    start = reader_of(startingTxnIds=f'{{"0": {next_id}, "1": -2}}').initialOffset()
    log.lineage, log.spans = FORKED, {0: Span(0, 19), 1: Span(0, 9)}
    reader = reader_of()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end["timelines"] == {"0": str(LATER)}
    expected = [*((0, id_) for id_ in range(next_id, 20)), *((1, id_) for id_ in range(10))]
    assert sorted(batch(reader, start, end)) == expected
    assert reader.latestOffset(end, ReadAllAvailable()) == end


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_query_above_the_fork_is_refused(log: ForkedLog, fails: str) -> None:
    """Also where the log has as many ids again."""
    start = reader_of(startingTxnIds=f'{{"0": {FORK + 2}, "1": -2}}').initialOffset()
    log.lineage, log.spans = FORKED, {0: Span(0, 19), 1: Span(0, 9)}
    reader = reader_of(failOnDataLoss=fails)
    with pytest.raises(OtherTimeline, match="the checkpoint has ids up to 6 of partition 0") as caught:
        reader.latestOffset(start, ReadAllAvailable())
    assert caught.value.number("fork") == FORK
    assert 'new checkpoint and startingTxnIds {"0": 6, "1": 0}' in told(caught), "the other partition goes on where it was"
    assert "Not done: no batch was read, and the checkpoint was left as it is" in told(caught)
    with pytest.raises(OtherTimeline):
        reader.partitions(start, {**start, "next": {"0": 9, "1": 0}})


def test_a_batch_that_was_planned_above_the_fork_is_not_read_with_other_rows(log: ForkedLog) -> None:
    start = reader_of(startingTxnIds='{"0": 2, "1": -1}').initialOffset()
    end = reader_of().latestOffset(start, ReadAllAvailable())
    log.lineage, log.spans = FORKED, {0: Span(0, 19), 1: Span(0, 9)}
    with pytest.raises(OtherTimeline, match="ids up to 9 of partition 0") as caught:
        reader_of().partitions(start, end)
    assert 'startingTxnIds {"0": 2, "1": 10}' in told(caught), "no row of the batch was processed"
    assert batch(reader_of(), start, {**end, "next": {"0": FORK + 1, "1": 0}}) == [(0, id_) for id_ in range(2, FORK + 1)]


def test_the_advice_names_the_start_of_each_partition_that_forked(log: ForkedLog) -> None:
    """A restore to a moment ends all logs at once: a start above any fork would leave transactions out."""
    start = reader_of(startingTxnIds=f'{{"0": {FORK + 2}, "1": {FORK + 4}}}').initialOffset()
    log.lineage, log.spans, log.forks = FORKED, {0: Span(0, 19), 1: Span(0, 19)}, frozenset({0, 1})
    with pytest.raises(
        OtherTimeline, match=r"of partition 0 .* ids of partition 1 are not all on the log either"
    ) as caught:
        reader_of().latestOffset(start, ReadAllAvailable())
    assert 'startingTxnIds {"0": 6, "1": 6}' in told(caught)


def test_a_batch_whose_log_is_ended_while_it_is_read_is_refused(log: ForkedLog) -> None:
    """Once for each task, after its rows were read and before it is complete."""
    start = reader_of(startingTxnIds='{"0": 2, "1": 3}').initialOffset()
    reader = reader_of()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert len(batch(reader, start, end)) == 8 + 7
    assert log.checked == 2, "one check for each of two tasks"

    def end_log() -> None:
        log.lineage = FORKED

    log.while_read = end_log
    reader = reader_of()
    end = reader.latestOffset(start, ReadAllAvailable())
    message = "an operator ended the log while ids 2 to 9 of partition 0 were read: .* forked behind id 5"
    with pytest.raises(OtherTimeline, match=message) as caught:
        batch(reader, start, end)
    assert caught.value.number("fork") == FORK
    assert "Not done: the batch was not completed" in told(caught)
    assert "Next: run a batch read again; restart a stream with its checkpoint" in told(caught)
    log.lineage = NEVER_FORKED
    reader = reader_of()
    end = {**reader.latestOffset(start, ReadAllAvailable()), "next": {"0": FORK + 1, "1": 10}}
    assert len(batch(reader, start, end)) == 4 + 7, "up to the fork the rows are the same"


# -- manifests of an export ------------------------------------------------------------------------------------------------


def manifest_of(last: int, timelines: dict[int, UUID] | None = None) -> Manifest:
    empty = Manifest(number=0, export=UUID(int=1), cluster=KEY, source="a test", written="", shape=SHAPE)
    pieces = [piece_of(number, 0, b"abc", last + 1) for number in (0, 1)]
    return empty.extended(pieces, source="a test", written="", timelines=timelines)


def test_a_manifest_keeps_the_timeline_of_each_end() -> None:
    old, new = manifest_of(4), manifest_of(4, {0: LATER, 7: LATER})
    assert b"timeline" not in encode(old), "as it was before there were any"
    assert [decode(encode(each), "here") for each in (old, new)] == [old, new]
    assert new.timelines == {0: LATER}
    assert {number: last.text for number, last in new.ends.items()} == {0: f"4@{LATER}", 1: "4"}
    following = old.extended([piece_of(1, 5, b"x", 1)], source="", written="", timelines={0: LATER, 1: LATER})
    assert following.timelines == {1: LATER}, "of partition 0 nothing was added"


def test_an_export_goes_on_up_to_the_fork_and_is_refused_above(log: ForkedLog) -> None:
    log.lineage, log.spans = FORKED, {0: Span(0, 19)}
    for good in (None, manifest_of(FORK), manifest_of(19, {0: LATER})):
        check_history(log, log.catalog(), good, "/out")
    with pytest.raises(OtherTimeline, match="the export /out has ids up to 6 of partition 0") as caught:
        check_history(log, log.catalog(), manifest_of(FORK + 1), "/out")
    assert caught.value.number("fork") == FORK
    assert caught.value.detail_not_done == "nothing was exported, and the export was left as it is"
    assert "into another folder" in caught.value.detail_next_step
    assert "with a new checkpoint" in caught.value.detail_next_step
    with pytest.raises(OtherTimeline, match="which this log never had"):
        check_history(log, log.catalog(), manifest_of(2, {0: UUID(int=78)}), "/out")


def test_a_file_whose_log_is_ended_while_it_is_read_is_in_no_export(log: ForkedLog, tmp_path: Path) -> None:
    """It may have the ids of one history in front of those of another one."""
    destination, catalog = LocalDestination(str(tmp_path / "out")), log.catalog([0])
    given = planned(catalog, catalog.spans, file_data_bytes=None)
    job = Job(origin=log, destination=destination, cluster=KEY, timelines=catalog.timelines, form=form_of("parquet", None))

    def end_log() -> None:
        log.lineage = FORKED

    log.while_read = end_log
    with pytest.raises(OtherTimeline, match=f"ids 0 to 9 of partition 0 were read: .* forked behind id {FORK}"):
        Run(job=job, before=None, assignments=given).carry_out(one_by_one)
    assert newest_manifest(destination) is None
    log.lineage = NEVER_FORKED
    log.spans = {0: Span(0, FORK)}
    catalog = log.catalog([0])
    given = planned(catalog, catalog.spans, file_data_bytes=None)
    made = Run(job=job, before=None, assignments=given).carry_out(one_by_one)
    assert made is not None
    assert made.ends == {0: FORK}, "up to the fork the log is the same"


# -- what origins say ------------------------------------------------------------------------------------------------------


def give_timelines(disk: SimDisk, directory: str, committed: int, lineage: Lineage) -> None:
    found = replace(hard_state(committed, committed), timelines=lineage.encode())
    disk.remove(f"{directory}/{HARD_STATE_NAME}")
    disk.create(f"{directory}/{HARD_STATE_NAME}").write(0, found.encode().ljust(HARD_STATE_BYTES, b"\0"))


def test_of_several_directories_those_of_the_newest_timeline_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """One that was not there when the log was ended reaches further, with what is not the log any more."""
    old, new = log_of(40, seed=1), log_of(20, seed=2)
    disk = SimDisk()
    store(disk, "a", old, [0], mark=39)
    directory = store(disk, "b", new, [0], mark=19)
    give_timelines(disk, directory, 19, FORKED)
    origin = DirectoryOrigin(storages=("a", "b"), disk=disk)
    assert origin.catalog().spans == {0: Span(0, 19)}
    assert origin.catalog().timelines == {0: LATER}
    assert read_all(origin) == bytes(new.data)
    assert "partition 0 in a/0 is not read: it holds timeline 1, and the log goes on under timeline 2" in caplog.text
    origin.check(0, positions.Position(FORK))
    with pytest.raises(OtherTimeline):
        origin.check(0, positions.Position(FORK + 1))
    assert DirectoryOrigin(storages=("a",), disk=disk).catalog().timelines == {}


def test_a_position_is_compared_although_one_directory_is_damaged() -> None:
    """As the log is read although one is: the check after a read asks for no more than the read did."""
    disk = SimDisk()
    for name in ("a", "b"):
        give_timelines(disk, store(disk, name, log_of(20, seed=2), [0], mark=19), 19, FORKED)
    for name in (CONTROL_NAME, IDENTITY_NAME):
        if disk.exists(f"a/{name}"):
            disk.open(f"a/{name}", write=True).write(0, bytes(HEADER_BYTES))
    origin = DirectoryOrigin(storages=("a", "b"), disk=disk)
    assert origin.catalog([0]).timelines == {0: LATER}
    origin.check(0, positions.Position(19, LATER))
    with pytest.raises(OtherTimeline):
        origin.check(0, positions.Position(FORK + 1))
    with pytest.raises(ControlDamaged):
        DirectoryOrigin(storages=("a",), disk=disk).check(0, positions.Position(FORK + 1))


def test_what_an_archive_has_above_the_fork_is_not_given_beside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    live = ForkedLog(spans={0: Span(0, 19)})
    pieces = [entry(first, last) for first, last in ((0, 3), (4, 8), (9, 12))]
    monkeypatch.setattr(ArchiveSegments, "contents", lambda _self, _partitions: Contents(KEY, {0: pieces}))
    joined = JoinedOrigin(archive=ArchiveSegments(place="/a"), live=cast(LiveOrigin, live))
    assert [extent.span for extent in joined.catalog().extents] == [Span(0, 3), Span(4, 8), Span(9, 12), Span(13, 19)]
    live.lineage = FORKED
    assert [extent.span for extent in joined.catalog().extents] == [Span(0, 3), Span(4, FORK), Span(FORK + 1, 19)]
    assert joined.catalog().timelines == {0: LATER}


def entry(first: int, last: int) -> Entry:
    return Entry(
        level=0, first=first, last=last, record_bytes=90, crc=0, segments=1, stored_bytes=100, size=100, index_bytes=10,
        sha256="",
    )  # fmt: skip


def test_a_cluster_says_its_timeline_and_where_it_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with BlockingCluster(partitions=1) as cluster:
        monkeypatch.setattr(LiveOrigin, "_server", lambda _self, address, key: cluster.connect(address, key))
        origin = LiveOrigin(servers=cluster.servers)
        with cluster.client() as client:
            for each in range(10):  # one by one: what was written together is kept together
                client.append(b"%d" % each, partition=0)
        before = origin.catalog()
        planned = tasks(origin, before, before.spans, Sizing())
        assert (before.spans, before.timelines) == ({0: Span(0, 9)}, {})
        timeline = cluster.rescue(0, FORK)
        cluster.wait_until_ready()
        for reader in (origin, LiveOrigin(servers=cluster.servers)):
            catalog = reader.catalog()
            assert (catalog.spans, catalog.timelines) == ({0: Span(0, FORK)}, {0: timeline}), "the old mark is forgotten"
        with cluster.client() as client:
            client.append_many([b"another"] * 10, partition=0)
        executor = Reading(LiveOrigin(coordinator="nobody:9"), Projection(SCHEMA))
        with pytest.raises(OtherTimeline, match="while ids 0 to 9 of partition 0 were read"):
            [*executor.batches(planned[0])]
        catalog = origin.catalog()
        assert catalog.spans == {0: Span(0, 15)}
        assert (
            sum(len(rows) for task in tasks(origin, catalog, catalog.spans, Sizing()) for rows in executor.batches(task))
            == 16
        )
        check_history(origin, catalog, manifest_of(FORK), "/out")
        with pytest.raises(OtherTimeline, match=f"forked behind id {FORK}") as caught:
            check_history(origin, catalog, manifest_of(FORK + 1), "/out")
        assert caught.value.number("fork") == FORK


class ReplicaOfBefore:
    """A storage that was away when the log was ended, as a reader sees it."""

    async def __aenter__(self) -> ReplicaOfBefore:
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def segments(self, _partition: int) -> list[tuple[int, int, int]]:
        return []

    async def read(
        self, partition: int, first_id: int, last_id: int, *, timeline: UUID | None = None, **_: object
    ) -> AsyncIterator[Records]:
        NEVER_FORKED.check(FIRST if timeline is None else timeline, last_id, what="a reader", partition=partition)
        yield encode_payloads(first_id, [b"given up"] * (last_id - first_id + 1))


def test_what_a_rescue_gave_up_is_not_read_from_a_replica_that_still_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers readers as soon as it is up, before the owner has reached it."""
    with BlockingCluster(partitions=1) as cluster:
        monkeypatch.setattr(LiveOrigin, "_server", lambda _self, address, key: cluster.connect(address, key))
        monkeypatch.setattr(LiveOrigin, "_replica", lambda _self, _route, _name, _address: ReplicaOfBefore())
        with cluster.client() as client:
            client.append_many([b"kept"] * (FORK + 1), partition=0)
        cluster.rescue(0, FORK)
        cluster.wait_until_ready()
        with cluster.client() as client:
            client.append_many([b"kept"] * 10, partition=0)
        origin = LiveOrigin(servers=cluster.servers, storages=("of-before:1",))
        runs = [run for each in origin.catalog().extents for run in origin.read(each, each.span, batch_bytes=1 << 20)]
        payloads = [run.record(number).payload for run in runs for number in range(len(run))]
        assert payloads == [b"kept"] * (FORK + 11)


class Stale:
    """Routes to an owner of partition 0 that was replaced without noticing, and knows no fork."""

    async def find(self, partition: int) -> PartitionLocation:
        return PartitionLocation(generation=1, server="s", address="s:1")

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[Stale]:
        yield self

    def failed(self, partition: int, place: PartitionLocation, error: WaltzError) -> None:
        """The owner is asked once."""

    async def fetch(
        self, partition: int, first_id: int, last_id: int, *, with_locks: bool, timeline: UUID | None = None
    ) -> AsyncGenerator[Records, None]:
        if timeline is not None:
            NEVER_FORKED.check(timeline, last_id, what="the reader", partition=partition)
        yield cast(Records, object())


def test_an_owner_that_knows_no_fork_gives_nothing_above_it() -> None:
    async def read(span: Span, timeline: UUID) -> int:
        where = cast(Routes, Stale())
        route = Route(KEY, (), (), timeline=timeline)
        return len([run async for run in LiveOrigin._fetched(where, route, 0, span, with_locks=False)])

    assert asyncio.run(read(Span(0, 90), FIRST)) == 1
    with pytest.raises(OtherTimeline):
        asyncio.run(read(Span(FORK + 1, 90), LATER))

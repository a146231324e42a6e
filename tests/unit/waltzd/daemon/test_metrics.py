"""What daemons tell those who watch: the page of metrics, readiness, the counters behind them, and the HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from uuid import UUID

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.mounting import FakeSession, Room, batch_of, in_room
from tests.unit.told import told
from waltzd.archive.reader import ReadCounters
from waltzd.daemon import health_service, http, metrics, readiness
from waltzd.daemon.health_service import HealthService
from waltzd.daemon.http import Answer, HttpPort, Question, question_of
from waltzd.errors.operations import PartitionDamaged, PortInUse, ReadFailed
from waltzd.format.finding import Code, Finding
from waltzd.format.record import HEAD
from waltzd.protocol.address import Address
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.descriptions import (
    MetadataBackup,
    OwnedPartition,
    OwnedReplica,
    PartitionDescription,
    PartitionStatistics,
    ReplicaStatus,
    ScrubStatus,
    ServerDescription,
    Statistics,
    StorageDescription,
)
from waltzd.protocol.groups import GroupTotals
from waltzd.protocol.histogram import BOUNDS, Histogram
from waltzd.protocol.locks import Mode
from waltzd.protocol.role import Role
from waltzd.server.clients.pipeline import AllCounters, Pipeline, PipelineSettings

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"


def replica(
    storage: str, durable_id: int, state: str = "LIVE", *, role: str = "member", counts: bool = True
) -> OwnedReplica:
    return OwnedReplica(storage=storage, role=role, state=state, durable_id=durable_id, counts=counts, story="")


def owned(number: int, *replicas: OwnedReplica, step: str = "OPEN", **statistics: Any) -> OwnedPartition:
    return OwnedPartition(
        partition=number,
        generation=3,
        session=7,
        step=step,
        waiting="s3 does not answer" if step != "OPEN" else "",
        committed=99,
        last_id=101,
        low_mark=50,
        mounts=2,
        tail_bytes=4096,
        replicas=replicas,
        statistics=PartitionStatistics(**statistics),
    )


LEVEL = [replica(f"s{number}", 99) for number in range(3)]
SERVER = ServerDescription(
    name="one",
    cluster_key=UUID(int=1),
    instance=UUID(int=2),
    version="0.1",
    uptime_ms=2500,
    is_connected=True,
    is_draining=False,
    is_leader=True,
    metadata_backup=MetadataBackup(number=3, age_ms=4500),
    groups=GroupTotals(groups=4, members=3, lag=17, parked=2, trouble="it is away"),
    partitions=(
        owned(0, *LEVEL, attempts=12, committed=10, committed_bytes=1000, refused={"CONFLICT": 1, "TOO_FAR_BEHIND": 1},
              fed=30, fed_bytes=3000),
        owned(5, *LEVEL[:2], replica("s2", 40, "CATCHING_UP", counts=False), step="SETTLING", attempts=4, committed=4,
              committed_bytes=200),
    ),
)  # fmt: skip
STATUS = ReplicaStatus(
    partition=1,
    incarnation=UUID(int=3),
    promised_session=7,
    session=7,
    low_mark=50,
    local_low_mark=50,
    committed=99,
    last_id=101,
    is_available=True,
    is_full=False,
    segments=2,
    findings=(),
)
SCRUB = ScrubStatus(
    period_seconds=604_800, bytes_per_second=100, done_bytes=0, total_bytes=0, age_ms=2000, damaged_segments=3
)
STORAGE = StorageDescription(
    cluster_key=UUID(int=1),
    partitions=8,
    directory="/var/lib/waltz",
    version="0.1",
    free_bytes=1 << 30,
    uptime_ms=1500,
    is_draining=False,
    assigned=(
        PartitionDescription(partition=1, status=STATUS, refused=None, story="", queued_bytes=10, disk_bytes=1000),
        PartitionDescription(
            partition=2, status=None, refused=PartitionDamaged("x"), story="", queued_bytes=0, disk_bytes=0
        ),
    ),
    statistics=Statistics(
        appended_records=14, appended_bytes=1200, groups=3, refused_calls=1, flush=Histogram().more(0.001, 2).more(9)
    ),
    scrub=SCRUB,
)
READS = ReadCounters(fetched_bytes=70_000, pieces=3, hits=12, misses=3, failures=2, cached_bytes=60_000)
COMMIT = Histogram().more(0.0003, 13).more(70)


def server_page(
    found: ServerDescription = SERVER, *, unready: Sequence[str] = (), accept: str = "", certificate: float | None = 1.5
) -> tuple[str, str]:
    told = metrics.of_server(
        found, cluster_partitions=8, unready=unready, commit=COMMIT, certificate_seconds=certificate, archive=READS
    )
    raw, kind = metrics.page(chain(told, metrics.of_port(Role.SERVER, failed=2)), accept)
    return raw.decode(), kind


def storage_page(
    found: StorageDescription = STORAGE, *, unready: Sequence[str] = (), certificate: float | None = 1.5
) -> str:
    told = metrics.of_storage(found, unready=unready, free_bytes_min=64, certificate_seconds=certificate)
    return metrics.page(chain(told, metrics.of_port(Role.STORAGE, failed=2)))[0].decode()


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(page: str, sample: str, **labels: str) -> float:
    return samples(page)[sample, frozenset(labels.items())]


def total(page: str, name: str) -> float:
    return sum(found for (this, _), found in samples(page).items() if this == name)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_a_server_tells_what_it_describes() -> None:
    page, kind = server_page()
    assert kind.startswith("text/plain")
    assert total(page, "waltz_server_committed_transactions_total") == 14
    assert total(page, "waltz_server_committed_bytes_total") == 1200
    assert total(page, "waltz_server_attempted_transactions_total") == 16
    assert value(page, "waltz_server_refused_transactions_total", partition="0", reason="CONFLICT") == 1
    assert total(page, "waltz_server_refused_transactions_total") == 2
    assert value(page, "waltz_server_fed_bytes_total", partition="0") == 3000
    assert value(page, "waltz_server_partition_open", partition="0") == 1
    assert value(page, "waltz_server_partition_open", partition="5") == 0
    assert value(page, "waltz_server_partition_mounts", partition="0") == 2
    assert value(page, "waltz_server_replica_lag_transactions", partition="5", storage="s2", role="member") == 59
    assert value(page, "waltz_server_replica_lag_transactions", partition="5", storage="s1", role="member") == 0
    assert value(page, "waltz_server_replica_state", partition="5", storage="s2", state="CATCHING_UP") == 1
    assert value(page, "waltz_server_partition_margin", partition="0") == 1
    assert value(page, "waltz_server_partition_margin", partition="5") == 0
    assert value(page, "waltz_server_uptime_seconds") == 2.5
    assert value(page, "waltz_server_cluster_partitions") == 8
    of_groups = [value(page, f"waltz_server_{name}") for name in ("groups", "groups_behind", "group_lag", "group_parked")]
    assert of_groups == [4, 1, 17, 2]
    assert value(page, "waltz_server_info", name="one", version="0.1", cluster_key=str(UUID(int=1)),
                 process=str(UUID(int=2))) == 1  # fmt: skip


def test_a_histogram_is_told_with_rising_counts_and_its_sum() -> None:
    page, _ = server_page()
    assert value(page, "waltz_server_commit_seconds_count") == 14
    assert value(page, "waltz_server_commit_seconds_sum") == pytest.approx(70 + 13 * 0.0003)
    buckets = [(dict(labels)["le"], found) for (name, labels), found in samples(page).items() if name.endswith("_bucket")]
    assert len(buckets) == len(BOUNDS) + 1
    assert [found for _, found in buckets] == sorted(found for _, found in buckets)
    assert [dict(buckets)[bound] for bound in ("0.0002", "0.00032", "60.0", "+Inf")] == [0, 13, 13, 14]


def test_a_storage_tells_what_it_describes() -> None:
    page = storage_page()
    assert value(page, "waltz_storage_appended_records_total") == 14
    assert value(page, "waltz_storage_flush_seconds_count") == 3
    assert value(page, "waltz_storage_flush_seconds_bucket", le="0.00125") == 2
    assert value(page, "waltz_storage_free_bytes") == 1 << 30
    assert value(page, "waltz_storage_free_bytes_min") == 64
    assert value(page, "waltz_storage_replica_refused", partition="2") == 1
    assert value(page, "waltz_storage_replica_available", partition="2") == 0
    assert value(page, "waltz_storage_replica_last_id", partition="1") == 101
    assert total(page, "waltz_storage_replica_damaged") == 0
    hurt = replace(STATUS, findings=(Finding(code=Code.DAMAGED_RECORD, path="x", detail="y"),), is_full=True)
    described = replace(STORAGE, assigned=(replace(STORAGE.assigned[0], status=hurt),))
    assert value(storage_page(described), "waltz_storage_replica_damaged", partition="1") == 1
    assert value(storage_page(described), "waltz_storage_replica_full", partition="1") == 1


def test_ready_is_told_too() -> None:
    assert value(server_page()[0], "waltz_server_ready") == 1
    assert value(server_page(unready=["x"])[0], "waltz_server_ready") == 0
    assert value(storage_page(unready=["x"]), "waltz_storage_ready") == 0


def test_the_end_of_a_certificate_is_told_where_there_is_one() -> None:
    assert value(server_page(certificate=-60)[0], "waltz_server_certificate_seconds") == -60
    assert value(storage_page(certificate=1e7), "waltz_storage_certificate_seconds") == 1e7
    assert "certificate" not in server_page(certificate=None)[0] + storage_page(certificate=None)
    assert readiness.of_certificate(None) == readiness.of_certificate(0) == []
    assert "certificate is over" in readiness.of_certificate(-0.1)[0]
    assert readiness.of_policy(None) == []
    assert readiness.of_policy("/policy is nonsense") == ["it lets only operators in: /policy is nonsense"]


def test_who_understands_openmetrics_gets_it() -> None:
    page, kind = server_page(accept="application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert kind.startswith("application/openmetrics-text")
    found = {family.name: family for family in parse_openmetrics(page)}  # type: ignore[no-untyped-call]
    assert found["waltz_server_committed_transactions"].type == "counter"
    assert found["waltz_server_commit_seconds"].type == "histogram"


@pytest.mark.parametrize(
    "accept",
    ["text/plain;version=x", "text/plain;version=1.0.0", "application/openmetrics-text;version=2.\xff",
     "application/openmetrics-text;version=2.\nX: y", "application/openmetrics-text;version=1.0.0;version=x",
     "application/openmetrics-text;version=99999999999;escaping=x", ";;,;version=,,"],
)  # fmt: skip
def test_whatever_is_accepted_comes_back_nowhere(accept: str) -> None:
    page, kind = server_page(accept=accept)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert value(page, "waltz_server_failed_pages_total") == 2


def families(page: str) -> dict[str, Metric]:
    """By the names of their samples as people know them."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(page)
        if family.name.startswith("waltz_")
    }


def test_the_document_lists_every_metric_and_no_other() -> None:
    said = dict(re.findall(r"^\| `(waltz_(?!client_)\w+)` \| (\w+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M))
    told = families(server_page()[0]) | families(storage_page())
    assert said == {name: family.type for name, family in told.items()}
    assert all(family.documentation.endswith(".") for family in told.values())


def test_base_units_and_their_names() -> None:
    for name in families(server_page()[0]) | families(storage_page()):
        assert not re.search(r"_(ms|milliseconds|us|microseconds|kib|mib|mb|percent)(_|$)", name), name


# -- how many members may fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "margin"),
    [((), 0), ((True,), 0), ((False,), -1), ((True,) * 3, 1), ((True, True, False), 0), ((True, False, False), -1),
     ((True,) * 5, 2), ((False,) * 5, -3)],
)  # fmt: skip
def test_the_margin_is_what_may_still_fail(counts: tuple[bool, ...], margin: int) -> None:
    learner = replica("new", 99, role="learner")
    members = [replica(f"s{number}", 99, counts=found) for number, found in enumerate(counts)]
    assert metrics.margin(owned(0, *members, learner)) == margin


# -- ready -------------------------------------------------------------------------------------------------------------


def test_a_server_is_ready_when_it_can_do_its_work() -> None:
    well = replace(SERVER, partitions=SERVER.partitions[:1])
    assert readiness.of_server(well, is_announced=True) == []
    assert readiness.of_server(replace(well, partitions=()), is_announced=True) == [], "one that owns nothing is ready"
    assert "coordinator" in readiness.of_server(replace(well, is_connected=False), is_announced=True)[0]
    assert "list of servers" in readiness.of_server(well, is_announced=False)[0]
    assert readiness.of_server(SERVER, is_announced=True) == ["partition 5 is not open (SETTLING): s3 does not answer"]


def test_a_storage_is_ready_when_it_takes_appends() -> None:
    def why(**changes: Any) -> list[str]:
        usual: dict[str, Any] = {"is_draining": False, "free_bytes": 100, "free_bytes_min": 100, "full": (), "refused": {}}
        return readiness.of_storage(**{**usual, **changes})

    assert why() == []
    assert why(is_draining=True) == ["it is shutting down"]
    assert "99 bytes are free" in why(free_bytes=99, full=(1, 2))[0]
    assert len(why(free_bytes=99, full=(1, 2))) == 1
    assert "partitions 1, 2 wait" in why(full=(1, 2))[0]
    assert why(refused={7: "b", 2: "a"}) == ["partition 2 is refused: a", "partition 7 is refused: b"]


# -- what is counted ---------------------------------------------------------------------------------------------------

WRITE = Mode.WRITE


def slow() -> FakeSession:
    return FakeSession(commits_at_once=False)


@told(in_room)
async def test_every_transaction_is_counted_where_it_ends(room: Room) -> None:
    one = await room.mount(feed=FeedMode.RECORDS)
    locks = [[(9, WRITE)], [(9, WRITE)], [], [(9, WRITE)], []]
    await one.say(batch_of(b"first", b"no", b"third", b"nor this", b"", locks=locks))
    await one.until(lambda reader: len(reader.committed) + len(reader.refused) == 5)
    await one.settle()
    told = room.pipe.counters.statistics()
    assert (told.attempts, told.committed, told.commit.count) == (5, 3, 3)
    assert told.committed_bytes == sum(len(run.data) for run in room.session.runs) == 10 + 3 * 40
    assert told.refused == {"CONFLICT": 0, "IN_FLIGHT": 2, "TOO_FAR_BEHIND": 0, "OWNER_CHANGED": 0, "NOT_IN_LOG": 0}
    assert (told.fed, told.fed_bytes) == (3, told.committed_bytes)


@told(in_room)
async def test_heads_are_fed_with_their_own_size(room: Room) -> None:
    one = await room.mount(feed=FeedMode.HEADS)
    await one.say(batch_of(b"first", b"second"))
    await one.settle()
    assert (room.pipe.counters.statistics().fed, room.pipe.counters.statistics().fed_bytes) == (2, 2 * HEAD.itemsize)


def test_a_part_of_a_batch_is_counted_when_it_is_committed() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a", b"b", b"c", first=5))
        await room.quiet()
        assert room.pipe.counters.statistics() == replace(room.pipe.counters.statistics(), attempts=3, committed=0)
        room.session.commit(1)
        await one.settle()
        assert room.pipe.counters.statistics().committed == room.pipe.counters.statistics().commit.count == 2
        room.session.commit(2)
        await one.settle()
        told = room.pipe.counters.statistics()
        assert (told.committed, told.committed_bytes, told.commit.count) == (3, 3 * 41, 3)

    in_room(test, slow)


@told(in_room)
async def test_the_next_session_counts_on(room: Room) -> None:
    one = await room.mount()
    await one.say(batch_of(b"a"))
    await one.until(lambda reader: bool(reader.committed))
    counters = room.pipe.counters
    later = Pipeline(FakeSession(), PipelineSettings(limits=room.pipe.settings.limits), room.capacity,
                     on_fatal=room.fatal.append, counters=counters)  # fmt: skip
    assert later.counters.statistics().committed == 1
    later.close(ReadFailed("over"))


def test_the_latency_of_all_partitions_only_rises() -> None:
    all_counters = AllCounters()
    all_counters.begin(3).committed(5, 100, 0.01)
    all_counters.begin(4).committed(2, 100, 0.02)
    before = all_counters.commit()
    assert before.count == 7
    all_counters.begin(3)
    assert all_counters.commit() == before, "a partition that comes back begins again; what was counted stays"
    all_counters.begin(3).committed(1, 1, 0.5)
    assert all_counters.commit().minus(before).counts == Histogram().more(0.5).counts


# -- the port ----------------------------------------------------------------------------------------------------------

PAGE_BYTES = 32 << 20
"""More than the system keeps for somebody who does not read."""


@pytest.mark.parametrize(
    ("raw", "asked"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Question("GET", "/metrics", "")),
        (b"HEAD /a?b=c HTTP/1.0\r\nACCEPT:  x/y \r\naccept: z\r\n\r\n", Question("HEAD", "/a", "x/y, z")),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", None),
        (b"GET /\xff HTTP/1.1\r\n\r\n", None),
        (b"GET / HTTP/2\r\n\r\n", None),
        (b"PRI * HTTP/2.0\r\n\r\n", None),
        (b"\x16\x03\x01\r\n\r\n", None),
        (b"\r\n\r\n", None),
    ],
)
def test_what_a_question_is(raw: bytes, asked: Question | None) -> None:
    assert question_of(raw) == asked


@given(st.binary(max_size=200))
def test_whatever_is_said_is_a_question_or_none(raw: bytes) -> None:
    found = question_of(raw)
    assert found is None or (found.path.startswith("/") and found.path.isprintable() and " " not in found.path)


class Site:
    """A port with some pages, and a caller's side that speaks bytes."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        pages = {"/page": self._page, "/large": self._large, "/slow": self._slow, "/refused": self._refused,
                 "/mistake": self._mistake}  # fmt: skip
        self.port = HttpPort(Address("127.0.0.1", 0), pages)

    async def _page(self, question: Question) -> Answer:
        return Answer.text(200, f"{question.method} {question.path}")

    async def _large(self, _: Question) -> Answer:
        return Answer(status=200, body=bytes(PAGE_BYTES))

    async def _slow(self, _: Question) -> Answer:
        self.began.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def _refused(self, _: Question) -> Answer:
        raise ReadFailed("the disk does not answer")

    async def _mistake(self, _: Question) -> Answer:
        raise ZeroDivisionError

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self.port.address.host, self.port.address.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def say(self, raw: bytes) -> bytes:
        """What is answered until the connection ends, in whatever way."""
        answer = bytearray()
        async with self.connected() as (reader, writer):
            writer.write(raw)
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 20):
                    answer += piece
        return bytes(answer)

    async def get(self, path: str, method: str = "GET") -> bytes:
        return await self.say(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def at_site(test: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        site = Site()
        await site.port.start()
        try:
            async with asyncio.timeout(30):
                await test(site)
        finally:
            await site.port.stop()

    asyncio.run(run())


@told(at_site)
async def test_questions_and_answers(site: Site) -> None:
    head, _, body = (await site.get("/page?x")).partition(b"\r\n\r\n")
    assert body == b"GET /page\n"
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 200 OK"
    assert b"Content-Length: 10" in head
    assert b"Connection: close" in head
    head, _, body = (await site.get("/page", "HEAD")).partition(b"\r\n\r\n")
    assert (b"Content-Length: 11" in head, body) == (True, b"")
    assert b" 404 " in await site.get("/")
    assert b"/page, /large" in await site.get("/etc/passwd")
    answer = await site.get("/page", "POST")
    assert b" 405 " in answer
    assert b"Allow: GET, HEAD" in answer
    assert b" 400 " in await site.say(b"hello\r\n\r\n")
    assert (await site.get("/large")).endswith(bytes(PAGE_BYTES))
    assert site.port.failed == 0


def test_an_error_of_ours_is_told_and_a_mistake_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test(site: Site) -> None:
        answer = await site.get("/refused")
        assert b" 503 " in answer
        assert b"W3007 the disk does not answer" in answer
        for times in range(1, 6):
            assert b" 500 " in await site.get("/mistake")
            assert site.port.failed == times
        assert b" 200 " in await site.get("/page")

    at_site(test)
    assert re.findall(r"for the (\d)\. time", caplog.text) == ["1", "2", "4"]


@pytest.mark.parametrize("kind", ["text/plain\r\nX: y", "text/plain; version=\xff"])
def test_nothing_gets_out_of_a_header(kind: str) -> None:
    with pytest.raises(ValueError, match="no value of a header"):
        Answer(status=200, body=b"", kind=kind)


@told(at_site)
async def test_a_question_without_end_is_not_listened_to(site: Site) -> None:
    assert b" 431 " in await site.say(b"GET /page HTTP/1.1\r\nX: " + b"x" * http.QUESTION_BYTES_MAX)
    assert b" 200 " in await site.get("/page")


@told(at_site)
async def test_who_says_nothing_or_takes_nothing_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hasty:
        hasty.setattr(http, "QUESTION_SECONDS", 0.1)
        assert await site.say(b"GET /page") == b""
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.1)
    assert b" 503 " in await site.get("/slow"), "a page that takes too long is given up"
    async with site.connected() as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        await reader.readline()
        while site.port._callers:
            await asyncio.sleep(0.01)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(PAGE_BYTES)


@told(at_site)
async def test_who_dawdles_makes_room_for_who_asks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 4)
    slow = asyncio.create_task(site.get("/slow"))
    await site.began.wait()
    async with contextlib.AsyncExitStack() as held:
        dawdling = [await held.enter_async_context(site.connected()) for _ in range(10)]
        for _, writer in dawdling:
            writer.write(b"GET /pa")
        for _ in range(50):
            assert b" 200 " in await site.get("/page")
        assert len(site.port._callers) <= 4
        assert await dawdling[0][0].read() == b"", "the oldest one went first"
    assert not slow.done(), "who has asked is not sent away for those who have not"
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


def test_who_makes_room_before_it_was_listened_to_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that come in one turn of the loop: the limit held for their tasks, and not for their descriptors."""
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 4)

    async def run() -> None:
        port = HttpPort(Address("127.0.0.1", 0), {})
        writers: list[Any] = [MagicMock() for _ in range(10)]
        for writer in writers:
            port._accept(asyncio.StreamReader(), writer)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [writer.transport.abort.called for writer in writers] == [True] * 6 + [False] * 4
        await port.stop()
        assert all(writer.transport.abort.called for writer in writers)

    asyncio.run(run())


def test_who_holds_most_places_gives_one_up() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        port = HttpPort(Address("127.0.0.1", 0), {})
        hosts = ["a", "b", "c", "b", "c", "c", "a"]
        callers = [http._Caller(host, is_heard=number == 2) for number, host in enumerate(hosts)]
        tasks = [asyncio.create_task(never()) for _ in callers]
        port._callers = dict(zip(tasks, callers, strict=True))
        gone = []
        while port._callers:
            before = list(port._callers)
            port._make_room()
            (left,) = set(before) - set(port._callers)
            gone.append(tasks.index(left))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gone == [4, 0, 1, 5, 3, 6, 2]

    asyncio.run(run())


@told(at_site)
async def test_a_page_that_takes_long_keeps_no_other_one_waiting(site: Site) -> None:
    slow = asyncio.create_task(site.get("/slow"))
    await site.began.wait()
    assert b" 200 " in await site.get("/page")
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


@told(at_site)
async def test_a_port_that_is_taken_is_an_error(site: Site) -> None:
    with pytest.raises(PortInUse, match="HTTP"):
        await HttpPort(site.port.address, {}).start()


# -- health over gRPC --------------------------------------------------------------------------------------------------


def test_however_many_ask_the_daemon_looks_at_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, reasons = 0, ["a reason"]

    async def unready() -> list[str]:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        return reasons

    async def ask(service: HealthService, name: str = "") -> int:
        answer = await service.Check(HealthCheckRequest(service=name), None)  # type: ignore[arg-type]
        return int(answer.status)

    async def run() -> None:
        serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
        monkeypatch.setattr(health_service, "FRESH_SECONDS", float("inf"))
        service = HealthService({"mine": False}, unready, lambda: False)
        assert await asyncio.gather(*[ask(service) for _ in range(50)]) == [not_serving] * 50
        assert looks == 1
        assert await ask(service, "mine") == serving, "it answers, so it serves"
        reasons.clear()
        monkeypatch.setattr(health_service, "FRESH_SECONDS", 0.0)
        assert await ask(service) == serving
        assert looks == 2

    asyncio.run(run())

"""The storage daemon from outside: a real process, real files, the calls that servers and operators make."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from tests.process.daemon import KEY, PARTITIONS, Daemon
from waltzd.client import loop
from waltzd.errors import BadArgument, ForeignCluster, NoSuchPartition, TooLarge, WaltzError
from waltzd.errors.operations import (
    BadFrame,
    Diverged,
    Draining,
    NotNextId,
    NotOpened,
    PartitionDamaged,
    PartitionExists,
    PartitionOffline,
    StaleSession,
    WrongStorage,
)
from waltzd.format.finding import Code, Finding
from waltzd.format.record import Run, encode_payloads
from waltzd.wire.calls import CALLS, Call
from waltzd.wire.grpc import Caller
from waltzd.wire.storages import AdminClient, AppendStream, ReplicaClient

MakeDaemon = Callable[..., Daemon]


def runs_of(count: int, *, first_id: int = 0, records: int = 10, size: int = 100) -> list[Run]:
    """`count` runs, each payload naming its id."""
    return [
        encode_payloads(at, [str(at + i).encode().ljust(size, b".") for i in range(records)])
        for at in range(first_id, first_id + count * records, records)
    ]


@contextlib.asynccontextmanager
async def clients(daemon: Daemon) -> AsyncIterator[tuple[ReplicaClient, AdminClient]]:
    async with daemon.replicas() as replicas, daemon.admin() as admin:
        yield replicas, admin


async def begin(replicas: ReplicaClient, admin: AdminClient, *, session: int = 1, partition: int = 0) -> None:
    """A partition that is ready to be appended to."""
    if not any(found.partition == partition for found in (await admin.describe()).assigned):
        assert await admin.create_partitions([partition]) == {partition: None}
    status = await replicas.open(partition, session, partitions=PARTITIONS)
    await replicas.set_low_mark(partition, session, status.last_id)


async def append(stream: AppendStream, runs: list[Run], committed: int = -1) -> int:
    """Send all, wait until all is on the disk."""
    for run in runs:
        await stream.send(run, committed)
    while (mark := await stream.receive()) is not None:
        if mark >= runs[-1].last_id:
            return mark
    raise AssertionError("the stream ended before everything was acknowledged")


async def read_all(replicas: ReplicaClient, partition: int, session: int | None, first_id: int = 0) -> bytes:
    pieces = [bytes(run.data) async for run in replicas.read(partition, first_id, session=session)]
    return b"".join(pieces)


async def refused(call: Coroutine[Any, Any, object] | AsyncIterator[object]) -> WaltzError:
    with pytest.raises(WaltzError) as caught:
        await (_drained(call) if isinstance(call, AsyncIterator) else call)
    assert caught.value.message
    assert caught.value.detail_not_done
    assert caught.value.detail_next_step
    return caught.value


async def _drained(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


def test_readers_that_stop_early_do_not_use_up_a_connection(daemon: Daemon) -> None:
    """A connection carries 1024 calls at once. One that nobody reads to its end must not stay among them."""

    async def run() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            await append(replicas.append(0, 1), runs_of(3), committed=29)
            for _ in range(1200):
                async for found in replicas.read(0, 0, 29, session=1, frame_bytes=1):
                    assert found.first_id == 0
                    break
            assert len(await read_all(replicas, 0, session=1)) > 0

    loop.run(run())


def test_a_session_fences_every_lower_one_also_after_kill_9(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()

    async def promise() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin, session=4)
            await append(replicas.append(0, 4), runs_of(1))
            await replicas.open(0, 9, partitions=PARTITIONS)

    async def check() -> None:
        async with clients(daemon) as (replicas, _):
            late = runs_of(1, first_id=10)[0]
            assert isinstance(await refused(replicas.open(0, 8, partitions=PARTITIONS)), StaleSession)
            assert isinstance(await refused(append(replicas.append(0, 4), [late])), StaleSession)
            assert isinstance(await refused(replicas.set_low_mark(0, 4, 9)), StaleSession)
            assert isinstance(await refused(replicas.truncate(0, 4, 9)), StaleSession)
            assert isinstance(await refused(replicas.read(0, 0, session=4)), StaleSession)
            assert isinstance(await refused(replicas.segments(0, session=4)), StaleSession)
            assert isinstance(await refused(replicas.fetch_segment(0, 0, session=4)), StaleSession)
            # Nobody fences by talking: only `open` raises the session.
            assert isinstance(await refused(replicas.truncate(0, 99, 9)), NotOpened)
            assert isinstance(await refused(append(replicas.append(0, 99), [late])), NotOpened)
            status = await replicas.open(0, 9, partitions=PARTITIONS)
            assert (status.last_id, status.promised_session) == (9, 9)

    daemon.start()
    loop.run(promise())
    daemon.kill()
    daemon.start()
    loop.run(check())


def test_a_refusal_is_not_overtaken_by_frames_that_are_still_on_their_way(daemon: Daemon) -> None:
    """The sender pushes on at full speed while one of its frames is refused: the marks before it and the reason arrive."""

    async def run() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            for turn in range(10):
                first_id = turn * 200
                stream = replicas.append(0, 1)
                good = runs_of(20, first_id=first_id)
                gap = runs_of(200, first_id=first_id + 100_000, size=2000)
                sending = asyncio.create_task(_send_all(stream, good + gap))
                marks: list[int] = []
                assert isinstance(await refused(_collect(stream, marks)), NotNextId)
                with contextlib.suppress(NotNextId):
                    await sending
                last_id = (await replicas.open(0, 1, partitions=PARTITIONS)).last_id
                # A group is taken whole or not at all, so the last good frames may be refused with the bad one.
                assert marks == sorted(marks)
                assert (marks[-1] if marks else first_id - 1) == last_id
                if last_id < good[-1].last_id:
                    rest = runs_of(1, first_id=last_id + 1, records=good[-1].last_id - last_id)
                    await append(replicas.append(0, 1), rest)

    async def _collect(stream: AppendStream, marks: list[int]) -> None:
        while (mark := await stream.receive()) is not None:
            marks.append(mark)

    async def _send_all(stream: AppendStream, runs: list[Run]) -> None:
        for run in runs:
            await stream.send(run, -1)

    loop.run(run())


def test_what_does_not_belong_is_refused_and_nothing_is_written(make_daemon: MakeDaemon) -> None:
    async def run() -> None:
        async with clients(daemon) as (replicas, admin), daemon.replicas(UUID(int=7)) as stranger:
            await begin(replicas, admin)
            good = replicas.append(0, 1)
            first, second, third = runs_of(3)
            await append(good, [first])
            assert isinstance(await refused(stranger.open(0, 5, partitions=PARTITIONS)), ForeignCluster)
            assert isinstance(await refused(append(stranger.append(0, 1), [second])), ForeignCluster)
            assert isinstance(await refused(replicas.open(0, 5, partitions=PARTITIONS + 1)), ForeignCluster)
            assert isinstance(await refused(replicas.open(2, 5, partitions=PARTITIONS)), NoSuchPartition)
            assert isinstance(await refused(replicas.open(99, 5, partitions=PARTITIONS)), NoSuchPartition)
            assert isinstance(await refused(replicas.open(-1, 5, partitions=PARTITIONS)), NoSuchPartition)
            assert (await refused(replicas.open(0, -5, partitions=PARTITIONS))).code == "W1001"
            assert (await refused(replicas.truncate(0, 1, -7))).code == "W1001"
            assert (await refused(replicas.read(0, -1, 4, session=1))).code == "W1001"
            assert (await refused(replicas.read(0, 5, 4, session=1))).code == "W1001"
            assert isinstance(await refused(append(replicas.append(0, 1), [third])), NotNextId)
            damaged = bytearray(second.data)
            damaged[50] ^= 1
            bad = Run(second.first_id, memoryview(bytes(damaged)), second.bounds)
            assert isinstance(await refused(append(replicas.append(0, 1), [bad])), BadFrame)
            shifted = Run(second.first_id + 1, second.data, second.bounds)
            assert isinstance(await refused(append(replicas.append(0, 1), [shifted])), BadFrame)
            other = encode_payloads(0, [b"other"] * 10)
            assert isinstance(await refused(append(replicas.append(0, 1), [other])), Diverged)
            empty = Run(10, memoryview(b""), np.zeros(1, np.int64))
            assert isinstance(await refused(_append_empty(replicas, empty)), BadFrame)
            huge = encode_payloads(10, [b"x" * 70_000])
            assert isinstance(await refused(append(replicas.append(0, 1), [huge])), TooLarge)
            wide = encode_payloads(10, [b"x" * 60_000] * 150)  # more than an owner ever sends together
            assert isinstance(await refused(append(replicas.append(0, 1), [wide])), TooLarge)
            # The same bytes under the same ids are acknowledged again, and the good stream never noticed.
            assert await append(replicas.append(0, 1), [first]) == 9
            assert await append(good, [second, third]) == 29

    async def _append_empty(replicas: ReplicaClient, empty: Run) -> None:
        stream = replicas.append(0, 1)
        await stream.start()
        await stream.send(empty, -1)
        while await stream.receive() is not None:
            pass

    with make_daemon(record_bytes_max=65536, frame_bytes_max=65536) as daemon:
        loop.run(run())


def test_an_operator_creates_lists_removes_and_takes_offline(daemon: Daemon) -> None:
    async def run() -> None:
        async with clients(daemon) as (replicas, admin):
            results = await admin.create_partitions([0, 1, 1, 9])
            assert results[0] is None
            assert isinstance(results[1], PartitionExists)
            assert isinstance(results[9], NoSuchPartition)
            description = await admin.describe()
            assert [found.partition for found in description.assigned] == [0, 1]
            assert description.cluster_key == KEY
            await begin(replicas, admin)
            stream = replicas.append(0, 1)
            await append(stream, runs_of(1))
            assert await admin.set_available([0, 3], False) == {0: None, 3: await _error(admin, 3)}
            assert isinstance(await refused(append(stream, runs_of(1, first_id=10))), PartitionOffline)
            assert isinstance(await refused(replicas.open(0, 2, partitions=PARTITIONS)), PartitionOffline)
            assert await admin.set_available([0], True) == {0: None}
            assert await append(replicas.append(0, 1), runs_of(1, first_id=10)) == 19
            incarnation = (await replicas.open(0, 1, partitions=PARTITIONS)).incarnation
            assert await admin.remove_partitions([0]) == {0: None}
            assert isinstance((await admin.remove_partitions([0]))[0], NoSuchPartition)
            assert isinstance(await refused(replicas.open(0, 2, partitions=PARTITIONS)), NoSuchPartition)
            assert (daemon.directory / "0.set-aside-1" / "promise").exists()
            # Created again it is another incarnation, and holds nothing.
            assert await admin.create_partitions([0]) == {0: None}
            status = await replicas.open(0, 2, partitions=PARTITIONS)
            assert status.last_id == -1
            assert status.incarnation != incarnation
            assert await admin.remove_partitions([0], delete_files=True) == {0: None}
            assert not (daemon.directory / "0").exists()
            (aside,) = (await admin.describe()).set_aside
            assert (aside.name, aside.bytes > 0) == ("0.set-aside-1", True)
            for name in ("1", "waltz-storage.ctl", ".", "0.set-aside-2", "0.set-aside-1/../1", "./0.set-aside-1", ""):
                assert isinstance(await refused(admin.delete_aside(["0.set-aside-1", name])), BadArgument), name
            assert (daemon.directory / "0.set-aside-1" / "promise").exists()
            assert await admin.delete_aside([aside.name]) == (replace(aside, kept_ms=0),)
            assert (await admin.describe()).set_aside == ()
            assert [path.name for path in daemon.directory.iterdir() if path.is_dir()] == ["1"]

    async def _error(admin: AdminClient, partition: int) -> object:
        error = (await admin.set_available([partition], False))[partition]
        assert isinstance(error, NoSuchPartition)
        return _Like(error)

    loop.run(run())


def test_a_running_storage_finds_a_flipped_byte_in_a_sealed_segment_by_itself(make_daemon: MakeDaemon) -> None:
    async def run() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            await append(replicas.append(0, 1), runs_of(20), committed=199)
            path = daemon.directory / "0" / f"{0:019d}.seg"
            raw = bytearray(path.read_bytes())
            raw[128 + 140 * 5 + 60] ^= 4
            path.write_bytes(raw)
            async with asyncio.timeout(60):
                while (found := (await admin.describe()).scrub) is None or not found.damaged_segments:
                    await asyncio.sleep(0.1)
            assert "id 5" in found.last_finding
            status = await replicas.open(0, 1, partitions=PARTITIONS)
            assert status.damaged_segments == (0,)

    with make_daemon(segment_bytes_max=16384, scrub_seconds=1) as daemon:
        loop.run(run())
        assert "the scrub found: " in daemon.log


class _Like:
    """Equal to an error of the same class and message."""

    def __init__(self, error: WaltzError) -> None:
        self._error = error

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self._error) and str(other) == str(self._error)

    def __hash__(self) -> int:
        return hash(str(self._error))


def test_verify_online_finds_damage_and_reads_refuse_it(make_daemon: MakeDaemon) -> None:
    async def run() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin, partition=0)
            await begin(replicas, admin, partition=1)
            for partition in (0, 1):
                await append(replicas.append(partition, 1), runs_of(20), committed=199)
            found = [item async for item in admin.verify()]
            assert not [item for item in found if isinstance(item, Finding)]
            assert [(item.partition, item.records) for item in found if not isinstance(item, Finding)] == [
                (0, 200),
                (1, 200),
            ]
            path = daemon.directory / "0" / f"{0:019d}.seg"
            raw = bytearray(path.read_bytes())
            raw[128 + 140 * 5 + 60] ^= 4
            path.write_bytes(raw)
            found = [item async for item in admin.verify([0])]
            findings = [item for item in found if isinstance(item, Finding)]
            assert [(item.code, item.first_id, item.last_id) for item in findings] == [(Code.DAMAGED_RECORD, 5, 5)]
            error = await refused(replicas.read(0, 0, 9, session=1))
            assert isinstance(error, PartitionDamaged)
            assert (error.facts["first_id"], error.facts["last_id"]) == ("5", "5")
            sound = [run async for run in replicas.read(0, 6, 9, session=1)]
            assert sum(len(run) for run in sound) == 4
            status = await replicas.open(0, 1, partitions=PARTITIONS)
            assert not status.is_sound
            assert isinstance(await refused(append(replicas.append(0, 1), runs_of(1, first_id=200))), PartitionDamaged)
            assert await append(replicas.append(1, 1), runs_of(1, first_id=200)) == 209

    with make_daemon(segment_bytes_max=10_000) as daemon:
        loop.run(run())


def test_kill_9_under_load_loses_nothing_acknowledged(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(segment_bytes_max=50_000)
    written: list[Run] = []
    acked = -1

    async def load(session: int, frames: int) -> None:
        nonlocal acked
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin, session=session)
            status = await replicas.open(0, session, partitions=PARTITIONS)
            assert status.is_sound
            assert status.last_id >= acked
            del written[(status.last_id + 1 + 9) // 10 :]
            expected = b"".join(bytes(run.data) for run in written)
            found = await read_all(replicas, 0, session=session)
            assert found == expected[: len(found)]
            assert status.last_id == -1 or len(found) > 0
            first_id = status.last_id + 1
            if written and written[-1].last_id >= first_id:  # the crash kept a part of a frame: send the rest of it
                kept = first_id - written[-1].first_id
                rest = written[-1].part(kept, len(written[-1]))
                await append(replicas.append(0, session), [rest])
                first_id = rest.last_id + 1
            stream = replicas.append(0, session)
            receiving = asyncio.create_task(receive(stream, frames))
            try:
                for at in itertools.count(first_id, 10):  # until it is killed: how many marks come is for it to decide
                    [run] = runs_of(1, first_id=at)
                    written.append(run)
                    await stream.send(run, acked)
            except WaltzError:
                pass
            await asyncio.gather(receiving, return_exceptions=True)

    async def receive(stream: AppendStream, marks: int) -> None:
        nonlocal acked
        while (mark := await stream.receive()) is not None:
            acked = max(acked, mark)
            marks -= 1
            if marks == 0:
                assert daemon.process is not None
                daemon.process.send_signal(signal.SIGKILL)

    for session in range(1, 5):
        daemon.start()
        loop.run(load(session, frames=session * 2))
        daemon.kill()
    assert acked > 100


def test_a_drain_acknowledges_what_was_queued_and_says_why_it_ends(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()

    async def run() -> None:
        async with clients(daemon) as (replicas, admin):
            await begin(replicas, admin)
            stream = replicas.append(0, 1)
            await append(stream, runs_of(5), committed=30)
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            assert isinstance(await refused(_until_end(stream)), Draining)

    async def _until_end(stream: AppendStream) -> None:
        async with asyncio.timeout(20):
            while await stream.receive() is not None:
                pass

    async def look() -> None:
        async with clients(daemon) as (replicas, admin):
            status = await replicas.open(0, 1, partitions=PARTITIONS)
            assert (status.last_id, status.session, status.committed, status.is_sound) == (49, 1, 30, True)
            assert await read_all(replicas, 0, session=1) == b"".join(bytes(run.data) for run in runs_of(5))
            assert "holds ids up to 49" in (await admin.describe()).assigned[0].story

    daemon.start()
    loop.run(run())
    assert daemon.stop() == 0
    daemon.start()
    loop.run(look())


def test_it_can_be_stopped_from_the_moment_that_it_is_ready(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    for _ in range(3):
        daemon.start()
        assert daemon.stop() == 0
    assert daemon.log.count("everything that was acknowledged is on the disk") == 3


def test_one_directory_one_process_one_port(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    first = make_daemon("first").start()
    same_directory = make_daemon("second", directory=first.directory)
    same_directory.spawn()
    assert same_directory.wait() == 4
    assert "W3001" in same_directory.log
    assert "is held by another process" in same_directory.log
    same_port = make_daemon("third", listen=first.listen)
    same_port.spawn()
    assert same_port.wait() == 4
    assert "W4002" in same_port.log
    foreign = make_daemon("fourth")
    shutil.copytree(first.directory, foreign.directory)
    foreign.settings["cluster_key"] = UUID(int=5)
    foreign.spawn()
    assert foreign.wait() == 4
    assert "W2002" in foreign.log
    assert "Traceback" not in same_directory.log + same_port.log + foreign.log


def test_swapped_directories_are_noticed_at_the_start(make_daemon: MakeDaemon) -> None:
    first, second = make_daemon("first"), make_daemon("second")
    first.settings["name"], second.settings["name"] = "s1", "s2"
    for daemon in (first, second):
        with daemon:
            pass
    first.directory.rename(first.home / "aside")
    second.directory.rename(first.directory)
    first.spawn()
    assert first.wait() == 4
    assert "W2085" in first.log
    assert "is the directory of the storage s2, not of s1" in first.log
    with first.renaming():
        assert "it was that of s2" in first.log
    with first:
        pass


def test_every_port_refuses_who_means_another_storage(make_daemon: MakeDaemon) -> None:
    """Also the one of a directory that was never told its name: who puts it to work says it."""
    daemon = make_daemon().start()

    async def run() -> None:
        async with daemon.admin() as admin:
            assert (await admin.describe()).name == ""
            instance = (await admin.describe()).instance
        async with ReplicaClient(daemon.listen, KEY, name="s1", instance=instance) as owner:
            assert isinstance(await refused(owner.segments(0)), NoSuchPartition)
            assert (await owner.open(0, 1, partitions=PARTITIONS, create=True)).last_id == -1
            await owner.set_low_mark(0, 1, -1)
            await append(owner.append(0, 1), runs_of(5), 49)
            fetching = owner.fetch_segment(0, 0, session=1)
            assert not isinstance(await refused(fetching), WrongStorage)
        async with AdminClient(daemon.admin_listen, KEY, name="s1") as admin:
            assert (await admin.describe()).name == "s1"

    async def ask(client: Caller, call: Call[Any]) -> None:
        """With the cluster's key, and nothing else."""
        request: Any = call.request()
        if "cluster_key" in request.DESCRIPTOR.fields_by_name:
            request.cluster_key = KEY.bytes
        if "target" in request.DESCRIPTOR.fields_by_name:
            request.target.cluster_key = KEY.bytes
            request.target.session = 9
        if call.name in ("Read", "Restore", "Verify"):
            async for _ in client._each(call, request):
                pass
        else:
            await client._ask(call, request)

    async def run_again() -> None:
        other = ReplicaClient(daemon.listen, KEY, name="s2", stream_port=int(daemon.stream_listen.rpartition(":")[2]))
        tool = AdminClient(daemon.admin_listen, KEY, name="s2")
        async with other, tool:
            for stream in (other.append(0, 1).receive(), other.fetch_segment(0, 0, session=1)):
                assert isinstance(await refused(stream), WrongStorage)
            for client, service in ((other, "Replica"), (tool, "StorageAdmin")):
                for call in [call for call in CALLS.values() if call.service == service]:
                    error = await refused(ask(client, call))
                    assert isinstance(error, WrongStorage), (call.name, error)
                    assert "this is the storage s1" in error.message
        async with ReplicaClient(daemon.listen, KEY, instance=UUID(int=3)) as late:
            assert isinstance(await refused(late.segments(0)), WrongStorage), "another process than the one that is meant"
        async with daemon.admin() as admin:
            (found,) = (await admin.describe()).assigned
            assert found.status is not None
            assert (found.status.promised_session, found.status.last_id) == (1, 49)

    loop.run(run())
    daemon.kill()
    with daemon:
        loop.run(run_again())


def test_a_bad_start_is_one_clear_message(make_daemon: MakeDaemon) -> None:
    """What a file may have wrong is in tests/unit/waltzd/daemon/test_config.py."""
    for name, settings, said in (
        ("keyless", {"cluster_key": None}, "cluster_key and partitions must say which cluster"),
        ("nowhere", {"directory": "/proc/nothing/here"}, "W1003"),
    ):
        daemon = make_daemon(name, **settings)
        daemon.spawn()
        assert (daemon.wait(), said in daemon.log) == (2, True), daemon.log
        assert "Traceback" not in daemon.log
    lost = make_daemon("lost").start()
    lost.stop()
    (lost.directory / "waltz-storage.ctl").unlink()
    lost.spawn()
    assert lost.wait() == 8
    assert "waltz-storage.ctl is missing" in lost.log


def test_a_directory_of_the_original_goes_on_being_written(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(cluster_key=None, partitions=None, segment_bytes_max=16384)
    key = UUID("1d07c30d-8ad3-4978-9a0b-63b5a017e338")
    daemon.home.mkdir()
    shutil.copytree(Path(__file__).parents[1] / "fixtures/java-waltz-a/storage0", daemon.directory)

    async def run() -> None:
        async with daemon.replicas(key) as replicas, daemon.admin(key) as admin:
            assert [found.partition for found in (await admin.describe()).assigned] == [0, 1, 2, 3, 4, 5]
            assert isinstance(await refused(replicas.open(0, 1, partitions=6)), StaleSession)
            status = await replicas.open(0, 3, partitions=6)
            assert (status.session, status.low_mark, status.local_low_mark, status.last_id) == (2, 389, 389, 419)
            await replicas.set_low_mark(0, 3, 419)
            await append(replicas.append(0, 3), runs_of(30, first_id=420), committed=700)
            found = [run async for run in replicas.read(0, 0)]
            assert found[-1].last_id == 700
            summaries = [item async for item in admin.verify()]
            assert not [item for item in summaries if isinstance(item, Finding)]

    with daemon:
        loop.run(run())

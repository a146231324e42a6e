"""The queue of a replica: what it groups, what it bounds, and what ends the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.batches import batches_of, segment_raw
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors import TooLarge, WaltzError
from waltzd.errors.operations import BadFrame, DiskFull, FlushFailed, NotNextId, StaleSession
from waltzd.format.batch import GROUPS_BYTES_MAX, Batch, Piece
from waltzd.format.layout import CHECKPOINT_TRANSACTIONS, HARD_STATE_NAME, segment_name
from waltzd.format.record import OVERHEAD_BYTES, Run, encode_payloads
from waltzd.protocol.descriptions import Statistics
from waltzd.protocol.histogram import Durations
from waltzd.protocol.peers import RecordsFrame
from waltzd.server.session.replicated_log import FRAME_BYTES
from waltzd.storage.append_queue import HERE_BYTES_MAX, PARTS, AppendQueue, InlineFlushPolicy, RunBlocking, RunHere, Stream
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings
from waltzd.wire.flow_control import Budget


class Sender:
    """An appender that remembers what it was told."""

    def __init__(self, session: int = 1) -> None:
        self.session = session
        self.contact = 0
        self.marks: list[int] = []
        self.errors: list[WaltzError] = []

    def acknowledge(self, durable_id: int) -> None:
        self.marks.append(durable_id)

    def refuse(self, error: WaltzError) -> None:
        self.errors.append(error)


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def with_queue(
    test: Callable[[AppendQueue, Sender, SimDisk], Coroutine[Any, Any, None]],
    *,
    queue_bytes_max: int = 1 << 20,
    run_blocking: RunBlocking = at_once,
    run_here: RunHere | None = None,
    ends_badly: bool = False,
) -> list[BaseException]:
    """Runs the test against a begun session on a simulated disk; what was called fatal comes back."""
    disk = SimDisk(1)
    disk.make_directory("s")
    directory = Directory.open(disk, "s", key=UUID(int=1), partitions=1, settings=PartitionSettings())
    partition = directory.create_partition(0)
    partition.open_session(1)
    partition.set_low_mark(1, -1)
    fatal: list[BaseException] = []

    async def run() -> None:
        ended = asyncio.Event()

        def on_fatal(error: BaseException) -> None:
            fatal.append(error)
            ended.set()

        queue = AppendQueue(
            partition,
            run_blocking=run_blocking,
            on_fatal=on_fatal,
            statistics=Statistics(),
            flushes=Durations(),
            budget=Budget(PARTS * queue_bytes_max),
            policy=InlineFlushPolicy(run_here),
        )
        sender = Sender()
        queue.join(sender)
        queue.start()
        async with asyncio.timeout(10):
            await test(queue, sender, disk)
            if ends_badly:
                await ended.wait()
                assert sender.marks == []
            else:
                await queue.close()

    asyncio.run(run())
    return fatal


def frame(first_id: int, count: int = 1, size: int = 10) -> RecordsFrame:
    return RecordsFrame(encode_payloads(first_id, [b"x" * size] * count), -1)


def test_what_waits_together_is_flushed_once() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        flushes: list[str] = []
        disk.observer = lambda kind, path: flushes.append(path) if kind == "flush" and path.endswith(".seg") else None
        for id_ in range(50):
            await queue.append(sender, frame(id_))
        await queue.call(lambda: None)
        assert (sender.marks, len(flushes)) == ([49], 1)

    assert with_queue(test) == []


def test_above_its_bound_a_sender_waits_and_nothing_is_dropped() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        most = 0
        for id_ in range(100):
            await queue.append(sender, frame(id_, size=300))
            most = max(most, queue.queued_bytes)
        await queue.call(lambda: None)
        assert most <= 1000
        assert (sender.marks[-1], queue.queued_bytes) == (99, 0)

    assert with_queue(test, queue_bytes_max=1000) == []


def test_a_frame_above_the_bound_goes_alone() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await queue.append(sender, frame(0, size=5000))
        await queue.append(sender, frame(1, size=5000))
        await queue.call(lambda: None)
        assert sender.marks == [0, 1]

    assert with_queue(test, queue_bytes_max=1000) == []


def test_what_was_wrong_is_said_behind_the_mark_of_what_was_right() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        [run] = frame(1).runs
        bad = bytearray(run.data)
        bad[-1] ^= 1
        await queue.append(sender, frame(0))
        await queue.append(sender, RecordsFrame(Run(1, memoryview(bytes(bad)), run.bounds), -1))
        await queue.append(sender, frame(2))
        await queue.call(lambda: None)
        assert sender.marks == [0]
        assert [type(error) for error in sender.errors] == [BadFrame]
        other = Sender()
        queue.join(other)
        await queue.append(other, frame(7))
        await queue.call(lambda: None)
        assert other.marks == []
        assert [type(error) for error in other.errors] == [NotNextId]

    assert with_queue(test) == []


def test_a_newer_session_ends_the_older_streams() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await queue.fence(lambda: queue.partition.open_session(2))
        assert [type(error) for error in sender.errors] == [StaleSession]

    assert with_queue(test) == []


def test_an_append_behind_a_fence_is_judged_in_its_turn() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        fenced = asyncio.ensure_future(queue.call(lambda: queue.partition.fence(2)))
        await asyncio.sleep(0)  # the fence is queued, and the session still holds
        queue.partition.check_session(sender.session)
        await queue.append(sender, frame(0))
        await fenced
        await queue.call(lambda: None)
        assert (sender.marks, [type(error) for error in sender.errors]) == ([], [StaleSession])
        assert queue.partition.last_id == -1

    assert with_queue(test) == []


def test_each_appender_has_the_mark_of_its_own_records() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        other = Sender()
        queue.join(other)
        await queue.append(sender, frame(0))
        await queue.append(other, frame(1))
        await queue.append(sender, frame(2))
        await queue.call(lambda: None)
        assert (sender.marks, other.marks) == ([0, 2], [1])

    assert with_queue(test) == []


def test_a_call_finds_what_was_appended_before_it() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await queue.append(sender, frame(0))
        assert await queue.call(lambda: queue.partition.last_id) == 0

    assert with_queue(test) == []


def test_while_a_flush_hangs_the_replica_still_says_where_it_stands() -> None:
    began, goes_on = threading.Event(), threading.Event()

    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        def hang(kind: str, path: str) -> None:
            if kind == "flush" and path.endswith(".seg"):
                began.set()
                goes_on.wait(10)

        disk.observer = hang
        await queue.append(sender, frame(0))
        await asyncio.to_thread(began.wait, 10)
        assert queue.partition.status().last_id == -1
        assert sender.marks == []
        goes_on.set()
        await queue.call(lambda: None)
        assert (sender.marks, queue.partition.status().last_id) == ([0], 0)

    assert with_queue(test, run_blocking=asyncio.to_thread) == []


def test_what_a_caller_left_in_the_queue_goes_with_it() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await queue.append(sender, frame(0))
        queue.leave(sender)
        await queue.call(lambda: None)
        assert (sender.marks, queue.queued_bytes, queue.partition.last_id) == ([], 0, -1)

    assert with_queue(test) == []


def test_a_failed_flush_and_a_mistake_of_ours_are_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_a_flush(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        disk.faults = dict.fromkeys(range(disk.steps + 1, disk.steps + 20), Fault.IO_ERROR)
        await queue.append(sender, frame(0))

    [error] = with_queue(fail_a_flush, ends_badly=True)
    assert isinstance(error, FlushFailed)

    async def break_something(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        def wrong(*arguments: object) -> int:
            raise AssertionError("a truth that did not hold")

        monkeypatch.setattr(Partition, "write", wrong)
        await queue.append(sender, frame(0))

    [error] = with_queue(break_something, ends_badly=True)
    assert isinstance(error, AssertionError)


@pytest.mark.parametrize("run_here", [None, here])
def test_a_full_disk_at_a_checkpoint_ends_nothing(run_here: RunHere | None) -> None:
    """Where each write takes new space, as on btrfs, the hard state cannot be changed on a full disk. The checkpoint is
    made behind a later group."""

    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        def fill(kind: str, path: str) -> None:
            if kind == "write" and path.endswith(HARD_STATE_NAME):
                disk.faults[disk.steps] = Fault.NO_SPACE

        await queue.append(sender, frame(0))
        disk.observer = fill
        await queue.append(sender, frame(1, CHECKPOINT_TRANSACTIONS))
        await queue.call(lambda: None)
        assert queue.partition.wants_checkpoint
        disk.observer = None
        await queue.append(sender, frame(CHECKPOINT_TRANSACTIONS + 1))
        await queue.call(lambda: None)
        assert sender.marks[-1] == CHECKPOINT_TRANSACTIONS + 1
        assert not queue.partition.wants_checkpoint

    assert with_queue(test, run_here=run_here) == []


def test_of_a_group_that_filled_the_disk_only_what_is_there_is_acknowledged() -> None:
    """A segment that was sealed before keeps its part."""

    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        right = queue.partition.write

        def write(session: int, pieces: Sequence[Piece], committed: int, contact: int = 0) -> int:
            right(session, pieces[:1], committed, contact)
            raise DiskFull("no room")

        queue.partition.write = write  # type: ignore[method-assign]
        for first_id in (0, 2):
            await queue.append(sender, RecordsFrame(encode_payloads(first_id, [b"x", b"y"]), -1))
        while not sender.errors:
            await asyncio.sleep(0)
        assert (sender.marks, type(sender.errors[0])) == ([1], DiskFull)

    with_queue(test)


def batches(count: int) -> list[Batch]:
    return batches_of([[b"x" * 10, b"y"]] * count)


def test_batches_are_flushed_together_and_acknowledged_at_the_end_of_the_last() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        flushes: list[str] = []
        disk.observer = lambda kind, path: flushes.append(path) if kind == "flush" and path.endswith(".seg") else None
        first, *rest = batches(20)
        await queue.append(sender, RecordsFrame((first,), -1))
        await queue.call(lambda: None)
        flushes.clear()
        for at in range(0, len(rest), 4):
            await queue.append(sender, RecordsFrame(tuple(rest[at : at + 4]), -1))
        await queue.call(lambda: None)
        assert (sender.marks, len(flushes)) == ([1, 39], 1)

    assert with_queue(test) == []


def test_a_frame_without_batches_is_heard_and_not_acknowledged() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await queue.append(sender, RecordsFrame(tuple(batches(2)), -1))
        await queue.call(lambda: None)
        await queue.append(sender, RecordsFrame((), 3))
        await queue.call(lambda: None)
        assert (sender.marks, sender.errors, queue.partition.committed) == ([3], [], 3)

    assert with_queue(test) == []


def test_a_wrong_batch_is_refused_behind_the_mark_of_the_right_ones() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        first, second, third = batches(3)
        records = bytearray(second.data)
        records[-1] ^= 1
        bad = replace(second, data=memoryview(bytes(records)))
        await queue.append(sender, RecordsFrame((first, bad, third), -1))
        await queue.call(lambda: None)
        assert sender.marks == [1]
        assert [type(error) for error in sender.errors] == [BadFrame]
        assert "batch at id 2" in sender.errors[0].message

    assert with_queue(test) == []


def test_what_an_owner_sends_together_is_taken_whatever_the_limits_are() -> None:
    """It sends small transactions together, and a group of them in one batch. It does not know the limits of its storages,
    and would send the same again and again."""
    config = StorageConfig(directory="s", frame_bytes_max=1 << 10, record_bytes_max=1 << 10)
    stream: Any = SimpleNamespace(_config=config)
    small = b"x" * (1000 - OVERHEAD_BYTES)
    run, pairs = encode_payloads(0, [small] * (FRAME_BYTES // 1000)), batches_of([[small] * 2] * (FRAME_BYTES // 2100))
    (group,) = batches_of([[small] * (GROUPS_BYTES_MAX // 1000)])
    for content in (run, tuple(pairs), (group,)):
        frame = RecordsFrame(content, -1)
        Stream._check(stream, frame)
        assert frame.bytes <= config.message_bytes_max
    with pytest.raises(TooLarge):
        Stream._check(stream, RecordsFrame(encode_payloads(0, [small] * (GROUPS_BYTES_MAX // 999)), -1))


def test_a_footer_is_prepared_beside_the_appends_and_comes_out_the_same() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        log = batches_of([[b"x" * 30_000] * 3] * 8, cuts=[5])
        for batch in log:
            await queue.append(sender, RecordsFrame((batch,), -1))
            await queue.call(lambda: None) if batch.first_id % 2 else await asyncio.sleep(0)
        await queue.call(lambda: None)
        path = f"s/0/{segment_name(0)}"
        assert disk.open(path).read(0, disk.size(path)) == segment_raw(log[:6], key=UUID(int=1))[0]
        assert (sender.marks[-1], sender.errors) == (23, [])

    assert with_queue(test) == []


# -- groups that are written where their frame was received


def count_flushes(disk: SimDisk) -> list[str]:
    flushes: list[str] = []
    disk.observer = lambda kind, path: flushes.append(path) if kind == "flush" and path.endswith(".seg") else None
    return flushes


async def begin(queue: AppendQueue, sender: Sender) -> None:
    """Write the first record, behind which the index is flushed, and let the queue come to rest."""
    await asyncio.sleep(0)
    await queue.append(sender, frame(0))
    while queue._has_work:
        await asyncio.sleep(0)


def test_a_small_group_of_a_queue_that_is_alone_is_on_the_disk_when_append_returns() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await begin(queue, sender)
        flushes = count_flushes(disk)
        for id_ in range(1, 4):
            await queue.append(sender, frame(id_))
            assert sender.marks == [*range(id_ + 1)]
        assert len(flushes) == 3
        await queue.append(sender, frame(4, size=HERE_BYTES_MAX))
        assert sender.marks[-1] == 3, "a large group holds up nobody who is received beside it"
        await queue.append(sender, frame(5))
        assert sender.marks[-1] == 3, "what came later is written later"
        await queue.call(lambda: None)
        assert (sender.marks[-1], queue.partition.last_id, queue.queued_bytes) == (5, 5, 0)

    assert with_queue(test, run_here=here) == []


def test_nothing_is_written_here_before_the_queue_has_done_what_was_due_at_its_start() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await queue.append(sender, frame(0))  # its task has not had a turn yet
        assert sender.marks == []
        await queue.call(lambda: None)
        assert sender.marks == [0]

    assert with_queue(test, run_here=here) == []


def test_queues_that_have_work_at_the_same_time_leave_the_loop_to_each_other() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await begin(queue, sender)
        queue._policy.queues_with_work += 1  # another queue
        await queue.append(sender, frame(1))
        assert sender.marks == [0]
        await queue.call(lambda: None)
        queue._policy.queues_with_work -= 1
        while queue._has_work:
            await asyncio.sleep(0)
        await queue.append(sender, frame(2))
        assert sender.marks == [0, 1, 2]

    assert with_queue(test, run_here=here) == []


def test_a_queue_writes_here_behind_another_one_when_nobody_has_waited() -> None:
    times = iter((300, 499, 500, 300))
    one, other = AppendQueue.__new__(AppendQueue), AppendQueue.__new__(AppendQueue)
    policy = InlineFlushPolicy(here, lambda: next(times), last=one, began_ns=100, ended_ns=300)
    assert [policy.allows(other) for _ in range(3)] == [False, False, True]
    assert policy.allows(one)


def test_a_queue_that_is_closed_leaves_no_work_behind() -> None:
    policies: list[InlineFlushPolicy] = []

    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        policies.append(queue._policy)
        await queue.append(sender, frame(0, size=HERE_BYTES_MAX))

    assert with_queue(test, run_here=here) == []
    assert policies[0].queues_with_work == 0


def test_written_here_an_append_behind_a_fence_is_refused() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await asyncio.sleep(0)
        fenced = asyncio.ensure_future(queue.fence(lambda: queue.partition.fence(2)))
        await asyncio.sleep(0)  # the fence is queued
        await queue.append(sender, frame(0))
        await fenced
        await queue.call(lambda: None)
        await queue.append(sender, frame(0))
        assert (sender.marks, {type(error) for error in sender.errors}) == ([], {StaleSession})
        assert queue.partition.last_id == -1

    assert with_queue(test, run_here=here) == []


def test_written_here_a_failed_flush_is_fatal_and_nothing_more_is_written() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await asyncio.sleep(0)
        disk.faults = dict.fromkeys(range(disk.steps + 1, disk.steps + 20), Fault.IO_ERROR)
        await queue.append(sender, frame(0))
        await queue.append(sender, frame(1))

    [error] = with_queue(test, run_here=here, ends_badly=True)
    assert isinstance(error, FlushFailed)


def test_the_committed_mark_is_written_down_soon_behind_what_was_written_here() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await begin(queue, sender)
        for id_ in (1, 2):
            await queue.append(sender, RecordsFrame(encode_payloads(id_, [b"x"]), id_ - 1))
            assert (sender.marks[-1], queue.partition.wants_noting) == (id_, True), "no append waits for it"
            while queue.partition.wants_noting:
                await asyncio.sleep(0.001)

    assert with_queue(test, run_here=here) == []


def test_a_footer_is_prepared_beside_what_is_written_here() -> None:
    async def test(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await asyncio.sleep(0)
        log = batches_of([[b"x" * 10_000]] * 40, cuts=[39])
        for batch in log:
            await queue.append(sender, RecordsFrame((batch,), -1))
        await queue.call(lambda: None)
        assert sender.marks[-1] == 39
        assert disk.content(f"{queue.partition.directory}/{segment_name(0)}") == segment_raw(log, key=UUID(int=1))[0]

    assert with_queue(test, run_here=here, queue_bytes_max=1 << 22) == []


class HeardLink:
    """A link whose frames are heard; those that are declined wait to be received, as on a connection."""

    may_post = True

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.errors: list[WaltzError] = []
        self._taker: Callable[[RecordsFrame], bool] | None = None
        self._waiting: asyncio.Queue[RecordsFrame | None] = asyncio.Queue()

    def arrives(self, frame: RecordsFrame) -> bool:
        """Return whether the frame was taken on arrival."""
        if self._taker is not None and self._waiting.empty() and self._taker(frame):
            return True
        self._waiting.put_nowait(frame)
        return False

    def ends(self) -> None:
        self._waiting.put_nowait(None)

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        self._taker = taker

    async def receive(self) -> RecordsFrame | None:
        return await self._waiting.get()

    async def send(self, durable_id: int) -> None:
        self.marks.append(durable_id)

    def post(self, durable_id: int) -> None:
        self.marks.append(durable_id)

    async def refuse(self, error: WaltzError) -> None:
        self.errors.append(error)


def with_stream(
    test: Callable[[AppendQueue, Stream, HeardLink, asyncio.Task[None]], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def run(queue: AppendQueue, sender: Sender, disk: SimDisk) -> None:
        await begin(queue, sender)
        link = HeardLink()
        stream = Stream(1, 0, queue, link, StorageConfig(directory="s", record_bytes_max=1 << 20))
        serving = asyncio.create_task(stream.serve())
        await asyncio.sleep(0)
        try:
            await test(queue, stream, link, serving)
        finally:
            link.ends()
            await asyncio.gather(serving, return_exceptions=True)

    assert with_queue(run, run_here=here, **options) == []


def test_a_small_frame_is_written_and_acknowledged_where_it_arrives() -> None:
    async def test(queue: AppendQueue, stream: Stream, link: HeardLink, serving: asyncio.Task[None]) -> None:
        assert [link.arrives(frame(id_)) for id_ in (1, 2)] == [True, True]
        assert link.marks == [1, 2]

    with_stream(test)


def test_a_stream_that_is_cancelled_twice_leaves_the_queue() -> None:
    async def test(queue: AppendQueue, stream: Stream, link: HeardLink, serving: asyncio.Task[None]) -> None:
        assert stream in queue._appenders
        for _ in range(2):
            serving.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(serving, return_exceptions=True)
        assert stream not in queue._appenders

    with_stream(test)


def test_a_frame_that_waits_for_room_is_overtaken_by_none() -> None:
    async def test(queue: AppendQueue, stream: Stream, link: HeardLink, serving: asyncio.Task[None]) -> None:
        held: asyncio.Future[Any] = asyncio.ensure_future(queue.call(lambda: None))
        await queue._budget.take(900)
        assert not link.arrives(frame(1, size=200))
        while not queue._budget.waiting:  # until it is received, and waits for room
            await asyncio.sleep(0)
        queue._budget.give(900)
        assert not link.arrives(frame(2, size=10)), "the one in front has room now, and is not in the queue yet"
        await held
        while link.marks[-1:] != [2]:
            await asyncio.sleep(0)
        assert (link.errors, queue.partition.last_id) == ([], 2)

    with_stream(test, queue_bytes_max=1000)


def test_a_frame_that_arrives_behind_a_fence_is_refused() -> None:
    async def test(queue: AppendQueue, stream: Stream, link: HeardLink, serving: asyncio.Task[None]) -> None:
        queue.partition.fence(2)
        link.arrives(frame(1))
        assert (link.marks, queue.partition.last_id) == ([], 0)
        link.ends()
        with pytest.raises(StaleSession):
            await serving
        assert link.arrives(frame(1)), "what still arrives is ignored"
        assert (link.marks, queue.partition.last_id, queue.queued_bytes) == ([], 0, 0)

    with_stream(test)


def test_a_frame_that_arrives_behind_the_end_is_ignored() -> None:
    async def test(queue: AppendQueue, stream: Stream, link: HeardLink, serving: asyncio.Task[None]) -> None:
        assert link.arrives(frame(1))
        link.ends()
        await serving
        assert link.arrives(frame(2)), "nobody is to receive it"
        assert (link.marks, queue.partition.last_id, queue.queued_bytes) == ([1], 1, 0)

    with_stream(test)


def test_a_frame_that_is_too_large_is_refused_where_it_arrives() -> None:
    async def test(queue: AppendQueue, stream: Stream, link: HeardLink, serving: asyncio.Task[None]) -> None:
        assert link.arrives(frame(1, size=2 << 20))
        link.ends()
        with pytest.raises(TooLarge):
            await serving
        assert link.marks == []

    with_stream(test)

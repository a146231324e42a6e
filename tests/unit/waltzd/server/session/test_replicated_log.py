"""Cold reads from replicas: another one when one fails, and what failed never reads as if it were about the partition. And
what a replica is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import pytest

from tests.unit.mounting import FakeSession, piece_of
from waltzd.client.mount import FINAL
from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import CannotConnect, NeedsBatches, NoSuchPartition, NotReady, OnlyInArchive, Trimmed, WaltzError
from waltzd.errors.operations import BadFrame, IncompatibleVersion, PartitionDamaged
from waltzd.format.batch import End, Piece
from waltzd.format.record import Run, encode_payloads, no_locks
from waltzd.protocol.descriptions import Archived, ReplicaStatus
from waltzd.protocol.peers import Content, LockHistory, last_id_of
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.log_cache import LogCache
from waltzd.server.session.replicated_log import ReplicatedLog, Replicator, ReplicatorState
from waltzd.server.session.settings import SessionSettings


class Replica:
    """A link, and the port behind it."""

    def __init__(self, *, gives: int = 0, fails: WaltzError | None = None, readable: bool = True) -> None:
        self.port = self
        self.is_readable = readable
        self.gives = gives
        """So many records, before it fails."""
        self.fails = fails
        self.asked = 0

    async def read(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int, with_locks: bool
    ) -> AsyncIterator[Run]:
        self.asked += 1
        count = last_id - first_id + 1 if self.fails is None else min(self.gives, last_id - first_id + 1)
        if count:
            yield encode_payloads(first_id, [b"x"] * count)
        if self.fails is not None:
            raise self.fails

    async def read_locks(self, partition: int, last_id: int, *, session: int, bytes_max: int) -> LockHistory | None:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return LockHistory(last_id - self.gives + 1, no_locks(self.gives)) if self.gives else None

    async def find_time(self, partition: int, time: int, *, session: int) -> int:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return self.gives


class Replicas(ReplicatedLog):
    def __init__(self, replicas: dict[str, Replica], beginnings: int) -> None:
        meta = PartitionMeta(generation=1, session=7, opened=7)
        settings = SessionSettings(partitions=1, key=UUID(int=1), storage_seconds=1.0)
        super().__init__(0, meta, {}, settings, say=lambda sentence: None)
        self.replicators = cast("dict[str, Replicator]", replicas)
        self.open_cache = LogCache(100, 1)
        self.beginnings = beginnings
        for name in replicas:
            self.core.progress(name).held = 99

    @property
    def _is_beginning(self) -> bool:
        """The replicas can be read when this was asked so often."""
        self.beginnings -= 1
        if self.beginnings == 0:
            for link in self.replicators.values():
                cast(Replica, link).is_readable = True
        return self.beginnings >= 0


def read(*, beginnings: int = 0, **replicas: Replica) -> list[int]:
    async def run() -> list[int]:
        runs = Replicas(replicas, beginnings).read(10, 19, 1 << 20)
        return [id_ async for run in runs for id_ in range(run.first_id, run.last_id + 1)]

    return asyncio.run(run())


@pytest.mark.parametrize("error", [NoSuchPartition("not here"), BadFrame("nonsense"), PartitionDamaged("rot")])
def test_what_one_storage_says_of_itself_is_not_said_of_the_partition(error: WaltzError) -> None:
    with pytest.raises(NotReady) as raised:
        read(a=Replica(fails=error), b=Replica(fails=CannotConnect("gone")), c=Replica(readable=False))
    assert not isinstance(raised.value, FINAL)
    for words in (f"a: {error.code} {error.message}", "b: W4001 gone", "from 10 on"):
        assert words in raised.value.message


def test_another_one_goes_on_where_one_failed() -> None:
    replicas: dict[str, Any] = {"a": Replica(gives=4, fails=CannotConnect("gone")), "b": Replica()}
    assert read(**replicas) == list(range(10, 20))
    assert (replicas["a"].asked, replicas["b"].asked) == (1, 1)


def test_nobody_who_could_be_asked() -> None:
    with pytest.raises(NotReady, match="none that holds them"):
        read(a=Replica(readable=False))


def test_a_reader_waits_for_a_session_that_begins() -> None:
    """The storages refuse the one before, and nobody is there for the new one yet."""
    assert read(a=Replica(readable=False), b=Replica(readable=False), beginnings=3) == list(range(10, 20))


def ask(what: str, **replicas: Replica) -> object:
    async def run() -> object:
        log = Replicas(replicas, 0)
        return await (log.find_time(5, 19) if what == "time" else log.read_locks(19, 1 << 20))

    return asyncio.run(run())


def test_locks_and_times_are_asked_of_another_one_where_one_failed() -> None:
    replicas: dict[str, Any] = {"a": Replica(fails=CannotConnect("gone")), "b": Replica(gives=7)}
    assert ask("time", **replicas) == 7
    found = ask("locks", **replicas)
    assert isinstance(found, LockHistory)
    assert (found.first_id, len(found.locks)) == (13, 7)
    assert ask("locks", a=Replica()) is None
    with pytest.raises(NotReady, match="a: W4001 gone"):
        ask("time", a=Replica(fails=CannotConnect("gone")))


def test_the_locks_of_others_than_were_asked_for_are_not_taken() -> None:
    with pytest.raises(NotReady, match="others came"):
        ask("locks", a=Replica(gives=21))


def test_that_a_log_says_nothing_of_time_is_no_failure_of_the_replica_that_says_so() -> None:
    replicas: dict[str, Any] = {"a": Replica(fails=NeedsBatches("format 0")), "b": Replica(gives=7)}
    with pytest.raises(NeedsBatches):
        ask("time", **replicas)
    assert replicas["b"].asked == 0


# -- what a replica is sent --------------------------------------------------------------------------------------------


class Stream:
    def __init__(self) -> None:
        self.frames: list[tuple[Content, int]] = []
        self.marks: asyncio.Queue[int] = asyncio.Queue()

    def append(self, partition: int, session: int) -> Stream:
        return self

    async def start(self) -> None:
        return

    async def send(self, content: Content, committed: int) -> None:
        self.frames.append((content, committed))

    @property
    def may_post(self) -> bool:
        return False

    async def receive(self) -> int:
        return await self.marks.get()

    def hear(self, taker: Callable[[int], None]) -> None:
        return

    def cancel(self) -> None:
        return


def sent(end: End | None) -> tuple[list[tuple[Content, int]], list[Piece]]:
    """Two pieces, of which the replica acknowledges the second one when both were sent, and then the committed mark."""

    async def run() -> tuple[list[tuple[Content, int]], list[Piece]]:
        log, stream = FakeSession(commits_at_once=False, end=end), Stream()
        port: Any = stream
        link = Replicator(log, "a", port)
        status = ReplicaStatus(
            partition=3, incarnation=UUID(int=3), promised_session=11, session=11, low_mark=-1, local_low_mark=-1,
            committed=-1, last_id=-1, is_available=True, is_full=False, segments=1, findings=(),
        )  # fmt: skip
        log.core.opened("a", status)
        working = asyncio.create_task(link._stream_cache())
        for number in range(2):
            log.append(piece_of(log.cache, [b"x", b"y"], time=None if end is None else number))
        await settle()
        stream.marks.put_nowait(3)
        await settle()
        log.commit(3)
        assert not link.check_progress(0.0)
        await settle()
        assert link._owes_since is None or end is None, "nothing is owed for a mark"
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return stream.frames, log.pieces

    return asyncio.run(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_idle_replica_is_told_what_is_committed_by_a_frame_without_records() -> None:
    frames, pieces = sent(End())
    assert [content for content, _ in frames] == [tuple(pieces), ()]
    assert [committed for _, committed in frames] == [-1, 3]


def test_in_format_0_the_last_record_tells_it_once_more() -> None:
    frames, _ = sent(None)
    (first, _), (again, committed) = frames
    assert isinstance(first, Run)
    assert isinstance(again, Run)
    assert (len(first), again.first_id, again.last_id, committed) == (4, 3, 3, 3)


class PostingStream(Stream):
    """It takes what it is sent at once, except while the test holds it up; marks are heard."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.posted = 0
        self.is_cancelled = False
        self.take: Callable[[int], None] = lambda mark: None

    @property
    def may_post(self) -> bool:
        return True

    def post(self, content: Content, committed: int) -> None:
        self.posted += 1
        self.frames.append((content, committed))

    async def send(self, content: Content, committed: int) -> None:
        await self.gate.wait()
        self.frames.append((content, committed))

    def hear(self, taker: Callable[[int], None]) -> None:
        self.take = taker

    def cancel(self) -> None:
        self.is_cancelled = True


def on_a_stream(test: Callable[[FakeSession, PostingStream], Awaitable[None]]) -> None:
    async def run() -> None:
        log, stream = FakeSession(commits_at_once=False, end=End()), PostingStream()
        port: Any = stream
        link = log.replicators["a"] = Replicator(log, "a", port)
        status = ReplicaStatus(
            partition=3, incarnation=UUID(int=3), promised_session=11, session=11, low_mark=-1, local_low_mark=-1,
            committed=-1, last_id=-1, is_available=True, is_full=False, segments=1, findings=(),
        )  # fmt: skip
        log.core.opened("a", status)
        working = link._task = asyncio.create_task(link._stream_cache())
        await settle()
        await test(log, stream)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(run())


def append(log: FakeSession, time: int) -> Piece:
    log.append(piece_of(log.cache, [b"x"], time=time))
    return log.pieces[-1]


def test_a_record_leaves_from_where_it_was_made_and_its_mark_is_taken_as_it_comes() -> None:
    async def test(log: FakeSession, stream: PostingStream) -> None:
        pieces = [append(log, 1), append(log, 2)]
        assert [content for content, _ in stream.frames] == [(piece,) for piece in pieces]
        stream.take(1)
        assert log.core.held("a") == 1
        assert log.core.progress("a").sent == 1
        await settle()
        assert len(stream.frames) == stream.posted == 2

    on_a_stream(test)


def asked(log: FakeSession) -> asyncio.Future[None]:
    question = log.replicators["a"].prove()
    assert question is not None
    return question


def test_on_an_idle_stream_the_newest_batch_is_sent_again_as_a_question() -> None:
    async def test(log: FakeSession, stream: PostingStream) -> None:
        assert log.replicators["a"].prove() is None, "there is nothing to send again"
        append(log, 1)
        newest = append(log, 2)
        stream.take(1)
        first = asked(log)
        assert [content for content, _ in stream.frames[2:]] == [(newest,)]
        second = asked(log)
        assert len(stream.frames) == 3, "what is in flight was sent before the second question"
        stream.take(1)
        assert (first.done(), second.done()) == (True, False)
        assert [content for content, _ in stream.frames[3:]] == [(newest,)]
        stream.take(1)
        assert second.done()
        assert log.core.progress("a").sent == 1

    on_a_stream(test)


def test_only_an_acknowledgement_of_what_was_sent_after_a_question_answers_it() -> None:
    async def test(log: FakeSession, stream: PostingStream) -> None:
        append(log, 1)
        first = asked(log)
        append(log, 2)
        stream.take(0)
        assert not first.done()
        second = asked(log)
        stream.take(1)
        assert (first.done(), second.done()) == (True, False)
        await settle()
        assert [last_id_of(content) for content, _ in stream.frames if content] == [0, 1, 1]
        append(log, 3)
        stream.take(2)
        assert second.done(), "an acknowledgement covers all that was sent before"

    on_a_stream(test)


def test_what_leaves_the_sending_task_answers_no_question_that_came_after_it() -> None:
    async def test(log: FakeSession, stream: PostingStream) -> None:
        append(log, 1)
        stream.take(0)
        log.sending_up_to = 0
        append(log, 2)
        stream.gate.clear()
        log.sending_up_to = None
        log.replicators["a"]._sender._news.set()
        await settle()
        question = asked(log)
        stream.gate.set()
        await settle()
        stream.take(1)
        assert not question.done()
        await settle()
        assert [last_id_of(content) for content, _ in stream.frames if content] == [0, 1, 1]
        stream.take(1)
        assert question.done()

    on_a_stream(test)


def test_the_end_of_a_stream_cancels_its_questions() -> None:
    async def test(log: FakeSession, stream: PostingStream) -> None:
        append(log, 1)
        first = asked(log)
        append(log, 2)
        second = asked(log)
        stream.marks.put_nowait(cast(int, None))
        await settle()
        assert (first.cancelled(), second.cancelled()) == (True, True)
        log.replicators["a"].state = ReplicatorState.DOWN
        assert log.replicators["a"].prove() is None

    on_a_stream(test)


def test_nothing_overtakes_what_the_sending_task_has_in_its_hand() -> None:
    async def test(log: FakeSession, stream: PostingStream) -> None:
        log.sending_up_to = -1
        first = append(log, 1)
        stream.gate.clear()
        log.sending_up_to = None
        log.replicators["a"]._sender._news.set()
        await settle()
        second = append(log, 2)
        assert stream.frames == []
        stream.gate.set()
        await settle()
        assert [content for content, _ in stream.frames] == [(first,), (second,)]

    on_a_stream(test)


class Lane:
    """An archive that was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def find_time(self, partition: int, known: Archived, time: int, last_id: int) -> int:
        self.asked.append((known.last_id, last_id))
        return 3


def find_time(lane: Lane | None, **replicas: Replica) -> int:
    """Of a log whose archive reaches to id 14."""

    async def known() -> Archived:
        return Archived(archive=UUID(int=2), number=1, sha256=64 * "0", last_id=14)

    async def run() -> int:
        log = Replicas(replicas, 0)
        log.settings = replace(log.settings, archive=cast("Any", lane))
        log.ask_archived = known
        return await log.find_time(5, 19)

    return asyncio.run(run())


def test_a_time_that_may_be_in_front_of_the_floor_is_looked_for_in_the_archive() -> None:
    trimmed, lane = Replica(fails=Trimmed("only in the archive", floor=10)), Lane()
    assert find_time(lane, a=trimmed) == 3
    assert lane.asked == [(14, 9)]
    assert find_time(lane, a=Replica(gives=12)) == 12
    assert len(lane.asked) == 1
    with pytest.raises(OnlyInArchive, match="in front of id 10"):
        find_time(None, a=trimmed)


def test_a_lock_table_learns_nothing_from_what_is_trimmed() -> None:
    assert ask("locks", a=Replica(fails=Trimmed("only in the archive", floor=20))) is None


def test_a_storage_that_is_too_old_for_a_new_level_is_cut_off_at_once_and_asked_again() -> None:
    refusal = IncompatibleVersion("storage a runs version 0.0.0")

    def check(name: str, version: str) -> None:
        if (name, version) == ("a", ""):
            raise refusal

    async def asked(partition: int) -> ReplicaStatus:
        raise refusal

    async def test(log: FakeSession, stream: PostingStream) -> None:
        first, port = log.replicators["a"], cast(Any, stream)
        port.status = asked
        append(log, 1)
        stream.take(0)
        log.check_storages(lambda name, version: None)
        assert log.replicators["a"] is first
        append(log, 2)
        log.check_storages(check)
        stream.take(1)
        assert log.core.held("a") == EMPTY, "what arrives afterwards does not count"
        again = log.replicators["a"]
        assert again is not first
        await settle()
        assert (first.task.cancelled(), stream.is_cancelled) == (True, True)
        assert (again.state, again.story) == (ReplicatorState.DOWN, refusal.message)
        log.check_storages(check)
        assert log.replicators["a"] is again, "it is not connected"
        again.cancel()

    on_a_stream(test)

"""Mutants of the server: what counts as committed, how a session is closed and the next one begun, locks and outcomes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from tests.simulation.mutant import BUSIER, BUSY, TWO_OWNERS, Aim, Patches, mutant
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Keep, PartitionMeta, ReplicaState
from waltzd.errors.operations import StaleSession
from waltzd.protocol.descriptions import ArchiveCheck
from waltzd.protocol.peers import runs_of
from waltzd.protocol.quorum import EMPTY, majority
from waltzd.server.clients.feed import Cursor
from waltzd.server.clients.mounts import Mount
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.clients.registry import QuotaUsage
from waltzd.server.core import progress as progress_module
from waltzd.server.core import step
from waltzd.server.core.locks import LockTable
from waltzd.server.core.progress import Lease, Marks
from waltzd.server.core.recovery import Recovery, SetLowMark, Task, Truncate
from waltzd.server.core.step import QueuedBatch
from waltzd.server.session.archive import Trimmer
from waltzd.server.session.confirmation import SessionConfirmation
from waltzd.server.session.replicated_log import ReplicatedLog, Replicator
from waltzd.server.session.session import Session
from waltzd.server.subscriptions.consumer_stream import ConsumerStream

FAIL_OVER = Aim(faults=("cut", "slow", "crash"), seconds=10.0, servers=2, setup=BUSY)
LONELY = Aim(faults=("aim",), seconds=10.0, storages=3, setup=BUSY)
RENEW = Aim(faults=("slow",), servers=1, storages=3, setup={**BUSIER, "session_bytes": 4_000})
"""One planned session after the other, under load."""
ROLL = Aim(faults=("crash",), seconds=10.0, servers=1, storages=3, setup=BUSY)
FORGET = Aim(faults=("forget", "slow"), seconds=10.0, servers=1, storages=3, setup=BUSIER)
RESTORE = Aim(faults=("restore",), seconds=10.0, storages=3, setup={"rate": 15.0, "partitions": 1, "callers": 2})
REMOUNT = Aim(faults=("reset", "pause", "slow"), setup=BUSY)

READS = Aim(
    faults=("cut", "pause", "marks"),
    seconds=10.0,
    servers=2,
    setup={**BUSIER, "rate": 100.0, "keep_alive_seconds": 6.0, "lease_seconds": 0.0},
)
"""The old owner goes on when there is a new one, and is asked how far the log goes."""
GRANTED = Aim(faults=("policies",), servers=1, storages=3, setup=BUSIER)
BOUNDED = Aim(faults=("quotas",), servers=1, storages=3, setup=BUSIER)
FED = Aim(
    faults=("subscribers", "quotas"), servers=1, storages=3, format=1,
    setup={**BUSIER, "members": 2, "mode": "queue"},
)  # fmt: skip
LEASED = replace(READS, faults=(*(READS.faults or ()), "clock"), setup={**READS.setup, "lease_seconds": 0.25})


# -- what counts -------------------------------------------------------------------------------------------------------


@mutant(6, aim=FAIL_OVER)
def commits_with_a_minority(patches: Patches) -> None:
    """The majority is one too small."""

    def reached(marks: Any, members: int) -> int:
        standing = sorted(marks, reverse=True)
        needed = majority(members) - 1
        return standing[needed - 1] if len(standing) >= needed else EMPTY

    patches.set(progress_module, "reached", reached)


@mutant(6, 14, aim=ROLL)
def counts_members_that_have_not_joined(patches: Patches) -> None:
    """Every member's acknowledgements count from the start, whether the document says that it joined or not."""

    def make(right: Any) -> Any:
        def init(self: Marks, progress: Any, joined: Any, low_mark: int) -> None:
            right(self, progress, tuple(progress), low_mark)

        return init

    patches.wrap(Marks, "__init__", make)


@mutant(43, aim=Aim(faults=("rewind", "crash", "power"), seconds=20.0, servers=1, storages=3, setup=BUSIER))
def counts_who_comes_later_in_the_open_session(patches: Patches) -> None:
    """A replica that has become level counts as soon as the document says so, with the session as it is: the storages do
    not know that, and an older document of the session looks like the newest one."""

    def make(right: Any) -> Any:
        async def save_changes(self: Session) -> Any:
            log, core, marks = self.log, self.log.core, self.log.marks
            assert marks is not None
            for name in core.meta.members:
                status = core.status(name)
                if marks.counts(name) or status is None or not self._is_nearly_level(name) or name in core.meta.joined:
                    continue
                state = ReplicaState(
                    session=log.session, closing=None, incarnation=status.incarnation, acknowledged=core.held(name)
                )
                await self._save(replace(core.meta, replicas={**core.meta.replicas, name: state}))
                if self._is_nearly_level(name):
                    core.progress(name).durable = core.progress(name).acknowledged = core.held(name)
                return True
            return await right(self)

        return save_changes

    patches.wrap(Session, "_save_changes", make)


@mutant(0, 1, aim=LONELY)
def tells_storages_the_mark_of_a_minority(patches: Patches) -> None:
    """The committed mark that goes with the records is the last id that was sent."""

    def make(right: Any) -> Any:
        def take(self: Replicator) -> Any:
            message = right(self)
            if message is None or not message[0]:
                return message
            content, committed = message
            return content, max(committed, runs_of(content)[-1].last_id)

        return take

    patches.wrap(Replicator, "take", make)


@mutant(19, aim=Aim(faults=("reset", "slow"), servers=1, storages=3, setup=BUSIER))
def takes_what_it_sent_on_an_older_stream_for_acknowledged(patches: Patches) -> None:
    """A link that is connected again goes on behind what it had sent before, and counts that."""

    def make(right: Any) -> Any:
        async def stream_cache(self: Replicator) -> None:
            if self.__dict__.get("was_live"):
                self._log.core.copied(self.name, min(self._progress.sent, self._log.cache.next_id - 1))
            self.__dict__["was_live"] = True
            await right(self)

        return stream_cache

    patches.wrap(Replicator, "_stream_cache", make)


@mutant(0, aim=TWO_OWNERS)
def goes_on_in_a_session_that_is_over(patches: Patches) -> None:
    """A storage has promised itself to a newer session, and the owner tells all clients that everything is committed."""

    def fenced(self: ReplicatedLog, error: StaleSession) -> None:
        if self.marks is not None and self.cache.next_id - 1 > self.marks.committed:
            self.marks.committed = self.cache.next_id - 1
            self.commit(self.marks.committed)
        self.end(error)

    patches.set(ReplicatedLog, "fenced", fenced)


@mutant(0, 1, aim=TWO_OWNERS)
def answers_all_that_is_in_flight_when_it_ends(patches: Patches) -> None:
    """An owner that loses its session says that what it had sent is committed."""

    def make(right: Any) -> Any:
        def close(self: Pipeline, error: Any) -> None:
            if self.ended is None:
                self._answer(self.last_id)
            right(self, error)

        return close

    patches.wrap(Pipeline, "close", make)


# -- recovery ----------------------------------------------------------------------------------------------------------


@mutant(0, 1, aim=LONELY)
def takes_the_longest_log(patches: Patches) -> None:
    """A majority answers, and the longest of their logs wins, from any session."""

    def make(right: Any) -> Any:
        def decide(self: Recovery) -> int | None:
            if self.meta.decision is not None or self.is_fresh or self.refusal is not None:
                found: int | None = right(self)
                return found
            held = [self.held(name) for name in self.meta.members if self.status(name) is not None]
            return max(held) if len(held) >= majority(len(self.meta.members)) else None

        return decide

    patches.wrap(Recovery, "decide", make)
    patches.set(Recovery, "trusted", lambda self, name: self.held(name))


@mutant(5, 7, aim=LONELY)
def copies_from_sources_that_are_not_trusted(patches: Patches) -> None:
    """All that a replica holds is taken for the log."""
    patches.set(Recovery, "trusted", lambda self, name: self.held(name))


@mutant(20, aim=Aim(faults=("crash", "aim", "coordinator")))
def does_not_save_what_it_decides(patches: Patches) -> None:
    """The closing mark is acted upon, and is not in the coordinator."""

    def make(right: Any) -> Any:
        async def save(self: Session, wanted: PartitionMeta, *, promote: bool = False) -> Any:
            if wanted.decision is not None and wanted.opened != self.log.session:
                self.log.core.saved(wanted)
                return True
            return await right(self, wanted, promote=promote)

        return save

    patches.wrap(Session, "_save", make)


@mutant(1, aim=FORGET)
def ignores_incarnations(patches: Patches) -> None:
    """An old copy of a replica votes like the replica."""

    def is_faithful(self: Recovery, name: str) -> bool:
        status, state = self.status(name), self.meta.replicas.get(name)
        if status is None or state is None or name not in self.meta.joined:
            return False
        return status.is_sound and status.session == self.meta.opened

    patches.set(Recovery, "is_faithful", is_faithful)


@mutant(1, 0, aim=FORGET)
def lets_a_wiped_disk_vote(patches: Patches) -> None:
    """A member that has forgotten votes with what it still holds."""

    def make(right: Any) -> Any:
        def bounds(self: Recovery, name: str) -> Any:
            if self.status(name) is not None and not self.is_faithful(name):
                return self.trusted(name), self.trusted(name)
            return right(self, name)

        return bounds

    patches.wrap(Recovery, "_bounds", make)


@mutant(34, aim=RESTORE)
def does_not_read_how_far_a_replica_had_acknowledged(patches: Patches) -> None:
    """A snapshot of a volume votes like the replica, although the document says that it had acknowledged more."""

    def make(right: Any) -> Any:
        return lambda self, state, status: right(self, replace(state, acknowledged=EMPTY), status)

    patches.wrap(Recovery, "_least", make)


@mutant(0, 1, aim=FAIL_OVER)
def decides_without_those_who_are_silent(patches: Patches) -> None:
    """A member that does not answer is taken for empty."""

    def make(right: Any) -> Any:
        def bounds(self: Recovery, name: str) -> Any:
            low, high = right(self, name)
            return (low, low) if self.status(name) is None else (low, high)

        return bounds

    patches.wrap(Recovery, "_bounds", make)


@mutant(6, 4, aim=FAIL_OVER)
def does_not_truncate_who_comes_back(patches: Patches) -> None:
    """A replica that holds more than the closing mark begins the session all the same."""

    def make(right: Any) -> Any:
        def next_for(self: Recovery, name: str) -> Task:
            task: Task = right(self, name)
            if isinstance(task, Truncate) and self.mark is not None:
                return SetLowMark(self.mark)
            return task

        return next_for

    patches.wrap(Recovery, "next_for", make)


@mutant(0, 1, aim=FAIL_OVER)
def truncates_to_one_below_the_mark(patches: Patches) -> None:
    """The closing mark that is decided is one too low."""

    def make(right: Any) -> Any:
        def decide(self: Recovery) -> int | None:
            mark: int | None = right(self)
            return mark if mark is None or self.meta.decision is not None else max(mark - 1, self.meta.low_mark)

        return decide

    patches.wrap(Recovery, "decide", make)


@mutant(12, 0, aim=FAIL_OVER)
def truncates_to_one_above_the_mark(patches: Patches) -> None:
    """A replica keeps one record behind the closing mark."""

    def make(right: Any) -> Any:
        def next_for(self: Recovery, name: str) -> Task:
            task: Task = right(self, name)
            if isinstance(task, Truncate):
                return Truncate(task.mark + 1)
            return task

        return next_for

    patches.wrap(Recovery, "next_for", make)


# -- locks, outcomes, feed ---------------------------------------------------------------------------------------------


@mutant(0, 1, aim=Aim(faults=("slow",), setup=BUSY))
def marks_locks_when_they_are_committed(patches: Patches) -> None:
    """What is in flight does not conflict."""

    def make(right: Any) -> Any:
        def decide(self: LockTable, batch: Any, next_id: int, committed: int) -> Any:
            late: list[tuple[int, int]] = self.__dict__.setdefault("late", [])
            while late and late[0][0] <= committed:
                id_, lock = late.pop(0)
                self._marked.pop(lock, None)
                self._marked[lock] = id_
            before = dict(self._marked)
            decision = right(self, batch, next_id, committed)
            late += [(id_, lock) for lock, id_ in self._marked.items() if before.get(lock) != id_]
            self._marked = before
            return decision

        return decide

    patches.wrap(LockTable, "decide", make)


@mutant(7, aim=Aim(faults=("crash", "coordinator"), setup={**BUSY, "locks": 3}))
def begins_with_an_empty_lock_table(patches: Patches) -> None:
    """A new owner takes every lock for never marked."""

    def make(right: Any) -> Any:
        def init(self: LockTable, size: int, low_mark: int, **options: Any) -> None:
            right(self, size, EMPTY, **options)

        return init

    patches.wrap(LockTable, "__init__", make)


@mutant(1, aim=Aim(faults=(), setup={**BUSY, "lock_table_size": 1}))
def forgets_locks_that_it_evicts(patches: Patches) -> None:
    """The floor does not rise when there is no room for a lock."""

    def make(right: Any) -> Any:
        def decide(self: LockTable, batch: Any, next_id: int, committed: int) -> Any:
            floor = self.floor
            decision = right(self, batch, next_id, committed)
            self.floor = floor
            return decision

        return decide

    patches.wrap(LockTable, "decide", make)


@mutant(6, 14, aim=FAIL_OVER)
def feeds_what_is_not_committed(patches: Patches) -> None:
    """Readers are given what is in the tail."""

    def make(right: Any) -> Any:
        def take(self: Cursor, committed: int) -> Any:
            return right(self, self._session.cache.next_id - 1)

        return take

    patches.wrap(Cursor, "take", make)


@mutant(1, 0, aim=REMOUNT)
def executes_a_batch_again_after_a_new_mount(patches: Patches) -> None:
    """What the mount before had brought last is queued once more for the new one."""

    def appending(right: Any) -> Any:
        async def append(self: Pipeline, member: Any, batch: Any, cost: int) -> None:
            self.__dict__.setdefault("last", {})[member.client] = batch
            await right(self, member, batch, cost)

        return append

    def joining(right: Any) -> Any:
        def join(self: Pipeline, member: Any) -> Any:
            barrier = right(self, member)
            batch = self.__dict__.get("last", {}).pop(member.client, None)
            if batch is not None:
                self._queue.append(QueuedBatch(member, batch, 0, self._time()))
                self._schedule_step()
            return barrier

        return join

    patches.wrap(Pipeline, "append", appending)
    patches.wrap(Pipeline, "join", joining)


@mutant(0, aim=REMOUNT)
def names_a_barrier_that_is_too_low(patches: Patches) -> None:
    """A new mount is told to ask up to what is committed, not up to what has an id."""

    def make(right: Any) -> Any:
        def join(self: Pipeline, member: Any) -> int:
            right(self, member)
            return self.committed

        return join

    patches.wrap(Pipeline, "join", make)


@mutant(1, aim=Aim(faults=(), setup={**BUSY, "callers": 3, "locks": 3}))
def gives_outcomes_to_the_wrong_transactions(patches: Patches) -> None:
    """Where some of a batch were refused, the ids of the others are told to the first ones."""

    def make(right: Any) -> Any:
        def decide(self: QueuedBatch[Any], refused: Any) -> int:
            accepted: int = right(self, refused)
            self.sequences = np.arange(self.batch.first_sequence, self.batch.first_sequence + accepted)
            return accepted

        return decide

    patches.wrap(QueuedBatch, "decide", make)


@mutant(2, 0, aim=RENEW)
def sends_what_comes_after_the_closing_mark(patches: Patches) -> None:
    """While a session gives way, what comes goes to its replicas still."""
    patches.set(ReplicatedLog, "sendable", property(lambda self: self.cache.next_id - 1))


@mutant(13, aim=RENEW)
def closes_a_session_above_what_is_committed(patches: Patches) -> None:
    """A planned session does not wait until a majority holds what was sent, and closes the one before there."""

    async def drain(self: Session, seconds: float) -> bool:
        return True

    patches.set(Session, "drain", drain)


# -- confirmed reads ---------------------------------------------------------------------------------------------------


@mutant(5, aim=READS)
def confirms_a_mark_without_asking(patches: Patches) -> None:
    """An owner that was replaced without noticing answers what it knows."""

    async def confirm(self: SessionConfirmation) -> None:
        return None

    patches.set(SessionConfirmation, "confirm", confirm)


@mutant(5, aim=READS)
def takes_an_acknowledgement_of_what_was_sent_before_for_an_answer(patches: Patches) -> None:
    """A storage that once acknowledged on a stream obeys the session, however long ago that was."""

    def prove(self: Replicator) -> asyncio.Future[None]:
        question: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        question.set_result(None)
        return question

    patches.set(Replicator, "prove", prove)


@mutant(5, aim=LEASED)
def trusts_an_expired_lease(patches: Patches) -> None:
    """Once a majority has answered, its lease has no end."""

    def holds(self: Lease, counted: Any, now: float) -> bool:
        return sum(name in self._asked for name in counted) >= majority(self._members)

    patches.set(Lease, "holds", holds)


# -- what storages keep ------------------------------------------------------------------------------------------------

VANISHING = Aim(
    faults=("vanish", "trim"), seconds=10.0, storages=3, setup={**BUSY, "segment_bytes": 1500, "keep_local": "1KB"}
)


@mutant(0, 1, aim=VANISHING)
def trims_what_is_not_in_the_store(patches: Patches) -> None:
    """What a manifest names counts as archived, whether the object is there or not."""

    async def see(self: Trimmer, meta: Any, first_id: int, names: list[str]) -> ArchiveCheck:
        return ArchiveCheck(last_id=meta.last)

    patches.set(Trimmer, "_see", see)


JUMPING = Aim(
    faults=("jumps",), seconds=15.0, storages=3, format=1,
    setup={**BUSY, "segment_bytes": 1500, "session_bytes": 4000, "keep_local": "5m"},
)  # fmt: skip
"""Segments are archived, and no replica needs them, a moment after they were written: only the policy keeps them."""


@mutant(0, 5, aim=JUMPING)
def takes_for_old_what_the_clock_of_the_owner_says(patches: Patches) -> None:
    """What a policy of time does not keep is trimmed, by the clock of the owner alone."""

    async def older(self: Trimmer, keep: Keep) -> int:
        assert keep.seconds is not None
        time, last = self._log.settings.wall() - keep.seconds * 1_000_000, self._log.committed
        untimed, older = await self._before(1, last), await self._before(time, last)
        return older if older > untimed else EMPTY

    patches.set(Trimmer, "_older", older)


@mutant(19, aim=JUMPING)
def lets_the_time_of_a_log_stand_still(patches: Patches) -> None:
    """An owner whose clock is behind writes old times: what is young looks old when the clock is right again."""
    patches.set(step.StorageClocks, "corrected", step.StorageClocks.bounded)


@mutant(89, aim=JUMPING)
def believes_the_newest_clock_of_the_storages(patches: Patches) -> None:
    """The clock of the owner is bounded by the one of a storage that is ahead of all others."""
    patches.set(step, "median", lambda values: max(values.values()) if values else None)


# -- who may do what ---------------------------------------------------------------------------------------------------


@mutant(0, 1, aim=GRANTED)
def keeps_the_rights_of_mounts_that_stand(patches: Patches) -> None:
    """A policy that changes counts for mounts that come after it only."""
    patches.set(Mount, "review", lambda self, rights: None)


@mutant(0, 1, aim=BOUNDED)
def forgets_quotas(patches: Patches) -> None:
    """No append waits for what its name has sent before."""
    patches.set(QuotaUsage, "wait", lambda self, batch, size: 0.0)


@mutant(2, 0, aim=BOUNDED)
def learns_of_a_policy_late(patches: Patches) -> None:
    """A server looks at the policy every five seconds."""

    def make(right: Any) -> Any:
        async def wait(self: Cluster, seen: object | None) -> object:
            if seen is not None:
                await asyncio.sleep(5.0)
            return await right(self, seen)

        return wait

    patches.wrap(Cluster, "wait_for_policy", make)


@mutant(2, aim=FED)
def gives_deliveries_beyond_the_quota(patches: Patches) -> None:
    """What members of durable groups are given does not count."""
    patches.set(ConsumerStream, "_is_held", lambda self: False)

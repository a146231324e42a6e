"""One owner's session on one partition: what is saved, when the log is open, and how the session ends.

How to think about it. `Session` is a loop that asks `Recovery` what has to be saved next, and saves it. Beside it each
`Replicator` asks what its replica has to do next. They share the `ReplicatedLog`, which holds the state of recovery,
and wake each other by its change signals. A signal carries no data: a task that is woken examines the state itself. So a
superfluous signal changes nothing, and a missing one shows as a partition that stands still.

Rule 1: a document is saved before anything relies on it: the session id before a storage is opened, the closing mark
before anything is cut, the members before the log opens, a member that has forgotten something before it is cut.
Rule 2: documents are saved one at a time, by compare-and-set. Another version in the coordinator means another owner, and
this session is over.
Rule 3: the state in memory ends with the session. The document is all that the next session needs.

Three phases. `recover` asks the storages, saves the session id, takes the vote, and opens the log. `serve` keeps the log
open: a replica that has forgotten something loses its vote, and one that becomes level later is a reason for a new
session. Then the end: handed over in order (`drain`, `save_closing`), or at once, when a newer session has fenced a
storage or another process has changed the document.

The hard part is `_renew`, a new session while clients continue (for replicas that came later, or when one that returns
would have too much to prove). The closing mark and the next session id are one write, made when a majority holds all that
was sent. Replicators and the state of recovery are created anew. The log cache and the pipeline stay: no other owner has
written in between. If the coordinator is away or a majority is slow, the open session continues as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import ceil

from waltzd.cluster.documents import (
    PartitionMeta,
    StorageMeta,
    acknowledging,
    closing,
    diverging,
    following,
    losing,
    released,
)
from waltzd.errors import CannotConnect, NoSuchPartition, WaltzError
from waltzd.errors.operations import Diverged
from waltzd.format.batch import End
from waltzd.protocol.peers import ReplicaPort
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.log_cache import LogCache
from waltzd.server.core.progress import OUTLASTS, Lease
from waltzd.server.core.recovery import NEAR_IDS, Level
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.documents import PartitionDocuments
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.server.session.settings import (
    ACKNOWLEDGED_SECONDS,
    DRAIN_SECONDS,
    PATIENCE_SECONDS,
    RENEWAL_PATIENCE_SECONDS,
    SETTLED_SECONDS,
    WAIT_SECONDS_MIN,
    SessionSettings,
)
from waltzd.wire.tasks import tell_failure


class Session:
    def __init__(
        self,
        partition: int,
        *,
        meta: PartitionMeta,
        documents: PartitionDocuments,
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: SessionSettings,
        timer: PeriodicTimer,
        say: Callable[[str], None],
        lease_before: float = 0.0,
        end_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """`meta` has the new session id, which is not saved yet, and follows upon the documents as they were read.
        `lease_before`: seconds of the lease of the owner whose session is still open. `end_turn` is called when the log
        is open, or waits for that lease: another partition may be recovered then."""
        self.log = ReplicatedLog(partition, meta, documents.roles, settings, say=say, watch=self._watch)
        self.documents = documents
        self._connect = connect
        self._settings = settings
        self._timer = timer
        self._is_asked_to_end = False
        self._noted_at = 0.0
        self._lease_before = lease_before
        self._end_turn = end_turn
        self._decided_at: float | None = None
        """Time at which a majority had certainly been fenced by this session, or by another one above the open session;
        None before."""
        self._drain_seconds, self._renew_after = DRAIN_SECONDS, 0.0
        self._patience_seconds, self._settled_seconds = RENEWAL_PATIENCE_SECONDS, SETTLED_SECONDS

    # -- until the log is open

    async def recover(self, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Recover the log until it is open. Raise what ended the session before."""
        log, core = self.log, self.log.core
        self._contact()
        if not core.is_taken:
            await self._take()
        while not core.is_open:
            seen = log.decided.version
            log.raise_end()
            wanted = core.next_save()
            if wanted is None:
                await self._wait_for_change(seen, patience_seconds)
                continue
            if wanted.opened == log.session:
                if await self._outlasting(seen):
                    continue
                wanted = replace(wanted, lease_ms=ceil(1000 * self._settings.lease_seconds))
            elif self._decided_at is None:
                self._decided_at = self._settings.clock()
            is_saved = await self._save(wanted, promote=wanted.opened == log.session)
            if not is_saved or wanted.opened == log.session:
                self._take_roles()
        self._end_turn()
        log.opened_at = asyncio.get_running_loop().time()
        if log.open_cache is None:
            end = await self._find_end()
            log.raise_end()
            log.open_cache = LogCache(log.low_mark + 1, self._settings.tail_bytes_max, end)
        log.rise(self.documents.format if log.open_cache.end is None else 1)
        log.marks = core.marks()
        for name, status in core.statuses.items():  # it may have been opened anew while it was saved that it takes part
            log.has_forgotten(name, status, core.held(name))
        # Committed by the decision that closed the session before, which a majority has recorded by now.
        log.commit(log.low_mark)
        if self._settings.lease_seconds > 0:
            log.marks.lease = Lease(len(log.marks.members), self._settings.lease_seconds)
        log.say(
            f"open: session {log.session}, generation {log.generation}, format {log.format}, "
            f"from id {log.low_mark + 1} on, with {', '.join(core.meta.joined)} of {', '.join(core.meta.members)}"
        )
        self._contact()
        self._watch()
        log.decided.notify()

    async def _take(self) -> None:
        """Save the session id: from then on no other owner decides anything here. Ask enough replicas before, because a
        session id that is taken hides which sessions had fenced the storages before it."""
        log, core = self.log, self.log.core
        log.raise_end()
        asking: dict[str, asyncio.Task[None]] = {}
        try:
            while not core.has_asked_enough:
                for name in core.others if core.needs_others else ():
                    if name not in asking:
                        asking[name] = asyncio.create_task(self._ask_other(name))
                        tell_failure(asking[name], log.end)
                await log.decided.wait(log.decided.version)
                log.raise_end()
        finally:
            for task in asking.values():
                task.cancel()
        await self.documents.save(core.meta, check=log.raise_end)
        core.is_taken = True
        log.decided.notify()

    async def _ask_other(self, name: str) -> None:
        """Ask a storage to which the log is not assigned for its status, until it answers or leaves the cluster."""
        log = self.log
        while (storage := self.documents.storages.get(name)) is not None:
            try:
                async with asyncio.timeout(self._settings.storage_seconds):
                    log.core.asked_other(name, await self._connect(storage).status(log.partition))
            except NoSuchPartition:
                log.core.asked_other(name, None)
            except (WaltzError, TimeoutError):
                await asyncio.sleep(self._settings.retry_seconds)
                continue
            log.decided.notify()
            return

    async def _outlasting(self, seen: int) -> bool:
        """Return whether the former owner may still answer reads by its lease. If so, first wait until it may not, or
        something changes."""
        if self._lease_before <= 0:
            return False
        now = self._settings.clock()
        if self._decided_at is None:  # the mark was decided before us
            self._decided_at = now
        until = self._decided_at + OUTLASTS * self._lease_before
        if now >= until:
            self._lease_before = 0.0
            return False
        self._end_turn()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(until - now, WAIT_SECONDS_MIN)):
                await self.log.decided.wait(seen)
        return True

    async def _find_end(self) -> End | None:
        """Return where the last batch of the decided log ends; None if its last records are of format 0. Level replicas
        hold the same bytes: raise `Diverged` if they report different ends."""
        log, core, mark = self.log, self.log.core, self.log.low_mark
        if mark == EMPTY:
            return None
        if core.contest:
            raise Diverged(f"partition {log.partition}: {core.contest}")
        level = [name for name in core.names if isinstance(core.next_for(name), Level)]
        if not level:
            raise CannotConnect(f"no replica of partition {log.partition} that takes part in session {log.session} answers")
        statuses = {name: status for name in level if (status := core.status(name)) is not None and status.last_id == mark}
        if not statuses:  # all statuses are out of date: the replicas have copied since they were opened
            statuses[level[0]] = await log.port(level[0]).status(log.partition)
        ends = {status.end for status in statuses.values() if status.last_id == mark}
        if len(ends) != 1:
            said = "; ".join(f"{name} at {status.last_id}: {status.end}" for name, status in statuses.items())
            raise Diverged(f"the replicas of partition {log.partition} have different ends at id {mark}: {said}")
        return ends.pop()

    async def _wait_for_change(self, seen: int, patience_seconds: float) -> None:
        """Wait for a change. If a majority is level and other replicas nearly are, wait only a moment: then the session
        opens without them."""
        core = self.log.core
        has_patience = core.patience_left and core.has_level_majority
        try:
            async with asyncio.timeout(patience_seconds if has_patience else None):
                await self.log.decided.wait(seen)
        except TimeoutError:
            core.patience_left = False

    # -- while it is open

    async def serve(self) -> None:
        """Keep the log open until it is asked to end. Raise what ended it before."""
        decided = self.log.decided
        try:
            while True:
                seen = decided.version
                self.log.raise_end()
                if self._is_asked_to_end:
                    return
                reason = self._reason_for_another()
                if reason is not None and self._settings.turns.take(decided.notify):
                    await self._renew(reason)
                elif not await self._save_changes():
                    await decided.wait(seen)
        finally:
            self._timer.remove(self._look)

    def _watch(self) -> None:
        """Check progress every second until no replica owes an acknowledgement, and all are level."""
        self._timer.add(self._look)

    def _look(self, now: float) -> None:
        log, marks = self.log, self.log.marks
        if log.ended is not None:
            self._timer.remove(self._look)
        if log.ended is not None or marks is None:
            return
        quiet = [replicator.check_progress(now) for replicator in log.replicators.values()]
        is_level = len(marks.counted) >= len(log.core.roles) == len(marks.members)
        is_busy = not is_level or self._reason_for_another() is not None  # a replica may have become level, or has left
        if is_busy:
            log.decided.notify()
        if self._is_noted(now) and not is_busy and all(quiet):
            self._timer.remove(self._look)

    def _reason_for_another(self) -> str | None:
        """Return why there should be a new session; None if there is no reason, or if it could not be saved now."""
        log, core = self.log, self.log.core
        now = asyncio.get_running_loop().time()
        if now < self._renew_after or not self.documents.can_be_saved:
            return None
        if log.bytes > self._settings.session_bytes_max:
            return f"{log.bytes} bytes were written in session {log.session}"
        if self.documents.format > log.format:
            return f"the cluster writes format {self.documents.format} from now on"
        gone = [name for name in core.meta.members if name not in core.roles]
        if gone:
            return f"{', '.join(gone)} left the partition"
        if now - log.opened_at < self._settled_seconds and not log.missing:
            return None
        late = self._late
        return f"{late[0]} is level and takes part from then on" if late else None

    @property
    def _late(self) -> list[str]:
        """Replicas that are level, or nearly, and do not count in the open session."""
        marks = self.log.marks
        assert marks is not None
        return [name for name in self.log.core.roles if not marks.counts(name) and self._is_nearly_level(name)]

    def _is_nearly_level(self, name: str) -> bool:
        core, replicator = self.log.core, self.log.replicators.get(name)
        if replicator is None or not replicator.is_readable:
            return False
        held = core.held(name)
        return held < self.log.cache.next_id <= held + NEAR_IDS

    async def _save_changes(self) -> bool:
        """Save members that have forgotten something or have diverged; return whether there was anything to save."""
        log, core = self.log, self.log.core
        if self.documents.has_to_write:
            await self._save(core.meta)
            return True
        for name, incarnation in core.foreign.items():
            wanted = diverging(core.meta, name, incarnation, core.progress(name).acknowledged)
            if wanted is not None:
                log.say(f"{name} {core.divergence(name)}: it is excluded until it is set aside")
                await self._save(wanted)
                return True
        for name in core.forgetful:
            wanted = losing(core.meta, name, core.progress(name).acknowledged)
            if wanted is not None:
                log.say(f"{name} has forgotten what it had acknowledged; it has no vote until it has been admitted again")
                await self._save(wanted)
            core.progress(name).has_forgotten = False
            return True
        return False

    async def _save(self, wanted: PartitionMeta, *, promote: bool = False) -> bool:
        wanted = self._with_marks(wanted)
        leaving = self.log.core.leaving
        if not await self.documents.save(wanted, promote=promote, leaving=leaving, check=self.log.raise_end):
            return False
        self.log.core.saved(wanted)
        self.log.decided.notify()
        return True

    def _with_marks(self, meta: PartitionMeta) -> PartitionMeta:
        return meta if self.log.marks is None else acknowledging(meta, self.log.marks.acknowledged)

    def _is_noted(self, now: float) -> bool:
        """Return whether the document has the newest acknowledgements of the replicas, and start to save them if not. No
        task waits for that, and it may fail."""
        if self._with_marks(self.log.core.meta) is self.log.core.meta:
            return True
        if now - self._noted_at >= ACKNOWLEDGED_SECONDS and self.documents.can_be_saved:
            self._noted_at = now
            self.documents.note(
                lambda: self._with_marks(self.log.core.meta), lambda meta: self.log.core.saved(meta), self.log.end
            )
        return False

    # -- from one session to the next

    async def _renew(self, reason: str) -> None:
        """Give way to a new session of our own. New records gather in the log cache meanwhile, and nothing that is in
        flight is given up. The open session stays until a save to the coordinator has succeeded, and a majority holds
        everything that was sent. Replicas count for that also if their acknowledgements do not: so a replica that was
        away can take the place of one that is lost."""
        clock, log = asyncio.get_running_loop(), self.log
        with ExitStack() as turn:
            turn.callback(self._settings.turns.give_back)
            # a session that stands still must not block the turn of another partition
            clock.call_later(self._settings.hand_over_seconds, turn.close)
            await self._save(log.core.meta)
            await self.documents.read_format()
            log.core.leaving = await self.documents.read_leaving()
            log.sending_up_to = log.cache.next_id - 1
            if await self.drain(self._drain_seconds):
                after, late = following(self._closing()), self._late
                # If this fails, it may be saved all the same, and the session is closed: so nothing more is sent then.
                await self.documents.save(after, check=log.raise_end)
                log.say(f"a new session: {reason}")
                self._drain_seconds = DRAIN_SECONDS
                await log.follow(after)
                await self.recover(patience_seconds=self._patience_seconds)
                self._adapt_patience(late)
            else:
                self._drain_seconds = min(2 * self._drain_seconds, self._settings.hand_over_seconds)
                self._renew_after = clock.time() + SETTLED_SECONDS
            log.sending_up_to = None
            log.resume_sending()
            log.decided.notify()

    def _adapt_patience(self, late: list[str]) -> None:
        """Wait longer the next time, and later, if one of these replicas did not make it: a slow disk takes long to begin
        a session, and would never count."""
        core = self.log.core
        if all(name in core.meta.joined or name not in core.roles for name in late):
            self._patience_seconds, self._settled_seconds = RENEWAL_PATIENCE_SECONDS, SETTLED_SECONDS
        elif self._patience_seconds < self._settings.hand_over_seconds:
            self._patience_seconds *= 2
            self._settled_seconds *= 2

    # -- the ends

    def ask_to_end(self) -> None:
        """End in order, as soon as the log is open."""
        self._is_asked_to_end = True
        self.log.decided.notify()

    async def drain(self, seconds: float) -> bool:
        """Wait for these seconds for what is in flight; return whether a majority holds all of it."""
        log, last_id = self.log, self.log.sendable
        log.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                while log.ended is None and not log.is_on_majority(last_id):
                    await log.progressed.wait(log.progressed.version)
        except TimeoutError:
            return False
        finally:
            log.is_draining = False
        return log.ended is None

    async def save_closing(self) -> None:
        """Save that the session is closed, after `drain`: nothing is in flight, and no read is answered any more. So the
        next session needs neither a vote nor a wait for the lease."""
        await self._save(released(self._closing()))

    def _closing(self) -> PartitionMeta:
        """Return the document that closes the session at the last id that was sent, which a majority holds."""
        log, mark = self.log, self.log.sendable
        return closing(log.core.meta, mark, log.copies(mark))

    def abandon(self) -> None:
        """End the session: nothing more is sent or saved."""
        self.log.abandon()
        self.documents.close()

    async def close(self) -> None:
        self.abandon()
        await self.log.close()

    # -- what operators say

    async def reassign(self) -> None:
        """Apply a change of the lists of replicas or storages, or of the format of the cluster: contact replicas that are
        new or have moved."""
        log, before = self.log, self.documents.addresses
        await self.documents.read_format()
        if news := await self.documents.look_again():
            log.say(news)
        moved = [name for name in log.replicators if self.documents.addresses.get(name) != before.get(name)]
        self._take_roles()
        self._watch()
        for name, replicator in [(name, log.replicators.pop(name)) for name in moved]:
            await replicator.close()
            log.core.silent(name)
        self._contact()

    def _take_roles(self) -> None:
        """Take over the list of replicas as it was read or saved last. The replicas that leave were decided from an older
        list."""
        self.log.core.leaving = frozenset()
        self.log.core.roles = dict(sorted(self.documents.roles.items()))
        self.log.decided.notify()

    def _contact(self) -> None:
        self.log.core.others = sorted(set(self.documents.storages) - set(self.log.core.names))
        self.log.contact(self.documents.storages, self._connect)

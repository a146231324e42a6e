"""The consumer groups of one server: what the group log says of all groups, and the groups that are active here.

Each server replays the group log into one `GroupStateLog`. A group is created, changed and deleted by an entry there,
written under the lock of its name. When two servers write at once, the log rejects one of them, and that server reads
on and looks again. The owner of a partition runs each group there as a `GroupPartition`: it is created when the first
member joins or an operator changes something, and ended when it is idle. An inactive group costs only its state in
memory.

While the group log is unavailable, active groups continue for a while and no group is activated. If the group log
cannot be decoded, all groups stop with an error; appends and feeds go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from waltzd.client.routes import SharedQuestion
from waltzd.cluster.groups import GroupDescription, GroupMeta, MadeGroup
from waltzd.errors import (
    BadArgument,
    GroupExists,
    GroupLogAway,
    NoGroupLog,
    NoSuchChannel,
    NoSuchGroup,
    NoSuchPartition,
    NotInGroup,
    NotReady,
    OtherTimeline,
    WaltzError,
)
from waltzd.errors.operations import GroupStateDamaged
from waltzd.protocol.channels import Channels, bits_of, numbers_in
from waltzd.protocol.groups import (
    Change,
    Changed,
    GroupPartitionStatus,
    GroupStatus,
    GroupTotals,
    JoinRequest,
    ParkedTransaction,
)
from waltzd.protocol.locks import AppendOutcome, Committed, Lock
from waltzd.protocol.peers import AttendLink
from waltzd.protocol.positions import Position, timeline_of
from waltzd.protocol.quorum import EMPTY
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.clients.registry import QuotaUsage
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import (
    PREFIX,
    WHOLE_GROUP,
    GroupStateLog,
    Key,
    deletion_entry,
    group_entry,
    lock_of,
    skip_entry,
    skipped_by,
    totals_of,
)
from waltzd.server.subscriptions.consumer_stream import ConsumerStream
from waltzd.server.subscriptions.group_log import Entry, GroupLog
from waltzd.server.subscriptions.group_partition import GroupPartition, check_group_partition, other_timeline
from waltzd.wire.tasks import tell_failure

log = logging.getLogger("waltz.server")
LOOK_SECONDS = 1.0
"""Seconds between two checks for a group log, for entries to rewrite, and for idle group partitions."""
ATTEMPTS = 20
"""Number of tries to write an entry about a group. A try fails if another server was first, or if the log knows the
lock only approximately."""
REWRITES_MAX = 200
"""Largest number of entries rewritten in one check."""
CHECKED_AT_ONCE = 500
"""Number of partitions of a new group that are checked before other tasks run."""
PARKED_COUNT_MAX = 1000
"""Largest number of parked transactions in one answer."""
NO_LOG = "the cluster has no group log yet"


class GroupCoordinator:
    def __init__(
        self,
        group_log: GroupLog,
        *,
        partitions: int,
        find_pipeline: Callable[[int, int | None], Pipeline],
        channels: Callable[[], Channels],
        owns_group_log: Callable[[], bool],
        on_fatal: Callable[[BaseException], None],
        say: Callable[[str], None] = log.info,
    ) -> None:
        """Take what the server provides. `owns_group_log` returns whether this server owns the group log; `on_fatal` is
        called with an internal error."""
        self.state_log = GroupStateLog()
        self.trouble = NO_LOG
        """Why the replayed groups may be outdated; empty while the group log is followed."""
        self.damage: GroupStateDamaged | None = None
        """Error of the entry that cannot be decoded; None unless groups are stopped by one. An operator can have the
        entry skipped."""
        self._passed: frozenset[int] = frozenset()
        """Ids of entries that operators had skipped."""
        self._foreign = 0
        """Number of foreign records in the group log that a warning was logged about."""
        self.group_log = group_log
        self._partitions = partitions
        self._find_pipeline = find_pipeline
        self._channels = channels
        self._owns_group_log = owns_group_log
        self._on_fatal = on_fatal
        self._say = say
        self._active: dict[Key, GroupPartition] = {}
        self._totals: GroupTotals | None = None
        self._totals_until = 0.0
        self._level = SharedQuestion(self._read_to_the_end)
        self._mending = SharedQuestion(self._begin_again)

    # -- the log ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the group log and maintain the groups until cancelled."""
        tasks = [self._task(self._follow(), "group log"), self._task(self._tend(), "groups")]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._level.cancel()
            self._mending.cancel()
            for group_partition in list(self._active.values()):
                group_partition.end(NotReady("this server is shutting down"))
            await self.group_log.close()

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        tell_failure(task, self._on_fatal)
        return task

    async def _follow(self) -> None:
        while True:
            try:
                if self.damage is not None:
                    await self._mending.ask()
                await self.level()
                self._note("")
                async with aclosing(self.group_log.follow(self.state_log.position)) as batches:
                    async for batch in batches:
                        self._read(batch)
            except GroupStateDamaged:
                pass
            except WaltzError as error:
                self._note(NO_LOG if isinstance(error, NoGroupLog) else f"the group log is unavailable: {error.message}")
            await asyncio.sleep(LOOK_SECONDS)

    def _note(self, trouble: str) -> None:
        if self.damage is not None:
            return
        if trouble != self.trouble:
            self._say(trouble or "the group log is followed")
        self.trouble = trouble

    def _read(self, batch: Sequence[Entry]) -> None:
        """Replay entries; those that were replayed before are ignored."""
        is_new = False
        for id, data in batch:
            if timeline_of(id) != self.state_log.timeline:
                raise OtherTimeline("the group log was ended below the entries that this server has read: it is read again")
            if id <= self.state_log.reach:
                continue
            try:
                key = self.state_log.read(id, data)
            except GroupStateDamaged as error:
                self._damaged(error)
                raise
            if key is not None and key.partition == WHOLE_GROUP:
                is_new = True
            elif key in self._active:
                self._active[key].look()
        self._note_foreign()
        if is_new:
            self._look_at_groups()

    def _note_foreign(self) -> None:
        if self.state_log.foreign > self._foreign:
            log.warning(
                "skipped %d records of the group log up to id %d that no server wrote",
                self.state_log.foreign,
                self.state_log.reach,
            )
        self._foreign = self.state_log.foreign

    def _damaged(self, error: GroupStateDamaged) -> None:
        self.damage, self.trouble = error, error.message
        log.error("%s all groups have stopped delivering: %s", error.code, error.message)
        for group_partition in list(self._active.values()):
            group_partition.end(error)

    def _look_at_groups(self) -> None:
        """End the partitions of groups that were deleted, created again or changed."""
        for key, group_partition in list(self._active.items()):
            meta, made_at = self.state_log.groups.get(key.name, (None, None))
            if meta is None or made_at != key.made_at:
                group_partition.end(NoSuchGroup(f"the group {key.name} was deleted", group=key.name))
            elif meta != group_partition.meta:
                group_partition.end(NotReady(f"the settings of group {key.name} were changed: join again"))

    async def level(self) -> None:
        """Replay the group log up to its end at the time of this call: everything that was acknowledged before is
        included then."""
        if self.damage is not None:
            raise self.damage
        await self._level.ask()

    async def _read_to_the_end(self) -> None:
        end = await self.group_log.end()
        if self.state_log.reach == EMPTY:
            self.state_log.timeline = end.timeline
        elif end.timeline != self.state_log.timeline:
            await self._read_anew(end)
            return
        try:
            await self._read_up_to(self.state_log, end)
        except WaltzError as error:
            floor = error.number("floor")
            if floor is None or floor <= self.state_log.reach:
                raise
            await self._begin_at(floor, end)

    async def _read_anew(self, end: Position) -> None:
        """Replay the group log from its start, after an operator ended it and it continues under another timeline.
        Entries above the fork are gone, so each owner has to claim its groups again."""
        try:
            await self._begin_at(0, end)
        except WaltzError as error:
            if (floor := error.number("floor")) is None:
                raise
            await self._begin_at(floor, end)
        log.warning("an operator ended the group log; it was read again up to id %d", end)
        for group_partition in list(self._active.values()):
            group_partition.end(NotReady("an operator ended the group log: join the group again"))

    async def _read_up_to(self, state_log: GroupStateLog, end: int) -> None:
        if state_log.reach >= end:
            return
        async with aclosing(self.group_log.read(state_log.position, end)) as batches:
            async for batch in batches:
                if state_log is self.state_log:
                    self._read(batch)
                else:
                    for id, data in batch:
                        state_log.read(id, data)
        state_log.pass_to(end)

    async def _begin_at(self, floor: int, end: Position) -> None:
        """Replay the log from `floor` on, after it was trimmed above the last entry read. From there on it holds all
        live entries."""
        state_log = GroupStateLog(self._passed)
        state_log.timeline = end.timeline
        state_log.pass_to(floor - 1)
        try:
            await self._read_up_to(state_log, end)
        except GroupStateDamaged as error:
            self._damaged(error)
            raise
        self.state_log, self.damage = state_log, None
        self._note_foreign()
        self._look_at_groups()
        for group_partition in list(self._active.values()):
            group_partition.look()

    async def _begin_again(self) -> None:
        """Look for an operator's order to skip the damaged entry, and replay the whole log without that entry. Raise
        the damage if there is no such order."""
        error = self.damage
        if error is None:
            return
        end, passed = await self.group_log.end(), set(self._passed)
        if self.state_log.reach < end:
            async with aclosing(self.group_log.read(self.state_log.position, end)) as batches:
                async for batch in batches:
                    passed.update(id for _, data in batch if (id := skipped_by(data)) is not None)
        if error.number("entry") not in passed:
            raise error
        self._passed = frozenset(passed)
        try:
            await self._begin_at(0, end)
        except WaltzError as trimmed:
            floor = trimmed.number("floor")
            if floor is None:
                raise
            await self._begin_at(floor, end)
        self._note("")
        log.warning("skipped entry %s of the group log; groups continue without it", error.facts["entry"])

    async def pass_over(self, id: int) -> None:
        """Write an operator's order to skip the entry that stops all groups, and continue."""
        if self.damage is None:
            with suppress(GroupStateDamaged):
                await self._level.ask()
        if self.damage is None or self.damage.number("entry") != id:
            raise BadArgument(
                f"entry {id} of the group log does not stop the groups",
                not_done="nothing was changed",
                next_step="`waltzctl group list` names the entry that does, if there is one",
            )
        if not isinstance(await self._append(skip_entry(id), lock_of(PREFIX), await self.group_log.end()), Committed):
            raise GroupLogAway(f"the order to skip entry {id} was rejected: another one was written at the same time")
        await self._mending.ask()

    # -- groups --------------------------------------------------------------------------------------------------------

    async def make(self, meta: GroupMeta) -> MadeGroup:
        """Create a group, durable on a majority. Return the existing group if it has the same settings."""
        await self._check(meta)
        for _ in range(ATTEMPTS):
            await self.level()
            known = self.state_log.groups.get(meta.name)
            if known is not None:
                if replace(known[0], starts=()) != replace(meta, starts=()):
                    raise GroupExists(f"the group {meta.name} exists with other settings", group=meta.name)
                return MadeGroup(*known)
            id = await self._written(group_entry(meta), lock_of(meta.name))
            if id is not None:
                return MadeGroup(meta, id, is_new=True)
        raise self._not_written(meta.name)

    async def find(self, name: str) -> MadeGroup:
        if name not in self.state_log.groups:
            await self.level()
        return MadeGroup(*self._group(name))

    async def set(self, meta: GroupMeta, made_at: int) -> MadeGroup:
        """Change the settings of a group."""
        await self._check(meta)
        for _ in range(ATTEMPTS):
            await self.level()
            known, _ = self._group(meta.name, made_at)
            meta = replace(meta, starts=known.starts)
            for what in ("mode", "key", "partitions"):
                if getattr(known, what) != getattr(meta, what):
                    raise GroupExists(
                        f"the group {meta.name} has the {what} {getattr(known, what) or 'all'}, which stays for as long as "
                        "it lives",
                        group=meta.name,
                    )
            if known == meta:
                return MadeGroup(meta, made_at)
            if await self._written(group_entry(meta, made_at), lock_of(meta.name)) is not None:
                return MadeGroup(meta, made_at)
        raise self._not_written(meta.name)

    async def remove(self, name: str, made_at: int) -> None:
        """Delete a group, durable on a majority. Raise `NoSuchGroup` if there is none when this is called."""
        await self.level()
        self._group(name, made_at)
        for _ in range(ATTEMPTS):
            if await self._written(deletion_entry(name, made_at), lock_of(name)) is not None:
                return
            await self.level()
            if self.state_log.groups.get(name, (None, None))[1] != made_at:
                return  # by an entry of this call whose outcome was unknown, or by another server
        raise self._not_written(name)

    async def _written(self, data: bytes, lock: Lock) -> int | None:
        """Write an entry and replay it; return its id, or None if it was rejected or its outcome is unknown."""
        outcome = await self._append(data, lock, self.state_log.position)
        if not isinstance(outcome, Committed):
            return None
        await self.level()
        return outcome.id

    async def _append(self, data: bytes, lock: Lock, position: int) -> AppendOutcome:
        try:
            return await self.group_log.append(data, lock, position)
        except WaltzError as error:
            raise GroupLogAway(
                f"the group log could not be written: {error.message}",
                not_done="nothing was written, and nothing was changed",
            ) from error

    @staticmethod
    def _not_written(name: str) -> GroupLogAway:
        return GroupLogAway(f"the entry about group {name} was rejected {ATTEMPTS} times: others wrote at the same time")

    def _group(self, name: str, made_at: int | None = None) -> tuple[GroupMeta, int]:
        if self.damage is not None:
            raise self.damage
        known = self.state_log.groups.get(name)
        if known is None or made_at not in (None, known[1]):
            why = "" if known is None else ": it was deleted and created again"
            raise NoSuchGroup(f"there is no group {name}{why}", group=name)
        return known

    def partitions_of(self, meta: GroupMeta) -> int:
        """Return the partitions of a group at this moment, as a bit set. They change when one of its channels does."""
        return (1 << self._partitions) - 1 if meta.partitions is None else bits_of(meta.partitions, self._channels())

    async def _check(self, meta: GroupMeta) -> None:
        """Raise if the settings of a group are invalid, as far as this server can tell."""
        wrong = meta.mistake()
        if wrong is not None:
            raise BadArgument(f"{wrong[0]} of group {meta.name} {wrong[1]}")
        highest = max([self.partitions_of(meta).bit_length() - 1, *(start.partition for start in meta.starts)])
        if highest >= self._partitions:
            raise NoSuchPartition(f"there is no partition {highest}: the cluster has {self._partitions}", partition=highest)
        starts = {start.partition: start.after for start in meta.starts}
        for at, number in enumerate(numbers_in(self.partitions_of(meta))):
            if at % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
                await asyncio.sleep(0)
            pipeline = self._own_pipeline(number)
            if pipeline is not None:
                with suppress(NotReady, NoSuchPartition):
                    check_group_partition(meta, number, pipeline, starts.get(number, -1))

    def _own_pipeline(self, partition: int) -> Pipeline | None:
        try:
            return self._find_pipeline(partition, None)
        except WaltzError:
            return None

    # -- active --------------------------------------------------------------------------------------------------------

    async def group_partition(self, name: str, partition: int, generation: int | None) -> GroupPartition:
        """Return the active group in a partition of this server, after it has claimed the group. Activate it if it is
        inactive."""
        pipeline = self._find_pipeline(partition, generation)
        if name not in self.state_log.groups:
            await self.level()
        meta, made_at = self._group(name)
        if not self.partitions_of(meta) >> partition & 1:
            raise NotInGroup(
                f"partition {partition} does not belong to group {name}, whose partitions are {meta.partitions or 'all'}",
                group=name,
                partition=partition,
            )
        return await self._activated(Key(name, made_at, partition), meta, pipeline)

    async def _activated(self, key: Key, meta: GroupMeta, pipeline: Pipeline) -> GroupPartition:
        """Return an active group partition, also of a partition that has left the channel of the group."""
        found = self._active.get(key)
        if found is None or found.pipeline is not pipeline or found.error is not None:
            found = GroupPartition(key, meta, pipeline, self, self._on_fatal)
            found.start()
            self._active[key] = found
        await found.ready()
        return found

    async def join(self, link: AttendLink, request: JoinRequest, admit: Callable[[], QuotaUsage]) -> ConsumerStream:
        group_partition = await self.group_partition(request.group, request.partition, request.generation)
        return ConsumerStream(link, request, group_partition, admit(), group_partition.pipeline.capacity)

    def forget(self, group_partition: GroupPartition) -> None:
        if self._active.get(group_partition.key) is group_partition:
            del self._active[group_partition.key]

    async def change(
        self, name: str, made_at: int | None, partition: int, change: Change, ids: Sequence[int], epoch: int = 0
    ) -> Changed:
        """Apply a change; it is durable on a majority when this returns. `made_at` is None for the group that has the
        name now. `epoch` is that which a reset begins; 0 for the next one."""
        await self.level()
        self._group(name, made_at)
        group_partition = await self.group_partition(name, partition, None)
        return await group_partition.change(change, ids, epoch)

    # -- status ----------------------------------------------------------------------------------------------------------

    def needed_from(self) -> int:
        """Return the first id of the group log that is needed to replay all groups."""
        own = self._own_pipeline(self._partitions)
        is_old = own is not None and own.session.lineage.current != self.state_log.timeline
        return 0 if self.damage is not None or is_old else self.state_log.floor

    @property
    def active(self) -> Iterator[GroupPartition]:
        return iter(self._active.values())

    def describe(self, name: str | None = None) -> list[GroupDescription]:
        """Describe all groups, or the group `name`, as this server knows them."""
        if self.damage is not None:
            raise self.damage
        groups = self.state_log.groups if name is None else {name: self._group(name)}
        found: dict[str, dict[int, GroupPartitionStatus]] = {one: {} for one in groups}
        states = self.state_log.states() if name is None else self._states_of(name, groups[name][1])
        for key, state in states:
            if key.name in found and groups[key.name][1] == key.made_at:
                found[key.name][key.partition] = GroupPartitionStatus(
                    partition=key.partition,
                    epoch=state.epoch,
                    reach=state.reach,
                    floor=state.floor,
                    open=state.open.ids,
                    parked=len(state.parked),
                    stopped=self._stopped(key, state),
                )
        for key, group_partition in self._active.items():
            if key.name in found and (told := group_partition.describe()) is not None:
                found[key.name][key.partition] = told
        return [
            GroupDescription(meta, made_at, tuple(found[one][partition] for partition in sorted(found[one])))
            for one, (meta, made_at) in sorted(groups.items())
        ]

    def _states_of(self, name: str, made_at: int) -> Iterator[tuple[Key, GroupState]]:
        """Yield the states of one group, by partition, without a look at other groups."""
        for partition in range(self._partitions):
            state = self.state_log.state(name, partition)
            if state is not None:
                yield Key(name, made_at, partition), state

    def _stopped(self, key: Key, state: GroupState) -> str:
        own = self._own_pipeline(key.partition)
        other = None if own is None else other_timeline(key, state, own.session.lineage)
        return state.stopped if other is None else other.message

    async def status(self, name: str, partition: int) -> GroupStatus:
        """Return the state of a group in a partition of this server."""
        await self.level()
        meta, _ = self._group(name)
        pipeline = self._find_pipeline(partition, None)
        if not self.partitions_of(meta) >> partition & 1:
            raise NotInGroup(f"partition {partition} does not belong to group {name}", group=name, partition=partition)
        (found,) = self.describe(name)
        start = meta.start(partition)
        unbegun = GroupPartitionStatus(partition, 0, reach=start, floor=start, open=0, parked=0, stopped="")
        place = next((one for one in found.places if one.partition == partition), unbegun)
        return GroupStatus(
            partition=partition,
            position=place.floor,
            lag=max(0, pipeline.committed - place.reach) + place.open,
            parked=place.parked,
            in_flight=place.in_flight,
            members=len(place.members),
            stopped=place.stopped,
            paused=place.paused,
        )

    def parked(
        self, name: str, partition: int | None, after: int | None, count: int
    ) -> tuple[tuple[ParkedTransaction, ...], bool]:
        """Return parked transactions sorted by partition and id, and whether there are more."""
        _, made_at = self._group(name)
        count = max(1, min(count, PARKED_COUNT_MAX))
        found: list[ParkedTransaction] = []
        for key, known in self._states_of(name, made_at):
            if partition in (None, key.partition):
                at_work = self._active.get(key)
                parked = known.parked if at_work is None else (at_work.state or known).parked
                ids = sorted(id for id in parked if after is None or partition is None or id > after)
                for id in ids[: count + 1 - len(found)]:
                    one = parked[id]
                    found.append(ParkedTransaction(key.partition, id, one.failures, one.member, one.reason))
        return tuple(found[:count]), len(found) > count

    def totals(self) -> GroupTotals | None:
        """Return totals over all groups, at most a second old; None if this server knows of no group."""
        now = asyncio.get_running_loop().time()
        if now >= self._totals_until:
            self._totals, self._totals_until = self._count(), now + LOOK_SECONDS
        return self._totals

    def _count(self) -> GroupTotals | None:
        if self.trouble == NO_LOG and not self.state_log.groups:
            return None
        told = {key: group_partition.describe() for key, group_partition in self._active.items()}
        at_work = {key: one for key, one in told.items() if one is not None}
        return totals_of(self.state_log, at_work, self._partitions_now, self._committed, self.trouble, self._stopped)

    def _partitions_now(self, meta: GroupMeta) -> Sequence[int]:
        """Return the partitions of a group; if one of its channels is gone, those in which it has begun."""
        try:
            return numbers_in(self.partitions_of(meta))
        except NoSuchChannel:
            return [partition for partition in range(self._partitions) if self.state_log.state(meta.name, partition)]

    def _committed(self, partition: int) -> int | None:
        pipeline = self._own_pipeline(partition)
        return None if pipeline is None else pipeline.committed

    # -- maintenance --------------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for group_partition in list(self._active.values()):
                group_partition.tend()
            if self.damage is None and not self.trouble:
                with suppress(WaltzError):
                    await self._shorten()

    async def _shorten(self) -> None:
        """Rewrite the entries that keep the group log long, as far as this server is the one to write them."""
        for _ in range(REWRITES_MAX):
            key = self.state_log.overdue
            if key is None or not await self._rewrite(key):
                return
            await self.level()

    async def _rewrite(self, key: Key) -> bool:
        meta, made_at = self.state_log.groups.get(key.name, (None, None))
        if meta is None or made_at != key.made_at:
            if not self._owns_group_log():
                return False
            await self.level()
            if self.state_log.groups.get(key.name, (None, None))[1] != key.made_at:  # an owner wrote after it was deleted
                await self._written(deletion_entry(key.name, key.made_at), lock_of(key.name))
            return True
        if key.partition == WHOLE_GROUP:
            if not self._owns_group_log():
                return False
            await self._written(group_entry(meta, key.made_at), lock_of(key.name))
            return True
        pipeline = self._own_pipeline(key.partition)
        if pipeline is None:
            return False
        group_partition = await self._activated(key, meta, pipeline)
        await group_partition.rewrite()
        return True

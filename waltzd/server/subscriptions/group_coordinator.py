"""The consumer groups of one server: what the group log says of all of them, and which are at work here.

Each server follows the group log into one `Ledger`. A group is made, changed and removed by an entry there, written under
the lock of its name: so of two servers that do it at once one is refused, reads on, and finds what is so. Where a group
stands in a partition is the affair of the partition's owner (`Place`); a place is made when the first member joins or an
operator changes something, and given up when nobody needs it. A group that nobody works in costs its entry in the ledger.

When the group log is away, what is at work goes on for a while, and nothing new begins. When what it says cannot be
understood, groups refuse, loudly, and nothing else suffers.
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
    GroupStateDamaged,
    NoGroupLog,
    NoSuchGroup,
    NoSuchPartition,
    NotInGroup,
    NotReady,
    OtherTimeline,
    WaltzError,
)
from waltzd.protocol.channels import Channels, bits_of, numbers_in
from waltzd.protocol.groups import Change, Changed, GroupPartitionStatus, GroupTotals, JoinRequest, ParkedTransaction
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
    gone,
    lock_of,
    made,
    pass_over,
    passed_over,
)
from waltzd.server.groups.totals import totals_of
from waltzd.server.subscriptions.consumer_stream import ConsumerStream
from waltzd.server.subscriptions.group_log import Entry, GroupLog
from waltzd.server.subscriptions.group_partition import GroupPartition, check_group_partition, other_timeline
from waltzd.wire.tasks import tell_failure

log = logging.getLogger("waltz.server")
LOOK_SECONDS = 1.0
"""How often it looks whether there is a group log by now, what must be written anew, and which places nobody needs."""
ATTEMPTS = 20
"""So often an entry about a group is written once more: each time others were first, or a lock is known roughly only."""
REWRITES_MAX = 200
"""So many things are written anew, one after the other, between two looks."""
CHECKED_AT_ONCE = 500
"""Partitions of a new group that are looked at before others have their turn."""
PARKED_COUNT_MAX = 1000
"""So many parked transactions are told at once."""
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
        """`is_keeper`: whether this server owns the group log. `on_fatal` gets a mistake of ours."""
        self.state_log = GroupStateLog()
        self.trouble = NO_LOG
        """Why nothing newer is known than what the ledger says; empty: it is followed."""
        self.damage: GroupStateDamaged | None = None
        """Why the group log cannot be believed, until an operator lets the entry be passed over."""
        self._passed: frozenset[int] = frozenset()
        """Ids of entries that are to be passed over."""
        self._foreign = 0
        """Entries of others that were logged."""
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

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled."""
        tasks = [self._task(self._follow(), "group log"), self._task(self._tend(), "groups")]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._level.cancel()
            self._mending.cancel()
            for group_partition in list(self._active.values()):
                group_partition.end(NotReady("this server is being stopped"))
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
                self._note(NO_LOG if isinstance(error, NoGroupLog) else f"the group log is away: {error.message}")
            await asyncio.sleep(LOOK_SECONDS)

    def _note(self, trouble: str) -> None:
        if self.damage is not None:
            return
        if trouble != self.trouble:
            self._say(trouble or "the group log is followed")
        self.trouble = trouble

    def _read(self, batch: Sequence[Entry]) -> None:
        """What the ledger knows already is passed over."""
        is_new = False
        for id, data in batch:
            if timeline_of(id) != self.state_log.timeline:
                raise OtherTimeline("the group log was ended below what this server has read of it: it is read anew")
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
                "%d entries of the group log, the last of them up to id %d, are none of a server: they are passed over",
                self.state_log.foreign,
                self.state_log.reach,
            )
        self._foreign = self.state_log.foreign

    def _damaged(self, error: GroupStateDamaged) -> None:
        self.damage, self.trouble = error, error.message
        log.error("%s groups give nothing out any more: %s", error.code, error.message)
        for group_partition in list(self._active.values()):
            group_partition.end(error)

    def _look_at_groups(self) -> None:
        """Places of groups that are gone, or are others now, end."""
        for key, group_partition in list(self._active.items()):
            meta, made_at = self.state_log.groups.get(key.name, (None, None))
            if meta is None or made_at != key.made_at:
                group_partition.end(NoSuchGroup(f"the group {key.name} was removed", group=key.name))
            elif meta != group_partition.meta:
                group_partition.end(NotReady(f"the settings of group {key.name} were changed: join again"))

    async def level(self) -> None:
        """Afterwards the ledger holds all that was acknowledged to anybody before this call."""
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
        """An operator ended the group log, and it goes on under another timeline. What was read above the fork is not in
        it, and whoever wrote there has to claim its group again."""
        try:
            await self._begin_at(0, end)
        except WaltzError as error:
            if (floor := error.number("floor")) is None:
                raise
            await self._begin_at(floor, end)
        log.warning("the group log was ended by an operator, and is read anew up to id %d", end)
        for group_partition in list(self._active.values()):
            group_partition.end(NotReady("the group log was ended by an operator, and goes on otherwise: join again"))

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
        """The log was trimmed above what was read: from there on it says all that counts."""
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
        """Read on behind an entry that is damaged, for an operator's word that it is to be passed over; with it, read all
        once more without that entry. Raises the damage where there is no such word."""
        error = self.damage
        if error is None:
            return
        end, passed = await self.group_log.end(), set(self._passed)
        if self.state_log.reach < end:
            async with aclosing(self.group_log.read(self.state_log.position, end)) as batches:
                async for batch in batches:
                    passed.update(id for _, data in batch if (id := passed_over(data)) is not None)
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
        log.warning("entry %s of the group log is passed over: groups go on without it", error.facts["entry"])

    async def pass_over(self, id: int) -> None:
        """What an operator says of an entry that keeps all groups from going on."""
        if self.damage is None:
            with suppress(GroupStateDamaged):
                await self._level.ask()
        if self.damage is None or self.damage.number("entry") != id:
            raise BadArgument(
                f"entry {id} of the group log keeps no group from going on",
                not_done="nothing was changed",
                next_step="`waltzctl group list` says which entry does, where one does",
            )
        if not isinstance(await self._append(pass_over(id), lock_of(PREFIX), await self.group_log.end()), Committed):
            raise GroupLogAway(f"the entry that lets {id} be passed over was refused: another one was written beside it")
        await self._mending.ask()

    # -- groups --------------------------------------------------------------------------------------------------------

    async def make(self, meta: GroupMeta) -> MadeGroup:
        """The group, on the disks of a majority. One with the same settings is left as it is."""
        await self._check(meta)
        for _ in range(ATTEMPTS):
            await self.level()
            known = self.state_log.groups.get(meta.name)
            if known is not None:
                if replace(known[0], starts=()) != replace(meta, starts=()):
                    raise GroupExists(f"there is a group {meta.name} with other settings", group=meta.name)
                return MadeGroup(*known)
            id = await self._written(made(meta), lock_of(meta.name))
            if id is not None:
                return MadeGroup(meta, id, is_new=True)
        raise self._not_written(meta.name)

    async def find(self, name: str) -> MadeGroup:
        if name not in self.state_log.groups:
            await self.level()
        return MadeGroup(*self._group(name))

    async def set(self, meta: GroupMeta, made_at: int) -> MadeGroup:
        """Other settings for a group that goes on."""
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
            if await self._written(made(meta, made_at), lock_of(meta.name)) is not None:
                return MadeGroup(meta, made_at)
        raise self._not_written(meta.name)

    async def remove(self, name: str, made_at: int) -> None:
        for _ in range(ATTEMPTS):
            await self.level()
            self._group(name, made_at)
            if await self._written(gone(name, made_at), lock_of(name)) is not None:
                return
        raise self._not_written(name)

    async def _written(self, data: bytes, lock: Lock) -> int | None:
        """The id of the entry when it is committed and read; None: look again what is so."""
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
                f"the group log took nothing: {error.message}", not_done="nothing was written, and nothing was changed"
            ) from error

    @staticmethod
    def _not_written(name: str) -> GroupLogAway:
        return GroupLogAway(f"the entry about group {name} was refused {ATTEMPTS} times, for no reason that lasts")

    def _group(self, name: str, made_at: int | None = None) -> tuple[GroupMeta, int]:
        if self.damage is not None:
            raise self.damage
        known = self.state_log.groups.get(name)
        if known is None or made_at not in (None, known[1]):
            why = "" if known is None else ", which was made again since"
            raise NoSuchGroup(f"there is no group {name}{why}", group=name)
        return known

    def partitions_of(self, meta: GroupMeta) -> int:
        """At this moment, as bits of one number: a channel may be another one tomorrow."""
        return (1 << self._partitions) - 1 if meta.partitions is None else bits_of(meta.partitions, self._channels())

    async def _check(self, meta: GroupMeta) -> None:
        """What can be known here of what a group asks for."""
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

    # -- places --------------------------------------------------------------------------------------------------------

    async def group_partition(self, name: str, partition: int, generation: int | None) -> GroupPartition:
        """The group at work in a partition of this server; it has claimed it."""
        pipeline = self._find_pipeline(partition, generation)
        if name not in self.state_log.groups:
            await self.level()
        meta, made_at = self._group(name)
        if not self.partitions_of(meta) >> partition & 1:
            raise NotInGroup(
                f"partition {partition} is none of those of group {name}, which are {meta.partitions or 'all'}",
                group=name,
                partition=partition,
            )
        key = Key(name, made_at, partition)
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

    async def change(self, name: str, made_at: int, partition: int, change: Change, ids: Sequence[int]) -> Changed:
        """What an operator does; it is on the disks of a majority when this returns."""
        await self.level()
        self._group(name, made_at)
        group_partition = await self.group_partition(name, partition, None)
        return await group_partition.change(change, ids)

    # -- what others see -----------------------------------------------------------------------------------------------

    def needed_from(self) -> int:
        """The first id of the group log that is needed: whoever reads from there on knows all that counts."""
        own = self._own_pipeline(self._partitions)
        is_old = own is not None and own.session.lineage.current != self.state_log.timeline
        return 0 if self.damage is not None or is_old else self.state_log.floor

    @property
    def active(self) -> Iterator[GroupPartition]:
        return iter(self._active.values())

    def describe(self, name: str | None = None) -> list[GroupDescription]:
        """All groups, or that one, as far as they are known here."""
        if self.damage is not None:
            raise self.damage
        groups = self.state_log.groups if name is None else {name: self._group(name)}
        found: dict[str, dict[int, GroupPartitionStatus]] = {one: {} for one in groups}
        for key, state in self.state_log.states():
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

    def _stopped(self, key: Key, state: GroupState) -> str:
        own = self._own_pipeline(key.partition)
        other = None if own is None else other_timeline(key, state, own.session.lineage)
        return state.stopped if other is None else other.message

    def parked(
        self, name: str, partition: int | None, after: int | None, count: int
    ) -> tuple[list[ParkedTransaction], bool]:
        """What was put aside, by partition and id; and whether there is more."""
        _, made_at = self._group(name)
        count = max(1, min(count, PARKED_COUNT_MAX))
        found: list[ParkedTransaction] = []
        for key, state in sorted(self.state_log.states(), key=lambda item: item[0]):
            if key[:2] == (name, made_at) and partition in (None, key.partition):
                at_work = self._active.get(key)
                state = state if at_work is None else at_work.state or state
                found += (
                    ParkedTransaction(key.partition, id, one.failures, one.member, one.reason)
                    for id, one in sorted(state.parked.items())
                    if after is None or partition is None or id > after
                )
        return found[:count], len(found) > count

    def totals(self) -> GroupTotals | None:
        """All groups in a few numbers, at most a second old; None where there are none that this server knows of."""
        now = asyncio.get_running_loop().time()
        if now >= self._totals_until:
            self._totals, self._totals_until = self._count(), now + LOOK_SECONDS
        return self._totals

    def _count(self) -> GroupTotals | None:
        if self.trouble == NO_LOG and not self.state_log.groups:
            return None
        told = {key: group_partition.describe() for key, group_partition in self._active.items()}
        at_work = {key: one for key, one in told.items() if one is not None}
        return totals_of(self.state_log, at_work, self._committed, self.trouble, self._stopped)

    def _committed(self, partition: int) -> int | None:
        pipeline = self._own_pipeline(partition)
        return None if pipeline is None else pipeline.committed

    # -- what is tended ------------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for group_partition in list(self._active.values()):
                group_partition.tend()
            if self.damage is None and not self.trouble:
                with suppress(WaltzError):
                    await self._shorten()

    async def _shorten(self) -> None:
        """Write anew what keeps the log long: each thing by who owns it."""
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
            if self.state_log.groups.get(key.name, (None, None))[1] != key.made_at:  # an owner wrote after it was gone
                await self._written(gone(key.name, key.made_at), lock_of(key.name))
            return True
        if key.partition == WHOLE_GROUP:
            if not self._owns_group_log():
                return False
            await self._written(made(meta, key.made_at), lock_of(key.name))
            return True
        if self._own_pipeline(key.partition) is None:
            return False
        group_partition = await self.group_partition(key.name, key.partition, None)
        await group_partition.rewrite()
        return True

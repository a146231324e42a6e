"""What is written down of a group in one partition, by its owner: the shell around `Keeper`.

One entry at a time is on its way to the group log. One that was refused, or whose outcome is not known, is looked for in
the log before anything else is written. An error of the log means that nothing was written: the same entry is tried again
for as long as it takes, and the place pauses when too much waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from waltzd.errors import (
    GroupBeyondLog,
    GroupStateDamaged,
    NeedsBatches,
    NoSuchGroup,
    NotReady,
    OtherTimeline,
    WaltzError,
)
from waltzd.protocol.locks import Committed
from waltzd.protocol.positions import Position
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key
from waltzd.server.groups.state_writer import GroupStateWriter, Write
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.subscriptions.group_log import GroupLog

RETRY_SECONDS, RETRY_SECONDS_MAX = 0.1, 5.0
T = TypeVar("T")


class StateLogSource(Protocol):
    """The group log, and what this server has read of it."""

    group_log: GroupLog
    state_log: GroupStateLog
    damage: GroupStateDamaged | None

    async def level(self) -> None:
        """Afterwards the ledger holds all that was acknowledged to anybody before this call."""
        ...


class GroupCheckpointer:
    def __init__(
        self,
        key: Key,
        source: StateLogSource,
        *,
        over: Callable[[WaltzError], None],
        kept: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """`over` hears why the group is ours no more, `kept` how many changes are committed."""
        self.writer: GroupStateWriter
        """From the claim on."""
        self.trouble = ""
        """Why what changed is not written."""
        self._key = key
        self._source = source
        self._over = over
        self._tell_kept = kept
        self._say = say
        self._now = asyncio.get_running_loop().time
        self._must_write = asyncio.Event()
        self._is_urgent = False
        self._wrote = ChangeSignal()
        self._ended: WaltzError | None = None

    # -- the work ------------------------------------------------------------------------------------------------------

    async def claim(self, begin: Callable[[], GroupStateWriter]) -> bool:
        """Begin an epoch of our own; False: it is over. A claim that was not plainly committed is left behind, and the next
        one begins anew."""
        pause = RETRY_SECONDS
        while True:
            try:
                await self._source.level()
                writer = begin()
                write = writer.write(self._now(), self._source.state_log, is_urgent=True)
                assert write is not None
                outcome = await self._source.group_log.append(write.data, write.lock, write.position)
                if isinstance(outcome, Committed):
                    writer.committed(Position(outcome.id, outcome.timeline))
                    self.writer = writer
                    self._note("")
                    return True
            except (NoSuchGroup, NeedsBatches, GroupBeyondLog) as error:
                self._over(error)
                return False
            except WaltzError as error:
                if self._source.damage is not None:
                    self._over(self._source.damage)
                    return False
                self._note(f"the group log does not take the claim: {error.message}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def run(self) -> None:
        """Until the group is ours no more."""
        while True:
            self._must_write.clear()
            is_urgent, self._is_urgent = self._is_urgent, False
            write = self.writer.write(self._now(), self._source.state_log, is_urgent=is_urgent)
            if write is not None:
                await self._write(write)
                if self.writer.is_deposed:
                    self._over(self.deposed())
                    return
            self._has_kept()  # without an entry, too, when what changed has changed back
            if write is None:
                await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout_at(self.writer.wake()):
                await self._must_write.wait()
        except TimeoutError:
            return

    async def _write(self, write: Write) -> None:
        """Until it is committed, or the group is another's."""
        again: Write | None = write
        while again is not None:
            entry = again
            outcome = await self._patiently(
                lambda entry=entry: self._source.group_log.append(entry.data, entry.lock, entry.position),  # type: ignore[misc]
                "the group log takes nothing",
            )
            if isinstance(outcome, Committed):
                self.writer.committed(Position(outcome.id, outcome.timeline))
                break
            self.writer.doubtful()
            await self._patiently(self._source.level, "the group log does not say what stands in it")
            again = self.writer.look(self._source.state_log)
        self._note("")

    async def _patiently(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        pause = RETRY_SECONDS
        while True:
            try:
                return await call()
            except WaltzError as error:
                if self._source.damage is not None:
                    self._over(self._source.damage)
                self._note(f"{what}: {error.message}")
                if isinstance(error, OtherTimeline):  # the group log was ended below what was read: read it anew
                    with suppress(WaltzError):
                        await self._source.level()
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            self._say(trouble)
        self.trouble = trouble

    # -- what its place says -------------------------------------------------------------------------------------------

    def changed(self, count: int = 1, *, is_urgent: bool = False) -> int:
        """The state is another one; the number with which that is kept. `is_urgent`: somebody waits for it."""
        number = self.writer.changed(self._now(), count)
        self._is_urgent |= is_urgent
        self._must_write.set()
        return number

    def write_now(self) -> None:
        """Somebody waits for what has changed."""
        self._is_urgent = True
        self._must_write.set()

    async def rewrite(self) -> None:
        """All of it once more; returns when that is committed."""
        number = self.writer.rewrite(self._now())
        self.write_now()
        await self.kept(number)

    async def reset(self, make: Callable[[GroupState], GroupState]) -> GroupState:
        """Begin elsewhere, in another epoch; `make` is told where it stands. It is not committed yet."""
        while self.writer.is_writing:
            await self._next()
        state = make(self.writer.state)
        self.writer.reset(state, self._now())
        self.write_now()
        return state

    async def kept(self, number: int) -> None:
        """Until this change is on the disks of a majority."""
        while self.writer.kept < number:
            await self._next()

    async def _next(self) -> None:
        """Until an entry is committed."""
        seen = self._wrote.version
        if self._ended is None:
            await self._wrote.wait(seen)
        if self._ended is not None:
            raise self._ended

    def _has_kept(self) -> None:
        self._wrote.notify()
        self._tell_kept(self.writer.kept)

    @property
    def is_level(self) -> bool:
        """All is written."""
        writer = self.writer
        return writer.unwritten == 0 and not writer.is_writing and writer.wake() is None

    @property
    def is_deposed(self) -> bool:
        """The ledger says that another owner has begun an epoch."""
        state_log = self._source.state_log
        state = state_log.state(self._key.name, self._key.partition) if self._key.name in state_log.groups else None
        return state is not None and state.epoch > self.writer.state.epoch

    def deposed(self) -> WaltzError:
        return NotReady(
            f"another server has group {self._key.name} in partition {self._key.partition} by now",
            partition=self._key.partition,
        )

    def end(self, error: WaltzError) -> None:
        self._ended = error
        self._wrote.notify()

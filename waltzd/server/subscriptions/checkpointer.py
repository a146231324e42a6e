"""Writing the state of a group in one partition to the group log: the shell around `GroupStateWriter`.

One entry is in flight at a time. If an entry was rejected or its outcome is unknown, the log is read for it before
anything else is written. An error of the group log means that nothing was written: the same entry is retried without
limit, and the group pauses when too many changes wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from waltzd.errors import NeedsBatches, NoSuchGroup, NotReady, OtherTimeline, WaltzError
from waltzd.errors.operations import GroupStateDamaged
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
    """The group log, and this server's replay of it."""

    group_log: GroupLog
    state_log: GroupStateLog
    damage: GroupStateDamaged | None

    async def level(self) -> None:
        """Replay the group log up to its end at the time of this call."""
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
        """Prepare a checkpointer. `over` is called with the error that ends it, `kept` with the number of durable
        changes."""
        self.writer: GroupStateWriter
        """Set once the group is claimed."""
        self.trouble = ""
        """Why changes are not written; empty while they are."""
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

    # -- writing --------------------------------------------------------------------------------------------------------

    async def claim(self, begin: Callable[[], Awaitable[GroupStateWriter]]) -> bool:
        """Claim the group in a new epoch; return False if that is impossible. A claim without a certain outcome is
        abandoned for one with another epoch."""
        pause = RETRY_SECONDS
        while True:
            try:
                await self._source.level()
                writer = await begin()
                write = writer.write(self._now(), self._source.state_log, is_urgent=True)
                assert write is not None
                outcome = await self._source.group_log.append(write.data, write.lock, write.position)
                if isinstance(outcome, Committed):
                    writer.committed(Position(outcome.id, outcome.timeline))
                    self.writer = writer
                    self._note("")
                    return True
            except (NoSuchGroup, NeedsBatches) as error:
                self._over(error)
                return False
            except WaltzError as error:
                if self._source.damage is not None:
                    self._over(self._source.damage)
                    return False
                self._note(f"the claim was not written to the group log: {error.message}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def run(self) -> None:
        """Write changes until another owner has claimed the group."""
        while True:
            self._must_write.clear()
            is_urgent, self._is_urgent = self._is_urgent, False
            write = self.writer.write(self._now(), self._source.state_log, is_urgent=is_urgent)
            if write is not None:
                await self._write(write)
                if self.writer.is_deposed:
                    self._over(self.deposed())
                    return
            self._wrote.notify()  # also without an entry, if the changes cancelled each other
            self._tell_kept(self.writer.kept)
            if write is None:
                await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout_at(self.writer.wake()):
                await self._must_write.wait()
        except TimeoutError:
            return

    async def _write(self, write: Write) -> None:
        """Append an entry until it is committed or another owner has claimed the group."""
        again: Write | None = write
        while again is not None:
            entry = again
            outcome = await self._patiently(
                lambda entry=entry: self._source.group_log.append(entry.data, entry.lock, entry.position),  # type: ignore[misc]
                "the group log could not be written",
            )
            if isinstance(outcome, Committed):
                self.writer.committed(Position(outcome.id, outcome.timeline))
                break
            self.writer.doubtful()
            await self._patiently(self._source.level, "the group log could not be read")
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
                if isinstance(error, OtherTimeline):  # the group log was ended below what was read: read it again
                    with suppress(WaltzError):
                        await self._source.level()
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            self._say(trouble)
        self.trouble = trouble

    # -- events ------------------------------------------------------------------------------------------------------

    def changed(self, count: int = 1, *, is_urgent: bool = False) -> int:
        """Record changes of the state; return the number of the change that must be durable. `is_urgent` writes it at
        once."""
        number = self.writer.changed(self._now(), count)
        self._is_urgent |= is_urgent
        self._must_write.set()
        return number

    def write_now(self) -> None:
        """Write all changes at once."""
        self._is_urgent = True
        self._must_write.set()

    async def rewrite(self) -> None:
        """Write the whole state; return when it is committed."""
        number = self.writer.rewrite(self._now())
        self.write_now()
        await self.kept(number)

    async def reset(self, make: Callable[[GroupState], GroupState]) -> bool:
        """Replace the state by `make(state)`, which is of a later epoch; return False if that is the state itself. It is
        not committed yet when this returns."""
        while self.writer.is_writing:
            await self._next()
        state = make(self.writer.state)
        is_new = state is not self.writer.state
        if is_new:
            self.writer.reset(state, self._now())
        self.write_now()
        return is_new

    async def kept(self, number: int) -> None:
        """Wait until a change is durable on a majority."""
        while self.writer.kept < number:
            await self._next()

    async def _next(self) -> None:
        """Wait until an entry is committed; raise the error if the checkpointer ended."""
        seen = self._wrote.version
        if self._ended is None:
            await self._wrote.wait(seen)
        if self._ended is not None:
            raise self._ended

    @property
    def is_level(self) -> bool:
        """Return whether all changes are written."""
        writer = self.writer
        return writer.unwritten == 0 and not writer.is_writing and writer.wake() is None

    @property
    def is_deposed(self) -> bool:
        """Return whether another owner has claimed the group, by the replay of the group log."""
        state_log = self._source.state_log
        state = state_log.state(self._key.name, self._key.partition) if self._key.name in state_log.groups else None
        return state is not None and state.epoch > self.writer.state.epoch

    def deposed(self) -> WaltzError:
        return NotReady(
            f"another server has claimed group {self._key.name} in partition {self._key.partition}",
            partition=self._key.partition,
        )

    def end(self, error: WaltzError) -> None:
        self._ended = error
        self._wrote.notify()

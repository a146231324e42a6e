"""Submits: a command builds a transaction, the transaction is sent and, if that may help, built and sent again.

The caller of `submit` may be cancelled at any moment. A transaction that was sent by then is decided nevertheless, and the
functions of the command are called as if the caller had stayed.

A `LockQueue` orders the commands of one client that declare the same write lock in one partition.

Two such commands that are under way together always conflict: the view must contain the first before the second is built,
or the log rejects the second. So each command waits for those before it, and is built once instead of once for each of
them. A queue only saves attempts; that no conflict is committed is the work of the log alone.

A command waits only for commands that joined before it, with all its locks at once. So no two commands wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from waltzd.client.follower import Call, notify
from waltzd.client.keys import Keys, hashes_of
from waltzd.client.partition import PartitionClient
from waltzd.client.pending import atomic_request, request
from waltzd.client.routes import pause_seconds
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Builder, Command, Serializer, builder_of, checked_position, is_overridden
from waltzd.errors import BadArgument, BeyondLog, CannotConnect, NotApplied, NotSent, WaltzError
from waltzd.protocol.locks import (
    AppendOutcome,
    Committed,
    Declined,
    Lock,
    Mode,
    Outcome,
    Reason,
    Rejected,
    Token,
    Unknown,
)
from waltzd.protocol.positions import Position, timeline_of
from waltzd.protocol.quorum import EMPTY

PRUNE_AT = 64
"""Smallest number of entries at which entries that are over are dropped."""
Turn = asyncio.Future[Position]
"""End of a command: the position that a view must have for the next one, -1 if nothing was committed."""


class LockQueue:
    """Commands of one partition, by the locks that they declared to write."""

    def __init__(self) -> None:
        self._last: dict[int, Turn] = {}
        """Turn of the last command that declared to write a lock."""
        self._prune_at = PRUNE_AT

    def join(self, locks: Sequence[Lock], position: Position) -> tuple[Turn, list[Turn]]:
        """Join the queues of all locks at once; return the turn of this command, which must be ended by `set_result`, and
        the turns to wait for. `position` is that of the view."""
        turn: Turn = asyncio.get_running_loop().create_future()
        before = {self._last[lock.hash]: None for lock in locks if lock.mode is not Mode.APPEND and lock.hash in self._last}
        for lock in locks:
            if lock.mode is Mode.WRITE:
                self._last[lock.hash] = turn
        if len(self._last) > self._prune_at:
            self._last = {lock: one for lock, one in self._last.items() if not _is_over(one, position)}
            self._prune_at = max(PRUNE_AT, 2 * len(self._last))
        return turn, [one for one in before if not _is_over(one, position)]


def leave(turn: Turn, before: Sequence[Turn]) -> None:
    """End the turn of a command that gave up while it waited: the commands after it still wait for those `before`."""
    if (left := next((one for one in before if not one.done()), None)) is not None:
        left.add_done_callback(lambda _: leave(turn, before))
    else:
        turn.set_result(max(one.result() for one in before))


def _is_over(turn: Turn, position: Position) -> bool:
    """Return whether the command has ended, and the view contains what it wrote."""
    if not turn.done():
        return False
    needed = turn.result()
    return needed.timeline != position.timeline or needed <= position


Wait: TypeAlias = Literal["committed", "applied"]


@dataclass(frozen=True)
class IdempotencyKey:
    """Idempotency key of a submit."""

    keys: Callable[[], Keys]
    """Function that returns the keys of the partition in its current timeline."""
    locks: Sequence[Lock]

    async def find(self, through: int, timeout: float | None) -> int | None:
        return await self.keys().find(hashes_of(self.locks), through, timeout)


class Submits:
    """All submits of one client."""

    def __init__(self, settings: ClientSettings, serializer: Serializer[Any] | None, partitions: Callable[[], int]) -> None:
        """Create the submits of a client; `partitions` returns the number of partitions of the cluster."""
        self._settings = settings
        self._partitions = partitions
        self._serializer = serializer
        self.under_way: dict[asyncio.Future[None], None] = {}
        """Submits and appends with a key that have no outcome, also between two attempts; `flush` waits for them."""
        self._queues: dict[int, LockQueue] = {}
        self._notifying: dict[asyncio.Task[None], None] = {}
        self._count = 0

    async def submit(
        self,
        client: PartitionClient,
        commands: Sequence[Command[Any]],
        call: Call,
        *,
        later: Call,
        is_atomic: bool,
        fresh: bool | None,
        wait: Wait,
        timeout: float | None,
        once: IdempotencyKey | None = None,
    ) -> Outcome:
        """Submit commands. `later` calls the functions of commands whose caller was cancelled."""
        if wait not in ("committed", "applied"):
            raise BadArgument(f'`wait` must be "committed" or "applied", not {wait!r}')
        if fresh or wait == "applied":
            client.check_view()
        clock = asyncio.get_running_loop().time
        deadline = deadline_of(timeout)
        self._count += 1
        with self.counted():
            is_fresh = fresh or (fresh is None and client.is_cold)
            if is_fresh:
                await self._catch_up(client, deadline)
            attempt = partial(self._attempt, client, commands, call, later, is_atomic, deadline, once)
            must_confirm = fresh is None and not is_fresh and client.may_wait_for_view
            decide = partial(self._confirmed, client, attempt, must_confirm, deadline)
            outcome = await self._in_turn(client, commands, deadline, decide)
            if once is not None:
                outcome = await self._looked_up(client, once, outcome, len(commands), deadline)
        await self._notify(client, list(enumerate(commands)), call, later, outcome)
        if wait == "applied" and isinstance(outcome, Committed):
            seconds = self._settings.submit_seconds if deadline is None else max(0.0, deadline - clock())
            try:
                await client.wait_applied(Position(outcome.ids[-1], outcome.timeline), seconds)
            except WaltzError:  # the transaction is committed; `is_applied` of the outcome is False
                return outcome
            return replace(outcome, is_applied=True)
        return outcome

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call as under way for as long as the context lasts."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.under_way[done] = None
        try:
            yield
        finally:
            del self.under_way[done]
            done.set_result(None)

    async def _in_turn(
        self,
        client: PartitionClient,
        commands: Sequence[Command[Any]],
        deadline: float | None,
        decide: Callable[[], Awaitable[Outcome]],
    ) -> Outcome:
        """Call `decide` when the view contains the earlier commands of this client that declared to write a lock of these
        commands."""
        locks = [lock for command in commands for lock in command.locks]
        if not locks or not client.may_wait_for_view:
            return await decide()
        turn, before = self._queues.setdefault(client.partition, LockQueue()).join(locks, client.position)
        try:
            if before:
                await self._wait_for(client, before, deadline)
        except BaseException:
            leave(turn, before)
            raise
        end = Position(EMPTY)
        try:
            outcome = await decide()
            if isinstance(outcome, Committed):
                end = Position(outcome.ids[-1], outcome.timeline)
            return outcome
        finally:
            turn.set_result(end)

    async def _wait_for(self, client: PartitionClient, turns: Sequence[Turn], deadline: float | None) -> None:
        left = self._left(deadline)
        _, pending = await asyncio.wait(turns, timeout=self._settings.submit_seconds if left is None else max(0.0, left))
        if pending:
            raise NotSent(
                f"partition {client.partition} did not decide earlier commands of this client with the same lock in time",
                partition=client.partition,
            )
        epoch = await client.ready_epoch(deadline)
        ends = [turn.result() for turn in turns]
        needed = max([end for end in ends if end.timeline == client.mount.timeline], default=EMPTY)
        with suppress(TimeoutError):  # a view that is slow: then the lock decides
            await client.seen(needed, epoch, deadline)

    async def _confirmed(
        self,
        client: PartitionClient,
        attempt: Callable[[], Awaitable[Outcome]],
        must_confirm: bool,
        deadline: float | None,
    ) -> Outcome:
        """Return the outcome of `attempt`. If it declined on a view that may be behind (`must_confirm`), catch up and try
        again."""
        outcome = await attempt()
        if must_confirm and isinstance(outcome, Declined):
            await self._catch_up(client, deadline)
            if _token(client, client.position) != outcome.token:
                return await attempt()
        return outcome

    async def _catch_up(self, client: PartitionClient, deadline: float | None) -> None:
        """Wait until the view has applied everything that is committed now."""
        left = self._left(deadline)
        try:
            await client.wait_caught_up(self._settings.submit_seconds if left is None else max(0.0, left))
        except (CannotConnect, NotApplied) as error:
            why = f"the view of partition {client.partition} did not become fresh in time: {error.message}"
            raise NotSent(why, partition=client.partition) from None

    async def _attempt(
        self,
        client: PartitionClient,
        commands: Sequence[Command[Any]],
        call: Call,
        later: Call,
        is_atomic: bool,
        deadline: float | None,
        once: IdempotencyKey | None,
    ) -> Outcome:
        """Build and send until there is an outcome that another attempt cannot change, or the limits are reached."""
        clock = asyncio.get_running_loop().time
        number, attempt = self._count, 0
        while True:
            attempt += 1
            epoch = await client.ready_epoch(deadline)
            if once is not None and (id_ := await once.find(client.position, self._left(deadline))) is not None:
                return once.keys().committed(id_, len(commands))
            outcome = await self._build_and_send(client, commands, call, later, is_atomic, deadline, once)
            if not isinstance(outcome, Rejected):
                return outcome
            if outcome.reason is not Reason.NOT_IN_LOG:
                for command in commands:
                    await notify(client.partition, call, command.on_lock_failure, outcome)
                if not client.may_wait_for_view:
                    return outcome
            if attempt >= self._settings.attempts_max or (deadline is not None and clock() >= deadline):
                return outcome
            if outcome.reason is not Reason.NOT_IN_LOG:
                try:
                    await client.seen(outcome.conflict_id, epoch, deadline)
                except TimeoutError:
                    return outcome
            client.again()
            if attempt > 1:
                await asyncio.sleep(pause_seconds(attempt - 2, client.mount.client or 0, client.partition, number))

    async def _build_and_send(
        self,
        client: PartitionClient,
        commands: Sequence[Command[Any]],
        call: Call,
        later: Call,
        is_atomic: bool,
        deadline: float | None,
        once: IdempotencyKey | None,
    ) -> Outcome:
        await client.enter(len(commands), deadline)
        try:
            positions: list[int] = []
            builders: list[Builder[Any]] = []
            for command in commands:
                # During the build an operator may end the log, and the partition be activated again.
                builder = builder_of(command, client.position, self._serializer, self._partitions())
                if not _wants(command, await call(command.build, builder)):
                    token = _token(client, builder.position) if client.has_view else None
                    return Declined(builder._reason, token, client.partition)
                positions.append(mark_of(client, builder.position if client.has_view else None, builder.locks))
                builders.append(builder)
            if (highest := max(positions)) > client.mount.known:
                client.check_timeline(highest)
                await client.prove(highest, deadline)
            if once is not None:
                builders[0]._hold(once.locks)
                if (id_ := await once.find(highest, self._left(deadline))) is not None:
                    return once.keys().committed(id_, len(commands))
            one = builders[0]
            single = request(positions[0], one.payload, one.kind, one.locks)
            make = atomic_request(positions, builders) if is_atomic else single
            told = partial(self._notify_later, client, commands, later)
            for position in positions:
                client.check_timeline(position)
            waiter: asyncio.Future[AppendOutcome] = client.add(make, highest, told, deadline)
        finally:
            client.leave(len(commands))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._notify_later(client, commands, later, waiter.result())
            raise

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else deadline - asyncio.get_running_loop().time()

    async def _looked_up(
        self, client: PartitionClient, once: IdempotencyKey, outcome: Outcome, count: int, deadline: float | None
    ) -> Outcome:
        """Look up the key of a rejected or declined request: it may have been appended before, above the position of
        the view."""
        try:
            if isinstance(outcome, Rejected) and outcome.reason is not Reason.NOT_IN_LOG:
                id_ = await once.keys().explain(hashes_of(once.locks), outcome, self._left(deadline))
            elif isinstance(outcome, Declined):
                id_ = await once.find(await client.confirmed_end(self._left(deadline)), self._left(deadline))
            else:
                return outcome
        except (BeyondLog, CannotConnect):
            return Unknown(client.partition)
        return outcome if id_ is None else once.keys().committed(id_, count)

    # -- functions of commands

    async def _notify(
        self,
        client: PartitionClient,
        commands: Sequence[tuple[int, Command[Any]]],
        call: Call,
        later: Call,
        outcome: Outcome,
    ) -> None:
        """Call `on_outcome` of the commands, and register `on_applied`. Each command comes with its place in the atomic
        request."""
        rest = deque(commands)
        try:
            while rest:
                number, command = rest.popleft()
                try:
                    if is_overridden(command, "on_outcome"):
                        await notify(client.partition, call, command.on_outcome, outcome)
                finally:
                    if isinstance(outcome, Committed) and is_overridden(command, "on_applied"):
                        client.announce(outcome.id + number, command.on_applied)
        finally:
            if rest:  # the caller was cancelled
                self._in_background(self._notify(client, list(rest), later, later, outcome))

    def _notify_later(
        self, client: PartitionClient, commands: Sequence[Command[Any]], later: Call, outcome: Outcome
    ) -> None:
        """Call the functions of the commands in the background, because their caller was cancelled."""
        self._in_background(self._notify(client, list(enumerate(commands)), later, later, outcome))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="waltz telling")
        self._notifying[task] = None
        task.add_done_callback(self._notifying.pop)

    async def close(self) -> None:
        """Wait up to `close_seconds` for functions of commands that run in the background; then cancel them."""
        if self._notifying:
            await asyncio.wait(self._notifying, timeout=self._settings.close_seconds)
        for task in list(self._notifying):
            task.cancel()
        await asyncio.gather(*self._notifying, return_exceptions=True)


def deadline_of(timeout: float | None) -> float | None:
    """Return the deadline of a timeout on the clock of the event loop; None if there is no timeout."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise BadArgument(f"timeout must be a number of seconds above 0, not {timeout!r}")
    return asyncio.get_running_loop().time() + timeout


def _wants(command: Command[Any], answer: object) -> bool:
    """Return the result of `build`. Refuse None: a `build` that forgot to return has not declined."""
    if answer is None or not hasattr(answer, "__bool__"):
        raise BadArgument(
            f"`build` of {type(command).__name__} returned {answer!r}: it must return True to send the transaction, "
            "or False if there is nothing to do",
            next_step="end `build` with `return True`",
        )
    return bool(answer)


def _token(client: PartitionClient, position: int) -> Token | None:
    return None if position == EMPTY else Token(client.partition, int(position), timeline_of(position))


def own_position(client: PartitionClient, position: int | None, locks: Sequence[Lock]) -> int | None:
    """Return the position for the locks of the application; None if it gave no checked lock."""
    if position is None and all(lock.mode is Mode.APPEND for lock in locks):
        return None
    return mark_of(client, position, locks)


def mark_of(client: PartitionClient, position: int | None, locks: Sequence[Lock]) -> int:
    """Return the position that was given, or that of the view."""
    if position is None:
        if not client.has_view and any(lock.mode is not Mode.APPEND for lock in locks):
            raise BadArgument("a READ or WRITE lock needs a position to be compared with; use a view, or give `position`")
        return client.position
    checked = checked_position(position)
    return checked if isinstance(position, Position) else int(checked)

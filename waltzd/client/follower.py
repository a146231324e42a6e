"""Feed of one partition to the application's view: one call at a time, each id in order.

The credit of the mount bounds what waits here. A feed may be cut inside an atomic request; the beginning of the request
is held until the rest has come, so `applied` is never inside one. A transaction that cannot be applied blocks those
behind it, on purpose: it is tried again with growing pauses, or the application stops the partition (`Decision.STOP`).
A lasting failure is logged with its traceback once, then counted at growing intervals; `failing` shows it meanwhile.
Foreign transactions are skipped: `applied` passes them, and the view's position need not."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias
from uuid import UUID

from waltzd.client.view import Decision, Transaction, View, end_of_part
from waltzd.errors import BadArgument, ViewBehind, ViewStopped
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""Function that calls code of the application: on the event loop, or on a thread."""
Load: TypeAlias = Callable[[], list[Transaction]]

PAUSE_MIN, PAUSE_MAX = 0.1, 10.0
PRUNE_AT = 64
"""Smallest number of tasks that wait for an id at which those that gave up are dropped."""
TURN = 64
"""Transactions that are applied before other tasks of the event loop get a turn."""
_log = logging.getLogger("waltz.client")


_INSIDE: ContextVar[tuple[Follower, int] | None] = ContextVar("waltz call of a view", default=None)
"""Call of the application in which this code runs: its follower, and the number of the call."""


@dataclass(frozen=True)
class ViewFailure:
    """Failure of a view that repeats."""

    id: int
    error: Exception
    """Error of the last try."""
    since: datetime
    tries: int


class _Stopped(Exception):
    """`stop` was called."""


async def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


def is_in_view() -> bool:
    """Return whether a view of any partition waits for the running code."""
    inside = _INSIDE.get()
    return inside is not None and inside[0].is_called_from_here


def shielded(call: Call) -> Call:
    """Return `call` for a task that must outlive the tasks of the application: a cancelled task of the application is a
    failure like any other, and does not cancel the caller."""

    async def shielded_call(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await call(function, *arguments)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("a task that the application's code waited for was cancelled") from error

    return shielded_call


async def ask_position(view: View, call: Call, partition: int) -> int:
    position = await call(view.position, partition)
    if not isinstance(position, int) or position < EMPTY:
        raise BadArgument(
            f"the view returned the position {position!r} of partition {partition}; a position is an integer from -1 on"
        )
    return position


async def call_opened(view: Any, call: Call, cluster: UUID) -> None:
    """Report the cluster key to a view that has a method for it: the state of the view may come from another cluster."""
    opened = getattr(view, "opened", None)
    if callable(opened):
        await call(opened, cluster)


async def notify(partition: int, call: Call, listener: Callable[[Any], object], outcome: object) -> None:
    """Call a function of a command. Log what it raises; that changes nothing about the transaction."""
    try:
        await call(listener, outcome)
    except Exception:  # noqa: BLE001  # the application's code
        _log.exception("%s of a transaction of partition %d failed", listener.__name__, partition)


class Follower:
    def __init__(self, partition: int, view: View, *, call: Call, batch_max: int, consumed: Callable[[int], None]) -> None:
        """Create a follower; `consumed` is called with the size given to `put` when that content is applied, and with 0
        when an announcement is made."""
        self.applied = EMPTY
        self.failing: ViewFailure | None = None
        self._calls = 0
        self._is_calling = False
        self._handed = EMPTY
        """Highest id that the view has taken; foreign transactions may follow it."""
        self._partition = partition
        self._view = view
        self._call_shielded = shielded(call)
        self._batch_max = batch_max
        self._consumed = consumed
        self._apply_batch: Callable[[Sequence[Transaction]], Any] | None = getattr(view, "apply_batch", None)
        self._takes_foreign = bool(getattr(view, "takes_foreign", False))
        self._inbox: deque[tuple[int, Load, bool]] = deque()
        self._held: list[Transaction] = []
        """Beginning of an atomic request whose rest has not come."""
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._count = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._prune_at = PRUNE_AT
        self._announcements: list[tuple[int, int, Callable[[int], Any]]] = []

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._calls += 1
        self._is_calling = True
        _INSIDE.set((self, self._calls))
        try:
            return await self._call_shielded(function, *arguments)
        finally:
            self._is_calling = False

    @property
    def is_called_from_here(self) -> bool:
        """Return whether this follower waits for the running code; then that code must not wait for the follower."""
        inside = _INSIDE.get()
        return self._is_calling and inside is not None and inside[0] is self and inside[1] == self._calls

    # -- from the feed

    def put(self, size: int, load: Load, goes_on: bool) -> None:
        """Add content to the feed; `goes_on` if the atomic request of the last transaction continues in the next
        content."""
        self._inbox.append((size, load, goes_on))
        self._wake.set()

    def stop(self) -> None:
        """Finish the running call of the application, and start no other one."""
        self._stopping.set()
        self._wake.set()

    # -- waiting for an id

    async def reached(self, id: int) -> None:
        """Wait until the transaction with this id is applied."""
        if id > self.applied:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._count += 1
            heapq.heappush(self._waiting, (id, self._count, future))
            if len(self._waiting) > self._prune_at:
                self._waiting = [one for one in self._waiting if not one[2].done()]
                heapq.heapify(self._waiting)
                self._prune_at = max(PRUNE_AT, 2 * len(self._waiting))
            await future

    def release(self) -> None:
        """End every `reached`: after a fail-over the id may never come."""
        waiting, self._waiting = self._waiting, []
        for _, _, future in waiting:
            if not future.done():
                future.set_result(None)

    def announce(self, id: int, listener: Callable[[int], Any]) -> None:
        """Call `listener` when this id is applied."""
        self._count += 1
        heapq.heappush(self._announcements, (id, self._count, listener))
        self._wake.set()

    def inherit(self, older: Follower) -> None:
        """Take over the announcements of an older follower: the view may have their ids by now."""
        self._announcements, older._announcements = older._announcements, []

    def forget_above(self, id: int) -> None:
        """Drop announcements above this id, where the log forked: another transaction has such an id now."""
        gone = [one for one in self._announcements if one[0] > id]
        if gone:
            self._announcements = [one for one in self._announcements if one[0] <= id]
            heapq.heapify(self._announcements)
            _log.warning(
                "partition %d: %d transactions above id %d were committed, and an operator has ended the log there: their "
                "commands are not told that they were applied",
                *(self._partition, len(gone), id),
            )

    def has_left(self, position: int) -> bool:
        """Return whether the view is still where this follower left it."""
        return position in (self.applied, self._handed)

    @property
    def announcements(self) -> int:
        return len(self._announcements)

    # -- applying

    async def run(self, position: int) -> None:
        """Apply the feed until `stop`. Raise `ViewStopped` when the application gives up."""
        self.applied = self._handed = position
        try:
            while True:
                await self._make_announcements()
                self._check()
                if self._inbox:
                    size, transactions = self._next()
                    await self._hand_on(transactions)
                    # also for transactions that are held back, or the rest of their atomic append would lack credit
                    self._consumed(size)
                    await asyncio.sleep(0)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except _Stopped:
            return

    def _check(self) -> None:
        if self._stopping.is_set():
            raise _Stopped

    def _next(self) -> tuple[int, list[Transaction]]:
        """Return what may be applied next, with its size. For a view that takes several transactions at once, join
        small pieces that came while it was busy."""
        size, load, goes_on = self._inbox.popleft()
        found = load()
        while self._apply_batch is not None and self._inbox and len(found) < self._batch_max:
            more, load, goes_on = self._inbox.popleft()
            size, found = size + more, found + load()
        return size, self._whole(found, goes_on)

    async def _hand_on(self, transactions: list[Transaction]) -> None:
        wanted = transactions
        if not self._takes_foreign:
            wanted = [transaction for transaction in transactions if not transaction.is_foreign]
        await self._apply(wanted)
        if len(wanted) < len(transactions):
            await self._reached(transactions[-1].id)

    def _whole(self, transactions: list[Transaction], goes_on: bool) -> list[Transaction]:
        """Return the transactions that may be applied; hold the beginning of an atomic request."""
        found, self._held = self._held + transactions, []
        if goes_on:
            start = next((at for at in range(len(found) - 1, 0, -1) if not found[at].follows), 0)
            found, self._held = found[:start], found[start:]
        return found

    async def _apply(self, transactions: list[Transaction]) -> None:
        if self._apply_batch is None:
            await self._apply_each(transactions)
            return
        start = 0
        while start < len(transactions):
            self._check()
            stop = end_of_part(transactions, start, self._batch_max)
            part = transactions[start:stop]
            try:
                await self._call(self._apply_batch, part)
            except Exception as error:  # noqa: BLE001  # the application's code
                _log.warning("%s could not be applied together: %r; applying them one by one", _names(part), error)
                position = await self._persist(part[0], self._ask_position, part[0])
                await self._apply_each([transaction for transaction in part if transaction.id > position])
            await self._took(part[-1].id)
            start = stop

    async def _apply_each(self, transactions: list[Transaction]) -> None:
        start = 0
        while start < len(transactions):
            stop = end_of_part(transactions, start, 1)
            group = transactions[start:stop]
            if len(group) > 1 and self._apply_batch is not None:
                self._check()
                await self._persist(group[0], self._apply_group, group)
            else:
                for number, transaction in enumerate(group, start + 1):
                    self._check()
                    await self._persist(transaction, self._view.apply, transaction)
                    if number % TURN == 0:
                        await asyncio.sleep(0)
            await self._took(group[-1].id)
            start = stop

    async def _apply_group(self, group: list[Transaction]) -> None:
        """Apply the rest of an atomic request that the view has not taken, in one call."""
        assert self._apply_batch is not None
        position = await self._ask_position(group[0])
        rest = [transaction for transaction in group if transaction.id > position]
        if rest:
            await self._call(self._apply_batch, rest)

    async def _ask_position(self, first: Transaction) -> int:
        """Return the id up to which the view has what begins with `first`. A position on another timeline, to which
        another process took the view, does not tell: then the view gets everything, and refuses it."""
        position = await ask_position(self._view, self._call, self._partition)
        if position < self._handed:
            raise ViewBehind(
                f"the view's position of partition {self._partition} went back from {self._handed} to {position}",
                partition=self._partition,
                position=int(position),
            )
        lineage = first.lineage
        if isinstance(position, Position) and lineage is not None and not lineage.covers(position.timeline, position):
            return self._handed
        return position

    async def _took(self, id: int) -> None:
        self._handed = id
        await self._reached(id)

    async def _reached(self, id: int) -> None:
        assert id >= self.applied
        self.applied = id
        while self._waiting and self._waiting[0][0] <= id:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
        await self._make_announcements()

    async def _make_announcements(self) -> None:
        while self._announcements and self._announcements[0][0] <= self.applied:
            id_, _, listener = heapq.heappop(self._announcements)
            self._consumed(0)  # a transaction that waits for a place may have this one
            try:
                await self._call(listener, id_)
            except Exception:  # noqa: BLE001  # the application's code
                _log.exception("on_applied of transaction %d of partition %d failed", id_, self._partition)

    # -- failures

    async def _persist(self, transaction: Transaction, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function until it succeeds, or the application decides that it never will."""
        pause = PAUSE_MIN
        while True:
            try:
                found = await self._call(function, *arguments)
                self._works(transaction)
                return found
            except Exception as error:
                self._fails(transaction, error)
                if await self._decide(transaction, error) is Decision.STOP:
                    raise ViewStopped(
                        f"{_names([transaction])} could not be applied: {error!r}",
                        partition=self._partition,
                        id=transaction.id,
                    ) from error
            await self._pause(pause)
            pause = min(2 * pause, PAUSE_MAX)

    def _fails(self, transaction: Transaction, error: Exception) -> None:
        """Log a failure if it is another error than before, or the number of tries has doubled."""
        before = self.failing
        if before is None or before.id != transaction.id:
            before = ViewFailure(transaction.id, error, datetime.now(UTC), 0)
        tries = before.tries + 1
        self.failing = ViewFailure(transaction.id, error, before.since, tries)
        if tries == 1 or type(error) is not type(before.error):
            _log.warning("%s could not be applied; retrying", _names([transaction]), exc_info=error)
        elif tries.bit_count() == 1:
            since = f"{before.since:%Y-%m-%d %H:%M:%S} UTC"
            _log.warning("%s could not be applied %d times since %s: %r", _names([transaction]), tries, since, error)

    def _works(self, transaction: Transaction) -> None:
        if self.failing is not None:
            _log.warning("the view has taken %s after %d failures", _names([transaction]), self.failing.tries)
            self.failing = None

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
        raise _Stopped

    async def _decide(self, transaction: Transaction, error: Exception) -> Decision:
        failed = getattr(self._view, "failed", None)
        if failed is None:
            return Decision.RETRY
        try:
            decision: object = await self._call(failed, transaction, error)
        except Exception:  # noqa: BLE001  # the application's code
            _log.exception("`failed` of the view raised for %s", _names([transaction]))
            return Decision.STOP
        if not isinstance(decision, Decision):
            _log.error("`failed` of the view returned %r for %s, not a Decision", decision, _names([transaction]))
            return Decision.STOP
        return decision


def _names(transactions: Sequence[Transaction]) -> str:
    first, last = transactions[0], transactions[-1]
    if first is last:
        return f"transaction {first.id} of partition {first.partition}"
    return f"transactions {first.id} to {last.id} of partition {first.partition}"

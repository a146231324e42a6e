"""Feed of one partition to the application's view: one call at a time, each id in order.

The credit of the mount bounds what waits here. A feed may be cut inside an atomic request; the beginning of the request
is held until the rest has come, so `applied` is never inside one. A transaction that cannot be applied blocks those
behind it, on purpose: it is tried again with growing pauses, or the application stops the partition (`Decision.STOP`).
A lasting failure is logged with its traceback once, then counted at growing intervals; `failing` shows it meanwhile.
Foreign transactions are skipped: `applied` passes them, and the view's position need not.

A `PositionFile` keeps the positions of a follower, for programs whose view is no database, but an index, a cache or a
mailer.

The file is written as a whole beside the old one, flushed, and renamed: after a crash there is the old file or the new
one. It names its cluster and ends with a checksum, so a file of another cluster and a damaged file are refused.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias
from uuid import UUID
from zlib import crc32

from waltzd.client.view import Decision, Transaction, View, checked_position, end_of_part
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, join, read_whole
from waltzd.errors import BadArgument, ForeignCluster, PositionsDamaged, ViewStopped
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""Function that calls code of the application: on the event loop, or on a thread."""
Load: TypeAlias = Callable[[], list[Transaction]]

PAUSE_MIN, PAUSE_MAX = 0.1, 10.0
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
        """Create a follower; `consumed` is called with the size given to `put` when that content is applied."""
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
                position = await self._persist(part[0], self._ask_position)
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
        position = await self._ask_position()
        rest = [transaction for transaction in group if transaction.id > position]
        if rest:
            await self._call(self._apply_batch, rest)

    async def _ask_position(self) -> int:
        position = await ask_position(self._view, self._call, self._partition)
        if position < self._handed:
            raise BadArgument(
                f"the view's position of partition {self._partition} went back from {self._handed} to {position}"
            )
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


VERSION = 1
FILE_BYTES_MAX = 16 << 20
NEW_SUFFIX = ".new"


class PositionFile:
    """A file with the position of a follower in each partition, which survives crashes of program and machine.

    The program does its work first and saves the position then. So after a crash some transactions may come again, and
    none is left out: the work must be idempotent. One program writes a file.

    Example:
        ```python
        async with Client(servers) as client:
            file = PositionFile("index.position", client.cluster_key)
            async for transaction in client.feed(0, after=file.position(0)):
                await index.add(transaction.id, transaction.payload)
                file.save(0, transaction.position)
        ```
    """

    def __init__(self, path: str | os.PathLike[str], cluster: UUID) -> None:
        """Read the file. If it is missing there are no positions yet, and `save` creates it.

        Args:
            path: Path of the file. Its directory must exist.
            cluster: `client.cluster_key`.

        Raises:
            ForeignCluster: The positions in the file are those of another cluster.
            PositionsDamaged: The file is not what was written.
            WaltzError: The file cannot be read, or its directory is missing.
        """
        self._disk: Disk = RealDisk()
        self._open(os.path.abspath(path), cluster)

    def _open(self, path: str, cluster: UUID) -> None:
        self._path, self._cluster = path, cluster
        self._directory, _, self._name = path.rpartition("/")
        self._disk.names(self._directory)  # report a missing directory now, not at the first transaction
        self._positions = self._read() if self._disk.exists(path) else {}

    @classmethod
    def _on(cls, disk: Disk, path: str, cluster: UUID) -> PositionFile:
        """Return a position file on another disk, such as a simulated one."""
        file = cls.__new__(cls)
        file._disk = disk
        file._open(path, cluster)
        return file

    def position(self, partition: int) -> Position:
        """Return the position that was saved last for a partition; -1 if there is none."""
        return self._positions.get(partition, Position(EMPTY))

    @property
    def positions(self) -> Mapping[int, Position]:
        """All saved positions, by partition."""
        return dict(self._positions)

    def save(self, partition: int, position: int) -> None:
        """Save the position of a partition. When it returns, no crash takes the position back.

        It costs a flush of the disk: if many transactions come, save once for a batch (`Client.feed_batches`).

        Args:
            partition: Partition of the position.
            position: `transaction.position` of the last transaction that is done. A plain integer is a position of the
                first timeline of the log, so after a rescue or a restore it is refused above the fork.

        Raises:
            BadArgument: It is below the saved position. To start again, remove the file, or call `reset`.
            WaltzError: The file was not written; the old one is still there.
        """
        found = checked_position(position)
        if partition < 0 or found < self.position(partition):
            raise BadArgument(
                f"the position {found} of partition {partition} is below {self.position(partition)}, which {self._path} "
                "keeps",
                next_step="to begin again, end the program and remove the file, or call `reset`",
            )
        self._write({**self._positions, partition: found})

    def reset(self, partition: int, position: int) -> None:
        """Set a position back, after a rescue or a restore to the fork that `OtherTimeline` names. Undo the work above
        it first.

        Args:
            partition: Partition of the position.
            position: New position; the transactions after it are done again.

        Raises:
            BadArgument: `position` is no position.
            WaltzError: See `save`.
        """
        self._write({**self._positions, partition: checked_position(position)})

    def _write(self, positions: dict[int, Position]) -> None:
        with closing(self._disk.create(self._path + NEW_SUFFIX)) as file:
            file.write(0, _content(self._cluster, positions))
            file.flush()
        self._disk.rename(self._path + NEW_SUFFIX, join(self._directory, self._name))
        self._disk.flush_directory(self._directory)
        self._positions = positions

    def _read(self) -> dict[int, Position]:
        raw = read_whole(self._disk, self._path, FILE_BYTES_MAX)
        try:
            found = json.loads(raw)
            cluster = UUID(found["cluster"])
            positions = {int(partition): _position_of(kept) for partition, kept in found["positions"].items()}
            is_whole = raw == _content(cluster, positions)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BadArgument):
            is_whole = False
        if not is_whole:
            raise PositionsDamaged(f"{self._path} is damaged: its checksum does not match its content", path=self._path)
        if cluster != self._cluster:
            raise ForeignCluster(
                f"{self._path} keeps positions in the cluster {cluster}, and the client is one of {self._cluster}",
                not_done="nothing was fed",
                next_step="give the client servers of that cluster, or this follower another file and an empty index",
            )
        return positions


def _position_of(kept: object) -> Position:
    """Return a position of the file. A number is a position of the first timeline; files have only numbers until an
    operator ends the log."""
    return Position.parse(kept) if isinstance(kept, str) else checked_position(kept)  # type: ignore[arg-type]


def _content(cluster: UUID, positions: Mapping[int, Position]) -> bytes:
    rows = {str(at): positions[at] for at in sorted(positions)}
    told = {at: int(one) if one.timeline == FIRST else one.text for at, one in rows.items()}
    body = json.dumps({"version": VERSION, "cluster": str(cluster), "positions": told})
    return f'{body[:-1]}, "crc": "{crc32(body.encode()):08x}"}}\n'.encode()

"""Flow control: bounds on what is in flight, and sending without timers. A `Budget` is a bound in bytes; a taker that
would exceed it waits for its turn.

It provides back pressure: a receiver takes from the budget before it keeps anything, and receives nothing while it
waits. A size larger than the whole budget passes once nothing else is in flight, so no taker waits for ever. A budget
may be part of another one: it takes at most its own size and leaves the rest to other parts.

A `CoalescingSender` sends with few wake-ups: a message leaves where it becomes known, if nothing waits in front of it.

One task runs `run`: it sends what is ready, and sleeps while nothing is. While it sleeps, `send_now` sends from the caller,
as long as the link takes messages without waiting. Otherwise `send_now` wakes the task, and what becomes ready while one
message leaves gathers for the next message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Generic, Protocol, TypeVar


class Budget:
    def __init__(
        self,
        most: int,
        *,
        within: Budget | None = None,
        beside: Callable[[], tuple[int, bool]] = lambda: (0, True),
    ) -> None:
        """Make a budget of `most` bytes. `beside` returns the bytes in flight that were not taken here, and whether
        more may be taken; call `admit` after it changed."""
        self.most = most
        self.used = 0
        self._within = within
        self._beside = beside
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._parts: dict[Budget, None] = {}
        """Parts of this budget that have waiting takers."""

    @property
    def waiting(self) -> int:
        """Return the number of waiting takers."""
        return len(self._queue)

    async def take(self, size: int, seconds: float | None = None) -> None:
        """Take bytes; wait until they fit. Raise TimeoutError if that takes longer than `seconds`."""
        if self.take_now(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        if self._within is not None:
            self._within._parts[self] = None
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give(size)  # it was admitted in the moment in which it gave up
            else:
                turn.cancel()
                if (size, turn) in self._queue:
                    self._queue.remove((size, turn))
                self.admit()
            raise

    def take_now(self, size: int) -> bool:
        """Take bytes if they fit and no taker waits; return whether they were taken."""
        if self._queue or not self.fits(size):
            return False
        self._add(size)
        return True

    def take_always(self, size: int) -> None:
        """Take bytes that may not fit, for a taker that others wait for."""
        self._add(size)

    def give(self, size: int) -> None:
        assert size <= self.used
        self._add(-size)
        self.admit()
        if self._within is not None:
            self._within.admit_parts()

    def admit(self) -> None:
        """Admit the waiting takers that fit now, in the order of their arrival."""
        while self._queue:
            size, turn = self._queue[0]
            if not turn.done():  # else it was given up, and its task has not run since
                if not self.fits(size):
                    return
                self._add(size)
                turn.set_result(None)
            self._queue.popleft()
        if self._within is not None:
            self._within._parts.pop(self, None)

    def admit_parts(self) -> None:
        """Admit waiting takers of all parts, after bytes were returned."""
        for part in list(self._parts):
            part.admit()

    def close(self, error: Exception) -> None:
        """Raise an error in all waiting takers."""
        queue, self._queue = self._queue, deque()
        for _, turn in queue:
            if not turn.done():
                turn.set_exception(copy(error))

    def fits(self, size: int) -> bool:
        beside, may_come = self._beside()
        used, whole = self.used + beside, self._within
        if used == 0:
            return True
        return may_come and used + size <= self.most and (whole is None or whole.used + size <= whole.most)

    def _add(self, size: int) -> None:
        self.used += size
        if self._within is not None:
            self._within.used += size


M = TypeVar("M")


class Outgoing(Protocol[M]):
    """The messages of one link, and the link that they leave by."""

    def take(self) -> M | None:
        """Return the next message, or None while nothing may leave."""
        ...

    async def send(self, message: M) -> None: ...
    def post(self, message: M) -> bool:
        """Send a message without waiting; return whether to take another one at once."""
        ...

    @property
    def may_post(self) -> bool:
        """Return whether `post` may be called now."""
        ...

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is sent. Asked by `run` after each message, and before it sleeps."""
        ...


class CoalescingSender(Generic[M]):
    def __init__(self, outgoing: Outgoing[M], news: asyncio.Event | None = None) -> None:
        """`news`: an event that others set as well when there may be something to send."""
        self._outgoing = outgoing
        self._news = news or asyncio.Event()
        self._is_idle = False
        """Whether `run` sleeps because everything was sent that may leave."""

    async def run(self) -> None:
        """Send messages until `is_over`."""
        outgoing = self._outgoing
        while True:
            self._news.clear()
            message = outgoing.take()
            if message is not None:
                await outgoing.send(message)
            if outgoing.is_over:
                return
            if message is None:
                self._is_idle = True
                try:
                    await self._news.wait()
                finally:
                    self._is_idle = False

    def send_now(self) -> None:
        """Send what is ready from here if that needs no waiting; else wake `run`."""
        outgoing = self._outgoing
        while self._is_idle and not self._news.is_set() and outgoing.may_post:
            message = outgoing.take()
            if message is None or not outgoing.post(message):
                return
        self._news.set()

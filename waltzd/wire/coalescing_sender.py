"""Sending without timers and with few wake-ups: a message leaves where it becomes known, if nothing waits in front of it.

One task runs `run`: it sends what is ready, and sleeps while nothing is. While it sleeps, `send_now` sends from the caller,
as long as the link takes messages without waiting. Otherwise `send_now` wakes the task, and what becomes ready while one
message leaves gathers for the next message.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

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

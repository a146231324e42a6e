"""An append stream whose acknowledgements renew the lease of its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from waltzd.protocol.peers import AppendPort, Content, runs_of
from waltzd.server.core.lease import Lease
from waltzd.server.core.progress import Marks
from waltzd.server.session.settings import SessionSettings


class Owner(Protocol):
    """What is asked of the log of a session."""

    marks: Marks | None
    sending_up_to: int | None
    settings: SessionSettings


def renewing(stream: AppendPort, name: str, sent: int, owner: Owner) -> AppendPort:
    """Of the storage `name`, which was sent everything up to `sent` before; the stream itself where there is no lease."""
    lease = owner.marks.lease if owner.marks is not None else None
    return stream if lease is None else _Renewing(stream, name, sent, lease, owner)


class _Renewing(AppendPort):
    """A storage looks at its promise before it writes, so a mark says that it was bound to us after its records left."""

    def __init__(self, stream: AppendPort, name: str, sent: int, lease: Lease, owner: Owner) -> None:
        self._stream = stream
        self._name = name
        self._lease = lease
        self._owner = owner
        self._sent = sent
        """A mark for what the storage held before may not be about what is sent here."""
        self._asked: tuple[int, float] | None = None
        """What was sent first of what it has not acknowledged, and when."""

    async def start(self) -> None:
        await self._stream.start()

    @property
    def may_post(self) -> bool:
        return self._stream.may_post

    def post(self, content: Content, committed: int) -> None:
        self._leaves(content)
        self._stream.post(content, committed)

    async def send(self, content: Content, committed: int) -> None:
        self._leaves(content)
        await self._stream.send(content, committed)

    def _leaves(self, content: Content) -> None:
        last_id = runs_of(content)[-1].last_id if content else self._sent
        # What is sent while the session gives way renews nothing.
        if last_id > self._sent and self._asked is None and self._owner.sending_up_to is None:
            self._asked = last_id, self._owner.settings.clock()
        self._sent = max(self._sent, last_id)

    def hear(self, taker: Callable[[int], None]) -> None:
        def take(mark: int) -> None:
            self._came(mark)
            taker(mark)

        self._stream.hear(take)

    async def receive(self) -> int | None:
        mark = await self._stream.receive()
        if mark is not None:
            self._came(mark)
        return mark

    def _came(self, mark: int) -> None:
        if self._asked is not None and mark >= self._asked[0]:
            self._lease.renew(self._name, self._asked[1])
            self._asked = None

    def cancel(self) -> None:
        self._stream.cancel()

"""An append stream whose acknowledgements renew the lease of its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from waltzd.protocol.peers import AppendPort, Content, last_id_of
from waltzd.server.core.lease import Lease
from waltzd.server.core.progress import Marks
from waltzd.server.session.settings import SessionSettings


class Owner(Protocol):
    """The log of a session, as far as a stream needs it."""

    marks: Marks | None
    sending_up_to: int | None
    settings: SessionSettings


def renew_by_acknowledgements(stream: AppendPort, name: str, sent: int, owner: Owner) -> AppendPort:
    """Return a stream that renews the lease of the session; the stream itself if there is no lease. The storage `name`
    was sent everything up to `sent` before."""
    lease = owner.marks.lease if owner.marks is not None else None
    return stream if lease is None else _RenewingStream(stream, name, sent, lease, owner)


class _RenewingStream(AppendPort):
    """A stream whose acknowledgements renew the lease. A storage checks its session before it writes, so an
    acknowledgement confirms that the storage was not fenced by a newer session after the records were sent."""

    def __init__(self, stream: AppendPort, name: str, sent: int, lease: Lease, owner: Owner) -> None:
        self._stream = stream
        self._name = name
        self._lease = lease
        self._owner = owner
        self._sent = sent
        """Last id that was sent. An acknowledgement up to the first value may be for what the storage held before this
        stream."""
        self._asked: tuple[int, float] | None = None
        """First sent id that is not acknowledged, and the time at which it was sent; None if all are acknowledged."""

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
        last_id = last_id_of(content) if content else self._sent
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

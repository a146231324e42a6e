"""One append stream: frames come in, marks go out, and whatever ends it is said in the stream itself.

A status could be overtaken by a frame that is still on its way here, so a refusal is a message behind the marks, and what
still comes afterwards is read and ignored until the caller has noticed. A read that is under way is never cancelled as
long as the stream is to go on: the transport would not survive it.
"""

from __future__ import annotations

import asyncio

from waltzd.config import StorageConfig
from waltzd.errors import BadFrame, TooLarge, WaltzError
from waltzd.link import Frame, Link
from waltzd.storage.lane import Lane

REFUSED_SECONDS = 2.0
"""How long a caller may take to notice that it was refused."""


class Stream:
    """An appender of a lane, with a link at its other end."""

    def __init__(self, session: int, contact: int, lane: Lane, link: Link, config: StorageConfig) -> None:
        self.session = session
        self.contact = contact
        self._lane = lane
        self._link = link
        self._config = config
        self._durable_id: int | None = None
        self._owes_mark = False
        self._error: WaltzError | None = None
        self._is_over = False
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._leave_with: WaltzError | None = None

    def is_of(self, lane: Lane) -> bool:
        return self._lane is lane

    # -- told by the lane, and by the daemon

    def acknowledge(self, durable_id: int) -> None:
        """Also when it is the mark of before: whoever sends a record again waits for it again."""
        self._durable_id = durable_id
        self._owes_mark = True
        self._changed.set()

    def refuse(self, error: WaltzError) -> None:
        if not self._is_over:
            self._error = error
            self._finish()

    def leave(self, error: WaltzError) -> None:
        """Take no more frames; end with this error when those that are queued are done."""
        self._leave_with = error
        self._leaving.set()

    def _finish(self) -> None:
        self._is_over = True
        self._changed.set()

    # -- the work

    async def serve(self) -> None:
        """Until the caller has no more, or something ends it; raises what ended it, after having told the caller."""
        self._lane.join(self)
        sending = asyncio.create_task(self._send_marks())
        receiving = asyncio.create_task(self._receive_frames())
        leaving = asyncio.create_task(self._leaving.wait())
        tasks = (sending, receiving, leaving)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if receiving in done:
                receiving.result()
            if sending not in done:
                await self._lane.call(_nothing)
                if self._leave_with is not None:
                    self.refuse(self._leave_with)
                self._finish()
            await sending
            if self._error is not None:
                await refuse(self._link, self._error, receiving)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lane.leave(self)
        if self._error is not None:
            raise self._error

    async def _send_marks(self) -> None:
        while True:
            self._changed.clear()
            is_over = self._is_over
            if self._owes_mark:
                assert self._durable_id is not None
                self._owes_mark = False
                await self._link.send(self._durable_id)
            if is_over:
                return
            await self._changed.wait()

    async def _receive_frames(self) -> None:
        while True:
            try:
                frame = await self._link.receive()
                if frame is None:
                    return
                if not self._is_over and not self._leaving.is_set():
                    self._check(frame)
                    await self._lane.append(self, frame)
            except WaltzError as error:
                self.refuse(error)

    def _check(self, frame: Frame) -> None:
        size, count = len(frame.run.data), len(frame.run)
        if count == 0:
            raise BadFrame("a frame without records")
        if count > 1 and size > self._config.frame_bytes_max:
            raise TooLarge(f"a frame has {size} bytes of records; {self._config.frame_bytes_max} are allowed")
        if count == 1 and size > self._config.record_bytes_max:
            raise TooLarge(f"record {frame.run.first_id} has {size} bytes; {self._config.record_bytes_max} are allowed")


async def refuse(link: Link, error: WaltzError, receiving: asyncio.Task[None] | None = None) -> None:
    """Tell the caller why, and ignore what still comes until it stops or has had the time to."""
    await link.refuse(error)
    ignoring = receiving or asyncio.create_task(_ignore(link))
    await asyncio.wait((ignoring,), timeout=REFUSED_SECONDS)
    ignoring.cancel()
    await asyncio.gather(ignoring, return_exceptions=True)


async def _ignore(link: Link) -> None:
    while True:
        try:
            if await link.receive() is None:
                return
        except WaltzError:
            continue  # it was refused already; one more reason changes nothing


def _nothing() -> None:
    """Its turn in a lane comes when everything before it is done."""

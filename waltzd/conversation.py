"""One conversation with the owner of a partition: from the request to mount to whatever ends it.

Reading and writing go on side by side: outcomes come in while the connection is full, and while the application does not
take more of the feed. It ends when `waltzd.mount` wants another one, or with the error that ended it. When the server takes
no more, its last word is waited for, because it says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from uuid import UUID

from waltzd.errors import BadFrame, CannotConnect
from waltzd.frame import ClientFrame, Committals, Feed, HeadFeed, Mounted, Refusals, Refused, ServerFrame
from waltzd.mount import Mount, State
from waltzd.port import MountPort
from waltzd.record import HeadArray, Run, first_bad

LAST_WORD_SECONDS = 2.0
GOING_ON = (State.READY, State.ASKING)


class Listener(Protocol):
    def ready(self) -> None:
        """The mount stands, and nothing is undecided."""

    def settled(self) -> None:
        """Something may have been decided."""

    def fed(self, size: int, content: Run | HeadArray) -> None:
        """Records or heads came, checked, and exactly those that are next."""


class Conversation:
    def __init__(self, link: MountPort, mount: Mount, listener: Listener, *, work: asyncio.Event, seconds: float) -> None:
        """`work`: set whenever there may be something to send. `seconds`: how long the answer to the request may take."""
        self._link = link
        self._mount = mount
        self._listener = listener
        self._work = work
        self._seconds = seconds

    async def run(self, key: UUID) -> None:
        try:
            await self._begin(key)
            if self._mount.state in GOING_ON:
                await self._go_on()
        finally:
            self._link.cancel()

    async def _begin(self, key: UUID) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._link.send([self._mount.request(key)])
                first, *rest = await self._receive()
        except TimeoutError:
            raise CannotConnect(f"{self._address} did not answer a mount in {self._seconds:g} seconds") from None
        if isinstance(first, Refused):
            raise first.error
        if not isinstance(first, Mounted):
            raise CannotConnect(f"{self._address} began a mount with {type(first).__name__}")
        self._mount.answered(first)
        if self._mount.state is State.READY:
            self._listener.ready()
        self._take_all(rest)

    async def _go_on(self) -> None:
        reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and writing.exception() is not None:
                await asyncio.wait([reading], timeout=LAST_WORD_SECONDS)
        finally:
            self._link.cancel()
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        for task in (reading, writing):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _read(self) -> None:
        while self._mount.state in GOING_ON:
            self._take_all(await self._receive())

    async def _write(self) -> None:
        """Whatever may go, as soon as what went before has left."""
        while self._mount.state in GOING_ON:
            self._work.clear()
            frames: list[ClientFrame] = [*self._mount.take()]
            credit = self._mount.credit()
            if credit is not None:
                frames.append(credit)
            if frames:
                await self._link.send(frames)
            elif self._mount.state in GOING_ON:
                await self._work.wait()

    async def _receive(self) -> Sequence[ServerFrame]:
        with _damage_is_no_refusal():
            frames = await self._link.receive()
        if not frames:
            raise CannotConnect(f"{self._address} ended the mount without a word")
        return frames

    def _take_all(self, frames: Sequence[ServerFrame]) -> None:
        try:
            for frame in frames:
                if isinstance(frame, Refused):
                    with _damage_is_no_refusal():
                        self._mount.ends(frame.untaken)
                    raise frame.error
                if self._mount.state in GOING_ON:  # else the question is answered, and the rest is for nobody
                    with _damage_is_no_refusal():
                        self._take(frame)
        finally:
            self._listener.settled()

    def _take(self, frame: ServerFrame) -> None:
        match frame:
            case Committals():
                self._mount.committed(frame)
            case Refusals():
                self._mount.refused(frame)
            case Feed(run):
                bad = first_bad(run)
                if bad is not None:
                    raise BadFrame(f"record {run.first_id + bad} was damaged on the way")
                self._mount.fed(run.first_id, run.last_id, len(run.data))
                self._listener.fed(len(run.data), run)
            case HeadFeed(heads) if self._mount.state is State.ASKING:
                self._mount.told(heads)
            case HeadFeed(heads):
                self._mount.fed_heads(heads)
                self._listener.fed(heads.nbytes, heads)
            case _:
                raise BadFrame(f"a {type(frame).__name__} frame was not asked for")

    @property
    def _address(self) -> str | None:
        assert self._mount.place is not None
        return self._mount.place.address


@contextmanager
def _damage_is_no_refusal() -> Iterator[None]:
    """What came cannot be right: it was damaged on the way, or the server is mistaken. Another link may do better. That is
    not the same as a server that refuses what we sent as bad: it would do so again."""
    try:
        yield
    except BadFrame as error:
        raise CannotConnect(f"what the server sent cannot be right: {error.message}") from error

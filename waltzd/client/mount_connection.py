"""One mount on the network: from the request to the owner of a partition until the end of the link.

`waltzd.client.mount` decides what may be sent; this module sends and receives it, in two tasks at most."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from uuid import UUID

from waltzd.client.mount import Mount, MountState
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.record import Run, first_bad
from waltzd.protocol.batches import ClientFrame, Committals, Feed, HeadFeed, Mounted, Refusals, Refused, ServerFrame
from waltzd.protocol.peers import MountPort

LAST_WORD_SECONDS = 2.0
ACTIVE_STATES = (MountState.READY, MountState.ASKING)


class MountListener(Protocol):
    """Partition client that a connection reports to."""

    @property
    def mount(self) -> Mount: ...
    def ready(self) -> None: ...
    def settled(self) -> None: ...
    def fed(self, size: int, content: Run | HeadFeed) -> None: ...


class _Over(Exception):
    """A received frame has ended the connection."""


class MountConnection:
    """Connection of one mount, from the request to the error that ends it, or until `mount` wants another connection.

    Two tasks read and write. If the link allows it, frames are processed as they arrive and sent without a task switch;
    then the tasks only notice the end."""

    def __init__(self, listener: MountListener, link: MountPort) -> None:
        self._listener = listener
        self._mount = listener.mount
        self._link = link
        self._work = asyncio.Event()
        """Set when there may be something to send."""
        self._waits = False
        """Whether everything that may be sent was sent, so that new requests may be sent at once."""
        self._failed: Exception | None = None
        """Error that ended the connection outside of its tasks."""

    async def run(self, key: UUID, seconds: float) -> None:
        """Run the mount; `seconds` is the timeout of the answer to the request."""
        try:
            await self._begin(key, seconds)
            if self._mount.state in ACTIVE_STATES:
                await self._exchange()
        finally:
            self._link.cancel()

    async def _begin(self, key: UUID, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._link.send([self._mount.request(key)])
                first, *rest = await self._receive()
        except TimeoutError:
            raise CannotConnect(f"{self._address} did not answer a mount in {seconds:g} seconds") from None
        if isinstance(first, Refused):
            raise first.error
        if not isinstance(first, Mounted):
            raise CannotConnect(f"{self._address} began a mount with {type(first).__name__}")
        self._mount.answered(first)
        if self._mount.state is MountState.READY:
            self._listener.ready()
        self._take_all(rest)

    async def _exchange(self) -> None:
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
        self._link.hear(self._take_pushed)
        while self._mount.state in ACTIVE_STATES:
            try:
                frames = await self._receive()
            except _Over:
                if self._failed is not None:
                    raise self._failed from None
                return
            self._take_all(frames)

    def _take_pushed(self, frames: Sequence[ServerFrame]) -> None:
        try:
            self._take_all(frames)
        except Exception as error:
            self._failed = error
            raise _Over from error
        if self._mount.state not in ACTIVE_STATES:
            raise _Over

    async def _write(self) -> None:
        while self._mount.state in ACTIVE_STATES:
            self._work.clear()
            if self._failed is not None:
                raise self._failed
            if frames := self._next():
                await self._link.send(frames)
            elif self._mount.state in ACTIVE_STATES:
                self._waits = True
                try:
                    await self._work.wait()
                finally:
                    self._waits = False

    def send_now(self) -> None:
        """Send what may be sent at once, if the link takes it without waiting; else wake the writer."""
        while self._waits and not self._work.is_set() and self._link.may_post and self._mount.state in ACTIVE_STATES:
            try:
                frames = self._next()
                if frames:
                    self._link.post(frames)
            except Exception as error:  # noqa: BLE001  the task raises it
                self._failed = error
                break
            if not frames and self._mount.state in ACTIVE_STATES:
                return
        self._work.set()

    def _next(self) -> list[ClientFrame]:
        """Return the frames that may be sent now."""
        frames: list[ClientFrame] = [*self._mount.take()]
        credit = self._mount.credit()
        if credit is not None:
            frames.append(credit)
        return frames

    async def _receive(self) -> Sequence[ServerFrame]:
        with _damage_is_no_refusal():
            frames = await self._link.receive()
        if not frames:
            raise CannotConnect(f"{self._address} ended the mount without a reason")
        return frames

    def _take_all(self, frames: Sequence[ServerFrame]) -> None:
        refused: WaltzError | None = None
        try:
            with _damage_is_no_refusal():
                for frame in frames:
                    if isinstance(frame, Refused):
                        refused = frame.error
                        self._mount.ends(frame.untaken)
                        break
                    if self._mount.state in ACTIVE_STATES:  # else everything is decided, and the rest is not needed
                        self._take(frame)
        finally:
            self._listener.settled()
        if refused is not None:
            raise refused

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
                self._mount.seen.note(run.times)
                self._listener.fed(len(run.data), run)
            case HeadFeed(heads) if self._mount.state is MountState.ASKING:
                self._mount.told(heads)
            case HeadFeed(heads):
                self._mount.fed_heads(heads)
                self._mount.seen.note(frame.times)
                self._listener.fed(heads.nbytes, frame)
            case _:
                raise BadFrame(f"a {type(frame).__name__} frame was not asked for")

    @property
    def _address(self) -> str | None:
        assert self._mount.place is not None
        return self._mount.place.address


@contextmanager
def _damage_is_no_refusal() -> Iterator[None]:
    try:
        yield
    except BadFrame as error:
        raise CannotConnect(f"the server sent an invalid frame: {error.message}") from error

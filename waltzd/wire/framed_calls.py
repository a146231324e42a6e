"""Calls to a server over a plain connection, from both sides: gRPC costs more than the work of a short call.

The first frame of such a connection is CALLS, and the server answers with CALLS and the number of calls that it knows.
Then each REQUEST is one call: a number that the caller chose, the code of the call, and its message. Each REPLY has that
number, and the message of the reply or an `ErrorDetail`. Replies come in any order. Messages, rights and audit log are
those of gRPC.

A server of an older version does not know CALLS and refuses the connection; its caller goes on by gRPC.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import ExitStack, suppress
from typing import Any

from google.protobuf.message import DecodeError

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, NotPermitted, WaltzError
from waltzd.errors.operations import BadFrame, TooManyCallers, WrongPeer
from waltzd.protocol.audit import Auditor
from waltzd.wire.calls import FETCH_MARKED, HIGH_WATER_MARK, HISTORY, Call
from waltzd.wire.codec import bounded, packed_error, unpacked_error
from waltzd.wire.frames import SMALL_BYTES, Connection, Kind
from waltzd.wire.servicer import Host, Origin, answered, audited

VERSION = b"\x01"
FRAMED_CALLS: tuple[Call[Any], ...] = (FETCH_MARKED, HIGH_WATER_MARK, HISTORY)
"""Calls that may be made over frames, by their code. A code is never given to another call."""
CALLS_MAX = 128
"""Calls of one connection under way. A caller makes further ones wait, and a server refuses them."""
REQUEST_MAX = SMALL_BYTES
"""Largest frame of a request. The largest question, with 1000 locks, has a quarter of it. Connections for calls do not
count as mounts, so there may be thousands of them, and each may have an unfinished frame in memory."""
NUMBER_MAX = (1 << 32) - 1
REQUEST_HEAD = struct.Struct(">IB")
"""Number of the call, and its code."""
REPLY_HEAD = struct.Struct(">I?")
"""Number of the call, and whether it failed."""


class FramedCalls:
    """Calls over one connection, in any number at once."""

    def __init__(self, connection: Connection, address: str, known: int) -> None:
        """`known`: number of calls that the server knows, from the code 0 on."""
        self._connection = connection
        self._address = address
        self._known = FRAMED_CALLS[:known]
        self._number = 0
        self._room = asyncio.Semaphore(CALLS_MAX)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Buffer]] = {}
        """Futures of the calls under way, by number."""
        connection.hear(Kind.REPLY, self._take)
        self._receiving = asyncio.create_task(self._receive(), name=f"calls to {address}")

    @classmethod
    async def begin(cls, connection: Connection, address: str) -> FramedCalls:
        """Ask the server for calls on this connection. Raise `WrongPeer` if it knows none."""
        await connection.send(Kind.CALLS, (VERSION,))
        found = await connection.receive()
        if found is None:
            raise CannotConnect(f"{address} closed the connection")
        if found[0] is not Kind.CALLS or len(found[1]) != 2 or found[1][:1] != VERSION:
            raise WrongPeer(f"the server at {address} takes no calls over frames of this version")
        return cls(connection, address, found[1][1])

    @property
    def is_lost(self) -> bool:
        return self._receiving.done() or self._connection.is_lost

    def takes(self, call: Call[Any]) -> bool:
        """Return whether the server knows a call."""
        return call in self._known

    async def ask(self, call: Call[Any], request: Any, seconds: float) -> Any:
        """Make a call; return the message of its reply. Raise the error of the server, or `CannotConnect`."""
        async with self._room:
            content = await self._answer(call, request, seconds)
        try:
            return call.reply.FromString(bytes(content))
        except DecodeError:
            raise BadFrame(f"{self._address} answered {call.name} with a malformed message") from None

    async def _answer(self, call: Call[Any], request: Any, seconds: float) -> Buffer:
        number, loop = self._number % NUMBER_MAX + 1, self._loop
        self._number = number
        reply: asyncio.Future[Buffer] = loop.create_future()
        self._waiting[number] = reply

        def give_up() -> None:
            if not reply.done():
                reply.set_exception(CannotConnect(f"{self._address} did not answer {call.name} within {seconds:g} seconds"))

        alarm = loop.call_later(seconds, give_up)  # a quarter of what `asyncio.timeout` costs
        try:
            head = REQUEST_HEAD.pack(number, FRAMED_CALLS.index(call))
            parts = head, request.SerializeToString()
            await self._connection.send(Kind.REQUEST, parts, gather=len(self._waiting) > 1)
            return await reply
        finally:
            alarm.cancel()
            del self._waiting[number]

    def _take(self, content: Buffer) -> None:
        if len(content) < REPLY_HEAD.size:
            raise BadFrame(f"a reply has {len(content)} bytes; its head alone has {REPLY_HEAD.size}")
        number, has_failed = REPLY_HEAD.unpack_from(content)
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():  # its caller has given up
            return
        rest = memoryview(content)[REPLY_HEAD.size :]
        if has_failed:
            waiting.set_exception(unpacked_error(bytes(rest)))
        else:
            waiting.set_result(rest)

    async def _receive(self) -> None:
        """Wait for the end of the connection, and fail the calls that are under way."""
        error: WaltzError
        try:
            found = await self._connection.receive()
            what = "closed the connection" if found is None else f"sent a frame of the kind {found[0].name} among replies"
            error = CannotConnect(f"{self._address} {what}")
        except WaltzError as lost:
            error = lost
        self._connection.lose(error)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(CannotConnect(error.message))

    async def close(self) -> None:
        """Close the connection, and fail the calls that are under way."""
        self._connection.lose(CannotConnect("the client was closed"))
        await self._receiving


class CallConnection:
    """The answering side of calls over a plain connection; the calling side is `framed_calls`. It decides nothing."""

    def __init__(self, connection: Connection, host: Host, origin: Origin, auditor: Auditor) -> None:
        self._connection = connection
        self._host = host
        self._origin = origin
        self._auditor = auditor
        self._running: dict[asyncio.Task[None], None] = {}
        self._is_leaving = False

    async def serve(self) -> None:
        """Answer calls until the caller goes. Raise `BadFrame` for a frame that is no call."""
        connection = self._connection
        connection.admit(REQUEST_MAX)
        await connection.send(Kind.CALLS, (VERSION, bytes((len(FRAMED_CALLS),))))
        try:
            while True:
                match await connection.receive():
                    case None:
                        return
                    case Kind.REQUEST, content if len(content) >= REQUEST_HEAD.size:
                        if len(self._running) >= CALLS_MAX:  # the caller knows the bound
                            await connection.send(Kind.REPLY, self._refusal(content))
                            continue
                        task = asyncio.create_task(self._answer(content))
                        self._running[task] = None
                        task.add_done_callback(self._ended)
                    case kind, content:
                        raise BadFrame(
                            f"a frame of the kind {kind.name} with {len(content)} bytes, where calls are expected"
                        )
        finally:
            for task in list(self._running):
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _refusal(self, content: Buffer) -> tuple[Buffer, ...]:
        error = TooManyCallers(f"a connection may have {CALLS_MAX} calls under way")
        return REPLY_HEAD.pack(REQUEST_HEAD.unpack_from(content)[0], True), packed_error(error)

    def leave(self) -> None:
        """Close the connection as soon as no call is under way."""
        self._is_leaving = True
        if not self._running:
            self._connection.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if self._is_leaving:
            self.leave()
        if not task.cancelled() and (mistake := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "a call failed", "exception": mistake})
            self._connection.lose(CannotConnect("a call failed by an internal error"))

    async def _answer(self, content: Buffer) -> None:
        number, code = REQUEST_HEAD.unpack_from(content)
        with ExitStack() as sent:
            try:
                parts: tuple[Buffer, ...] = (
                    REPLY_HEAD.pack(number, False),
                    await self._reply(code, bytes(memoryview(content)[REQUEST_HEAD.size :]), sent),
                )
            except WaltzError as error:
                self._host.refused()
                parts = (REPLY_HEAD.pack(number, True), packed_error(error))
            del content  # the caller may read its reply late
            with suppress(CannotConnect):  # the caller has gone
                await self._connection.send(Kind.REPLY, parts, gather=len(self._running) > 1)

    async def _reply(self, code: int, raw: bytes, sent: ExitStack) -> bytes:
        """Return the reply to a call. `sent`: is closed once it has been sent."""
        if code >= len(FRAMED_CALLS):
            raise WrongPeer(f"this server knows no call with the code {code}")
        call, caller = FRAMED_CALLS[code], self._origin.identity
        with audited(self._auditor, call.path, caller=caller, peer=self._connection.peer) as heard:
            if caller is not None and caller.role not in call.roles:
                raise NotPermitted(f"{caller.name} has the role {caller.role}, which may not call {call.path}")
            request = bounded(call.request, call.request.FromString)(raw)
            if isinstance(request, WaltzError):
                raise request
            heard.request = request
            heard.reply = call.pack(await answered(self._host, call, request, Origin(caller, sent=sent)))
            found: bytes = heard.reply.SerializeToString()
            return found

"""The answering side of calls over a plain connection; the calling side is `framed_calls`. It decides nothing."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from dataclasses import replace

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, NotPermitted, WaltzError
from waltzd.errors.operations import BadFrame, TooManyCallers, WrongPeer
from waltzd.protocol.audit import Auditor
from waltzd.wire.audited import note
from waltzd.wire.codec import packed_error
from waltzd.wire.framed_calls import CALLS_MAX, FRAMED_CALLS, REPLY_HEAD, REQUEST_HEAD, REQUEST_MAX, VERSION
from waltzd.wire.frames import Connection, Kind
from waltzd.wire.limits import bounded
from waltzd.wire.servicer import Host, Origin, answered


class CallConnection:
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
                await self._connection.send(Kind.REPLY, parts)

    async def _reply(self, code: int, raw: bytes, sent: ExitStack) -> bytes:
        """Return the reply to a call. `sent`: is closed once it has been sent."""
        if code >= len(FRAMED_CALLS):
            raise WrongPeer(f"this server knows no call with the code {code}")
        call, caller = FRAMED_CALLS[code], self._origin.identity
        with note(self._auditor, call.path, caller=caller, peer=self._connection.peer) as heard:
            if caller is not None and caller.role not in call.roles:
                raise NotPermitted(f"{caller.name} has the role {caller.role}, which may not call {call.path}")
            request = bounded(call.request, call.request.FromString)(raw)
            if isinstance(request, WaltzError):
                raise request
            heard.request = request
            heard.reply = call.pack(await answered(self._host, call, request, replace(self._origin, sent=sent)))
            found: bytes = heard.reply.SerializeToString()
            return found

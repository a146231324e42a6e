"""The port for applications that mount without gRPC: from connections to calls, and errors to the last frame. It decides
nothing.

A connection is one mount, or carries calls (`wire.framed_calls`). Its frames hold the messages of the gRPC service. The
first frame has to be the request to mount, or CALLS, within some seconds. Until it was accepted the caller may send no
larger frame. With certificates the same callers are admitted as through gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, NotPermitted, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.protocol.address import Address
from waltzd.protocol.audit import NO_AUDIT, Auditor, AuditRecord
from waltzd.protocol.batches import ClientFrame, Refused, ServerFrame, SingleAppend, SingleCommittal
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.mounts import MOUNT_CALL, MountAudit
from waltzd.server.clients.service import LogService
from waltzd.wire.calls import MOUNT
from waltzd.wire.codec import (
    packed_committed,
    packed_error,
    packed_server_frames,
    unpacked_client_frames,
    unpacked_single,
)
from waltzd.wire.connections import CONNECTIONS_MAX
from waltzd.wire.framed_calls import CallConnection
from waltzd.wire.frames import Connection, Kind
from waltzd.wire.listening_port import FramedListener
from waltzd.wire.servicer import Origin, audited_name
from waltzd.wire.tls import Tls

FIRST_BYTES = 4 << 10
"""Limit of a request to mount."""
QUIET_SECONDS = 10.0
"""Silence of a client after which a heartbeat is requested."""


class _ForCallsError(Exception):
    """The connection is no mount: its first frame asks for calls."""


class _FramedLink:
    takes_singles = True

    def __init__(self, connection: Connection, identity: str, audit: MountAudit) -> None:
        self.identity = identity
        self._audit = audit
        self._connection = connection
        self._expected = Kind.MOUNT
        self._is_refused = False
        self._sends_singles = False
        """Whether the client has sent a frame of the kind SINGLE, so that it takes frames of the kind COMMITTED."""

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def quiet_seconds(self) -> float | None:
        return self._connection.quiet_seconds

    async def receive(self) -> Sequence[ClientFrame] | None:
        expected, self._expected = self._expected, Kind.CLIENT
        if expected is Kind.CLIENT and not self._is_refused:
            self._connection.admit()
        found = await self._connection.receive()
        if found is None:
            return None
        kind, content = found
        if kind is Kind.CALLS and expected is Kind.MOUNT:
            raise _ForCallsError
        if kind is Kind.SINGLE and expected is Kind.CLIENT:
            return (self._single(content),)
        if kind is not expected:
            raise BadFrame(f"a frame of the kind {kind.name} in the place of one of the kind {expected.name}")
        frames = unpacked_client_frames(content)
        self._audit.note_received(frames)
        return frames

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        def take(content: Buffer) -> bool:
            try:
                one = self._single(content)
            except BadFrame:
                return False  # `receive` raises it, once
            return taker(one)

        self._connection.hear(Kind.SINGLE, take)

    def _single(self, content: Buffer) -> SingleAppend:
        one = unpacked_single(content)
        self._sends_singles = True
        return one

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        self._audit.note_sent(frames)
        self._is_refused = self._is_refused or isinstance(frames[-1], Refused)
        await self._connection.send(*self._packed(frames))

    def _packed(self, frames: Sequence[ServerFrame]) -> tuple[Kind, Sequence[Buffer]]:
        """Return the kind and the parts of the next frame."""
        one = frames[0]
        if self._sends_singles and isinstance(one, SingleCommittal) and len(frames) == 1:
            return Kind.COMMITTED, (packed_committed(one),)
        return Kind.SERVER, (packed_server_frames(frames),)

    @property
    def may_post(self) -> bool:
        return self._connection.may_post

    def post(self, frames: Sequence[ServerFrame]) -> None:
        self._connection.post(*self._packed(frames))


class StreamPort:
    def __init__(
        self,
        address: Address,
        message_bytes_max: int,
        tls: Tls | None,
        auditor: Auditor = NO_AUDIT,
        *,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._tls = tls
        self._auditor = auditor
        self._calls: ServerCalls | None = None
        self._call_connections: dict[CallConnection, None] = {}
        self._listener = FramedListener(
            address,
            tls,
            make_connection=lambda accept: Connection(
                message_bytes_max, accept, first_max=FIRST_BYTES, quiet_seconds=QUIET_SECONDS, tells_when_full=True
            ),
            serve=self._serve,
            purpose="mounts",
            busy="this server takes no more mounts at the moment, or no more of this caller",
            connections_max=connections_max,
        )

    @property
    def address(self) -> Address:
        return self._listener.address

    async def open(self) -> None:
        """Listen. Callers are served after `serve`."""
        await self._listener.open()

    def serve(self, calls: ServerCalls, *, on_fatal: Callable[[BaseException], None]) -> None:
        self._calls = calls
        self._listener.begin(on_fatal)

    async def _serve(self, connection: Connection) -> None:
        calls = self._calls
        assert calls is not None
        try:
            identity = self._identity(connection)
        except NotPermitted as error:
            who = audited_name(connection.identity)
            self._auditor.note(AuditRecord(who=who, peer=connection.peer, what=MOUNT_CALL, code=error.code))
            await self._refuse(connection, error)
            return
        mount = MountAudit(self._auditor, who=identity, peer=connection.peer)
        try:
            await calls.mount(_FramedLink(connection, identity, mount))
        except _ForCallsError:
            await self._serve_calls(connection, calls)
        except WaltzError:  # it was sent to the client, or the client has gone
            pass
        finally:
            mount.note_end()
            connection.close()

    async def _serve_calls(self, connection: Connection, calls: ServerCalls) -> None:
        origin = Origin(None if self._tls is None else connection.identity)
        served = CallConnection(connection, LogService(calls, self._auditor), origin, self._auditor)
        self._call_connections[served] = None
        try:
            await served.serve()
        except CannotConnect:  # the caller has gone
            pass
        except WaltzError as error:
            await self._refuse(connection, error)
        finally:
            del self._call_connections[served]

    def _identity(self, connection: Connection) -> str:
        if self._tls is None:
            return ""
        caller = connection.identity
        if caller is None or caller.key != self._tls.identity.key:
            who = "no identity of this cluster" if caller is None else f"the identity {caller.uri}"
            raise NotPermitted(f"the certificate of the caller has {who}")
        if caller.role not in MOUNT.roles:
            raise NotPermitted(f"{caller.name} has the role {caller.role}, which may not call {MOUNT.path}")
        why = connection.end_with_certificate(self._tls)
        if why is not None:
            raise NotPermitted(f"the certificate of {caller.name} {why}")
        return caller.uri

    @staticmethod
    async def _refuse(connection: Connection, error: WaltzError) -> None:
        try:
            await connection.send(Kind.REFUSED, (packed_error(error),))
        except CannotConnect:
            return
        finally:
            connection.close()

    async def stop(self, seconds: float) -> None:
        """Accept no more connections; give mounts and calls this time to finish."""
        for served in list(self._call_connections):
            served.leave()
        await self._listener.stop(seconds)

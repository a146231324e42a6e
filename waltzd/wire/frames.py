"""Frames over a plain connection: each is a length, a kind and bytes.

gRPC costs some hundred microseconds for each message, which is more than a storage needs to write it; a frame costs a
tenth. A large frame is received straight into its own buffer and sent without a copy. The only flow control is that of
the connection: an end that does not take frames stops reading, and the sender waits.

A silent connection is probed with a heartbeat and closed if there is no answer. A process that was stopped keeps its
connections open, and a cut cable is silent.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import BadFrame, WrongPeer
from waltzd.protocol.role import Identity, Role, dns_name
from waltzd.wire.tls import CERTIFIED_SECONDS, Tls, certificate_of, check_peer, identity_of

HEAD = struct.Struct(">IB")
SMALL_BYTES = 64 << 10
"""Largest frame that is received into the shared buffer; a larger one gets its own."""
START_BYTES = 4 << 10
"""Size of the shared buffer until a read fills it. An owner has a connection to each replica, and receives only marks."""
WAITING_MAX = 1 << 20
"""Bytes of frames not taken yet at which reading stops. One frame is always allowed."""
FRAME_COST = 100
"""Bytes counted for each waiting frame beside its content, so that a flood of empty frames is bounded."""
TURN_BYTES = 64 << 10
"""Bytes sent after which other tasks run, so that one fast connection does not block the loop."""
GATHERED_MAX = 4
"""Frames that are written in one call of the kernel. With more of them the other side would begin later: 64 clients that
decide were slower by a tenth."""
QUIET_SECONDS = 5.0
"""Seconds of silence after which a heartbeat is requested. After twice that the connection is lost."""


class Kind(enum.IntEnum):
    HELLO = 1
    """First frame of an append stream: identity of the caller. It is sent once."""
    RECORDS = 2
    BATCHES = 3
    MARK = 4
    REFUSED = 5
    """Last frame: the error that ends the stream."""
    ASKED = 6
    """Request for a heartbeat."""
    ALIVE = 7
    """Heartbeat."""
    FETCH = 8
    """First frame of a stream that fetches a segment file."""
    INSTALL = 9
    """First frame of a stream that sends a segment file."""
    GO_ON = 10
    """Credit of the receiver of a segment file: one more piece may be sent."""
    PIECE = 11
    """Piece of a segment file."""
    WHOLE = 12
    """End of a segment file: all pieces were sent."""
    STATUS = 13
    """Last frame after a segment file was installed: status of the replica."""
    MOUNT = 14
    """First frame at a server: a client mounts a partition."""
    CLIENT = 15
    """Frames of a client in its mount: one message of the gRPC service."""
    SERVER = 16
    """Frames of a server in a mount: one message of the gRPC service."""
    SINGLE = 17
    """One transaction of a client in a mount, without protobuf."""
    COMMITTED = 18
    """The id of one committed transaction, without protobuf."""
    CALLS = 19
    """First frame at a server of a connection for calls, and the answer to it."""
    REQUEST = 20
    """One call."""
    REPLY = 21
    """Reply or error of one call."""


_KINDS = {int(kind): kind for kind in Kind}


class Connection(asyncio.BufferedProtocol):
    """One end of a connection. `receive` returns frames in order; `send` waits while the connection is full."""

    def __init__(
        self,
        bytes_max: int,
        on_made: Callable[[Connection], None] | None = None,
        *,
        first_max: int | None = None,
        quiet_seconds: float = QUIET_SECONDS,
        tells_when_full: bool = False,
    ) -> None:
        """Make an end. `bytes_max` bounds one frame. `first_max` bounds the first frame of a caller that is not
        authenticated: nothing is read behind it until `admit`. `on_made` is called once the connection is established.
        With `tells_when_full`, an end that has stopped reading sends heartbeats unasked."""
        self._bytes_max = bytes_max
        self._quiet_seconds = quiet_seconds
        self._tells_when_full = tells_when_full
        self._has_answered = asyncio.Event()
        self._limit = bytes_max if first_max is None else first_max
        self._is_stranger = first_max is not None
        self._is_held = False
        """Whether reading is suspended, after the first frame of an unauthenticated caller."""
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray((START_BYTES if first_max is None else first_max) + HEAD.size)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._large: bytearray | None = None
        """Content of the frame that is received into its own buffer; None if there is none."""
        self._large_view = memoryview(b"")
        self._large_kind = Kind.HELLO
        self._large_filled = 0
        self._frames: deque[tuple[Kind, Buffer]] = deque()
        self._waiting_bytes = 0
        self._is_paused = False
        self._takers: dict[Kind, Callable[[Buffer], object]] = {}
        self._mistake: Exception | None = None
        """Error that the taker raised; None if there is none."""
        self._came = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._error: WaltzError | None = None
        """Error that ended the connection; None while it is open."""
        self._nonsense: BadFrame | None = None
        self._is_ended = False
        """True once the other side has closed its end, or sent a malformed frame."""
        self._is_gone = False
        """True once the transport has ended: nothing more of the connection is held."""
        self._sent_in_turn = 0
        self._gathered: list[Buffer] = []
        """Frames that are written at the end of this turn of the event loop."""
        self._gathered_frames = 0
        self._soon: Callable[[Callable[[], None]], object] = lambda work: None
        self._time: Callable[[], float] = lambda: 0.0
        """Clock of the event loop, once the connection is made: finding the loop anew for each frame costs two calls of the
        kernel on Python 3.11."""
        self._heard = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._certificate_alarm: asyncio.TimerHandle | None = None

    # -- told by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._time, self._soon = loop.time, loop.call_soon
        self._heard = loop.time()
        self._alarm = loop.call_later(self._quiet_seconds, self._look)
        if self._on_made is not None:
            self._on_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large_view[self._large_filled :]
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._time()
        if self._large is None:
            self._filled += nbytes
            is_full = self._filled == len(self._buffer)
            self._parse()
            if is_full:
                self._grow()
        else:
            self._large_filled += nbytes
            if self._large_filled == len(self._large):
                done, self._large = self._large, None
                self._large_view = memoryview(b"")  # or it would keep the frame until the next large one
                self._take(self._large_kind, done)

    def _grow(self) -> None:
        """Receive into a buffer of full size from now on, unless the other side is not authenticated."""
        if len(self._buffer) < SMALL_BYTES and not self._is_stranger:
            rest, self._buffer = self._view[: self._filled], bytearray(SMALL_BYTES + HEAD.size)
            self._view = memoryview(self._buffer)
            self._view[: self._filled] = rest

    def _parse(self) -> None:
        try:
            self._take_whole()
        except BadFrame as error:  # nothing behind it can be understood; what was sent before still counts
            assert self._transport is not None
            self._nonsense = error
            self._transport.pause_reading()
            self._came.set()

    def _take_whole(self) -> None:
        """Take all complete frames from the shared buffer."""
        at = 0
        while self._filled - at >= HEAD.size and not self._is_held:
            length, number = HEAD.unpack_from(self._buffer, at)
            kind, start = _KINDS.get(number), at + HEAD.size
            if kind is None:
                raise BadFrame(f"a frame of the unknown kind {number}")
            if length > self._limit:
                raise BadFrame(f"a frame has {length} bytes; {self._limit} are allowed")
            if length > SMALL_BYTES:
                self._large, self._large_kind = bytearray(length), kind
                self._large_view = memoryview(self._large)
                here = self._filled - start  # only the beginning: the frame is larger than the buffer
                self._large_view[:here] = self._view[start : self._filled]
                self._large_filled, self._filled = here, 0
                return
            if self._filled - start < length:
                break
            self._take(kind, bytes(self._view[start : start + length]))
            at = start + length
        if at:
            rest = self._filled - at
            self._buffer[:rest] = self._buffer[at : self._filled]
            self._filled = rest

    def _take(self, kind: Kind, content: Buffer) -> None:
        assert self._transport is not None
        if kind is Kind.ASKED and self._may_write.is_set():  # an end that takes nothing would not hear it
            self._put(Kind.ALIVE, ())
        if kind is Kind.ALIVE:
            self._has_answered.set()
        if kind in (Kind.ASKED, Kind.ALIVE):
            return
        taker = self._takers.get(kind)
        if taker is not None and not self._frames and self._mistake is None and self._error is None:
            try:
                if taker(content) is not False:
                    return
            except Exception as mistake:  # noqa: BLE001  `receive` raises it
                self._mistake = mistake
                self._came.set()
                return
        self._frames.append((kind, content))
        self._waiting_bytes += FRAME_COST + len(content)
        self._is_held = self._is_stranger
        if (self._is_held or self._waiting_bytes > WAITING_MAX) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._came.set()

    def eof_received(self) -> bool:
        self._is_ended = True
        self._came.set()
        self._has_answered.set()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._is_gone = True
        self._finish(CannotConnect(f"the connection was lost: {error or 'the other side closed it'}"))

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # -- heartbeats

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        quiet = loop.time() - self._heard
        is_over = self._nonsense is not None or self._is_ended
        if is_over and not self._may_write.is_set():
            if quiet >= 2 * self._quiet_seconds:
                self.lose(CannotConnect(f"the other side had ended, and took nothing for {quiet:.0f} seconds"))
                return
        elif self._is_paused or is_over:
            self._heard = loop.time()  # we do not listen, so nothing can be heard
            if self._tells_when_full and self._may_write.is_set():
                self._put(Kind.ALIVE, ())
        elif quiet >= 2 * self._quiet_seconds:
            self.lose(CannotConnect(f"the other side was silent for {quiet:.0f} seconds"))
            return
        elif quiet >= self._quiet_seconds:
            self._put(Kind.ASKED, ())
        self._alarm = loop.call_later(self._quiet_seconds, self._look)

    # -- what the two ends use

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    @property
    def peer(self) -> str:
        found = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{found[0]}:{found[1]}" if found else "the other side"

    @property
    def quiet_seconds(self) -> float:
        """Return the seconds since anything was received; 0 while reading is paused."""
        return 0.0 if self._is_paused else asyncio.get_running_loop().time() - self._heard

    @property
    def identity(self) -> Identity | None:
        """Return the identity in the other side's certificate; None without one."""
        assert self._transport is not None
        return identity_of(self._transport.get_extra_info("ssl_object"))

    @property
    def holder(self) -> str:
        """Return the holder that the connection is counted for: the URI in the certificate, or the address without one."""
        found = self.identity
        return self.peer.rpartition(":")[0] if found is None else found.uri

    def end_with_certificate(self, tls: Tls) -> str | None:
        """Close the connection some seconds after the other side's certificate has expired or was revoked. Return the
        reason if that is so already."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        found = certificate_of(self._transport.get_extra_info("ssl_object"))

        def look() -> None:
            why = tls.refusal(found)
            if why is not None:
                self.lose(CannotConnect(f"the certificate of {self.peer} {why}"))
            elif self._error is None:
                self._certificate_alarm = loop.call_later(CERTIFIED_SECONDS, look)

        self._certificate_alarm = loop.call_later(CERTIFIED_SECONDS, look)
        return tls.refusal(found)

    async def answered(self) -> None:
        """Request a heartbeat and wait for it. It shows that the other side speaks frames and that no proxy holds them
        back."""
        self._has_answered.clear()
        self._put(Kind.ASKED, ())
        await self._has_answered.wait()
        if self._error is not None:
            raise self._error
        if self._is_ended:
            raise CannotConnect(f"{self.peer} closed the connection before it answered")

    def admit(self, bytes_max: int | None = None) -> None:
        """Accept the other side as authenticated: it may send frames of this size; None for the largest ones."""
        if self._is_stranger:
            self._is_stranger = False
            self._limit = self._bytes_max if bytes_max is None else bytes_max
            self._go_on()

    def _go_on(self) -> None:
        self._is_held = False
        self._parse()
        self._resume()

    def _resume(self) -> None:
        if self._is_paused and not self._is_held and self._waiting_bytes <= WAITING_MAX // 2:
            self._is_paused = False
            if self._error is None and self._nonsense is None and not self._is_ended:
                assert self._transport is not None
                self._transport.resume_reading()

    async def receive(self) -> tuple[Kind, Buffer] | None:
        """Return the next frame; None once the other side has closed its end. Raise if the connection was lost. A
        malformed frame is raised once, and nothing follows it."""
        while not self._frames:
            if self._mistake is not None:
                raise self._mistake
            if self._nonsense is not None:
                error, self._nonsense, self._is_ended = self._nonsense, None, True
                raise error
            if self._is_ended:
                return None
            if self._error is not None:
                raise self._error
            self._came.clear()
            if self._is_held:  # by a stranger that was not let in: only to see it go
                self._go_on()
            else:
                await self._came.wait()
        kind, content = self._frames.popleft()
        self._waiting_bytes -= FRAME_COST + len(content)
        self._resume()
        return kind, content

    def hear(self, kind: Kind, taker: Callable[[Buffer], object]) -> None:
        """Call `taker` with each frame of a kind on arrival, unless other frames wait to be received. If `taker` returns
        False, the frame waits to be received. An error of `taker` is raised by `receive`."""
        self._takers[kind] = taker

    @property
    def may_post(self) -> bool:
        """Return whether `send` would neither wait nor raise. `post` may be used then."""
        return self._error is None and self._sent_in_turn <= TURN_BYTES and self._may_write.is_set()

    def post(self, kind: Kind, parts: Sequence[Buffer] = ()) -> None:
        self._sent_in_turn += self._put(kind, parts)

    async def send(self, kind: Kind, parts: Sequence[Buffer] = (), *, gather: bool = False) -> None:
        """Send a frame; wait while the connection is full. Raise if it is lost. `gather`: write it together with all such
        frames of this turn of the event loop, for a sender that expects more of them."""
        await self._may_write.wait()
        if self._error is not None:
            raise self._error
        if gather:
            self._gather(kind, parts)
            return
        self.post(kind, parts)
        if self._sent_in_turn > TURN_BYTES:
            self._sent_in_turn = 0
            await asyncio.sleep(0)

    def _gather(self, kind: Kind, parts: Sequence[Buffer]) -> None:
        if not self._gathered:
            self._soon(self._write_gathered)
        self._gathered += (HEAD.pack(sum(map(len, parts)), kind), *parts)
        self._gathered_frames += 1
        if self._gathered_frames == GATHERED_MAX:
            self._write_gathered()

    def _write_gathered(self) -> None:
        if self._gathered and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(self._gathered)
        self._gathered, self._gathered_frames = [], 0

    def _put(self, kind: Kind, parts: Sequence[Buffer]) -> int:
        """Write a frame to the transport; return its size."""
        size = sum(map(len, parts))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines([HEAD.pack(size, kind), *parts])
        return HEAD.size + size

    def lose(self, error: WaltzError) -> None:
        """Abort the connection with an error."""
        self._finish(error)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection after what was sent has left. It is aborted if the other side does not take that soon."""
        self._write_gathered()
        self._finish(CannotConnect("the connection was closed here"))
        if self._transport is not None and not self._is_gone:  # a transport that closes by itself may wait for ever
            self._transport.close()
            self._alarm = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._transport.abort)

    def _finish(self, error: WaltzError) -> None:
        if self._error is None:
            self._error = error
        for alarm in (self._alarm, self._certificate_alarm):
            if alarm is not None:
                alarm.cancel()
        self._came.set()
        self._may_write.set()
        self._has_answered.set()


async def connect(
    host: str,
    port: int,
    *,
    role: Role,
    name: str | None,
    tls: Tls | None,
    bytes_max: int,
    quiet_seconds: float = QUIET_SECONDS,
    tells_when_full: bool = False,
) -> Connection:
    """Connect to a daemon of a role. With certificates and a `name`, only the daemon of that name is accepted.
    `bytes_max` bounds one frame of the other side."""
    secured, expected = None, None
    if tls is not None:
        secured = tls.calling()
        expected = dns_name(tls.identity.key, role, name)
    try:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(bytes_max, quiet_seconds=quiet_seconds, tells_when_full=tells_when_full),
            host,
            port,
            ssl=secured,
            server_hostname=expected,
        )
    except (OSError, ssl.SSLError) as error:
        raise CannotConnect(f"cannot open a stream to {host}:{port}: {error}") from error
    if tls is not None:
        try:
            check_peer(connection.identity, f"{host}:{port}", key=tls.identity.key, role=role, name=name)
            why = connection.end_with_certificate(tls)
            if why is not None:
                raise WrongPeer(f"the certificate of the process at {host}:{port} {why}")
        except CannotConnect as error:
            connection.lose(error)
            raise
    return connection

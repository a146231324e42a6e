"""gRPC and its calling side: errors that keep their class, channels that check the other side's certificate, a deadline
for each call.

An error travels as an `ErrorDetail` in the trailing metadata. The gRPC status beside it is for tools that do not know
Waltz. The answering side is `listener`.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeAlias, TypeVar
from urllib.parse import unquote
from uuid import UUID

import grpc
import grpc.aio

from waltzd.errors import CannotConnect, TlsMismatch, TooLarge, WaltzError
from waltzd.errors.operations import WrongPeer, WrongStorage
from waltzd.protocol.address import address_of_peer
from waltzd.protocol.role import Certificate, Identity, Role, dns_name, read_certificate
from waltzd.wire.calls import Call, Transport
from waltzd.wire.codec import checked, packed_error, parsed, unpacked_error
from waltzd.wire.tls import Credentials, Tls, certificate_at, speaks_tls

R = TypeVar("R")
MESSAGE_BYTES_MAX = 64 << 20
"""Largest answer that is accepted."""
ERROR_KEY = "waltz-error-bin"
STORAGE_KEY, INSTANCE_KEY = "waltz-storage-bin", "waltz-instance-bin"
"""Metadata of every call to a storage: its name and the id of its process, as far as the caller knows them. Any other
storage or process refuses the call."""


# -- errors ------------------------------------------------------------------------------------------------------------


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: WaltzError) -> NoReturn:
    metadata = ((ERROR_KEY, packed_error(error)),)
    await context.abort(grpc.StatusCode[error.status], f"{error.code} {error.message}"[:1000], metadata)
    raise AssertionError("abort returned")


def error_of(error: grpc.aio.AioRpcError, *, who: str = "", seconds: float | None = None) -> WaltzError:
    """Return the error of the other side, or that it could not be reached. gRPC reports neither the name
    of the other side (`who`) nor the timeout (`seconds`), so the caller passes both."""
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_KEY:
            assert isinstance(value, bytes)
            return unpacked_error(value)
    status = error.code()
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TooLarge(error.details() or "a message is too large")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and seconds is not None:
        return CannotConnect(f"{who} did not answer within {seconds:g} seconds", seconds=f"{seconds:g}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return WrongPeer(f"{who or 'the other side'} does not know this call: another port is there, or another program")
    return CannotConnect(f"the call failed: {status.name.lower().replace('_', ' ')}: {error.details()}")


# -- gRPC --------------------------------------------------------------------------------------------------------------


def options_for(message_bytes_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", -1),  # no limit: the sender bounds its messages
        ("grpc.max_metadata_size", 16 << 10),
        # Without the ping time-out a stopped peer is not noticed: the kernel still acknowledges for it.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A peer that comes back is found at once, not after up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A new channel is a new connection, and not the pause that another one makes after a failure.
        ("grpc.use_local_subchannel_pool", 1),
    ]


Server: TypeAlias = grpc.aio.Server


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Identity | None:
    """Return the identity in the caller's certificate; None without one, on a connection in plain text."""
    # gRPC's own list of names mixes all types: only the certificate says which of them are URIs.
    found = certificate_of(context)
    return None if found is None else Identity.among(found.uris)


def peer_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the caller's address without the kind and the escapes that gRPC adds."""
    return unquote(str(context.peer())).removeprefix("ipv4:").removeprefix("ipv6:")


def certificate_of(context: grpc.aio.ServicerContext[Any, Any]) -> Certificate | None:
    found = context.auth_context().get("x509_pem_cert")
    return None if not found else _read(bytes(next(iter(found))))


@functools.lru_cache(maxsize=1024)
def _read(pem: bytes) -> Certificate | None:
    return read_certificate(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))


KNOCK = "/waltz.v1.Door/Knock"
"""Path of a call that does not exist: every server answers so."""


async def knocked(address: str, tls: Tls | None, seconds: float) -> str | None:
    """Call a daemon's own port; return why there is no answer, or None if there is one."""
    role, name = (tls.identity.role, tls.identity.name) if tls is not None else (None, None)
    channel = Channel(address, tls=tls, peer=role, name=name)
    try:
        await channel.prove(seconds)
        await channel.unary_unary(KNOCK)(b"", timeout=seconds)
    except WaltzError as error:
        return error.message
    except grpc.aio.AioRpcError as error:
        return None if error.code() is grpc.StatusCode.UNIMPLEMENTED else str(error.details())
    finally:
        await channel.close()
    raise AssertionError("there is no such call, and it was answered")


ENDING_SECONDS = 1.0
"""Seconds that cancelled calls get to end."""
RETIRED_SECONDS = 3600.0
"""Seconds that streams live on after the certificate of their channel was replaced."""
_LOST = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


class Channel:
    """The part of a gRPC channel that calls use, to one address.

    With TLS it connects only to a `peer` of this role in our cluster, and of this name if there is one. gRPC compares
    only DNS names and does not show the other side's certificate. So a handshake of our own fetches it first (`prove`),
    and the channel trusts that one certificate and no authority. It is fetched again whenever the channel is not
    connected, because the other side may have another one. gRPC reads certificates when a channel is made, so there is
    a new channel for each new certificate of either side.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, peer: Role | None = None, name: str | None = None) -> None:
        self._address = address
        self._tls = tls
        self._peer = peer
        self.name = name
        """Only name that is accepted, from the next `prove` on; None for any."""
        self._credentials: Credentials | None = None
        self._trusted = b""
        """Certificate of the other side that is trusted, in DER."""
        self._proven: tuple[str | None] | None = None
        """Name that the trusted certificate was checked for; None before the first check."""
        self._channel = grpc.aio.insecure_channel(address, options=options_for(MESSAGE_BYTES_MAX)) if tls is None else None
        self._proving = asyncio.Lock()
        self._retired: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        self._running: dict[Any, None] = {}
        self._has_cancelled = False

    async def prove(self, seconds: float) -> None:
        """Check before a call that the other side is the one that is meant. It costs nothing while the channel is
        connected."""
        if self._tls is None:
            return
        try:
            async with asyncio.timeout(seconds), self._proving:
                if not self._is_proven(self._tls):
                    found, name = self._tls.current(), self.name
                    assert self._peer is not None
                    place = address_of_peer(self._address)
                    certificate = await certificate_at(self._tls, place, role=self._peer, name=name)
                    self._trust(found, certificate, dns_name(found.identity.key, self._peer))
                    self._proven = (name,)
        except TimeoutError:
            raise CannotConnect(f"{self._address} did not show its certificate within {seconds:g} seconds") from None

    def doubt(self) -> None:
        """Check the other side again before the next call, after a call that could not be made: its certificate may
        have changed."""
        self._proven = None

    def _is_proven(self, tls: Tls) -> bool:
        if self._channel is None or self._proven != (self.name,) or self._credentials is not tls.current():
            return False
        if tls.refusal(read_certificate(self._trusted)) is not None:
            return False
        return self._channel.get_state() not in _LOST

    def _trust(self, credentials: Credentials, certificate: bytes, answers_as: str) -> None:
        if self._channel is None or self._credentials is not credentials or self._trusted != certificate:
            if self._channel is not None:
                self._retire(self._channel)
            pem = ssl.DER_cert_to_PEM_cert(certificate).encode()
            secured = grpc.ssl_channel_credentials(pem, credentials.key, credentials.certificate)
            options = [*options_for(MESSAGE_BYTES_MAX), ("grpc.ssl_target_name_override", answers_as)]
            self._channel = grpc.aio.secure_channel(self._address, secured, options=options)
            self._credentials, self._trusted = credentials, certificate
        self._channel.get_state(try_to_connect=True)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        ending = asyncio.get_running_loop().create_task(channel.close(RETIRED_SECONDS))
        self._retired[channel] = ending
        ending.add_done_callback(lambda _: self._retired.pop(channel, None))

    def _call(self, kind: str, *about: Any, **named: Any) -> Callable[..., Any]:
        """Return a function that makes a call over the current channel."""

        def call(*arguments: Any, **settings: Any) -> Any:
            assert self._channel is not None, "`prove` comes first"
            made = getattr(self._channel, kind)(*about, **named)(*arguments, **settings)
            self._running[made] = None
            made.add_done_callback(self._ended)
            return made

        return call

    def _ended(self, call: Any) -> None:
        del self._running[call]
        self._has_cancelled = self._has_cancelled or call.cancelled()

    unary_unary = functools.partialmethod(_call, "unary_unary")
    unary_stream = functools.partialmethod(_call, "unary_stream")
    stream_unary = functools.partialmethod(_call, "stream_unary")
    stream_stream = functools.partialmethod(_call, "stream_stream")

    async def close(self, *, orderly: bool = False) -> None:
        """Close the channel and cancel its calls. With `orderly`, wait for them to end on their own loop: gRPC ends
        cancelled calls a moment later, and prints a traceback if the loop has ended by then."""
        for call in list(self._running):
            call.cancel()
        ending = list(self._retired.items())
        for channel, task in ending:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await channel.close()
        if self._channel is not None:
            if orderly and self._has_cancelled:
                await _pass_through(self._channel)
            await self._channel.close()


async def _pass_through(channel: grpc.aio.Channel) -> None:
    """Make one more call: when it has ended, all calls cancelled before it on the connection have ended, too."""
    if channel.get_state() not in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.SHUTDOWN):
        knock: Any = channel.unary_unary(KNOCK)
        with suppress(grpc.aio.AioRpcError):
            await knock(b"", timeout=ENDING_SECONDS)


class Caller(Transport):
    """Calls through gRPC to one address."""

    peer: ClassVar[Role]
    """Role of the other side, if there are certificates."""

    def __init__(
        self, address: str, *, seconds: float, tls: Tls | None, name: str | None = None, instance: UUID | None = None
    ) -> None:
        """Prepare calls. With `tls`, the other side must have the role `peer` in our cluster, and the `name` if given.
        `instance` is the id of the process of a storage that is meant."""
        self.address = address
        self._who = f"the {self.peer} {name} at {address}" if name is not None else f"the {self.peer} at {address}"
        self._seconds = seconds
        self._channel = Channel(address, tls=tls, peer=self.peer, name=name)
        self._may_want_tls = tls is None
        """True until an answer has arrived in plain text."""
        self._meant: list[tuple[str, bytes]] = []
        if self.peer is Role.STORAGE:  # also where there are no certificates
            self._meant += [(STORAGE_KEY, name.encode())] if name is not None else []
            self._meant += [(INSTANCE_KEY, instance.bytes)] if instance is not None else []

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        limit = self._seconds if seconds is None else seconds
        await self._channel.prove(limit)
        method = self._channel.unary_unary(call.path, call.request.SerializeToString, parsed(call.reply))
        try:
            reply = await method(request, timeout=limit, metadata=self._meant)
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error, error_of(error, who=self._who, seconds=limit)) from error
        self._may_want_tls = False
        return call.unpack(checked(reply), request, self.address)

    async def _lost(self, cause: grpc.aio.AioRpcError, error: WaltzError) -> WaltzError:
        if isinstance(error, CannotConnect):
            self._channel.doubt()
            # Why there is no connection, gRPC tells in words of its own: the address is asked once more.
            if self._may_want_tls and cause.code() is grpc.StatusCode.UNAVAILABLE and await speaks_tls(self.address):
                return TlsMismatch(f"{self.address} speaks TLS, and no certificate was given")
        else:
            self._may_want_tls = False
        if isinstance(error, WrongStorage):  # it does not know by which address it was reached
            return WrongStorage(f"{self.address}: {error.message}")
        return error

    async def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        """Make a call that is answered by a stream. A call that is not read to its end stays open, and a connection
        carries at most a thousand, so a reader that may stop early closes it (`aclosing`)."""
        await self._channel.prove(self._seconds)
        method = self._channel.unary_stream(call.path, call.request.SerializeToString, parsed(call.reply))
        running = method(request, metadata=self._meant)
        try:
            async for reply in running:
                self._may_want_tls = False
                yield call.unpack(checked(reply), request, self.address)
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error, error_of(error)) from error
        finally:
            running.cancel()

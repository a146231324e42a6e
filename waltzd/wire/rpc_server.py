"""The answering side of gRPC: who is let in, what is kept of callers before that, and until when.

A call is refused for its caller's certificate before its message is read. Everything else about calls is in the services.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from waltzd.errors import BadFrame, CannotConnect, NotPermitted, PortInUse, TooManyCallers, WaltzError
from waltzd.protocol import x509
from waltzd.protocol.address import Address
from waltzd.protocol.role import allowed
from waltzd.wire.grpc import Server, abort, caller_of, certificate_of, options_for
from waltzd.wire.tls import Credentials, Tls


class _NonsenseIsEmpty(grpc.aio.ServerInterceptor):
    """Bytes that are no message are read as an empty one, which every call with a cluster key refuses in one line. gRPC
    would log a traceback for each, and whoever can reach the port could fill the disk with them."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        decode = handler.request_deserializer

        def decode_or_empty(raw: bytes) -> Any:
            try:
                return decode(raw)
            except DecodeError:
                return decode(b"")

        return handler._replace(request_deserializer=decode_or_empty)


REQUEST_BYTES_MAX = 256 << 10
"""Of a message that carries no records: the largest names each partition of the largest cluster."""
CONNECTIONS_MAX = 8192
FIRST_SECONDS = 5.0
"""How long a call may take to say what it wants."""
PROMPT_SECONDS = 0.5
CERTIFIED_SECONDS = 5.0
"""How often a call that lasts is asked whether its caller's certificate still counts."""
SLOW_MAX = 16
"""So many calls may take longer than that: for one more, the oldest ends."""


class _FirstMessages:
    """The messages that begin calls, while they come: what callers hold of them is bounded for the whole process."""

    def __init__(self) -> None:
        self._slow: dict[asyncio.Timeout, None] = {}

    async def read(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(FIRST_SECONDS) as limit:
                late = asyncio.get_running_loop().call_later(PROMPT_SECONDS, self._make_room, limit)
                try:
                    return await context.read()
                finally:
                    late.cancel()
                    self._slow.pop(limit, None)
        except TimeoutError:
            raise TooManyCallers(
                f"the first message of a call was not here within {FIRST_SECONDS:.0f} seconds, or too many were slow"
            ) from None

    def _make_room(self, slow: asyncio.Timeout) -> None:
        if len(self._slow) >= SLOW_MAX:
            oldest = next(iter(self._slow))
            del self._slow[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        self._slow[slow] = None


_first_messages = _FirstMessages()


async def first_message(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """Of a call whose caller sends a stream. Raises when it does not come in time."""
    return await _first_messages.read(context)


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Each call only by those whose certificate permits it, and nothing of a caller is kept before that. gRPC reads the
    message of a call with only one before anybody is asked, so each is served as a call whose caller sends a stream: on
    the wire there is no difference."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        serve = self._guarded(getattr(handler, kind), str(handler_call_details.method), sends_one=kind.startswith("unary"))
        has_one_answer = kind.endswith("unary")
        make = grpc.stream_unary_rpc_method_handler if has_one_answer else grpc.stream_stream_rpc_method_handler
        return make(serve, handler.request_deserializer, handler.response_serializer)

    def _guarded(self, serve: Any, method: str, *, sends_one: bool) -> Any:
        async def said(messages: Any, context: Any) -> Any:
            await self._check(context, method)
            if not sends_one:
                return messages
            try:
                message = await first_message(context)
                if message is grpc.aio.EOF:
                    raise BadFrame("a call without its message")
                return message
            except WaltzError as error:
                await abort(context, error)

        async def answer(messages: Any, context: Any) -> Any:
            with self._while_certified(context):
                return await serve(await said(messages, context), context)

        async def stream(messages: Any, context: Any) -> Any:
            with self._while_certified(context):
                async with aclosing(serve(await said(messages, context), context)) as answers:
                    async for message in answers:
                        yield message

        return stream if inspect.isasyncgenfunction(serve) else answer

    async def _check(self, context: Any, method: str) -> None:
        if self._tls is None:
            return
        identity = caller_of(context)
        if identity is None or identity.key != self._tls.identity.key:
            who = "no identity of this cluster" if identity is None else f"the identity {identity.uri}"
            await abort(context, NotPermitted(f"the certificate of the caller has {who}"))
        if identity.role not in allowed(method):
            await abort(context, NotPermitted(f"{identity.name} has the role {identity.role}, which may not call {method}"))
        why = self._tls.refusal(certificate_of(context))
        if why is not None:
            await abort(context, NotPermitted(f"the certificate of {identity.name} {why}"))

    @contextmanager
    def _while_certified(self, context: Any) -> Iterator[None]:
        """A call ends some seconds after the certificate that it was made with: gRPC itself looks at it only once."""
        tls, found = self._tls, certificate_of(context) if self._tls is not None else None
        if tls is None or found is None:
            yield
            return
        serving = asyncio.current_task()
        assert serving is not None
        looking = asyncio.create_task(_end_with_certificate(context, serving, tls, found))
        try:
            yield
        finally:
            looking.cancel()


async def _end_with_certificate(context: Any, serving: asyncio.Task[Any], tls: Tls, certificate: x509.Certificate) -> None:
    why = None
    while why is None:
        await asyncio.sleep(CERTIFIED_SECONDS)
        why = tls.refusal(certificate)
    if context.done():
        return
    try:
        await abort(context, CannotConnect(f"the certificate of the caller {why}"))
    except grpc.aio.BaseError:  # it is aborted, or its caller has gone
        pass
    finally:
        serving.cancel()


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def create_server(message_bytes_max: int, tls: Tls | None = None) -> Server:
    options = [
        *options_for(message_bytes_max),
        ("grpc.so_reuseport", 0),  # with it two daemons share one port and nobody notices
        ("grpc.server_handshake_timeout_ms", 2_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        # Otherwise a stream that nobody reads takes megabytes from its caller, the faster it sends the more.
        ("grpc.http2.bdp_probe", 0),
    ]
    return grpc.aio.server(options=options, interceptors=[_Doorkeeper(tls), _NonsenseIsEmpty()])


def listen(server: Server, address: Address, tls: Tls | None = None) -> int:
    """The port that the server will listen on."""
    try:
        if tls is None:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), _server_credentials(tls))
    except RuntimeError as error:
        raise PortInUse(f"cannot listen on {address}: {error}") from error


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Looks at the files for every new connection. Callers without a certificate do not get through the handshake."""
    given = tls.current()

    def configuration(found: Credentials) -> Any:
        return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], root_certificates=found.ca)

    def changed() -> Any:
        nonlocal given
        found = tls.current()
        if found is given:
            return None
        given = found
        return configuration(found)

    return grpc.dynamic_ssl_server_credentials(configuration(given), changed, require_client_authentication=True)

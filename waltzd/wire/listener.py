"""The answering side of gRPC: which callers are let in, what is kept of them before that, and a port that stays open.

A call is refused for its caller's certificate before its message is read. Everything else about calls is in the services.

`Listener` is a port of a daemon: it listens for as long as the daemon lives, also when the transport ends its server by
itself. gRPC does that when one call has a path that is no text: a single frame of any stranger. The process would live on
and answer no call again. So there is another server at the same port a moment later. What still runs on the first one may
go on for a while and keeps no caller out: gRPC closes the port at once, and says so when the last call has ended.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from waltzd.errors import BadFrame, CannotConnect, NotPermitted, PortInUse, TooManyCallers, WaltzError
from waltzd.protocol import x509
from waltzd.protocol.address import Address
from waltzd.protocol.audit import NO_AUDIT, Auditor
from waltzd.protocol.role import Role
from waltzd.wire.audited import noted
from waltzd.wire.calls import allowed
from waltzd.wire.connections import CONNECTIONS_MAX, GrpcConnections
from waltzd.wire.grpc import Server, abort, caller_of, certificate_of, knocked, options_for
from waltzd.wire.limits import bounded
from waltzd.wire.tasks import tell_failure
from waltzd.wire.tls import CERTIFIED_SECONDS, Credentials, Tls

log = logging.getLogger("waltz.listener")


# -- callers -----------------------------------------------------------------------------------------------------------


class _Bounds(grpc.aio.ServerInterceptor):
    """Nothing is parsed that is larger than a message of its kind may be."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer
        kind = getattr(parse, "__self__", None)
        return handler if kind is None else handler._replace(request_deserializer=bounded(kind, parse))


IDLE_SECONDS = 60.0
"""After so long without a call a connection ends; whoever made it makes another one for its next call."""
FIRST_SECONDS = 5.0
"""How long a call may take to say what it wants."""
PROMPT_SECONDS = 0.5
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
    """Of a call whose caller sends a stream. Raises when it does not come in time, and what `next_message` raises."""
    return checked(await _first_messages.read(context))


async def next_message(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """Of the same call, later. Raises when it is too large."""
    return checked(await context.read())


def checked(message: Any) -> Any:
    """A message, or the end of the stream; raise why it was not parsed."""
    if isinstance(message, WaltzError):
        raise message
    return message


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Each call only for certificates that permit it, and nothing of a caller is kept before that. gRPC reads the message
    of a call with only one before it asks any interceptor, so each is served as a call whose caller sends a stream: on the
    wire there is no difference."""

    def __init__(self, tls: Tls | None, auditor: Auditor) -> None:
        self._tls = tls
        self._auditor = auditor

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
            with self._while_certified(context), noted(self._auditor, method, context) as heard:
                heard.request = await said(messages, context)
                heard.reply = await serve(heard.request, context)
                return heard.reply

        async def stream(messages: Any, context: Any) -> Any:
            with self._while_certified(context), noted(self._auditor, method, context) as heard:
                heard.request = await said(messages, context)
                async with aclosing(serve(heard.request, context)) as answers:
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


def create_server(message_bytes_max: int, tls: Tls | None = None, auditor: Auditor = NO_AUDIT) -> Server:
    options = [
        *options_for(message_bytes_max),
        ("grpc.so_reuseport", 0),  # with it two daemons share one port in silence
        ("grpc.server_handshake_timeout_ms", 2_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        # Otherwise a stream that is not read takes megabytes from its caller, the faster it sends the more.
        ("grpc.http2.bdp_probe", 0),
    ]
    return grpc.aio.server(options=options, interceptors=[_Doorkeeper(tls, auditor), _Bounds()])


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


# -- a port ------------------------------------------------------------------------------------------------------------


LOOK_SECONDS = 0.1
"""How often the server is asked whether it still is one."""
CONNECTIONS_SECONDS = 1.0
"""How often its connections are looked at."""
OPEN_SECONDS = 10.0
"""How long the socket of a server that has ended may be in the way of the next one."""
RETIRED_SECONDS = 60.0
RETIRED_MAX = 4
"""So long may calls go on at servers that have ended, and so many of those are kept: strangers end them."""
KNOCK_SECONDS = 2.0
FRESH_SECONDS = 1.0


class Listener:
    def __init__(
        self,
        address: Address,
        message_bytes_max: int,
        tls: Tls | None,
        auditor: Auditor = NO_AUDIT,
        *,
        roles: frozenset[Role] = frozenset(Role),
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`roles`: those that may make at least one call here. Connections of others do not stay."""
        self.address = address
        self._message_bytes_max = message_bytes_max
        self._tls = tls
        self._auditor = auditor
        self._connections = GrpcConnections(tls, roles, connections_max)
        self._server = self._open()
        self._add_services: Callable[[Server], None] = lambda server: None
        self._keeping: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._ended = 0
        self._closings = 0
        self._retired: dict[Server, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._heard: list[str] = []
        self._knocked: float | None = None

    def _open(self) -> Server:
        server = self._connections.opened(lambda: create_server(self._message_bytes_max, self._tls, self._auditor))
        self.address = replace(self.address, port=listen(server, self.address, self._tls))
        return server

    async def start(self, add_services: Callable[[Server], None], *, on_fatal: Callable[[BaseException], None]) -> None:
        """`on_fatal` does not come back; it is called when the port is lost for good."""
        self._add_services = add_services
        add_services(self._server)
        await self._server.start()
        self._keeping = asyncio.create_task(self._keep(on_fatal), name=f"listening at {self.address}")
        self._looking = asyncio.create_task(self._look(), name=f"connections at {self.address}")
        tell_failure(self._looking, on_fatal)

    async def _look(self) -> None:
        """On a thread: with thousands of connections to close a look takes a good part of a second."""
        while True:
            await asyncio.sleep(CONNECTIONS_SECONDS)
            closed = await asyncio.to_thread(self._connections.look)
            self._closings += closed > 0
            if closed and self._closings.bit_count() == 1:  # callers do not fill the log
                log.warning(
                    "closed %d connections at %s, for the %d. time: their role may call nothing there, or their name or "
                    "address has its share of all connections",
                    closed, self.address, self._closings,
                )  # fmt: skip

    async def _keep(self, on_fatal: Callable[[BaseException], None]) -> None:
        while True:
            try:
                # Without a limit it would not say what ended it before all calls have ended.
                while await self._server.wait_for_termination(LOOK_SECONDS):
                    pass
                return
            except Exception as error:  # noqa: BLE001  any error that ends the transport: callers need another one
                self._ended += 1
                if self._ended.bit_count() == 1:  # strangers do not fill the log
                    log.error("the transport ended its server at %s by itself, for the %d. time: %r; listening there again",
                              self.address, self._ended, error)  # fmt: skip
            try:
                self._retire(self._server)
                self._server = await self._open_again()
                self._add_services(self._server)
                await self._server.start()
            except Exception as error:
                on_fatal(error)
                raise

    def _retire(self, server: Server) -> None:
        self._end(server, RETIRED_SECONDS)
        for oldest in list(self._retired)[:-RETIRED_MAX]:
            self._end(oldest, None)

    def _end(self, server: Server, seconds: float | None) -> None:
        """None: all of its calls end now."""
        ending = asyncio.create_task(server.stop(seconds), name=f"ending a server at {self.address}")
        self._retired[server] = ending
        ending.add_done_callback(lambda _: self._retired.pop(server, None))

    async def _open_again(self) -> Server:
        """At once, unless the socket of the one before is still being closed, on a thread of its own."""
        async with asyncio.timeout(OPEN_SECONDS):
            while True:
                try:
                    return self._open()
                except PortInUse:
                    await asyncio.sleep(LOOK_SECONDS / 10)

    async def knock(self) -> list[str]:
        """Why callers do not get in, by a call of our own through this port, as it was a second ago at most."""
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._knocked is None or now - self._knocked >= FRESH_SECONDS:
                self._heard = await self._try_the_door()
                self._knocked = asyncio.get_running_loop().time()
            return self._heard

    async def _try_the_door(self) -> list[str]:
        ours = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address.host, self.address.host)
        why = await knocked(str(replace(self.address, host=ours)), self._tls, KNOCK_SECONDS)
        return [] if why is None else [f"nobody gets in at {self.address}: {why}"]

    async def stop(self, seconds: float) -> None:
        """No new calls; those that run may go on for so long."""
        if self._looking is not None:
            self._looking.cancel()
        if self._keeping is not None:
            await asyncio.gather(*(server.stop(seconds) for server in (self._server, *self._retired)))
            await self._keeping

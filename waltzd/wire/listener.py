"""The answering side of gRPC: which callers are accepted, what is kept of them before, and a port that stays open.

A call is refused for its caller's certificate before its message is read. The services do everything else.

`Listener` is a port of a daemon. It listens for as long as the daemon lives, even if the transport ends its server by
itself. gRPC does that when the path of a call is not valid text, which takes one frame of any stranger; the process
would live on and answer no call. So a new server is started at the same port. Calls on the old one may continue for a
while and keep no caller out, because gRPC closes its port at once.
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

from waltzd.errors import CannotConnect, NotPermitted, WaltzError
from waltzd.errors.operations import BadFrame, PortInUse, TooManyCallers
from waltzd.protocol.address import Address
from waltzd.protocol.audit import NO_AUDIT, Auditor
from waltzd.protocol.role import Certificate, Role
from waltzd.wire.calls import allowed
from waltzd.wire.codec import bounded, checked
from waltzd.wire.connections import CONNECTIONS_MAX, GrpcConnections
from waltzd.wire.grpc import Server, abort, caller_of, certificate_of, knocked, options_for
from waltzd.wire.servicer import audited_grpc
from waltzd.wire.tasks import tell_failure
from waltzd.wire.tls import CERTIFIED_SECONDS, Credentials, Tls

log = logging.getLogger("waltz.listener")


# -- callers -----------------------------------------------------------------------------------------------------------


class _Bounds(grpc.aio.ServerInterceptor):
    """Interceptor that parses no message larger than its type may be."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer
        kind = getattr(parse, "__self__", None)
        return handler if kind is None else handler._replace(request_deserializer=bounded(kind, parse))


IDLE_SECONDS = 60.0
"""Seconds without a call after which a connection is closed. The caller connects again for its next call."""
FIRST_SECONDS = 5.0
"""Seconds that the first message of a call may take."""
PROMPT_SECONDS = 0.5
SLOW_MAX = 16
"""Number of calls whose first message may take longer than `PROMPT_SECONDS`. For one more, the oldest is ended."""


class _FirstMessages:
    """Reads the first message of each call, and bounds for the whole process how many calls wait for it."""

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
                f"the first message of a call did not arrive within {FIRST_SECONDS:.0f} seconds, or too many were slow"
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
    """Return the first message of a call whose caller sends a stream. Raise if it does not arrive in time or is too
    large."""
    return checked(await _first_messages.read(context))


async def next_message(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """Return a later message of such a call. Raise if it is too large."""
    return checked(await context.read())


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Interceptor that admits calls by certificate, before it keeps anything of the caller. gRPC reads the message of a
    unary call before it asks an interceptor, so every call is served as one whose caller sends a stream. On the wire
    that makes no difference."""

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
            with self._while_certified(context), audited_grpc(self._auditor, method, context) as heard:
                heard.request = await said(messages, context)
                heard.reply = await serve(heard.request, context)
                return heard.reply

        async def stream(messages: Any, context: Any) -> Any:
            with self._while_certified(context), audited_grpc(self._auditor, method, context) as heard:
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
        """End the call some seconds after the certificate of its caller expires or is revoked. gRPC checks it only
        once."""
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


async def _end_with_certificate(context: Any, serving: asyncio.Task[Any], tls: Tls, certificate: Certificate) -> None:
    why = None
    while why is None:
        await asyncio.sleep(CERTIFIED_SECONDS)
        why = tls.refusal(certificate)
    if context.done():
        return
    try:
        await abort(context, CannotConnect(f"the certificate of the caller {why}"))
    except grpc.aio.BaseError:  # the call was aborted, or its caller has disconnected
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
        # With the probe, gRPC would buffer megabytes of a stream that nobody reads, and more the faster its caller sends.
        ("grpc.http2.bdp_probe", 0),
    ]
    return grpc.aio.server(options=options, interceptors=[_Doorkeeper(tls, auditor), _Bounds()])


def listen(server: Server, address: Address, tls: Tls | None = None) -> int:
    """Bind a server to an address; return its port. Raise `PortInUse` if that fails."""
    try:
        if tls is None:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), _server_credentials(tls))
    except RuntimeError as error:
        raise PortInUse(f"cannot listen on {address}: {error}") from error


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials that read the certificate files again for every new connection. Callers without a certificate
    fail the handshake."""
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
"""Seconds between two checks whether the server has ended."""
CONNECTIONS_SECONDS = 1.0
"""Seconds between two looks at the connections of the server."""
OPEN_SECONDS = 10.0
"""Seconds that the socket of a server that has ended may block the next one."""
RETIRED_SECONDS = 60.0
RETIRED_MAX = 4
"""Number of servers that have ended and are kept for their running calls. Strangers can end servers, so it is bounded."""
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
        """Bind a port. `roles` may make at least one call here; connections of other roles are closed."""
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
        """Start serving. `on_fatal` does not return; it is called if the port is lost for good."""
        self._add_services = add_services
        add_services(self._server)
        await self._server.start()
        self._keeping = asyncio.create_task(self._keep(on_fatal), name=f"listening at {self.address}")
        self._looking = asyncio.create_task(self._look(), name=f"connections at {self.address}")
        tell_failure(self._looking, on_fatal)

    async def _look(self) -> None:
        """Close connections that may not stay, on a thread: with thousands of them a look takes a good part of a
        second."""
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
                # Without a timeout it returns only when all calls have ended, and an error of the server shows that late.
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
        """Stop a server; without `seconds`, end its calls at once."""
        ending = asyncio.create_task(server.stop(seconds), name=f"ending a server at {self.address}")
        self._retired[server] = ending
        ending.add_done_callback(lambda _: self._retired.pop(server, None))

    async def _open_again(self) -> Server:
        """Bind the port again, once the socket of the server before is closed. This runs in a task of its own."""
        async with asyncio.timeout(OPEN_SECONDS):
            while True:
                try:
                    return self._open()
                except PortInUse:
                    await asyncio.sleep(LOOK_SECONDS / 10)

    async def knock(self) -> list[str]:
        """Return why callers cannot get in, by a call of our own through this port, at most a second old. An empty list
        means that they can."""
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._knocked is None or now - self._knocked >= FRESH_SECONDS:
                self._heard = await self._try_the_door()
                self._knocked = asyncio.get_running_loop().time()
            return self._heard

    async def _try_the_door(self) -> list[str]:
        ours = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address.host, self.address.host)
        why = await knocked(str(replace(self.address, host=ours)), self._tls, KNOCK_SECONDS)
        return [] if why is None else [f"callers cannot connect to {self.address}: {why}"]

    async def stop(self, seconds: float) -> None:
        """Accept no new calls; let the running ones continue for `seconds`."""
        if self._looking is not None:
            self._looking.cancel()
        if self._keeping is not None:
            await asyncio.gather(*(server.stop(seconds) for server in (self._server, *self._retired)))
            await self._keeping

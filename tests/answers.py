"""A service for tests that answers some of its calls and refuses the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from waltzd.errors import CannotConnect, WaltzError
from waltzd.wire.calls import CALLS, Call
from waltzd.wire.codec import packed_error
from waltzd.wire.grpc import ERROR_KEY
from waltzd.wire.servicer import Host, Origin, answered


class Answers(Host):
    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in {call.name for call in CALLS.values()}:
            raise AttributeError(name)

        async def refuse(request: Any, origin: Any) -> None:
            raise CannotConnect(f"nobody answers {name} in this test")

        return refuse


def add_threaded(server: grpc.Server, name: str, host: Answers) -> None:
    """Serve the calls with one reply of a service on the threads of gRPC, for a test that has no event loop."""

    def handler(call: Call[Any]) -> grpc.RpcMethodHandler[Any, Any]:
        async def ask(request: Any) -> Any:
            return await answered(host, call, request, Origin())

        def answer(request: Any, context: Any) -> Any:
            try:
                return call.pack(asyncio.run(ask(request)))
            except WaltzError as error:
                context.set_trailing_metadata(((ERROR_KEY, packed_error(error)),))
                context.abort(grpc.StatusCode[error.status], error.message)

        return grpc.unary_unary_rpc_method_handler(answer, call.request.FromString, call.reply.SerializeToString)

    handlers = {call.name: handler(call) for call in CALLS.values() if call.service == name}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"waltz.v1.{name}", handlers),))

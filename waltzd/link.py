"""What goes over a wire: frames in and out, errors that keep their class, and the settings of gRPC that matter.

`Link` is one two-way stream of frames. The daemons' logic is written against it, so that a simulated network, or another
transport, can stand in for gRPC. Errors travel as an `ErrorDetail` in the trailing metadata; the gRPC status beside it is
for tools that know nothing of Waltz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias
from uuid import UUID

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError

from waltzd.errors import BadFrame, CannotConnect, PortInUse, WaltzError, tree
from waltzd.messages import detail_of, error_of_detail
from waltzd.record import OVERHEAD_BYTES, Run, bounds_of
from waltzd.setting import Address
from waltzd.wire_pb2 import ErrorDetail

ERROR_KEY = "waltz-error-bin"
_ERRORS = tree()
_STATUS = {
    "W1001": grpc.StatusCode.INVALID_ARGUMENT,
    "W2001": grpc.StatusCode.ABORTED,
    "W2002": grpc.StatusCode.PERMISSION_DENIED,
    "W2004": grpc.StatusCode.FAILED_PRECONDITION,
    "W2005": grpc.StatusCode.FAILED_PRECONDITION,
    "W2006": grpc.StatusCode.INVALID_ARGUMENT,
    "W2007": grpc.StatusCode.NOT_FOUND,
    "W2008": grpc.StatusCode.UNAVAILABLE,
    "W2009": grpc.StatusCode.FAILED_PRECONDITION,
    "W2010": grpc.StatusCode.FAILED_PRECONDITION,
    "W2011": grpc.StatusCode.OUT_OF_RANGE,
    "W2012": grpc.StatusCode.ALREADY_EXISTS,
    "W2013": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "W2014": grpc.StatusCode.FAILED_PRECONDITION,
    "W2015": grpc.StatusCode.UNAVAILABLE,
    "W3003": grpc.StatusCode.DATA_LOSS,
    "W3005": grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True)
class Frame:
    """Records on their way to a replica, and what is known to be committed."""

    run: Run
    committed: int


class Link(Protocol):
    """One two-way stream: frames come in, marks go out."""

    @property
    def peer(self) -> str: ...
    async def receive(self) -> Frame | None:
        """The next frame, or None when the other side has no more."""
        ...

    async def send(self, durable_id: int) -> None: ...
    async def refuse(self, error: WaltzError) -> None:
        """The last message: why the stream ends."""
        ...


# -- runs and findings as columns --------------------------------------------------------------------------------------


def lengths_of(run: Run) -> bytes:
    return (np.diff(run.bounds) - OVERHEAD_BYTES).astype(">u4").tobytes()


def run_of(first_id: int, lengths: bytes, records: bytes) -> Run:
    """The run that a frame says it carries; its checksums are checked by whoever uses it."""
    if len(lengths) % 4:
        raise BadFrame(f"the lengths of a frame have {len(lengths)} bytes, which is no multiple of 4")
    if first_id < 0:
        raise BadFrame(f"a frame starts at the id {first_id}; ids start at 0")
    bounds = bounds_of(np.frombuffer(lengths, ">u4").astype(np.int64))
    if bounds[-1] != len(records):
        raise BadFrame(
            f"a frame has {len(records)} bytes of records; {len(bounds) - 1} records of the lengths that it gives have "
            f"{bounds[-1]}"
        )
    return Run(first_id, memoryview(records), bounds)


def key_of(raw: bytes) -> UUID:
    if len(raw) != 16:
        raise BadFrame(f"a cluster key has 16 bytes; this one has {len(raw)}")
    return UUID(bytes=raw)


# -- errors ------------------------------------------------------------------------------------------------------------


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: WaltzError) -> NoReturn:
    status = _STATUS.get(error.code, grpc.StatusCode.INTERNAL)
    metadata = ((ERROR_KEY, detail_of(error).SerializeToString()),)
    await context.abort(status, f"{error.code} {error.message}"[:1000], metadata)
    raise AssertionError("abort returned")


def error_of(error: grpc.aio.AioRpcError) -> WaltzError:
    """What the other side meant, or that it could not be reached."""
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_KEY:
            assert isinstance(value, bytes)
            return error_of_detail(ErrorDetail.FromString(value))
    status = error.code()
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _ERRORS["W2013"](error.details() or "a message is too large")
    return CannotConnect(f"the call failed: {status.name.lower().replace('_', ' ')}: {error.details()}")


# -- gRPC --------------------------------------------------------------------------------------------------------------


def _options(message_bytes_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.max_metadata_size", 16 << 10),
        # Without the ping time-out a stopped peer is not noticed: the kernel still acknowledges for it.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


Server: TypeAlias = grpc.aio.Server


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


def create_server(message_bytes_max: int) -> Server:
    options = [
        *_options(message_bytes_max),
        ("grpc.so_reuseport", 0),  # with it two daemons share one port and nobody notices
        ("grpc.server_handshake_timeout_ms", 2_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 1024),
    ]
    return grpc.aio.server(options=options, interceptors=[_NonsenseIsEmpty()])


def listen(server: Server, address: Address) -> int:
    """The port that the server will listen on."""
    try:
        return server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise PortInUse(f"cannot listen on {address}: {error}") from error


def open_channel(address: str, message_bytes_max: int = 64 << 20) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_options(message_bytes_max))

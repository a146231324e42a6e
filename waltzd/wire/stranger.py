"""Finding out what answers at an address where no server of Waltz does, by one look at the port.

The probe changes nothing on the other side, and believes nothing beyond what kind of program it is. With TLS nothing is
sent: the process that completes the handshake has a certificate of the cluster, however slowly it answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from waltzd.errors import CannotConnect, TlsMismatch, WaltzError
from waltzd.errors.operations import WrongPeer
from waltzd.protocol.address import parse_address
from waltzd.protocol.role import Role
from waltzd.wire.tls import Tls, certificate_at, speaks_tls

LOOK_SECONDS = 1.0
_HTTP2_SETTINGS = 4
_PORTS = {
    "/waltz.v1.Replica/Quiet": "the port of a storage, which is for servers",
    "/waltz.v1.ServerAdmin/Describe": "the port of a server for operators",
    "/waltz.v1.StorageAdmin/Describe": "the port of a storage for operators",
}
_NEXT = "give the address at which the servers listen for applications: `listen` in the configuration of a server"


async def stranger_at(address: str, tls: Tls | None) -> WaltzError | None:
    """Return why no gRPC server can be at an address; None if there may be one. `tls` is what we connect with."""
    try:
        place = parse_address(address)
        if tls is not None and await _may_speak_tls(address, tls):
            return None
        async with asyncio.timeout(LOOK_SECONDS):
            reader, writer = await asyncio.open_connection(place.host, place.port)
    except ConnectionRefusedError:
        return CannotConnect(f"nothing listens at {address}")
    except (OSError, ValueError, TimeoutError):
        return None
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            found = await reader.read(64)
    except TimeoutError:  # a server that hangs says nothing either
        return None
    except OSError:
        found = b""
    finally:
        writer.transport.abort()
    if found.startswith(b"HTTP/"):
        return WrongPeer(f"an HTTP server answers at {address}", next_step=_NEXT)
    if len(found) > 3 and found[3] == _HTTP2_SETTINGS:
        return None
    if tls is None and await speaks_tls(address):  # the call itself says that it needs a certificate
        return None
    return WrongPeer(f"another program answers at {address}, one that does not speak gRPC", next_step=_NEXT)


async def _may_speak_tls(address: str, tls: Tls) -> bool:
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            await certificate_at(tls, parse_address(address), role=Role.SERVER, name=None)
    except TlsMismatch:
        return False
    except CannotConnect as error:
        return not isinstance(error.__cause__, ConnectionRefusedError)
    except TimeoutError:
        return True
    return True


async def port_behind(channel: Any, address: str) -> WrongPeer:
    """Return which port of Waltz a channel has reached instead of the one for applications."""
    for call, name in _PORTS.items():
        try:
            await channel.unary_unary(call)(b"", timeout=LOOK_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
                continue
        return WrongPeer(f"{address} is {name}", next_step=_NEXT)
    return WrongPeer(f"another program answers at {address}, one that speaks gRPC", next_step=_NEXT)

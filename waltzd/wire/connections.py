"""Limits on the connections of a port: how many, from whom, and how long without a call.

A port takes some thousand connections, and each holder has a share of them. A holder is the URI in a certificate, or an
address if there are no certificates. A holder may have four connections for each free one, so a single holder leaves a
fifth of them to others.

gRPC accepts connections by itself and shows a caller only with its first call. `GrpcConnections` therefore asks gRPC's
channelz, which lists the connections of a server with their certificates. It closes those that may not stay by shutting
down the socket of this process with the same peer. A connection is examined only once after it was accepted.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # what grpcio-channelz stands on

from waltzd.protocol.role import Identity, Role
from waltzd.wire.tls import Tls

CONNECTIONS_MAX = 8192
SHARE = 4
"""Number of connections that a holder may have for each free one."""

T = TypeVar("T")
_Peer: TypeAlias = tuple[str, int, int]
"""Address and port of the other side, and our own port."""


class ConnectionShares:
    """The connections of one port, counted by holder."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def take(self, holder: str) -> bool:
        """Count one more connection of a holder; return False if its share is used up or the port is full."""
        free = self._most - self._held.total()
        if free <= 0 or self._held[holder] >= SHARE * free:
            return False
        self._held[holder] += 1
        return True

    def give(self, holder: str) -> None:
        """Count one connection less."""
        self._held[holder] -= 1
        if self._held[holder] <= 0:
            del self._held[holder]


@dataclass
class _Standing:
    """A connection that gRPC has accepted."""

    peer: _Peer
    holder: str | None
    """Holder of the connection; None if it exceeded the share and must be closed."""
    has_right: bool
    """True if the role of the holder may make any call at this port."""
    calls: int
    """Number of calls on the connection at the last look."""


class GrpcConnections:
    def __init__(self, tls: Tls | None, roles: frozenset[Role], most: int = CONNECTIONS_MAX) -> None:
        """Watch a port. `roles` may make at least one call there."""
        self._tls = tls
        self._roles = roles
        self._shares = ConnectionShares(most)
        self._servers: list[int] = []
        self._standing: dict[int, _Standing] = {}
        """Connections by their number in channelz, which rises with each connection of the process."""

    def opened(self, make: Callable[[], T]) -> T:
        """Make a server with `make`, and watch its connections from now on."""
        before = set(_servers())
        made = make()
        self._servers += [server for server in _servers() if server not in before]
        return made

    def look(self) -> int:
        """Close each connection that may not stay; return how many.

        A connection over the share of its holder is closed at once. A connection whose role may call nothing here stays
        until the next look, so that its call is answered with a refusal. It is closed then, unless a call runs or was
        made meanwhile.
        """
        listed = self._listed()
        for number in [number for number in self._standing if number not in listed]:
            gone = self._standing.pop(number)
            if gone.holder is not None:
                self._shares.give(gone.holder)
        unwanted = []
        for number in listed:
            known = self._standing.get(number)
            if known is None:
                known = self._enter(number)
                if known is not None and known.holder is None:
                    unwanted.append(known.peer)
            elif known.holder is None or (not known.has_right and self._is_quiet(number, known)):
                unwanted.append(known.peer)
        _shut_down(unwanted)
        return len(unwanted)

    def _listed(self) -> dict[int, None]:
        found: dict[int, None] = {}
        for server in list(self._servers):
            try:
                page = json.loads(cygrpc.channelz_get_server_sockets(server, 0, 1 << 20))
            except ValueError:  # the server has ended
                self._servers.remove(server)
                continue
            found.update((int(one["socketId"]), None) for one in page.get("socketRef", ()))
        return found

    def _enter(self, number: int) -> _Standing | None:
        about = _socket(number)
        peer = None if about is None else _peer(about)
        if about is None or peer is None:  # it has ended meanwhile, or is no TCP connection
            return None
        has_right, holder = True, peer[0]
        if self._tls is not None:
            identity = _identity(about)
            has_right = identity is not None and identity.key == self._tls.identity.key and identity.role in self._roles
            if identity is not None:
                holder = identity.uri
        standing = _Standing(peer, holder if self._shares.take(holder) else None, has_right, _calls(about)[0])
        self._standing[number] = standing
        return standing

    def _is_quiet(self, number: int, known: _Standing) -> bool:
        about = _socket(number)
        if about is None:
            return False
        made, running = _calls(about)
        is_quiet, known.calls = running == 0 and made == known.calls, made
        return is_quiet


# -- channelz ----------------------------------------------------------------------------------------------------------


def _servers() -> list[int]:
    found: list[int] = []
    while True:
        page = json.loads(cygrpc.channelz_get_servers(found[-1] + 1 if found else 0))
        found += [int(one["ref"]["serverId"]) for one in page.get("server", ())]
        if page.get("end") or not page.get("server"):
            return found


def _socket(number: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(cygrpc.channelz_get_socket(number))["socket"]
    except ValueError:  # it has ended
        return None
    return found


def _peer(about: dict[str, Any]) -> _Peer | None:
    there, here = (about.get(side, {}).get("tcpipAddress") for side in ("remote", "local"))
    if there is None or here is None:
        return None
    return str(_plain(ipaddress.ip_address(base64.b64decode(there["ipAddress"])))), int(there["port"]), int(here["port"])


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address that an IPv6 socket shows in mapped form."""
    return getattr(address, "ipv4_mapped", None) or address


def _identity(about: dict[str, Any]) -> Identity | None:
    pem = base64.b64decode(about.get("security", {}).get("tls", {}).get("remoteCertificate", ""))
    try:
        return Identity.of_certificate(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))
    except ValueError:
        return None


def _calls(about: dict[str, Any]) -> tuple[int, int]:
    """Return how many calls were made on a connection, and how many of them run."""
    data = about["data"]
    made = int(data["streamsStarted"])
    return made, made - int(data["streamsSucceeded"]) - int(data["streamsFailed"])


def _shut_down(peers: Iterable[_Peer]) -> None:
    """Shut down the connections of this process with these peers. Each is examined through a copy of its descriptor,
    because the number itself may be reused at any moment."""
    wanted = set(peers)
    if not wanted:
        return
    for name in os.listdir("/dev/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            if stat.S_ISSOCK(os.fstat(copy).st_mode):
                with socket.socket(fileno=os.dup(copy)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        (host, port), ours = one.getpeername()[:2], one.getsockname()[1]
                        if (_bare(host), port, ours) in wanted:
                            one.shutdown(socket.SHUT_RDWR)
        except OSError:  # the socket is not connected
            continue
        finally:
            os.close(copy)


def _bare(host: str) -> str:
    return str(_plain(ipaddress.ip_address(host.partition("%")[0])))

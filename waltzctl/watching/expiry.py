"""When certificates end: ours by a handshake with itself, in memory, and each daemon's by a handshake with the daemon.

Only the handshake is made; nothing is asked. What cannot be found out is None.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from waltzd.protocol.address import parse_address
from waltzd.protocol.role import Role, dns_name
from waltzd.wire.tls import Tls

DAY_SECONDS = 86_400.0
Daemon = tuple[str, Role, str]
"""Name, role, address."""


async def days_left(tls: Tls, daemons: Sequence[Daemon], *, seconds: float) -> dict[str, float | None]:
    found = await asyncio.gather(*(_days_of(tls, role, address, seconds) for _, role, address in daemons))
    return dict(zip((name for name, _, _ in daemons), found, strict=True))


async def _days_of(tls: Tls, role: Role, address: str, seconds: float) -> float | None:
    try:
        place = parse_address(address)
        context = tls.calling()
        context.set_alpn_protocols(["h2"])
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(
                place.host, place.port, ssl=context, server_hostname=dns_name(tls.identity.key, role)
            )
    except (OSError, ssl.SSLError, ValueError):  # silent, or no certificate that counts: other checks say so
        return None
    found = writer.get_extra_info("peercert")
    writer.transport.abort()
    return _days(found)


def own_days(certificate: str, key: str, ca: str) -> float | None:
    """What the other side of a connection would see. The contexts are our own: nothing else ever uses them."""
    answering, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname, calling.verify_mode = False, ssl.CERT_NONE
    server, client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        for context in (answering, calling):
            context.load_cert_chain(certificate, key, password=lambda: "")
            context.load_verify_locations(ca)
        answering.verify_mode = ssl.CERT_REQUIRED
        here = calling.wrap_bio(server, client)
        there = answering.wrap_bio(client, server, server_side=True)
        for side in (here, there, here, there):  # as many turns as a handshake has
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        return _days(there.getpeercert())
    except (OSError, ssl.SSLError, ValueError):  # what is wrong with it, connections say
        return None


def _days(certificate: Mapping[str, object] | None) -> float | None:
    ends = (certificate or {}).get("notAfter")
    return (ssl.cert_time_to_seconds(ends) - time.time()) / DAY_SECONDS if isinstance(ends, str) else None

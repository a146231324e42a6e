"""The console over TLS, for browsers elsewhere: a certificate that the console shows, and one that each browser shows.

A browser's certificate says who a person is as that of a terminal does: the role operator or observer, of this cluster.
One authority may sign those of daemons and applications, too; they are refused. Over TLS there is no token.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from starlette.types import ASGIApp, Receive, Scope, Send

from waltzctl.console.http import BoundedProtocol
from waltzd.errors import BadArgument, NotPermitted
from waltzd.protocol.role import Identity, Role
from waltzd.wire.tls import identity_of

IDENTITY = "waltz.identity"
"""In the scope of a request: who the browser is."""
LOOKS = (Role.OPERATOR, Role.OBSERVER)


@dataclass(frozen=True, kw_only=True)
class Files:
    certificate: str
    key: str
    ca: str
    """Who signs for browsers."""

    def context(self) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            made.load_cert_chain(self.certificate, self.key, password=lambda: "")
            made.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise BadArgument(
                f"{self.certificate}, {self.key} and {self.ca} cannot be used: {error}",
                not_done="the console did not start",
            ) from error
        made.verify_mode = ssl.CERT_REQUIRED
        return made


def check_browser(identity: Identity | None, key: UUID) -> None:
    """Raises unless a person of this cluster has it."""
    if identity is None:
        raise NotPermitted("the certificate of this browser does not say whose it is", not_done="nothing was shown")
    if identity.key != key:
        raise NotPermitted(f"the certificate of {identity.name} is for another cluster", not_done="nothing was shown")
    if identity.role not in LOOKS:
        raise NotPermitted(
            f"the certificate of {identity.name} has the role {identity.role}", not_done="nothing was shown",
            next_step=f"use one with the role {Role.OPERATOR}, or {Role.OBSERVER} to look",
        )  # fmt: skip


class Naming(BoundedProtocol):
    """A connection that tells the application whose certificate was shown."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        identity = identity_of(transport.get_extra_info("ssl_object"))
        inner: ASGIApp = self.app

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            await inner({**scope, IDENTITY: identity}, receive, send)

        self.app = named

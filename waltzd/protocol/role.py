"""Who a process is: what its certificate says, one role in one cluster, under one name. Pure.

The certificate says it as a URI among its subject alternative names, and the same reader judges both sides of a call. Names
of other types (DNS, e-mail) are no identity, whatever their text. DNS names stand beside the URI in the certificates of
daemons, because TLS libraries insist on one. No host is named anywhere: that a server answers as a server, and the storage
`s1` as the storage `s1`, holds on any machine.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from waltzd.protocol import x509


class Role(enum.StrEnum):
    SERVER = "server"
    STORAGE = "storage"
    CLIENT = "client"
    """An application."""
    OPERATOR = "operator"
    """A person with `waltzctl`, or a tool of theirs."""
    OBSERVER = "observer"
    """The same, to look only: how daemons and partitions are, no transaction, and no change."""


_URI = re.compile(r"waltz://([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/role/([a-z]+)/([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def dns_name(key: UUID, role: Role, name: str | None = None) -> str:
    """What the certificate of the answering side must be valid for."""
    return f"{name}.{role}.{key}.waltz" if name is not None else f"{role}.{key}.waltz"


@dataclass(frozen=True)
class Identity:
    key: UUID
    """The cluster."""
    role: Role
    name: str

    @property
    def uri(self) -> str:
        return f"waltz://{self.key}/role/{self.role}/{self.name}"

    @property
    def dns_names(self) -> tuple[str, str]:
        return dns_name(self.key, self.role), dns_name(self.key, self.role, self.name)

    @staticmethod
    def among(names: Iterable[str]) -> Identity | None:
        """The one identity among the names of a certificate; none, or more than one, is no identity."""
        found = [match for name in names if (match := _URI.fullmatch(name))]
        if len(found) != 1 or found[0][2] not in set(Role):
            return None
        return Identity(UUID(found[0][1]), Role(found[0][2]), found[0][3])

    @staticmethod
    def of_certificate(certificate: bytes) -> Identity | None:
        """Of a certificate in DER, whose signature the handshake has checked."""
        found = x509.certificate(certificate)
        return None if found is None else Identity.among(found.uris)

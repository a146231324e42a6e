"""The identity of a process in its certificate: one role in one cluster, under one name. Pure.

The identity is a URI among the subject alternative names of the certificate. The same code checks both sides of a call.
Names of other types (DNS, e-mail) are never an identity, whatever their text is. The certificates of daemons also have DNS
names, because TLS libraries require one. No host is named: a server or a storage may run on any machine.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from waltzd.protocol.x509 import read_certificate


class Role(enum.StrEnum):
    SERVER = "server"
    STORAGE = "storage"
    CLIENT = "client"
    """Role of an application."""
    OPERATOR = "operator"
    """Role of a person with `waltzctl`, and of their tools."""
    OBSERVER = "observer"
    """Role of a person or a tool that may only read the state of daemons and partitions, and no transactions."""


_URI = re.compile(r"waltz://([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/role/([a-z]+)/([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def dns_name(key: UUID, role: Role, name: str | None = None) -> str:
    """Return the DNS name that the certificate of the called process must have."""
    return f"{name}.{role}.{key}.waltz" if name is not None else f"{role}.{key}.waltz"


@dataclass(frozen=True)
class Identity:
    key: UUID
    """Key of the cluster."""
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
        """Return the identity among the names of a certificate; None if there is none or more than one."""
        found = [match for name in names if (match := _URI.fullmatch(name))]
        if len(found) != 1 or found[0][2] not in set(Role):
            return None
        return Identity(UUID(found[0][1]), Role(found[0][2]), found[0][3])

    @staticmethod
    def of_certificate(certificate: bytes) -> Identity | None:
        """Return the identity in a certificate in DER, whose signature the TLS handshake has checked."""
        found = read_certificate(certificate)
        return None if found is None else Identity.among(found.uris)

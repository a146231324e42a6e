"""Which role may call what. A process is what its certificate says: one role in one cluster, under one name. Pure.

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


# -- who may call what -------------------------------------------------------------------------------------------------


_SERVERS = frozenset({Role.SERVER})
_READERS = frozenset({Role.SERVER, Role.OPERATOR})
"""Of what is committed."""
_OPERATORS = frozenset({Role.OPERATOR})
_LOOKING = frozenset({Role.OPERATOR, Role.OBSERVER})
_APPLICATIONS = frozenset({Role.CLIENT, Role.OPERATOR})
_USERS = _APPLICATIONS | _SERVERS
"""Of a log. Servers, of the group log alone."""

RIGHTS: dict[str, frozenset[Role]] = {
    "/waltz.v1.Replica/Open": _SERVERS,
    "/waltz.v1.Replica/Quiet": _SERVERS,
    "/waltz.v1.Replica/SetLowMark": _SERVERS,
    "/waltz.v1.Replica/Truncate": _SERVERS,
    "/waltz.v1.Replica/Read": _READERS,
    "/waltz.v1.Replica/ReadLocks": _SERVERS,
    "/waltz.v1.Replica/FindTime": _SERVERS,
    "/waltz.v1.Replica/ListSegments": _READERS | _LOOKING,
    "/waltz.v1.Replica/Archive": _SERVERS,
    "/waltz.v1.Replica/CheckArchive": _SERVERS,
    "/waltz.v1.Replica/Fork": _SERVERS,
    "/waltz.v1.Replica/Trim": _SERVERS,
    "/waltz.v1.Replica/BackUp": _SERVERS,
    "/waltz.v1.Replica/SaveMetadata": _SERVERS,
    "/waltz.v1.StorageAdmin/Describe": _LOOKING | _SERVERS,
    "/waltz.v1.StorageAdmin/CreatePartitions": _OPERATORS,
    "/waltz.v1.StorageAdmin/RemovePartitions": _OPERATORS,
    "/waltz.v1.StorageAdmin/SetAvailable": _OPERATORS,
    "/waltz.v1.StorageAdmin/Verify": _OPERATORS,
    "/waltz.v1.StorageAdmin/Digest": _OPERATORS,
    "/waltz.v1.StorageAdmin/Events": _LOOKING,
    "/waltz.v1.StorageAdmin/Fence": _OPERATORS,
    "/waltz.v1.StorageAdmin/Restore": _OPERATORS,
    "/waltz.v1.StorageAdmin/DeleteSetAside": _OPERATORS,
    "/waltz.v1.Log/Locate": _APPLICATIONS | _LOOKING | _SERVERS,
    "/waltz.v1.Log/Register": _USERS,
    "/waltz.v1.Log/Mount": _USERS,
    "/waltz.v1.Log/HighWaterMark": _USERS | _LOOKING,
    "/waltz.v1.Log/Fetch": _USERS,
    "/waltz.v1.Log/FindTime": _APPLICATIONS | _LOOKING,
    "/waltz.v1.Log/Attend": _APPLICATIONS,
    "/waltz.v1.Log/MakeGroup": _APPLICATIONS,
    "/waltz.v1.Log/GetGroup": _APPLICATIONS | _LOOKING,
    "/waltz.v1.ServerAdmin/Describe": _LOOKING | _SERVERS,
    "/waltz.v1.ServerAdmin/Drain": _OPERATORS,
    "/waltz.v1.ServerAdmin/ExplainLock": _LOOKING,
    "/waltz.v1.ServerAdmin/Events": _LOOKING,
    "/waltz.v1.ServerAdmin/ListClients": _LOOKING,
    "/waltz.v1.ServerAdmin/DisconnectClient": _OPERATORS,
    "/waltz.v1.ServerAdmin/ListGroups": _LOOKING,
    "/waltz.v1.ServerAdmin/ListParked": _LOOKING,
    "/waltz.v1.ServerAdmin/SetGroup": _OPERATORS,
    "/waltz.v1.ServerAdmin/RemoveGroup": _OPERATORS,
    "/waltz.v1.ServerAdmin/PassEntry": _OPERATORS,
    "/waltz.v1.ServerAdmin/ChangeGroup": _OPERATORS,
}
"""Which roles may make a call; one that is not listed is refused to all. Operators read what is committed: the storage
refuses a call of theirs that carries a session. Observers see no payload and no digest of one."""

RIGHTS_OF_TOOLS: dict[str, frozenset[Role]] = {
    "/grpc.health.v1.Health/Check": _APPLICATIONS | _LOOKING | _SERVERS,
    "/grpc.health.v1.Health/Watch": _APPLICATIONS | _LOOKING | _SERVERS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}
"""The same for the calls that gRPC itself defines."""


def allowed(method: str) -> frozenset[Role]:
    """Who may make this call."""
    return RIGHTS.get(method) or RIGHTS_OF_TOOLS.get(method, frozenset())


def roles_at(*services: str) -> frozenset[Role]:
    """Who may make at least one call of these services."""
    methods = [method for method in (*RIGHTS, *RIGHTS_OF_TOOLS) if method.split("/")[1] in services]
    return frozenset().union(*map(allowed, methods))

"""Who is let in at the port of mounts without gRPC; what is said there is tested with that of gRPC (`test_log_service`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from waltzd.errors import NotPermitted
from waltzd.protocol.address import Address
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.stream_port import StreamPort

KEY = UUID(int=7)


@dataclass
class Caller:
    """A connection, as far as it says who is there."""

    identity: Identity | None
    refusal: str | None = None

    def end_with_certificate(self, _tls: Any) -> str | None:
        return self.refusal


@pytest.mark.parametrize(
    ("caller", "why"),
    [
        (Caller(Identity(KEY, Role.CLIENT, "app")), None),
        (Caller(Identity(KEY, Role.OPERATOR, "ann")), None),
        (Caller(Identity(KEY, Role.STORAGE, "s1")), "the role storage"),
        (Caller(Identity(KEY, Role.SERVER, "one")), None),
        (Caller(Identity(KEY, Role.OBSERVER, "eve")), "the role observer"),
        (Caller(Identity(UUID(int=8), Role.CLIENT, "app")), "has the identity"),
        (Caller(None), "no identity"),
        (Caller(Identity(KEY, Role.CLIENT, "app"), "was revoked"), "was revoked"),
    ],
)
def test_only_users_of_the_log_mount(caller: Any, why: str | None) -> None:
    ours: Any = type("Tls", (), {"identity": Identity(KEY, Role.SERVER, "one")})()
    port = StreamPort(Address("127.0.0.1", 0), 1 << 20, ours)
    if why is None:
        assert port._identity(caller) == caller.identity.uri
    else:
        with pytest.raises(NotPermitted, match=why):
            port._identity(caller)
    assert StreamPort(Address("127.0.0.1", 0), 1 << 20, None)._identity(caller) == "", (
        "without certificates nobody is known"
    )

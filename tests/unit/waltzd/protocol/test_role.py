"""Identities in certificates."""

from __future__ import annotations

from uuid import UUID

from waltzd.protocol.role import Identity, Role


def test_an_observer_has_an_identity_of_its_own() -> None:
    assert Identity.among([f"waltz://{UUID(int=7)}/role/observer/eve"]) == Identity(UUID(int=7), Role.OBSERVER, "eve")

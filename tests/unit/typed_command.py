"""What a person typed, for tests of a command whose plan is made and carried out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def typed_command(*, where: str = "") -> Any:
    """Return a command that only keeps how its plan is made, as `prepare`. `where`: address of the cluster."""
    typed = SimpleNamespace(target=SimpleNamespace(tls=None, where=where), prepare=None)

    def perform(prepare: Any) -> int:
        typed.prepare = prepare
        return 0

    typed.perform = perform
    return typed

"""What a replica says of itself: the same value in the storage that says it and in whoever asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from waltzd.finding import Finding


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """Where a replica stands: what it votes with, and why it does not."""

    partition: int
    incarnation: UUID
    promised_session: int
    session: int
    """The session whose low-water mark was set last."""
    low_mark: int
    local_low_mark: int
    committed: int
    """The highest id held here that the owner said is committed."""
    last_id: int
    is_available: bool
    is_full: bool
    segments: int
    bytes: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """A replica that is not does not vouch for what it holds."""
        return not self.findings

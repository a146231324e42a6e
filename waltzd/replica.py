"""What a storage says of itself and of its replicas: the same values in the storage and in whoever asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from waltzd.errors import WaltzError
from waltzd.finding import Finding
from waltzd.histogram import Histogram
from waltzd.process import Vitals


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
    findings: tuple[Finding, ...]
    damaged_segments: tuple[int, ...] = ()
    """The first ids of the segment files that would heal it, in the order in which they can be installed."""
    contact: int = 0
    """Which opening of the replica this is. Whatever changes it names that one, and is refused after the next."""

    @property
    def is_sound(self) -> bool:
        """A replica that is not does not vouch for what it holds."""
        return not self.findings

    @property
    def certain(self) -> int:
        """Up to here it never cuts anything."""
        known = max(self.low_mark, self.committed)
        return min(known, self.last_id) if self.is_sound else known

    def sentence(self) -> str:
        start = f"partition {self.partition}: "
        if self.findings:
            return f"{start}damaged, {self.findings[0].sentence()}"
        if not self.is_available:
            return f"{start}taken offline by an operator"
        full = "; writes wait for disk space" if self.is_full else ""
        return f"{start}holds ids up to {self.last_id}, session {self.promised_session}{full}"


@dataclass(frozen=True, kw_only=True)
class PartitionDescription:
    """One partition of a storage. Without a status it is refused, and `refused` says why."""

    partition: int
    status: ReplicaStatus | None
    refused: WaltzError | None
    story: str
    queued_bytes: int
    disk_bytes: int


@dataclass(kw_only=True)
class Statistics:
    """What a storage has done since it started."""

    appended_records: int = 0
    appended_bytes: int = 0
    groups: int = 0
    group_microseconds: int = 0
    group_microseconds_max: int = 0
    checkpoints: int = 0
    read_records: int = 0
    read_bytes: int = 0
    refused_calls: int = 0
    flush: Histogram = field(default_factory=Histogram)
    """One entry for each group: writing and flushing it."""


@dataclass(frozen=True)
class SetAside:
    """The directory of a partition that was taken off its storage."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StorageDescription:
    cluster_key: UUID
    partitions: int
    """How many the cluster has."""
    directory: str
    version: str
    free_bytes: int
    uptime_ms: int
    is_draining: bool
    assigned: tuple[PartitionDescription, ...]
    statistics: Statistics
    vitals: Vitals | None = None
    """None from a storage that does not say, being older."""
    instance: UUID | None = None
    """The process that speaks. The same."""
    free_bytes_min: int = 0
    """With less than this free it takes nothing. 0 from one that does not say."""
    name: str = ""
    """What its directory remembers; empty until it was told."""
    set_aside: tuple[SetAside, ...] = ()

    def is_same_as(self, other: StorageDescription) -> bool:
        """One storage under two addresses, which can be spelled in many ways: one process, or the same files."""
        return (self.instance is not None and self.instance == other.instance) or bool(
            self._incarnations & other._incarnations
        )

    @property
    def _incarnations(self) -> set[UUID]:
        """Of its replicas; each is that of its files alone."""
        return {one.status.incarnation for one in self.assigned if one.status is not None}


@dataclass(frozen=True, kw_only=True)
class VerifySummary:
    """What was looked at in one partition."""

    partition: int
    segments: int
    records: int
    bytes: int
    findings: int

"""What a server says of itself and of the partitions it owns: the same values in the server and in whoever asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from waltzd.histogram import Histogram
from waltzd.process import Vitals


@dataclass(frozen=True, kw_only=True)
class OwnedReplica:
    """One replica of an owned partition, as its owner sees it."""

    storage: str
    role: str
    state: str
    """CONNECTING, SETTLING, LIVE, SLOW, CATCHING_UP, DAMAGED, GIVEN_UP, DOWN"""
    durable_id: int
    counts: bool
    """Its acknowledgements make transactions committed."""
    story: str


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """What became of the transactions of a partition since this process owns it. All of it only rises; it begins again with
    every hand-over."""

    attempts: int = 0
    """Transactions that clients wanted to append: committed, refused, and those that have no outcome yet or never got one
    from this process."""
    committed: int = 0
    committed_bytes: int = 0
    """Of their records, with the 40 bytes around each payload."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """By the name of the `Reason`."""
    fed: int = 0
    """Transactions that were sent to mounts, once for each."""
    fed_bytes: int = 0
    commit: Histogram = field(default_factory=Histogram)
    """One entry for each committed transaction: from the arrival of its batch to its outcome."""


@dataclass(frozen=True, kw_only=True)
class OwnedPartition:
    partition: int
    generation: int
    session: int
    step: str
    """VOTING, RECORDING, SETTLING, ADMITTING, OPEN, CLOSED"""
    waiting: str
    """What it waits for, in one sentence; empty when it waits for nothing."""
    committed: int
    last_id: int
    low_mark: int
    mounts: int
    tail_bytes: int
    replicas: tuple[OwnedReplica, ...]
    statistics: PartitionStatistics = field(default_factory=PartitionStatistics)
    trouble: str = ""
    """Documents of the coordinator that are gone or spoiled: it goes on with what they said."""


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    name: str
    cluster_key: UUID
    instance: UUID
    """New with every start of the process."""
    version: str
    uptime_ms: int
    is_connected: bool
    """To the coordinator. Otherwise the server goes on with what it has, and starts nothing new."""
    is_draining: bool
    is_leader: bool
    """It is the one that decides who owns what."""
    partitions: tuple[OwnedPartition, ...]
    vitals: Vitals | None = None
    """None from a server that does not say, being older."""

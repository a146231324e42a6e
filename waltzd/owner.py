"""What a server says of itself and of the partitions it owns: the same values in the server and in whoever asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, kw_only=True)
class OwnedReplica:
    """One replica of an owned partition, as its owner sees it."""

    storage: str
    role: str
    state: str
    """CONNECTING, SETTLING, LIVE, SLOW, CATCHING_UP, DAMAGED, DOWN"""
    durable_id: int
    counts: bool
    """Its acknowledgements make transactions committed."""
    story: str


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

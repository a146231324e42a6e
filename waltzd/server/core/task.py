"""Tasks of a replica, as values: recovery decides the next one, and the replicator carries it out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from waltzd.protocol.timelines import Lineage


@dataclass(frozen=True)
class Wait:
    why: str


@dataclass(frozen=True)
class GiveUp(Wait):
    """Wait for other replicas or an operator: it is damaged and no replica that answers can repair it, or it holds what
    an operator gave up."""


@dataclass(frozen=True)
class Foreign(GiveUp):
    """Wait until another directory takes its place: it holds another history than the log."""


@dataclass(frozen=True)
class Fork:
    """Switch to the newest timeline of the log: it holds an older timeline, which an operator ended."""

    lineage: Lineage


@dataclass(frozen=True)
class Truncate:
    mark: int


@dataclass(frozen=True)
class SetLowMark:
    mark: int


@dataclass(frozen=True)
class Trim:
    """Remove what is below the floor: the replica lacks or has damaged ids there, which only the archive has."""

    floor: int


@dataclass(frozen=True)
class Copy:
    """Copy the ids up to `last_id` from one of these sources, the best first."""

    last_id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Heal:
    """Replace the segment that starts at this id by what the sources hold, up to `last_id`; then decide again."""

    segment: int
    last_id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Level:
    """Do nothing: it holds the decided log and has begun this session."""


Task: TypeAlias = Wait | Fork | Truncate | SetLowMark | Trim | Copy | Heal | Level

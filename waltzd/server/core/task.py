"""What a replica should do next, as values: what recovery decides and the shell carries out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from waltzd.protocol.timelines import Lineage


@dataclass(frozen=True)
class Wait:
    why: str


@dataclass(frozen=True)
class GiveUp(Wait):
    """It is damaged and no replica that answers holds what it lacks, or it holds what an operator gave up: wait for others,
    or for an operator."""


@dataclass(frozen=True)
class Foreign(GiveUp):
    """It holds another history than the log: only another directory in its place can be level."""


@dataclass(frozen=True)
class Fork:
    """Go over to the newest timeline of the log: it holds the log of an older timeline, which an operator ended."""

    lineage: Lineage


@dataclass(frozen=True)
class Truncate:
    mark: int


@dataclass(frozen=True)
class SetLowMark:
    mark: int


@dataclass(frozen=True)
class Trim:
    """Begin at this floor, below which the others have nothing either: what it lacks there, or has damaged, is in the
    archive."""

    floor: int


@dataclass(frozen=True)
class Copy:
    """Get the ids up to `last_id` from one of these, the best first."""

    last_id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Heal:
    """Replace the segment that starts at this id with what the others hold, up to `last_id`; then look again."""

    segment: int
    last_id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Level:
    """It holds the decided log and has begun this session."""


Task: TypeAlias = Wait | Fork | Truncate | SetLowMark | Trim | Copy | Heal | Level

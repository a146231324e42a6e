"""What is known of a cluster when it is judged, and what a judge says of it. Values."""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.errors import WaltzError

REPAIR = "start it again, or see why its machine does not answer"


class Grade(enum.StrEnum):
    FAIL = "FAIL"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    """The check could not be made."""
    PASS = "PASS"


class Health(enum.StrEnum):
    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    """Something is not as it should be, or some partitions take no transactions."""
    DOWN = "DOWN"
    """No partition takes transactions."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One thing that a rule found."""

    sentence: str
    grade: Grade = Grade.FAIL
    next_step: str = ""
    """Empty: what the rule says."""
    key: str = ""
    """What it is about, the same at every look. Only what is wrong already has one."""
    since: str | None = None
    """Seen without interruption since then."""
    stops: bool = False
    """These partitions take no transactions."""
    partitions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    """Of processes."""
    is_note: bool = False
    """Shown beside the verdict, which it does not change."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    health: Health
    sentence: str
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    """Sentences that are worth a look and make nothing DEGRADED."""

    @property
    def is_healthy(self) -> bool:
        return self.health is Health.HEALTHY


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    grade: Grade
    finding: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The coordinator does not answer."""

    cause: WaltzError
    seen: str | None
    """When it did last, as far as the tool knows."""


@dataclass(frozen=True, kw_only=True)
class ZooKeeperServer:
    """What one server of the ensemble says of itself; without a mode, why it said nothing."""

    address: str
    mode: str | None
    """standalone, leader, follower"""
    milliseconds: float | None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    snapshot: ClusterSnapshot
    lost: Lost | None = None
    """Why the coordinator was left out."""
    coordinator_ms: float | None = None
    """How long one read there took; None when it did not answer."""
    down: Sequence[str] = ()
    """Processes that are known not to run."""
    unlisted: Mapping[str, int] = field(default_factory=dict)
    """Servers that are known to run and that the coordinator does not have, by their process numbers."""
    repair: str = REPAIR
    """What brings a process back."""
    ensemble: tuple[ZooKeeperServer, ...] = ()
    tool_version: str = ""
    is_secured: bool = False
    """Certificates are in use."""
    opened: Sequence[str] = ()
    """Documents that everybody may change who reaches the coordinator, although certificates or credentials are in use."""
    certificate_days: Mapping[str, float | None] = field(default_factory=dict)
    """Until the certificate of each daemon, and ours ("waltzctl"), ends; None where that is not known."""

    @property
    def silent(self) -> set[str]:
        return {*self.snapshot.silent, *self.down}


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """One look at a cluster, and what is to be said of it."""

    facts: Facts
    verdict: Verdict
    at: str
    milliseconds: float
    """Of the whole look."""

    @property
    def snapshot(self) -> ClusterSnapshot:
        return self.facts.snapshot

    @property
    def lost(self) -> Lost | None:
        return self.facts.lost


Found: TypeAlias = Generator[Reason, None, str]
"""A rule yields what it finds, and returns what to say when that is nothing. A reason that passes is none."""


def over(value: float, warn: float, fail: float) -> Grade:
    return Grade.FAIL if value > fail else Grade.WARN if value > warn else Grade.PASS


def under(value: float, warn: float, fail: float) -> Grade:
    return over(-value, -warn, -fail)


def warn(sentence: str) -> Reason:
    return Reason(grade=Grade.WARN, sentence=sentence)


def unsure(sentence: str) -> Reason:
    return Reason(grade=Grade.UNKNOWN, sentence=sentence)

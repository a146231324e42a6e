"""Values of the health room: the facts from which a cluster is judged, and the verdict. No I/O."""

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
    """Some processes, replicas or partitions are not as they should be."""
    DOWN = "DOWN"
    """State in which all partitions refuse transactions."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One finding of a rule."""

    sentence: str
    grade: Grade = Grade.FAIL
    next_step: str = ""
    """What to do; if empty, the fix of the rule."""
    key: str = ""
    """Identity of the problem, equal in every report; only rules with `is_now` set it."""
    since: str | None = None
    """Time since which every report has found it; None before that is known."""
    stops: bool = False
    """Whether the partitions of this reason take no transactions."""
    partitions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    """Names of the processes concerned."""
    is_note: bool = False
    """Whether it is only a note beside the verdict, which it does not change."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    health: Health
    sentence: str
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    """Sentences that deserve attention and do not make the cluster DEGRADED."""

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
    """ZooKeeper does not answer, or shows no documents."""

    cause: WaltzError
    seen: str | None
    """Time of its last answer; None if this machine remembers none."""


@dataclass(frozen=True, kw_only=True)
class ZooKeeperServer:
    """Answer of one server of the ZooKeeper ensemble to `srvr`."""

    address: str
    mode: str | None
    """Its mode: standalone, leader or follower; None if it did not answer."""
    milliseconds: float | None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    snapshot: ClusterSnapshot
    lost: Lost | None = None
    """Why the documents in ZooKeeper could not be read; None if they were read."""
    coordinator_ms: float | None = None
    """Milliseconds of one read in ZooKeeper; None if it did not answer."""
    down: Sequence[str] = ()
    """Processes of a local cluster that are known not to run."""
    unlisted: Mapping[str, int] = field(default_factory=dict)
    """Servers of a local cluster that run and are not registered in ZooKeeper: name → process number."""
    repair: str = REPAIR
    """How to start a process again."""
    ensemble: tuple[ZooKeeperServer, ...] = ()
    tool_version: str = ""
    is_secured: bool = False
    """Whether certificates are in use."""
    opened: Sequence[str] = ()
    """Documents that anyone with access to ZooKeeper may change, although certificates or credentials are in use."""
    certificate_days: Mapping[str, float | None] = field(default_factory=dict)
    """Days until the certificate of each daemon, and of this tool ("waltzctl"), expires; None if unknown."""

    @property
    def silent(self) -> set[str]:
        return {*self.snapshot.silent, *self.down}


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """Snapshot of a cluster with its facts and the verdict."""

    facts: Facts
    verdict: Verdict
    at: str
    milliseconds: float
    """Milliseconds that the whole report took."""

    @property
    def snapshot(self) -> ClusterSnapshot:
        return self.facts.snapshot

    @property
    def lost(self) -> Lost | None:
        return self.facts.lost


Found: TypeAlias = Generator[Reason, None, str]
"""Generator of a rule: it yields its findings and returns the sentence for the case that there are none. A reason with
the grade PASS is no finding."""


def over(value: float, warn: float, fail: float) -> Grade:
    return Grade.FAIL if value > fail else Grade.WARN if value > warn else Grade.PASS


def under(value: float, warn: float, fail: float) -> Grade:
    return over(-value, -warn, -fail)


def warn(sentence: str) -> Reason:
    return Reason(grade=Grade.WARN, sentence=sentence)


def unsure(sentence: str) -> Reason:
    return Reason(grade=Grade.UNKNOWN, sentence=sentence)

"""Decisions about the archive of a partition: which replica uploads the next segment, when, and what storages may
remove. Pure.

The replicas take turns, and a failed upload waits longer each time. Appends and reads never depend on an upload. So
there is one upload at a time, and a replica that fails is asked again after all other replicas. The shell is
`waltzd.server.session.archive`.

The *trim floor* of a partition is the first id that its storages have to keep.

What may go is archived, is no longer needed by any replica, and is not kept by the policy. The floor is the first id of
the highest segment that begins within these three bounds. For each replica the bound is a mark that it certainly holds:
the low-water mark of the session if it has begun it, or the last mark that is known of a silent replica. So a floor
never removes what a replica still has to copy.

One archived and whole segment always stays from the floor on. A replica that begins there gets it as a file, and its
footer says what has to be known of the segment before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from waltzd.cluster.documents import Keep, Membership, PartitionMeta
from waltzd.format.layout import index_offset
from waltzd.protocol.descriptions import ArchiveCheck, ReplicaStatus
from waltzd.protocol.quorum import EMPTY

TURN_SEGMENTS = 8
"""Segments in a row that one replica uploads, because it then has the newest manifest in memory."""
IDLE_SECONDS = 5.0
"""Pause before looking again whether a segment is sealed."""
LOOKS = 12
"""Number of idle pauses after which replicas are asked again although nothing was committed meanwhile."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 60.0
ROUND_SECONDS = 86_400.0
"""Period in which each object of an archive is looked for once."""
FIRST_SECONDS = 900.0
"""Delay after the begin of a session: an owner that has just got hundreds of partitions has other work."""
STEP_SECONDS, AGAIN_SECONDS = 1.0, 600.0


@dataclass
class UploadTurns:
    """Turns of the replicas at uploading. `pause` is the number of seconds to wait before the next call of `choose`."""

    trouble: str = ""
    """Cause why uploads do not proceed; empty while they do."""
    pause: float = 0.0
    _order: list[str] = field(default_factory=list)
    """Replicas in the order in which they are asked."""
    _left: int = TURN_SEGMENTS
    _retry: float = RETRY_SECONDS
    _nothing: dict[str, int] = field(default_factory=dict)
    """Committed mark at which a replica had no segment to upload."""
    _looks: int = 0
    _failed: dict[str, None] = field(default_factory=dict)
    """Replicas that failed since the last upload or pause."""

    def choose(self, able: Sequence[str], committed: int) -> str | None:
        """Return the replica to ask, of those that can upload; None to wait for `pause`."""
        self._order += [name for name in able if name not in self._order]
        name = next((name for name in self._order if name in able and name not in self._failed), None)
        if name is not None and self._nothing.get(name) == committed and self._looks < LOOKS:
            name = None
        self._looks = 0 if name is not None else self._looks + 1
        if name is None:
            self.pause = IDLE_SECONDS
        return name

    def hurry(self) -> None:
        """Ask all replicas again: a segment is known to wait for its upload."""
        self._nothing.clear()

    def uploaded(self, name: str) -> None:
        self.trouble, self.pause, self._retry = "", 0.0, RETRY_SECONDS
        self._failed.clear()
        self._left -= 1
        if self._left <= 0:
            self._pass_on(name)

    def found_none(self, name: str, committed: int) -> None:
        """Record that no sealed and committed segment waits at this replica. Another replica may have one."""
        self.trouble, self.pause = "", IDLE_SECONDS
        self._nothing[name] = committed
        self._failed.clear()
        self._pass_on(name)

    def failed(self, name: str, why: str, able: Sequence[str]) -> None:
        """Record a failure. The other replicas are asked at once; when all have failed there is a pause."""
        self._failed[name] = None
        self._pass_on(name)
        self.pause = 0.0
        if all(other in self._failed for other in able):
            self.trouble = f"{name}: {why}"
            self.pause, self._retry = self._retry, min(2 * self._retry, RETRY_SECONDS_MAX)
            self._failed.clear()

    def _pass_on(self, name: str) -> None:
        self._left = TURN_SEGMENTS
        if name in self._order:
            self._order.remove(name)
        self._order.append(name)


@dataclass
class ArchiveRounds:
    """Schedule of the search for archived objects, step by step from the first id to the last one. The first round of a
    session runs without long pauses; each later round takes a day. The search stops at a missing object until the object
    is back. `pause` is the number of seconds before the next step."""

    first_id: int = 0
    """First id that the next step looks for."""
    last_id: int = -1
    """Id up to which all objects were present, in this round or the round before."""
    missing: str = ""
    since: float | None = None
    """Time at which the newest round began that found all objects; None before such a round, and after an object was
    found missing."""
    pause: float = FIRST_SECONDS
    _began: float = 0.0

    def record(self, found: ArchiveCheck, archived_id: int, asked: float) -> None:
        """Record the result of one step. `asked`: when the step began. `archived_id`: the last archived id at that time."""
        if self.first_id == 0:
            self._began = asked
        share = (found.last_id + 1 - self.first_id) / (archived_id + 1)
        self.first_id, self.missing = found.last_id + 1, found.missing
        if found.missing:
            self.last_id, self.since, self.pause = min(self.last_id, found.last_id), None, AGAIN_SECONDS
            return
        if self.first_id > archived_id:
            self.first_id, self.last_id, self.since = 0, archived_id, self._began
        self.pause = STEP_SECONDS if self.since is None else max(STEP_SECONDS, share * ROUND_SECONDS)

    def failed(self) -> None:
        """Wait for long: the step failed, or nothing is archived yet."""
        self.pause = AGAIN_SECONDS

    def uploaded(self, before: int, last_id: int) -> None:
        """Count an upload that follows on `before` as present: the storage has read it back."""
        if self.since is not None and self.last_id == before:
            self.last_id = last_id

    def describe(self, now: float) -> ArchiveCheck | None:
        if self.since is None and not self.missing:
            return None
        age_ms = None if self.since is None else int(1000 * (now - self.since))
        return ArchiveCheck(last_id=self.last_id, missing=self.missing, age_ms=age_ms)


Sealed = tuple[int, int, int]
"""First id, last id and data file bytes of a segment that takes no more records."""


def mark_of(meta: PartitionMeta, name: str, status: ReplicaStatus | None) -> int:
    """Return the id up to which this member of the open session needs nothing from another replica, as far as is known."""
    if status is not None and status.session == meta.session:
        return min(status.low_mark, status.last_id)
    state = meta.replicas.get(name)
    if state is None:
        return EMPTY
    marks = (meta.low_mark, state.acknowledged, state.closing)
    return min(mark for mark in marks if mark is not None)


def reach_of(
    meta: PartitionMeta, roles: Mapping[str, Membership], statuses: Mapping[str, ReplicaStatus], held: Mapping[str, int]
) -> int:
    """Return the id up to which no replica needs the log from another replica. A learner counts while it copies. A
    learner that is silent or empty begins at the floor of the time when it comes."""
    members = {*meta.members, *(name for name, role in roles.items() if role is Membership.MEMBER)}
    marks = [mark_of(meta, name, statuses.get(name)) for name in sorted(members)]
    learners = [name for name in statuses if name in roles and name not in members]
    marks += [held[name] for name in learners if held[name] >= statuses[name].floor]
    return min(marks, default=EMPTY)


def next_floor(
    floor: int, *, archived: int, reach: int, replicas: Iterable[Sequence[Sealed]], keep: Keep, older: int = EMPTY
) -> int:
    """Return the next floor, or `floor` if nothing may go. `replicas`: sealed segments of each replica that answers.
    `older`: the id up to which everything is older than a policy of time keeps."""
    bound = min(archived, reach)
    found = [_begin(segments, bound, keep, older) for segments in replicas]
    return max(floor, min(found, default=0))


def _begin(segments: Sequence[Sealed], bound: int, keep: Keep, older: int) -> int:
    """Return the first id that the policy and the bound leave to this replica."""
    if keep.seconds is not None:
        wanted = older + 1
    elif keep.size is not None:
        wanted = _by_size(segments, keep.size)
    else:
        wanted = 0
    return max((first for first, last, _ in segments if first <= wanted and last <= bound), default=0)


def _by_size(segments: Sequence[Sealed], size: int) -> int:
    """Return the first id of the oldest segment that fits into `size`. The segment that is being written counts as a full
    one."""
    left = size - max((bytes_of(segment) for segment in segments), default=0)
    wanted = segments[-1][1] + 1 if segments else 0
    for segment in reversed(segments):
        left -= bytes_of(segment)
        if left < 0:
            break
        wanted = segment[0]
    return wanted


def bytes_of(segment: Sealed) -> int:
    """Return the size of a segment with its index."""
    first, last, size = segment
    return size + index_offset(last - first + 1)

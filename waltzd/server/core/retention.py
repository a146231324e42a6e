"""What the trim floor of a partition may become: the first id that its storages have to keep. Pure.

How to think about it. What may go is archived, is no longer needed by any replica, and is not kept by the policy. The
floor is the first id of the highest segment that begins within these three bounds. For each replica the bound is a mark
that it certainly holds: the low-water mark of the session if it has begun it, or the last mark that is known of a silent
replica. So a floor never removes what a replica still has to copy.

One archived and whole segment always stays from the floor on. A replica that begins there gets it as a file, and its
footer says what has to be known of the segment before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from waltzd.cluster.documents import Keep, Membership, PartitionMeta
from waltzd.format.layout import index_offset
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY

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

"""What the trim floor of a partition may become: the first id that its storages have to keep. Pure.

How to think about it. Three bounds say what may go: it is archived, every replica that counts on it is past it, and the
policy does not want it any more. The highest segment that begins within all of them is the floor. A mark is what a replica
is known to have for good: the low-water mark of the session for one that has begun it, for a silent one the last that was
heard of it. So a floor never takes from a replica what it still has to copy.

One segment that is archived and whole always stays behind the floor. A replica that begins there gets it as a file, and
with its footer what it needs to know of the segment in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from waltzd.cluster.documents import Membership, PartitionMeta
from waltzd.format.layout import index_offset
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.retention import Keep

Sealed = tuple[int, int, int]
"""First id, last id, and bytes of the data file, of a segment that takes no more records."""


def mark_of(meta: PartitionMeta, name: str, status: ReplicaStatus | None) -> int:
    """Up to here this member of the open session needs nothing from another replica, as far as is known."""
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
    """Up to here no replica needs the log from another one. A learner counts while it copies; one that is silent or has
    nothing begins at the floor, whatever that is then."""
    members = {*meta.members, *(name for name, role in roles.items() if role is Membership.MEMBER)}
    marks = [mark_of(meta, name, statuses.get(name)) for name in sorted(members)]
    learners = [name for name in statuses if name in roles and name not in members]
    marks += [held[name] for name in learners if held[name] >= statuses[name].floor]
    return min(marks, default=EMPTY)


def next_floor(
    floor: int, *, archived: int, reach: int, replicas: Iterable[Sequence[Sealed]], keep: Keep, older: int = EMPTY
) -> int:
    """The floor that follows upon this one; the same one where nothing may go. `replicas`: the sealed segments of each that
    answers. `older`: up to here everything is older than a policy of time keeps."""
    bound = min(archived, reach)
    found = [_begin(segments, bound, keep, older) for segments in replicas]
    return max(floor, min(found, default=0))


def _begin(segments: Sequence[Sealed], bound: int, keep: Keep, older: int) -> int:
    """Where the log of this replica may begin."""
    if keep.seconds is not None:
        wanted = older + 1
    elif keep.size is not None:
        wanted = _by_size(segments, keep.size)
    else:
        wanted = 0
    return max((first for first, last, _ in segments if first <= wanted and last <= bound), default=0)


def _by_size(segments: Sequence[Sealed], size: int) -> int:
    """The first id of the oldest segment that still fits. The one that is being written counts as a whole one."""
    left = size - max((bytes_of(segment) for segment in segments), default=0)
    wanted = segments[-1][1] + 1 if segments else 0
    for segment in reversed(segments):
        left -= bytes_of(segment)
        if left < 0:
            break
        wanted = segment[0]
    return wanted


def bytes_of(segment: Sealed) -> int:
    """With its index."""
    first, last, size = segment
    return size + index_offset(last - first + 1)

"""The group of each transaction: the id of the first transaction that it was appended with.

A run has a flag for each record that continues the group of the one before, and one flag for the record after its end. A
read may begin within a group; then earlier records are read to find its first one. An extent never begins within a group,
because batches are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from waltz_spark.log.decode import NO_GROUP
from waltz_spark.log.origin import Extent, Origin, Span
from waltzd.format.batch import Flags
from waltzd.format.checksum import I64
from waltzd.format.record import Run

LOOK_BACK = 64
"""Records that are read before the first one to find the start of its group; doubled with each further read."""


class Grouped(NamedTuple):
    run: Run
    groups: I64 | None
    """First id of each record's group, or `NO_GROUP`; None if no record is in a group."""


def read_grouped(origin: Origin, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool) -> Iterator[Grouped]:
    """Yield the runs of `origin.read`, with groups."""

    def read(some: Span) -> Iterator[Run]:
        return origin.read(extent, some, batch_bytes=batch_bytes, with_locks=with_locks)

    return grouped(read, extent.span, span)


def grouped(read: Callable[[Span], Iterator[Run]], whole: Span, span: Span) -> Iterator[Grouped]:
    """Yield the runs of `read` for a span within `whole`, with groups."""
    begin: int | None = None
    for run in read(span):
        if begin is None:
            goes_on = run.follows is not None and bool(run.follows[0])
            begin = _begin(read, whole.first, run.first_id) if goes_on else NO_GROUP
        groups, begin = groups_of(run, begin)
        yield Grouped(run, groups)


def _begin(read: Callable[[Span], Iterator[Run]], first_id: int, id_: int) -> int:
    """Return the first id, at or above `first_id`, of the group that continues at `id_`."""
    count, last = LOOK_BACK, id_ - 1
    while last >= first_id:
        start, found = max(first_id, last - count + 1), NO_GROUP
        for run in read(Span(start, last)):
            firsts = np.arange(len(run)) if run.follows is None else np.flatnonzero(~run.follows)
            if len(firsts):
                found = run.first_id + int(firsts[-1])
        if found != NO_GROUP:
            return found
        last, count = start - 1, 2 * count
    return first_id


def groups_of(run: Run, begin: int) -> tuple[I64 | None, int]:
    """Return the group of each record, and the group that a following record would continue. Pure.

    `begin` is the first id of the group that the first record continues."""
    follows: Flags | None = run.follows
    if follows is None or not follows.any():
        if not run.goes_on:
            return None, run.last_id
        groups = np.full(len(run), NO_GROUP, np.int64)
        groups[-1] = run.last_id
        return groups, run.last_id
    ids = np.arange(run.first_id, run.first_id + len(run), dtype=np.int64)
    firsts = np.maximum.accumulate(np.where(follows, begin, ids))
    is_in = follows.copy()
    is_in[:-1] |= follows[1:]
    is_in[-1] |= run.goes_on
    return np.where(is_in, firsts, NO_GROUP), int(firsts[-1])

"""Which group each transaction is in: the id of the first of those that were appended together.

A run says of each record only whether it goes on with the one before, and of its last one whether it goes on behind it.
Readers may ask for any ids, so a reading may begin within a group; then the records in front of it are looked at. An extent
does not begin there, because no batch is ever split.
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
"""So many records are asked for in front of the first one, and twice as many each time after that."""


class Grouped(NamedTuple):
    run: Run
    groups: I64 | None
    """The id of the first of its group for each record, or `NO_GROUP`; None where all are alone."""


def read_grouped(origin: Origin, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool) -> Iterator[Grouped]:
    """What `origin.read` gives, with groups."""

    def read(some: Span) -> Iterator[Run]:
        return origin.read(extent, some, batch_bytes=batch_bytes, with_locks=with_locks)

    return grouped(read, extent.span, span)


def grouped(read: Callable[[Span], Iterator[Run]], whole: Span, span: Span) -> Iterator[Grouped]:
    """What `read` gives of a span, which lies within `whole`."""
    begin: int | None = None
    for run in read(span):
        if begin is None:
            goes_on = run.follows is not None and bool(run.follows[0])
            begin = _begin(read, whole.first, run.first_id) if goes_on else NO_GROUP
        groups, begin = groups_of(run, begin)
        yield Grouped(run, groups)


def _begin(read: Callable[[Span], Iterator[Run]], first_id: int, id_: int) -> int:
    """The first of the group that goes on at `id_`, from `first_id` on."""
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
    """Of each record, and of the one behind if it goes on. `begin`: of the group that goes on at the first record. Pure."""
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

"""What of an append is new, and whether the rest is what is here already.

A log has no gaps, and a record is never rewritten: the same bytes under a known id are fine, others are another history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waltzd.errors import Diverged, NotNextId
from waltzd.record import Run

ReadStored = Callable[[int, int, int], Run]
"""Stored records from a first id, up to a last id, up to some bytes, at least one."""


def only_new(runs: Sequence[Run], *, partition: int, last_id: int, stored: ReadStored) -> list[Run]:
    """The runs without the records that are stored, or came earlier among these runs, with the same bytes."""
    next_id = last_id + 1
    fresh: list[Run] = []
    for run in runs:
        if run.first_id > next_id:
            raise NotNextId(
                f"an append to partition {partition} starts at id {run.first_id}; the next id here is {next_id}",
                next_id=next_id,
            )
        known = min(next_id - run.first_id, len(run))
        at = 0
        while at < known:
            id_ = run.first_id + at
            if id_ <= last_id:
                same = stored(id_, min(last_id, run.last_id), len(run.data))
            else:
                whole = next(other for other in fresh if id_ <= other.last_id)
                same = whole.part(id_ - whole.first_id, min(len(whole), run.last_id + 1 - whole.first_id))
            part = run.part(at, at + len(same))
            if part.data != same.data:
                raise Diverged(
                    f"partition {partition} already holds ids {part.first_id} to {part.last_id} with other content"
                )
            at += len(same)
        if known < len(run):
            fresh.append(run.part(known, len(run)) if known else run)
            next_id = fresh[-1].last_id + 1
    return fresh

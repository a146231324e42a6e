"""The position of a stream, and the size of its next batch. Pure.

A position has the next id of each partition. Spark writes it into its checkpoint before it reads a batch, and requests the
same batch again after a crash: a batch must depend on its two positions only. A new partition is therefore first added to
a position with nothing read, and is read by the following batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from waltz_spark.log.origin import Catalog, Origin, Span, check_reached
from waltzd.errors import ForeignCluster
from waltzd.errors.operations import PositionUnknown, TransactionsGone
from waltzd.protocol import positions
from waltzd.protocol.timelines import FIRST

VERSION, FORKED_VERSION = 1, 2
"""Versions of the JSON. The second one has timelines, and is refused by older programs; it is used only for forked logs."""


@dataclass(frozen=True)
class Position:
    key: UUID
    """Key of the cluster; ids of another cluster name other transactions."""
    next: Mapping[int, int]
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Timeline of the id before `next`, for each partition whose log has forked."""

    @property
    def reached(self) -> Mapping[int, positions.Position]:
        """Last id that was read in each partition, with its timeline."""
        return {each: positions.Position(id_ - 1, self.timelines.get(each)) for each, id_ in self.next.items()}

    def to_json(self) -> dict[str, object]:
        """Return the JSON for the checkpoint. Spark compares positions as text, so the order of partitions matters."""
        timelines = {str(each): str(self.timelines[each]) for each in sorted(self.timelines)}
        return {
            "v": FORKED_VERSION if timelines else VERSION,
            "cluster": str(self.key),
            "next": {str(each): self.next[each] for each in sorted(self.next)},
            **({"timelines": timelines} if timelines else {}),
        }

    @classmethod
    def from_json(cls, said: Mapping[str, object]) -> Position:
        try:
            version, key, next_ = said["v"], UUID(str(said["cluster"])), said["next"]
            timelines = {} if version == VERSION else said["timelines"]
            if version not in (VERSION, FORKED_VERSION) or not isinstance(next_, dict) or not isinstance(timelines, dict):
                raise ValueError
            return cls(
                key,
                {int(partition): int(id_) for partition, id_ in next_.items()},
                {int(partition): UUID(str(timeline)) for partition, timeline in timelines.items()},
            )
        except (KeyError, ValueError, TypeError) as error:
            raise PositionUnknown(
                f"the checkpoint holds a position that cannot be understood: {str(said)[:200]}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The limits of one batch. They starve no partition."""

    txns: int | None = None
    """Largest number of transactions, which is never exceeded."""
    bytes: int | None = None
    """Bytes by average sizes; every partition with a lag gets at least one transaction."""


NO_LIMIT = Limit()


def end_of(catalog: Catalog) -> Position:
    return beginning_at(catalog, {partition: span.last + 1 for partition, span in catalog.spans.items()})


def beginning_at(catalog: Catalog, next_: Mapping[int, int]) -> Position:
    """Return the position of these ids on the current timelines."""
    return Position(catalog.key, next_, {each: catalog.timelines[each] for each in next_ if each in catalog.timelines})


def _moved(start: Position, catalog: Catalog, next_: Mapping[int, int]) -> Position:
    """Return `start` with other ids; a partition whose id does not change keeps its timeline."""
    timelines = {
        each: start.timelines.get(each, FIRST)
        if each not in catalog.spans or start.next.get(each) == id_
        else catalog.position(each, id_).timeline
        for each, id_ in next_.items()
    }
    return Position(start.key, next_, {each: timeline for each, timeline in timelines.items() if timeline != FIRST})


def check_timelines(position: Position, origin: Origin, catalog: Catalog, *, start: Position | None = None) -> None:
    """Raise `OtherTimeline` if ids before the position are not on the log any more. `start`: where a batch that ends at
    the position begins; its rows are not processed yet, so the advice in the error does not go beyond it."""
    processed = position if start is None else start

    def advice(forks: Mapping[int, int]) -> str:
        starts = {each: min(id_, forks.get(each, id_ - 1) + 1) for each, id_ in sorted(processed.next.items())}
        return (
            "undo what came from the transactions above the fork, then begin the query with a new checkpoint and "
            f"startingTxnIds {json.dumps(starts)}"
        )

    check_reached(
        origin, catalog, position.reached, what="the checkpoint",
        not_done="no batch was read, and the checkpoint was left as it is", next_step=advice,
    )  # fmt: skip


def advanced(start: Position, catalog: Catalog, *, limit: Limit = NO_LIMIT, bound: Position | None = None) -> Position:
    """Return the end of a batch that begins at `start`, within the bound and its partitions.

    `start` has been compared with the catalog before (`reconciled`)."""
    end = end_of(catalog).next
    if bound is not None:
        end = {each: min(id_, bound.next[each]) for each, id_ in end.items() if each in bound.next}
    lags = {each: id_ - start.next[each] for each, id_ in end.items() if id_ > start.next.get(each, id_)}
    if limit.bytes is not None:
        lags = by_bytes(lags, weights(catalog, start, lags), limit.bytes)
    if limit.txns is not None:
        lags = by_txns(lags, limit.txns, turn=sum(start.next.values()))
    after = {each: id_ + lags.get(each, 0) for each, id_ in start.next.items()}
    news = {each: span.first for each, span in catalog.spans.items() if each in end and each not in start.next}
    return _moved(start, catalog, {**after, **news})


def weights(catalog: Catalog, start: Position, lags: Mapping[int, int]) -> dict[int, int]:
    """Estimate the unread bytes of each partition, by the average size of each extent."""
    ahead = dict.fromkeys(lags, 0)
    for extent in catalog.extents:
        if extent.partition in lags and extent.span.count:
            first = start.next[extent.partition]
            rest = extent.span.cut(Span(first, first + lags[extent.partition] - 1)).count
            ahead[extent.partition] += extent.bytes * rest // extent.span.count
    return ahead


def by_bytes(lags: Mapping[int, int], weights: Mapping[int, int], limit: int) -> dict[int, int]:
    """Return an equal share of every lag with about `limit` bytes in total; at least one id of each partition."""
    total = sum(weights.values())
    if total <= limit:
        return dict(lags)
    return {each: max(1, lag * limit // total) for each, lag in lags.items()}


def by_txns(lags: Mapping[int, int], limit: int, *, turn: int) -> dict[int, int]:
    """Return `limit` ids in proportion to the lags, at least one of each partition.

    If the limit is lower than the number of partitions, some get one id each; the first of them changes from batch to batch
    (`turn` grows with every id that is read)."""
    waiting = sorted(lags)
    if sum(lags.values()) <= limit:
        return dict(lags)
    if limit <= len(waiting):
        first = turn % len(waiting)
        return dict.fromkeys([*waiting[first:], *waiting[:first]][:limit], 1)
    spare, rest = limit - len(waiting), sum(lags.values()) - len(waiting)
    shares = {each: 1 + (lags[each] - 1) * spare // rest for each in waiting}
    left = limit - sum(shares.values())
    for each in sorted(waiting, key=lambda each: (-((lags[each] - 1) * spare % rest), each))[:left]:
        shares[each] += 1
    return shares


def reconciled(start: Position, catalog: Catalog, *, among: Iterable[int] | None, fail_on_loss: bool) -> Position:
    """Return `start` adjusted to the catalog. Lost ids raise an error, or are skipped without `fail_on_loss`.

    `among` are the partitions that the stream follows; None for all."""
    if start.key != catalog.key:
        raise ForeignCluster(
            f"the checkpoint is of cluster {start.key}, the log is of cluster {catalog.key}",
            next_step="name the cluster that the stream has read, or begin a new stream with a new checkpoint",
        )
    gone = lost(start, catalog, among=among)
    if gone and fail_on_loss:
        raise TransactionsGone(next(iter(gone.values())))
    next_ = dict(start.next)
    for partition in (
        gone.keys() & catalog.spans.keys()
    ):  # if the log ends before the position, wait until it has reached it
        next_[partition] = max(next_[partition], catalog.spans[partition].first)
    return _moved(start, catalog, next_)


def lost(start: Position, catalog: Catalog, *, among: Iterable[int] | None) -> dict[int, str]:
    """Return a sentence for each partition that has lost ids since `start` was reached."""
    followed = start.next.keys() if among is None else start.next.keys() & set(among)
    said = ((each, _what_is_lost(each, start.next[each], catalog.spans.get(each))) for each in sorted(followed))
    return {partition: what for partition, what in said if what is not None}


def _what_is_lost(partition: int, id_: int, span: Span | None) -> str | None:
    if span is None:
        return f"partition {partition}, of which id {id_} comes next, is not in the log any more"
    if id_ < span.first:
        gone = f"ids {id_} to {span.first - 1} of partition {partition}"
        return f"{gone} were not read yet and are not there any more; it begins at {span.first}"
    if id_ > span.last + 1:
        return f"partition {partition} ends at id {span.last}, but ids up to {id_ - 1} were read from it before"
    return None


def between(start: Position, end: Position) -> dict[int, Span]:
    """Return the ids of the batch between two positions."""
    if start.key != end.key:
        raise PositionUnknown(f"a batch begins in cluster {start.key} and ends in cluster {end.key}")
    return {
        partition: Span(start.next[partition], id_ - 1)
        for partition, id_ in sorted(end.next.items())
        if partition in start.next and id_ > start.next[partition]
    }


def covers(catalog: Catalog, spans: Mapping[int, Span]) -> bool:
    return all(catalog.spans.get(partition, Span(0, -1)).cut(span) == span for partition, span in spans.items())


def readable(spans: Mapping[int, Span], catalog: Catalog, *, fail_on_loss: bool) -> dict[int, Span]:
    """Return the ids of a planned batch that can still be read; raise if some are missing and `fail_on_loss`."""
    out = {}
    for partition, span in spans.items():
        there = catalog.spans.get(partition, Span(0, -1)).cut(span)
        if there != span and fail_on_loss:
            raise TransactionsGone(
                f"ids {span.first} to {span.last} of partition {partition} belong to a batch that was begun, and only"
                f" {'none' if there.count == 0 else f'{there.first} to {there.last}'} of them can be read",
            )
        if there.count:
            out[partition] = there
    return out

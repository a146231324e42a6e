"""How far a stream has come, and how much of what lies ahead one batch takes.

A position says for each partition which id comes next. Spark writes it into its checkpoint before it reads a batch, and
asks for the same batch again after a crash: all that a batch is must follow from its two positions alone. A partition that
is new therefore enters a position first, with nothing read, and is read from there by the batch after. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from waltz_spark.log.origin import Catalog, Origin, Span, check_reached
from waltzd.errors import ForeignCluster, PositionUnknown, TransactionsGone
from waltzd.protocol import positions
from waltzd.protocol.timelines import FIRST

VERSION, FORKED_VERSION = 1, 2
"""The second one names timelines. Programs that know none refuse it; a log that never forked is written as ever."""


@dataclass(frozen=True)
class Position:
    key: UUID
    """Of the cluster: ids of another one mean other transactions."""
    next: Mapping[int, int]
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Of each partition whose log has forked, the timeline in which the id in front of `next` was seen."""

    @property
    def reached(self) -> Mapping[int, positions.Position]:
        """For each partition the last id in front of `next`, and its timeline."""
        return {each: positions.Position(id_ - 1, self.timelines.get(each)) for each, id_ in self.next.items()}

    def to_json(self) -> dict[str, object]:
        """As Spark keeps it. Spark compares positions as texts, so the order of the partitions matters."""
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
    """Of one batch. Neither starves a partition."""

    txns: int | None = None
    """Never exceeded."""
    bytes: int | None = None
    """By what records weigh on the average; every partition that lags gets at least one."""


NO_LIMIT = Limit()


def end_of(catalog: Catalog) -> Position:
    return beginning_at(catalog, {partition: span.last + 1 for partition, span in catalog.spans.items()})


def beginning_at(catalog: Catalog, next_: Mapping[int, int]) -> Position:
    """A position in the log as it is."""
    return Position(catalog.key, next_, {each: catalog.timelines[each] for each in next_ if each in catalog.timelines})


def _moved(start: Position, catalog: Catalog, next_: Mapping[int, int]) -> Position:
    """`start` with other ids. A partition that stays where it was keeps its timeline: there is nothing new to read."""
    timelines = {
        each: start.timelines.get(each, FIRST)
        if each not in catalog.spans or start.next.get(each) == id_
        else catalog.position(each, id_).timeline
        for each, id_ in next_.items()
    }
    return Position(start.key, next_, {each: timeline for each, timeline in timelines.items() if timeline != FIRST})


def check_timelines(position: Position, origin: Origin, catalog: Catalog) -> None:
    """Raise `OtherTimeline` where ids that the position counts as read are not on the log any more."""
    check_reached(
        origin, catalog, position.reached, what="the checkpoint",
        next_step=lambda number, fork: (
            "undo what came from the transactions above the fork, then begin the query with a new checkpoint and "
            f'startingTxnIds {{"{number}": {fork + 1}}}'
        ),
    )  # fmt: skip


def advanced(start: Position, catalog: Catalog, *, limit: Limit = NO_LIMIT, bound: Position | None = None) -> Position:
    """Where a batch from `start` ends: not beyond the bound, and nothing of a partition that it does not have. What `start`
    says was compared with the catalog before (`reconciled`)."""
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
    """How many bytes lie ahead in each partition, by the average of each extent."""
    ahead = dict.fromkeys(lags, 0)
    for extent in catalog.extents:
        if extent.partition in lags and extent.span.count:
            first = start.next[extent.partition]
            rest = extent.span.cut(Span(first, first + lags[extent.partition] - 1)).count
            ahead[extent.partition] += extent.bytes * rest // extent.span.count
    return ahead


def by_bytes(lags: Mapping[int, int], weights: Mapping[int, int], limit: int) -> dict[int, int]:
    """The same share of every lag, such that it weighs about `limit`; at least one id of each."""
    total = sum(weights.values())
    if total <= limit:
        return dict(lags)
    return {each: max(1, lag * limit // total) for each, lag in lags.items()}


def by_txns(lags: Mapping[int, int], limit: int, *, turn: int) -> dict[int, int]:
    """`limit` ids in proportion to the lags, at least one of each; where the limit does not reach for that, one of as many
    as it reaches for, beginning at another one after each batch (`turn` grows by what was read)."""
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
    """`start` as it can be read now. What was there and is there no longer is an error, or is passed over where the user
    said so; `among` are the partitions that the stream follows, or all."""
    if start.key != catalog.key:
        raise ForeignCluster(
            f"the checkpoint is of cluster {start.key}, the log is of cluster {catalog.key}",
            next_step="name the cluster that the stream has read, or begin a new stream with a new checkpoint",
        )
    gone = lost(start, catalog, among=among)
    if gone and fail_on_loss:
        raise TransactionsGone(next(iter(gone.values())))
    next_ = dict(start.next)
    for partition in gone.keys() & catalog.spans.keys():  # where the log ends before, wait until it has come so far
        next_[partition] = max(next_[partition], catalog.spans[partition].first)
    return _moved(start, catalog, next_)


def lost(start: Position, catalog: Catalog, *, among: Iterable[int] | None) -> dict[int, str]:
    """In words, for each partition of which something is gone that was there when `start` was reached."""
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
    """What the batch from one position to the other is."""
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
    """Of a batch that was planned before, what is still there: all of it, or an error that names what is not."""
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

"""Requests of one partition: waiting, sent, and of unknown outcome. Pure.

Requests (`waltzd.client.pending`) wait in the order in which they were added. `take` packs them into frames and assigns
sequence numbers. A sent frame is in `sent` while the current mount can still answer it. When the mount is lost, the
frame moves to `undecided`: then only the log shows whether its transactions were appended, and `found` and `lost`
settle them (`waltzd.client.mount`). A transaction is sent again only if the server reported that it had not taken it
(`untaken`).

An atomic request is sent in one frame and decided in one frame. A server that decides a part of it is refused with
`BadFrame`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.client.pending import AnyRequest, AtomicRequest, BatchRequest, Request, batch_of, why_refused
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.checksum import I64
from waltzd.protocol.batches import SEQUENCE_MAX, AppendBatch, Committals, Limits, Refusals
from waltzd.protocol.locks import Committed, Reason, Rejected, Unknown
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST, Lineage

ROWS_MAX = 8192
"""Limit of transactions in one frame. A frame of this size delays the frames behind it by about ten milliseconds."""
WORTH_BYTES = 32 << 10
"""Bytes that must wait before a second message is sent beside one in flight. Below that, requests wait and travel
together: handling a message costs much more than handling a few small transactions in it."""
TOGETHER_BYTES = 256 << 10
"""Bytes up to which frames travel in one message. A larger message is not faster, and delays the messages behind it."""
FRAME_BYTES = 128
"""Bytes that a frame adds to its transactions."""
_REASONS = {int(reason): reason for reason in Reason}


@dataclass(eq=False)
class SentFrame:
    """A frame that was sent: single requests, or consecutive rows of one batch."""

    first_sequence: int
    floor: int
    """Highest id known to be committed when the frame was sent. All ids of its rows are above."""
    rows: int
    bytes: int
    ticket: int
    message: int
    """Number of the message that carried the frame."""
    requests: Sequence[Request]
    batch: BatchRequest | None = None
    start: int = 0
    """First row of the batch that is in this frame."""

    @cached_property
    def is_open(self) -> NDArray[np.bool_]:
        """Rows that are not decided. The column is made when the first part of the frame is decided."""
        return np.ones(self.rows, np.bool_)

    @property
    def is_whole(self) -> bool:
        """Return whether no row is decided."""
        return "is_open" not in vars(self) or bool(self.is_open.all())

    @property
    def atomic(self) -> AtomicRequest | None:
        return self.batch if isinstance(self.batch, AtomicRequest) else None

    @property
    def is_decided(self) -> bool:
        return not self.is_open.any()

    def bytes_of(self, rows: I64) -> int:
        if self.batch is None:
            return sum([self.requests[row].bytes for row in rows.tolist()])
        at = rows + self.start
        return int((self.batch.ends[at + 1] - self.batch.ends[at]).sum())


Column: TypeAlias = NDArray[np.bool_]


class Outbox:
    def __init__(
        self, *, messages_max: int, bytes_max: int, worth_bytes: int = WORTH_BYTES, partition: int | None = None
    ) -> None:
        """Create an empty outbox. `messages_max` and `bytes_max` limit what is in flight, but one message may always be. A
        second message needs at least `worth_bytes`. Outcomes name `partition`."""
        self.partition = partition
        self.timeline = FIRST
        """Identity of the timeline in which outcomes name ids."""
        self.waiting: deque[AnyRequest] = deque()
        self.sent: list[SentFrame] = []
        self.undecided: list[SentFrame] = []
        self.rows = 0
        """Number of transactions that are not decided. `bytes` is their size."""
        self.bytes = 0
        self.next_sequence = 0
        self.next_ticket = 0
        self._waiting_bytes = 0
        self._messages = 0
        self._last_rows = 0
        """Number of transactions in the newest message."""
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._worth_bytes = worth_bytes

    def check(self) -> None:
        """Assert the invariants of the outbox."""
        left = (*self.undecided, *self.sent)
        edges = [edge for sent in left for edge in (sent.first_sequence, sent.first_sequence + sent.rows)]
        assert sorted(edges) == edges, "sequence numbers go out in order, none twice"
        assert not edges or edges[-1] <= self.next_sequence
        assert all(one.floor <= other.floor for one, other in pairwise(left)), "the oldest floor is the lowest"
        tickets = [entry.ticket for entry in (*left, *self.waiting)]
        assert all(one <= other for one, other in pairwise(tickets)), "in the order in which they came"
        opened = [np.flatnonzero(sent.is_open) for sent in left]
        assert all(len(rows) for rows in opened), "what is decided is forgotten"
        assert all(sent.rows == sent.atomic.rows for sent in left if sent.atomic), "a group is sent as a whole"
        assert self._waiting_bytes == sum(entry.rest_bytes for entry in self.waiting)
        sent_bytes = sum(sent.bytes_of(rows) for sent, rows in zip(left, opened, strict=True))
        assert self.bytes == self._waiting_bytes + sent_bytes
        assert self.rows == sum(entry.rest_rows for entry in self.waiting) + sum(map(len, opened))

    # -- in

    def add(self, request: AnyRequest) -> None:
        if isinstance(request, BatchRequest):
            request.partition = self.partition
        request.ticket = self.next_ticket
        self.next_ticket += 1
        self.rows += request.rows
        self.bytes += request.bytes
        self._waiting_bytes += request.bytes
        self.waiting.append(request)

    @property
    def oldest_ticket(self) -> int:
        """Lowest ticket that may be unsettled: every request with a lower ticket is settled."""
        for sent in (*self.undecided, *self.sent):
            return sent.ticket
        return self.waiting[0].ticket if self.waiting else self.next_ticket

    @property
    def is_exhausted(self) -> bool:
        """Return whether the next request needs a sequence number that does not exist: a new client id is needed."""
        head = self.waiting[0] if self.waiting else None
        return self.next_sequence + (head.rows if isinstance(head, AtomicRequest) else 1) > SEQUENCE_MAX

    # -- out

    def take(self, limits: Limits, floor: int, *, format: int = 0, seen_time: int = 0) -> list[AppendBatch]:
        """Return the frames of the next message; an empty list if nothing waits or enough is in flight. `floor` is the
        highest id known to be committed, `format` that of the session; `seen_time` is sent with each frame."""
        assert not self.undecided, "what was sent before is decided before more is sent"
        if self.sent and not self._may_go_beside():
            return []
        self._messages += 1
        frames: list[AppendBatch] = []
        room, first_sequence = limits.frame_bytes_max, self.next_sequence
        while (frame := self._next(limits, format, room, floor, seen_time, is_first=not frames)) is not None:
            frames.append(frame)
            room = min(room, TOGETHER_BYTES) - self.sent[-1].bytes - FRAME_BYTES
        if frames:
            self._last_rows = self.next_sequence - first_sequence
        return frames

    def _next(
        self, limits: Limits, format: int, room: int, floor: int, seen_time: int, *, is_first: bool
    ) -> AppendBatch | None:
        """Return the next frame of a message, or None. The first frame may be a piece of a batch. A further frame must
        hold a whole request and fit into `room` bytes."""
        while self.waiting and not self.is_exhausted:
            head = self.waiting[0]
            if head.waiter.done():  # its caller gave up
                self._drop_head()
            elif (error := why_refused(head, limits, format)) is not None:
                self._drop_head()
                head.refuse(error)
            elif not is_first and head.rest_bytes > room:
                return None
            elif isinstance(head, BatchRequest):
                return replace(self._take_piece(head, room, floor), seen_time=seen_time)
            else:
                return self._take_requests(limits, room, floor, seen_time)
        return None

    @property
    def is_alone(self) -> bool:
        """Return whether one request waits, nothing is in flight, and the message before carried one transaction: then no
        other request is expected to come in this turn of the event loop and travel with it."""
        return len(self.waiting) == 1 and self._last_rows == 1 and not self.sent and not self.undecided

    def _may_go_beside(self) -> bool:
        """Return whether another message may be sent beside those in flight."""
        return (
            self._waiting_bytes >= self._worth_bytes
            and len({sent.message for sent in self.sent}) < self._messages_max
            and sum([sent.bytes for sent in self.sent]) < self._bytes_max
        )

    def _drop_head(self) -> None:
        head = self.waiting.popleft()
        self.rows -= head.rest_rows
        self.bytes -= head.rest_bytes
        self._waiting_bytes -= head.rest_bytes

    def _take_requests(self, limits: Limits, room: int, floor: int, seen_time: int) -> AppendBatch:
        requests: list[Request] = []
        size, rows_max = 0, min(ROWS_MAX, SEQUENCE_MAX - self.next_sequence)
        while self.waiting and len(requests) < rows_max:
            head = self.waiting[0]
            if isinstance(head, BatchRequest) or (requests and size + head.bytes > room):
                break
            if head.waiter.done():
                self._drop_head()
                continue
            if why_refused(head, limits, 0) is not None:  # refused when its turn comes
                break
            requests.append(head)
            size += head.bytes
            self.waiting.popleft()
        first_sequence = self.next_sequence
        self._keep(SentFrame(first_sequence, floor, len(requests), size, requests[0].ticket, self._messages, requests))
        return batch_of(
            requests, first_sequence, seen_time
        )  # last: the requests have left `waiting`, so they must be in `sent` if this raises

    def _take_piece(self, batch: BatchRequest, room: int, floor: int) -> AppendBatch:
        start, count = batch.taken, batch.rows
        if not isinstance(batch, AtomicRequest):
            rows_max = min(ROWS_MAX, SEQUENCE_MAX - self.next_sequence, batch.rows - start)
            sizes = batch.ends[start + 1 : start + rows_max + 1] - batch.ends[start]
            count = max(1, int(np.searchsorted(sizes, room, "right")))
        frame = batch.piece(start, start + count, self.next_sequence)
        size = int(batch.ends[start + count] - batch.ends[start])
        self._keep(SentFrame(self.next_sequence, floor, count, size, batch.ticket, self._messages, (), batch, start))
        batch.taken += count
        if batch.taken == batch.rows:
            self.waiting.popleft()
        return frame

    def _keep(self, sent: SentFrame) -> None:
        self.next_sequence += sent.rows
        self._waiting_bytes -= sent.bytes
        self.sent.append(sent)

    # -- outcomes

    def committed(self, frame: Committals) -> None:
        if self._commit_first(frame):
            return
        places = self._places(self.sent, frame.sequences)
        for sent, rows, inside in places:
            if sent.atomic is not None:
                sent.atomic.check_places(rows, frame.ids[inside])
        for sent, rows, inside in places:
            self._commit(sent, rows, frame.ids[inside])
        self.sent = [sent for sent in self.sent if not sent.is_decided]

    def refused(self, frame: Refusals) -> None:
        if not set(frame.reasons.tolist()) <= _REASONS.keys():
            raise BadFrame("the server refused a transaction for an unknown reason")
        for sent, rows, inside in self._places(self.sent, frame.sequences):
            self._close(sent, rows)
            reasons, conflicts, locks = frame.reasons[inside], frame.conflict_ids[inside], frame.locks[inside]
            if sent.batch is not None:
                sent.batch.rejected(rows + sent.start, reasons, conflicts, locks)
                continue
            columns = zip(rows.tolist(), reasons.tolist(), conflicts.tolist(), locks.tolist(), strict=True)
            for row, reason, conflict_id, lock in columns:
                sent.requests[row].settle(Rejected(_REASONS[reason], conflict_id, lock or None, self.partition))
        self.sent = [sent for sent in self.sent if not sent.is_decided]

    def untaken(self, first_sequence: int) -> None:
        """Put back all transactions from `first_sequence` on, in front of the queue: the server took none of them and
        never will."""
        at = [min(max(0, first_sequence - sent.first_sequence), sent.rows) for sent in self.sent]
        if not all(sent.is_open[row:].all() for sent, row in zip(self.sent, at, strict=True)):
            raise BadFrame("the server decided a transaction that it reported as not taken")
        if any(sent.atomic and 0 < row < sent.rows for sent, row in zip(self.sent, at, strict=True)):
            raise BadFrame("the server reported that it took a part of an atomic request")
        for sent, row in zip(reversed(self.sent), reversed(at), strict=True):
            if row < sent.rows:
                self._put_back(sent, row)
        self.sent = [sent for sent in self.sent if not sent.is_decided]

    def _put_back(self, sent: SentFrame, row: int) -> None:
        """Put back the rows of a frame from `row` on. Forget those whose caller gave up."""
        batch = sent.batch
        count, size = sent.rows - row, sent.bytes_of(np.arange(row, sent.rows))
        gone_rows = gone_bytes = 0
        if batch is None:
            for request in reversed(sent.requests[row:]):
                if request.waiter.done():
                    gone_rows, gone_bytes = gone_rows + 1, gone_bytes + request.bytes
                else:
                    self.waiting.appendleft(request)
        else:
            is_head = bool(self.waiting) and self.waiting[0] is batch
            if batch.waiter.done() or (batch.taken < batch.rows and not is_head):  # its rest was withdrawn
                batch.lost(slice(sent.start + row, sent.start + sent.rows))
                gone_rows, gone_bytes = count, size
            else:
                batch.taken = sent.start + row
                if not is_head:
                    self.waiting.appendleft(batch)
        self._waiting_bytes += size - gone_bytes
        self.rows -= gone_rows
        self.bytes -= gone_bytes
        sent.rows, sent.bytes = row, sent.bytes - size
        sent.is_open, sent.requests = sent.is_open[:row], sent.requests[:row]

    def link_lost(self) -> None:
        """Move what was sent to `undecided`: it may or may not reach the log."""
        self.undecided += self.sent
        self.sent = []

    def found(self, sequences: I64, ids: I64) -> None:
        """Settle transactions that were found in the log. Skip numbers that are decided already or belong to no
        undecided frame. The rest of an atomic request may be found later."""
        for sent in self.undecided:
            inside = _inside(sent, sequences)
            rows, its_ids = sequences[inside] - sent.first_sequence, ids[inside]
            news = sent.is_open[rows]
            if news.any():
                if sent.atomic is not None:
                    sent.atomic.check_places(rows, its_ids)
                self._commit(sent, rows[news], its_ids[news])
        self.undecided = [sent for sent in self.undecided if not sent.is_decided]

    def lost(self) -> None:
        """Reject everything that is still undecided: it is not in the log and never will be."""
        if any(sent.atomic and not sent.is_open.all() for sent in self.undecided):
            raise BadFrame("the log has a part of an atomic request")
        for sent in self.undecided:
            rows = np.flatnonzero(sent.is_open)
            self._close(sent, rows)
            if sent.batch is not None:
                sent.batch.lost(rows + sent.start)
                continue
            for row in rows.tolist():
                sent.requests[row].settle(Rejected(Reason.NOT_IN_LOG, partition=self.partition))
        self.undecided = []

    def adopt(self, lineage: Lineage) -> None:
        """Adopt the timelines of the log. Refuse waiting requests that rely on an id that is not in the log. Reject
        what was found above a fork. Cap the floor of undecided frames at the fork."""
        shared, self.timeline = lineage.shared_to(self.timeline), lineage.current
        if shared is not None:
            self._forked(shared)
        for entry in list(self.waiting):
            if entry.highest_mark != EMPTY and not lineage.covers(entry.timeline, entry.highest_mark):
                self._forget(entry)
                if isinstance(entry, BatchRequest):
                    entry.lost(slice(entry.taken, None))
                else:
                    entry.settle(Rejected(Reason.NOT_IN_LOG, partition=self.partition))

    def _forked(self, shared: int) -> None:
        for sent in self.undecided:
            sent.floor = min(sent.floor, shared)
            if sent.atomic is not None and sent.atomic.place is not None and sent.atomic.place > shared:
                self._close(sent, np.flatnonzero(sent.is_open))
        for batch in {id(entry): entry for entry in self._all() if isinstance(entry, BatchRequest)}.values():
            batch.forked(shared)
        self.undecided = [sent for sent in self.undecided if not sent.is_decided]

    def _forget(self, entry: AnyRequest) -> None:
        """Remove a request from the queue."""
        self.waiting.remove(entry)
        self.rows -= entry.rest_rows
        self.bytes -= entry.rest_bytes
        self._waiting_bytes -= entry.rest_bytes

    def _commit_first(self, frame: Committals) -> bool:
        """Commit the oldest frame if `frame` commits exactly its single requests; return whether it did. This is the
        fast path."""
        sent = self.sent[0] if self.sent else None
        if sent is None or sent.batch is not None or not sent.is_whole or len(frame) != sent.rows:
            return False
        sequences, ids = frame.lists
        if list(sequences) != list(range(sent.first_sequence, sent.first_sequence + sent.rows)):
            return False
        del self.sent[0]
        self.rows -= sent.rows
        self.bytes -= sent.bytes
        for request, id_ in zip(sent.requests, ids, strict=True):
            request.settle(Committed(id_, partition=self.partition, timeline=self.timeline))
        return True

    def _places(self, frames: list[SentFrame], sequences: I64) -> list[tuple[SentFrame, I64, Column]]:
        """Return the place of each sequence number: the frame, its rows, and their places in the column. Raise
        `BadFrame`, before anything is settled, if the server decided a transaction that was not sent, or decided one
        twice."""
        found, known = [], 0
        for sent in frames:
            inside = _inside(sent, sequences)
            rows = sequences[inside] - sent.first_sequence
            if len(rows):
                if not (sent.is_open[rows].all() and _differ(rows)):
                    raise BadFrame("the server decided a transaction twice")
                if sent.atomic and len(rows) < sent.rows:
                    raise BadFrame("the server decided a part of an atomic request")
                known += len(rows)
                found.append((sent, rows, inside))
        if known != len(sequences):
            raise BadFrame(f"the server decided {len(sequences) - known} transactions that were not waiting for it")
        return found

    def _commit(self, sent: SentFrame, rows: I64, ids: I64) -> None:
        self._close(sent, rows)
        if sent.batch is not None:
            sent.batch.outcome_timeline = self.timeline
            sent.batch.committed(rows + sent.start, ids)
            return
        requests = sent.requests
        for row, id_ in zip(rows.tolist(), ids.tolist(), strict=True):
            requests[row].settle(Committed(id_, partition=self.partition, timeline=self.timeline))

    def _close(self, sent: SentFrame, rows: I64) -> None:
        sent.is_open[rows] = False
        self.rows -= len(rows)
        self.bytes -= sent.bytes_of(rows)

    # -- deadlines

    def next_deadline(self) -> float | None:
        """Earliest deadline of the requests whose callers still wait."""
        return min((entry.deadline for entry in self._all() if not entry.waiter.done()), default=None)

    def expire(self, now: float, error: WaltzError) -> None:
        """Settle the requests whose deadline has passed: `Unknown` if they were sent, `error` if not. Rows that were
        sent are counted until they are decided."""
        for entry in self._all():
            if entry.deadline > now or entry.waiter.done():
                continue
            if isinstance(entry, BatchRequest):
                self._cut(entry, error)
            elif self.waiting and entry.ticket >= self.waiting[0].ticket:
                entry.refuse(error)
            else:
                entry.settle(Unknown(self.partition))
        while self.waiting and self.waiting[0].waiter.done():
            self._drop_head()

    def _cut(self, batch: BatchRequest, error: WaltzError) -> None:
        """Send no more of a batch."""
        if batch.taken < batch.rows:
            batch.refuse(error)
        batch.settle_as_it_is()

    def withdraw(self, error: WaltzError) -> None:
        """Refuse everything that was not sent."""
        while self.waiting:
            head = self.waiting[0]
            self._drop_head()
            head.refuse(error)

    def abandon(self) -> None:
        """Settle everything that was sent as unknown: its outcome stays unknown."""
        assert not self.waiting
        for entry in self._all():
            if isinstance(entry, BatchRequest):
                entry.settle_as_it_is()
            else:
                entry.settle(Unknown(self.partition))
        self.sent, self.undecided = [], []
        self.rows = self.bytes = 0

    def _all(self) -> Iterator[AnyRequest]:
        """Yield all requests, oldest first; a batch once for each of its frames."""
        for sent in (*self.undecided, *self.sent):
            if sent.batch is None:
                yield from sent.requests
            else:
                yield sent.batch
        yield from self.waiting


def _inside(sent: SentFrame, sequences: I64) -> Column:
    return (sequences >= sent.first_sequence) & (sequences < sent.first_sequence + sent.rows)


def _differ(rows: I64) -> bool:
    """Return whether no number is there twice. Numbers that increase, the usual case, are checked first because that is
    cheaper."""
    return bool((rows[1:] > rows[:-1]).all()) or len(np.unique(rows)) == len(rows)

"""What a client has to send to one partition, what it has sent, and what became of each transaction. Pure.

Submissions wait in the order in which they came. `take` makes frames of as many as may travel together, and gives them
their sequence numbers. What was sent is either still answerable on the present mount (`sent`), or went out on a mount that
is over (`undecided`): then only the log can tell, and `found` and `lost` say what it told. Nothing is ever sent twice,
unless the server said that it had not taken it (`untaken`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.checksum import I64
from waltzd.errors import BadFrame, WaltzError
from waltzd.frame import SEQUENCE_MAX, AppendBatch, Committals, Limits, Refusals
from waltzd.outcome import Committed, Reason, Rejected, Unknown
from waltzd.submission import Bundle, Request, Submission, batch_of, too_large

ROWS_MAX = 8192
"""Of one frame, so that it does not hold up those behind it for more than some ten milliseconds."""
WORTH_BYTES = 32 << 10
"""Less than this waits while another message is in flight, and what comes meanwhile travels with it: a message costs
everybody who handles it much more than what is in a small one."""
TOGETHER_BYTES = 256 << 10
"""Frames travel together up to this size; a larger message makes nothing faster and holds up those behind it."""
FRAME_BYTES = 128
"""What a frame costs besides its transactions."""
_REASONS = {int(reason): reason for reason in Reason}


@dataclass(eq=False)
class Sent:
    """One frame that left: single requests, or consecutive rows of one bundle."""

    first_sequence: int
    floor: int
    """Known to be committed before this left: whatever id its rows got is above."""
    rows: int
    bytes: int
    ticket: int
    message: int
    """With which it travelled."""
    requests: Sequence[Request]
    bundle: Bundle | None = None
    start: int = 0
    """Of the bundle's rows, the first in here."""
    is_open: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.is_open = np.ones(self.rows, np.bool_)

    @property
    def is_decided(self) -> bool:
        return not self.is_open.any()

    def bytes_of(self, rows: I64) -> int:
        if self.bundle is None:
            return sum([self.requests[row].bytes for row in rows.tolist()])
        at = rows + self.start
        return int((self.bundle.ends[at + 1] - self.bundle.ends[at]).sum())


Column: TypeAlias = NDArray[np.bool_]


class Outbox:
    def __init__(self, *, messages_max: int, bytes_max: int, worth_bytes: int = WORTH_BYTES) -> None:
        """`messages_max` and `bytes_max`: how much may be in flight before more is taken. One message always may; another
        one beside it when it is at least `worth_bytes` large."""
        self.waiting: deque[Submission] = deque()
        self.sent: list[Sent] = []
        self.undecided: list[Sent] = []
        self.rows = 0
        """Of all that is not decided; `bytes` likewise."""
        self.bytes = 0
        self.next_sequence = 0
        self.next_ticket = 0
        self._waiting_bytes = 0
        self._messages = 0
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._worth_bytes = worth_bytes

    # -- in

    def add(self, submission: Submission) -> None:
        submission.ticket = self.next_ticket
        self.next_ticket += 1
        self.rows += submission.rows
        self.bytes += submission.bytes
        self._waiting_bytes += submission.bytes
        self.waiting.append(submission)

    @property
    def oldest_ticket(self) -> int:
        """Every submission with a lower one is settled."""
        for sent in (*self.undecided, *self.sent):
            return sent.ticket
        return self.waiting[0].ticket if self.waiting else self.next_ticket

    @property
    def is_exhausted(self) -> bool:
        """No sequence number is left; a new client id brings new ones."""
        return self.next_sequence >= SEQUENCE_MAX

    # -- out

    def take(self, limits: Limits, floor: int) -> list[AppendBatch]:
        """The frames of the next message; none when there is nothing to send, or enough under way."""
        assert not self.undecided, "what was sent before is decided before more is sent"
        if self.sent and not self._may_go_beside():
            return []
        self._messages += 1
        frames: list[AppendBatch] = []
        room = limits.frame_bytes_max
        while (frame := self._next(replace(limits, frame_bytes_max=room), floor, is_first=not frames)) is not None:
            frames.append(frame)
            room = min(room, TOGETHER_BYTES) - self.sent[-1].bytes - FRAME_BYTES
        return frames

    def _next(self, limits: Limits, floor: int, *, is_first: bool) -> AppendBatch | None:
        """The first frame of a message may be a piece of something large; another one joins it when it is whole."""
        while self.waiting and not self.is_exhausted:
            head = self.waiting[0]
            if head.waiter.done():  # its caller has gone
                self._drop_head()
            elif (error := too_large(head, limits)) is not None:
                self._drop_head()
                head.refuse(error)
            elif not is_first and head.rest_bytes > limits.frame_bytes_max:
                return None
            elif isinstance(head, Bundle):
                return self._take_piece(head, limits, floor)
            else:
                return self._take_requests(limits, floor)
        return None

    def _may_go_beside(self) -> bool:
        """Whether another message may be in flight besides those that are."""
        return (
            self._waiting_bytes >= self._worth_bytes
            and len({sent.message for sent in self.sent}) < self._messages_max
            and sum([sent.bytes for sent in self.sent]) < self._bytes_max
        )

    def _drop_head(self) -> None:
        head = self.waiting.popleft()
        if isinstance(head, Bundle):
            rows, size = head.rows - head.taken, head.rest_bytes
        else:
            rows, size = 1, head.bytes
        self.rows -= rows
        self.bytes -= size
        self._waiting_bytes -= size

    def _take_requests(self, limits: Limits, floor: int) -> AppendBatch:
        requests: list[Request] = []
        size, room = 0, min(ROWS_MAX, SEQUENCE_MAX - self.next_sequence)
        while self.waiting and len(requests) < room:
            head = self.waiting[0]
            if isinstance(head, Bundle) or (requests and size + head.bytes > limits.frame_bytes_max):
                break
            if head.waiter.done():
                self._drop_head()
                continue
            if too_large(head, limits) is not None:  # refused when its turn comes
                break
            requests.append(head)
            size += head.bytes
            self.waiting.popleft()
        first_sequence = self.next_sequence
        self._keep(Sent(first_sequence, floor, len(requests), size, requests[0].ticket, self._messages, requests))
        return batch_of(requests, first_sequence)  # last: they have left `waiting`, and must be settled whatever happens

    def _take_piece(self, bundle: Bundle, limits: Limits, floor: int) -> AppendBatch:
        start = bundle.taken
        room = min(ROWS_MAX, SEQUENCE_MAX - self.next_sequence, bundle.rows - start)
        sizes = bundle.ends[start + 1 : start + room + 1] - bundle.ends[start]
        count = max(1, int(np.searchsorted(sizes, limits.frame_bytes_max, "right")))
        batch = bundle.piece(start, start + count, self.next_sequence)
        size = int(sizes[count - 1])
        self._keep(Sent(self.next_sequence, floor, count, size, bundle.ticket, self._messages, (), bundle, start))
        bundle.taken += count
        if bundle.taken == bundle.rows:
            self.waiting.popleft()
        return batch

    def _keep(self, sent: Sent) -> None:
        self.next_sequence += sent.rows
        self._waiting_bytes -= sent.bytes
        self.sent.append(sent)

    # -- what became of it

    def committed(self, frame: Committals) -> None:
        for sent, rows, inside in self._places(self.sent, frame.sequences):
            self._commit(sent, rows, frame.ids[inside])
        self.sent = [sent for sent in self.sent if not sent.is_decided]

    def refused(self, frame: Refusals) -> None:
        if not set(frame.reasons.tolist()) <= _REASONS.keys():
            raise BadFrame("the server refused a transaction for a reason that does not exist")
        for sent, rows, inside in self._places(self.sent, frame.sequences):
            self._close(sent, rows)
            reasons, conflicts, locks = frame.reasons[inside], frame.conflict_ids[inside], frame.locks[inside]
            if sent.bundle is not None:
                sent.bundle.rejected(rows + sent.start, reasons, conflicts, locks)
                continue
            columns = zip(rows.tolist(), reasons.tolist(), conflicts.tolist(), locks.tolist(), strict=True)
            for row, reason, conflict_id, lock in columns:
                sent.requests[row].settle(Rejected(_REASONS[reason], conflict_id, lock or None))
        self.sent = [sent for sent in self.sent if not sent.is_decided]

    def untaken(self, first_sequence: int) -> None:
        """The server took nothing from this number on, and never will: that waits again, in front of everything else."""
        at = [min(max(0, first_sequence - sent.first_sequence), sent.rows) for sent in self.sent]
        if not all(sent.is_open[row:].all() for sent, row in zip(self.sent, at, strict=True)):
            raise BadFrame("the server decided a transaction that it says it has not taken")
        for sent, row in zip(reversed(self.sent), reversed(at), strict=True):
            if row < sent.rows:
                self._put_back(sent, row)
        self.sent = [sent for sent in self.sent if not sent.is_decided]

    def _put_back(self, sent: Sent, row: int) -> None:
        """Its rows from this one on. Those for which nobody waits any more are forgotten."""
        bundle = sent.bundle
        count, size = sent.rows - row, sent.bytes_of(np.arange(row, sent.rows))
        gone_rows = gone_bytes = 0
        if bundle is None:
            for request in reversed(sent.requests[row:]):
                if request.waiter.done():
                    gone_rows, gone_bytes = gone_rows + 1, gone_bytes + request.bytes
                else:
                    self.waiting.appendleft(request)
        else:
            is_head = bool(self.waiting) and self.waiting[0] is bundle
            if bundle.waiter.done() or (bundle.taken < bundle.rows and not is_head):  # its rest was given up
                bundle.lost(slice(sent.start + row, sent.start + sent.rows))
                gone_rows, gone_bytes = count, size
            else:
                bundle.taken = sent.start + row
                if not is_head:
                    self.waiting.appendleft(bundle)
        self._waiting_bytes += size - gone_bytes
        self.rows -= gone_rows
        self.bytes -= gone_bytes
        sent.rows, sent.bytes = row, sent.bytes - size
        sent.is_open, sent.requests = sent.is_open[:row], sent.requests[:row]

    def link_lost(self) -> None:
        """What was sent may or may not reach the log."""
        self.undecided += self.sent
        self.sent = []

    def found(self, sequences: I64, ids: I64) -> None:
        """These are in the log. Those among them that are known by now, or were never ours to wait for, are left alone."""
        for sent in self.undecided:
            inside = _inside(sent, sequences)
            rows, its_ids = sequences[inside] - sent.first_sequence, ids[inside]
            news = sent.is_open[rows]
            if news.any():
                self._commit(sent, rows[news], its_ids[news])
        self.undecided = [sent for sent in self.undecided if not sent.is_decided]

    def lost(self) -> None:
        """What is still undecided will never be in the log."""
        for sent in self.undecided:
            rows = np.flatnonzero(sent.is_open)
            self._close(sent, rows)
            if sent.bundle is not None:
                sent.bundle.lost(rows + sent.start)
                continue
            for row in rows.tolist():
                sent.requests[row].settle(Rejected(Reason.LOST))
        self.undecided = []

    def _places(self, frames: list[Sent], sequences: I64) -> list[tuple[Sent, I64, Column]]:
        """Where these sequence numbers stand: the frame, its rows, and their places in the column. All of them were sent,
        none was decided before, or the server is not to be believed and nothing is taken from it."""
        found, known = [], 0
        for sent in frames:
            inside = _inside(sent, sequences)
            rows = sequences[inside] - sent.first_sequence
            if len(rows):
                if not (sent.is_open[rows].all() and _differ(rows)):
                    raise BadFrame("the server decided a transaction twice")
                known += len(rows)
                found.append((sent, rows, inside))
        if known != len(sequences):
            raise BadFrame(f"the server decided {len(sequences) - known} transactions that were not waiting for it")
        return found

    def _commit(self, sent: Sent, rows: I64, ids: I64) -> None:
        self._close(sent, rows)
        if sent.bundle is not None:
            sent.bundle.committed(rows + sent.start, ids)
            return
        requests = sent.requests
        for row, id_ in zip(rows.tolist(), ids.tolist(), strict=True):
            requests[row].settle(Committed(id_))

    def _close(self, sent: Sent, rows: I64) -> None:
        sent.is_open[rows] = False
        self.rows -= len(rows)
        self.bytes -= sent.bytes_of(rows)

    # -- giving up

    def next_deadline(self) -> float | None:
        """Of the first submission whose caller still waits. All of a partition wait equally long."""
        return next((entry.deadline for entry in self._all() if not entry.waiter.done()), None)

    def expire(self, now: float, error: WaltzError) -> None:
        """Who has waited too long is told: what was sent is unknown, what was not sent never will be. Rows that were sent
        count on until they are decided."""
        for entry in self._all():
            if entry.deadline > now:
                break
            if entry.waiter.done():
                continue
            if isinstance(entry, Bundle):
                self._cut(entry, error)
            elif self.waiting and entry.ticket >= self.waiting[0].ticket:
                entry.refuse(error)
            else:
                entry.settle(Unknown())
        while self.waiting and self.waiting[0].waiter.done():
            self._drop_head()

    def _cut(self, bundle: Bundle, error: WaltzError) -> None:
        """Send no more of it."""
        if bundle.taken < bundle.rows:
            bundle.refuse(error)
        bundle.settle_as_it_is()

    def withdraw(self, error: WaltzError) -> None:
        """What was not sent never will be."""
        while self.waiting:
            head = self.waiting[0]
            self._drop_head()
            head.refuse(error)

    def abandon(self) -> None:
        """Nobody will find out what became of what was sent."""
        assert not self.waiting
        for entry in self._all():
            if isinstance(entry, Bundle):
                entry.settle_as_it_is()
            else:
                entry.settle(Unknown())
        self.sent, self.undecided = [], []
        self.rows = self.bytes = 0

    def _all(self) -> Iterator[Submission]:
        """Oldest first; a bundle once for each of its pieces."""
        for sent in (*self.undecided, *self.sent):
            if sent.bundle is None:
                yield from sent.requests
            else:
                yield sent.bundle
        yield from self.waiting


def _inside(sent: Sent, sequences: I64) -> Column:
    return (sequences >= sent.first_sequence) & (sequences < sent.first_sequence + sent.rows)


def _differ(rows: I64) -> bool:
    """Whether no number is there twice. They rise when all goes well."""
    return bool((rows[1:] > rows[:-1]).all()) or len(np.unique(rows)) == len(rows)

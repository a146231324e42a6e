"""State of a client in one partition: where it stands, what it has seen, and what it may do next. Pure.

The hard question is what became of a transaction whose answer did not arrive. Sending it again could append it twice;
giving it up could report a transaction as lost that is in the log. Only the log can tell, by three facts:

1. No sequence number is used twice under one client id, and both are in the head of the record.
2. A newer mount displaces the older one: a transaction of the older one that has no id by then never gets one. So all that
   got an id lies at or below the **barrier**, the highest id that was assigned when the newer mount was made.
3. Each frame keeps its **floor**, the highest id known to be committed when it was sent. Ids of its rows are above.

So the committed heads above the oldest undecided floor, up to the barrier, decide everything that is undecided: a request
found there is committed, any other one never will be. Until then nothing else is sent, so a mount has one of two jobs:

             located              nothing undecided
  LOCATING ──────────► MOUNTING ─────────────────────► READY      sends, receives outcomes and the feed
     ▲                  │    ▲
     │                  ▼    │ all decided: mounted again
     │                 ASKING                                     reads heads up to the barrier
     └── link lost, or refused, in every state

**Timelines.** A position is an id in one history of the log, and an operator may have ended that history at a fork
(`waltzd.protocol.timelines`). A mount request names the timeline of its position, and the answer names all timelines of
the log. If the position is not above the fork, the client adopts the current timeline; above it the server refuses the
mount. Undecided requests are resolved first, against the current log only: an id above the fork is not in it.

`ends` saves the question: an owner that hands over in order reports which requests it did not take.

Three more rules.
- A session lower than one that was seen belongs to an owner that was replaced and has not noticed. Its answers are refused.
- What was fed is kept apart from what was applied (`waltzd.client.view`). Bytes in the inbox use up the credit of the feed;
  outcomes need no credit. So an application that hangs stops its feed, never its outcomes.
- The highest time that the client has seen is sent with each batch, so that an effect is never earlier than its cause. An
  owner whose clock is far behind refuses it (`ClockAhead`); then none is sent until that clock has caught up.
"""

from __future__ import annotations

import enum
from collections import deque
from uuid import UUID

import numpy as np

from waltzd.client.outbox import Outbox
from waltzd.errors import (
    BadArgument,
    CannotConnect,
    ClientAhead,
    Displaced,
    ForeignCluster,
    NoSuchPartition,
    NotGranted,
    NotPermitted,
    OtherTimeline,
    Superseded,
    TooLarge,
    Trimmed,
)
from waltzd.errors.operations import BadFrame, NotOwner
from waltzd.format.checksum import I64
from waltzd.format.record import HeadArray
from waltzd.protocol.batches import (
    INTRODUCTION,
    AppendBatch,
    Committals,
    Credit,
    FeedMode,
    Introduction,
    Mounted,
    MountRequest,
    PartitionLocation,
    Refusals,
    Registration,
)
from waltzd.protocol.positions import timeline_of
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST, Lineage

FINAL = (
    BadArgument,
    BadFrame,
    ClientAhead,
    Displaced,
    ForeignCluster,
    NoSuchPartition,
    NotGranted,
    NotPermitted,
    OtherTimeline,
    Superseded,
    TooLarge,
    Trimmed,
)
"""Errors of a refused mount that the next attempt would meet again."""
STORY_EVENTS = 200


class MountState(enum.Enum):
    IDLE = "not mounted"
    LOCATING = "looking for the owner"
    MOUNTING = "mounting"
    ASKING = "asking what became of earlier transactions"
    READY = "ready"


class MountEvent(enum.Enum):
    ACTIVATED = "activated"
    LOCATED = "located"
    ASKED = "mounted, with something undecided"
    ANSWERED = "all that was undecided is decided"
    MOUNTED = "mounted"
    LINK_LOST = "the link was lost"
    EXHAUSTED = "the sequence numbers are used up"
    ENDED = "ended"


MOVES: dict[MountState, dict[MountEvent, MountState]] = {
    MountState.IDLE: {MountEvent.ACTIVATED: MountState.LOCATING},
    MountState.LOCATING: {MountEvent.LOCATED: MountState.MOUNTING, MountEvent.ENDED: MountState.IDLE},
    MountState.MOUNTING: {
        MountEvent.MOUNTED: MountState.READY,
        MountEvent.ASKED: MountState.ASKING,
        MountEvent.LINK_LOST: MountState.LOCATING,
        MountEvent.ENDED: MountState.IDLE,
    },
    MountState.ASKING: {
        MountEvent.ANSWERED: MountState.MOUNTING,
        MountEvent.LINK_LOST: MountState.LOCATING,
        MountEvent.ENDED: MountState.IDLE,
    },
    MountState.READY: {
        MountEvent.LINK_LOST: MountState.LOCATING,
        MountEvent.EXHAUSTED: MountState.LOCATING,
        MountEvent.ENDED: MountState.IDLE,
    },
}


class SeenTime:
    """Highest time of a transaction that a client has seen, in any partition."""

    def __init__(self) -> None:
        self.time = 0

    def note(self, times: I64 | None) -> None:
        """Note the times of consecutive transactions, which never decrease."""
        if times is not None and len(times):
            self.time = max(self.time, int(times[-1]))


class Mount:
    def __init__(
        self,
        partition: int,
        feed: FeedMode,
        *,
        feed_bytes_max: int,
        outbox: Outbox,
        seen: SeenTime | None = None,
        introduction: Introduction = INTRODUCTION,
    ) -> None:
        """Create an idle mount; `seen` and `introduction` are shared by all partitions of a client."""
        self._instance, self._version = introduction.instance, introduction.version
        self.partition = partition
        self.feed = feed
        self.outbox = outbox
        self.seen = seen or SeenTime()
        self.tells_time = True
        """Whether the highest time is sent; False while the clock of the owner is far behind it."""
        self.state = MountState.IDLE
        self.client: int | None = None
        """Client id; None if a new one is needed before the next mount."""
        self._token = b""
        self._epoch = 0
        self.received = EMPTY
        """Highest id that was fed."""
        self.known = EMPTY
        """Highest id known to be committed."""
        self.timeline = FIRST
        """Identity of the timeline in which `received` and `known` are ids."""
        self.lineage: Lineage | None = None
        """Timelines of the log as the owner reported them at the last mount; None before the first mount since the
        activation."""
        self.number = 0
        self.epochs = 0
        """Number of times that the mount became ready."""
        self.attempts = 0
        """Number of links lost since the last link that received anything."""
        self.place: PartitionLocation | None = None
        self.mounted: Mounted | None = None
        self.story: deque[str] = deque(maxlen=STORY_EVENTS)
        self._feed_bytes_max = feed_bytes_max
        self._inbox_bytes = 0
        """Bytes that were fed and are not applied yet."""
        self._credit = 0
        """Bytes of feed that the server may still send on this mount; its last message may overdraw it."""
        self._asked = EMPTY
        """Id up to which the log was read, while asking."""
        self._is_refused = False

    def check(self) -> None:
        """Assert the invariants of the mount."""
        outbox = self.outbox
        outbox.check()
        assert self.received <= self.known
        assert self._inbox_bytes >= 0
        assert self._credit <= self._feed_bytes_max
        assert not outbox.sent or self.state is MountState.READY, "only an open mount can still be answered"
        assert not outbox.undecided or self.state not in (MountState.IDLE, MountState.READY), (
            "first the question, then the feed"
        )
        assert not (outbox.sent or outbox.undecided) or self.client is not None
        assert all(sent.floor <= self.known for sent in (*outbox.undecided, *outbox.sent))
        if self.state is MountState.READY:
            assert self.lineage is not None
            assert self.timeline == self.lineage.current, "what is fed and sent belongs to the current timeline"
            assert self._credit <= max(0, self._feed_bytes_max - self._inbox_bytes)
        if self.state is MountState.ASKING:
            assert self.mounted is not None
            assert outbox.undecided[0].floor <= self._asked < self.mounted.barrier

    def _move(self, event: MountEvent, detail: str = "") -> None:
        self.story.append(f"{self.state.name} {event.name} {detail}".rstrip())
        assert event in MOVES[self.state], f"{event} in {self.state}: {list(self.story)}"
        self.state = MOVES[self.state][event]

    # -- from the application

    def activated(self, mark: int) -> None:
        """Start at a mark: that of the view, or without a view the end of the log."""
        self._move(MountEvent.ACTIVATED, f"mark={mark}")
        self.received = self.known = int(mark)
        self.timeline = timeline_of(mark)
        self.lineage = None  # that of the last mount may not have the timeline of the mark yet
        self._inbox_bytes = 0
        self.attempts = 0

    def forget(self) -> None:
        """Forget the position, if there is no view: the next activation asks for the end of the log."""
        assert self.state is MountState.IDLE
        self.received = self.known = EMPTY
        self.timeline = FIRST

    def consumed(self, size: int) -> None:
        """Give back the credit for `size` bytes of feed that the application has applied."""
        self._inbox_bytes -= size
        assert self._inbox_bytes >= 0

    def ended(self) -> None:
        if self.state is not MountState.IDLE:
            self._move(MountEvent.ENDED)
        self.outbox.link_lost()

    # -- from the network

    def registered(self, registration: Registration) -> None:
        """Take a new client id; its sequence numbers start at 0."""
        assert not self.outbox.sent
        assert not self.outbox.undecided
        self.client, self._token, self._epoch = registration.client, registration.token, registration.epoch
        self.outbox.next_sequence = 0

    def located(self, place: PartitionLocation) -> None:
        self._move(MountEvent.LOCATED, f"{place.server} generation={place.generation}")
        if self.place is not None and place.generation > self.place.generation:
            # The failures and the clock of the owner before do not count for this one.
            self.attempts, self.tells_time = 0, True
        self.place = place

    def request(self, key: UUID) -> MountRequest:
        """Return the first frame of a new mount."""
        assert self.state is MountState.MOUNTING
        assert self.place is not None
        assert self.client is not None
        self.number += 1
        self._is_refused = False
        feed, mark = self.feed, self.position
        if self.outbox.undecided:
            feed, mark = FeedMode.HEADS, self.outbox.undecided[0].floor
            self._asked = mark
        self._credit = 0
        self._credit = max(0, self._room())
        return MountRequest(
            cluster_key=key,
            partition=self.partition,
            generation=self.place.generation,
            client=self.client,
            token=self._token,
            number=self.number,
            mark=mark,
            feed=feed,
            credit=self._credit,
            epoch=self._epoch,
            instance=self._instance,
            version=self._version,
            asks=bool(self.outbox.undecided),
            timeline=None if self.timeline == FIRST else self.timeline,
        )

    def answered(self, frame: Mounted) -> None:
        """Take the answer of the server: the mount is made."""
        if self.mounted is not None and frame.session < self.mounted.session:
            raise NotOwner(
                f"partition {self.partition} is in session {self.mounted.session}; the server that answered is still in "
                f"session {frame.session}"
            )
        self._follow_timelines(frame)
        self.mounted = frame
        detail = f"number={self.number} session={frame.session} barrier={frame.barrier}"
        if self.outbox.undecided:
            self._move(MountEvent.ASKED, detail)
            self._conclude()
        else:
            self._move(MountEvent.MOUNTED, detail)
            self.epochs += 1

    def _follow_timelines(self, frame: Mounted) -> None:
        """Adopt the current timeline of the log if the position is not above the fork. Else raise `OtherTimeline`,
        unless something is undecided. An older server does not check the position."""
        try:
            lineage = Lineage(frame.timelines)
        except ValueError as error:
            raise CannotConnect(f"the owner reported invalid timelines of partition {self.partition}: it {error}") from None
        shared = lineage.shared_to(self.timeline)
        is_on_log = shared is None or self.position <= shared
        if not self.outbox.undecided:
            lineage.check(self.timeline, self.position, what="this client", partition=self.partition)
        self.lineage = lineage
        self.outbox.adopt(lineage)
        if shared is not None:
            self._asked = min(self._asked, shared)
            if is_on_log:
                self.known = min(self.known, shared)
                self.timeline = lineage.current
                self.story.append(f"went over to timeline {lineage.number} at id {self.position}")

    @property
    def position(self) -> int:
        """Highest id that this client has seen of the log: the end of its feed, or without a feed the highest known
        committed id."""
        return self.known if self.feed is FeedMode.NONE else self.received

    def fed(self, first_id: int, last_id: int, size: int) -> None:
        """Take committed transactions that were fed."""
        if self.state is not MountState.READY or self.feed is FeedMode.NONE:
            raise BadFrame(f"the server feeds ids {first_id} to {last_id} that were not asked for")
        if first_id != self.received + 1 or last_id < first_id:
            raise BadFrame(f"the feed continues at id {first_id}, not at {self.received + 1}")
        self.received = last_id
        self.known = max(self.known, last_id)
        self._inbox_bytes += size
        self._credit -= size
        self.attempts = 0

    def fed_heads(self, heads: HeadArray) -> None:
        """Take heads that were fed, for `FeedMode.HEADS`."""
        if self.feed is not FeedMode.HEADS:
            raise BadFrame("the server feeds heads that were not asked for")
        ids = _consecutive(heads, self.received + 1)
        self.fed(int(ids[0]), int(ids[-1]), heads.nbytes)

    def told(self, heads: HeadArray) -> None:
        """Take heads that were read while asking."""
        assert self.state is MountState.ASKING
        ids = _consecutive(heads, self._asked + 1)
        own = heads["client"] == self.client
        self.outbox.found(heads["sequence"][own].astype(np.int64), ids[own])
        self._asked = int(ids[-1])
        if self.lineage is not None and self.timeline == self.lineage.current:
            self.known = max(self.known, self._asked)
        self._credit -= heads.nbytes
        self.attempts = 0
        self._conclude()

    def _conclude(self) -> None:
        assert self.mounted is not None
        if self._asked >= self.mounted.barrier:
            self.outbox.lost()
        if not self.outbox.undecided:
            self._move(MountEvent.ANSWERED, f"asked={self._asked}")

    def committed(self, frame: Committals) -> None:
        frame.check()
        self.outbox.committed(frame)
        if frame.time >= self.seen.time:
            self.seen.time, self.tells_time = frame.time, True
        self.known = max(self.known, frame.highest_id)
        self.attempts = 0

    def refused(self, frame: Refusals) -> None:
        if {len(frame.reasons), len(frame.conflict_ids), len(frame.locks)} != {len(frame.sequences)}:
            raise BadFrame("the columns of the refused transactions have different lengths")
        self.outbox.refused(frame)
        self.attempts = 0

    def ends(self, untaken: int | None) -> None:
        """Take the last word of the server on this mount: it took nothing from the sequence number `untaken` on."""
        self._is_refused = True
        if untaken is not None:
            self.outbox.untaken(untaken)

    def refused_time(self) -> None:
        """Send no time to this owner any more: its clock is far behind the highest time that was seen."""
        self.tells_time = False

    def link_lost(self) -> None:
        self.outbox.link_lost()
        if self.state is MountState.LOCATING:  # not found, or left because the sequence numbers were used up
            self.story.append("LOCATING again")
        else:
            self._move(MountEvent.LINK_LOST)
        self.attempts += 1

    # -- to the network

    def take(self) -> list[AppendBatch]:
        """Return the frames of the next message; an empty list if nothing may be sent now."""
        if self.state is not MountState.READY or self._is_refused:
            return []
        mounted, seen_time = self.mounted, self.seen.time if self.tells_time else 0
        assert mounted is not None
        batches = self.outbox.take(mounted.limits, self.known, format=mounted.format, seen_time=seen_time)
        if not batches and self.outbox.is_exhausted and self.outbox.waiting and not self.outbox.sent:
            self.client = None
            self._move(MountEvent.EXHAUSTED)
        return batches

    def credit(self) -> Credit | None:
        """Return more credit for the server, if there is enough to be worth a frame; else None."""
        if self.state not in (MountState.READY, MountState.ASKING):
            return None
        room = self._room()
        if room <= 0 or room < self._feed_bytes_max // 4:
            return None
        self._credit += room
        return Credit(room)

    def _room(self) -> int:
        if self.outbox.undecided:
            return self._feed_bytes_max - self._credit
        if self.feed is FeedMode.NONE:
            return 0
        return self._feed_bytes_max - self._credit - self._inbox_bytes

    # -- status

    def sentence(self) -> str:
        where = (
            f" at {self.place.server} ({self.place.address})" if self.place and self.state is not MountState.IDLE else ""
        )
        rest = ""
        if self.state is MountState.ASKING and self.mounted is not None:
            rest = f": has read up to {self._asked}, waits for {self.mounted.barrier} to be committed"
        elif self.state is MountState.READY and self.outbox.sent:
            rest = f", waits for {sum([sent.rows for sent in self.outbox.sent])} transactions to be decided"
        if not self.tells_time:
            rest += "; its clock is far behind those of other servers, so it is told no times"
        return f"{self.state.value}{where}{rest}"


def _consecutive(heads: HeadArray, first_id: int) -> I64:
    ids = heads["id"].astype(np.int64)
    if len(ids) == 0 or ids[0] != first_id or (np.diff(ids) != 1).any():
        raise BadFrame(f"the feed does not continue at id {first_id}")
    return ids

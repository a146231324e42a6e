"""One partition as its client sees it: where it stands, what it has seen, and what it may do next. Pure.

The hard question is what became of a transaction whose answer did not come. Sending it again could append it twice;
giving it up could call lost what is in the log. Only the log can tell, and three facts say where to look:

1. No sequence number is used twice under one client id, and both stand in the head of the record.
2. A newer mount displaces the older one: what that sent and has no id by then never gets one. So all that it did get lies
   at or below the **barrier**, the highest id that was given out when the newer mount came.
3. Each frame keeps its **floor**, the highest id known to be committed when it left. Its rows got higher ids, if any.

So the committed heads above the oldest undecided floor, up to the barrier, decide everything that is undecided: a request
found there is committed, any other never will be. Until that is known nothing else is sent, so a mount has one of two jobs:

             located              nothing undecided
  LOCATING ──────────► MOUNTING ─────────────────────► READY      sends, hears outcomes, takes the feed
     ▲                  │    ▲
     │                  ▼    │ all decided: mounted again
     │                 ASKING                                     reads heads up to the barrier
     └── link lost, or refused, in every state

**Timelines.** A position is an id in one history of the log, and an operator may have ended that one at a fork
(`waltzd.protocol.timelines`). A mount names the timeline of its position, and learns all timelines of the log. Where the
position is not above the fork, the client goes over to the current timeline; above it the server refuses the mount. What is
undecided is resolved first, and against the current log only: a request that got an id above the fork is not in there.

`ends` is the exception that saves the question: an owner that hands over in order says which requests it did not take.

Three more rules. A session below one that was seen belongs to an owner that was replaced and has not noticed: it is not
believed. And what was fed is kept apart from what was applied (`waltzd.client.view`): bytes in the inbox count against the
credit of the feed, while outcomes need none. So an application that stands still stops its feed, never its outcomes. And
the highest time that the client has seen goes with what it sends, so that an effect is never earlier than its cause; to an
owner whose clock is far behind, which refuses it (`ClockAhead`), none goes until its times have caught up: times decide
nothing.
"""

from __future__ import annotations

import enum
from collections import deque
from uuid import UUID

import numpy as np

from waltzd.client.outbox import Outbox
from waltzd.errors import (
    BadArgument,
    BadFrame,
    CannotConnect,
    ClientAhead,
    Displaced,
    ForeignCluster,
    NoSuchPartition,
    NotGranted,
    NotOwner,
    NotPermitted,
    OtherTimeline,
    Superseded,
    TooLarge,
    Trimmed,
)
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
    Place,
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
"""A server that refuses a mount with one of these refuses the next one too."""
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
    """The highest time of a transaction that a client has seen, in any partition."""

    def __init__(self) -> None:
        self.time = 0

    def note(self, times: I64 | None) -> None:
        """Times of consecutive transactions, which never fall."""
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
        """`seen`: shared by all partitions of a client, as `introduction` is."""
        self._instance, self._version = introduction.instance, introduction.version
        self.partition = partition
        self.feed = feed
        self.outbox = outbox
        self.seen = seen or SeenTime()
        self.tells_time = True
        """False: the clock of this owner is far behind the highest time that was seen."""
        self.state = MountState.IDLE
        self.client: int | None = None
        """None: a new client id is needed before the next mount."""
        self._token = b""
        self._epoch = 0
        self.received = EMPTY
        """The highest id that was fed."""
        self.known = EMPTY
        """The highest id that is known to be committed."""
        self.timeline = FIRST
        """Identity of the timeline in which `received` and `known` are ids."""
        self.lineage: Lineage | None = None
        """Timelines of the log as the owner told them at the last mount; None before the first mount."""
        self.number = 0
        self.epochs = 0
        """How often it became ready."""
        self.attempts = 0
        """Links lost since the last one that brought anything."""
        self.place: Place | None = None
        self.mounted: Mounted | None = None
        self.story: deque[str] = deque(maxlen=STORY_EVENTS)
        self._feed_bytes_max = feed_bytes_max
        self._inbox_bytes = 0
        """Fed, and not yet applied by the application."""
        self._credit = 0
        """Bytes of feed that the server may still send on this mount; its last message may overdraw it."""
        self._asked = EMPTY
        """While asking: the log was read up to here."""
        self._is_refused = False

    def check(self) -> None:
        """What is true of the whole mount after every event."""
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
        """The view is at this mark; without a view, the log is."""
        self._move(MountEvent.ACTIVATED, f"mark={mark}")
        self.received = self.known = int(mark)
        self.timeline = timeline_of(mark)
        self._inbox_bytes = 0
        self.attempts = 0

    def forget(self) -> None:
        """Without a view, where the log stands is asked anew."""
        assert self.state is MountState.IDLE
        self.received = self.known = EMPTY
        self.timeline = FIRST

    def consumed(self, size: int) -> None:
        """The application has applied so many bytes of feed."""
        self._inbox_bytes -= size
        assert self._inbox_bytes >= 0

    def ended(self) -> None:
        if self.state is not MountState.IDLE:
            self._move(MountEvent.ENDED)
        self.outbox.link_lost()

    # -- from the network

    def registered(self, registration: Registration) -> None:
        """A new client id: its sequence numbers start at 0."""
        assert not self.outbox.sent
        assert not self.outbox.undecided
        self.client, self._token, self._epoch = registration.client, registration.token, registration.epoch
        self.outbox.next_sequence = 0

    def located(self, place: Place) -> None:
        self._move(MountEvent.LOCATED, f"{place.server} generation={place.generation}")
        if self.place is not None and place.generation > self.place.generation:
            # Another owner: the silence, and the clock, of the one before say nothing about this one.
            self.attempts, self.tells_time = 0, True
        self.place = place

    def request(self, key: UUID) -> MountRequest:
        """The first frame of a new mount."""
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
        """The mount stands."""
        if self.mounted is not None and frame.session < self.mounted.session:
            raise NotOwner(
                f"partition {self.partition} is in session {self.mounted.session}; who answered is still in session "
                f"{frame.session}"
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
        """Go over to the current timeline of the log where the position allows it. Raises `OtherTimeline` where it does
        not, and nothing is undecided: an older server does not look."""
        try:
            lineage = Lineage(frame.timelines)
        except ValueError as error:
            raise CannotConnect(f"the timelines of partition {self.partition} cannot be right: it {error}") from None
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
        """What this client has seen of the log: up to where it was fed, or without a feed what it knows to be committed."""
        return self.known if self.feed is FeedMode.NONE else self.received

    def fed(self, first_id: int, last_id: int, size: int) -> None:
        """Committed transactions came, for the application."""
        if self.state is not MountState.READY or self.feed is FeedMode.NONE:
            raise BadFrame(f"the server feeds ids {first_id} to {last_id} that were not asked for")
        if first_id != self.received + 1 or last_id < first_id:
            raise BadFrame(f"the feed goes on at id {first_id}, not at {self.received + 1}")
        self.received = last_id
        self.known = max(self.known, last_id)
        self._inbox_bytes += size
        self._credit -= size
        self.attempts = 0

    def fed_heads(self, heads: HeadArray) -> None:
        """As `fed`, for `FeedMode.HEADS`."""
        if self.feed is not FeedMode.HEADS:
            raise BadFrame("the server feeds heads that were not asked for")
        ids = _consecutive(heads, self.received + 1)
        self.fed(int(ids[0]), int(ids[-1]), heads.nbytes)

    def told(self, heads: HeadArray) -> None:
        """Heads came, while asking."""
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
        if len(frame.sequences) == 0 or len(frame.ids) != len(frame.sequences):
            raise BadFrame("the columns of the committed transactions do not fit each other")
        self.outbox.committed(frame)
        if frame.time >= self.seen.time:
            self.seen.time, self.tells_time = frame.time, True
        self.known = max(self.known, int(frame.ids.max()))
        self.attempts = 0

    def refused(self, frame: Refusals) -> None:
        if {len(frame.reasons), len(frame.conflict_ids), len(frame.locks)} != {len(frame.sequences)}:
            raise BadFrame("the columns of the refused transactions do not fit each other")
        self.outbox.refused(frame)
        self.attempts = 0

    def ends(self, untaken: int | None) -> None:
        """The last word of the server on this mount. It took nothing from the sequence number `untaken` on."""
        self._is_refused = True
        if untaken is not None:
            self.outbox.untaken(untaken)

    def refused_time(self) -> None:
        """The server's clock is far behind the time that it was told."""
        self.tells_time = False

    def link_lost(self) -> None:
        self.outbox.link_lost()
        if self.state is MountState.LOCATING:  # it was not found, or left because its numbers were used up
            self.story.append("LOCATING again")
        else:
            self._move(MountEvent.LINK_LOST)
        self.attempts += 1

    # -- what to do next

    def take(self) -> list[AppendBatch]:
        """The next message of transactions; empty when nothing may go now."""
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
        """More credit, when it is worth a frame."""
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

    # -- for people

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
        raise BadFrame(f"the feed does not go on at id {first_id}")
    return ids

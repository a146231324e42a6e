"""Mutants of the client: what it makes of silence, and what becomes of the feed when it mounts again."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutant import BUSY, Aim, Patches, mutant
from waltzd.client.mount import Mount
from waltzd.client.outbox import Outbox
from waltzd.client.partition import PartitionClient
from waltzd.format.record import heads
from waltzd.server.clients import feed

RESET = Aim(faults=("reset", "pause", "slow"), setup=BUSY)


@mutant(1, 0, aim=RESET)
def sends_again_what_was_not_answered(patches: Patches) -> None:
    """What was on its way when the link was lost is sent once more, and nobody asks the log first."""

    def link_lost(self: Outbox) -> None:
        for sent in reversed(self.sent):
            assert sent.batch is None
            self.waiting.extendleft(reversed(sent.requests))
        self.sent = []

    patches.set(Outbox, "link_lost", link_lost)


@mutant(0, aim=RESET)
def takes_silence_for_a_refusal(patches: Patches) -> None:
    """What was on its way when the link was lost is said to be lost."""

    def make(right: Any) -> Any:
        def link_lost(self: Outbox) -> None:
            right(self)
            self.lost()

        return link_lost

    patches.wrap(Outbox, "link_lost", make)


@mutant(5, 1, aim=RESET)
def takes_outcomes_of_other_clients_for_its_own(patches: Patches) -> None:
    """An owner shows who asks the heads of all clients, and every one with a sequence number that fits is taken for the
    answer."""
    patches.set(feed, "own_heads", lambda run, client: heads(run))

    def make(right: Any) -> Any:
        def told(self: Mount, heads: Any) -> None:
            mine = heads.copy()
            mine["client"] = self.client
            right(self, mine)

        return told

    patches.wrap(Mount, "told", make)


@mutant(0, 1, aim=Aim(faults=("reset", "crash"), setup=BUSY))
def drops_a_frame_of_the_feed_after_a_new_mount(patches: Patches) -> None:
    """The first records that come on a new mount do not reach the application."""

    def make(right: Any) -> Any:
        def fed(self: PartitionClient, size: int, content: Any) -> None:
            if self.mount.number > self.__dict__.setdefault("dropped_at", 1):
                self.__dict__["dropped_at"] = self.mount.number
                self._consumed(size)
                return
            right(self, size, content)

        return fed

    patches.wrap(PartitionClient, "fed", make)


@mutant(1, aim=Aim(faults=("reset", "crash"), setup=BUSY))
def hands_on_a_frame_of_the_feed_twice(patches: Patches) -> None:
    """The first records that come on a new mount reach the application two times."""

    def make(right: Any) -> Any:
        def fed(self: PartitionClient, size: int, content: Any) -> None:
            if self.mount.number > self.__dict__.setdefault("doubled_at", 1):
                self.__dict__["doubled_at"] = self.mount.number
                right(self, 0, content)
            right(self, size, content)

        return fed

    patches.wrap(PartitionClient, "fed", make)

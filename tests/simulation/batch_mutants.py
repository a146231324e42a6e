"""Mutants of format 1: groups, times, locks out of the log, and what batches and footers are on a disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutant import BUSY, Aim, Patches, mutant
from waltzd.client import follower
from waltzd.client.follower import Follower
from waltzd.format.batch import End
from waltzd.protocol.peers import LockHistory
from waltzd.server.clients import mounts
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.core.locks import LockTable
from waltzd.server.core.step import HybridClock
from waltzd.server.session.session import Session

GROUPS = Aim(faults=("groups",), format=1, setup={**BUSY, "locks": 3})
SKEW = Aim(faults=("skew", "crash"), format=1, servers=2, setup=BUSY)


# -- groups ------------------------------------------------------------------------------------------------------------


@mutant(0, 1, aim=GROUPS)
def splits_a_group_at_a_cut(patches: Patches) -> None:
    """Where what came is too much for one step it is cut, in the middle of a group too: each part stands by itself."""

    def make(right: Any) -> Any:
        def slices(batch: Any, rows_max: int, bytes_max: int) -> Any:
            at = 0
            for piece in right(replace(batch, follows=None), 2, bytes_max):
                follows = None if batch.follows is None else batch.follows[at : at + len(piece)].copy()
                at += len(piece)
                if follows is not None:
                    follows[0] = False
                yield replace(piece, follows=follows)

        return slices

    patches.wrap(mounts, "slices", make)


@mutant(0, 1, aim=GROUPS)
def commits_half_a_group(patches: Patches) -> None:
    """The locks of each transaction of a group are decided by themselves, and only those that fail are refused."""

    def make(right: Any) -> Any:
        def decide(self: LockTable, batch: Any, next_id: int, committed: int) -> Any:
            return right(self, replace(batch, follows=None), next_id, committed)

        return decide

    patches.wrap(LockTable, "decide", make)


@mutant(0, 1, aim=replace(GROUPS, setup={**GROUPS.setup, "feed_bytes": 200}))
def gives_a_view_half_a_group(patches: Patches) -> None:
    """What has come is applied at once, and the rest of its last group when that comes."""
    patches.set(Follower, "_whole", lambda self, transactions, goes_on: transactions)


@mutant(0, 1, aim=GROUPS)
def cuts_what_a_view_takes_at_once_inside_a_group(patches: Patches) -> None:
    """Where more has come than a view takes at once, it is given so many, wherever groups end."""
    patches.set(follower, "end_of_part", lambda transactions, start, most: min(start + most, len(transactions)))


# -- times -------------------------------------------------------------------------------------------------------------


@mutant(2, 13, aim=SKEW)
def lets_time_fall_at_a_fail_over(patches: Patches) -> None:
    """A new owner begins with what its own clock shows, whatever the log says."""

    def make(right: Any) -> Any:
        def init(self: HybridClock, last: int) -> None:
            right(self, 0)

        return init

    patches.wrap(HybridClock, "__init__", make)


@mutant(17, 5, aim=SKEW)
def trusts_a_clients_time(patches: Patches) -> None:
    """However far ahead the time is that a client passes on, it becomes that of the log."""
    patches.set(Pipeline, "check_seen", lambda self, seen: None)


@mutant(0, 2, aim=replace(SKEW, faults=("skew",), setup={**BUSY, "partitions": 2}))
def does_not_look_at_what_a_client_has_seen(patches: Patches) -> None:
    """Each partition has a time of its own, and an effect may be before its cause."""

    def make(right: Any) -> Any:
        def next_time(self: HybridClock, now: int, seen: int = 0) -> Any:
            return right(self, now)

        return next_time

    patches.wrap(HybridClock, "next", make)


# -- the log goes on ---------------------------------------------------------------------------------------------------


@mutant(0, 3, aim=Aim(faults=("crash", "coordinator"), format=1, setup=BUSY))
def goes_on_behind_another_end(patches: Patches) -> None:
    """A new owner begins as if nothing stood in front."""

    async def find_end(self: Session) -> End | None:
        return End()

    patches.set(Session, "_find_end", find_end)


@mutant(14, aim=Aim(faults=("crash", "coordinator"), format=1, setup={**BUSY, "locks": 3}))
def lowers_the_floor_below_what_was_read(patches: Patches) -> None:
    """A new owner has read the locks of the last transaction, and takes what is in front of it for unmarked."""

    def make(right: Any) -> Any:
        def lower(self: LockTable, history: Any) -> bool:
            last = len(history.locks) - 1
            right(self, LockHistory(history.first_id + last, history.locks.part(last, last + 1)))
            self.floor = -1
            return False

        return lower

    patches.wrap(LockTable, "lower", make)

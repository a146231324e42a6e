"""Decide whether a change leaves every partition available, and how many failures each then survives. Pure.

The margin of a partition is the number of replicas that may fail before it stops: the members that are level now, minus a
majority of the members. Below 0 the partition takes no transactions. A change that makes a margin negative is refused,
unless `--override` names its subject. A change that lowers a margin to 0 needs the subject typed as a confirmation.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from waltzd.cluster.documents import Membership
from waltzd.protocol.quorum import majority


class Danger(enum.IntEnum):
    NONE = 0
    """Harmless change, applied without a question."""
    ASK = 1
    """Change that needs a yes, or `--yes`."""
    TYPED = 2
    """Change that needs the name of its subject typed, or given by `--confirm`."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    partition: int
    members: int
    level: int
    """Number of members that are up and hold all committed transactions."""

    @property
    def spare(self) -> int:
        """Number of members that may fail; -1 or less if the partition is not available."""
        return self.level - majority(self.members) if self.members else -1


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A partition before and after a change."""

    before: Margin
    after: Margin

    @property
    def partition(self) -> int:
        return self.before.partition

    @property
    def is_worse(self) -> bool:
        return self.after.spare < self.before.spare

    @property
    def refusal(self) -> str | None:
        """Reason against the change, in one sentence; None if it is safe."""
        before, after = self.before, self.after
        if after.spare >= 0:
            return None
        head = f"partition {self.partition} would have {after.level} of {after.members} members level"
        if before.spare < 0:
            return None if not self.is_worse else f"{head}; it takes no transactions now, and would lack even more members"
        if not after.members:
            return f"partition {self.partition} would have no member left, and take no transactions"
        return f"{head} and take no transactions: a majority of {majority(after.members)} is needed"


def margin(partition: int, roles: Mapping[str, Membership], level: Collection[str]) -> Margin:
    members = [name for name, role in roles.items() if role is Membership.MEMBER]
    return Margin(partition=partition, members=len(members), level=sum(name in level for name in members))


def without(
    partition: int,
    roles: Mapping[str, Membership],
    level: Collection[str],
    *,
    silent: Collection[str] = (),
    gone: Collection[str] = (),
) -> Effect:
    """Return the effect on a partition if some replicas stop answering (`silent`) or are removed (`gone`)."""
    left = {name: role for name, role in roles.items() if name not in gone}
    still = [name for name in level if name not in silent]
    return Effect(before=margin(partition, roles, level), after=margin(partition, left, still))


def needed(effects: Iterable[Effect], name: str) -> tuple[str, ...]:
    """Return reasons to keep a replica of partitions that take no transactions: it may hold the only copy of data."""
    return tuple(
        f"partition {one.partition} has {one.after.level} of {one.after.members} members level without {name}, whose "
        "replica may be needed"
        for one in effects
        if one.after.spare < 0 and one.refusal is None
    )


def refusals(steps: Iterable[Effect]) -> list[str]:
    return [refusal for step in steps if (refusal := step.refusal) is not None]


def danger(steps: Iterable[Effect]) -> Danger:
    """Return TYPED if one more failure would stop a partition after the change but not before it, else ASK."""
    steps = list(steps)
    if any(step.is_worse and step.after.spare <= 0 for step in steps):
        return Danger.TYPED
    return Danger.ASK


@dataclass(frozen=True, kw_only=True)
class Plan:
    verb: str
    """Command, as in `storage remove`."""
    subject: str
    """Name of the object that changes, and the confirmation of a dangerous change."""
    steps: tuple[str, ...]
    """Steps in order; empty if nothing is to be done."""
    margins: tuple[Effect, ...] = ()
    danger: Danger = Danger.ASK
    unsafe: tuple[str, ...] = ()
    """Reasons against the change other than margins."""
    moves: tuple[int, ...] = ()
    """Partitions whose replicas move."""

    @property
    def refusals(self) -> list[str]:
        return [*self.unsafe, *refusals(self.margins)]

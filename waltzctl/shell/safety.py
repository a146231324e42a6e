"""Whether a change leaves every partition able to take transactions, and how many failures it then survives. Pure.

A partition's *margin* is how many of its replicas may fail before it stops: the members that are level now, less the
majority that is needed. Below 0 it takes nothing. A change is unsafe when it makes a margin negative, or less than it was
and 0 although it need not be; the first can only be overridden by name.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from waltzd.cluster.documents import Membership
from waltzd.protocol.quorum import majority


class Danger(enum.IntEnum):
    NONE = 0
    """Nothing can be lost by it: done without a question."""
    ASK = 1
    """A question that `--yes` answers."""
    TYPED = 2
    """The name of what it touches has to be typed, or given by `--confirm`."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    partition: int
    members: int
    level: int
    """Members that are up and hold everything that is committed."""

    @property
    def spare(self) -> int:
        """How many members may fail."""
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
        """Why this must not be done, in one sentence."""
        before, after = self.before, self.after
        if after.spare >= 0:
            return None
        head = f"partition {self.partition} would have {after.level} of {after.members} members level"
        if before.spare < 0:
            return None if not self.is_worse else f"{head}; it takes no transactions now, and would be further from it"
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
    """The effect on a partition when some of its replicas fall silent, or leave it."""
    left = {name: role for name, role in roles.items() if name not in gone}
    still = [name for name in level if name not in silent]
    return Effect(before=margin(partition, roles, level), after=margin(partition, left, still))


def needed(effects: Iterable[Effect], name: str) -> tuple[str, ...]:
    """Reasons to keep this replica where a partition takes no transactions already: it may hold what no other does."""
    return tuple(
        f"partition {one.partition} has {one.after.level} of {one.after.members} members level without {name}, and what "
        "this one holds may be needed"
        for one in effects
        if one.after.spare < 0 and one.refusal is None
    )


def refusals(steps: Iterable[Effect]) -> list[str]:
    return [refusal for step in steps if (refusal := step.refusal) is not None]


def danger(steps: Iterable[Effect]) -> Danger:
    """TYPED where one more failure would stop a partition afterwards, and would not now."""
    steps = list(steps)
    if any(step.is_worse and step.after.spare <= 0 for step in steps):
        return Danger.TYPED
    return Danger.ASK


@dataclass(frozen=True, kw_only=True)
class Plan:
    verb: str
    """As it is typed: `storage remove`."""
    subject: str
    """The name of what is touched, and what has to be typed when it is dangerous."""
    steps: tuple[str, ...]
    """What will be done, in order; nothing means that all is as it should be already."""
    margins: tuple[Effect, ...] = ()
    danger: Danger = Danger.ASK
    unsafe: tuple[str, ...] = ()
    """Reasons against the change that margins do not show."""
    moves: tuple[int, ...] = ()
    """Partitions whose replicas it moves."""

    @property
    def refusals(self) -> list[str]:
        return [*self.unsafe, *refusals(self.margins)]

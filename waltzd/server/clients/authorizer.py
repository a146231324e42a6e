"""What callers may do at this moment: the policy that counts, and the mounts that are told when it changes.

Every door of a server asks here, whatever carried the call. An application may do what the policy grants to the name in its
certificate; callers of other roles, operators first, whatever their role may (`waltzd.protocol.role`). Before a policy was
read, or found to be missing, no application gets in. Nothing here waits, and nothing is read here: `waltzd.server.policy`
follows the documents. The channels are here because a caller is told only of those in which it may do something.

A mount is asked for rights when it comes, and holds what they say; a policy that changes reaches it by `review`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

from waltzd.errors import GroupLogClosed, NotGranted, PolicyUnreadable
from waltzd.protocol.channels import NO_CHANNELS, Channel, Channels, bits_of_ranges
from waltzd.protocol.policy import ANONYMOUS, Policy, Rights, everything, reading
from waltzd.protocol.role import Identity, Role


class Reviewed(Protocol):
    """What goes on for longer than a call, and ends when a right that it needs is gone."""

    def review(self, rights: Rights) -> None: ...


class Authorizer:
    def __init__(self, why_closed: str = "it has just started") -> None:
        """Closed to all but operators, for this reason."""
        self._why_closed: str | None = why_closed
        self._policy: Policy | None = None
        self._channels = NO_CHANNELS
        self._reviewed: dict[Reviewed, str] = {}
        """Each with the identity of its caller."""

    @classmethod
    def free(cls) -> Authorizer:
        """Everybody may do everything."""
        authorizer = cls()
        authorizer.adopt(None)
        return authorizer

    @property
    def why_closed(self) -> str | None:
        """Why only operators get in; None where a policy counts, or is known to be missing."""
        return self._why_closed

    def adopt(self, policy: Policy | None, channels: Channels = NO_CHANNELS) -> None:
        """From now on these count; without a policy everybody may do everything."""
        self._policy, self._channels, self._why_closed = policy, channels, None
        for mount, identity in list(self._reviewed.items()):
            mount.review(self.rights(identity))

    def close(self, why: str) -> None:
        """A policy is there and cannot be understood. One that was adopted before goes on to count."""
        if self._why_closed is not None:
            self._why_closed = why

    def rights(self, identity: str) -> Rights:
        """Of a caller with this URI in its certificate; empty without one."""
        name, may_everything = _caller(identity)
        if may_everything:
            return everything(name)
        if self._why_closed is not None:
            raise PolicyUnreadable(f"this server lets only operators in: {self._why_closed}")
        return everything(name) if self._policy is None else self._policy.rights_of(name)

    def rights_in(self, identity: str, partition: int, *, group_log: int) -> Rights:
        """The same, in one partition. The group log is closed to applications, operators only read it, and all else is
        closed to servers. Without certificates nobody can be told apart, so everybody is let in there."""
        role = role_of(identity)
        if partition != group_log:
            if role is Role.SERVER:
                raise GroupLogClosed(f"servers are clients of the group log alone, and {identity} asks for {partition}")
            return self.rights(identity)
        if role is Role.CLIENT:
            raise GroupLogClosed(f"{identity} asks for partition {partition}, which is the group log")
        name = _caller(identity)[0]
        return everything(name) if role in (Role.SERVER, None) else reading(name)

    def channels(self, rights: Rights) -> tuple[Channel, ...]:
        """Those that have a partition in which this caller may do something."""
        return tuple(
            Channel(name, ranges)
            for name, ranges in self._channels.items()
            if rights.sees_everything or rights.sees_any(bits_of_ranges(ranges))
        )

    @property
    def all_channels(self) -> Channels:
        """As they are at this moment."""
        return self._channels

    @contextmanager
    def reviewing(self, mount: Reviewed, identity: str) -> Iterator[None]:
        """For as long as this lasts the mount hears of every change."""
        self._reviewed[mount] = identity
        try:
            yield
        finally:
            del self._reviewed[mount]


def role_of(identity: str) -> Role | None:
    """None: the caller has no certificate."""
    found = Identity.among((identity,))
    return None if found is None else found.role


@lru_cache(maxsize=4096)
def _caller(identity: str) -> tuple[str, bool]:
    """The name of a caller, and whether it may do everything."""
    if not identity:
        return ANONYMOUS, False
    found = Identity.among((identity,))
    assert found is not None, "nobody gets here whose certificate says nothing"
    return found.name, found.role is not Role.CLIENT


# -- questions ---------------------------------------------------------------------------------------------------------


def check_append(rights: Rights, partition: int) -> None:
    if rights.only_reads:
        raise GroupLogClosed(f"{rights.name} may read partition {partition}, the group log; only servers append to it")
    if not rights.may_append(partition):
        raise denied(rights, "append to", partition)


def check_read(rights: Rights, partition: int) -> None:
    if not rights.may_read(partition):
        raise denied(rights, "read", partition)


def check_subscribe(rights: Rights, partition: int) -> None:
    if not rights.may_subscribe(partition):
        raise denied(rights, "subscribe to", partition)


def check_attend(rights: Rights, partition: int, group: str) -> None:
    if not (rights.may_subscribe(partition) and rights.may_attend(partition, group)):
        raise denied_group(rights, partition, group)


def check_group(rights: Rights, group: str) -> None:
    """Whether it may do anything in a group of this name, in any partition."""
    if not rights.may_see_group(group):
        raise NotGranted(f"{rights.name} may do nothing in group {group}", name=rights.name, group=group)


def denied_group(rights: Rights, partition: int, group: str) -> NotGranted:
    return NotGranted(
        f"{rights.name} may not work in group {group} in partition {partition}: no grant of the policy that lets it "
        "subscribe there names the group",
        next_step=next_step(rights.name, partition),
        name=rights.name,
        partition=partition,
        group=group,
    )


def check_see(rights: Rights, partition: int) -> None:
    if not rights.may_see(partition):
        raise denied(rights, "ask about", partition)


def denied(rights: Rights, what: str, partition: int) -> NotGranted:
    return NotGranted(
        f"{rights.name} may not {what} partition {partition}: no grant of the policy allows it",
        next_step=next_step(rights.name, partition),
        name=rights.name,
        partition=partition,
    )


def denied_all(identity: str) -> NotGranted:
    name, _ = _caller(identity)
    return NotGranted(
        f"{name} may do nothing in this cluster: no grant of the policy speaks of this name",
        not_done="no client id was given out",
        next_step=f"`waltzctl policy explain {name}` says why; an operator grants rights with `waltzctl policy set FILE`",
        name=name,
    )


def denied_lock(rights: Rights, lock: int, partition: int) -> NotGranted:
    return NotGranted(
        f"{rights.name} may not append to partition {partition} under the lock {lock:016x}: the policy grants it other "
        "prefixes of locks",
        next_step=next_step(rights.name, partition),
        name=rights.name,
        partition=partition,
        lock=f"{lock:016x}",
    )


def next_step(name: str, partition: int) -> str:
    return (
        f"`waltzctl policy explain {name} {partition}` says what is granted; an operator grants more with "
        "`waltzctl policy set FILE`"
    )

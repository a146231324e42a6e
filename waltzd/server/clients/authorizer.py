"""What callers may do at this moment: the policy in force, and the mounts that are notified when it changes.

Every call asks here, whatever transport carried it. An application may do what the policy grants to the name in its
certificate. Callers of other roles, operators first, may do whatever their role may (`waltzd.protocol.role`). Before a
policy was read, or found to be missing, no application is admitted. Nothing here blocks or reads: `waltzd.server.reconcile`
follows the documents. The channels are here because a caller sees only channels in which it may do something.

A mount gets its rights when it begins, and keeps them; a policy that changes reaches it by `review`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

from waltzd.errors import NotGranted
from waltzd.errors.operations import GroupLogClosed, PolicyUnreadable
from waltzd.protocol.channels import NO_CHANNELS, NO_KEYS, Channel, Channels, KeyHash, bits_of_ranges
from waltzd.protocol.policy import ANONYMOUS, Policy, Rights, everything, reading
from waltzd.protocol.role import Identity, Role


class Reviewed(Protocol):
    """Something that lasts longer than a call, and ends when a right that it needs is revoked."""

    def review(self, rights: Rights) -> None: ...


class Authorizer:
    def __init__(self, why_closed: str = "it has just started") -> None:
        """Admit only operators, for this reason."""
        self._why_closed: str | None = why_closed
        self._policy: Policy | None = None
        self._channels = NO_CHANNELS
        self._keys = NO_KEYS
        self._reviewed: dict[Reviewed, str] = {}
        """Mounts and group members to the identity of their caller."""

    @classmethod
    def free(cls) -> Authorizer:
        """Return an authorizer that allows every call."""
        authorizer = cls()
        authorizer.adopt(None)
        return authorizer

    @property
    def why_closed(self) -> str | None:
        """Cause why only operators are admitted; None if a policy is in force, or is known to be missing."""
        return self._why_closed

    def adopt(self, policy: Policy | None, channels: Channels = NO_CHANNELS, keys: Mapping[str, KeyHash] = NO_KEYS) -> None:
        """Put a policy and channels in force, and review all mounts. Without a policy every caller has all rights."""
        self._policy, self._channels, self._keys, self._why_closed = policy, channels, keys, None
        for mount, identity in list(self._reviewed.items()):
            mount.review(self.rights(identity))

    def close(self, why: str) -> None:
        """Report that there is a policy which cannot be read. A policy that was adopted before stays in force."""
        if self._why_closed is not None:
            self._why_closed = why

    def rights(self, identity: str) -> Rights:
        """Return the rights of a caller with this URI in its certificate, which is empty without a certificate."""
        name, may_everything = _caller(identity)
        if may_everything:
            return everything(name)
        if self._why_closed is not None:
            raise PolicyUnreadable(f"this server lets only operators in: {self._why_closed}")
        return everything(name) if self._policy is None else self._policy.rights_of(name)

    def rights_in(self, identity: str, partition: int, *, group_log: int) -> Rights:
        """Return the rights in one partition. The group log is closed to applications, and operators only read it; all
        other partitions are closed to servers. Without certificates callers cannot be told apart, so every caller may
        use the group log."""
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
        """Return the channels with a partition in which this caller may do something."""
        return tuple(
            Channel(name, ranges, self._keys.get(name, ""))
            for name, ranges in self._channels.items()
            if rights.sees_everything or rights.sees_any(bits_of_ranges(ranges))
        )

    @property
    def all_channels(self) -> Channels:
        """Channels in force."""
        return self._channels

    @contextmanager
    def reviewing(self, mount: Reviewed, identity: str) -> Iterator[None]:
        """Review this mount at every change, until the context ends."""
        self._reviewed[mount] = identity
        try:
            yield
        finally:
            del self._reviewed[mount]


def role_of(identity: str) -> Role | None:
    """Return the role of a caller; None if it has no certificate."""
    found = Identity.among((identity,))
    return None if found is None else found.role


@lru_cache(maxsize=4096)
def _caller(identity: str) -> tuple[str, bool]:
    """Return the name of a caller, and whether it may do everything."""
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
    """Raise `NotGranted` if the caller may do nothing in a group of this name, in any partition."""
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
        f"{name} may do nothing in this cluster: no grant of the policy names it",
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

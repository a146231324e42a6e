"""Who is connected to this server, and what each name may still use. It lives in memory only, and is asked by operators.

An application is known by the name in its certificate, a process of it by the instance that it calls itself. Names count:
quotas, shares and epochs are theirs. Instances are for people, and prove nothing.

A heartbeat is the connection itself: an instance is *live* while it has a mount of which something was heard lately, it
*hangs* when its connections stand and a heartbeat is overdue, and it is *gone* when it has no mount any more. Of those that
are gone the last ones are kept for a while. How long a connection was silent is known of plain connections only; where gRPC
carries the mount, its own heartbeat ends the connection, and until then the instance counts as live.

What a name wants beyond its quota waits (`waltzd.server.core.quota`): its frames are not read, and its feed is not sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from waltzd.errors import Disconnected, TooManyCallers, WaltzError
from waltzd.protocol.batches import AppendBatch, MountRequest
from waltzd.protocol.descriptions import ClientInstance, ClientList, ClientTotals, ClientUse
from waltzd.protocol.locks import Mode
from waltzd.protocol.peers import MountLink
from waltzd.protocol.policy import ANONYMOUS, NO_QUOTAS, Quotas
from waltzd.protocol.role import Identity, Role
from waltzd.server.core.quota import Bucket, LockBuckets, may_enter
from waltzd.server.session.settings import WAIT_SECONDS_MIN
from waltzd.wire.budget import Budget

HANGS_SECONDS = 12.5
"""A heartbeat is asked for after ten seconds of silence, and comes at once."""
GONE_SECONDS = 600.0
GONE_MAX = 1000
"""So many instances that are gone are kept, the last ones, for so long."""
LOOK_SECONDS = 1.0
"""While it waits a mount looks that often whether its quota is another one by now."""
SLOWED_SECONDS = 5.0
SLOWED_MAX = 20
"""Who waited in the last seconds is told everybody who looks at the server, so many names of them."""
REQUEST_COST = 1 << 10
"""Bytes that a call without records costs of the quota of its name, beside those that it is answered with."""
IDS_PER_SECOND, IDS_AT_ONCE = 10, 1000
"""Client ids that a name may take at one server, whatever its quota is: fewer than the cluster may give out for good."""
IDS_WAIT_SECONDS = 5.0
"""So long a name that wants more waits; beyond that it is refused."""
UNBOUNDED = 1 << 60
_READ = int(Mode.READ)


@dataclass(frozen=True)
class Principal:
    """Whose quota, share and epoch it is."""

    role: Role
    name: str


NOBODY = Principal(Role.CLIENT, ANONYMOUS)
"""Whoever has no certificate."""


@lru_cache(maxsize=4096)
def principal_of(identity: str) -> Principal:
    """`identity`: the URI in the certificate; empty without one."""
    found = Identity.among((identity,))
    return NOBODY if found is None else Principal(found.role, found.name)


class QuotaUsage:
    """What all mounts of a name use together, and how much of it is left."""

    def __init__(self, principal: Principal, clock: Callable[[], float]) -> None:
        self.principal = principal
        self.callers = 0
        """Mounts, and reads by id that are under way."""
        self.refused_mounts = 0
        self.slowed_seconds = 0.0
        self.slowed_at: float | None = None
        self.inflight = Budget(UNBOUNDED)
        self.version = 0
        """Rises with every other quota."""
        self._clock = clock
        self._quotas = NO_QUOTAS
        self._taken: tuple[Bucket | None, Bucket | None] = (None, None)
        """Of bytes, and of transactions, that it sends."""
        self._fed: Bucket | None = None
        self._ids: Bucket | None = None
        self._locks: LockBuckets | None = None
        self._is_free = True
        """It sends without a bound."""

    @property
    def quotas(self) -> Quotas:
        return self._quotas

    def grant(self, quotas: Quotas) -> None:
        if quotas == self._quotas:
            return
        now, self._quotas = self._clock(), quotas
        self.version += 1
        self._taken = (_bucket(quotas.bytes_per_second, now), _bucket(quotas.transactions_per_second, now))
        self._fed = _bucket(quotas.bytes_per_second, now)
        self._locks = LockBuckets(quotas.lock_marks_per_second) if quotas.lock_marks_per_second is not None else None
        self._is_free = self._taken == (None, None) and self._locks is None
        self.inflight.most = quotas.inflight_bytes or UNBOUNDED
        self.inflight.admit_parts()

    def check_room(self, callers: int, callers_max: int) -> None:
        """Raises when it must not have one more mount."""
        most = self._quotas.mounts
        if may_enter(self.callers, callers, callers_max, most=most, is_shared=self.principal != NOBODY):
            return
        self.refused_mounts += 1
        if callers >= callers_max:
            raise TooManyCallers(f"this server has {callers} mounts and readers; no more are allowed")
        if most is not None and self.callers >= most:
            raise TooManyCallers(
                f"{self.principal.name} has {self.callers} mounts and readers at this server; its grants allow {most}",
                next_step="try again when others of this name have left; an operator may grant it more",
            )
        raise TooManyCallers(
            f"{self.principal.name} has {self.callers} of the {callers} mounts and readers of this server; the last of "
            f"{callers_max} are left to others"
        )

    def wait(self, batch: AppendBatch, size: int) -> float:
        """How long its quota wants this to wait before it is taken; `size` in bytes."""
        if self._is_free:
            return 0.0
        by_bytes, by_rows = self._taken
        now, wait = self._clock(), 0.0
        if by_bytes is not None:
            wait = by_bytes.take(size, now)
        if by_rows is not None and (longer := by_rows.take(len(batch), now)) > wait:
            wait = longer
        if self._locks is not None and len(batch.lock_ids):
            marks = Counter(batch.lock_ids[batch.lock_modes != _READ].tolist())
            wait = max(wait, self._locks.take(marks.items(), now))
        return wait

    async def sleep(self, seconds: float) -> None:
        """So long, unless its quota becomes another one."""
        version, until = self.version, self._clock() + seconds
        while (left := until - self._clock()) > 0 and self.version == version:
            self.slowed_at = self._clock()
            pause = max(WAIT_SECONDS_MIN, min(left, LOOK_SECONDS))
            await asyncio.sleep(pause)
            self.slowed_seconds += pause

    def feed_wait(self) -> float:
        """How long nothing is fed to it."""
        if self._fed is None:
            return 0.0
        wait = self._fed.wait(now := self._clock())
        if wait <= 0:
            return 0.0
        self.slowed_at = now
        return max(WAIT_SECONDS_MIN, min(wait, LOOK_SECONDS))

    def fed(self, size: int) -> None:
        if self._fed is not None:
            self._fed.take(size, self._clock())

    async def pay(self, size: int) -> None:
        """Wait until what was sent before is paid for, then take this on credit."""
        while (wait := self.feed_wait()) > 0:
            await self.sleep(wait)
        self.fed(size)

    async def take_id(self) -> None:
        """Wait until it may have one more client id; raise if that takes too long."""
        now = self._clock()
        if self._ids is None:
            self._ids = Bucket(IDS_PER_SECOND, now, burst_seconds=IDS_AT_ONCE / IDS_PER_SECOND)
        if self._ids.wait(now) > IDS_WAIT_SECONDS:
            raise TooManyCallers(
                f"{self.principal.name} has taken more than {IDS_AT_ONCE} client ids at this server; "
                f"{IDS_PER_SECOND} a second are allowed",
                not_done="no client id was given out",
                next_step="keep a client open instead of making one for each piece of work; try again later",
            )
        if wait := self._ids.take(1, now):
            await self.sleep(wait)


def _bucket(rate: int | None, now: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, now)


@dataclass(eq=False)
class _Instance:
    """A process of an application, as far as it is known here."""

    principal: Principal
    instance: str
    since: float
    connected: dict[ConnectedClient, None] = field(default_factory=dict)
    peer: str = ""
    version: str = ""
    epoch: int = 0
    heard: float = 0.0
    appended: int = 0
    appended_bytes: int = 0
    fed: int = 0
    fed_bytes: int = 0


class ConnectedClient:
    """One mount, as the registry knows it. `end` is how it is ended from outside, and says whether it was not over."""

    def __init__(
        self, instance: _Instance, usage: QuotaUsage, partition: int, link: MountLink, clock: Callable[[], float]
    ) -> None:
        self.usage = usage
        self.partition = partition
        self.end: Callable[[WaltzError], bool] = lambda error: False
        self.waiting = ""
        """Why its feed does not go on, where that is not the client's doing."""
        self._instance = instance
        self._link = link
        self._clock = clock

    def note_received(self, count: int, size: int) -> None:
        found = self._instance
        found.heard = self._clock()
        found.appended += count
        found.appended_bytes += size

    def fed(self, count: int, size: int) -> None:
        found = self._instance
        found.fed += count
        found.fed_bytes += size
        self.usage.fed(size)

    @property
    def quiet_seconds(self) -> float | None:
        """How long its connection was silent, where that is known."""
        return self._link.quiet_seconds


class ClientRegistry:
    def __init__(self) -> None:
        self._usages: dict[Principal, QuotaUsage] = {}
        self._instances: dict[tuple[Principal, str], _Instance] = {}
        """Those that have mounts, and those that had some, the last of them at the end."""
        self.slowed_seconds = 0.0
        """Of names that nothing is kept of any more."""
        self.refused_mounts = 0

    @property
    def _clock(self) -> Callable[[], float]:
        """Bound to the loop, because each frame asks."""
        return asyncio.get_running_loop().time

    # -- what mounts do

    def usage_of(self, principal: Principal, quotas: Quotas) -> QuotaUsage:
        """`quotas`: of this moment."""
        usage = self._usages.get(principal)
        if usage is None:
            self._forget_idle()
            usage = self._usages[principal] = QuotaUsage(principal, self._clock)
        usage.grant(quotas)
        return usage

    @contextmanager
    def connect(self, principal: Principal, request: MountRequest, link: MountLink) -> Iterator[ConnectedClient]:
        """A mount that was let in, for as long as it stands."""
        now, name = self._clock(), request.instance or f"client {request.client}"
        found = self._instances.setdefault((principal, name), _Instance(principal, name, since=now))
        if not found.connected:
            found.since = now
        found.peer, found.version, found.heard = link.peer, request.version, now
        found.epoch = max(found.epoch, request.epoch)
        connected = ConnectedClient(found, self._usages[principal], request.partition, link, self._clock)
        found.connected[connected] = None
        try:
            yield connected
        finally:
            self._leave(connected)

    def _leave(self, connected: ConnectedClient) -> None:
        found = connected._instance
        del found.connected[connected]
        if not found.connected:
            found.since = self._clock()
            self._instances.pop((found.principal, found.instance))
            self._instances[found.principal, found.instance] = found
            self._forget_gone()

    # -- what is kept of those that are gone

    def _forget_gone(self) -> None:
        now = self._clock()
        gone = [key for key, one in self._instances.items() if not one.connected]
        late = [key for key in gone if now - self._instances[key].since > GONE_SECONDS]
        for key in {*late, *gone[:-GONE_MAX]}:
            del self._instances[key]

    def _forget_idle(self) -> None:
        """Names without mounts of which nobody would see anything."""
        if len(self._usages) < GONE_MAX:
            return
        kept = {principal for principal, _ in self._instances}
        for principal, usage in [
            (principal, usage) for principal, usage in self._usages.items() if not usage.callers and principal not in kept
        ]:
            self.slowed_seconds += usage.slowed_seconds
            self.refused_mounts += usage.refused_mounts
            del self._usages[principal]

    # -- what operators ask

    @property
    def names(self) -> list[str]:
        """Applications that are connected."""
        return sorted(
            {
                principal.name
                for (principal, _), one in self._instances.items()
                if one.connected and principal.role is Role.CLIENT
            }
        )

    def totals(self) -> ClientTotals:
        now, usages = self._clock(), self._usages.values()
        late = [usage for usage in usages if usage.slowed_at is not None and now - usage.slowed_at < SLOWED_SECONDS]
        return ClientTotals(
            instances=sum(bool(one.connected) for one in self._instances.values()),
            slowed_ms=round(1000 * (self.slowed_seconds + sum(usage.slowed_seconds for usage in usages))),
            refused_mounts=self.refused_mounts + sum(usage.refused_mounts for usage in usages),
            slowed=tuple(sorted(usage.principal.name for usage in late)[:SLOWED_MAX]),
        )

    def describe(self) -> ClientList:
        self._forget_gone()
        now = self._clock()
        return ClientList(
            clients=tuple(self._described(one, now) for one in self._instances.values()),
            names=tuple(
                ClientUse(
                    name=principal.name,
                    role=principal.role.value,
                    mounts=usage.callers,
                    inflight_bytes=usage.inflight.used,
                    slowed_ms=round(1000 * usage.slowed_seconds),
                    slowed_ago_ms=None if usage.slowed_at is None else round(1000 * (now - usage.slowed_at)),
                    refused_mounts=usage.refused_mounts,
                )
                for principal, usage in self._usages.items()
            ),
        )

    def _described(self, one: _Instance, now: float) -> ClientInstance:
        silences = [connected.quiet_seconds for connected in one.connected]
        known = [silence for silence in silences if silence is not None]
        quiet = min([now - one.heard, *known])
        state = "gone" if not silences else "hangs" if len(known) == len(silences) and quiet > HANGS_SECONDS else "live"
        return ClientInstance(
            name=one.principal.name,
            role=one.principal.role.value,
            instance=one.instance,
            peer=one.peer,
            version=one.version,
            state=state,
            epoch=one.epoch,
            age_ms=round(1000 * (now - one.since)),
            quiet_ms=round(1000 * quiet),
            partitions=tuple(sorted({connected.partition for connected in one.connected})),
            appended=one.appended,
            appended_bytes=one.appended_bytes,
            fed=one.fed,
            fed_bytes=one.fed_bytes,
            waiting=next((connected.waiting for connected in one.connected if connected.waiting), ""),
        )

    def disconnect(self, name: str, instance: str | None = None) -> int:
        """How many mounts were ended."""
        error = Disconnected(f"an operator has disconnected {name}{f'/{instance}' if instance else ''}")
        return sum(
            connected.end(error)
            for one in self._instances.values()
            for connected in one.connected
            if one.principal.name == name and instance in (None, one.instance)
        )

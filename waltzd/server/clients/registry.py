"""Connected clients of this server, and the quota usage of each name. It lives in memory only, and operators query it.

An application is known by the name in its certificate, a process of it by the instance that it names itself. Quotas,
shares and epochs belong to names. Instances are for people, and prove nothing.

The connection is the heartbeat. An instance is *live* while it has a mount that was active lately. It *hangs* when its
connections stand and a heartbeat is overdue. It is *gone* when it has no mount any more; the last instances that are gone
are kept for a while. The silence of a connection is known for plain connections only. With gRPC, its own heartbeat ends
the connection, and until then the instance counts as live.

What exceeds the quota of a name waits (`waltzd.protocol.policy`): its frames are not read, and its feed is not sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from waltzd.errors import WaltzError
from waltzd.errors.operations import Disconnected, TooManyCallers
from waltzd.protocol.batches import AppendBatch, MountRequest
from waltzd.protocol.descriptions import ClientInstance, ClientList, ClientTotals, ClientUse
from waltzd.protocol.locks import Mode
from waltzd.protocol.peers import MountLink
from waltzd.protocol.policy import ANONYMOUS, NO_QUOTAS, Bucket, LockBuckets, Quotas, may_enter
from waltzd.protocol.role import Identity, Role
from waltzd.server.session.settings import WAIT_SECONDS_MIN
from waltzd.wire.flow_control import Budget

HANGS_SECONDS = 12.5
"""Silence after which an instance hangs. A heartbeat is requested after ten seconds, and is answered at once."""
GONE_SECONDS = 600.0
GONE_MAX = 1000
"""Number of instances that are kept after they are gone, and for how long (`GONE_SECONDS`)."""
LOOK_SECONDS = 1.0
"""Interval in which a waiting mount looks whether its quota has changed."""
SLOWED_SECONDS = 5.0
SLOWED_MAX = 20
"""A name that waited within `SLOWED_SECONDS` is shown as slowed; at most this many names are."""
REQUEST_COST = 1 << 10
"""Bytes that a call without records costs of the quota of its name, besides its answer."""
IDS_PER_SECOND, IDS_AT_ONCE = 10, 1000
"""Client ids that a name may take at one server, whatever its quota: fewer than the cluster may give out for good."""
IDS_WAIT_SECONDS = 5.0
"""Longest wait for a client id; a name that would wait longer is refused."""
UNBOUNDED = 1 << 60
_READ = int(Mode.READ)


@dataclass(frozen=True)
class Principal:
    """The owner of a quota, a share and an epoch."""

    role: Role
    name: str


NOBODY = Principal(Role.CLIENT, ANONYMOUS)
"""Principal of callers without a certificate."""


@lru_cache(maxsize=4096)
def principal_of(identity: str) -> Principal:
    """Return the principal of a caller. `identity`: the URI in its certificate; empty without one."""
    found = Identity.among((identity,))
    return NOBODY if found is None else Principal(found.role, found.name)


class QuotaUsage:
    """Usage of all mounts of a name together, and what is left of its quota."""

    def __init__(self, principal: Principal, clock: Callable[[], float]) -> None:
        self.principal = principal
        self.callers = 0
        """Mounts, and reads by id that are in progress."""
        self.refused_mounts = 0
        self.slowed_seconds = 0.0
        self.slowed_at: float | None = None
        self.inflight = Budget(UNBOUNDED)
        self.answers: Budget | None = None
        """Bytes of answers by lock in memory; None before the first one."""
        self.version = 0
        """Number of changes of the quota."""
        self._clock = clock
        self._quotas = NO_QUOTAS
        self._taken: tuple[Bucket | None, Bucket | None] = (None, None)
        """Buckets of bytes and of transactions that it sends."""
        self._fed: Bucket | None = None
        self._ids: Bucket | None = None
        self._locks: LockBuckets | None = None
        self._is_free = True
        """Whether it may send without limit."""

    @property
    def quotas(self) -> Quotas:
        return self._quotas

    @property
    def is_free(self) -> bool:
        """Return whether it may send without limit."""
        return self._is_free

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
        """Raise `TooManyCallers` if it must not have one more mount."""
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
        """Charge a batch of `size` bytes; return the seconds to wait before it is accepted."""
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
        """Wait for these seconds, unless the quota changes."""
        version, until = self.version, self._clock() + seconds
        while (left := until - self._clock()) > 0 and self.version == version:
            self.slowed_at = self._clock()
            pause = max(WAIT_SECONDS_MIN, min(left, LOOK_SECONDS))
            await asyncio.sleep(pause)
            self.slowed_seconds += pause

    def feed_wait(self) -> float:
        """Return the seconds for which nothing is fed to it."""
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
        """Wait until earlier use is paid for, then take this size on credit."""
        while (wait := self.feed_wait()) > 0:
            await self.sleep(wait)
        self.fed(size)

    async def take_id(self) -> None:
        """Wait until it may have one more client id; raise `TooManyCallers` if that takes too long."""
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
    """One mount of a client. `end` ends it from outside, and returns whether it was alive."""

    def __init__(
        self, instance: _Instance, usage: QuotaUsage, partition: int, link: MountLink, clock: Callable[[], float]
    ) -> None:
        self.usage = usage
        self.partition = partition
        self.end: Callable[[WaltzError], bool] = lambda error: False
        self.waiting = ""
        """Cause why its feed stands still, if the client is not the cause."""
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
        """Seconds since its connection was active; None if that is unknown."""
        return self._link.quiet_seconds


class ClientRegistry:
    def __init__(self) -> None:
        self._usages: dict[Principal, QuotaUsage] = {}
        self._instances: dict[tuple[Principal, str], _Instance] = {}
        """Instances with mounts, then those that are gone, the latest last."""
        self.slowed_seconds = 0.0
        """Seconds that forgotten names were slowed."""
        self.refused_mounts = 0

    @property
    def _clock(self) -> Callable[[], float]:
        """Clock of the event loop, bound because each frame uses it."""
        return asyncio.get_running_loop().time

    # -- what mounts do

    def usage_of(self, principal: Principal, quotas: Quotas) -> QuotaUsage:
        """Return the usage of a principal, with its quotas of this moment."""
        usage = self._usages.get(principal)
        if usage is None:
            self._forget_idle()
            usage = self._usages[principal] = QuotaUsage(principal, self._clock)
        usage.grant(quotas)
        return usage

    @contextmanager
    def connect(self, principal: Principal, request: MountRequest, link: MountLink) -> Iterator[ConnectedClient]:
        """Register an admitted mount, for as long as the context lasts."""
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
        """Forget names without mounts of which there is nothing to show."""
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
        """Names of connected applications, sorted."""
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
        """End the mounts of a name, or of one instance of it; return how many were ended."""
        error = Disconnected(f"an operator has disconnected {name}{f'/{instance}' if instance else ''}")
        return sum(
            connected.end(error)
            for one in self._instances.values()
            for connected in one.connected
            if one.principal.name == name and instance in (None, one.instance)
        )

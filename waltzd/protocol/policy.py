"""The policy: grants, and the rights that they give to one name. Pure.

A grant permits names to do something: on which partitions, with which locks, and how much. Grants only add: there is no
deny, no order and no inheritance. The rights of a name are the union of its grants, so more grants never mean fewer rights.
Without a policy, every name may do everything; with a policy, everything that no grant permits is denied.

A name is the name in the certificate of an application; without certificates, all callers are `ANONYMOUS`. A pattern is a
name, or a prefix of names followed by a star. Grants are indexed by prefix, and the rights of a name are computed once
(`Policy.rights_of`); the checks of mounts and frames are then bit tests. Partitions are bits of one integer, of which -1 is
all partitions. A grant may name partitions by channels (`waltzd.protocol.channels`); a channel that the cluster does not
have is empty and grants nothing.

Servers know a lock only by 64 bits. The highest 16 of them are its namespace (`waltzd.protocol.locks`): a hash of the part
of its name before the first dot. So a grant can name prefixes of locks, and the locks of a frame are checked at once. One
pair of prefixes in 65,536 shares a namespace: `collisions` finds such pairs.

Quotas are arithmetic: how long a name waits when it exceeds its grant, and whether it may have another mount.

A token bucket holds what may be used at once, and fills at the granted rate. An amount that exceeds its content is taken
on credit: its taker waits until the debt is paid, and later takers wait behind it. So nothing is refused and nothing is
cut into pieces. In any period at most the rate, one bucket and one amount pass.

Times are seconds of any clock that never goes back.
"""

from __future__ import annotations

import enum
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.protocol.channels import NO_CHANNELS, Channels, Parts, Ranges, bits_of_ranges, is_channel
from waltzd.protocol.locks import NAMESPACE_BITS, namespace_of

ANONYMOUS = "anonymous"
"""Name of every caller if there are no certificates."""
Pattern = NewType("Pattern", str)
"""Pattern of names: `payments`, `billing-*`, `*`."""
Prefix = NewType("Prefix", str)
"""Prefix of names of locks: the part before the first dot."""
Amount = NewType("Amount", int)
"""Integer of at least 1."""
Spaces: TypeAlias = frozenset[int]
"""Namespaces of locks that are allowed."""

_SPACE_AT = 64 - NAMESPACE_BITS
_SHIFT = np.uint64(_SPACE_AT)
ALL = -1
"""The bits of all partitions."""
PREFIX_LENGTH_MAX = 64
NAMES_MAX = 4096
"""Names whose rights are cached; the least recently used is dropped."""
_PATTERN = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,63}|[A-Za-z0-9][A-Za-z0-9._-]{0,62}\*")


class Verb(enum.StrEnum):
    APPEND = "append"
    READ = "read"
    """Read records by id or time, and take the feed."""
    SUBSCRIBE = "subscribe"
    """Take the feed only."""


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """The limits of a name, at a time or per second; None for no limit."""

    bytes_per_second: Amount | None = None
    transactions_per_second: Amount | None = None
    mounts: Amount | None = None
    inflight_bytes: Amount | None = None
    lock_marks_per_second: Amount | None = None
    """Marks per second of any one lock."""


NO_QUOTAS = Quotas()


@dataclass(frozen=True, kw_only=True)
class Grant:
    names: tuple[Pattern, ...]
    may: tuple[Verb, ...]
    partitions: Parts | None = None
    """Partitions of the grant, by numbers and channels; None for all."""
    lock_prefixes: tuple[Prefix, ...] | None = None
    """Prefixes of the locks that appends may have; None for all locks."""
    quotas: Quotas | None = None
    one_instance: bool = False
    """Whether each name may have only one connected instance; a newer one displaces the older."""
    groups: tuple[Pattern, ...] | None = None
    """Consumer groups that the names may create and join, if they may subscribe; None for none."""


# -- syntax ------------------------------------------------------------------------------------------------------------


def is_pattern(text: str) -> bool:
    return _PATTERN.fullmatch(text) is not None


def matches(patterns: Iterable[Pattern], name: str) -> bool:
    """Return whether one of the patterns matches the name."""
    return any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in patterns)


def is_prefix(text: str) -> bool:
    return 0 < len(text) <= PREFIX_LENGTH_MAX and "." not in text and text.isprintable()


def _bits(parts: Parts | None, channels: Channels) -> int:
    if parts is None:
        return ALL
    bits = 0
    for part in parts.split(","):
        if part in channels or not is_channel(part):
            bits |= bits_of_ranges(channels.get(part, Ranges(part)))
    return bits


def _has(bits: int, partition: int) -> bool:
    """Return whether the bit of a partition is set. The number comes from a caller, and may be negative."""
    return partition >= 0 and bits >> partition & 1 == 1


# -- rights ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rights:
    """The rights of one name: the union of all grants that name it."""

    name: str
    grants: tuple[Grant, ...] = ()
    quotas: Quotas = NO_QUOTAS
    """Highest quotas of the grants; a grant without a quota has no effect on it."""
    one_instance: bool = False
    only_reads: bool = False
    """Whether appends are denied regardless of any grant."""
    _append: int = ALL
    _read: int = ALL
    _subscribe: int = ALL
    _locks: tuple[tuple[int, tuple[Prefix, ...] | None], ...] = ((ALL, None),)
    """Partitions as bits, with the prefixes of locks that appends to them may have; None for all locks."""
    _groups: tuple[tuple[int, tuple[Pattern, ...]], ...] = ((ALL, (Pattern("*"),)),)
    """Partitions as bits, with the consumer groups that the name may join there."""
    _spaces: dict[int, Spaces | None] = field(default_factory=dict)

    @property
    def sees_everything(self) -> bool:
        return self._append | self._read | self._subscribe == ALL

    @property
    def is_nothing(self) -> bool:
        return not (self._append | self._read | self._subscribe)

    def may_append(self, partition: int) -> bool:
        return _has(self._append, partition)

    def may_read(self, partition: int) -> bool:
        return _has(self._read, partition)

    def may_subscribe(self, partition: int) -> bool:
        """Return whether the name may take the feed; the right to read includes it."""
        return _has(self._subscribe | self._read, partition)

    def may(self, verb: Verb, partition: int) -> bool:
        ask = {Verb.APPEND: self.may_append, Verb.READ: self.may_read, Verb.SUBSCRIBE: self.may_subscribe}
        return ask[verb](partition)

    def may_see(self, partition: int) -> bool:
        """Return whether the name may see the owner and the mark of a partition, which any right to it permits."""
        return _has(self._append | self._read | self._subscribe, partition)

    def may_attend(self, partition: int, group: str) -> bool:
        """Return whether the name may create a consumer group with this partition, or join it there."""
        return any(_has(bits, partition) and matches(patterns, group) for bits, patterns in self._groups)

    def may_see_group(self, group: str) -> bool:
        return any(bits != 0 and matches(patterns, group) for bits, patterns in self._groups)

    def first_unattended(self, group: str, partitions: int) -> int | None:
        """Return the first of these partitions, as bits, in which the name may not join the group; None for none."""
        allowed = 0
        for bits, patterns in self._groups:
            if matches(patterns, group):
                allowed |= bits
        denied = partitions & ~(allowed & (self._subscribe | self._read))
        return None if denied == 0 else (denied & -denied).bit_length() - 1

    def sees_any(self, partitions: int) -> bool:
        """Return whether the name has any right to one of these partitions, as bits."""
        return (self._append | self._read | self._subscribe) & partitions != 0

    def locks(self, partition: int) -> Spaces | None:
        """Return the namespaces of locks that appends to the partition may have; None for all."""
        if partition not in self._spaces:
            found = [prefixes for bits, prefixes in self._locks if _has(bits, partition)]
            is_free = None in found
            spaces = frozenset(namespace_of(prefix) for prefixes in found for prefix in prefixes or ())
            self._spaces[partition] = None if is_free else spaces
        return self._spaces[partition]

    def may_lock(self, partition: int, hash: int) -> bool:
        spaces = self.locks(partition)
        return spaces is None or hash >> _SPACE_AT in spaces


def everything(name: str) -> Rights:
    """Return all rights: those of operators, and of every name without a policy."""
    return Rights(name)


def reading(name: str) -> Rights:
    """Return the rights of an operator to the group log: reading only."""
    return Rights(name, only_reads=True, _append=0, _locks=(), _groups=())


def nothing(name: str) -> Rights:
    return Rights(name, _append=0, _read=0, _subscribe=0, _locks=(), _groups=())


def first_denied(spaces: Spaces, locks: NDArray[np.uint64]) -> int | None:
    """Return the first of these locks that is denied; None if all are permitted."""
    found: list[int] = (locks >> _SHIFT).tolist()
    if spaces.issuperset(found):
        return None
    return int(locks[next(at for at, space in enumerate(found) if space not in spaces)])


class Policy:
    """All grants, indexed by name."""

    def __init__(self, grants: Iterable[Grant], channels: Channels = NO_CHANNELS) -> None:
        self.grants = tuple(grants)
        self.channels = channels
        self._exact: defaultdict[str, list[int]] = defaultdict(list)
        self._begins: defaultdict[str, list[int]] = defaultdict(list)
        self._lengths: tuple[int, ...] = ()
        self._known: OrderedDict[str, Rights] = OrderedDict()
        for at, grant in enumerate(self.grants):
            for pattern in grant.names:
                (self._begins[pattern[:-1]] if pattern.endswith("*") else self._exact[pattern]).append(at)
        self._lengths = tuple(sorted({len(beginning) for beginning in self._begins}))

    def rights_of(self, name: str) -> Rights:
        known = self._known
        rights = known.get(name)
        if rights is None:
            rights = known[name] = _sum(name, [self.grants[at] for at in self._grants_of(name)], self.channels)
            if len(known) > NAMES_MAX:
                known.popitem(last=False)
        else:
            known.move_to_end(name)
        return rights

    def _grants_of(self, name: str) -> list[int]:
        found = set(self._exact.get(name, ()))
        for length in self._lengths:
            if length <= len(name):
                found.update(self._begins.get(name[:length], ()))
        return sorted(found)


def _sum(name: str, grants: Sequence[Grant], channels: Channels) -> Rights:
    bits = dict.fromkeys(Verb, 0)
    locks: dict[tuple[Prefix, ...] | None, int] = {}
    for grant in grants:
        where = _bits(grant.partitions, channels)
        for verb in grant.may:
            bits[verb] |= where
        if Verb.APPEND in grant.may:
            locks[grant.lock_prefixes] = locks.get(grant.lock_prefixes, 0) | where
    return Rights(
        name,
        grants=tuple(grants),
        quotas=_highest([grant.quotas for grant in grants if grant.quotas is not None]),
        one_instance=any(grant.one_instance for grant in grants),
        _append=bits[Verb.APPEND],
        _read=bits[Verb.READ],
        _subscribe=bits[Verb.SUBSCRIBE],
        _locks=tuple((where, prefixes) for prefixes, where in locks.items()),
        _groups=tuple(
            (_bits(grant.partitions, channels), grant.groups)
            for grant in grants
            if grant.groups and not {Verb.READ, Verb.SUBSCRIBE}.isdisjoint(grant.may)
        ),
    )


def _highest(quotas: Sequence[Quotas]) -> Quotas:
    if len(quotas) < 2:
        return quotas[0] if quotas else NO_QUOTAS
    said = {item.name: [getattr(one, item.name) for one in quotas] for item in fields(Quotas)}
    return Quotas(**{name: max((one for one in found if one is not None), default=None) for name, found in said.items()})


def collisions(grants: Iterable[Grant]) -> list[tuple[Prefix, ...]]:
    """Return groups of lock prefixes that share a namespace: a right to one of them is a right to all."""
    found: defaultdict[int, dict[Prefix, None]] = defaultdict(dict)
    for grant in grants:
        for prefix in grant.lock_prefixes or ():
            found[namespace_of(prefix)][prefix] = None
    return [tuple(sorted(prefixes)) for prefixes in found.values() if len(prefixes) > 1]


BURST_SECONDS = 1.0
"""Seconds of the granted rate that a bucket holds, so that a name that was quiet may send a burst."""
LOCKS_MAX = 4096
"""Number of locks of a name that have a bucket each. When there are more, a lock whose bucket is full is forgotten. If
there is none, further locks share as many buckets, chosen by their ids. So no lock gets a new bucket while it has a
debt."""
LOOKS = 8
"""Number of locks that are checked for one that may be forgotten, the least recently marked first."""
SHARE = 4
"""Mounts that a name may hold for each free one. A single name leaves a fifth of all mounts to other names."""


class Bucket:
    def __init__(self, rate: float, now: float, *, burst_seconds: float = BURST_SECONDS) -> None:
        """`rate`: units per second."""
        assert rate > 0
        self.rate = rate
        self._burst_seconds = burst_seconds
        self._paid_at = now - burst_seconds
        """Time at which all that was taken is paid for. While that time is in the past, the bucket is not empty."""

    def take(self, amount: float, now: float) -> float:
        """Take an amount, on credit if need be; return the seconds that its taker has to wait."""
        paid_at = max(self._paid_at, now - self._burst_seconds) + amount / self.rate
        self._paid_at = paid_at
        return max(0.0, paid_at - now)

    def wait(self, now: float) -> float:
        """Return the seconds until the debt is paid."""
        return max(0.0, self._paid_at - now)

    def is_full(self, now: float) -> bool:
        """Return whether the bucket equals a new one."""
        return self._paid_at <= now - self._burst_seconds


class LockBuckets:
    """Limit of how often a name marks each lock."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._buckets: OrderedDict[int, Bucket] = OrderedDict()
        self._shared: dict[int, Bucket] = {}
        """Buckets of locks that share, by lock id modulo `LOCKS_MAX`."""

    def take(self, locks: Iterable[tuple[int, int]], now: float) -> float:
        """Take the marks of these locks, given with a count each; return the longest wait."""
        longest = 0.0
        for lock, count in locks:
            bucket = self._buckets.get(lock)
            if bucket is None:
                bucket = self._another(lock, now)
            else:
                self._buckets.move_to_end(lock)
            longest = max(longest, bucket.take(count, now))
        return longest

    def _another(self, lock: int, now: float) -> Bucket:
        place = lock % LOCKS_MAX
        shared = self._shared.get(place)
        if shared is not None and shared.is_full(now):
            del self._shared[place]
            shared = None
        if shared is None and self._has_room(now):
            bucket = self._buckets[lock] = Bucket(self.rate, now)
            return bucket
        if shared is None:
            shared = self._shared[place] = Bucket(self.rate, now)
        return shared

    def _has_room(self, now: float) -> bool:
        if len(self._buckets) < LOCKS_MAX:
            return True
        for _ in range(LOOKS):
            lock, bucket = self._buckets.popitem(last=False)
            if bucket.is_full(now):
                return True
            self._buckets[lock] = bucket
        return False

    def __len__(self) -> int:
        return len(self._buckets) + len(self._shared)


def may_enter(held: int, total: int, total_max: int, *, most: int | None = None, is_shared: bool = True) -> bool:
    """Return whether a name with `held` mounts may have another one, where all names together hold `total`. `most`: the
    limit of its quota. `is_shared`: whether other names may exist. Then the last free mounts go only to names that hold
    fewer than `SHARE` for each free one."""
    if total >= total_max or (most is not None and held >= most):
        return False
    return not is_shared or held == 0 or held < SHARE * (total_max - total)

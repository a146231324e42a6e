"""Deliveries of a consumer group, as an application has them in its hands, and what it says of them.

A delivery is known by the epoch and the tag of the frame that brought it, never by its id alone: the same transaction may
have been given to somebody else meanwhile. Acknowledgements gather in a `PendingAck` until the one before has
left, so a thousand acknowledgements of one turn of the loop are one message, and one future."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol
from uuid import UUID

import numpy as np

from waltzd.client.view import E_co, Transaction
from waltzd.errors import BadArgument, DeliveryLate
from waltzd.protocol.groups import Ack, AckKind
from waltzd.protocol.timelines import Lineage

REASON_MAX = 4096
DELAY_MAX = 24 * 3600.0


class Reject(Exception):
    """Raised by a handler: this transaction will never be done, so it is put aside at once, with this text as the reason.

    Example:
        ```python
        async def send(delivery):
            if b"@" not in delivery.payload:
                raise Reject("this is no address")
        ```
    """


class GroupEpoch(NamedTuple):
    """Of a group in one partition, under one owner: what was given out in another one counts for nothing."""

    made_at: int
    epoch: int


class DeliverySource(Protocol):
    """Where deliveries come from."""

    @property
    def cluster(self) -> UUID: ...

    async def settle(
        self,
        verb: AckKind,
        deliveries: Sequence[Delivery[Any]],
        *,
        delay: float | None = None,
        reason: str = "",
        durable: bool = False,
    ) -> list[DeliveryLate]:
        """Tell the owner; what was too late."""
        ...


class DeliveredTransaction(Generic[E_co]):
    """The transaction of a delivery, as `Delivery` and `BlockingDelivery` show it.

    Attributes:
        group: Name of the group.
        attempt: Number of this try, from 1 on. A change of owner does not count as a try.
        transaction: Transaction that was appended. Its `request`, `follows` and `locks` are not filled in.
    """

    __slots__ = ("_source", "_value", "attempt", "group", "transaction")

    def __init__(self, transaction: Transaction[E_co], group: str, attempt: int, source: DeliverySource) -> None:
        self.transaction = transaction
        self.group = group
        self.attempt = attempt
        self._source = source
        self._value: Any = None

    def __repr__(self) -> str:
        what = f"group={self.group!r}, partition={self.partition}, id={self.id}, attempt={self.attempt}"
        return f"{type(self).__name__}({what})"

    @property
    def cluster(self) -> UUID:
        """The key of the cluster that has the group."""
        return self._source.cluster

    @property
    def partition(self) -> int:
        """The partition of the transaction."""
        return self.transaction.partition

    @property
    def id(self) -> int:
        """Its id in the partition: with the group and the partition it names the work, also when it comes again."""
        return self.transaction.id

    @property
    def lineage(self) -> Lineage | None:
        """The timelines of the log, as the owner of the partition told them."""
        return self.transaction.lineage

    @property
    def kind(self) -> int:
        """The 32 bits that were appended beside the payload."""
        return self.transaction.kind

    @property
    def time(self) -> datetime | None:
        """When the owner took the transaction; None in format 0."""
        return self.transaction.time

    @property
    def payload(self) -> bytes:
        """The bytes of the transaction."""
        return self.transaction.payload

    @property
    def value(self) -> E_co:
        """The payload as the client's serializer has decoded it; the bytes without a serializer."""
        if self._value is None:
            self._value = (self.transaction.value,)
        value: E_co = self._value[0]
        return value


class Delivery(DeliveredTransaction[E_co]):
    """One transaction that a consumer group has given to this member, until it says what became of it.

    `ack`, `nack` and `reject` settle it, once; what is said a second time changes nothing. One that is not settled in the
    group's `ack_wait` is given to somebody again.

    Example:
        ```python
        async for delivery in client.subscribe("mailer"):
            await send(delivery.payload)
            with suppress(DeliveryLate):  # after a fail-over: it comes again
                await delivery.ack()
        ```
    """

    __slots__ = ("_group_epoch", "_is_settled", "_said", "_tag", "_until")

    def __init__(
        self,
        transaction: Transaction[E_co],
        group: str,
        attempt: int,
        *,
        source: DeliverySource,
        group_epoch: GroupEpoch,
        tag: int,
        until: float,
    ) -> None:
        super().__init__(transaction, group, attempt, source)
        self._group_epoch = group_epoch
        self._tag = tag
        self._until = until
        self._is_settled = False
        self._said: AckKind | None = None

    async def ack(self, *, durable: bool = False) -> None:
        """It is done: the group does not give it out again.

        While the partition has no owner it waits, as long as the subscription is open; so do `nack`, `reject`, `extend`.
        Without `durable`, the owner has heard it. Owners write acknowledgements down at least every second, so when one
        fails right after this, the transaction may come once more.

        Args:
            durable: Wait until it is on the disks of a majority; then it never comes again.

        Raises:
            DeliveryLate: It is in other hands, or it is not known whether this was heard: it is done again.
        """
        await self._settle(AckKind.ACKNOWLEDGE, durable=durable)

    async def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """It failed, and is to be tried again, by anybody. In an ordered group all that lies behind it comes again, too.

        Args:
            delay: Seconds before the next try; the pause of the group, if it is not given.
            reason: Why. It is kept with the transaction when that was the last try.

        Raises:
            DeliveryLate: It is in other hands already.
            BadArgument: The delay is no number from 0 to a day.
        """
        await self._settle(AckKind.REFUSE, delay=checked_delay(delay), reason=reason)

    async def reject(self, reason: str) -> None:
        """It will never be done: it is put aside at once, and operators find it with its reason. Where the group stops in
        place of putting aside, it stops here. The answer comes when it is on the disks of a majority.

        Args:
            reason: Why.

        Raises:
            DeliveryLate: It is in other hands already.
        """
        await self._settle(AckKind.REJECT, reason=reason)

    async def extend(self) -> None:
        """It takes longer: its time begins anew.

        Raises:
            DeliveryLate: It is in other hands already.
        """
        raise_late(await self._source.settle(AckKind.EXTEND, [self]))

    async def _settle(self, verb: AckKind, *, delay: float | None = None, reason: str = "", durable: bool = False) -> None:
        if not unsettled([self], verb, durable=durable):
            return
        raise_late(await self._source.settle(verb, [self], delay=delay, reason=reason, durable=durable))


_CALLS = {AckKind.ACKNOWLEDGE: "ack", AckKind.REFUSE: "nack", AckKind.REJECT: "reject", AckKind.EXTEND: "extend"}


def unsettled(deliveries: Sequence[Delivery[Any]], verb: AckKind, *, durable: bool = False) -> list[Delivery[Any]]:
    """Those of which this is still to be said: not what is settled so already."""
    if verb is AckKind.EXTEND:
        return list(deliveries)
    for one in deliveries:
        if one._said not in (None, verb):
            raise BadArgument(
                f"{one!r} was settled with `{_CALLS[one._said]}`, and cannot be settled with `{_CALLS[verb]}` as well",
                next_step="settle a delivery once",
            )
    found = [one for one in deliveries if durable or not one._is_settled]
    for one in found:
        one._said = verb
    return found


def checked_delay(delay: float | None) -> float | None:
    if delay is None:
        return None
    if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay <= DELAY_MAX:
        raise BadArgument(f"a delay is a number of seconds from 0 to {DELAY_MAX:.0f}, not {delay!r}")
    return float(delay)


def raise_late(late: Sequence[DeliveryLate]) -> None:
    """One error for all that was too late."""
    if len(late) == 1:
        raise late[0]
    if late:
        raise DeliveryLate(f"{len(late)} deliveries: {late[0].message}; and others", deliveries=len(late))


class PendingAck:
    """Something that is said of deliveries, until it is answered."""

    def __init__(
        self,
        verb: AckKind,
        group_epoch: GroupEpoch,
        *,
        delay: float | None = None,
        reason: str = "",
        parent: PendingAck | None = None,
    ) -> None:
        self.verb = verb
        self.group_epoch = group_epoch
        self.delay = delay
        self.reason = reason[:REASON_MAX]
        self.parent = parent
        """Some of what that one speaks of was too late; this one asks for one of them."""
        self.parts = 0
        """How many that are asked for one by one are not answered."""
        self.unkept = 0
        """And how many of them are not written down."""
        self.deliveries: list[Delivery[Any]] = []
        self.number = 0
        """On the stream that it was sent on last."""
        self.late: list[tuple[Delivery[Any], DeliveryLate]] = []
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.kept: asyncio.Future[None] = loop.create_future()
        """Done when it is written down, or never will be; where nobody waits for that, when it is answered."""
        self.is_durable = False
        """Somebody waits for that."""

    def frame(self, number: int) -> Ack:
        """What goes out."""
        self.number = number
        ids = np.unique(np.array([one.id for one in self.deliveries], np.int64))
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        return Ack(
            number=number,
            verb=self.verb,
            epoch=self.group_epoch.epoch,
            tag=max(one._tag for one in self.deliveries),
            firsts=ids[np.concatenate([[0], breaks])],
            lasts=ids[np.concatenate([breaks - 1, [len(ids) - 1]])],
            delay_ms=None if self.delay is None else round(self.delay * 1000),
            reason=self.reason,
        )

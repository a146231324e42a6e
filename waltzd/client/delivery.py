"""Deliveries of a consumer group, and their acknowledgements.

A delivery is identified by the epoch and the tag of the frame that carried it, never by its id alone: the transaction
may have been delivered to another member since. Acknowledgements are collected in a `PendingAck` until the message
before has left, so a thousand acknowledgements of one turn of the event loop are one message and one future."""

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
    """Raised by a handler to reject a delivery: it will never succeed and is set aside at once, with this text as the
    reason.

    Example:
        ```python
        async def send(delivery):
            if b"@" not in delivery.payload:
                raise Reject("this is no address")
        ```
    """


class GroupEpoch(NamedTuple):
    """Epoch of a group in one partition, under one owner, and the timeline of the log: a rescue of the group log may begin
    an epoch again, and above a fork an id is another transaction. Deliveries of another epoch are void."""

    made_at: int
    epoch: int
    timeline: UUID


class DeliverySource(Protocol):
    """Consumer that a delivery came from."""

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
        """Send an acknowledgement; return the errors of deliveries that were too late."""
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
        """Key of the cluster that has the group."""
        return self._source.cluster

    @property
    def partition(self) -> int:
        """Partition of the transaction."""
        return self.transaction.partition

    @property
    def id(self) -> int:
        """Id of the transaction in its partition. Group, partition and id identify the work, also when it is delivered
        again."""
        return self.transaction.id

    @property
    def lineage(self) -> Lineage | None:
        """Timelines of the log, as the owner of the partition reported them."""
        return self.transaction.lineage

    @property
    def kind(self) -> int:
        """Kind of the transaction: 32 bits that were appended beside the payload."""
        return self.transaction.kind

    @property
    def time(self) -> datetime | None:
        """Time at which the owner took the transaction; None in format 0."""
        return self.transaction.time

    @property
    def payload(self) -> bytes:
        """Bytes of the transaction."""
        return self.transaction.payload

    @property
    def value(self) -> E_co:
        """Payload as the client's serializer decoded it; the bytes if there is no serializer."""
        if self._value is None:
            self._value = (self.transaction.value,)
        value: E_co = self._value[0]
        return value


class Delivery(DeliveredTransaction[E_co]):
    """One transaction that a consumer group delivered to this member.

    `ack`, `nack` and `reject` settle it. A second call of the same method changes nothing. A delivery that is not
    settled within the group's `ack_wait` is given to a member again.

    Example:
        ```python
        async for delivery in client.subscribe("mailer"):
            await send(delivery.payload)
            with suppress(DeliveryLate):  # after a fail-over: it comes again
                await delivery.ack()
        ```
    """

    __slots__ = ("_behind", "_group_epoch", "_is_settled", "_said", "_tag", "_until")

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
        self._behind: list[Delivery[Any]] = []
        """Deliveries of foreign transactions that follow it in an ordered group, and are acknowledged with it."""

    async def ack(self, *, durable: bool = False) -> None:
        """Acknowledge: the transaction is done, and the group does not deliver it again.

        While the partition has no owner, this waits as long as the subscription is open; so do `nack`, `reject` and
        `extend`. Without `durable`, it returns when the owner has received the acknowledgement. Owners save
        acknowledgements at least every second, so if the owner fails right after this, the transaction may be delivered
        once more.

        Args:
            durable: Wait until the acknowledgement is on the disks of a majority; then the transaction never comes
                again.

        Raises:
            DeliveryLate: Another member has it, or it is not known whether the owner received this: it is delivered
                again. With `durable` also if an ordered group delivers one in front of it again.
        """
        await self._settle(AckKind.ACKNOWLEDGE, durable=durable)

    async def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Report a failure: the transaction is tried again, by any member. In an ordered group all that follows it
        comes again, too.

        Args:
            delay: Seconds before the next try; the back-off of the group if it is not given.
            reason: Reason of the failure. It is kept with the transaction if that was the last try.

        Raises:
            DeliveryLate: Another member has it already.
            BadArgument: The delay is no number from 0 to a day.
        """
        await self._settle(AckKind.REFUSE, delay=checked_delay(delay), reason=reason)

    async def reject(self, reason: str) -> None:
        """Reject: the transaction will never succeed. It is set aside at once, with the reason for operators. A group
        that stops instead of setting aside stops here. The call returns when that is on the disks of a majority.

        Args:
            reason: Reason of the rejection.

        Raises:
            DeliveryLate: Another member has it already.
        """
        await self._settle(AckKind.REJECT, reason=reason)

    async def extend(self) -> None:
        """Extend the delivery: its `ack_wait` starts again.

        Raises:
            DeliveryLate: Another member has it already.
        """
        raise_late(await self._source.settle(AckKind.EXTEND, [self]))

    async def _settle(self, verb: AckKind, *, delay: float | None = None, reason: str = "", durable: bool = False) -> None:
        if not unsettled([self], verb, durable=durable):
            return
        raise_late(await self._source.settle(verb, [self], delay=delay, reason=reason, durable=durable))


_CALLS = {AckKind.ACKNOWLEDGE: "ack", AckKind.REFUSE: "nack", AckKind.REJECT: "reject", AckKind.EXTEND: "extend"}


def unsettled(deliveries: Sequence[Delivery[Any]], verb: AckKind, *, durable: bool = False) -> list[Delivery[Any]]:
    """Return the deliveries that are not settled in this way already. Raise `BadArgument` if one was settled in another
    way."""
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
    """Raise one error for all deliveries that were too late."""
    if len(late) == 1:
        raise late[0]
    if late:
        raise DeliveryLate(f"{len(late)} deliveries: {late[0].message}; and {len(late) - 1} more", deliveries=len(late))


class PendingAck:
    """Acknowledgement of deliveries, until it is answered."""

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
        """Acknowledgement of many deliveries, some of which were too late; this one asks for one of them. None for
        others."""
        self.parts = 0
        """Number of partial acknowledgements, each for some of the deliveries, without an answer."""
        self.unkept = 0
        """Number of partial acknowledgements that are not durable."""
        self.deliveries: list[Delivery[Any]] = []
        self.number = 0
        """Number of the acknowledgement on the stream that carried it last."""
        self.late: list[tuple[Delivery[Any], DeliveryLate]] = []
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.kept: asyncio.Future[None] = loop.create_future()
        """Done when the acknowledgement is durable, or never will be; if no caller waits for that, when it is answered."""
        self.is_durable = False
        """Whether a caller waits until it is durable."""

    def frame(self, number: int) -> Ack:
        """Return the frame to send."""
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

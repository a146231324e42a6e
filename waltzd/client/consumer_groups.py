"""Consumer groups: how an application creates them and becomes a member. `Client` inherits this, and most clients use no
group: a method loads what it needs of groups when it is called."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from waltzd.client.follower import Call
from waltzd.client.instrument import Instrument
from waltzd.client.reader import Reader
from waltzd.client.routes import Partitions, Routes
from waltzd.client.settings import ClientSettings
from waltzd.client.view import E, Serializer, checked_kind, checked_position, checked_time
from waltzd.errors import BadArgument, WaltzError
from waltzd.protocol.address import is_name
from waltzd.protocol.channels import EVERYTHING, Parts
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

if TYPE_CHECKING:
    from waltzd.client.delivery import Delivery
    from waltzd.client.subscription import Handling, Subscription
    from waltzd.cluster.groups import GroupMeta, GroupPort, GroupStart, MadeGroup
    from waltzd.protocol.groups import GroupStatus, ParkedTransaction

MEMBER_MAX = 128
PARKED_AT_ONCE = 1000
"""Parked transactions in one answer of an owner."""
T = TypeVar("T")
Start: TypeAlias = Literal["first", "last"] | datetime | int


class ConsumerGroups(Generic[E]):
    """Methods of a client for consumer groups."""

    settings: ClientSettings
    _routes: Routes
    _reader: Reader
    _serializer: Serializer[Any] | None
    _instruments: list[Instrument]
    _call: Call
    _subscriptions: dict[Subscription[Any], None]
    _member_of: int | None = None
    """Client id that no other client has, for the names of members."""
    _members = 0
    """Number of subscriptions that were made."""
    _check_open: Callable[[], None]
    _check_loop: Callable[[], None]

    async def create_group(
        self,
        name: str,
        *,
        mode: Literal["ordered", "queue", "keyed"],
        partitions: Partitions = EVERYTHING,
        start: Start = "first",
        after: Mapping[int, int] | None = None,
        kinds: Sequence[int] = (),
        types: Sequence[type[E]] = (),
        key: Literal["kind", "lock"] = "kind",
        ack_wait: float = 30.0,
        max_in_flight: int = 100,
        tries: int = 5,
        back_off: Sequence[float] = (1.0, 5.0, 30.0),
        then: Literal["park", "stop"] = "park",
    ) -> bool:
        """Create a consumer group, unless it exists with the same settings: every process may call this at its start.

        Args:
            name: Name of the group: letters, digits, `.`, `_` and `-`.
            mode: `"ordered"`: one member at a time has a partition, and processes it in order. `"queue"`: members share
                the transactions and settle each by itself. `"keyed"`: like `"queue"`, but transactions with the same
                key are processed in order, one at a time.
            partitions: Partitions of the group: `"all"`, numbers, and names of channels, as in `Client`. A channel is
                resolved again whenever it changes.
            start: Where the group starts. `"first"`: at the beginning of the log. `"last"`: after what is committed
                now. A time: at the first transaction of that time or later. A group that exists keeps its position.
            after: Positions after which the group starts, by partition, in place of `start`; it starts at the beginning
                of the log in other partitions.
            kinds: Kinds of the transactions that the group gets; empty for all.
            types: Alternative to `kinds`: classes of events whose `EventType` in the client's serializer has a kind.
            key: Key of a `"keyed"` group: the kind of a transaction, or its first lock.
            ack_wait: Seconds that a member has for a delivery; it may extend them.
            max_in_flight: Limit of deliveries that a member has at a time, in each partition.
            tries: Number of tries of a transaction.
            back_off: Seconds before the second try, the third, and so on; the last value is used for all later tries.
            then: What happens after the last try: `"park"` sets the transaction aside and continues, `"stop"` waits for
                an operator.

        Returns:
            Whether this call created the group.

        Raises:
            GroupExists: A group of this name has other settings.
            NoGroupLog: An operator must prepare this cluster for groups first.
            NotGranted: The policy of the cluster does not allow this client to create the group.
            NeedsBatches: The group is keyed by locks, or starts at a time, and a partition writes format 0.
            NoSuchChannel, BadArgument: The cluster has no such channel or partition, or an argument is wrong.
            CannotConnect, ClientClosed: No server answered in `submit_seconds`, or the client is not open.

        Example:
            ```python
            await client.create_group("mailer", mode="queue", partitions="orders", start="last", kinds=[PLACED])
            ```
        """
        from waltzd.cluster.groups import BACK_OFF_MAX, KINDS_MAX, GroupMeta
        from waltzd.protocol.groups import Exhausted, KeyedBy, Mode

        self._check_open()
        self._check_loop()
        if not isinstance(name, str) or not is_name(name):
            raise BadArgument(f"{name!r} is not a group name (letters, digits, `.`, `_` and `-`)")
        if types and kinds:
            raise BadArgument("both `types` and `kinds` are given; give one of them")
        texts = [partitions] if isinstance(partitions, str) else [str(part) for part in partitions]
        if not texts:
            raise BadArgument("partitions must not be empty")
        meta = GroupMeta(
            name=name,
            partitions=None if texts == [EVERYTHING] else Parts(",".join(texts)),
            mode=_one_of(Mode, "mode", mode),
            ack_wait_ms=_ms("ack_wait", ack_wait, 1),
            max_in_flight=_whole("max_in_flight", max_in_flight, 100_000),
            deliver_max=_whole("tries", tries, 1000),
            back_off_ms=tuple(_ms("back_off", pause, 0) for pause in _few("back_off", back_off, BACK_OFF_MAX)),
            exhausted=_one_of(Exhausted, "then", then),
            key=_one_of(KeyedBy, "key", key),
            kinds=tuple(checked_kind(kind) for kind in _few("kinds", kinds or self._kinds_of(types), KINDS_MAX)),
        )
        where = await self._routes.numbers(meta.partitions or EVERYTHING)
        _check_start(where, self._routes.partitions, start, after)
        is_floating = start != "first"
        if is_floating and (known := await self._known_group(meta)):
            return known.is_new
        meta = replace(meta, starts=await self._starts(where, start, after))
        try:
            made = await self._routes.ask_some(
                "MakeGroup", lambda port: port.make_group(meta), "no server made the group", self.settings.submit_seconds
            )
        except WaltzError:
            if is_floating and (known := await self._known_group(meta)):  # another process was faster
                return False
            raise
        return made.is_new

    def _kinds_of(self, types: Sequence[type[E]]) -> list[int]:
        kind_of_type: Callable[[type[E]], int] | None = getattr(self._serializer, "kind_of_type", None)
        if types and kind_of_type is None:
            raise BadArgument("`types` needs a client with a serializer of events; give `kinds`")
        return [] if kind_of_type is None else [kind_of_type(each) for each in types]

    async def _known_group(self, meta: GroupMeta) -> MadeGroup | None:
        """Return the group if it exists and differs at most in its start, which is another moment in each call; else
        None."""
        try:
            found = await self._find_group(meta.name)
        except WaltzError:
            return None
        return replace(found, is_new=False) if replace(found.meta, starts=()) == replace(meta, starts=()) else None

    async def _starts(
        self, partitions: Sequence[int], start: Start, after: Mapping[int, int] | None
    ) -> tuple[GroupStart, ...]:
        if start == "first":
            return tuple([await self._start_after(*one) for one in sorted((after or {}).items())])
        if isinstance(start, str):
            return tuple([_start(each, await self._reader.end_position(each)) for each in partitions])
        return tuple([_start(each, await self._reader.position_at(each, start)) for each in partitions])

    async def _start_after(self, partition: int, after: int) -> GroupStart:
        """Return the start after a position. A plain integer is an id of the current log."""
        checked = checked_position(after)
        if not isinstance(after, Position) and after != EMPTY:
            end = await self._reader.end_position(partition, confirmed=False)
            checked = Position(checked, end.timeline)
        return _start(partition, checked)

    def subscribe(
        self,
        group: str,
        *,
        partitions: Partitions | None = None,
        max_in_flight: int | None = None,
        member: str | None = None,
    ) -> Subscription[E]:
        """Become a member of a consumer group: iterate over its deliveries, and settle each.

        The subscription continues through fail-overs. Each transaction is delivered at least once, to some member;
        after a change of owner, what was not saved is delivered again, so processing must be idempotent.

        Args:
            group: Name of the group.
            partitions: Partitions of the group to consume, as in `Client`; all of them if it is not given.
            max_in_flight: Limit of deliveries that this member has at a time, in each partition; at most that of the
                group.
            member: Name of this member; a unique name if it is not given. A newer member of the same name displaces an
                older one.

        Raises:
            NoSuchGroup: The cluster has no group of this name. This and the next three are raised while iterating.
            NotGranted: The policy of the cluster does not allow this client to be a member.
            Displaced: A newer member has the same name.
            CannotConnect: No server answered in `submit_seconds`.
            BadArgument, ClientClosed: An argument is wrong, or the client is not open.

        Example:
            ```python
            async for delivery in client.subscribe("mailer"):
                await send(delivery.payload)
                with suppress(DeliveryLate):  # after a fail-over: it comes again
                    await delivery.ack()
            ```
        """
        from waltzd.client.subscription import Subscription

        self._check_open()
        self._check_loop()
        if not is_name(group):
            raise BadArgument(f"{group!r} is not a group name (letters, digits, `.`, `_` and `-`)")
        if max_in_flight is not None and (not isinstance(max_in_flight, int) or max_in_flight < 1):
            raise BadArgument(f"max_in_flight must be at least 1, not {max_in_flight!r}")
        if member is not None and not (0 < len(member) <= MEMBER_MAX and member.isprintable()):
            raise BadArgument(f"the name of a member is a printable text of at most {MEMBER_MAX} characters")
        return Subscription(self, group, partitions=partitions, max_in_flight=max_in_flight, member=member)

    def handle(
        self,
        group: str,
        handler: Callable[[Delivery[E]], Any],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
        partitions: Partitions | None = None,
        max_in_flight: int | None = None,
        member: str | None = None,
    ) -> Handling[E]:
        """Process a consumer group with a handler; a delivery is acknowledged when the handler returns.

        If the handler raises, the delivery is tried again, with the error as the reason; `Reject` sets it aside at
        once. While the handler runs, its delivery is extended. In an ordered group each partition has one call at a
        time.

        Args:
            group: Name of the group.
            handler: Function that is called with each `Delivery`; plain or `async`.
            concurrency: Number of calls that run at once.
            timeout: Seconds after which a call is cancelled and has failed. Without it, a call that hangs keeps its
                delivery.
            partitions: See `subscribe`.
            max_in_flight: See `subscribe`; twice the concurrency if it is not given.
            member: See `subscribe`.

        Returns:
            An awaitable. It ends by its `stop`, or with an error; see `subscribe`.

        Raises:
            BadArgument, ClientClosed: An argument is wrong, or the client is not open.

        Example:
            ```python
            await client.handle("mailer", lambda delivery: send(delivery.payload), concurrency=8)
            ```
        """
        from waltzd.client.subscription import Handling

        room = 2 * concurrency if max_in_flight is None else max_in_flight
        subscription = self.subscribe(group, partitions=partitions, max_in_flight=room, member=member)
        return Handling(subscription, handler, self._call, concurrency=concurrency, timeout=timeout)

    async def group_status(self, group: str) -> list[GroupStatus]:
        """Return the state of a consumer group, one result for each of its partitions: position, lag, members, parked.

        Args:
            group: Name of the group.

        Raises:
            NoSuchGroup: The cluster has no group of this name.
            NotGranted: The policy of the cluster does not allow this client to be a member.
            CannotConnect, ClientClosed: No owner answered in `submit_seconds`, or the client is not open.

        Example:
            ```python
            lag = sum(one.lag for one in await client.group_status("mailer"))
            ```
        """
        return await self._in_each(group, None, "DescribeGroup", lambda one, port: port.group_status(group, one))

    async def parked(self, group: str, *, partitions: Partitions | None = None) -> list[ParkedTransaction]:
        """Return the transactions that a consumer group has set aside, ordered by partition and id, with the reasons.

        Args:
            group: Name of the group.
            partitions: Partitions of the group, as in `Client`; all of them if it is not given.

        Raises:
            NoSuchGroup, NotGranted, CannotConnect, ClientClosed: See `group_status`.
        """

        async def all_parked(partition: int, port: GroupPort) -> list[ParkedTransaction]:
            found: list[ParkedTransaction] = []
            is_more = True
            while is_more:
                part = await port.parked(group, partition, found[-1].id if found else EMPTY, PARKED_AT_ONCE)
                found += part.parked
                is_more = part.is_more and bool(part.parked)
            return found

        return [one for each in await self._in_each(group, partitions, "Parked", all_parked) for one in each]

    async def replay(
        self, group: str, transactions: Sequence[ParkedTransaction] | None = None, *, partitions: Partitions | None = None
    ) -> int:
        """Deliver parked transactions again, each with all its tries. It is durable when this returns.

        Args:
            group: Name of the group.
            transactions: Some of `parked`; all parked transactions if it is not given.
            partitions: Partitions of the group, as in `Client`; those of `transactions`, or all of them, if it is not
                given.

        Returns:
            Number of transactions that were parked, and are delivered again.

        Raises:
            BadArgument: Both `transactions` and `partitions` are given.
            NoSuchGroup, NotGranted, CannotConnect, ClientClosed: See `group_status`.

        Example:
            ```python
            mine = [one for one in await client.parked("mailer") if "no address" in one.reason]
            await client.replay("mailer", mine)
            ```
        """
        ids: dict[int, list[int]] = {}
        if transactions is not None:
            if partitions is not None:
                raise BadArgument("both `transactions` and `partitions` are given; give one of them")
            for one in transactions:
                ids.setdefault(one.partition, []).append(one.id)
            if not ids:
                return 0
            partitions = sorted(ids)
        done = await self._in_each(
            group, partitions, "Replay", lambda partition, port: port.replay(group, partition, ids.get(partition, []))
        )
        return sum(one.count for one in done)

    async def _in_each(
        self, group: str, partitions: Partitions | None, what: str, ask: Callable[[int, GroupPort], Awaitable[T]]
    ) -> list[T]:
        """Ask the owner of each partition of a group, or of those that are given."""
        self._check_open()
        self._check_loop()
        meta = (await self._find_group(group)).meta
        seconds = self.settings.submit_seconds
        return [
            await self._routes.ask(partition, what, partial(ask, partition), seconds)
            for partition in sorted(await self._routes.numbers(partitions or meta.partitions or EVERYTHING))
        ]

    async def _find_group(self, name: str) -> MadeGroup:
        return await self._routes.ask_some(
            "GetGroup", lambda port: port.get_group(name), "no server knows the group", self.settings.submit_seconds
        )

    async def _new_member(self) -> str:
        if self._member_of is None:
            self._member_of = (await self._routes.register(self.settings.submit_seconds)).client
        self._members += 1
        own = f"/{self._member_of}.{self._members}"
        return self._routes.introduction.instance[: MEMBER_MAX - len(own)] + own


K = TypeVar("K", bound=enum.StrEnum)
V = TypeVar("V")


def _check_start(partitions: Sequence[int], count: int, start: Start, after: Mapping[int, int] | None) -> None:
    for partition in partitions:
        if not 0 <= partition < count:
            raise BadArgument(f"there is no partition {partition}; the cluster has partitions 0 to {count - 1}")
    strange = [partition for partition in after or {} if partition not in partitions]
    if strange:
        raise BadArgument(f"partition {strange[0]!r} of `after` is not a partition of the group")
    if after is not None and start != "first":
        raise BadArgument("give one of `start` and `after`")
    if isinstance(start, Mapping):
        raise BadArgument(f'start is "first", "last" or a time; give positions as `after={start!r}`')
    if isinstance(start, str | bool):
        if start not in ("first", "last"):
            raise BadArgument(f'start must be "first", "last" or a time, not {start!r}')
    else:
        checked_time(start)


def _one_of(kind: type[K], what: str, value: str) -> K:
    try:
        return kind(value)
    except ValueError:
        raise BadArgument(f"{what} must be one of {', '.join(one.name.lower() for one in kind)}, not {value!r}") from None


def _ms(what: str, seconds: float, least: int) -> int:
    from waltzd.cluster.groups import MS_MAX

    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and isfinite(seconds)
    if not is_number or not least <= round(seconds * 1000) <= MS_MAX:
        raise BadArgument(f"{what} must be seconds from {least / 1000:g} to {MS_MAX // 1000}, not {seconds!r}")
    return round(seconds * 1000)


def _whole(what: str, value: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise BadArgument(f"{what} must be an integer from 1 to {most}, not {value!r}")
    return value


def _few(what: str, values: Sequence[V], most: int) -> Sequence[V]:
    if isinstance(values, str) or len(values) > most:
        raise BadArgument(f"{what} must be at most {most} numbers, not {values!r:.100}")
    return values


def _start(partition: int, position: Position) -> GroupStart:
    from waltzd.cluster.groups import GroupStart

    return GroupStart(partition, int(position), None if position.timeline == FIRST else position.timeline)

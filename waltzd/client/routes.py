"""Owners of the partitions, and one connection to each server: what all partitions of a client share.

Any server can be asked where the partitions are; a server that does not answer is skipped. A partition client that
found an owner to be wrong drops it (`forget`), so no mistake lasts. Callers that look at the same time share one
lookup. `at` returns the port to a server, which is closed when its last user has gone. A port that failed is not
returned again, so that the next attempt makes a new connection instead of waiting for the back-off of the old one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from uuid import UUID
from zlib import crc32

from waltzd.errors import (
    BadArgument,
    BeyondLog,
    CannotConnect,
    ClientClosed,
    ForeignCluster,
    NoGroupLog,
    NotGranted,
    NotReady,
    Retry,
    TlsMismatch,
    Trimmed,
    WaltzError,
)
from waltzd.errors.operations import NotOwner, WrongPeer
from waltzd.protocol.batches import INTRODUCTION, Introduction, PartitionLocation, Registration, Topology
from waltzd.protocol.channels import EVERYTHING, KeyHash, Ranges, named_in, numbers_of

if TYPE_CHECKING:
    from waltzd.cluster.groups import GroupPort

T = TypeVar("T")
Connect: TypeAlias = "Callable[[str, UUID | None], GroupPort]"
"""Function that makes a port to the server at an address, for a cluster key; None while the key is unknown."""
Partitions: TypeAlias = str | Iterable[int | str]
"""`"all"`, numbers, and texts with numbers and channels: `[0, 3]`, `"orders"`, `"0-3,orders"`."""

_log = logging.getLogger("waltz.client")
_PORT = re.compile(r"[0-9]{1,5}")
NOWHERE = PartitionLocation(generation=-1, server=None, address=None)
PAUSE_MIN, PAUSE_MAX = 0.01, 0.5
REPLACED_SECONDS = 1.0
"""Seconds in which an owner that was replaced may report what it has not taken; an owner that hangs reports nothing."""
REFRESH_SECONDS = 1.0
"""Seconds between two questions for the owners of all partitions: an owner that hangs does not report that it was
replaced."""


def pause_seconds(attempt: int, *identity: int) -> float:
    """Return a pause that grows, and differs between clients and partitions. It is not random, so that simulations
    repeat."""
    longest = min(PAUSE_MIN * 2.0 ** min(attempt, 16), PAUSE_MAX)
    return longest * (0.5 + crc32(repr((attempt, identity)).encode()) / (1 << 33))


@dataclass(eq=False)
class _Held:
    port: GroupPort
    users: int = 0
    is_good: bool = True


class Routes:
    def __init__(
        self,
        addresses: Sequence[str],
        connect: Connect,
        *,
        call_seconds: float,
        introduction: Introduction = INTRODUCTION,
    ) -> None:
        self.introduction = introduction
        """Introduction of this client, with the client id that it was given."""
        self._given = tuple(addresses)
        self._connect = connect
        self._call_seconds = call_seconds
        self._topology: Topology | None = None
        self._places: list[PartitionLocation] = []
        """Owner of each partition, and of the group log, as far as known."""
        self._held: dict[str, _Held] = {}
        self._lookup: asyncio.Task[None] | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._asked = 0
        self._learned: asyncio.Future[None] | None = None
        self._suspects: dict[str, None] = {}
        """Addresses that did not answer the last time, oldest first. They are asked last."""

    # -- what is known

    @property
    def topology(self) -> Topology:
        assert self._topology is not None, "open first"
        return self._topology

    @property
    def partitions(self) -> int:
        return len(self.topology.places)

    def forget(self, partition: int, place: PartitionLocation) -> None:
        """Forget an owner that is not there or does not answer. The generation is kept: an owner that was replaced and
        has not noticed must not be used again."""
        if self._places[partition] == place:
            self._places[partition] = PartitionLocation(generation=place.generation, server=None, address=None)

    def hint(self, partition: int, error: NotOwner) -> None:
        """Take over the owner that a server named in its refusal."""
        address, generation = error.facts.get("address"), error.number("generation")
        if address and generation is not None and generation >= self._places[partition].generation:
            self._places[partition] = PartitionLocation(
                generation=generation, server=error.facts.get("owner", address), address=address
            )

    async def find(self, partition: int) -> PartitionLocation:
        """Return the owner. Raise `NotReady` if no server owns the partition now, `NotGranted` if the policy hides the
        owner."""
        if self._places[partition].address is None:
            await self.look_up()
        place = self._places[partition]
        if place.is_hidden:
            raise NotGranted(
                f"the policy of the cluster grants this client nothing in partition {partition}",
                partition=partition,
            )
        if place.address is None:
            raise NotReady(f"no server owns partition {partition} at the moment")
        return place

    async def replaced(self, partition: int, place: PartitionLocation) -> PartitionLocation:
        """Wait until the partition has another owner with a later generation."""
        while self._places[partition].generation <= place.generation or self._places[partition].address is None:
            if self._learned is None or self._learned.done():
                self._learned = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._learned)
        return self._places[partition]

    async def unless_replaced(self, partition: int, place: PartitionLocation, talk: Coroutine[Any, Any, None]) -> None:
        """Run `talk` with an owner until another server reports that the owner was replaced, which an owner that hangs
        does not report itself."""
        talking = asyncio.create_task(talk)
        moving = asyncio.create_task(self.replaced(partition, place))
        try:
            await asyncio.wait((talking, moving), return_when=asyncio.FIRST_COMPLETED)
            if not talking.done():
                await asyncio.wait((talking,), timeout=REPLACED_SECONDS)
            if talking.done():
                talking.result()
            else:
                raise NotOwner(f"partition {partition} has moved to {moving.result().address}")
        finally:
            talking.cancel()
            moving.cancel()
            await asyncio.gather(talking, moving, return_exceptions=True)

    # -- lookups

    def keep_fresh(self) -> None:
        self._refresher = asyncio.create_task(self._refresh(), name="waltz routes")

    async def _refresh(self) -> None:
        """Ask the servers in turn, also those that did not answer; after a failure ask the next one without a
        pause."""
        failures = 0
        while True:
            addresses = self._candidates()
            if failures % len(addresses) == 0:
                await asyncio.sleep(REFRESH_SECONDS)
            address = addresses[self._asked % len(addresses)]
            self._asked += 1
            failures += 1
            try:
                async with asyncio.timeout(REFRESH_SECONDS), self.at(address) as port:
                    await self._learn(address, await port.locate())
                failures = 0
            except TimeoutError:
                self._suspect(address)
            except WaltzError as error:
                _log.debug("%s did not report where the partitions are: %s", address, error.message)

    async def open(self, seconds: float) -> None:
        """Find the cluster, and retry for `seconds`: servers may start later than their clients. Do not retry if only
        strangers answered at the addresses."""
        is_told = False

        async def look_up() -> None:
            nonlocal is_told
            try:
                await self.look_up()
            except CannotConnect as error:
                if not is_told and not isinstance(error, WrongPeer | TlsMismatch):
                    is_told = True
                    _log.warning("%s; retrying for %g seconds", error.message, round(seconds, 2))
                raise

        await _patiently(
            look_up,
            seconds,
            lambda last: f"the cluster was not found in {round(seconds, 2):g} seconds: {last}",
            final=WrongPeer,
        )

    async def look_up(self) -> None:
        """Ask any server for the owners of all partitions. Callers that come meanwhile share the answer."""
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.create_task(self._look_up())
            self._lookup.add_done_callback(_take_note)
        try:
            await asyncio.shield(self._lookup)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._lookup.cancelled() or (task is not None and task.cancelling()):
                raise
            raise ClientClosed("the client was closed during the call") from None

    async def numbers(self, partitions: Partitions) -> tuple[int, ...]:
        """Return the partitions, each once, without checking that the cluster has them. Look channels up again if there
        are any: the last answer may be some seconds old."""
        if isinstance(partitions, str):
            if partitions == EVERYTHING:
                return tuple(range(self.partitions))
            partitions = (partitions,)
        parts = tuple(partitions)
        texts = [part for part in parts if isinstance(part, str)]
        if any(map(named_in, texts)):
            await self.look_up()
        channels = {channel.name: Ranges(channel.partitions) for channel in self.topology.channels}
        each = (numbers_of(part, channels) if isinstance(part, str) else (part,) for part in parts)
        return tuple(dict.fromkeys(number for numbers in each for number in numbers))

    def keys_of(self, partitions: Partitions) -> KeyHash | None:
        """Return how the keys of a client of these partitions are hashed, if they are exactly one channel; None for
        over all partitions of the cluster."""
        parts = (partitions,) if isinstance(partitions, str) else tuple(partitions)
        if len(parts) != 1:
            return None
        found = next((channel for channel in self.topology.channels if channel.name == parts[0]), None)
        return KeyHash(found.keys) if found is not None and found.keys else None

    async def _look_up(self) -> None:
        failures = []
        mismatch: TlsMismatch | None = None
        wrong: list[WrongPeer] = []
        for address in self._candidates():
            try:
                topology = await self._ask_where(address)
            except WaltzError as error:
                if isinstance(error, ForeignCluster):
                    raise
                if isinstance(error, TlsMismatch):
                    mismatch = error
                if isinstance(error, WrongPeer):
                    wrong.append(error)
                self._suspect(address)
                failures.append(error.message if address in error.message else f"{address}: {error.message}")
                continue
            if await self._learn(address, topology):
                self._suspects.pop(address, None)
                return
            self._suspect(address)
            failures.append(f"{address}: it does not know yet what others have said")
        if mismatch is not None and self._topology is None:  # a cluster that answered before may be switching to TLS
            raise mismatch
        if self._topology is None and len(wrong) == len(failures):
            raise wrong[0]
        raise CannotConnect(f"no server answers ({'; '.join(failures)})")

    async def _ask_where(self, address: str) -> Topology:
        if self._topology is None:  # a port without a key, for this question only
            port = self._connect(address, None)
            try:
                return await self._in_time("Locate", address, port.locate())
            finally:
                await port.close()
        async with self.at(address) as port:
            return await self._in_time("Locate", address, port.locate())

    def _candidates(self) -> list[str]:
        named = [server.address for server in self._topology.servers] if self._topology else []
        found = dict.fromkeys([*named, *self._given])
        return [address for address in found if address not in self._suspects] + [
            address for address in self._suspects if address in found
        ]

    def _suspect(self, address: str) -> None:
        self._suspects.pop(address, None)
        self._suspects[address] = None

    async def _learn(self, address: str, topology: Topology) -> bool:
        """Take over what a server reported. Return False if it knows less than this client, because it reported an
        older generation of a partition."""
        known = self._topology
        if known is not None and known.cluster_key != topology.cluster_key:
            raise ForeignCluster(
                f"the server at {address} belongs to the cluster {topology.cluster} ({topology.cluster_key}), "
                f"this client to {known.cluster} ({known.cluster_key})"
            )
        if known is None:
            self._places = [NOWHERE] * (len(topology.places) + 1)
        elif len(known.places) != len(topology.places):
            raise ForeignCluster(
                f"the server at {address} knows {len(topology.places)} partitions, this client {len(known.places)}"
            )
        places = (*topology.places, topology.groups or NOWHERE)
        is_new = all(place.generation >= mine.generation for place, mine in zip(places, self._places, strict=True))
        if is_new or known is None:
            self._topology = topology
        for partition, place in enumerate(places):
            if place.generation >= self._places[partition].generation:
                self._places[partition] = place
        if self._learned is not None and not self._learned.done():
            self._learned.set_result(None)
        in_use = {
            *self._given,
            *(server.address for server in topology.servers),
            *(place.address for place in self._places),
        }
        for gone in [where for where in self._suspects if where not in in_use]:
            del self._suspects[gone]
        for gone, held in [(where, held) for where, held in self._held.items() if where not in in_use]:
            await self._discard(gone, held)  # its user may have discarded it during the last close
        return is_new

    # -- calls

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[GroupPort]:
        """Return the port to a server. A `CannotConnect` that passes through here closes the port."""
        held = self._held.get(address)
        if held is None:
            held = self._held[address] = _Held(self._connect(address, self.topology.cluster_key))
        known = next((server for server in self.topology.servers if server.address == address), None)
        held.port.expect(*((known.name, known.streams) if known is not None else (None,)))
        held.users += 1
        try:
            yield held.port
        except CannotConnect:
            self._suspect(address)
            await self._discard(address, held)
            raise
        finally:
            held.users -= 1
            if held.users == 0 and not held.is_good:
                await held.port.close()

    async def _discard(self, address: str, held: _Held) -> None:
        if held.is_good:
            held.is_good = False
            del self._held[address]
            if held.users == 0:
                await held.port.close()

    async def _in_time(self, what: str, address: str, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._call_seconds):
                return await work
        except TimeoutError:
            raise CannotConnect(f"{address} did not answer {what} in {self._call_seconds:g} seconds") from None

    async def register(self, seconds: float) -> Registration:
        """Return a new client id, and retry for `seconds`: servers assign none while the coordinator does not answer."""
        return await _patiently(
            self.register_once, seconds, lambda last: f"no client id was given out in {seconds:g} seconds: {last}"
        )

    async def register_once(self) -> Registration:
        """Return a client id of any server. An epoch that this client was given is kept."""
        introduction = self.introduction
        found = await self.ask_any("Register", lambda port: port.register(introduction), "no server gave a client id")
        self.introduction = replace(introduction, before=found if found.epoch else None)
        return found

    async def ask_any(self, what: str, call: Callable[[GroupPort], Awaitable[T]], failed: str) -> T:
        """Ask one server after the other until one answers; `failed` is the message if none did. If all report that the
        cluster has no group log, raise that."""
        failures, no_log = list[str](), list[WaltzError]()
        for address in self._candidates():
            try:
                async with self.at(address) as port:
                    return await self._in_time(what, address, call(port))
            except WaltzError as error:
                if error.retry is Retry.NEVER:
                    raise
                if isinstance(error, NoGroupLog):
                    no_log.append(error)
                failures.append(f"{address}: {error.message}")
        if no_log and len(no_log) == len(failures):
            raise no_log[0]
        raise CannotConnect(f"{failed} ({'; '.join(failures)})")

    async def ask_some(self, what: str, call: Callable[[GroupPort], Awaitable[T]], failed: str, seconds: float) -> T:
        """Ask one server after the other until one answers, and retry for `seconds`."""
        return await _patiently(
            lambda: self.ask_any(what, call, failed),
            seconds,
            lambda last: f"{failed} in {seconds:g} seconds: {last}",
            final=NoGroupLog,
        )

    async def ask(self, partition: int, what: str, call: Callable[[GroupPort], Awaitable[T]], seconds: float) -> T:
        """Ask the owner, and retry for `seconds`, also through a fail-over."""
        return await _patiently(
            lambda: self.ask_once(partition, what, call),
            seconds,
            lambda last: f"partition {partition} did not answer {what} in {seconds:g} seconds: {last}",
            partition,
            is_first_short=self._places[partition].address is not None and self._call_seconds <= seconds,
        )

    async def ask_once(self, partition: int, what: str, call: Callable[[GroupPort], Awaitable[T]]) -> T:
        place = await self.find(partition)
        assert place.address is not None
        try:
            async with self.at(place.address) as port:
                return await self._in_time(what, place.address, call(port))
        except WaltzError as error:
            self.failed(partition, place, error)
            raise

    def failed(self, partition: int, place: PartitionLocation, error: WaltzError) -> None:
        """Learn from a failed attempt which server to ask next."""
        self.forget(partition, place)
        if isinstance(error, NotOwner):
            self.hint(partition, error)

    async def close(self) -> None:
        for task in (self._lookup, self._refresher):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for address, held in list(self._held.items()):
            await self._discard(address, held)


class SharedQuestion(Generic[T]):
    """Question that many tasks ask at once and that is sent once for all of them. An answer to a question that was sent
    before the call may be too old; then the next question answers it."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def ask(self) -> T:
        """Return an answer that is not older than this call. A cancelled caller does not cancel the question of other
        callers."""
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._running), name="waltz shared question")
            self._next.add_done_callback(_take_note)
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        return await self._ask()

    @property
    def is_idle(self) -> bool:
        return self._next is None and (self._running is None or self._running.done())

    def cancel(self) -> None:
        """Cancel the question, and the callers that wait for it."""
        for task in (self._running, self._next):
            if task is not None:
                task.cancel()
        self._running = self._next = None


async def _patiently(
    attempt: Callable[[], Awaitable[T]],
    seconds: float,
    failed: Callable[[str], str],
    *identity: int,
    final: type[WaltzError] | tuple[type[WaltzError], ...] = (BeyondLog, Trimmed),
    is_first_short: bool = False,
) -> T:
    """Make attempts for `seconds`, while that can help. `failed` makes the message of the last error. `final` errors are
    not retried. `is_first_short`: the first attempt ends in time by itself, so it needs no timer."""
    count, last = 0, "there was not enough time to ask"
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        while True:
            async with asyncio.timeout_at(None if is_first_short and count == 0 else deadline):
                try:
                    return await attempt()
                except WaltzError as error:
                    if error.retry is Retry.NEVER or isinstance(error, final):
                        raise
                    last = error.message
                await asyncio.sleep(pause_seconds(count, *identity))
                count += 1
    except TimeoutError:
        raise CannotConnect(failed(last)) from None


def addresses_of(servers: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of "host:port,host:port", or of a list."""
    parts = servers.split(",") if isinstance(servers, str) else servers
    found = tuple(part.strip() for part in parts if part.strip())
    for address in found:
        host, _, port = address.rpartition(":")
        if not (host and address.isprintable() and _PORT.fullmatch(port) and 0 < int(port) < 1 << 16):
            raise BadArgument(f"{address!r} is no address of a server; give host:port")
    if not found:
        raise BadArgument("no server is given; give one or more addresses host:port")
    return found


def _take_note(lookup: asyncio.Task[Any]) -> None:
    """Read the error of a lookup whose callers may all have gone, or asyncio would report it."""
    if not lookup.cancelled():
        lookup.exception()


def some(partitions: Sequence[int]) -> str:
    """Return a text with at most ten partitions."""
    names = [str(partition) for partition in partitions[:10]]
    more = f" and {len(partitions) - 10} more" if len(partitions) > 10 else ""
    return (", ".join(names) + more) or "none"

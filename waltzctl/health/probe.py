"""`waltzctl health`: a probe, one transaction to each partition, end to end, with the duration of each stage.

A probe takes the way of an application, one stage at a time: locate the partition, connect to its owner and mount,
commit, read the transaction back by its id. The first stage that fails ends the probe with its error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from typer import Argument, Option

from waltzctl.health.poll import Poll
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator
from waltzctl.shell.numbers import chosen, format_partitions
from waltzctl.show.forms import (
    AnyForm,
    Column,
    Columns,
    Line,
    Listing,
    Part,
    Table,
    measured,
    next_step,
    objects,
    plain,
    put,
    rounded,
    tenths,
    verdict,
)
from waltzctl.show.terminal import ROWS_MAX, count
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, silence
from waltzd.client import loop
from waltzd.client.pending import Request, batch_of
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, CannotConnect, NoSuchPartition, TlsMismatch, WaltzError
from waltzd.errors.operations import BadFrame, PartitionsClosed, SessionEnded
from waltzd.protocol.batches import (
    PROBE_KIND,
    Committals,
    FeedMode,
    Mounted,
    MountRequest,
    PartitionLocation,
    Refusals,
    Refused,
    Registration,
    ServerFrame,
    Topology,
)
from waltzd.protocol.locks import Reason
from waltzd.protocol.peers import MountPort, ServerPort
from waltzd.wire.tls import Tls

PAYLOAD = b"waltz health probe"
PROBES_MAX = 32
"""Probes at the same time."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Probe:
    partition: int
    owner: str | None
    mount_ms: float | None = None
    """Milliseconds to connect and mount; without a write, to connect and read the high-water mark."""
    commit_ms: float | None = None
    read_ms: float | None = None
    id: int | None = None
    """Id of the transaction; without a write, the high-water mark."""
    error: WaltzError | None = None
    is_located: bool = True
    """Whether a server reported where the partition is."""

    @property
    def stage(self) -> str | None:
        """Stage that failed; None if all succeeded."""
        if self.error is None:
            return None
        for name, took in (("mount", self.mount_ms), ("commit", self.commit_ms)):
            if took is None:
                return name if self.is_located else "locate"
        return "read"


@dataclass(frozen=True, kw_only=True)
class Probing:
    locate_ms: float | None
    """Milliseconds until a server reported where the partitions are and, if needed, gave out a client id."""
    error: WaltzError | None
    """Reason why no server reported it; None if a server did."""
    probes: tuple[Probe, ...]

    @property
    def is_well(self) -> bool:
        return self.error is None and all(probe.error is None for probe in self.probes)


Connect = Callable[[str], ServerPort]


async def probe_all(
    found: ClusterSnapshot, partitions: Sequence[int], connect: Connect, *, seconds: float, is_writing: bool
) -> Probing:
    """Probe the partitions. `found` tells which servers there are, and why a partition may not answer."""
    started = time.perf_counter()
    try:
        topology, client = await _locate(found, connect, is_writing=is_writing)
    except WaltzError as error:
        owners = {view.partition: view.owner for view in found.partitions}
        probes = tuple(
            Probe(partition=partition, owner=owners.get(partition), error=error, is_located=False)
            for partition in partitions
        )
        return Probing(locate_ms=None, error=error, probes=probes)
    locate_ms = _since(started)
    turn = asyncio.Semaphore(PROBES_MAX)
    waiting = {view.partition: view.waiting for view in found.partitions}

    async def one(partition: int) -> Probe:
        async with turn:
            place = topology.places[partition]
            if place.address is None:
                error = PartitionsClosed(waiting.get(partition) or "no server owns it", next_step="see `waltzctl status`")
                return Probe(partition=partition, owner=None, error=error, is_located=False)
            prober = _Prober(partition, place, topology, waiting.get(partition, ""), seconds)
            return await prober.probe(connect(place.address), client)

    return Probing(
        locate_ms=locate_ms, error=None, probes=tuple(await asyncio.gather(*(one(number) for number in partitions)))
    )


async def _locate(found: ClusterSnapshot, connect: Connect, *, is_writing: bool) -> tuple[Topology, Registration | None]:
    """Locate the partitions by the first server that answers."""
    last: WaltzError = CannotConnect("no server is up", not_done="nothing was written", next_step="start a server")
    for view in sorted(found.servers, key=lambda view: (view.error is not None, view.meta.name)):
        if isinstance(view.error, TlsMismatch):  # its address for clients would fail in the same way
            last = view.error
            continue
        port = connect(view.meta.listen)
        try:
            return await port.locate(), await port.register() if is_writing else None
        except WaltzError as error:
            last = error
        finally:
            await port.close()
    raise last


class _Prober:
    def __init__(self, partition: int, place: PartitionLocation, topology: Topology, waiting: str, seconds: float) -> None:
        self._partition, self._place, self._topology = partition, place, topology
        self._waiting, self._seconds = waiting, seconds
        self._took: dict[str, float] = {}
        self._id: int | None = None

    async def probe(self, port: ServerPort, client: Registration | None) -> Probe:
        error: WaltzError | None = None
        try:
            if client is None:
                if self._waiting:  # its owner would answer anyway
                    raise PartitionsClosed(self._waiting, next_step="see `waltzctl status`")
                self._id = await self._stage("mount_ms", port.high_water_mark(self._partition))
            else:
                await self._write(port, client)
                await self._stage("read_ms", self._read(port))
        except WaltzError as found:
            error = found
        finally:
            await port.close()
        return Probe(
            partition=self._partition,
            owner=self._place.server,
            mount_ms=self._took.get("mount_ms"),
            commit_ms=self._took.get("commit_ms"),
            read_ms=self._took.get("read_ms"),
            id=self._id,
            error=error,
        )

    async def _write(self, port: ServerPort, client: Registration) -> None:
        link = port.mount()
        try:
            await self._stage("mount_ms", self._mount(link, client))
            self._id = await self._stage("commit_ms", self._commit(link))
        finally:
            link.cancel()

    async def _stage(self, name: str, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._seconds):
                result = await work
        except TimeoutError:
            why = f": {self._waiting}" if self._waiting else ""
            raise CannotConnect(
                f"{self._place.server} at {self._place.address} did not answer within {self._seconds:g} seconds{why}",
                not_done="whether the probe is in the log is not known" if name == "commit_ms" else "nothing was written",
                next_step="see `waltzctl status`",
            ) from None
        self._took[name] = _since(started)
        return result

    async def _mount(self, link: MountPort, client: Registration) -> None:
        request = MountRequest(
            cluster_key=self._topology.cluster_key,
            partition=self._partition,
            generation=self._place.generation,
            client=client.client,
            token=client.token,
            number=1,
            mark=-1,
            feed=FeedMode.NONE,
            credit=0,
        )
        await link.send([request])
        if not isinstance(await self._next(link), Mounted):
            raise BadFrame(f"{self._place.server} answered the request to mount with an unexpected message")

    async def _commit(self, link: MountPort) -> int:
        loop = asyncio.get_running_loop()
        request = Request(-1, PAYLOAD, PROBE_KIND, (), (), loop.create_future(), loop.time() + self._seconds)
        await link.send([batch_of([request], 0)])
        match await self._next(link):
            case Committals(ids=ids) if len(ids) == 1:
                return int(ids[0])
            case Refusals(reasons=reasons):
                why = Reason(int(reasons[0])).name
                raise SessionEnded(
                    f"the probe was refused: {why}", not_done="the probe is not in the log", next_step="try again"
                )
            case frame:
                raise BadFrame(f"{self._place.server} answered a transaction with {type(frame).__name__}")

    async def _read(self, port: ServerPort) -> None:
        from waltzd.client.view import transactions_of

        assert self._id is not None
        runs = [run async for run in port.fetch(self._partition, self._id, self._id)]
        read = [one for run in runs for one in transactions_of(run, self._partition, None)]
        if [(one.id, one.kind, one.payload) for one in read] != [(self._id, PROBE_KIND, PAYLOAD)]:
            raise BadFrame(
                f"{self._place.server} committed the probe as id {self._id}, and returned another transaction for that id"
            )

    async def _next(self, link: MountPort) -> ServerFrame:
        frames = await link.receive()
        if not frames:
            raise CannotConnect(f"{self._place.server} ended the mount without a word")
        if isinstance(frames[0], Refused):
            raise frames[0].error
        return frames[0]


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def connecting(tls: Tls | None, seconds: float) -> Connect:
    from waltzd.wire.servers import ServerClient

    return lambda address: ServerClient(address, seconds=seconds, tls=tls)


# -- what people read of it --------------------------------------------------------------------------------------------


def probed(
    found: Probing, contact_ms: float | None, contact_error: WaltzError | None, *, is_writing: bool
) -> Listing[Probe]:
    columns = _probes(is_writing=is_writing)
    content = {
        "is_healthy": found.is_well and contact_error is None,
        "is_writing": is_writing,
        "coordinator_milliseconds": rounded(contact_ms, 3),
        "locate_milliseconds": rounded(found.locate_ms, 3),
        "coordinator_error": _error(contact_error),
        "partitions": objects(columns, found.probes),
    }
    page = list(_probed(found, columns, contact_ms, contact_error, is_writing=is_writing))
    return Listing(kind="partitions", columns=columns, rows=found.probes, page=page, content=content)


def _probed(
    found: Probing, columns: Columns[Probe], contact_ms: float | None, contact_error: WaltzError | None, *, is_writing: bool
) -> Iterator[Part]:
    failed = [probe for probe in found.probes if probe.error is not None]
    total, did = len(found.probes), "committed a probe and gave it back" if is_writing else "answered"
    if not failed and contact_error is None:
        yield verdict(f"healthy: {count(total, 'partition')} {did}", is_good=True)
    else:
        yield verdict(f"unhealthy: {total - len(failed)} of {count(total, 'partition')} {did}", is_good=False)
    if contact_error is not None:
        yield Line(f"- ZooKeeper {silence(contact_error)}: {contact_error.code} {contact_error.message}", "red", "wrap")
    alike: dict[str, list[Probe]] = {}
    for probe in failed:
        assert probe.error is not None
        alike.setdefault(f"{probe.stage}: {probe.error.code} {probe.error.message}", []).append(probe)
    for why, probes in alike.items():
        yield Line(f"- {format_partitions(probe.partition for probe in probes)}: {why}", "red", "wrap")
        error = probes[0].error
        if error is not None and error.detail_next_step:
            yield next_step(error.detail_next_step)
    yield Table(columns, failed[:ROWS_MAX] if total > ROWS_MAX else found.probes)
    commits = sorted(probe.commit_ms for probe in found.probes if probe.commit_ms is not None)
    took = {"ZooKeeper": contact_ms, "locate": found.locate_ms}
    parts = [f"{what} {'-' if value is None else tenths(value)} ms" for what, value in took.items()]
    if commits:
        parts.append(f"commit {commits[len(commits) // 2]:.1f} ms median, {commits[-1]:.1f} ms max")
    yield ", ".join(parts)


def _probes(*, is_writing: bool) -> Columns[Probe]:
    """Return the columns of probes. Without a write nothing is committed, and the id is the high-water mark."""

    def result(probe: Probe) -> str:
        if probe.error is None:
            return "ok"
        return f"failed: {probe.stage}" if is_writing else "failed"

    def stage(name: str, word: str) -> Column[Probe]:
        return measured(word, f"{name}_ms", tenths, json=f"{name}_milliseconds", digits=3)

    return (
        Column("partition"),
        Column("owner", none="nobody"),
        stage("mount", "mount ms" if is_writing else "answered ms"),
        *(stage(name, f"{name} ms" if is_writing else "") for name in ("commit", "read")),
        Column("id" if is_writing else "high-water mark", "id", json="id"),
        Column("", "stage", json="failed_stage"),
        Column("result", result, json=""),
        Column("", lambda probe: _error(probe.error), json="error"),
    )


def _error(error: WaltzError | None) -> dict[str, str] | None:
    return None if error is None else {**plain(error), "next_step": error.detail_next_step}


# -- `waltzctl health` -------------------------------------------------------------------------------------------------


SECONDS = 5.0


def health(
    *,
    partitions: Annotated[tuple[str, ...], Argument(metavar="[PARTITION]...")] = (),
    no_write: Annotated[bool, Option("--no-write", help="Only ask each owner whether it is open; write nothing.")] = False,
    seconds: Annotated[
        float, Option("--timeout", min=0.1, max=300, metavar="SECONDS", help="How long each stage may take.")
    ] = SECONDS,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Commit a probe in every partition, or in those that are given (0-3,7 or a channel), read it back, and show the
    duration of each stage. Exit code 0 if all probes succeeded, else 10.

    This writes to the log permanently: one transaction of 18 bytes for each partition, without locks. Its kind
    0x57414c5a is reserved for probes, and no application is fed it. With --no-write nothing is written, and only the
    answers of the owners are checked.

    \b
    Examples:
      waltzctl health
      waltzctl health 0-1 --no-write -o json
    """
    if not no_write:
        check_operator(target.tls, "commit a probe; --no-write does not need to")
    wanted = [number for text in partitions for number in chosen(target, text)]
    probing, contact_ms, contact_error = loop.run(_probe(target, wanted, seconds=seconds, is_writing=not no_write))
    put(probed(probing, contact_ms, contact_error, is_writing=not no_write), output)
    return EXIT_OK if probing.is_well and contact_error is None else EXIT_UNHEALTHY


async def _probe(
    target: ClusterTarget, wanted: list[int], *, seconds: float, is_writing: bool
) -> tuple[Probing, float | None, WaltzError | None]:
    """Probe the partitions. Return the results, the milliseconds of a read in ZooKeeper, and the error if it did not
    answer."""
    async with Poll(target, seconds=seconds, aloud=True) as poll:
        report = await poll.report()
        contact_ms = report.facts.coordinator_ms
        found = report.snapshot
        for number in wanted:
            if number >= found.meta.partitions:
                raise NoSuchPartition(
                    f"there is no partition {number}; the cluster has {found.meta.partitions}, from 0 on",
                    not_done="nothing was written",
                )
        numbers = sorted(set(wanted)) or range(found.meta.partitions)
        connect = connecting(target.tls, seconds)
        probing = await probe_all(found, numbers, connect, seconds=seconds, is_writing=is_writing)
    return probing, contact_ms, report.lost.cause if report.lost is not None else None

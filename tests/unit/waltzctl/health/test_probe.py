"""One transaction from end to end: which stage failed, and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from tests.unit.snapshots import KEY, partition, server, silent, well
from waltzctl.health.probe import PAYLOAD, Probing, probe_all
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.errors import CannotConnect, TlsMismatch, WaltzError
from waltzd.errors.operations import NotOwner
from waltzd.format.record import Run, encode_payloads
from waltzd.protocol.batches import (
    INTRODUCTION,
    PROBE_KIND,
    AppendBatch,
    ClientFrame,
    Committals,
    Introduction,
    Limits,
    Mounted,
    MountRequest,
    PartitionLocation,
    Refusals,
    Refused,
    Registration,
    ServerAddress,
    ServerFrame,
    Topology,
)
from waltzd.protocol.locks import HistoryPart, MarkedPage, Reason
from waltzd.protocol.positions import Position

LIMITS = Limits(payload_bytes_max=100, locks_max=1, frame_bytes_max=1000)
MOUNTED = Mounted(session=1, barrier=-1, limits=LIMITS)
COMMITTED = Committals(np.array([0]), np.array([7]))


class Server:
    """Both a server and a mount; each answer is a frame, an error, or silence (None)."""

    def __init__(self, *answers: ServerFrame | WaltzError | None, owner: str | None = "a", gives: bytes = PAYLOAD) -> None:
        self.answers = list(answers)
        self.owner, self.gives = owner, gives
        self.sent: list[ClientFrame] = []
        self.open = 0

    async def locate(self) -> Topology:
        place = PartitionLocation(generation=3, server=self.owner, address=None if self.owner is None else "a:1")
        return Topology(cluster="trial", cluster_key=KEY, places=(place,) * 4, servers=(ServerAddress("a", "a:1"),))

    def expect(self, name: str | None, streams: str = "") -> None:
        pass

    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        return Registration(5, b"token")

    async def high_water_mark(self, _partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        return Position(41)

    def mount(self) -> Server:
        return self

    may_post = False

    def post(self, frames: Sequence[ClientFrame]) -> None:
        raise AssertionError("it takes nothing without waiting")

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """All frames are received."""

    async def send(self, frames: Sequence[ClientFrame]) -> None:
        self.sent += frames

    async def receive(self) -> Sequence[ServerFrame] | None:
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, WaltzError):
            raise answer
        return [answer] if answer is not None else None

    async def find_time(self, _partition: int, time: int) -> Position:
        return Position(41)

    async def history(self, *_arguments: Any, **_options: Any) -> HistoryPart:
        raise AssertionError("a probe reads no history")

    async def fetch_marked(self, *_arguments: Any, **_options: Any) -> MarkedPage:
        raise AssertionError("a probe reads nothing by lock")

    async def fetch(
        self,
        _partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        yield encode_payloads(first_id, [self.gives])

    def cancel(self) -> None:
        return

    async def close(self) -> None:
        self.open -= 1


def probe(
    server: Server, found: ClusterSnapshot | None = None, *, seconds: float = 5.0, is_writing: bool = True
) -> Probing:
    def connect(_address: str) -> Server:
        server.open += 1
        return server

    snapshot = found or well(partitions=(partition(0),))
    probing = asyncio.run(probe_all(snapshot, [0], connect, seconds=seconds, is_writing=is_writing))
    assert server.open == 0, "every connection is closed again"
    return probing


def test_the_transaction_is_the_one_that_the_help_promises() -> None:
    server = Server(MOUNTED, COMMITTED, gives=b"something else")
    failed = probe(server).probes[0]
    mount, batch = server.sent
    assert isinstance(mount, MountRequest)
    assert (mount.client, mount.generation, mount.cluster_key) == (5, 3, KEY)
    assert isinstance(batch, AppendBatch)
    assert (bytes(batch.payloads), batch.headers.tolist(), len(batch.lock_ids)) == (PAYLOAD, [PROBE_KIND], 0)
    assert failed.stage == "read"
    assert failed.error is not None
    assert "and returned another transaction for that id" in failed.error.message


@pytest.mark.parametrize(
    ("answers", "stage", "reported"),
    [
        ((CannotConnect("nobody listens"),), "mount", "nobody listens"),
        ((Refused(NotOwner("b owns it")),), "mount", "b owns it"),
        ((None,), "mount", "did not answer within 0.05 seconds"),
        ((COMMITTED,), "mount", "answered the request to mount with an unexpected message"),
        ((MOUNTED, Refused(NotOwner("b owns it"))), "commit", "b owns it"),
        ((MOUNTED, None), "commit", "did not answer within 0.05 seconds"),
        (
            (MOUNTED, Refusals(np.array([0]), np.array([int(Reason.NOT_IN_LOG)]), np.array([0]), np.array([0]))),
            "commit",
            "NOT_IN_LOG",
        ),
        ((MOUNTED, MOUNTED), "commit", "answered a transaction with Mounted"),
    ],
    ids=str,
)
def test_the_stage_that_failed(answers: tuple[Any, ...], stage: str, reported: str) -> None:
    found = probe(Server(*answers), seconds=0.05)
    failed = found.probes[0]
    assert not found.is_well
    assert failed.error is not None
    assert (failed.stage, failed.read_ms) == (stage, None)
    assert reported in failed.error.message


def test_servers_that_want_a_certificate_are_not_asked_again() -> None:
    """The snapshot knows already; who owns what the coordinator says."""
    error = TlsMismatch("a:2 speaks TLS, and no certificate was given")
    snapshot = well(partitions=(partition(0),), servers=tuple(silent(server(name), error) for name in ("a", "b")))
    found = probe(Server(CannotConnect("the call failed")), snapshot)
    assert found.error is error
    assert (found.probes[0].owner, found.probes[0].stage, found.probes[0].error) == ("a", "locate", error)


def test_what_a_partition_waits_for_is_said() -> None:
    """The owner knows why nothing is committed; a timeout alone would not tell."""
    view = partition(0)
    assert view.reported is not None
    waiting = replace(view, reported=replace(view.reported, waiting="no majority takes appends"))
    failed = probe(Server(MOUNTED, None), well(partitions=(waiting,)), seconds=0.05).probes[0]
    assert failed.error is not None
    assert failed.error.message.endswith("seconds: no majority takes appends")
    assert failed.error.detail_not_done == "whether the probe is in the log is not known"


def test_nobody_owns_it_or_nobody_is_there() -> None:
    nobody = well(partitions=(replace(partition(0), owner=None, reported=None),))
    failed = probe(Server(owner=None), nobody).probes[0]
    assert failed.error is not None
    assert (failed.stage, failed.error.message) == ("locate", "no server owns it")
    found = probe(Server(), well(servers=()))
    assert found.error is not None
    assert (found.locate_ms, found.error.message) == (None, "no server is up")


def test_without_a_write() -> None:
    server = Server()
    found = probe(server, is_writing=False)
    assert found.is_well
    assert (found.probes[0].id, found.probes[0].commit_ms, server.sent) == (41, None, [])
    view = partition(0)
    assert view.reported is not None
    waiting = replace(view, reported=replace(view.reported, waiting="no majority takes appends"))
    failed = probe(server, well(partitions=(waiting,)), is_writing=False).probes[0]
    assert failed.error is not None
    assert failed.error.message == "no majority takes appends"

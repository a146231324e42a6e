"""Waiting for partitions that move from one server to another, with the reason why each has not arrived.

A partition has arrived when its new owner reports it open. The server that gave it away is asked too: a draining server
may be stopped only after it has closed what it owned. The leader moves partitions; this module only waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from waltzctl.shell.progress import Report
from waltzctl.snapshot.cluster_snapshot import OPEN
from waltzctl.snapshot.collector import AdminConnections
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ServerMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import NotTakenOver
from waltzd.protocol.descriptions import ServerDescription
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""Seconds between two snapshots: what a server reports is in no document that could be watched."""
Reports = Mapping[str, ServerDescription | WaltzError]


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Partitions that are waited for, and where they may be."""

    numbers: tuple[int, ...]
    to: Mapping[int, str]
    """Partition → server that shall own it, as far as decided; others may be anywhere but at `leaving`."""
    leaving: str | None = None
    """Server that must have closed them all; None if no server is drained."""
    before: Mapping[int, int] = field(default_factory=dict)
    """Partition → generation that must end first, while the leader still has to move it."""

    def servers(self, assignment: Assignment) -> list[str]:
        """Return the servers to ask."""
        owners = {owner for number in self.numbers if (owner := assignment.owners[number].server) is not None}
        return sorted(owners if self.leaving is None else owners | {self.leaving})

    def astray(self, assignment: Assignment) -> str:
        """Return why waiting is hopeless; empty if it is not."""
        for number, name in sorted(self.to.items()):
            owner = assignment.owners[number].server
            if owner != name:
                return f"partition {number} belongs to {owner or 'nobody'} by now, no more to {name}"
        return ""

    def waits(self, assignment: Assignment, reported: Reports) -> dict[int, str]:
        """Return a sentence for each partition that has not arrived."""
        found = {number: self._wait(number, assignment, reported) for number in self.numbers}
        return {number: wait for number, wait in found.items() if wait}

    def _wait(self, number: int, assignment: Assignment, reported: Reports) -> str:
        owner = assignment.owners[number]
        if owner.server is None:
            return "no server owns it"
        if owner.generation <= self.before.get(number, -1):
            return f"the leader has not moved it from {owner.server} yet"
        if owner.server == self.leaving:
            return f"it was not given to another server than {owner.server} yet"
        before = reported.get(self.leaving) if self.leaving is not None else None
        if isinstance(before, ServerDescription) and any(held.partition == number for held in before.partitions):
            return f"{self.leaving} is closing it"
        there = reported.get(owner.server)
        if not isinstance(there, ServerDescription):
            why = "is not up" if there is None else f"does not answer: {there.message}"
            return f"its new owner {owner.server} {why}"
        held = next((held for held in there.partitions if held.partition == number), None)
        if held is None or held.generation < owner.generation:
            return f"{owner.server} has not begun with it yet"
        if held.step == OPEN and not held.waiting:
            return ""
        return held.waiting or f"{owner.server} is recovering it"


def format_waits(waits: Mapping[int, str]) -> str:
    """Describe waits, with partitions that wait for the same reason together: "0, 2: server-2 is recovering it"."""
    numbers: dict[str, list[int]] = {}
    for number, wait in sorted(waits.items()):
        numbers.setdefault(wait, []).append(number)
    return "; ".join(f"{format_numbers(found)}: {wait}" for wait, found in numbers.items())


async def arrival(cluster: Cluster, wanted: Handover, key: UUID, tls: Tls | None, timeout: float, report: Report) -> float:
    """Wait until all have arrived; return the seconds that it took. Raise `NotTakenOver` on a timeout, or if they never
    will."""
    began = time.monotonic()
    async with AdminConnections() as connections:

        async def ask(server: ServerMeta) -> ServerDescription | WaltzError:
            try:
                async with connections.to(ServerAdminClient, server, key, tls, CALL_SECONDS) as admin:
                    return await admin.describe()
            except WaltzError as error:
                return error

        while True:
            assignment, _ = await cluster.assignment()
            astray = wanted.astray(assignment)
            if astray:
                raise NotTakenOver(astray, next_step="look with `waltzctl server list`, then run the command again")
            servers = await cluster.servers()
            asked = [name for name in wanted.servers(assignment) if name in servers]
            answers = await asyncio.gather(*(ask(servers[name]) for name in asked))
            waits = wanted.waits(assignment, dict(zip(asked, answers, strict=True)))
            passed = time.monotonic() - began
            if not waits:
                return passed
            if passed >= timeout:
                raise NotTakenOver(f"after {timeout:g} seconds, partitions {format_waits(waits)}")
            report(f"partitions {format_waits(waits)}")
            await asyncio.sleep(PAUSE_SECONDS)

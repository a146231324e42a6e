"""The leader among the servers, which assigns partitions to them.

The leader is the server whose ephemeral document is at the leader's path. It reads the list of servers, the preferences
of operators and the assignment, makes a plan, and saves it by compare-and-set. That alone makes it safe: of two servers
that both believe to lead, neither overwrites an assignment that it has not read. It acts when a document changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from waltzd.cluster.assignment import NO_PREFERENCES, moved, plan
from waltzd.cluster.cluster import ASSIGNMENT, LEADER, PREFERRED, SERVERS, Cluster, Leadership
from waltzd.cluster.documents import Assignment, Preferences, ServerMeta
from waltzd.errors.operations import BadMetadata
from waltzd.server.failure_detector import FailureDetector
from waltzd.server.reconcile import Reconciler

log = logging.getLogger("waltz.server")
TURN_SECONDS = 0.1
"""Time that each server waits longer than the server before it by name, before it replaces a suspected leader."""


class Election:
    def __init__(self, cluster: Cluster, name: str, partitions: int, detector: FailureDetector | None = None) -> None:
        """`name` must be announced already, which proves that no other living process has it. With a `detector`,
        suspected servers are left out before their coordinator sessions end."""
        self._detector = detector
        self._suspicions_seen = 0
        """Version of the detector's signal when its suspicions were last used."""
        self._cluster = cluster
        self._name = name
        self._partitions = partitions
        self._led_in: int | None = None
        """Coordinator session in which this server is the leader; None if it is not."""
        self._known: Mapping[str, ServerMeta] | None = None
        """Servers that the last plan was made for; None before the first plan."""
        self._preferences = NO_PREFERENCES
        """Preferences of operators as last read."""
        self._displaced: dict[str, None] = {}
        """Suspected servers that this server has replaced as leader."""
        self.reconciler = Reconciler(
            "assignment",
            wait=self._wait,
            act=self.take_part,
        )

    @property
    def is_leader(self) -> bool:
        coordinator = self._cluster.coordinator
        return coordinator.is_connected and self._led_in == coordinator.session

    async def _wait(self, seen: object | None) -> object:
        """Wait until a document changes, or a suspicion begins or ends."""
        changing = self._cluster.wait_for_change([LEADER, SERVERS, ASSIGNMENT, PREFERRED], seen)
        if self._detector is None or seen is None:
            return await changing
        document = asyncio.ensure_future(changing)
        suspicion = asyncio.ensure_future(self._detector.changed.wait(self._suspicions_seen))
        try:
            await asyncio.wait((document, suspicion), return_when=asyncio.FIRST_COMPLETED)
            return document.result() if document.done() else seen
        finally:
            for task in (document, suspicion):
                task.cancel()

    async def take_part(self) -> None:
        """Become the leader if there is none, and do the leader's work while leading."""
        if self._detector is not None:
            self._suspicions_seen = self._detector.changed.version
        session = self._cluster.coordinator.session
        if not await self._leads():
            self._led_in = self._known = None
            return
        if self._led_in != session:
            self._led_in = session
            log.info("server %s is the leader and assigns the partitions", self._name)
        await self._assign()

    async def _leads(self) -> bool:
        self._displaced = {name: None for name in self._displaced if name in self._suspected}
        found = await self._cluster.leader()
        if found is None:
            return await self._cluster.become_leader(self._name)
        if found.is_mine:
            return True
        if found.name == self._name:  # left behind by an earlier process or coordinator session of this server
            return await self._cluster.become_leader(self._name, over=found.version)
        if self._detector is not None and found.name in self._displaced:
            self._detector.clear_suspicion(found.name, "it leads again since its place was taken")
        if found.name in self._suspected:
            return await self._take_the_place(found)
        return False

    @property
    def _suspected(self) -> Mapping[str, str]:
        return {} if self._detector is None else self._detector.suspected

    async def _take_the_place(self, found: Leadership) -> bool:
        """Replace a suspected leader; return whether this server leads now. The servers try in turn, by name."""
        others = sorted(name for name in await self._cluster.servers() if name not in self._suspected)
        await asyncio.sleep(TURN_SECONDS * (others.index(self._name) if self._name in others else len(others)))
        why = self._suspected.get(found.name)
        if why is None or await self._cluster.leader() != found:
            return False
        is_ours = await self._cluster.become_leader(self._name, over=found.version)
        if is_ours:
            self._displaced[found.name] = None
            log.warning("server %s replaces server %s as the leader: %s", self._name, found.name, why)
        return is_ours

    async def _assign(self) -> None:
        servers = self._without_suspects(await self._cluster.servers())
        preferences = await self._read_preferences()
        current, version = await self._cluster.assignment()
        check_length(current, self._partitions)
        wanted = plan(current, servers, len(current.owners), preferences)
        why = _difference(self._known, servers)
        if self._known is not None and preferences != self._preferences:
            why = ", ".join(filter(None, (why, "operators prefer other owners")))
        if wanted != current:
            await self._cluster.save_assignment(wanted, version)
            what = "; ".join(moved(current, wanted))
            log.info("%s: moved partitions %s", why or "the assignment was changed by another process", what)
        elif why:
            log.info("%s: every partition stays where it is", why)
        self._known, self._preferences = servers, preferences

    def _without_suspects(self, servers: Mapping[str, ServerMeta]) -> Mapping[str, ServerMeta]:
        """Leave out suspected servers, unless no other server could take over their partitions."""
        rest = {name: server for name, server in servers.items() if name not in self._suspected}
        return rest if any(not server.is_draining for server in rest.values()) else servers

    async def _read_preferences(self) -> Preferences:
        """Read the preferences. Keep the last ones if the document cannot be read, so that the partitions of a lost
        server get an owner nevertheless."""
        try:
            preferences, _ = await self._cluster.preferences()
        except BadMetadata as error:
            log.warning("%s %s; the last preferences of operators stay in force", error.code, error.message)
            return self._preferences
        return preferences


def check_length(assignment: Assignment, partitions: int) -> None:
    """Raise `BadMetadata` if the assignment has a wrong number of partitions. The group log, once there is one, follows
    the partitions."""
    if len(assignment.owners) not in (partitions, partitions + 1):
        raise BadMetadata(
            f"{ASSIGNMENT}: it has {len(assignment.owners)} partitions; the cluster has {partitions}",
            path=ASSIGNMENT,
            field="owners",
        )


def _difference(before: Mapping[str, ServerMeta] | None, now: Mapping[str, ServerMeta]) -> str:
    """Return a sentence about the servers that came, went or changed; empty if none did."""
    if before is None:
        return f"servers that are up: {', '.join(now) or 'none'}"
    parts = [f"server {name} came" for name in now if name not in before]
    parts += [f"server {name} went" for name in before if name not in now]
    for name, server in now.items():
        was = before.get(name)
        if was is None:
            continue
        if was.is_draining != server.is_draining:
            parts.append(f"server {name} {'gives its partitions away' if server.is_draining else 'takes part again'}")
        if was.preferred != server.preferred:
            parts.append(f"server {name} prefers other partitions")
        if was.instance != server.instance:
            parts.append(f"server {name} was started again")
    return ", ".join(parts)

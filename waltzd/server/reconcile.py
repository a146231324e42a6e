"""Keep something in step with documents of the coordinator, for as long as the process lives: the policy, the rate of
copies, the versions that work together.

Take a token, then look and act, then wait with that token: so a change that comes while we act is noticed afterwards. A
failure is logged once, and retried when a document has changed. Only while the coordinator does not answer, or refuses the
wait, is it retried after a pause, because its return is no change of a document.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from waltzd.cluster.clients import SEEN_SECONDS, ClientNames
from waltzd.cluster.cluster import COPY_RATE, ROOT, Cluster, channels_document
from waltzd.cluster.documents import ChannelsDocument, PolicyDocument
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import (
    BadMetadata,
    ChangedMeanwhile,
    IncompatibleVersion,
    LevelUnknown,
    NameInUse,
    NodeMissing,
)
from waltzd.protocol.channels import NO_CHANNELS
from waltzd.protocol.level import THIS, Program
from waltzd.protocol.policy import Policy
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.clients.registry import ClientRegistry

AGAIN_SECONDS = 1.0
log = logging.getLogger("waltz.server")


class Reconciler:
    def __init__(
        self, name: str, *, wait: Callable[[object | None], Awaitable[object]], act: Callable[[], Awaitable[None]]
    ) -> None:
        """`wait` is one of the waits of `Cluster`; `act` brings everything in step. `name` is for messages."""
        self.name = name
        self.trouble = ""
        """Sentence that says why it is not in step; empty if it is."""
        self._wait = wait
        self._act = act

    async def run(self) -> None:
        """Run for ever; raise `NameInUse`, `LevelUnknown` or `IncompatibleVersion`: this process must not continue then."""
        seen: object | None = None
        while True:
            has_waited = False
            try:
                seen = await self._wait(seen)
                has_waited = True
                await self._act()
            except (NameInUse, LevelUnknown, IncompatibleVersion):
                raise
            except CannotConnect as error:
                self._say(error)
                seen, has_waited = None, False
            except NodeMissing as error:
                self._say(error)
            except ChangedMeanwhile:
                continue  # another process was faster, so there is a change to notice already
            except WaltzError as error:
                self._say(error)
            else:
                self._end_of_trouble()
            if not has_waited:  # the coordinator is away, or refuses the wait, and would do so again at once
                await asyncio.sleep(AGAIN_SECONDS)

    def _say(self, error: WaltzError) -> None:
        if error.message != self.trouble:
            self.trouble = error.message
            log.warning("%s: %s %s; nothing new is begun", self.name, error.code, error.message, extra=error.facts)

    def _end_of_trouble(self) -> None:
        if self.trouble:
            log.info("%s: in step again", self.name)
        self.trouble = ""


class CopyRateLimit:
    """The rate at which a replica may copy: that of the configuration, or less while a command of an operator limits it.

    The limit of the command is an ephemeral document. While the coordinator cannot be asked, the last value that was read
    counts.
    """

    def __init__(self, cluster: Cluster, most: int) -> None:
        """`most`: limit of the configuration for each replica that copies, in bytes a second; 0 for no limit."""
        self._cluster = cluster
        self._most = most
        self._said = 0
        self.reconciler = Reconciler("how fast replicas copy", wait=self._wait, act=self._read)

    @property
    def bytes_per_second(self) -> int:
        """Rate that is in force now; 0 for no limit."""
        return min((bound for bound in (self._most, self._said) if bound), default=0)

    async def _wait(self, seen: object | None) -> object:
        return await self._cluster.wait_for_change([COPY_RATE], seen)

    async def _read(self) -> None:
        found = await self._cluster.copy_rate()
        self._said = 0 if found is None else found.bytes_per_second


class VersionCheck:
    """Refusal of versions that do not work with this server: of a cluster, of other servers, and of storages.

    The rules are those of `waltzd.protocol.level`. The hard part are two servers that start at once: each looks at the
    list of servers before it writes anything, and again whenever it has put itself into the list, so at least one of
    them sees both versions. A server whose registration expired looks in the same way when it registers again: another
    one may have joined. A storage does not read the level, and one of an older version may start just before it rises:
    a server that reads a higher level checks the storages that it is connected to again.
    """

    def __init__(self, cluster: Cluster, name: str, level: int, program: Program = THIS) -> None:
        """`name`: this server. `level`: level of the cluster, as it was read. `program`: version of this server."""
        self._cluster = cluster
        self._name = name
        self.level = level
        """Level of the cluster when it was last read."""
        self._program = program
        self.on_rise: Callable[[Callable[[str, str], None]], None] = lambda check: None
        """Called with `check_storage` when a higher level was read, before anything else can use it."""
        self.reconciler = Reconciler("level", wait=lambda seen: cluster.wait_for_change([ROOT], seen), act=self.read)

    async def read(self) -> None:
        """Read the level again; raise `LevelUnknown` if the cluster was finalized for a newer version meanwhile."""
        level = (await self._cluster.meta()).level
        if level > self.level:
            self.level = level
            self.on_rise(self.check_storage)

    async def check_servers(self) -> None:
        """Raise `IncompatibleVersion` if a server that is up is more than one minor version away from this one."""
        for name, meta in sorted((await self._cluster.servers()).items()):
            if name != self._name:
                self._program.check_server(name, meta.version)

    def check_storage(self, name: str, version: str) -> None:
        """Raise `IncompatibleVersion` if replicas on this storage must not be used."""
        self._program.check_storage(name, version, self.level)


class PolicyFollower:
    """Following the policy and the channels of the cluster: each valid version is in force as soon as it is noticed.

    The last valid versions stay in force while the coordinator cannot be asked, and while one of the two documents is
    invalid. A grant may name channels, so the two documents are used together or not at all. A server that has read
    none since it started admits only operators. If the policy was deleted, every caller has all rights again. But if
    the document of the cluster is missing as well, the policy was not deleted: the coordinator has lost its data, and
    the last policy stays.
    """

    def __init__(self, cluster: Cluster, authorizer: Authorizer) -> None:
        self._cluster = cluster
        self._authorizer = authorizer
        self._counts: tuple[PolicyDocument | None, ChannelsDocument] = None, ChannelsDocument(channels=NO_CHANNELS)
        self._has_read = False
        self.trouble = ""
        """Sentence that says why the newest documents are not in force; empty if they are."""
        self.reconciler = Reconciler("policy", wait=cluster.wait_for_policy, act=self.read)

    async def read(self) -> None:
        try:
            document, _ = await self._cluster.policy()
            channels, _ = await channels_document(self._cluster.coordinator)
        except BadMetadata as error:
            self._spoiled(error)
            return
        if document is None:
            await self._cluster.meta()
        if self.trouble:
            log.info("the policy can be read again")
        self.trouble = ""
        if (document, channels) != self._counts or not self._has_read:
            policy = None if document is None else Policy(document.grants, channels.channels)
            self._authorizer.adopt(policy, channels.channels, channels.keys)
            count = "there is none: everybody may do everything" if document is None else f"{len(document.grants)} grants"
            log.info("policy: %s; channels: %d", count, len(channels.channels))
        self._counts, self._has_read = (document, channels), True

    def _spoiled(self, error: BadMetadata) -> None:
        if error.message == self.trouble:
            return
        self.trouble = error.message
        self._authorizer.close(error.message)
        rest = "the last one stays in force" if self._authorizer.why_closed is None else "only operators are admitted"
        log.error("policy: %s %s; %s", error.code, error.message, rest, extra=error.facts)


LOOK_SECONDS = 60.0
"""Interval in which a server records connected names."""
FORGET_SECONDS = 3600.0
"""Interval in which the leader looks for names to forget."""


class NameRecorder:
    """Names of applications in the coordinator: recorded while they are connected, forgotten when they were away for long.

    Every server records the names that are connected to it, seldom. The leader removes names that were not seen for months.
    Nothing depends on it; while the coordinator does not answer it is done later.
    """

    def __init__(self, names: ClientNames, registry: ClientRegistry, *, is_leader: Callable[[], bool]) -> None:
        self._names = names
        self._registry = registry
        self._is_leader = is_leader
        self._noted: dict[str, float] = {}
        """Time at which each connected name was last recorded."""
        self._forgot_at = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.record_names(asyncio.get_running_loop().time())
            except WaltzError as error:
                log.info("the names of applications are written down later: %s %s", error.code, error.message)

    async def record_names(self, now: float) -> None:
        connected = self._registry.names
        self._noted = {name: self._noted[name] for name in connected if name in self._noted}
        for name in connected:
            if now - self._noted.get(name, -SEEN_SECONDS) >= SEEN_SECONDS:
                await self._names.note_seen(name)
                self._noted[name] = now
        if self._is_leader() and now - self._forgot_at >= FORGET_SECONDS:
            gone = await self._names.forget()
            self._forgot_at = now
            if gone:
                log.info(
                    "%d names of applications were not seen for long, and are forgotten: %s", len(gone), ", ".join(gone)
                )

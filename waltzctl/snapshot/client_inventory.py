"""Inventory of the applications that are connected to a cluster, merged from the reports of all its servers.

An instance of an application may mount partitions at several servers, and each server knows only its own mounts. An
instance is live if any server reports it live, else hanging if any server reports that; it is gone only if all servers
say so. Servers that do not answer are listed, because an instance that others report gone may be connected there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ServerMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import NoServerUp
from waltzd.protocol.descriptions import ClientInstance, ClientList, ClientUse
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 5.0
STATES = ("live", "hangs", "gone")
"""States of an instance, the strongest first: if servers disagree, the earlier one in this list wins."""
SLOWED_MS = 5000
"""Milliseconds; an instance that was throttled within them is reported as slowed."""


@dataclass(frozen=True, kw_only=True)
class ApplicationInstance:
    """One instance of an application, merged over all servers."""

    name: str
    role: str
    instance: str
    state: str
    peer: str
    version: str
    epoch: int
    age_ms: int
    quiet_ms: int
    servers: tuple[str, ...]
    """Servers at which it has mounts in this state."""
    partitions: tuple[int, ...]
    appended: int
    appended_bytes: int
    fed: int
    fed_bytes: int
    is_slowed: bool
    waiting: str
    """Reason why it is fed nothing, if the cause is outside of the instance; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class ServerUsage:
    """Usage of one name at one server. Each server counts quotas by itself."""

    server: str
    use: ClientUse

    @property
    def is_slowed(self) -> bool:
        return self.use.slowed_ago_ms is not None and self.use.slowed_ago_ms < SLOWED_MS


@dataclass(frozen=True, kw_only=True)
class ClientInventory:
    instances: tuple[ApplicationInstance, ...]
    uses: tuple[ServerUsage, ...]
    silent: Mapping[str, WaltzError]
    """Servers that did not answer, with the error."""


def merge_lists(reported: Mapping[str, ClientList | WaltzError]) -> ClientInventory:
    """Merge the lists of all servers: name of the server → its list, or the error."""
    lists = {name: found for name, found in reported.items() if isinstance(found, ClientList)}
    uses = tuple(ServerUsage(server=name, use=use) for name, found in lists.items() for use in found.names)
    slowed = {(one.use.role, one.use.name) for one in uses if one.is_slowed}
    parts: dict[tuple[str, str, str], dict[str, ClientInstance]] = {}
    for server, found in lists.items():
        for one in found.clients:
            parts.setdefault((one.name, one.role, one.instance), {})[server] = one
    return ClientInventory(
        instances=tuple(_instance(found, slowed) for _, found in sorted(parts.items())),
        uses=tuple(sorted(uses, key=lambda one: (one.use.name, one.use.role, one.server))),
        silent={name: found for name, found in reported.items() if isinstance(found, WaltzError)},
    )


def _instance(found: Mapping[str, ClientInstance], slowed: set[tuple[str, str]]) -> ApplicationInstance:
    state = min((one.state for one in found.values()), key=STATES.index)
    there = {server: one for server, one in found.items() if one.state == state}
    ours: Sequence[ClientInstance] = list(there.values())
    newest, everywhere = min(ours, key=lambda one: one.quiet_ms), found.values()
    return ApplicationInstance(
        name=newest.name,
        role=newest.role,
        instance=newest.instance,
        state=state,
        peer=newest.peer,
        version=newest.version,
        epoch=max(one.epoch for one in everywhere),
        age_ms=(min if state == "gone" else max)(one.age_ms for one in ours),
        quiet_ms=newest.quiet_ms,
        servers=tuple(sorted(there)),
        partitions=tuple(sorted({partition for one in ours for partition in one.partitions})),
        appended=sum(one.appended for one in everywhere),
        appended_bytes=sum(one.appended_bytes for one in everywhere),
        fed=sum(one.fed for one in everywhere),
        fed_bytes=sum(one.fed_bytes for one in everywhere),
        is_slowed=(newest.role, newest.name) in slowed,
        waiting=next((f"{server}: {one.waiting}" for server, one in sorted(found.items()) if one.waiting), ""),
    )


def check_heard(answers: Mapping[str, object], what: str) -> None:
    """Raise if no server answered; an empty list would wrongly say that there is nothing. `what` names what is unknown
    then."""
    silent = [answer for answer in answers.values() if isinstance(answer, WaltzError)]
    if not answers:
        raise NoServerUp(f"no server of the cluster is up, so it is not known {what}")
    if len(silent) == len(answers):
        raise silent[0]


async def take_inventory(cluster: Cluster, tls: Tls | None, *, needs_answer: bool = False) -> ClientInventory:
    """Ask all registered servers. With `needs_answer`, raise if none answered."""
    meta, servers = await cluster.meta(), await cluster.servers()

    async def ask(server: ServerMeta) -> ClientList | WaltzError:
        asked = ServerAdminClient(server.admin_listen, meta.key, seconds=CALL_SECONDS, tls=tls, name=server.name)
        async with asked as admin:
            try:
                return await admin.clients()
            except WaltzError as error:
                return error

    answers = dict(zip(servers, await asyncio.gather(*(ask(server) for server in servers.values())), strict=True))
    if needs_answer:
        check_heard(answers, "which applications are connected")
    return merge_lists(answers)


async def disconnect(cluster: Cluster, tls: Tls | None, name: str, instance: str | None) -> dict[str, int | WaltzError]:
    """End the mounts of an application, or of one instance, at every server; return the count or the error for each
    server."""
    meta, servers = await cluster.meta(), await cluster.servers()

    async def end(server: ServerMeta) -> int | WaltzError:
        asked = ServerAdminClient(server.admin_listen, meta.key, seconds=CALL_SECONDS, tls=tls, name=server.name)
        async with asked as admin:
            try:
                return await admin.disconnect(name, instance)
            except WaltzError as error:
                return error

    answers = await asyncio.gather(*(end(server) for server in servers.values()))
    return dict(zip(servers, answers, strict=True))

"""Asking the daemons of a cluster for what they logged lately, and the coordinator for what operators did.

Each daemon keeps its newest lines in memory (`waltzd.daemon.logs`), so there is no file to be reached and nothing to be
collected before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Literal, Self, get_args
from uuid import UUID

from waltzctl.certificate import first_contact
from waltzctl.merged_log import Line, merged
from waltzctl.picture.picture import Picture
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import WaltzError
from waltzd.protocol.descriptions import Events
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS = get_args(Level)
OPERATOR = "operator"
CALLS_MAX = 32
HISTORY_MAX = 100
"""Of what operators did, the newest."""


def told_lines(
    told: Mapping[tuple[str, str], Events],
    history: Iterable[HistoryEntry],
    *,
    since_ms: int,
    level: str,
    names: Sequence[str] = (),
) -> list[Line]:
    """`told`: by kind and name. What people did has no level of its own: a change that failed is a warning."""
    logs = [
        [
            Line(time_ms=one.time_ms, who=name, kind=kind, level=one.level, text=one.text, code=one.code)
            for one in events.events
        ]
        for (kind, name), events in told.items()
    ]
    least = LEVELS.index(level)
    return [
        line
        for line in merged([*logs, *map(lines_of, history)])
        if line.time_ms >= since_ms
        and (line.level not in LEVELS or LEVELS.index(line.level) >= least)
        and (not names or line.who in names)
    ]


def lines_of(entry: HistoryEntry) -> list[Line]:
    """A change began, and it ended."""
    what = f"{entry.verb} {entry.subject}"
    why = f" ({entry.reason})" if entry.reason else ""
    moments = [(entry.began, "info", f"{what} began{why}")]
    if entry.ended is not None:
        moments.append((entry.ended, "info" if entry.outcome == "done" else "warning", f"{what}: {entry.outcome}"))
    return [
        Line(time_ms=time_ms, who=entry.who, kind=OPERATOR, level=level, text=text)
        for moment, level, text in moments
        if (time_ms := _milliseconds(moment)) is not None
    ]


def _milliseconds(moment: str) -> int | None:
    try:
        return int(datetime.fromisoformat(moment).timestamp() * 1000)
    except (ValueError, OverflowError):  # written by somebody else
        return None


class Listening:
    """Keeps a connection to each daemon, and knows how far it has heard each of them."""

    def __init__(self, key: UUID, tls: Tls | None, *, seconds: float) -> None:
        self._key, self._tls, self._seconds = key, tls, seconds
        self._clients: dict[tuple[str, str, str], ServerAdminClient | AdminClient] = {}
        self._heard: dict[tuple[str, str], tuple[int, int]] = {}
        self.silent: dict[str, WaltzError] = {}
        """Who did not answer the last time, and why."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            await client.close()

    async def listen(self, found: Picture, names: Sequence[str] = ()) -> dict[tuple[str, str], Events]:
        """What every daemon has said since the last time."""
        turn = asyncio.Semaphore(CALLS_MAX)
        daemons = [
            *(("server", view.meta.name, view.meta.admin_listen) for view in found.servers),
            *(("storage", view.meta.name, view.meta.admin_listen) for view in found.storages),
        ]
        self.silent = {}

        async def one(kind: str, name: str, address: str) -> tuple[tuple[str, str], Events | None]:
            async with turn:
                try:
                    return (kind, name), await self._hear(kind, name, address)
                except WaltzError as error:
                    self.silent[name] = error
                    return (kind, name), None

        wanted = [daemon for daemon in daemons if not names or daemon[1] in names]
        answers = await asyncio.gather(*(one(*daemon) for daemon in wanted))
        return {daemon: events for daemon, events in answers if events is not None}

    async def _hear(self, kind: str, name: str, address: str) -> Events:
        client = self._client(kind, name, address)
        began_ms, number = self._heard.get((kind, name), (0, 0))
        if (kind, name) in self._heard:
            events = await client.events(number)
        else:
            async with first_contact(address, self._tls):
                events = await client.events(number)
        if events.began_ms != began_ms and number:  # another process, which counts from the beginning
            events = await client.events(0)
        last = events.events[-1].number if events.events else number if events.began_ms == began_ms else 0
        self._heard[kind, name] = events.began_ms, last
        return events

    def _client(self, kind: str, name: str, address: str) -> ServerAdminClient | AdminClient:
        found = self._clients.get((kind, name, address))
        if found is None:
            if kind == "server":
                found = ServerAdminClient(address, self._key, seconds=self._seconds, tls=self._tls, name=name)
            else:
                found = AdminClient(address, self._key, seconds=self._seconds, tls=self._tls, name=name)
            self._clients[kind, name, address] = found
        return found


async def history_of(cluster: Cluster) -> list[HistoryEntry]:
    return [entry for _, entry in await cluster.history(HISTORY_MAX)]

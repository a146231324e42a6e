"""Committed records from whichever replica can give them: for readers that are behind the tail.

A replica that fails, or lets us wait too long, is asked last from then on, until it has answered again: a storage that
hangs costs one deadline, not one for each read. What a storage says when it cannot give is about that storage: it never
goes to a reader as if it were about the partition. A session that begins is no failure: storages refuse the one before
from the first contact on, and the links are not yet there again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from waltzd.errors import NotReadable, WaltzError
from waltzd.record import Run
from waltzd.server.copying import timely
from waltzd.server.replica_link import ReplicaLink

RETRY_SECONDS = 0.05


class Log(Protocol):
    """What is read from."""

    @property
    def partition(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def links(self) -> Mapping[str, ReplicaLink]: ...
    @property
    def is_beginning(self) -> bool:
        """Its session is not open yet, or only just."""
        ...

    def held(self, name: str) -> int: ...


class ReplicaReader:
    def __init__(self, log: Log, *, seconds: float) -> None:
        self._log = log
        self._seconds = seconds
        self._unwell: dict[str, None] = {}
        """Who failed, in the order in which they did."""

    async def read(self, first_id: int, last_id: int, chunk_bytes: int) -> AsyncGenerator[Run, None]:
        log, failed = self._log, dict[str, WaltzError]()
        while first_id <= last_id:
            name = self._choose(first_id, failed)
            if name is None and log.is_beginning:
                failed.clear()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if name is None:
                raise NotReadable(f"no replica gives ids from {first_id} on: {_reasons(failed)}")
            until = min(last_id, log.held(name))
            port = log.links[name].port
            runs = port.read(log.partition, first_id, until, session=log.session, frame_bytes=chunk_bytes)
            try:
                async for run in timely(runs, self._seconds, name):
                    yield run
                    first_id = run.last_id + 1
                self._unwell.pop(name, None)
            except WaltzError as error:
                failed[name] = error
                self._unwell.pop(name, None)
                self._unwell[name] = None

    def _choose(self, first_id: int, failed: Mapping[str, WaltzError]) -> str | None:
        able = [
            name
            for name, link in sorted(self._log.links.items())
            if link.is_readable and name not in failed and self._log.held(name) >= first_id
        ]
        well = [name for name in able if name not in self._unwell]
        if well:
            return well[self._log.partition % len(well)]  # partitions spread over the storages
        return next((name for name in self._unwell if name in able), None)


def _reasons(failed: Mapping[str, WaltzError]) -> str:
    said = [f"{name}: {error.code} {error.message}" for name, error in failed.items()]
    return "; ".join(said) or "none that holds them can be read"

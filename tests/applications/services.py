"""A cluster of real daemons with the example applications on it, as processes that may be killed by name: two instances of
the booking service, two of the shop on one database, and the indexer."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import httpx2
import sqlalchemy as sa

from tests.process.cluster import Cluster
from waltzctl.local_cluster.daemon import Daemon
from waltzctl.shell.blueprint import HOST, free_ports
from waltzd.sql import sqlite

ROOT = Path(__file__).parents[2]
PARTITIONS = 3
BOOKING, SHOP, INDEXER = ("booking-1", "booking-2"), ("shop-1", "shop-2"), "indexer"
PATIENCE_SECONDS = 60
DEAD_LETTER = re.compile(r"written as a dead letter[^\n]*\nTraceback .*?\n\S*EventUnreadable: [^\n]*", re.DOTALL)


class Services:
    """The processes. `folder` takes everything that they write."""

    def __init__(self, folder: Path, database: str) -> None:
        """`database`: of the shop, a URL; empty for SQLite in the folder."""
        self.cluster = Cluster.make(folder / "cluster", partitions=PARTITIONS)
        self.folder = folder
        self.database = database or str(folder / "shop.db")
        self.index = str(folder / "index.db")
        taken = {port for ports in self.cluster.local.blueprint.ports.values() for port in ports}
        seed = zlib.crc32(os.fsencode(folder))  # another run looks elsewhere, and takes no port whose instance is dead
        self._ports = dict(zip((*BOOKING, *SHOP), (port for port in free_ports(seed) if port not in taken), strict=False))
        self.processes = {name: self._process(name) for name in (*BOOKING, *SHOP, INDEXER)}

    def _process(self, name: str) -> Daemon:
        module = name.partition("-")[0]
        words = {"booking": [], "shop": ["--database", self.database], "indexer": ["--index", self.index]}[module]
        if name in self._ports:
            words = [*words, "--port", str(self._ports[name])]
        process = Daemon(name, (), self.folder / f"{name}.log", lambda _: True)
        process.command = [sys.executable, "-m", f"tests.examples.{module}", "--servers", self.cluster.servers, *words]
        process.environment = {"PYTHONPATH": str(ROOT)}
        return process

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self._ports[name]}"

    def engine(self) -> sa.Engine:
        """To the database of the shop."""
        return sa.create_engine(self.database) if "://" in self.database else sqlite(self.database)

    # -- life

    def start(self) -> None:
        """Not on a loop: the cluster runs one of its own meanwhile."""
        self.cluster.start()
        for process in self.processes.values():
            process.spawn()

    async def answer(self) -> None:
        """Wait until every instance answers over HTTP."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        async with httpx2.AsyncClient(trust_env=False) as web:
            for name in self._ports:
                await self._answers(web, name, deadline)

    async def _answers(self, web: httpx2.AsyncClient, name: str, deadline: float) -> None:
        while True:
            self.processes[name].check_running()
            try:
                await web.get(self.url(name))
                return
            except httpx2.TransportError:
                assert time.monotonic() < deadline, f"{name} does not answer: {self.processes[name].words()}"
                await asyncio.sleep(0.05)

    def stop(self) -> list[str]:
        """The applications are told to end; what was wrong with their ends, and with their lives."""
        for process in self.processes.values():
            process.ask_to_end()
        wrong = [f"{name} had to be killed" for name, one in self.processes.items() if not one.wait_end(PATIENCE_SECONDS)]
        return wrong + self._tracebacks()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        self.cluster.close()

    # -- what is done to them

    def kill(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.processes:
                self.processes[name].check_running()
                self.processes[name].kill()
            else:
                self.cluster.kill(name)

    async def heal(self) -> None:
        """Everything runs: the daemons have all replicas level, the instances answer."""
        for process in self.processes.values():
            if not process.is_running:
                process.spawn()
        await self.cluster.heal()
        await self.answer()

    def _tracebacks(self) -> list[str]:
        """What is killed around a client is no surprise to it; what becomes a dead letter is told with its traceback."""
        found = []
        for process in self.processes.values():
            text = DEAD_LETTER.sub("", process.log.read_text(encoding="utf-8", errors="replace"))
            at = text.find("Traceback ")
            if at >= 0:
                found.append(f"{process.name} logged\n{text[max(0, at - 500) : at + 3000]}")
        return found

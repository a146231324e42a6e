"""A page that is left open: many looks later neither the browser nor the console holds more than before."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import uvicorn

from tests.cli.browser import Browser, missing
from tests.unit.pictures import well
from tests.unit.waltzctl.console.still import Still, named, seen_of
from waltzctl.console.door import Door, hosts_of
from waltzctl.console.site import Site
from waltzctl.console.watch import TRAIL_MAX, Point

WARM, MORE = 300, 1000
"""Looks: until the lines of the page are full, as many as a quarter of an hour has, and those behind."""


class Ticking(Still):
    """It looks as often as a browser takes what it has seen; each look is another one."""

    ticks = 0

    async def tick(self) -> None:
        trail = deque[Point](maxlen=TRAIL_MAX)
        while True:
            number = self.ticks + 1
            assert self.seen.sighting is not None
            assert self.seen.rates is not None
            total = replace(self.seen.rates.total, tx=float(number * 7919 % 1000), lag=number % 13)
            trail.append(Point(at=float(number * 2), total=total))
            sighting = replace(self.seen.sighting, at=f"2026-11-24T12:00:{number:06}Z")
            rates = replace(self.seen.rates, total=total)
            await self.publish(replace(self.seen, number=number, sighting=sighting, rates=rates, trail=tuple(trail)))
            self.ticks = number
            await asyncio.sleep(0.002)


@contextmanager
def ticking() -> Iterator[tuple[Ticking, str]]:
    watch = Ticking(seen_of(well()))
    config = uvicorn.Config("", log_config=None, lifespan="off", ws="none", port=0)
    bound = config.bind_socket()
    port = bound.getsockname()[1]
    config.app = named(Site(watch, Door(hosts=hosts_of("127.0.0.1", port), is_open=True)).app)
    server = uvicorn.Server(config)

    async def serve() -> None:
        task = asyncio.create_task(watch.tick())
        await server.serve(sockets=[bound])
        task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield watch, f"http://127.0.0.1:{port}"
    finally:
        watch.is_over = True
        server.should_exit = server.force_exit = True
        thread.join(60)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_page_that_stays_open_does_not_grow() -> None:
    with ticking() as (_, home), Browser() as browser:
        browser.open(home)

        def held() -> tuple[int, int, int]:
            """Nodes of the page, bytes of its scripts, bytes of the console."""
            browser.protocol("HeapProfiler.collectGarbage")
            counted = browser.protocol("Memory.getDOMCounters")
            gc.collect()
            assert counted["documents"] < 10
            assert counted["jsEventListeners"] < 100
            return (
                counted["nodes"],
                browser.protocol("Runtime.getHeapUsage")["usedSize"],
                tracemalloc.get_traced_memory()[0],
            )

        def shown() -> int:
            """Number of the look that the page shows."""
            told = browser.text("header time")
            return int(told[-7:-1]) if told[-7:-1].isdigit() else 0

        browser.rises_to(shown, WARM)
        tracemalloc.start()
        try:
            before = held()
            browser.rises_to(shown, shown() + MORE)
            after = held()
        finally:
            tracemalloc.stop()
        assert after[0] < before[0] + 2000
        assert after[1] < before[1] + 1_000_000
        assert after[2] < before[2] + 3_000_000

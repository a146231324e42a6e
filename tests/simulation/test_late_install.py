"""A segment file that the owner gave up waiting for comes late: after the replica was opened again in the same session, and
has begun it at a mark below the end of that file."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.simulation.storages import SimPort
from tests.simulation.test_store import cell, story
from waltzd.errors import CannotConnect


class _ImpatientPort(SimPort):
    """The caller waits for a second; what the storage does with the file is its own task."""

    def __init__(self, storage: Any, tasks: list[asyncio.Task[Any]]) -> None:
        super().__init__(storage)
        self._tasks = tasks

    async def install_segment(self, partition: int, session: int, first_id: int, size: int, pieces: Any) -> Any:
        calls = self._storage.calls
        if calls is None:
            raise CannotConnect("down")
        work = asyncio.ensure_future(calls.install_segment(partition, session, first_id, size, pieces))
        self._tasks.append(work)
        done, _ = await asyncio.wait((work,), timeout=1.0)
        if not done:
            raise CannotConnect(f"{self._storage.name} did not go on with a segment file for a second")
        return work.result()


def slow_to_prove(storage: Any, first_id: int) -> asyncio.Event:
    """Its disk is slow for one file: it is proven when the event is set."""
    gate = asyncio.Event()
    arrivals = storage.calls._arrivals
    right = arrivals._run_writing

    async def run_writing(function: Any, *arguments: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if getattr(function, "__name__", "") == "prove" and owner is not None and owner.first_id == first_id:
            await gate.wait()
        return await right(function, *arguments)

    arrivals._run_writing = run_writing
    return gate


@story
async def test_a_file_that_comes_late_does_not_get_its_place_after_the_session_has_begun() -> None:
    async with cell() as c:
        tasks: list[asyncio.Task[Any]] = []
        c.connect = lambda meta: _ImpatientPort(c.storages[meta.name], tasks)  # type: ignore[method-assign]
        owned = await c.own(1)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
        c.storages["s2"].kill()
        await pipeline.committed(pipeline.append(100))  # up to 119, on s0 and s1
        c.storages["s1"].kill()
        pipeline.append(100)  # up to 219, on s0 alone: nobody is told anything, and s1 and s2 will not have them
        await c.until(lambda: c.last_id("s0") == 219)
        calls = c.storages["s0"].calls
        assert calls is not None
        spanning = max(first for first, _ in calls.directory.partition(0).sealed_segments() if first <= 119)
        await owned.close(hand_over=False)

        await c.storages["s2"].start()
        gate = slow_to_prove(c.storages["s2"], spanning)
        assert c.storages["s2"].calls is not None
        replica: Any = c.storages["s2"].calls.directory.partition(0)
        right = replica.set_low_mark

        def set_low_mark(session: int, mark: int, contact: int) -> Any:
            gate.set()  # the file is proven while the marks are being flushed
            return right(session, mark, contact)

        replica.set_low_mark = set_low_mark
        second = await c.own(2)
        await c.until(lambda: any("segment file" in line for line in c.log))  # s1 is silent: s2 copies from s0, slowly
        await c.storages["s1"].start()
        later = await c.opened(second)
        assert later.session.low_mark == 119
        await c.until(lambda: any(r.storage == "s2" and r.state in ("LIVE", "DOWN") for r in second.describe().replicas))
        wanted = later.append(5)
        await later.committed(wanted)
        await c.until(lambda: all(c.last_id(name) == wanted for name in c.storages))
        for task in tasks:
            await asyncio.gather(task, return_exceptions=True)
        assert gate.is_set()
        assert c.storages["s2"].records() == c.storages["s0"].records()
        c.storages["s1"].kill()
        await later.committed(later.append(1))  # s2 counts, and holds what the owner has committed
        await c.until(lambda: c.storages["s2"].records() == c.storages["s0"].records())

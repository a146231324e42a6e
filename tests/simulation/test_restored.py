"""An old copy of a storage's directory comes back while another one lags and the third is away: it does not vote."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.test_store import cell
from tests.unit.timeless import run


@pytest.mark.parametrize("in_place", [False, True], ids=["as other files", "in place"])
def test_an_old_copy_does_not_vote(in_place: bool) -> None:
    async def story() -> None:
        async with cell() as c:
            store = await c.own(1)
            pipeline = await c.opened(store)
            await pipeline.committed(pipeline.append(20))
            await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
            storage = c.storages["s2"]
            copy = storage.disk.clone(5)
            storage.kill()
            await storage.start()
            await c.until(lambda: all(replica.state == "LIVE" for replica in store.describe().replicas))
            c.storages["s1"].kill()  # it lags
            await pipeline.committed(pipeline.append(30))  # acknowledged by s0 and s2
            await store.close(hand_over=False)
            storage.kill()
            c.storages["s0"].kill()  # away, with everything
            storage.disk = copy.restored(6, over=storage.disk if in_place else None)
            await c.storages["s1"].start()
            await storage.start()
            second = await c.own(2)
            await asyncio.sleep(30)
            assert second._pipeline is None, "it waits for s0, which alone has what was acknowledged"

    run(story())

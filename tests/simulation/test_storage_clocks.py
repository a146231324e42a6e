"""The clocks of the storages bound that of an owner, and bound it no longer than they are wrong themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.cell import SETTINGS, cell, story
from waltzd.server.core.step import OWN_AHEAD_MAX
from waltzd.server.session.owned import CLOCKS_SECONDS

HOUR = 3_600_000_000


@pytest.mark.parametrize("is_owner_alone", [True, False])
@story
async def test_a_time_that_all_clocks_show_is_the_time_of_the_log(is_owner_alone: bool) -> None:
    """All machines began an hour behind and were set, or slept for an hour, in which the steady clock stands still."""
    loop, later = asyncio.get_running_loop(), {"storages": 0, "owner": 0}

    def clock(whose: str) -> int:
        return 1000 * HOUR + round(1e6 * loop.time()) + later[whose]

    async with cell() as c:
        for storage in c.storages.values():
            assert storage.door is not None
            storage.door.service._clock = lambda: clock("storages")
        owned = await c.own(settings=replace(SETTINGS, wall=lambda: clock("owner")))
        log = (await c.opened(owned)).session

        def held_back() -> int:
            return clock("owner") - log.storage_clocks.bounded(clock("owner"), loop.time())

        assert held_back() == 0
        later["owner"] = HOUR
        assert held_back() == pytest.approx(HOUR - OWN_AHEAD_MAX, abs=10_000)
        later["storages"] = 0 if is_owner_alone else HOUR
        await asyncio.sleep(2 * CLOCKS_SECONDS)
        assert held_back() == (pytest.approx(HOUR - OWN_AHEAD_MAX, abs=10_000) if is_owner_alone else 0)

"""The clocks of the storages bound that of an owner, and bound it no longer than they are wrong themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

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


@story
async def test_storages_that_take_long_to_open_are_asked_for_their_clocks_again() -> None:
    """An answer that was under way for longer than clocks may differ tells no time."""
    loop = asyncio.get_running_loop()

    def clock() -> int:
        return 1000 * HOUR + round(1e6 * loop.time())

    async with cell() as c:
        for storage in c.storages.values():
            calls: Any = storage.calls
            assert storage.door is not None
            storage.door.service._clock = clock
            calls.open_session = partial(_later, calls.open_session)
        owned = await c.own(settings=replace(SETTINGS, storage_seconds=5.0, wall=lambda: clock() + HOUR))
        await c.until(lambda: owned._pipeline is not None, seconds=60)
        log = (await c.opened(owned)).session
        assert log.storage_clocks.bounded(clock() + HOUR, loop.time()) - clock() == pytest.approx(OWN_AHEAD_MAX, abs=10_000)


async def _later(call: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
    await asyncio.sleep(20)
    return await call(*arguments, **named)

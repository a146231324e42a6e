"""Bytes of the newest record rot on a replica whose process was killed: that is damage, never a write that was torn."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.storages import SimStorage
from tests.simulation.test_store import cell
from tests.unit.timeless import run


def flip_last_record(storage: SimStorage, count: int) -> None:
    disk = storage.disk
    path = f"storage/0/{max(name for name in disk.names('storage/0') if name.endswith('.seg'))}"
    for at in range(disk.size(path) - 10, disk.size(path) - 10 + count):
        disk.corrupt(path, at, bytes([disk.content(path)[at] ^ 1]))


@pytest.mark.parametrize(
    ("is_power_cut", "count"), [(False, 1), (False, 5), (True, 1)], ids=["killed", "killed, five bytes", "without power"]
)
@pytest.mark.parametrize("who_is_back", [("s0", "s1"), ("s0", "s1", "s2")], ids=["one is away", "everybody is up"])
def test_rot_in_the_newest_record_gives_nothing_up(who_is_back: tuple[str, ...], is_power_cut: bool, count: int) -> None:
    async def story() -> None:
        async with cell() as c:
            owned = await c.own(1)
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(20))
            await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
            c.storages["s1"].kill()  # it lags from now on
            await pipeline.committed(pipeline.append(1))  # on s0 and s2
            await owned.close(hand_over=False)
            for name in ("s0", "s2"):
                c.storages[name].kill()
                if is_power_cut:
                    c.storages[name].disk.power_cut()
            flip_last_record(c.storages["s0"], count)
            for name in who_is_back:
                await c.storages[name].start()
            second = await c.own(2)
            if "s2" in who_is_back:
                later = await c.opened(second)
                await c.until(lambda: all(c.last_id(name) == later.session.low_mark for name in c.storages))
                assert later.session.low_mark >= 20
            else:
                await asyncio.sleep(30)
                assert second._pipeline is None, "it waits for s2, which alone has what was acknowledged"

    run(story())

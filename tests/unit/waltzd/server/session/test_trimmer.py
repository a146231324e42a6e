"""What an owner takes for older than the policy keeps, by the clocks of the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.simulation.cell import SETTINGS, story
from waltzd.cluster.documents import Keep
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.step import OWN_AHEAD_MAX, StorageClocks
from waltzd.server.session.archive import Trimmer
from waltzd.server.session.replicated_log import ReplicatedLog

SECOND = 1_000_000
HOUR, DAY = 3600 * SECOND, 86_400 * SECOND
NOW = 1_800_000_000 * SECOND
KEEP = Keep(seconds=7 * 86_400)


class FakeLog:
    """A log with one transaction an hour, the last half an hour ago. The owner's clock is wrong by `ahead` microseconds."""

    def __init__(self, *, hours: int, ahead: int) -> None:
        self.settings = replace(SETTINGS, wall=lambda: NOW + ahead)
        self.storage_clocks = StorageClocks()
        self.committed = hours - 1
        self._times = [NOW - HOUR * (hours - 1 - id) - HOUR // 2 for id in range(hours)]

    async def find_time(self, time: int, _last: int) -> int:
        return sum(one < time for one in self._times) - 1


@pytest.mark.parametrize(
    ("ahead", "older"),
    [
        pytest.param(0, 31, id="right"),
        pytest.param(5 * SECOND, 31, id="as-far-off-as-clocks-are"),
        pytest.param(8 * DAY, 31, id="jumped-forward"),
        pytest.param(-DAY, 7, id="jumped-back"),
    ],
)
@story
async def test_a_clock_that_jumps_forward_removes_nothing_that_the_policy_keeps(ahead: int, older: int) -> None:
    log = FakeLog(hours=200, ahead=ahead)
    for name in ("a", "b", "c"):
        log.storage_clocks.note(name, NOW, asyncio.get_running_loop().time(), asyncio.get_running_loop().time())
    assert OWN_AHEAD_MAX < HOUR
    trimmer = Trimmer(cast("ReplicatedLog", log), cast("Any", None), say=print)
    assert await trimmer._older(KEEP) == older


class UntimedLog(FakeLog):
    """A log of format 0: a replica takes each transaction for older than any time. Three come between two questions."""

    async def find_time(self, _time: int, _last: int) -> int:
        self.committed += 3
        return self.committed


@story
async def test_nothing_is_old_in_a_log_without_times_that_grows_between_two_questions() -> None:
    trimmer = Trimmer(cast("ReplicatedLog", UntimedLog(hours=200, ahead=0)), cast("Any", None), say=print)
    assert await trimmer._older(KEEP) == EMPTY

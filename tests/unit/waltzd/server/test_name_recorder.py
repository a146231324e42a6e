"""The roster: names that are connected are written down, seldom, and the leader forgets those that were away for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from waltzd.cluster.clients import SEEN_SECONDS
from waltzd.errors import CannotConnect
from waltzd.server.reconcile import FORGET_SECONDS, NameRecorder


class Names:
    def __init__(self) -> None:
        self.noted: list[str] = []
        self.forgot = 0
        self.error: CannotConnect | None = None

    async def note_seen(self, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.noted.append(name)

    async def forget(self) -> list[str]:
        self.forgot += 1
        return ["old"]


class Connected:
    names: list[str] = []  # noqa: RUF012  a test sets it


def made(is_leader: bool = True) -> tuple[NameRecorder, Names, Connected]:
    names: Any = Names()
    connected: Any = Connected()
    return NameRecorder(names, connected, is_leader=lambda: is_leader), names, connected


def test_a_name_is_looked_up_once_in_some_minutes_while_it_is_connected() -> None:
    async def story() -> None:
        roster, names, connected = made()
        connected.names = ["ann", "bob"]
        for second in range(0, SEEN_SECONDS + 60, 60):
            await roster.record_names(10_000.0 + second)
        assert names.noted == ["ann", "bob", "ann", "bob"]
        connected.names = ["bob"]
        await roster.record_names(10_700.0)
        connected.names = ["ann", "bob"]
        await roster.record_names(10_760.0)
        assert names.noted[4:] == ["ann"], "it went and came again"

    asyncio.run(story())


@pytest.mark.parametrize("is_leader", [True, False])
def test_only_the_leader_forgets_and_seldom(is_leader: bool) -> None:
    async def story() -> None:
        roster, names, _ = made(is_leader)
        for second in range(0, 2 * int(FORGET_SECONDS), 60):
            await roster.record_names(10_000.0 + second)
        assert names.forgot == (2 if is_leader else 0)

    asyncio.run(story())


def test_what_could_not_be_written_is_written_later() -> None:
    async def story() -> None:
        roster, names, connected = made()
        connected.names = ["ann"]
        names.error = CannotConnect("away")
        with pytest.raises(CannotConnect):
            await roster.record_names(10_000.0)
        names.error = None
        await roster.record_names(10_060.0)
        assert names.noted == ["ann"]

    asyncio.run(story())

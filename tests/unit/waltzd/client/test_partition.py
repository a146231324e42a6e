"""The gate lets in as many as there is room for, in the order in which they came, and loses no place."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.timeless import run
from waltzd.client.partition import Gate
from waltzd.errors import ClientClosed


class Room:
    def __init__(self, rows_max: int = 3, bytes_max: int = 100) -> None:
        self.rows = self.bytes = 0
        self.gate = Gate(rows_max=rows_max, bytes_max=bytes_max, used=lambda: (self.rows, self.bytes))

    def add(self, rows: int) -> None:
        self.rows += rows
        self.gate.leave(rows)

    def remove(self, rows: int) -> None:
        self.rows -= rows
        self.gate.open()


def test_first_come_first_served() -> None:
    async def work() -> None:
        room = Room()
        order: list[int] = []

        async def enter(number: int, rows: int) -> None:
            await room.gate.enter(rows, 60)
            order.append(number)
            room.add(rows)

        tasks = [asyncio.create_task(enter(number, rows)) for number, rows in enumerate([2, 2, 1])]
        await asyncio.sleep(1)
        assert order == [0]  # the small one does not overtake
        room.remove(2)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]
        room.remove(3)
        await enter(3, 7)  # more than there ever is room for, when nobody else is inside
        assert room.rows == 7

    run(work())


def test_bytes_close_the_gate_too() -> None:
    async def work() -> None:
        room = Room()
        await room.gate.enter(1, 1)
        room.add(1)
        room.bytes = 100
        with pytest.raises(TimeoutError):
            await room.gate.enter(1, 1)
        room.bytes = 99
        await room.gate.enter(1, 1)

    run(work())


def test_who_goes_away_while_being_let_in_gives_the_place_back() -> None:
    async def work() -> None:
        room = Room(rows_max=1)
        await room.gate.enter(1, 60)
        room.add(1)
        leaver = asyncio.create_task(room.gate.enter(1, 60))
        other = asyncio.create_task(room.gate.enter(1, 60))
        await asyncio.sleep(1)
        room.remove(1)  # it is the leaver's turn
        leaver.cancel()
        await asyncio.wait_for(other, 1)

    run(work())


def test_who_gives_up_while_waiting_is_passed_over() -> None:
    async def work() -> None:
        room = Room(rows_max=2)
        await room.gate.enter(1, 60)
        room.add(1)
        with pytest.raises(TimeoutError):
            await room.gate.enter(2, 5)
        await room.gate.enter(1, 0.1)

    run(work())


def test_a_closed_gate_says_why() -> None:
    async def work() -> None:
        room = Room(rows_max=1)
        await room.gate.enter(1, 60)
        waiting = asyncio.create_task(room.gate.enter(1, 60))
        await asyncio.sleep(1)
        room.gate.close(ClientClosed("over"))
        with pytest.raises(ClientClosed, match="over"):
            await waiting

    run(work())


@pytest.mark.parametrize("seed", range(20))
def test_never_more_than_allowed_and_everybody_in_the_end(seed: int) -> None:
    chance = random.Random(seed)

    async def work() -> None:
        room = Room(rows_max=5)
        inside = 0

        async def visit() -> None:
            nonlocal inside
            rows = chance.randint(1, 3)
            await asyncio.sleep(chance.random())
            await room.gate.enter(rows, 1000)
            inside += rows
            assert inside <= 5
            is_added = False
            try:
                await asyncio.sleep(chance.random())
                room.add(rows)
                is_added = True
                await asyncio.sleep(chance.random())
            finally:
                inside -= rows
                if is_added:
                    room.remove(rows)
                else:
                    room.gate.leave(rows)

        tasks = [asyncio.create_task(visit()) for _ in range(60)]
        for task in chance.sample(tasks, 20):
            asyncio.get_running_loop().call_later(chance.random() * 20, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        assert inside == 0
        await room.gate.enter(5, 0.1)  # every place came back

    run(work())


def test_a_gate_that_is_closed_owes_nobody_a_place() -> None:
    async def work() -> None:
        room = Room(rows_max=2)
        await room.gate.enter(2, 10)
        waiting = [asyncio.create_task(room.gate.enter(1, 10)) for _ in range(3)]
        await asyncio.sleep(0)
        room.gate.close(ClientClosed("over"))
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [ClientClosed] * 3
        room.gate.leave(2)
        await room.gate.enter(2, 10)
        with pytest.raises(TimeoutError):  # it is full again, and not three places larger
            await room.gate.enter(1, 1)

    run(work())

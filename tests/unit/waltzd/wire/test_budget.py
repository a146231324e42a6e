"""Back pressure in one place: who waits, in which order, and what a waiter that gives up leaves behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.tiers import together
from tests.unit.timeless import run
from waltzd.errors import ClientClosed
from waltzd.wire.flow_control import Budget


def timely(test: Callable[[], Awaitable[None]]) -> None:
    async def work() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(work())


async def quiet() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served_also_for_small_ones() -> None:
    async def test() -> None:
        budget, admitted = Budget(10), []

        async def take(name: str, size: int) -> None:
            await budget.take(size)
            admitted.append(name)

        await take("a", 8)
        large, small = asyncio.create_task(take("large", 9)), asyncio.create_task(take("small", 1))
        await quiet()
        assert (admitted, budget.waiting) == (["a"], 2)
        budget.give(8)
        await quiet()
        assert admitted == ["a", "large", "small"]
        assert budget.used == 10
        await asyncio.gather(large, small)

    timely(test)


def test_what_is_too_large_passes_alone() -> None:
    async def test() -> None:
        budget = Budget(10)
        await budget.take(100)
        waiting = asyncio.create_task(budget.take(1))
        await quiet()
        assert not waiting.done()
        budget.give(100)
        await waiting
        too_large = asyncio.create_task(budget.take(100))
        await quiet()
        assert not too_large.done()
        budget.give(1)
        await too_large

    timely(test)


def test_a_waiter_that_gives_up_does_not_hold_up_the_others() -> None:
    async def test() -> None:
        budget = Budget(10)
        await budget.take(8)
        large, small = asyncio.create_task(budget.take(9)), asyncio.create_task(budget.take(2))
        await quiet()
        large.cancel()
        await small
        assert (budget.used, budget.waiting) == (10, 0)
        with pytest.raises(asyncio.CancelledError):
            await large

    timely(test)


def test_a_waiter_that_gives_up_when_it_is_admitted_gives_back() -> None:
    async def test() -> None:
        budget = Budget(10)
        await budget.take(8)
        waiting = asyncio.create_task(budget.take(9))
        await quiet()
        budget.give(8)  # admitted, and not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert budget.used == 0

    timely(test)


def test_one_that_is_given_up_in_the_moment_of_its_turn_is_passed_over() -> None:
    """Its task is cancelled and has not run since, when somebody gives back what it waited for."""

    async def test() -> None:
        budget = Budget(10)
        await budget.take(10)
        first, second = asyncio.create_task(budget.take(6)), asyncio.create_task(budget.take(7))
        await quiet()
        first.cancel()
        budget.give(10)
        await quiet()
        assert first.cancelled()
        assert second.done()
        assert (budget.used, budget.waiting) == (7, 0)

    timely(test)


def test_all_parts_share_the_whole_and_one_leaves_some_to_the_others() -> None:
    async def test() -> None:
        whole = Budget(4000)
        parts = [Budget(1000, within=whole) for _ in range(5)]
        await parts[0].take(900)
        assert parts[0].fits(100), "a quarter for one of them"
        assert not parts[0].fits(101)
        for part in parts[1:4]:
            await part.take(1000)
        assert parts[0].fits(100)
        await parts[4].take(50)
        assert not parts[0].fits(51), "no more for all of them together"
        parts[4].give(50)
        assert parts[4].fits(5000), "but one thing of each"
        await parts[4].take(100)
        waiting = asyncio.create_task(parts[0].take(1))
        await quiet()
        assert not waiting.done()
        parts[3].give(1000)  # what another part gives back admits it
        await waiting
        assert (whole.used, parts[0].used) == (3001, 901)

    timely(test)


class Room:
    """What was let in is counted by itself, as a client counts what is in its outbox."""

    def __init__(self, rows_max: int = 3, bytes_max: int = 100) -> None:
        self.rows = self.bytes = 0
        self.budget = Budget(rows_max, beside=lambda: (self.rows, self.bytes < bytes_max))

    def add(self, rows: int) -> None:
        self.rows += rows
        self.budget.give(rows)

    def remove(self, rows: int) -> None:
        self.rows -= rows
        self.budget.admit()


def test_first_come_first_served_beside_what_was_let_in() -> None:
    async def work() -> None:
        room = Room()
        order: list[int] = []

        async def enter(number: int, rows: int) -> None:
            await room.budget.take(rows, 60)
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


def test_bytes_keep_others_out_too() -> None:
    async def work() -> None:
        room = Room()
        await room.budget.take(1, 1)
        room.add(1)
        room.bytes = 100
        with pytest.raises(TimeoutError):
            await room.budget.take(1, 1)
        room.bytes = 99
        await room.budget.take(1, 1)

    run(work())


def test_who_goes_away_while_being_let_in_gives_the_place_back() -> None:
    async def work() -> None:
        room = Room(rows_max=1)
        await room.budget.take(1, 60)
        room.add(1)
        leaver = asyncio.create_task(room.budget.take(1, 60))
        other = asyncio.create_task(room.budget.take(1, 60))
        await asyncio.sleep(1)
        room.remove(1)  # it is the leaver's turn
        leaver.cancel()
        await asyncio.wait_for(other, 1)

    run(work())


def test_who_gives_up_while_waiting_is_passed_over() -> None:
    async def work() -> None:
        room = Room(rows_max=2)
        await room.budget.take(1, 60)
        room.add(1)
        with pytest.raises(TimeoutError):
            await room.budget.take(2, 5)
        await room.budget.take(1, 0.1)

    run(work())


def test_a_closed_budget_says_why() -> None:
    async def work() -> None:
        room = Room(rows_max=1)
        await room.budget.take(1, 60)
        waiting = asyncio.create_task(room.budget.take(1, 60))
        await asyncio.sleep(1)
        room.budget.close(ClientClosed("over"))
        with pytest.raises(ClientClosed, match="over"):
            await waiting

    run(work())


@together("seed", range(20))
def test_never_more_than_allowed_and_everybody_in_the_end(seed: int) -> None:
    chance = random.Random(seed)

    async def work() -> None:
        room = Room(rows_max=5)
        inside = 0

        async def visit() -> None:
            nonlocal inside
            rows = chance.randint(1, 3)
            await asyncio.sleep(chance.random())
            await room.budget.take(rows, 1000)
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
                    room.budget.give(rows)

        tasks = [asyncio.create_task(visit()) for _ in range(60)]
        for task in chance.sample(tasks, 20):
            asyncio.get_running_loop().call_later(chance.random() * 20, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        assert inside == 0
        await room.budget.take(5, 0.1)  # every place came back

    run(work())


def test_a_budget_that_is_closed_owes_nobody_a_place() -> None:
    async def work() -> None:
        room = Room(rows_max=2)
        await room.budget.take(2, 10)
        waiting = [asyncio.create_task(room.budget.take(1, 10)) for _ in range(3)]
        await asyncio.sleep(0)
        room.budget.close(ClientClosed("over"))
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [ClientClosed] * 3
        room.budget.give(2)
        await room.budget.take(2, 10)
        with pytest.raises(TimeoutError):  # it is full again, and not three places larger
            await room.budget.take(1, 1)

    run(work())

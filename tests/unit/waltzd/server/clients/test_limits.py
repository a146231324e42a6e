"""Back pressure in one place: who waits, in which order, and what a waiter that gives up leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from waltzd.server.clients.limits import Budget


def timely(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(run())


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

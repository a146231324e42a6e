"""The loop and the network that simulations stand on do what they say; otherwise a sound run proves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.simulation.loop import Deadlock, Endless, Life, SimLoop, Standstill, run
from tests.simulation.network import Network, Stream
from waltzd.errors import CannotConnect


def story(work: Callable[[SimLoop], Coroutine[Any, Any, None]], *, steps_max: int = 100_000) -> None:
    loop = SimLoop(steps_max=steps_max)
    run(loop, work(loop), lambda: [])


def test_an_hour_of_patience_takes_no_time() -> None:
    async def work(loop: SimLoop) -> None:
        await asyncio.sleep(3600)
        assert loop.now == loop.time() == 3600

    story(work)


def test_waiting_for_nothing_is_an_error() -> None:
    async def work(loop: SimLoop) -> None:
        await loop.create_future()

    with pytest.raises(Deadlock):
        story(work)


def test_running_for_ever_is_an_error() -> None:
    async def work(loop: SimLoop) -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Endless):
        story(work, steps_max=1000)


def test_going_round_while_no_time_passes_is_an_error_that_says_where() -> None:
    async def wait_for_nothing() -> None:
        while True:
            await asyncio.sleep(0)

    async def work(loop: SimLoop) -> None:
        await asyncio.sleep(2)
        await loop.run_in(Life("somebody"), wait_for_nothing(), "waiting")

    with pytest.raises(Standstill, match=r"at second 2\.000000.*somebody: sleep.*"):
        story(work)


def test_a_timer_never_runs_before_its_time_by_the_clock_of_its_life() -> None:
    async def early(loop: SimLoop) -> list[float]:
        found = []
        for number in range(1, 3000):
            when = loop.time() + 1 / (7 * number)
            done: asyncio.Future[float] = loop.create_future()
            loop.call_at(when, lambda done=done: done.set_result(loop.time()))
            if await done < when:
                found.append(when)
        return found

    async def work(loop: SimLoop) -> None:
        for ahead, rate in ((0.1, 1.1), (13.7, 0.83), (100.0, 1.0)):
            assert await loop.run_in(Life("somebody", ahead=ahead, rate=rate), early(loop), "early") == []

    story(work)


async def _count(told: list[float], loop: SimLoop) -> None:
    try:
        while True:
            await asyncio.sleep(1)
            told.append(loop.now)
    finally:
        told.append(-1)


def test_a_life_that_is_paused_runs_late_and_one_that_is_over_never_again() -> None:
    told: list[float] = []

    async def work(loop: SimLoop) -> None:
        life = Life("somebody")
        task = loop.run_in(life, _count(told, loop), "counting")
        await asyncio.sleep(2.5)
        life.is_paused = True
        await asyncio.sleep(10)
        assert told == [1, 2]
        loop.resume(life)
        await asyncio.sleep(0.1)
        assert told == [1, 2, 12.5]
        life.is_over = True
        task.cancel()
        await asyncio.sleep(10)
        assert told == [1, 2, 12.5]  # not even its `finally`

    story(work)


def test_what_a_life_begins_belongs_to_it() -> None:
    told: list[float] = []

    async def parent(loop: SimLoop) -> None:
        child = asyncio.create_task(_count(told, loop))
        await child

    async def work(loop: SimLoop) -> None:
        life = Life("somebody")
        loop.run_in(life, parent(loop), "parent")
        await asyncio.sleep(1.5)
        life.is_over = True
        await asyncio.sleep(5)
        assert told == [1]

    story(work)


def test_a_clock_that_is_fast_waits_less() -> None:
    async def clock(loop: SimLoop) -> tuple[float, float]:
        begun = loop.time()
        async with asyncio.timeout(10):
            await asyncio.sleep(5)
        return begun, loop.time() - begun

    async def work(loop: SimLoop) -> None:
        begun, passed = await loop.run_in(Life("fast", ahead=100, rate=1.25), clock(loop), "clock")
        assert begun == 100
        assert passed == pytest.approx(5)
        assert loop.now == pytest.approx(4)

    story(work)


def test_a_machine_that_stands_still_with_its_clock_notices_nothing_when_it_goes_on() -> None:
    told: list[float] = []

    async def timers(loop: SimLoop) -> None:
        for seconds in (1, 2, 3):
            loop.call_later(seconds, lambda: told.append(loop.time()))
        await asyncio.sleep(2.5)
        told.append(loop.time())

    async def work(loop: SimLoop) -> None:
        life = Life("somebody", ahead=50, rate=1.25)
        loop.run_in(life, timers(loop), "timers")
        await asyncio.sleep(1.2)
        life.is_paused, life.halted_at = True, loop.now
        await asyncio.sleep(100)
        assert told == [51]
        loop.resume(life)
        await asyncio.sleep(0.3)
        assert told == [51]
        await asyncio.sleep(5)
        assert told == [pytest.approx(time) for time in (51, 52, 52.5, 53)]
        assert loop.now == pytest.approx(106.5)

    story(work)


# -- the network ---------------------------------------------------------------------------------------------------------


class Pair:
    """A caller, and an echo."""

    def __init__(self, loop: SimLoop, *, keep_alive_seconds: float = 5.0) -> None:
        self.loop = loop
        self.mistakes: list[BaseException] = []
        self.network = Network(
            loop,
            "seed",
            keep_alive_seconds=keep_alive_seconds,
            say=lambda who, what: None,
            on_mistake=self.mistakes.append,
        )
        self.caller, self.echo = Life("caller"), Life("echo")
        self.ended: list[str] = []
        for life in (self.caller, self.echo):
            self.network.joined(life)

    def stream(self) -> Stream:
        return self.network.connection(self.caller, "echo").open(lambda life: self._serve)

    async def _serve(self, stream: Stream) -> None:
        try:
            while (found := await stream.called.receive()) is not None:
                await stream.called.send(found)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


async def _send(stream: Stream, numbers: range) -> None:
    for number in numbers:
        await stream.caller.send(number)


async def _take(stream: Stream, count: int) -> list[Any]:
    return [await stream.caller.receive() for _ in range(count)]


def test_messages_keep_their_order_and_take_time() -> None:
    async def work(loop: SimLoop) -> None:
        stream = Pair(loop).stream()
        sending = asyncio.create_task(_send(stream, range(300)))
        assert await _take(stream, 300) == list(range(300))
        await sending
        assert loop.now > 0

    story(work)


def test_a_cut_way_holds_everything_back_until_it_is_mended() -> None:
    async def work(loop: SimLoop) -> None:
        pair = Pair(loop, keep_alive_seconds=100)
        stream = pair.stream()
        pair.network.cut("echo", "caller")
        await _send(stream, range(3))
        taking = asyncio.create_task(_take(stream, 3))
        await asyncio.sleep(50)
        assert not taking.done()
        pair.network.mend("echo", "caller")
        assert await taking == [0, 1, 2]

    story(work)


def test_silence_breaks_the_connection_at_both_ends() -> None:
    async def work(loop: SimLoop) -> None:
        pair = Pair(loop, keep_alive_seconds=3)
        stream = pair.stream()
        await _send(stream, range(1))
        assert await _take(stream, 1) == [0]
        pair.network.cut("caller", "echo")
        with pytest.raises(CannotConnect):
            await stream.caller.receive()
        await asyncio.sleep(0.1)
        assert pair.ended == ["cancelled"]
        assert 3 <= loop.now <= 6

    story(work)


def test_a_peer_that_ends_is_noticed_and_nobody_listens_any_more() -> None:
    async def work(loop: SimLoop) -> None:
        pair = Pair(loop)
        stream = pair.stream()
        await _send(stream, range(1))
        pair.echo.is_over = True
        pair.network.left(pair.echo)
        with pytest.raises(CannotConnect):
            await _take(stream, 2)
        with pytest.raises(CannotConnect, match="nobody listens"):
            pair.stream()

    story(work)


def test_a_message_can_be_counted_out() -> None:
    async def work(loop: SimLoop) -> None:
        pair = Pair(loop)
        struck: list[str] = []
        pair.network.watched["caller"] = (3, lambda: struck.append("now"))
        stream = pair.stream()
        await _send(stream, range(3))
        assert await _take(stream, 2) == [0, 1]
        await asyncio.sleep(1)
        assert struck == ["now"]

    story(work)


def test_a_mistake_at_the_other_end_is_told() -> None:
    async def broken(stream: Stream) -> None:
        raise ZeroDivisionError

    async def work(loop: SimLoop) -> None:
        loop.set_exception_handler(lambda loop, context: None)
        pair = Pair(loop)
        pair.network.connection(pair.caller, "echo").open(lambda life: broken)
        await asyncio.sleep(1)
        assert [type(error) for error in pair.mistakes] == [ZeroDivisionError]

    story(work)

"""Threads beside a loop: each call is done once, its result comes back to who asked, and nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from waltzd.daemon.process import Threads


def test_results_and_errors_come_back_to_who_asked() -> None:
    def divide(a: int, b: int) -> tuple[float, str]:
        return a / b, threading.current_thread().name

    async def ask() -> None:
        with Threads(3, "disk") as threads:
            answers = await asyncio.gather(*[threads.run(divide, n, n % 5) for n in range(100)], return_exceptions=True)
        for n, answer in enumerate(answers):
            if n % 5 == 0:
                assert isinstance(answer, ZeroDivisionError)
            else:
                assert isinstance(answer, tuple)
                assert answer[0] == n / (n % 5)
                assert answer[1].startswith("disk_")

    asyncio.run(ask())


def test_one_thread_keeps_the_order_and_the_loop_goes_on_meanwhile() -> None:
    done: list[int] = []
    may_go_on = threading.Event()

    async def ask() -> None:
        with Threads(1, "disk") as threads:
            first = threads.run(may_go_on.wait)
            others = [threads.run(done.append, n) for n in range(50)]
            await asyncio.sleep(0)
            assert not first.done()
            may_go_on.set()
            await asyncio.gather(*others)

    asyncio.run(ask())
    assert done == list(range(50))


def test_what_was_asked_for_is_done_before_the_end_also_when_nobody_waits_for_it() -> None:
    done: list[int] = []

    async def ask() -> None:
        with Threads(1, "disk") as threads:
            answers = [threads.run(done.append, n) for n in range(20)]
            for answer in answers[::2]:
                answer.cancel()
        await asyncio.sleep(0)
        assert [answer.cancelled() for answer in answers] == [True, False] * 10

    asyncio.run(ask())
    assert done == list(range(20))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("disk_")]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_call_is_kept_until_the_next_one(fails: bool) -> None:
    class Large:
        pass

    def use(large: Large) -> Large:
        if fails:
            raise ValueError
        return large

    async def ask() -> None:
        with Threads(1, "disk") as threads:
            large = Large()
            seen = weakref.ref(large)
            await asyncio.gather(threads.run(use, large), return_exceptions=True)
            await threads.run(len, "")  # it is back in its queue
            del large
            gc.collect()
            assert seen() is None

    asyncio.run(ask())


def test_a_call_may_end_after_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an error of the thread, with a traceback at the end of a daemon."""
    may_go_on, failed = threading.Event(), list[object]()
    monkeypatch.setattr(threading, "excepthook", failed.append)

    async def ask() -> Threads:
        threads = Threads(1, "export", is_waited_for=False)
        threads.run(may_go_on.wait)
        return threads

    threads = asyncio.run(ask())
    threads.close()
    may_go_on.set()
    for thread in threads._threads:
        thread.join()
    assert failed == []

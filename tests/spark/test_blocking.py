"""Streams without a loop: what they give, what they raise, and that they end when nobody reads them any more."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator

import pytest
from waltz_spark.log.live_origin import AHEAD_MAX, items, wait_for

from waltzd.errors import CannotConnect


class Source:
    """Counts what was taken from it, and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.given = 0
        self.is_closed = False
        self._count = count
        self._error = error

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._count):
                self.given += 1
                yield number
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


def test_everything_in_order() -> None:
    for count in (0, 1, 100):
        source = Source(count)
        assert list(items(source.stream())) == list(range(count))
        assert source.is_closed


def test_an_error_comes_behind_everything_that_was_given() -> None:
    found = []
    stream = items(Source(5, CannotConnect("gone")).stream())
    found += [next(stream) for _ in range(5)]
    with pytest.raises(CannotConnect, match="gone"):
        next(stream)
    assert found == list(range(5))


def test_little_is_fetched_ahead_and_a_stream_that_is_left_is_closed() -> None:
    source = Source(1000)
    stream = items(source.stream())
    for number in range(10):
        assert next(stream) == number
        wait_for(asyncio.sleep(0))
        assert source.given <= number + AHEAD_MAX + 2
    stream.close()
    assert source.is_closed


def test_a_stream_that_nobody_began_to_read() -> None:
    source = Source(3)
    stream = items(source.stream())
    stream.close()
    assert source.given == 0


def test_a_process_ends_although_somebody_has_not_read_to_the_end() -> None:
    program = (
        "import asyncio, itertools\n"
        "from waltz_spark.log.live_origin import items\n"
        "async def numbers():\n"
        "    for number in itertools.count():\n"
        "        yield number\n"
        "        await asyncio.sleep(0)\n"
        "stream = items(numbers())\n"
        "print(next(stream), next(stream))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")


def test_many_threads_read_at_the_same_time() -> None:
    found: dict[int, list[int]] = {}

    def read(number: int) -> None:
        found[number] = list(items(Source(200 + number).stream()))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: list(range(200 + number)) for number in range(8)}


def test_a_loop_of_the_reader_is_not_in_the_way() -> None:
    """As in a notebook."""

    async def reader() -> list[int]:
        return list(items(Source(10).stream()))

    assert asyncio.run(reader()) == list(range(10))

"""What the service manager hears, on a real socket and on a clock that does not run by itself.

Threads beside a loop: each call is done once, its result comes back to who asked, and nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.process.certificates import Authority
from tests.process.ear import Ear
from tests.unit import timeless
from tests.unit.waltzd.wire.test_tls import KEY, swap
from waltzd.daemon.process import (
    STATUS_CHARACTERS_MAX,
    STATUS_SECONDS,
    Settings,
    Supervisor,
    Threads,
    Underway,
    lines_of,
    settings_from,
)
from waltzd.protocol.role import Role


@pytest.fixture(params=["path", "abstract"])
def ear(request: pytest.FixtureRequest) -> Iterator[Ear]:
    with tempfile.TemporaryDirectory() as home:  # short: a path of a socket has at most 107 characters
        address = str(Path(home, "notify")) if request.param == "path" else f"@waltz-{uuid4()}"
        with contextlib.closing(Ear(address)) as made:
            yield made


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Settings()),
        ({"NOTIFY_SOCKET": ""}, Settings()),
        ({"NOTIFY_SOCKET": "@"}, Settings()),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, Settings()),
        ({"WATCHDOG_USEC": "1000000"}, Settings()),
        ({"NOTIFY_SOCKET": "/run/x"}, Settings(address="/run/x")),
        ({"NOTIFY_SOCKET": "@x"}, Settings(address="@x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000"}, Settings(address="/x", watchdog_seconds=3.0)),
        (
            {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"},
            Settings(address="/x", watchdog_seconds=3),
        ),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, Settings(address="/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "0"}, Settings(address="/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "-5"}, Settings(address="/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, Settings(address="/x")),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], expected: Settings) -> None:
    assert settings_from(environment, process=7) == expected


def test_a_status_is_one_line_whatever_is_in_it() -> None:
    assert lines_of(STATUS="a\nREADY=1\r\tb") == b"STATUS=a READY=1 b"
    assert lines_of(READY=1, STATUS="ü") == "READY=1\nSTATUS=ü".encode()


def test_a_life_is_told_in_its_order(ear: Ear) -> None:
    with contextlib.closing(Supervisor(Settings(address=ear.address))) as supervisor:
        supervisor.status("opening")
        supervisor.status("opening")
        supervisor.ready()
        supervisor.stopping("leaving")
    assert ear.heard() == ["STATUS=opening", "READY=1", "STOPPING=1", "STATUS=leaving"]


def test_a_long_status_is_cut(ear: Ear) -> None:
    with contextlib.closing(Supervisor(Settings(address=ear.address))) as supervisor:
        supervisor.status("x" * 10_000)
    assert ear.heard() == ["STATUS=" + "x" * STATUS_CHARACTERS_MAX]


def test_a_manager_that_has_gone_is_no_reason_to_end(ear: Ear) -> None:
    with contextlib.closing(Supervisor(Settings(address=ear.address))) as supervisor:
        ear.close()
        supervisor.status("here")
        supervisor.ready()
        supervisor.stopping("going")
    supervisor.status("closed")


def test_without_a_manager_nobody_is_asked_anything() -> None:
    def never() -> str:
        raise AssertionError("nobody wants to know")

    async def work() -> None:
        with contextlib.closing(Supervisor(Settings())) as supervisor:
            supervisor.ready()
            supervisor.follow(never, never)
            await asyncio.sleep(3600)

    timeless.run(work())


def test_that_it_is_ready_is_said_until_it_is_heard(ear: Ear) -> None:
    """The queue of a manager that is busy is full after some messages, and nobody waits for it."""

    async def work() -> list[str]:
        with contextlib.closing(Supervisor(Settings(address=ear.address))) as supervisor:
            for number in range(10_000):
                supervisor.status(str(number))
            supervisor.ready()
            assert "READY=1" not in ear.heard()
            supervisor.follow(lambda: "well")
            await asyncio.sleep(10 * STATUS_SECONDS)
            return ear.heard()

    assert timeless.run(work()) == ["READY=1", "STATUS=well"]


# -- signs of life -----------------------------------------------------------------------------------------------------


def live(ear: Ear, describe: Callable[[], str], ailment: Callable[[], str], *, seconds: float) -> list[str]:
    async def work() -> None:
        with contextlib.closing(Supervisor(Settings(address=ear.address, watchdog_seconds=10.0))) as supervisor:
            supervisor.follow(describe, ailment)
            await asyncio.sleep(seconds)

    timeless.run(work())
    return ear.heard()


def test_it_is_alive_twice_in_each_period(ear: Ear) -> None:
    heard = live(ear, lambda: "well", lambda: "", seconds=36)
    assert heard.count("WATCHDOG=1") == 8
    assert [text for text in heard if text != "WATCHDOG=1"] == ["STATUS=well"], "what has not changed is told once"


def test_what_hangs_ends_the_signs_of_life(ear: Ear, caplog: pytest.LogCaptureFixture) -> None:
    looks = iter(["", ""])
    heard = live(ear, lambda: "well", lambda: next(looks, "it hangs"), seconds=3600)
    assert heard == ["WATCHDOG=1", "STATUS=well", "WATCHDOG=1", "STATUS=it hangs"]
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


def test_what_recovers_in_time_is_alive_again(ear: Ear) -> None:
    looks = iter(["", "it hangs", ""])
    heard = live(ear, lambda: "well", lambda: next(looks, ""), seconds=16)
    assert heard == ["WATCHDOG=1", "STATUS=well", "STATUS=it hangs", "WATCHDOG=1", "STATUS=well", "WATCHDOG=1"]


def test_a_status_that_changes_is_told_soon(ear: Ear) -> None:
    numbers = iter(range(1000))
    heard = live(ear, lambda: f"{next(numbers)} done", lambda: "", seconds=3 * STATUS_SECONDS + 1)
    assert [text for text in heard if text.startswith("STATUS")] == [f"STATUS={number} done" for number in range(4)]


def test_a_loop_that_is_busy_gives_no_sign_of_life(ear: Ear) -> None:
    """The sign of life comes from the loop itself, not from a thread beside it."""

    async def work() -> None:
        with contextlib.closing(Supervisor(Settings(address=ear.address, watchdog_seconds=0.002))) as supervisor:
            supervisor.follow(lambda: "")
            ear.heard()
            for _ in range(200_000):  # nobody else has a turn
                pass
            assert ear.heard() == []

    asyncio.run(work())


# -- what hangs --------------------------------------------------------------------------------------------------------


def test_the_oldest_call_on_a_thread_tells() -> None:
    now = 0.0
    underway = Underway(clock=lambda: now)
    assert underway.ailment(10.0) == ""

    def outer() -> str:
        nonlocal now
        now = 5.0
        return str(underway.call(inner, "x"))

    def inner(text: str) -> str:
        nonlocal now
        now = 9.9
        assert underway.ailment(10.0) == ""
        now = 10.0
        assert "hangs" in underway.ailment(10.0)
        assert underway.ailment(None) == "", "nobody has set a bound"
        return text

    assert underway.call(outer) == "x"
    assert underway.ailment(10.0) == ""


def test_a_call_that_fails_has_ended() -> None:
    now = 0.0
    underway = Underway(clock=lambda: now)
    with pytest.raises(ZeroDivisionError):
        underway.call(divmod, 1, 0)
    now = 100.0
    assert underway.ailment(10.0) == ""


def test_a_loop_that_does_not_answer_is_no_sign_of_life() -> None:
    now, asked = 0.0, list[Callable[[], None]]()
    underway = Underway(clock=lambda: now)
    underway.watch(asked.append)
    assert underway.ailment(10.0) == ""
    now = 9.0
    assert (underway.ailment(10.0), len(asked)) == ("", 1), "one question at a time"
    now = 10.0
    assert "does not answer" in underway.ailment(10.0)
    asked.pop()()
    assert (underway.ailment(10.0), len(asked)) == ("", 1)
    asked.pop()()
    now = 100.0
    assert underway.ailment(10.0) == ""


# -- reading again -----------------------------------------------------------------------------------------------------


def test_reading_again_is_told_from_beginning_to_end(ear: Ear, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = authority.issue(KEY, Role.SERVER, "one")
    tls = files.tls(Role.SERVER)
    with contextlib.closing(Supervisor(Settings(address=ear.address))) as supervisor:
        supervisor.reload(tls)
        assert not any("READY" in text for text in ear.heard()), "it was not ready before"
        supervisor.ready()
        swap(files, authority.issue(KEY, Role.SERVER, "two", file="new"))
        supervisor.reload(tls)
        supervisor.reload(None)
    assert tls.identity.name == "two"
    ready, *rest = ear.heard()
    assert ready == "READY=1"
    for begun, done in (rest[:2], rest[2:]):
        first, second = begun.split("\n")
        assert first == "RELOADING=1"
        assert int(second.removeprefix("MONOTONIC_USEC=")) > 0
        assert done == "READY=1"


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

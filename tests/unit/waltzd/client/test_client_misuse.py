"""What an application may do wrong: it is told, and nothing else of the client suffers, waits for ever or stands still."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.fake_server import FakeCluster
from tests.unit.timeless import run
from tests.unit.told import told
from tests.unit.waltzd.client.test_blocking import SETTINGS
from tests.unit.waltzd.client.test_blocking import Increment as BlockingIncrement
from tests.unit.waltzd.client.test_blocking import View as BlockingView
from tests.unit.waltzd.client.test_client import Increment, View, until, with_client
from waltzd.client.blocking import BlockingClient
from waltzd.client.client import Client
from waltzd.client.outbox import Outbox
from waltzd.client.pending import Request
from waltzd.client.settings import ClientSettings, Tls
from waltzd.client.view import Builder, Command, Transaction
from waltzd.errors import BadArgument, ClientClosed, NoSuchChannel, NotMounted
from waltzd.errors.operations import BadConfig
from waltzd.protocol.batches import Limits
from waltzd.protocol.locks import Committed, Lock, Rejected, Unknown, append_lock, lock_hash, read_lock, write_lock

LIMITS = Limits(payload_bytes_max=1 << 20, locks_max=100, frame_bytes_max=1 << 22)


@pytest.mark.parametrize(
    "options",
    [
        {"position": 1 << 63},
        {"position": float("nan")},
        {"position": 1.5},
        {"position": "5"},
        {"kind": 1.5},
        {"kind": "1"},
    ],
    ids=str,
)
@told(with_client, given=2)
async def test_what_fits_into_no_frame_is_refused_before_it_stands_in_the_way_of_others(
    client: Client, fake: FakeCluster, options: dict[str, Any]
) -> None:
    beside = asyncio.create_task(asyncio.wait_for(client.append(b"beside", partition=0), 60))
    await asyncio.sleep(0)
    with pytest.raises(BadArgument):
        await asyncio.wait_for(client.append(b"wrong", partition=0, **options), 60)
    many = {"kinds": [options["kind"]]} if "kind" in options else options
    with pytest.raises(BadArgument):
        await client.append_many([b"wrong"], partition=0, **many)
    assert await beside == Committed(0)
    taken: dict[str, Any] = {"position": np.int64(0), "kind": np.int32(7)}
    assert await client.append(b"after", partition=0, **taken) == Committed(1)


def test_a_lock_that_is_none_is_refused_where_it_is_made() -> None:
    for mode in (0, 7, 300, "WRITE"):
        with pytest.raises(BadArgument, match="READ, WRITE or APPEND"):
            Lock("a", 1, mode)  # type: ignore[arg-type]
    made = lock_hash("a", 1)
    wrong: list[tuple[Any, Any]] = [
        *(("a", 1.0), ("a", True), ("a", b"1"), ("a", None), ("a", [1]), ("a", "\udcff")),
        *((b"a", 1), (None, 1), ("\udcff", 1), (7, "a")),
    ]
    for name, id_ in wrong:
        for make in (read_lock, write_lock, append_lock):
            with pytest.raises(BadArgument, match="a lock has a name"):
                make(name, id_)
    assert lock_hash("a", 1) == made
    number: Any = np.int64(3)
    assert append_lock("numpy", number).hash == lock_hash("numpy", 3)


def test_transactions_whose_frame_cannot_be_made_are_settled_all_the_same() -> None:
    async def work() -> None:
        outbox, loop = Outbox(messages_max=4, bytes_max=1 << 20), asyncio.get_running_loop()
        requests = [Request(mark, b"x", 0, (), (), loop.create_future(), 9.0) for mark in (-1, 1 << 63)]
        for request in requests:
            outbox.add(request)
        with pytest.raises(OverflowError):
            outbox.take(LIMITS, -1)
        outbox.link_lost()
        outbox.abandon()
        assert [request.waiter.result() for request in requests] == [Unknown(), Unknown()]  # type: ignore[attr-defined]

    run(work())


def test_what_a_listener_raises_changes_nothing() -> None:
    class Raises(Increment):
        def on_lock_failure(self, rejected: Rejected) -> None:
            super().on_lock_failure(rejected)
            raise ValueError

        def on_outcome(self, outcome: object) -> None:
            super().on_outcome(outcome)
            raise ValueError

    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        commands = [Raises(view), Raises(view)]
        outcomes = await asyncio.gather(*[client.submit(command) for command in commands])
        assert set(outcomes) == {Committed(0), Committed(1)}
        assert sorted(command.builds for command in commands) == [1, 2]

    with_client(test, view=view)


def test_a_view_whose_own_work_was_cancelled_is_tried_again() -> None:
    class Cancelled(View):
        failures = 3

        async def apply(self, transaction: Transaction) -> None:
            if self.failures:
                self.failures -= 1
                task = asyncio.create_task(asyncio.sleep(9))
                task.cancel()
                await task
            await super().apply(transaction)

    view = Cancelled()

    async def test(client: Client, fake: FakeCluster) -> None:
        assert await client.append(b"a", partition=0) == Committed(0)
        await until(lambda: view.payloads() == [b"a"])
        assert await client.append(b"b", partition=0) == Committed(1)

    with_client(test, view=view)


def test_who_waits_for_the_view_is_told_after_the_partition_was_taken_out_and_in() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.hold = asyncio.Event()
        command = Increment(view)
        assert await client.submit(command) == Committed(0)
        await client.set_partitions([])
        view.hold.set()
        await client.set_partitions("all")
        await until(lambda: ("applied", 0) in command.story)

    with_client(test, view=view)


def test_a_client_that_is_not_closed_ends_with_its_loop_in_silence() -> None:
    complaints: list[dict[str, Any]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        client = Client("s0:1", connect=FakeCluster().connect)
        await client.open()
        assert await client.append(b"x", partition=0) == Committed(0)

    asyncio.run(work())
    assert complaints == []


def test_another_loop_is_refused() -> None:
    """Without that, its outcome would come and wake nobody."""

    async def work() -> None:
        async with Client("s0:1", connect=FakeCluster().connect, settings=SETTINGS) as client:
            assert await client.append(b"x", partition=0) == Committed(0)

            def elsewhere() -> None:
                asyncio.run(asyncio.wait_for(client.append(b"y", partition=0), 30))

            with pytest.raises(BadArgument, match="another event loop"):
                await asyncio.to_thread(elsewhere)

    asyncio.run(work())


@told(with_client, given=2)
async def test_a_client_is_opened_once(client: Client, fake: FakeCluster) -> None:
    with pytest.raises(BadArgument, match="open already"):
        await client.open()


@told(with_client, given=2)
async def test_what_names_no_partition_no_id_and_no_feed(client: Client, fake: FakeCluster) -> None:
    with pytest.raises(NoSuchChannel, match="no channel orders"):
        await client.set_partitions("orders")
    wrong: Any
    for wrong in (0.0, "0x", "", "7-9", None):
        with pytest.raises(BadArgument):
            await client.set_partitions([wrong])
    for wrong in (-1, 1 << 63, 1.5, "1"):
        with pytest.raises(BadArgument):
            await client.read(0, wrong)
    with pytest.raises(BadArgument, match="FeedMode"):
        Client("s0:1", view=View(), feed="heads")  # type: ignore[arg-type]
    await client.flush(timeout=0)


def stop() -> bool:
    return next(iter([]))


def on_a_thread(work: Callable[[], Any]) -> Any:
    """On a thread of its own: what must not happen is that it waits for ever."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001  # whatever it is, the test is told
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(30)


def test_a_stop_iteration_of_the_application_is_an_error_and_no_hang() -> None:
    class Stops(BlockingIncrement):
        def build(self, builder: Builder) -> bool:
            return stop()

    class View(BlockingView):
        failures = 2

        def apply(self, transaction: Transaction) -> None:
            if self.failures:
                self.failures -= 1
                stop()
            super().apply(transaction)

    view = View()
    with BlockingClient("s0:1", connect=FakeCluster().connect, view=view, settings=SETTINGS) as client:
        with pytest.raises(RuntimeError, match="StopIteration"):
            on_a_thread(lambda: client.submit(Stops(view)))
        client.append(b"a", partition=0)
        view.reached(1)


def test_a_blocking_client_may_be_opened_again() -> None:
    view, fake = BlockingView(), FakeCluster()
    client = BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS)
    for number in (1, 2):
        with client:
            client.append(b"a", partition=0)
            view.reached(number)
    with pytest.raises(ClientClosed):
        client.append(b"b", partition=0)


def test_a_view_that_was_left_at_work_is_not_called_beside_it() -> None:
    class Slow(BlockingView):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.may_end = threading.Semaphore(0), threading.Event()

        def apply(self, transaction: Transaction) -> None:
            self.begun.release()
            assert self.may_end.wait(30)
            super().apply(transaction)

    view, fake, settings = Slow(), FakeCluster(), replace(SETTINGS, close_seconds=0.05)
    with BlockingClient("s0:1", connect=fake.connect, view=view, partitions=[0], settings=settings) as client:
        client.append(b"1", partition=0)
        assert view.begun.acquire(timeout=30)
        client.set_partitions([])  # it waits a moment for the view, and leaves it at work
        again = threading.Thread(target=client.set_partitions, args=([0],))
        again.start()
        assert not view.begun.acquire(timeout=0.3), "the same transaction, while the view is at it"
        view.may_end.set()
        again.join(30)
        client.append(b"2", partition=0)
        view.reached(2)
        assert view.payloads == [b"1", b"2"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # which is right: see the test
def test_a_process_that_was_forked_from_one_with_a_client_is_told_so() -> None:
    fake = FakeCluster()
    with BlockingClient("s0:1", connect=fake.connect, settings=SETTINGS) as client:
        client.append(b"parent", partition=0)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            attempts: list[Callable[[], Any]] = [
                lambda: client.append(b"child", partition=0),
                lambda: BlockingClient("s0:1"),
            ]
            found = 0
            for number, attempt in enumerate(attempts):
                try:
                    attempt()
                except BadArgument:
                    found |= 1 << number
            os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert client.append(b"parent", partition=0) == Committed(1)


def test_certificates_that_are_not_there_are_missed_when_the_client_is_made(tmp_path: Path) -> None:
    tls = Tls(ca=tmp_path / "ca.pem", certificate=str(tmp_path / "a.pem"), key=tmp_path / "a.key")
    for kind in (Client, BlockingClient):
        with pytest.raises(BadConfig, match=r"a\.pem"):
            kind("s0:1", tls=tls)
        with pytest.raises(BadArgument, match="both `tls` and `connect` are given"):
            kind("s0:1", tls=tls, connect=FakeCluster().connect)


def test_an_uncaught_error_says_what_to_do_and_shows_no_frames_of_the_client() -> None:
    async def test() -> str:
        settings = ClientSettings(submit_seconds=0.05, close_seconds=0.05)
        async with Client("s0:1", connect=FakeCluster(partitions=4).connect, partitions=[0], settings=settings) as client:
            try:
                await client.append(b"a", key="b")
            except NotMounted as error:
                return "".join(traceback.format_exception(error))
        return ""

    printed = asyncio.run(test())
    assert re.search(r"key 'b' belongs to partition [123]; this client has only 0\n", printed), printed
    assert "\nNot done: the transaction was not sent" in printed
    assert "\nNext: open the client with partition " in printed
    assert "`waltzctl errors lookup W2061`" in printed


def test_an_error_of_a_submit_leaves_without_the_frames_behind_it() -> None:
    class Silent(Command):
        key = "a"

        def build(self, builder: Builder) -> None:  # type: ignore[override]
            builder.payload = b"a"

    async def test() -> str:
        async with Client("s0:1", connect=FakeCluster().connect) as client:
            try:
                await client.submit(Silent())
            except BadArgument as error:
                return "".join(traceback.format_exception(error))
        return ""

    printed = asyncio.run(test())
    assert "returned None" in printed
    assert printed.count("\n  File ") == 3, printed  # the caller, `submit`, and where the call goes on
    assert "Next: end `build` with `return True`" in printed

"""The blocking face: which thread runs what, and that threads do not wait for each other for ever."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest

from tests.unit.fake_server import FakeCluster
from waltzd.client.blocking import BlockingClient
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Builder, Command, Transaction
from waltzd.errors import BadArgument, ClientClosed
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Declined, LoggedLock, Mode, Outcome, Token, write_lock

SETTINGS = ClientSettings(submit_seconds=30, close_seconds=10)


class View:
    """A plain view; `reached` may be waited for."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def position(self, partition: int) -> int:
        return len(self.payloads) - 1

    def apply(self, transaction: Transaction) -> None:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        with self._changed:
            assert transaction.id == len(self.payloads)
            self.payloads.append(transaction.payload)
            self._changed.notify_all()

    def reached(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.payloads) >= count, 30)


class Increment(Command):
    def __init__(self, view: View) -> None:
        self.view = view
        self.threads: list[int] = []
        self.applied = threading.Event()

    def partition(self, count: int) -> int:
        return 0

    def build(self, builder: Builder) -> bool:
        self.threads.append(threading.get_ident())
        builder.payload = b"%d" % (len(self.view.payloads) + 1)
        builder.locks = [write_lock("counter")]
        return True

    def on_outcome(self, outcome: Outcome) -> None:
        self.threads.append(threading.get_ident())

    def on_applied(self, id: int) -> None:
        self.applied.set()


def test_threads_wait_for_the_view() -> None:
    view, fake = View(), FakeCluster()
    fake.partitions[0].write(b"1", b"2")
    with BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client:
        assert client.submit(Increment(view)) == Committed(2), "the first one sees all that is committed"
        outcome = client.submit(Increment(view), fresh=True, wait="applied")
        assert isinstance(outcome, Committed)
        assert outcome.is_applied
        assert view.payloads == [b"1", b"2", b"3", b"4"]
        client.wait_applied(Token.parse(str(outcome.token)), timeout=30)
        client.wait_caught_up(timeout=30)
        client.wait_stopped(timeout=0.01)
        status = client.status()
        assert status.ready
        assert (status[0].applied, status.lag) == (3, 0)


def test_what_a_view_submits_on_its_own_thread_does_not_wait_for_the_view() -> None:
    class Replies(View):
        client: BlockingClient
        outcomes: list[object]

        def apply(self, transaction: Transaction) -> None:
            super().apply(transaction)
            if transaction.id == 0:
                self.outcomes = [self.client.submit(Increment(self))]

    view, fake = Replies(), FakeCluster()
    fake.partitions[0].write(b"1")
    view.client = BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS)
    with view.client:  # the view is called before `open` returns, so it has its client before that
        view.reached(2)
        view.client.wait_caught_up()
        assert view.outcomes == [Committed(1)]


def test_threads_that_race_for_a_lock_each_build_on_their_own_thread() -> None:
    view, fake = View(), FakeCluster()
    failures: list[BaseException] = []

    def work(client: BlockingClient) -> None:
        try:
            for _ in range(5):
                command = Increment(view)
                assert isinstance(client.submit(command), Committed)
                assert set(command.threads) == {threading.get_ident()}
                assert command.applied.wait(30)
        except BaseException as error:
            failures.append(error)
            raise

    with BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        view.reached(30)
        client.flush()
        assert not client.has_pending
    assert view.payloads == fake.partitions[0].payloads == [b"%d" % i for i in range(1, 31)]
    assert view.threads == {"waltz-view"}
    assert (fake.open_ports, fake.open_mounts) == (0, 0)


def test_groups_times_and_locks_on_the_blocking_face() -> None:
    fake = FakeCluster(format=1)
    noon = fake.now + 3_600_000_000
    fake.partitions[0].write(b"morning")
    fake.now = noon

    class Afternoon(View):
        def position(self, partition: int) -> int:
            return client.position_at(partition, noon)

        def apply(self, transaction: Transaction) -> None:
            self.payloads.append(transaction.payload)

    view = Afternoon()
    client = BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS)
    with client:
        commands = [Increment(view), Increment(view)]
        outcome = client.submit_atomic(commands)
        assert outcome == Committed(1, 2)
        assert all(set(command.threads) == {threading.get_ident()} and command.applied.wait(30) for command in commands)
        with pytest.raises(BadArgument, match="position"):
            client.append_atomic([b"d"], partition=0, locks=[[write_lock("x")]])
        locks = [[], [write_lock("x")]]
        assert client.append_atomic([b"a", b"b"], partition=0, locks=locks, position=2) == Committed(3, 2)
        assert [found.id for found in client.read_some(0, since=noon, through=3)] == [1, 2, 3]
        found = client.read(0, 4, with_locks=True)
        assert (found.time_us, found.locks) == (noon, (LoggedLock(write_lock("x").hash, Mode.WRITE),))
    assert view.payloads[:2] == [b"1", b"1"], "each was built against the view in front of the group"


def test_it_has_everything_that_the_other_face_has() -> None:
    view, fake = View(), FakeCluster(partitions=2)
    with BlockingClient("s0:1", connect=fake.connect, view=view, partitions=[0], settings=SETTINGS) as client:
        assert (client.cluster, client.client_id, client.partition_count, client.partitions) == ("fake", 1, 2, (0,))
        assert client.append(b"a", partition=0) == Committed(0)
        assert client.append_many([b"b", b"c"], partition=0).committed == 2
        view.reached(3)
        with pytest.raises(BadArgument, match="position"):
            client.append(b"d", partition=0, locks=[write_lock("x")])
        with pytest.raises(BadArgument, match="position"):
            client.append_many([b"d"], partition=0, locks=[[write_lock("x")]])
        assert client.end_position(0) == 2
        assert client.read(0, 1).payload == b"b"
        assert client.position(0) in (1, 2)
        assert client.status()[0].is_ready
        client.set_partitions([1])
        assert client.partitions == (1,)
    with pytest.raises(ClientClosed):
        client.append(b"z", partition=1)


def test_a_view_may_call_the_client() -> None:
    fake = FakeCluster()

    class Echo(View):
        client: BlockingClient

        def apply(self, transaction: Transaction) -> None:
            super().apply(transaction)
            if transaction.id < 3:
                assert isinstance(self.client.append(b"echo", partition=0), Committed)
                assert self.client.submit(Nothing()) == Declined()

    class Nothing(Command):
        key = 1

        def build(self, builder: Builder) -> bool:
            return False

    view = Echo()
    with BlockingClient("s0:1", connect=fake.connect, view=view, threads=1, settings=SETTINGS) as client:
        view.client = client
        client.append(b"first", partition=0)
        view.reached(4)


def test_heads_are_read_on_demand() -> None:
    fake = FakeCluster()

    class Heads(View):
        client: BlockingClient

        def apply(self, transaction: Transaction) -> None:
            with pytest.raises(BadArgument, match=r"FeedMode\.HEADS"):
                _ = transaction.payload
            self.client.fetch(transaction)
            super().apply(transaction)

    view = Heads()
    client = BlockingClient("s0:1", connect=fake.connect, view=view, feed=FeedMode.HEADS, settings=SETTINGS)
    view.client = client
    with client:
        client.append(b"a", partition=0)
        view.reached(1)
    assert view.payloads == [b"a"]


def test_what_a_command_raises_comes_out_on_the_calling_thread() -> None:
    class Broken(Command):
        key = 1

        def build(self, builder: Builder) -> bool:
            raise ZeroDivisionError

    class Interrupted(Broken):
        def build(self, builder: Builder) -> bool:
            raise KeyboardInterrupt

    with BlockingClient("s0:1", connect=FakeCluster().connect, settings=SETTINGS) as client:
        with pytest.raises(ZeroDivisionError):
            client.submit(Broken())
        with pytest.raises(KeyboardInterrupt):
            client.submit(Interrupted())
        client.flush()
        assert client.append(b"x", partition=0) == Committed(0)


def test_an_async_view_runs_on_the_loop() -> None:
    fake = FakeCluster()

    class Async(View):
        async def position(self, partition: int) -> int:  # type: ignore[override]
            await asyncio.sleep(0)
            return -1

        async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
            for transaction in transactions:
                self.apply(transaction)

    view = Async()
    with BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client:
        client.append(b"a", partition=0)
        view.reached(1)
    assert view.threads == {""}  # the thread of the loop has no number


CALLS = (
    lambda client, view: client.append(b"x", partition=0),
    lambda client, view: client.submit(Increment(view)),
    lambda client, view: client.submit_atomic([Increment(view)]),
)


@pytest.mark.parametrize("call", CALLS, ids=("append", "submit", "submit_atomic"))
def test_a_blocking_call_on_the_loop_is_refused_and_does_not_hang(call: Callable[[BlockingClient, View], object]) -> None:
    class Wrong(View):
        client: BlockingClient
        error: BadArgument | None = None

        async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
            try:
                call(self.client, self)
            except BadArgument as error:
                self.error = error
            for transaction in transactions:
                self.apply(transaction)

    view = Wrong()
    with BlockingClient("s0:1", connect=FakeCluster().connect, view=view, settings=SETTINGS) as client:
        view.client = client
        client.append(b"a", partition=0)
        view.reached(1)
    assert view.error is not None


@pytest.mark.parametrize("call", CALLS, ids=("append", "submit", "submit_atomic"))
def test_a_call_in_a_process_that_was_forked_is_refused_and_does_not_hang(
    call: Callable[[BlockingClient, View], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, view = FakeCluster(), View()
    with BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client, monkeypatch.context() as one:
        one.setattr(os, "getpid", lambda: 0)
        with pytest.raises(BadArgument, match="this process was forked"):
            call(client, view)
    assert fake.partitions[0].payloads == []


@pytest.mark.slow
def test_importing_the_package_loads_nothing_that_is_not_asked_for() -> None:
    code = (
        "import sys, waltzd; heavy = {'grpc', 'numpy', 'asyncio', 'waltzd.client.client'};"
        " assert not heavy & set(sys.modules);"
        "from waltzd import Lock, Committed; assert 'grpc' not in sys.modules;"
        "from waltzd import Client; later = {'grpc', 'google.protobuf', 'kazoo', 'waltzd.wire.servers',"
        " 'waltzd.cluster.groups', 'waltzd.protocol.groups', 'waltzd.protocol.descriptions'};"
        " assert not later & set(sys.modules), later & set(sys.modules);"
        "assert all(hasattr(waltzd, name) for name in dir(waltzd)); assert not hasattr(waltzd, 'Nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""An idempotency key: whatever happens between, there is one transaction with it, and every caller is told which."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest

from tests.tiers import tiers
from tests.unit.fake_server import FakeCluster, FakeServer
from tests.unit.timeless import run
from tests.unit.waltzd.client.test_client import SETTINGS, Increment, View, until, with_client
from waltzd import Builder, Lock
from waltzd.client import client as client_module
from waltzd.client import keys
from waltzd.client.blocking import BlockingClient
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.errors import BadArgument, CannotConnect, NeedsBatches, NotSent, Trimmed
from waltzd.format.record import Run
from waltzd.protocol.locks import (
    Committed,
    Declined,
    Outcome,
    Reason,
    Rejected,
    Unknown,
    append_lock,
    read_lock,
    write_lock,
)
from waltzd.testing import LocalCluster


@pytest.fixture(autouse=True)
def _the_time_of_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "now_us", lambda: FakeCluster().now)


def batches() -> FakeCluster:
    return FakeCluster(format=1)


def opened(fake: FakeCluster, **options: object) -> Client:
    return Client("s0:1", connect=fake.connect, **{"settings": SETTINGS, **options})  # type: ignore[arg-type]


def test_a_key_is_appended_once_whoever_asks_again() -> None:
    async def work() -> None:
        fake = batches()
        async with opened(fake) as client:
            assert await client.append(b"a", partition=0) == Committed(0)
            first = await client.append(b"b", partition=0, idempotency_key="order 7")
            assert (first, await client.append(b"b", partition=0, idempotency_key="order 7")) == (Committed(1), first)
            assert await client.append(b"c", partition=0, idempotency_key="order 8") == Committed(2)
        async with opened(fake) as client:  # another process
            again = await client.append(b"other bytes", partition=0, idempotency_key="order 7")
            assert isinstance(again, Committed)
            assert (again.id, again.partition) == (1, 0)
        assert fake.partitions[0].payloads == [b"a", b"b", b"c"]

    run(work())


@pytest.mark.parametrize("lost", [True, False])
def test_a_new_owner_knows_no_key_and_the_log_does(lost: bool) -> None:
    async def work() -> None:
        fake = batches()
        partition = fake.partitions[0]
        async with opened(fake) as client:
            await client.append(b"before", partition=0)
            partition.is_holding = True
            assert await client.append(b"x", partition=0, idempotency_key="k", timeout=1) == Unknown()
            partition.end_session(move=True, keep=None if lost else 1)
            partition.is_holding = False
            async with opened(fake) as other:
                outcome = await other.append(b"x", partition=0, idempotency_key="k")
            assert (outcome, await client.append(b"x", partition=0, idempotency_key="k")) == (Committed(1), outcome)
        assert partition.payloads == [b"before", b"x"]

    run(work())


def test_what_is_not_decided_yet_is_waited_for() -> None:
    async def work() -> None:
        fake = batches()
        partition = fake.partitions[0]
        async with opened(fake) as client, opened(fake) as other, opened(fake) as third:
            await client.append(b"before", partition=0)
            partition.is_holding = True
            first = asyncio.create_task(client.append(b"x", partition=0, idempotency_key="k"))
            await until(lambda: len(partition.log) == 2)
            again = asyncio.create_task(other.append(b"x", partition=0, idempotency_key="k"))
            assert await third.append(b"x", partition=0, idempotency_key="k", timeout=2) == Unknown()
            assert not again.done()
            partition.commit()
            assert (await first, await again) == (Committed(1), Committed(1))
            assert partition.payloads == [b"before", b"x"]

    run(work())


def test_locks_of_its_own_are_compared_with_their_own_position() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        lock = [write_lock("stock")]
        first = await client.append(b"1", partition=0, locks=lock, position=-1, idempotency_key="k")
        assert first == Committed(0)
        # What the first one has marked does not refuse the same again, at any position, with and without its own locks.
        for position in (-1, 0):
            assert await client.append(b"1", partition=0, locks=lock, position=position, idempotency_key="k") == first
        await client.append(b"2", partition=0, locks=lock, position=0)
        assert await client.append(b"1", partition=0, locks=lock, position=-1, idempotency_key="k") == first
        assert await client.append(b"1", partition=0, locks=[append_lock("stock")], idempotency_key="k") == first
        refused = await client.append(b"3", partition=0, locks=[read_lock("stock")], position=0, idempotency_key="l")
        assert refused == Rejected(Reason.CONFLICT, 1, read_lock("stock").hash)
        taken = await client.append(b"3", partition=0, locks=[read_lock("stock")], position=1, idempotency_key="l")
        assert taken == Committed(2)
        with pytest.raises(BadArgument, match="above the end of partition 0"):
            await client.append(b"4", partition=0, locks=lock, position=99, idempotency_key="m")
        assert fake.partitions[0].payloads == [b"1", b"2", b"3"]

    with_client(test, cluster=batches())


def test_a_group_has_one_key() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        for _ in range(2):
            assert await client.append_atomic([b"a", b"b"], partition=0, idempotency_key="k") == Committed(0, 2)
        locks = [[write_lock("x")], [write_lock("y")]]
        for position in (1, 1, -1):
            outcome = await client.append_atomic(
                [b"c", b"d"], partition=0, locks=locks, position=position, idempotency_key="l"
            )
            assert outcome == Committed(2, 2)
        assert fake.partitions[0].payloads == [b"a", b"b", b"c", b"d"]

    with_client(test, cluster=batches())


def test_two_keys_that_share_a_lock_by_chance_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    true_locks = keys.key_locks

    def clashing(key: str) -> tuple[Lock, Lock]:
        return write_lock("waltz-key.same"), true_locks(key)[1]

    monkeypatch.setattr(client_module, "key_locks", clashing)

    async def test(client: Client, fake: FakeCluster) -> None:
        ids = [await client.append(b"x", partition=0, idempotency_key=key) for key in ("a", "b", "c", "b", "a")]
        assert ids == [Committed(id_) for id_ in (0, 1, 2, 1, 0)]

    with_client(test, cluster=batches())


class Sell(Increment):
    """The last one."""

    def build(self, builder: Builder) -> bool:
        return super().build(builder) and builder.payload == b"1"


def test_a_command_is_done_once() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        command, again = Sell(view), Sell(view)
        assert await client.submit(command, idempotency_key="k") == Committed(0)
        await until(lambda: view.payloads())
        assert await client.submit(again, idempotency_key="k") == Committed(0)
        assert again.builds == 0  # the view has it, and would decline
        await until(lambda: ("applied", 0) in again.story)
        assert await client.submit(Sell(view), idempotency_key="l") == Declined()
        for _ in range(2):
            assert await client.submit_atomic([Increment(view), Increment(view, "b")], idempotency_key="m") == Committed(
                1, 2
            )

    with_client(test, cluster=batches(), view=view)


def test_a_command_on_a_view_that_is_behind_is_done_once() -> None:
    fake = batches()
    view, late = View(), View()
    late.hold = asyncio.Event()

    async def work() -> None:
        async with opened(fake, view=view) as client, opened(fake, view=late) as behind:
            assert await client.submit(Increment(view), idempotency_key="k") == Committed(0)
            again = asyncio.create_task(behind.submit(Increment(late), fresh=False, idempotency_key="k"))
            await asyncio.sleep(2)
            assert not again.done()
            assert late.hold is not None
            late.hold.set()
            assert await again == Committed(0)
            late.hold.clear()
            await client.append(b"7", partition=0)
            declined = await behind.submit(No(late), fresh=False, idempotency_key="k")
            assert declined == Committed(0)
            late.hold.set()
        assert fake.partitions[0].payloads == [b"1", b"7"]

    run(work())


class No(Increment):
    def build(self, builder: Builder) -> bool:
        return False


def test_a_key_holds_for_its_time_and_is_forgotten_then(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClientSettings(idempotency_seconds=100, submit_seconds=20)

    async def work() -> None:
        fake = batches()
        monkeypatch.setattr(keys, "now_us", lambda: fake.now)
        start = fake.now
        async with opened(fake, settings=settings) as client:
            await client.append(b"x", partition=0, idempotency_key="k")
        for seconds, expected in ((0, 0), (99, 0), (159, 0), (161, 1)):
            fake.now = start + timedelta(seconds=seconds) // timedelta(microseconds=1)
            fake.partitions[0].end_session()
            async with opened(fake, settings=settings) as client:
                assert await client.append(b"x", partition=0, idempotency_key="k") == Committed(expected)

    run(work())


def test_a_key_that_was_used_again_after_its_time_holds_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClientSettings(idempotency_seconds=100, submit_seconds=20)

    async def work() -> None:
        fake = batches()
        async with opened(fake, settings=settings) as client:
            assert await client.append(b"x", partition=0, idempotency_key="k") == Committed(0)
            fake.now += 161_000_000
            monkeypatch.setattr(keys, "now_us", lambda: fake.now)
            async with opened(fake, settings=settings) as other:
                assert await other.append(b"y", partition=0, idempotency_key="k") == Committed(1)
            assert await client.append(b"z", partition=0, position=1, idempotency_key="l") == Committed(2)
            assert await client.append(b"y", partition=0, idempotency_key="k") == Committed(1)

    run(work())


def test_a_key_behind_the_first_part_that_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "READ_MAX", 3)

    async def work() -> None:
        fake = batches()
        fake.partitions[0].write(*[b"x"] * 4)
        async with opened(fake) as client:
            first = await client.append(b"y", partition=0, idempotency_key="k")
        fake.partitions[0].write(*[b"z"] * 4)
        fake.partitions[0].end_session()
        async with opened(fake) as client:
            assert first == await client.append(b"y", partition=0, idempotency_key="k") == Committed(4)

    run(work())


def test_a_key_above_the_lock_that_the_owner_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that has forgotten the key names a lock that it knows exactly."""

    async def test(client: Client, fake: FakeCluster) -> None:
        partition, lock = fake.partitions[0], write_lock("stock").hash
        partition.write(b"0")
        assert await client.append(b"1", partition=0, locks=[write_lock("stock")], position=0) == Committed(1)
        first = await client.append(b"2", partition=0, locks=[read_lock("stock")], position=1, idempotency_key="k")
        assert first == Committed(2)
        refusal = Reason.CONFLICT, 1, lock
        monkeypatch.setattr(partition, "_refusal", lambda mark, _: refusal if mark < 2 else None)
        for key, expected in (("k", first), ("l", Rejected(Reason.CONFLICT, 1, lock))):
            outcome = await client.append(b"2", partition=0, locks=[read_lock("stock")], position=0, idempotency_key=key)
            assert outcome == expected

    with_client(test, cluster=batches())


def test_a_client_that_was_idle_reads_the_time_of_keys_and_not_what_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        fake = batches()
        partition, fetch, fetched = fake.partitions[0], FakeServer.fetch, list[int]()

        async def trimmed(
            port: FakeServer, number: int, first_id: int, *more: Any, **options: Any
        ) -> AsyncGenerator[Run, None]:
            if first_id < 5:
                raise Trimmed(f"id {first_id} is trimmed")
            fetched.append(first_id)
            async for found in fetch(port, number, first_id, *more, **options):
                yield found

        async with opened(fake) as client:
            assert await client.append(b"x", partition=0, idempotency_key="k") == Committed(0)
            partition.write(*[b"older"] * 9)
            await asyncio.sleep(700)
            fake.now += 700_000_000
            monkeypatch.setattr(keys, "now_us", lambda: fake.now)
            partition.write(*[b"new"] * 10)
            monkeypatch.setattr(FakeServer, "fetch", trimmed)
            assert await client.append(b"y", partition=0, position=19, idempotency_key="l") == Committed(20)
            assert await client.append(b"y", partition=0, idempotency_key="l") == Committed(20)
        assert min(fetched) == 10

    run(work())


def test_callers_that_wait_for_the_reads_of_others_keep_their_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"x", partition=0)
        monkeypatch.setattr(FakeServer, "find_time", lambda port, partition, time: asyncio.sleep(1000))
        calls = [client.append(b"y", partition=0, idempotency_key=f"{number}", timeout=5) for number in range(5)]
        async with asyncio.timeout(6):
            told = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in told] == [CannotConnect] * 5

    with_client(test, cluster=batches())


def test_what_makes_no_sense_as_a_key() -> None:
    async def old(client: Client, fake: FakeCluster) -> None:
        with pytest.raises(NeedsBatches):
            await client.append(b"x", partition=0, idempotency_key="k")

    async def test(client: Client, fake: FakeCluster) -> None:
        for key in ("", 7, b"k", "k" * 2000):
            with pytest.raises(BadArgument, match="idempotency key"):
                await client.append(b"x", partition=0, idempotency_key=key)  # type: ignore[arg-type]
            with pytest.raises(BadArgument, match="idempotency key"):
                await client.submit(Increment(View()), idempotency_key=key)  # type: ignore[arg-type]
        assert fake.partitions[0].taken == 0

    with_client(old)
    with_client(test, cluster=batches())


def test_the_blocking_twins_have_it_too() -> None:
    fake, view = batches(), View()
    with BlockingClient("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client:
        for _ in range(2):
            assert client.append(b"1", partition=0, idempotency_key="k") == Committed(0)
            assert client.append_atomic([b"2"], partition=0, idempotency_key="l") == Committed(1)
            assert client.submit(Increment(view), idempotency_key="m") == Committed(2)


STEPS: Sequence[Callable[[FakeCluster, random.Random], object]] = (
    lambda fake, chance: fake.partitions[0].end_session(move=True),
    lambda fake, chance: fake.partitions[0].end_session(silently=True, keep=chance.randrange(100)),
    lambda fake, chance: setattr(fake.partitions[0], "is_holding", True),
    lambda fake, chance: fake.partitions[0].commit(),
    lambda fake, chance: evict(fake, chance),
)


def evict(fake: FakeCluster, chance: random.Random) -> None:
    """The table forgets what was marked first."""
    partition = fake.partitions[0]
    for lock in sorted(partition.marks, key=partition.marks.__getitem__)[: chance.randrange(10)]:
        partition.floor = max(partition.floor, partition.marks.pop(lock))


@pytest.mark.parametrize("seed", tiers(range(20), quick=3, short=10))
def test_whatever_happens_each_key_is_in_the_log_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "READ_MAX", 3)
    chance = random.Random(seed)

    async def call(client: Client, number: int) -> Outcome:
        for _ in range(200):
            try:
                payload, key = b"%d" % number, f"key {number}"
                if number % 3:
                    outcome = await client.append(payload, partition=0, idempotency_key=key, timeout=2)
                else:
                    outcome = await client.append(
                        payload,
                        partition=0,
                        locks=[write_lock("all")],
                        position=client.position(0),
                        idempotency_key=key,
                        timeout=2,
                    )
            except (CannotConnect, NotSent):
                continue
            if isinstance(outcome, Committed):
                return outcome
            await asyncio.sleep(chance.random())
        raise AssertionError("it never came to an end")

    async def work() -> None:
        fake = batches()
        clients = [opened(fake) for _ in range(3)]
        for client in clients:
            await client.open()
        calls = [(number, asyncio.create_task(call(client, number))) for number in range(12) for client in clients]
        for _ in range(30):
            await asyncio.sleep(chance.random())
            chance.choice(STEPS)(fake, chance)
        fake.partitions[0].is_holding = False
        fake.partitions[0].commit()
        outcomes = [(number, await task) for number, task in calls]
        for client in clients:
            await client.close()
        payloads = fake.partitions[0].payloads
        assert sorted(payloads) == sorted(b"%d" % number for number in range(12))
        for number, outcome in outcomes:
            assert isinstance(outcome, Committed)
            assert payloads[outcome.id] == b"%d" % number

    run(work())


def test_a_key_outlives_the_owner_of_a_real_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "now_us", lambda: time.time_ns() // 1000)

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(partitions=[0]) as client:
            await client.append_many([b"before"] * 20, partition=0)
            first = await client.append(b"x", partition=0, idempotency_key="k")
        await cluster.kill_owner(0)
        async with cluster.client(partitions=[0]) as client:
            assert await client.append(b"x", partition=0, idempotency_key="k") == first
            assert isinstance(await client.append(b"y", partition=0, idempotency_key="l"), Committed)
        assert [record.payload for record in await cluster.log(0)] == [b"before"] * 20 + [b"x", b"y"]

    LocalCluster(partitions=1, format=1).run(story)


@pytest.mark.slow
def test_owners_die_and_answers_are_lost_and_each_key_is_in_the_log_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "now_us", lambda: time.time_ns() // 1000)
    chance = random.Random(7)

    async def call(client: Client, number: int) -> Outcome:
        while True:
            locks = [write_lock("all")] if number % 2 else []
            position = client.position(0) if locks else None
            with suppress(CannotConnect, NotSent):
                outcome: Outcome = await client.append(
                    b"%d" % number, partition=0, locks=locks, position=position, idempotency_key=f"key {number}"
                )
                if isinstance(outcome, Committed):
                    return outcome
            await asyncio.sleep(chance.random() / 20)

    async def story(cluster: LocalCluster) -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(cluster.client(partitions=[0])) for _ in range(3)]
            calls = [(number, asyncio.create_task(call(client, number))) for number in range(10) for client in clients]
            for step in range(6):
                await asyncio.sleep(0.05)
                cluster.lose_next_acknowledgement(0)
                cluster.break_connections(0)
                if step % 3 == 0:
                    name = await cluster.kill_owner(0)
                    await cluster.start_server(name)
            outcomes = [(number, await task) for number, task in calls]
        payloads = [record.payload for record in await cluster.log(0)]
        assert sorted(payloads) == sorted(b"%d" % number for number in range(10))
        for number, outcome in outcomes:
            assert isinstance(outcome, Committed)
            assert payloads[outcome.id] == b"%d" % number

    LocalCluster(partitions=1, servers=3, format=1).run(story)

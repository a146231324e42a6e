"""Whatever happens between a client and its servers, what callers and views are told is what the log says.

Two ways to look for the opposite: one fault of each kind at every single moment of a small run, and many runs with faults
by chance, with small limits, so that everything happens in the middle of everything else. A failure names its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import pytest

from tests.tiers import tiers
from tests.unit.fake_server import FAULTS, FakeCluster
from tests.unit.timeless import run
from tests.unit.waltzd.client.test_client import Increment, View, until
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Transaction
from waltzd.errors import CannotConnect, NotSent
from waltzd.errors.operations import SessionEnded
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Outcome, Rejected, Unknown, append_lock, write_lock

SETTINGS = ClientSettings(
    submit_seconds=500,
    call_seconds=1,
    close_seconds=500,
    pending_max=12,
    pending_bytes_max=4000,
    messages_in_flight_max=2,
    bytes_in_flight_max=600,
    feed_bytes_max=300,
    apply_batch_max=3,
)


@dataclass
class History:
    """What callers were told, by payload; every payload is used once."""

    told: dict[bytes, Outcome | str] = field(default_factory=dict)

    def check(self, payloads: list[bytes]) -> None:
        assert len(set(payloads)) == len(payloads), "a transaction is in the log twice"
        for payload, outcome in self.told.items():
            match outcome:
                case Committed(id_):
                    assert payloads[id_] == payload, f"{payload!r} is not at {id_}"
                case Rejected():
                    assert payload not in payloads, f"{payload!r} was called {outcome} and is in the log"
                case "not sent":
                    assert payload not in payloads, f"{payload!r} was not sent and is in the log"
                case _:
                    assert isinstance(outcome, Unknown)


class WholeView(View):
    """Takes several at once, and sees that no group is cut."""

    def __init__(self, fake: FakeCluster, chance: random.Random) -> None:
        super().__init__()
        self._partition = fake.partitions[0]
        self._chance = chance

    async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        first, last = transactions[0].id, transactions[-1].id
        assert self._partition.whole(first - 1) == first - 1, "it begins inside a group"
        assert self._partition.whole(last) == last, "it ends inside a group"
        if self._chance.random() < 0.1:
            raise OSError("the database is away")
        for transaction in transactions:
            await self.apply(transaction)


async def writer(client: Client, history: History, name: str, rounds: int, chance: random.Random, format: int) -> None:
    """Single ones, bundles, and in format 1 groups, some under locks that fail."""
    for number in range(rounds):
        payload = f"{name}/{number}".encode()
        locks = [chance.choice([append_lock("shared"), write_lock(name, number % 2)])] if number % 3 == 0 else []
        try:
            if number % 4 == 2 and format == 1:
                payloads = [payload + b"/%d" % i for i in range(chance.randint(1, 7))]
                each = [locks if i == 1 else [] for i in range(len(payloads))]
                outcome = await client.append_atomic(payloads, partition=0, locks=each, position=-1)
                if isinstance(outcome, Committed):
                    assert outcome.count == len(payloads)
                    history.told |= {payload: Committed(id_) for payload, id_ in zip(payloads, outcome.ids, strict=True)}
                else:
                    history.told |= dict.fromkeys(payloads, outcome)
            elif number % 4 == 3:
                payloads = [payload + b"/%d" % i for i in range(chance.randint(1, 9))]
                each = [[append_lock("shared", i)] for i in range(len(payloads))]
                outcomes = await client.append_many(payloads, partition=0, locks=each, position=-1)
                history.told |= {payload: outcomes[i] for i, payload in enumerate(payloads)}
            else:
                mark = -1 if client._view is None else None
                history.told[payload] = await client.append(payload, partition=0, locks=locks, position=mark)
        except NotSent:
            history.told[payload] = "not sent"


async def scenario(fake: FakeCluster, *, feed: FeedMode, rounds: int, chance: random.Random) -> None:
    history = History()
    view = None if feed is FeedMode.NONE else chance.choice([View(), WholeView(fake, chance)])
    partition = fake.partitions[0]
    async with Client("s0:1,s1:1", connect=fake.connect, view=view, feed=feed, settings=SETTINGS) as client:
        writers = [writer(client, history, name, rounds, chance, fake.format) for name in ("a", "b", "c")]
        await asyncio.gather(*writers)
        fake.fault = lambda moment: None
        await client.flush()
        assert client.status()[0].pending == 0
        await until(lambda: view is None or len(view.payloads()) == len(partition.log))
    history.check(partition.payloads)
    assert view is None or view.payloads() == partition.payloads
    assert partition.committed == len(partition.log) - 1
    assert (fake.open_ports, fake.open_mounts) == (0, 0)
    assert not any(isinstance(outcome, Unknown) for outcome in history.told.values()), "there was time to find out"


def cluster_of(chance: random.Random, rate: float) -> FakeCluster:
    fake = FakeCluster(
        fault=lambda moment: chance.choice(FAULTS) if chance.random() < rate else None,
        choose=lambda count: chance.randrange(count) if count > 0 else 0,
        format=chance.choice([0, 1]),
    )
    fake.feed_records = chance.randint(1, 6)
    return fake


@pytest.mark.parametrize("seed", tiers(range(90), quick=10, short=45))
def test_faults_by_chance(seed: int) -> None:
    chance = random.Random(seed)
    feed = chance.choice(list(FeedMode))
    fake = cluster_of(chance, rate=chance.choice([0.01, 0.05, 0.15]))
    run(scenario(fake, feed=feed, rounds=12, chance=chance))


@pytest.mark.slow
@pytest.mark.parametrize("feed", list(FeedMode), ids=lambda feed: feed.name)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("format", "every"),
    [(1, 3), *(pytest.param(format, 1, marks=pytest.mark.long) for format in (0, 1))],  # groups need format 1
)
def test_one_fault_at_every_moment(format: int, every: int, fault: str, feed: FeedMode) -> None:
    """In short each moment has two of the kinds of faults, or more, in each mode of the feed."""
    quiet = FakeCluster(format=format)
    run(scenario(quiet, feed=feed, rounds=7, chance=random.Random(1)))
    assert len(quiet.moments) > 15
    for at in range(FAULTS.index(fault) % every, len(quiet.moments), every):
        fake = FakeCluster(choose=lambda count: count // 2, format=format)
        fake.fault = lambda moment, fake=fake, at=at: fault if len(fake.moments) == at + 1 else None  # type: ignore[misc]
        run(scenario(fake, feed=feed, rounds=7, chance=random.Random(1)))


@pytest.mark.parametrize("seed", tiers(range(40), quick=5, short=20))
def test_a_counter_counts_every_increment_once_through_faults(seed: int) -> None:
    """Lost updates and updates that happen twice would both show."""
    chance = random.Random(seed)
    fake = cluster_of(chance, rate=0.04)
    done: list[Outcome] = []

    async def one() -> None:
        view = View()
        async with Client("s0:1", connect=fake.connect, view=view, settings=SETTINGS) as client:
            for _ in range(4):
                command = Increment(view)
                done.append(await client.submit(command))
                assert command.story[-1] == done[-1] or command.story[-2] == done[-1]

    async def everybody() -> None:
        await asyncio.gather(*[one() for _ in range(3)])

    run(everybody())
    assert all(isinstance(outcome, Committed) for outcome in done)
    assert fake.partitions[0].payloads == [b"%d" % i for i in range(1, 13)]


def test_an_older_mount_that_arrives_late_changes_nothing() -> None:
    """The barrier is the promise that what is not in the log by then never will be."""
    fake = FakeCluster()
    fake.late_by = 500

    async def work() -> None:
        async with Client("s0:1", connect=fake.connect, settings=SETTINGS) as client:
            await client.append(b"first", partition=0)
            fake.fault = lambda moment: "late" if "Append" in moment else None
            task = asyncio.create_task(client.append(b"late", partition=0))
            await until(lambda: fake.partitions[0].late)
            fake.fault = lambda moment: None
            assert isinstance(await task, Rejected)
            await until(lambda: not fake.partitions[0].late)
            assert await client.append(b"second", partition=0) == Committed(1)

    run(work())
    assert fake.partitions[0].payloads == [b"first", b"second"]


def test_what_was_committed_without_a_word_is_found_in_the_log() -> None:
    fake = FakeCluster()
    partition = fake.partitions[0]

    async def work() -> None:
        async with Client("s0:1", connect=fake.connect, settings=SETTINGS) as client:
            await client.append(b"first", partition=0)
            partition.write(*[b"others"] * 50)
            partition.is_holding = True
            tasks = [asyncio.create_task(client.append(b"%d" % i, partition=0)) for i in range(3)]
            await until(lambda: len(partition.log) == 54)
            partition.log.insert(53, partition.log[0].__class__(77, 1, 0, b"foreign", -1, ()))
            partition.end_session(keep=54, silently=True, move=True)
            assert await asyncio.gather(*tasks) == [Committed(51), Committed(52), Committed(54)]
            asked = [request for request in fake.mount_requests if request.feed is FeedMode.HEADS]
            assert {request.mark for request in asked} == {0}  # from what it knew to be committed, not from nothing
            await until(lambda: client.status()[0].is_ready)
            assert fake.mount_requests[-1].feed is FeedMode.NONE

    run(work())


def test_an_owner_that_was_replaced_has_a_last_word() -> None:
    """The client hears from another server that the partition has moved, while the old owner hands it over."""
    fake = FakeCluster()
    partition = fake.partitions[0]

    async def work() -> None:
        async with Client("s0:1,s1:1", connect=fake.connect, feed=FeedMode.NONE, settings=SETTINGS) as client:
            await client.append(b"first", partition=0)
            partition.is_holding = True
            taken = asyncio.create_task(client.append(b"taken", partition=0))
            await until(lambda: len(partition.log) == 2)
            partition.generation, partition.owner = 2, 1
            await client._routes.look_up()
            await asyncio.sleep(0.5)
            assert not taken.done()
            partition.commit()
            partition.mounts[1].end(SessionEnded("handed over"))
            assert await taken == Committed(1)
            partition.session, partition.is_holding = 2, False
            assert await client.append(b"next", partition=0) == Committed(2)
            assert [request.feed for request in fake.mount_requests] == [FeedMode.NONE] * 2, "nobody had to ask"

    run(work())


def test_a_barrier_that_is_not_committed_is_waited_for() -> None:
    fake = FakeCluster()
    partition = fake.partitions[0]

    async def work() -> None:
        async with Client("s0:1", connect=fake.connect, settings=SETTINGS) as client:
            partition.is_holding = True
            task = asyncio.create_task(client.append(b"x", partition=0))
            await until(lambda: partition.log)
            partition.mounts[1].end(None)
            await asyncio.sleep(20)
            assert not task.done()
            assert "waits for 0 to be committed" in client.status()[0].sentence
            partition.commit()
            assert await task == Committed(0)

    run(work())


def test_an_owner_that_does_not_say_what_is_committed_is_asked_less_and_less() -> None:
    async def main() -> None:
        fake = FakeCluster()
        asked = 0

        def connect(address: str, key: UUID | None) -> Any:
            port: Any = fake.connect(address, key)

            async def refuse(partition: int, *, confirmed: bool = False) -> int:
                nonlocal asked
                asked += 1
                raise CannotConnect("its certificate has expired")

            port.high_water_mark = refuse
            return port

        settings = replace(SETTINGS, submit_seconds=60)
        async with Client("s0:1,s1:1", connect=connect, settings=settings) as client:
            with pytest.raises(NotSent):
                await client.append(b"x", partition=0, position=-1)
        assert asked < 60 * 5, f"{asked} times in a minute"

    run(main())

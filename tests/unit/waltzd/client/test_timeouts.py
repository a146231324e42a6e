"""What a call may take is said at the call: shorter or longer than the settings, and beside others that said nothing."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.fake_server import FakeCluster
from tests.unit.told import told
from tests.unit.waltzd.client.test_client import SETTINGS, Increment, View, with_client
from waltzd.client.blocking import BlockingClient
from waltzd.client.client import Client
from waltzd.errors import BadArgument, CannotConnect, NotSent
from waltzd.protocol.locks import Committed, Rejected, Unknown, write_lock


def now() -> float:
    return asyncio.get_running_loop().time()


@told(with_client, given=2)
async def test_what_was_sent_and_not_decided_is_unknown_when_its_own_time_is_over(
    client: Client, fake: FakeCluster
) -> None:
    await client.append(b"0", partition=0)
    fake.partitions[0].is_holding = True
    begun = now()
    patient = asyncio.create_task(client.append(b"1", partition=0))  # 20 seconds, by the settings
    outcomes = await asyncio.gather(
        client.append(b"2", partition=0, timeout=5),
        client.append(b"3", partition=0, timeout=2),
        client.append_atomic([b"4"], partition=0, timeout=1),
    )
    assert list(outcomes) == [Unknown(), Unknown(), Unknown()]
    assert 5 <= now() - begun < 5.5
    with pytest.raises(NotSent):  # too many messages are under way
        await client.append_many([b"5", b"6"], partition=0, timeout=3)
    fake.partitions[0].is_holding = False
    fake.partitions[0].commit()
    assert await patient == Committed(1)
    assert fake.partitions[0].payloads == [b"%d" % number for number in range(5)]  # each once


@told(with_client, given=2)
async def test_a_call_may_take_longer_than_the_settings_say(client: Client, fake: FakeCluster) -> None:
    await client.append(b"0", partition=0)
    fake.partitions[0].is_holding = True
    work = asyncio.gather(client.append(b"1", partition=0), client.append(b"2", partition=0, timeout=100))
    await asyncio.sleep(50)
    fake.partitions[0].commit()
    assert list(await work) == [Unknown(), Committed(2)]


@told(with_client, given=2)
async def test_what_was_not_sent_never_will_be(client: Client, fake: FakeCluster) -> None:
    fake.partitions[0].end_session(move=True)
    fake.partitions[0].stays_down = True
    fake.down = {"s0:1", "s1:1"}
    begun = now()
    with pytest.raises(NotSent):
        await client.append(b"x", partition=0, timeout=3)
    with pytest.raises(NotSent):
        await client.submit(Increment(View()), timeout=2)
    for question in (client.end_position(0, timeout=1), client.read(0, 0, timeout=1), client.read_some(0, timeout=1)):
        with pytest.raises(CannotConnect):
            await question
    assert now() - begun < 10
    fake.down = set()


def test_a_submit_that_is_always_late_ends_with_its_last_rejection_when_its_time_is_over() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].marks[write_lock("counter").hash] = 77  # in flight, for ever
        command = Increment(View())
        begun = now()
        assert isinstance(await client.submit(command, fresh=False, timeout=4), Rejected)
        assert 3.9 < now() - begun < 6
        assert command.story[-1] == command.story[-2]

    with_client(test, view=View())


@told(with_client, given=2)
async def test_a_timeout_is_a_number_above_0(client: Client, fake: FakeCluster) -> None:
    for timeout in (0, -1, float("nan"), "5", True):
        with pytest.raises(BadArgument, match="timeout"):
            await client.append(b"x", partition=0, timeout=timeout)  # type: ignore[arg-type]
    assert fake.partitions[0].payloads == []


def test_the_blocking_twins_have_it_too() -> None:
    fake = FakeCluster()
    with BlockingClient("s0:1", connect=fake.connect, settings=SETTINGS) as client:
        client.append(b"0", partition=0, timeout=30)
        assert (client.end_position(0, timeout=30), client.read(0, 0, timeout=30).payload) == (0, b"0")
        fake.partitions[0].is_holding = True
        assert client.append(b"1", partition=0, timeout=0.1) == Unknown()
        fake.partitions[0].is_holding = False
        fake.partitions[0].commit()

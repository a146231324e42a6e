"""What a submit relies on, and what becomes of it when its caller goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.fake_server import FakeCluster, FakeServer
from tests.unit.told import told
from tests.unit.waltzd.client.test_client import Increment, View, until, with_client
from tests.unit.waltzd.client.test_status import Poisoned
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.client.submits import PRUNE_AT, LockQueue
from waltzd.client.view import Builder, Command, Transaction
from waltzd.errors import BadArgument, BeyondLog, CannotConnect, NotApplied, NotSent, ViewStopped
from waltzd.protocol.locks import Committed, Declined, Lock, Rejected, Token, append_lock, read_lock, write_lock
from waltzd.protocol.positions import Position


class Withdraw(Command):
    """As much as there is; without a deposit in the view there is nothing to do."""

    key = "account"

    def __init__(self, view: View) -> None:
        self.view = view
        self.positions: list[int] = []

    def build(self, builder: Builder) -> bool:
        self.positions.append(builder.position)
        builder.payload = b"withdrawal"
        return b"deposit" in self.view.payloads()


def with_view(test: Callable[[Client, FakeCluster, View], Any], **options: Any) -> FakeCluster:
    view = View()
    return with_client(lambda client, fake: test(client, fake, view), view=view, **options)


# -- fresh -------------------------------------------------------------------------------------------------------------


@told(with_view, given=3)
async def test_the_first_submit_sees_all_that_is_committed(client: Client, fake: FakeCluster, view: View) -> None:
    fake.feed_records = 1
    fake.partitions[0].write(*[b"noise"] * 50, b"deposit")
    command = Withdraw(view)
    assert await client.submit(command) == Committed(51)
    assert command.positions == [50]


@told(with_view, given=3)
async def test_a_later_one_sees_it_where_that_is_asked_for(client: Client, fake: FakeCluster, view: View) -> None:
    assert await client.submit(Withdraw(view)) == Declined()
    view.hold = asyncio.Event()
    fake.partitions[0].write(b"deposit")
    assert await client.submit(Withdraw(view), fresh=False) == Declined()
    submitting = asyncio.create_task(client.submit(Withdraw(view), fresh=True))
    await asyncio.sleep(1)
    assert not submitting.done()
    view.hold.set()
    assert await submitting == Committed(1)


@told(with_view, given=3)
async def test_a_view_that_does_not_become_fresh_sends_nothing(client: Client, fake: FakeCluster, view: View) -> None:
    view.hold = asyncio.Event()
    fake.partitions[0].write(b"deposit")
    with pytest.raises(NotSent, match=r"did not become fresh.* up to -1, and not 0 yet"):
        await client.submit(Withdraw(view), timeout=3)
    view.hold.set()


@told(with_view, given=3)
async def test_many_that_ask_at_once_share_the_question(client: Client, fake: FakeCluster, view: View) -> None:
    fake.partitions[0].write(b"deposit")
    questions = 0
    ask = client._clients[0]._end._ask

    async def counted() -> int:
        nonlocal questions
        questions += 1
        return await ask()

    client._clients[0]._end._ask = counted
    outcomes = await asyncio.gather(*[client.submit(Withdraw(view), fresh=True) for _ in range(100)])
    assert {type(outcome) for outcome in outcomes} == {Committed}
    assert questions == 1


def test_what_the_view_submits_itself_does_not_wait_for_the_view() -> None:
    class Replies(View):
        client: Client

        async def apply(self, transaction: Transaction) -> None:
            await super().apply(transaction)
            if transaction.payload == b"deposit":
                self.outcome = await asyncio.wait_for(self.client.submit(Withdraw(self)), 10)

    view = Replies()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.client = client
        fake.partitions[0].write(b"deposit")
        await until(lambda: view.payloads() == [b"deposit", b"withdrawal"])
        assert view.outcome == Committed(1)

    with_client(test, view=view)


def test_a_conflict_in_a_call_of_the_view_is_the_outcome() -> None:
    class Counts(View):
        client: Client

        async def apply(self, transaction: Transaction) -> None:
            if transaction.id == 0:
                self.outcome = await asyncio.wait_for(self.client.submit(Increment(self)), 10)
            await super().apply(transaction)

    view = Counts()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.client = client
        fake.partitions[0].marks[write_lock("counter").hash] = 1
        fake.partitions[0].write(b"1", b"2")
        await until(lambda: len(view.payloads()) == 2)
        assert isinstance(view.outcome, Rejected)

    with_client(test, view=view)


def test_without_a_view_there_is_nothing_to_wait_for() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        for wait in (
            client.wait_caught_up(),
            client.wait_applied(Token(0, 0)),
            client.submit(Withdraw(View()), fresh=True),
            client.submit(Withdraw(View()), wait="applied"),
        ):
            with pytest.raises(BadArgument, match="no view"):
                await wait

    with_client(test)


# -- a confirmed no ----------------------------------------------------------------------------------------------------


class Book(Command):
    """Book a seat, if `open` is the last thing that the view contains."""

    key = "seat"

    def __init__(self, view: View) -> None:
        self.view = view
        self.builds: list[int] = []

    def build(self, builder: Builder) -> bool:
        self.builds.append(builder.position)
        if self.view.payloads()[-1:] != [b"open"]:
            return builder.decline("there is no seat")
        builder.payload = b"booked"
        return True


@told(with_view, given=3)
async def test_a_no_of_a_view_that_is_behind_is_not_the_answer(client: Client, fake: FakeCluster, view: View) -> None:
    await client.wait_caught_up()
    view.hold = asyncio.Event()
    fake.partitions[0].write(b"open")
    command = Book(view)
    booking = asyncio.create_task(client.submit(command))
    await asyncio.sleep(1)
    assert command.builds == [-1]
    assert not booking.done(), "the view is behind, so a no may be wrong"
    view.hold.set()
    assert await booking == Committed(1, partition=0)
    assert command.builds == [-1, 0]


@told(with_view, given=3)
async def test_a_no_is_built_twice_only_if_the_view_has_moved_on(client: Client, fake: FakeCluster, view: View) -> None:
    fake.partitions[0].write(b"full")
    await client.wait_caught_up()
    command = Book(view)
    outcome = await client.submit(command)
    assert (outcome, command.builds) == (Declined("there is no seat"), [0])
    assert isinstance(outcome, Declined)
    assert (outcome.token, outcome.partition) == (Token(0, 0), 0)
    view.hold = asyncio.Event()
    fake.partitions[0].write(b"still full")
    booking = asyncio.create_task(client.submit_atomic([again := Book(view)]))
    await asyncio.sleep(1)
    view.hold.set()
    outcome = await booking
    assert isinstance(outcome, Declined)
    assert (outcome.token, again.builds) == (Token(0, 1), [0, 1])


@told(with_view, given=3)
async def test_without_an_answer_of_the_owner_there_is_no_no(client: Client, fake: FakeCluster, view: View) -> None:
    await client.wait_caught_up()

    async def silent() -> int:
        raise CannotConnect("the owner is away")

    client._clients[0]._end._ask = silent
    with pytest.raises(NotSent, match="did not become fresh in time: the owner is away"):
        await client.submit(Book(view))
    assert await client.submit(Book(view), fresh=False) == Declined("there is no seat")


def test_a_no_in_a_call_of_the_view_is_not_confirmed() -> None:
    class Asks(View):
        client: Client

        async def apply(self, transaction: Transaction) -> None:
            await super().apply(transaction)
            self.outcome = await asyncio.wait_for(self.client.submit(Book(self)), 10)

    view = Asks()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.client = client
        fake.partitions[0].write(b"full", b"full")
        await until(lambda: view.payloads() == [b"full", b"full"])
        await until(lambda: view.outcome == Declined("there is no seat"))

    with_client(test, view=view)


@told(with_view, given=3)
async def test_a_reason_is_a_text(client: Client, fake: FakeCluster, view: View) -> None:
    class Wrong(Book):
        def build(self, builder: Builder) -> bool:
            return builder.decline(409)  # type: ignore[arg-type]

    with pytest.raises(BadArgument, match="reason of a declined command is a text, not 409"):
        await client.submit(Wrong(view))


# -- a queue for each lock ---------------------------------------------------------------------------------------------


class Add(Command):
    """Count what the view contains, under locks that it declares."""

    key = "sum"

    def __init__(self, view: View, *locks: Lock) -> None:
        self.view = view
        self.locks = locks or [write_lock("sum")]
        self.builds = 0

    def build(self, builder: Builder) -> bool:
        self.builds += 1
        builder.payload = b"%d" % len(self.view.payloads())
        return True


@told(with_view, given=3)
async def test_commands_with_one_write_lock_are_built_once_each(client: Client, fake: FakeCluster, view: View) -> None:
    commands = [Add(view) for _ in range(100)]
    outcomes = await asyncio.gather(*[client.submit(command) for command in commands])
    assert outcomes == [Committed(number) for number in range(100)], "first come, first served"
    assert [command.builds for command in commands] == [1] * 100
    assert fake.partitions[0].payloads == [b"%d" % number for number in range(100)]


@told(with_view, given=3)
async def test_a_command_waits_until_the_view_has_the_one_before(client: Client, fake: FakeCluster, view: View) -> None:
    await client.wait_caught_up()
    view.hold = asyncio.Event()
    assert await client.submit(Add(view)) == Committed(0)
    second, other, blind = Add(view), Add(view, write_lock("another")), Add(view, append_lock("sum"))
    reader = Add(view, read_lock("sum"))
    waiting = asyncio.gather(client.submit(second), client.submit(reader), return_exceptions=True)
    await asyncio.sleep(0)
    assert await client.submit(other) == Committed(1), "it has another lock"
    assert await client.submit(blind) == Committed(2), "its lock is not checked"
    await asyncio.sleep(1)
    assert (second.builds, reader.builds) == (0, 0)
    view.hold.set()
    assert set(await waiting) == {Committed(3), Committed(4)}


@told(with_view, given=3)
async def test_whatever_becomes_of_a_command_the_next_one_goes_on(client: Client, fake: FakeCluster, view: View) -> None:
    await client.wait_caught_up()
    gate = asyncio.Event()

    class Slow(Add):
        async def build(self, builder: Builder) -> bool:  # type: ignore[override]
            await gate.wait()
            return builder.decline("too late")

    class Broken(Add):
        def build(self, builder: Builder) -> bool:
            raise ValueError("broken")

    slow = asyncio.create_task(client.submit(Slow(view)))
    await asyncio.sleep(0.1)
    hasty = asyncio.create_task(client.submit(Add(view), timeout=1))
    gone, broken = asyncio.create_task(client.submit(Add(view))), asyncio.create_task(client.submit(Broken(view)))
    last = asyncio.create_task(client.submit(Add(view)))
    with pytest.raises(NotSent, match="did not decide earlier commands of this client with the same lock in time"):
        await hasty
    gone.cancel()
    await asyncio.sleep(0.1)
    assert not last.done()
    gate.set()
    assert await slow == Declined("too late")
    with pytest.raises(ValueError, match="broken"):
        await broken
    assert await last == Committed(0)


@told(with_view, given=3)
async def test_locks_in_any_order_hold_nobody_up_for_ever(client: Client, fake: FakeCluster, view: View) -> None:
    a, b = write_lock("a"), write_lock("b")
    commands = [Add(view, *locks) for locks in ([a, b], [b, a], [a], [b]) * 10]
    outcomes = await asyncio.gather(*[client.submit_atomic([command]) for command in commands])
    assert {type(outcome) for outcome in outcomes} == {Committed}
    assert {command.builds for command in commands} == {1}


def test_a_queue_forgets_what_the_view_contains() -> None:
    async def work() -> None:
        queue = LockQueue()
        for number in range(10 * PRUNE_AT):
            turn, before = queue.join([write_lock("order", number)], Position(number - 1))
            assert before == []
            turn.set_result(Position(number))
        assert len(queue._last) <= 2 * PRUNE_AT

    asyncio.run(work())


# -- caught up, applied ------------------------------------------------------------------------------------------------


@told(with_view, given=3)
async def test_caught_up_waits_for_what_was_committed_when_it_was_called(
    client: Client, fake: FakeCluster, view: View
) -> None:
    view.hold = asyncio.Event()
    fake.partitions[0].write(b"a", b"b")
    waiting = asyncio.create_task(client.wait_caught_up())
    await asyncio.sleep(1)
    assert not waiting.done()
    view.hold.set()
    await waiting
    assert view.payloads() == [b"a", b"b"]
    view.hold.clear()
    fake.partitions[0].write(b"c")
    with pytest.raises(NotApplied, match="after 2 seconds the view has applied partition 0 up to 1, and not 2 yet"):
        await client.wait_caught_up(0, timeout=2)
    view.hold.set()


@told(with_view, given=3)
async def test_caught_up_lives_through_a_failover(client: Client, fake: FakeCluster, view: View) -> None:
    view.hold = asyncio.Event()
    fake.partitions[0].write(b"a")
    waiting = asyncio.create_task(client.wait_caught_up())
    await asyncio.sleep(1)
    fake.partitions[0].end_session(move=True)
    await until(lambda: client.status()[0].mounts == 2 and client.status()[0].is_ready)
    assert not waiting.done()
    view.hold.set()
    await waiting
    assert view.payloads() == [b"a"]


@told(with_view, given=3)
async def test_an_outcome_is_a_token_that_other_processes_wait_for(client: Client, fake: FakeCluster, view: View) -> None:
    outcome = await client.append(b"a", partition=0)
    assert isinstance(outcome, Committed)
    assert outcome.partition == 0
    other = View()
    async with Client("s0:1", connect=fake.connect, view=other) as there:
        await there.wait_applied(Token.parse(str(outcome.token)))
        assert other.payloads() == [b"a"]
        await there.wait_applied(outcome)
        outcomes = await client.append_many([b"b", b"c"], partition=0)
        last = outcomes[1]
        assert isinstance(last, Committed)
        await there.wait_applied(last)
        assert other.payloads() == [b"a", b"b", b"c"]


@told(with_view, given=3)
async def test_a_token_of_another_cluster_holds_nobody_up(client: Client, fake: FakeCluster, view: View) -> None:
    with pytest.raises(BeyondLog, match="no transaction 7 in partition 0, whose highest committed id is -1"):
        await client.wait_applied(Token(0, 7))
    with pytest.raises(BadArgument, match="no partition 9"):
        await client.wait_applied(Token(9, 7))
    nonsense: Any = Rejected
    with pytest.raises(BadArgument, match="only what is committed"):
        await client.wait_applied(nonsense)


@pytest.mark.parametrize("text", ["", "3", "3-", "-3-4", "3-4-5", "٣-4", "3-4\n", "x" * 1000, f"3-{1 << 63}", None])
def test_what_is_no_token(text: Any) -> None:
    with pytest.raises(BadArgument, match="token"):
        Token.parse(text)


def test_a_token_fits_into_a_header_and_a_group_waits_for_its_last() -> None:
    token = Committed(5, 3, 2).token
    assert token == Token(2, 7) == Token.parse("2-7")
    with pytest.raises(BadArgument, match="does not say in which partition"):
        _ = Committed(5).token


@told(with_view, given=3)
async def test_submit_waits_until_the_view_has_it(client: Client, fake: FakeCluster, view: View) -> None:
    outcome = await client.submit(Increment(view), wait="applied")
    assert isinstance(outcome, Committed)
    assert outcome.is_applied
    assert view.payloads() == [b"1"]
    view.hold = asyncio.Event()
    late = await client.submit(Increment(view), wait="applied", timeout=2)
    assert late == Committed(1), "it is committed, and nobody may think that it is not"
    assert isinstance(late, Committed)
    assert not late.is_applied
    view.hold.set()
    wrong: Any = "seen"
    with pytest.raises(BadArgument, match='"committed" or "applied"'):
        await client.submit(Increment(view), wait=wrong)


# -- cancelled ---------------------------------------------------------------------------------------------------------


@told(with_view, given=3)
async def test_a_submit_that_is_cancelled_after_it_was_sent_is_told_what_became_of_it(
    client: Client, fake: FakeCluster, view: View
) -> None:
    await client.wait_caught_up()
    fake.partitions[0].is_holding = True
    command = Increment(view)
    submitting = asyncio.create_task(client.submit(command))
    await until(lambda: fake.partitions[0].log)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert command.story == []
    fake.partitions[0].commit()
    await until(lambda: len(command.story) == 2)
    assert command.story == [Committed(0), ("applied", 0)]


@told(with_view, given=3)
async def test_a_submit_that_is_cancelled_with_its_outcome_at_the_door_is_told(
    client: Client, fake: FakeCluster, view: View
) -> None:
    command = Increment(view)
    submitting = asyncio.create_task(client.submit(command))
    settle = client._clients[0].outbox.committed

    def committed(frame: Any) -> None:
        settle(frame)
        submitting.cancel()

    client._clients[0].outbox.committed = committed  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await submitting
    await until(lambda: len(command.story) == 2)
    assert command.story == [Committed(0), ("applied", 0)]


@told(with_view, given=3, cluster=FakeCluster(format=1))
async def test_a_group_whose_caller_goes_while_it_is_told_is_told_to_the_end(
    client: Client, fake: FakeCluster, view: View
) -> None:
    first, second = Slow(view), Increment(view)
    submitting = asyncio.create_task(client.submit_atomic([first, second]))
    await first.is_told.wait()
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    await until(lambda: len(second.story) == 2)
    assert second.story == [Committed(0, 2), ("applied", 1)]
    assert first.story == [("applied", 0)]


class Slow(Increment):
    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.is_told = asyncio.Event()

    async def on_outcome(self, outcome: object) -> None:  # type: ignore[override]
        self.is_told.set()
        await asyncio.sleep(100)


@told(with_view, given=3)
async def test_what_was_not_sent_is_taken_back(client: Client, fake: FakeCluster, view: View) -> None:
    await client.wait_caught_up()
    fake.partitions[0].is_holding = True
    before = asyncio.create_task(client.append(b"x", partition=0))
    await until(lambda: fake.partitions[0].log)
    command = Increment(view)
    submitting = asyncio.create_task(client.submit(command))
    await until(lambda: command.builds)
    submitting.cancel()
    fake.partitions[0].is_holding = False
    fake.partitions[0].commit()
    await before
    await client.flush()
    await asyncio.sleep(5)
    assert (command.story, len(fake.partitions[0].log)) == ([], 1)


# -- what makes no sense -----------------------------------------------------------------------------------------------


@told(with_view, given=3)
async def test_a_build_that_forgets_to_return_is_no_refusal(client: Client, fake: FakeCluster, view: View) -> None:
    class Forgets(Increment):
        def build(self, builder: Builder) -> bool:
            super().build(builder)
            return None  # type: ignore[return-value]

    class Says(Increment):
        def build(self, builder: Builder) -> bool:
            return "yes"  # type: ignore[return-value]

    with pytest.raises(BadArgument, match="`build` of Forgets returned None"):
        await client.submit(Forgets(view))
    with pytest.raises(BadArgument, match="`build` of Says returned 'yes'"):
        await client.submit(Says(view))
    assert fake.partitions[0].taken == 0


@told(with_view, given=3)
async def test_a_position_above_the_end_of_the_log_is_refused_and_stops_nobody(
    client: Client, fake: FakeCluster, view: View
) -> None:
    class Claims(Increment):
        def build(self, builder: Builder) -> bool:
            builder.position = 500
            return super().build(builder)

    lock = [write_lock("a")]
    for work in (
        client.append(b"x", partition=0, locks=lock, position=1000),
        client.append_many([b"x"], partition=0, position=1000),
        client.append_atomic([b"x"], partition=0, position=1000),
        client.submit(Claims(view)),
    ):
        with pytest.raises(BadArgument, match=r"the position \d+ is above the end of partition 0"):
            await work
    assert await client.append(b"y", partition=0, locks=lock, position=-1) == Committed(0)
    fake.partitions[0].write(b"elsewhere")
    assert await client.append(b"z", partition=0, locks=lock, position=await client.end_position(0)) == Committed(2)
    assert client.status()[0].mounts == 1


def test_what_a_mount_begins_with_is_waited_for_before_anybody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was just opened knows no end of the log, and while no majority answers it cannot ask for it."""
    ask = FakeServer.high_water_mark

    async def unconfirmed(self: FakeServer, partition: int, *, confirmed: bool = False) -> int:
        if confirmed:
            raise CannotConnect("no majority")
        return await ask(self, partition)

    monkeypatch.setattr(FakeServer, "high_water_mark", unconfirmed)

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.set_partitions([])
        fake.partitions[0].write(b"a", b"b", b"c")
        await client.set_partitions([0])
        assert not client.status()[0].is_ready
        assert await client.append(b"x", partition=0, locks=[write_lock("a")], position=2) == Committed(3)

    with_client(test)


# -- stopped -----------------------------------------------------------------------------------------------------------


def test_who_waits_for_a_partition_that_stops_is_told_why() -> None:
    view = Poisoned()

    async def test(client: Client, fake: FakeCluster) -> None:
        waits = [
            client.wait_caught_up(),
            client.wait_applied(Token(0, 0)),
            client.submit(Increment(view)),
            client.wait_stopped(),
        ]
        fake.partitions[0].write(b"poison")
        for found in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(found, ViewStopped), found

    with_client(test, view=view)


# -- a place for the next one ---------------------------------------------------------------------------------------------


class Told(Command):
    """Whose outcome is told while the view applies it already, so that `on_applied` is called behind that."""

    key = "account"

    def __init__(self, view: View, may_end: asyncio.Event) -> None:
        self.view = view
        self.may_end = may_end
        self.applied: list[int] = []

    def build(self, builder: Builder) -> bool:
        builder.payload = b"deposit"
        return True

    async def on_outcome(self, outcome: object) -> None:
        await self.may_end.wait()

    async def on_applied(self, id: int) -> None:
        await asyncio.sleep(0.1)
        self.applied.append(id)


@told(with_view, given=3, settings=ClientSettings(pending_max=1, submit_seconds=20))
async def test_who_waits_for_a_place_gets_that_of_a_command_that_was_told_last(
    client: Client, fake: FakeCluster, view: View
) -> None:
    may_end = asyncio.Event()
    first, second = Told(view, may_end), Told(view, may_end)
    telling = [asyncio.create_task(client.submit(one)) for one in (first, second)]
    await until(lambda: len(view.payloads()) == 2)
    may_end.set()
    assert await asyncio.gather(*telling) == [Committed(0), Committed(1)]
    assert first.applied == []
    assert await client.append(b"next", partition=0, timeout=5) == Committed(2)
    await until(lambda: (first.applied, second.applied) == ([0], [1]))


def test_a_call_of_the_view_waits_for_no_place_of_a_command_that_waits_for_the_view() -> None:
    class Deposit(Command):
        key = "account"

        def build(self, builder: Builder) -> bool:
            builder.payload = b"deposit"
            return True

        def on_applied(self, id: int) -> None:
            applied.append(id)

    class Replies(View):
        client: Client

        async def apply(self, transaction: Transaction) -> None:
            if transaction.payload == b"deposit":
                await asyncio.wait_for(self.client.append(b"reply", partition=0), 10)
            await super().apply(transaction)

    view, applied = Replies(), list[int]()

    async def test(client: Client, fake: FakeCluster) -> None:
        view.client = client
        await client.submit(Deposit())
        await until(lambda: view.payloads() == [b"deposit", b"reply"] and applied == [0])
        assert not client.has_pending

    with_client(test, view=view, settings=ClientSettings(pending_max=1, submit_seconds=20))

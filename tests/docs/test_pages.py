"""The Python of the pages for applications does what the pages say, against a cluster in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from tests.docs.page import DOCS, blocks, page
from waltzd import BlockingClient, Committed, Declined, Rejected, Unknown, append_lock
from waltzd.errors import EventUnknown, NotSent
from waltzd.sql import sqlite
from waltzd.testing import BlockingCluster, LocalCluster

ROOT = DOCS.parent


def test_the_python_of_every_page_is_run() -> None:
    shown = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    shown = {name for name in shown if blocks(name)}
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    run = {name for name in shown for text in tests if re.search(rf'page\("{name}"|/ "{name}.md"', text)}
    assert shown - run == set(), "write a test in tests/docs that calls what the page shows"
    assert len(shown) > 15


def test_the_idea_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("../README")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("Committed(id=0")
    assert re.match(r"Rejected\(.*CONFLICT.*conflict_id=0", second)
    assert third.startswith("Committed(id=1")


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.01)


# -- keys, locks, groups -----------------------------------------------------------------------------------------------


def test_keys_and_locks() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/keys-and-locks") as shown:
            async with cluster.client(view=Positions()) as client:
                sold: set[tuple[str, int]] = set()
                outcomes = await asyncio.gather(*[client.submit(shown.Sell(sold, "Hamlet", 12)) for _ in range(3)])
                assert sum(isinstance(one, Committed) for one in outcomes) >= 1
                sold.add(("Hamlet", 12))
                assert await client.submit(shown.Sell(sold, "Hamlet", 12)) == Declined("the seat is sold")
                balances = {1: 30}
                assert isinstance(await client.submit(shown.Pay(balances, "bank", 1, 2, 30)), Committed)
                assert await client.submit(shown.Pay(balances, "bank", 2, 1, 30)) == Declined("not enough money")
                assert all(isinstance(one, Committed) for one in await shown.write(client))
                assert (await client.read(1, await client.end_position(1))).partition == 1

    LocalCluster().run(story)


class Positions:
    """The smallest view."""

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}

    def position(self, partition: int) -> int:
        return self.positions.get(partition, -1)

    def apply(self, transaction: Any) -> None:
        self.positions[transaction.partition] = transaction.id


def test_groups() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/groups") as shown:
            async with cluster.client(view=Positions()) as client:
                outcome = await shown.withdraw_with_fee(client, {7: 100}, 7)
                assert outcome.count == 2
                records = await cluster.log(client.partition_of(7))
                assert [record.payload for record in records] == [b"7 -30", b"7 -1"]
                assert await shown.withdraw_with_fee(client, {7: 3}, 7) == Declined("not enough money")

    LocalCluster().run(story)


def test_idempotency() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/idempotency") as shown:
            orders, others = shown.Orders(), shown.Orders()
            async with cluster.client(view=orders) as client, cluster.client(view=others) as other:
                answers = await asyncio.gather(
                    *[shown.place(client, orders, "ada", "k1", "tea") for _ in range(3)],
                    *[shown.place(other, others, "ada", "k1", "tea") for _ in range(3)],
                )
                assert [answer["goods"] for answer in answers] == ["tea"] * 6
                partition = client.partition_of("ada")
                assert len(await cluster.log(partition)) == 1
                assert [await shown.pay(other, "ada", "k3", 5) for _ in range(2)] == [Committed(1)] * 2
                assert await shown.pay(client, "ada", "k3", 5) == Committed(1)
            silent = SimpleNamespace(submit=lambda command: unknown())
            assert await shown.place(silent, orders, "ada", "k2", "tea") is None

    async def unknown() -> Unknown:
        return Unknown()

    LocalCluster().run(story)


def test_large_payloads(tmp_path: Path) -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/large-payloads") as shown:
            async with cluster.client() as client:
                outcome = await shown.attach(client, tmp_path, 7, b"a long document")
                assert await shown.attach(client, tmp_path, 7, b"a long document") != outcome
                (stored,) = tmp_path.iterdir()
                payload = (await client.read(outcome.partition, outcome.id)).payload
                assert shown.load(tmp_path, payload) == b"a long document"
                stored.write_bytes(b"another")
                with pytest.raises(ValueError, match="is damaged"):
                    shown.load(tmp_path, payload)

    LocalCluster().run(story)


def test_event_boundaries() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/event-boundaries", cluster) as shown:
            async with cluster.client() as client:
                store = shown.EventStore(client, partition=0)
                defined = await asyncio.gather(*[shown.define_course(store, 7, 3) for _ in range(4)])
                assert sorted(defined) == [False, False, False, True]
                assert await shown.take_part(",".join(cluster.servers)) == "joined"
                assert await shown.join(store, 7, 3) == "is a member"
                found = await asyncio.gather(*[shown.join(store, 7, number) for number in range(10, 18)])
                assert sorted(found) == ["joined"] * 2 + ["the course is full"] * 6
                for number in range(20, 32):
                    assert await shown.define_course(store, number, 100)
                found = await asyncio.gather(*[shown.join(store, number, 4) for number in range(20, 32)])
                assert sorted(found) == ["joined"] * 10 + ["the student has ten courses"] * 2
                assert len(await shown.members_of(store, 7, 3)) == 3

    LocalCluster().run(story)


def test_event_sourcing(blocking_waltz_cluster: BlockingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = partial(BlockingClient, connect=blocking_waltz_cluster.connect)
    monkeypatch.setattr("waltzd.eventsourcing.BlockingClient", connected)
    with page("event-sourcing") as shown:
        servers = ",".join(blocking_waltz_cluster.servers)
        with closing(shown.bank(servers)) as one, closing(shown.bank(servers)) as other:
            account = one.open_account("ann")
            one.deposit(account, 1000)
            with ThreadPoolExecutor(4) as threads:
                tries = [threads.submit(bank.withdraw, account, 300) for bank in (one, other) for _ in range(2)]
            assert sorted(str(one.exception()) for one in tries) == ["None"] * 3 + ["ann has only 100 cents"]
            assert one.cents(account) == other.cents(account) == 100
            expected = ["Account.Opened", "Account.Deposited", *["Account.Withdrawn"] * 3]
            assert [topic.rpartition(":")[2] for topic in shown.statement(other, 5)] == [
                one.rpartition(".")[2] for one in expected
            ]
            for _ in range(60):
                one.deposit(account, 1)
            assert other.cents(account) == 160


def test_several_applications() -> None:
    async def story(cluster: LocalCluster) -> None:
        cluster.set_channels({"orders": "0-1"})
        with page("how-to/several-applications") as shown:
            async with cluster.client(view=Positions(), partitions="orders") as client:
                assert all([await shown.place(client, {}, f"customer {number}") for number in range(8)])
            assert [len(await cluster.log(partition)) > 0 for partition in range(4)] == [True, True, False, False]
            async with cluster.client(serializer=shown.SHOP) as client:
                await client.append(shown.Placed("ann"), partition=3)
            async with cluster.client() as other:
                await other.append(b"of another application", partition=3)
            async with cluster.client(serializer=shown.SHOP) as client:
                assert [(one.kind, one.value) async for one in client.scan(3)] == [(1, shown.Placed("ann"))]

    LocalCluster(partitions=4).run(story)


# -- services ----------------------------------------------------------------------------------------------------------


@pytest.mark.waltz(partitions=2)
def test_django(blocking_waltz_cluster: BlockingCluster, tmp_path: Path) -> None:
    from django.conf import settings
    from django.test import RequestFactory

    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["testserver"], ROOT_URLCONF=(), SECRET_KEY="of a test")
    requests = RequestFactory()
    with page("how-to/django", blocking_waltz_cluster) as shown:
        waltz = shown.Waltz(",".join(blocking_waltz_cluster.servers), str(tmp_path / "names.db"))
        with closing(waltz):
            answers = [
                shown.take(requests.put("/names/ada", data=who, content_type="text/plain"), "ada", waltz).status_code
                for who in ("ann", "bob")
            ]
        assert answers == [201, 409]


@pytest.mark.waltz(partitions=2)
def test_web_service(blocking_waltz_cluster: BlockingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = blocking_waltz_cluster
    monkeypatch.setenv("WALTZ_SERVERS", ",".join(cluster.servers))
    with page("how-to/web-service", cluster) as shown:
        with TestClient(shown.app) as http:
            assert [http.put("/names/ada").status_code for _ in range(2)] == [201, 409]
            client = shown.app.state.client
            answers = {}
            for outcome in (Rejected(1), Unknown(), NotSent("the owner is away")):  # type: ignore[arg-type]

                async def submit(command: Any, *, timeout: float, outcome: Any = outcome) -> Any:
                    if isinstance(outcome, Exception):
                        raise outcome
                    return outcome

                shown.app.state.client = SimpleNamespace(submit=submit)
                answers[type(outcome)] = http.put("/names/ben").status_code
            shown.app.state.client = client
            assert answers == {Rejected: 503, Unknown: 504, NotSent: 503}
        with ExitStack() as ends:  # a worker of Flask keeps its client until it ends; this process goes on
            make = shown.BlockingClient
            monkeypatch.setattr(
                shown, "BlockingClient", lambda *how, **more: ends.enter_context(closing(make(*how, **more)))
            )
            flask = shown.serve(cluster.servers).test_client()
            assert [flask.put(f"/names/{name}").status_code for name in ("ada", "eve", "eve")] == [409, 201, 409]


def test_health(blocking_waltz_cluster: BlockingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = blocking_waltz_cluster
    monkeypatch.setenv("WALTZ_SERVERS", ",".join(cluster.servers))
    with page("how-to/health", cluster) as shown, TestClient(shown.app) as http, cluster.client() as writer:
        writer.append(b"hello", partition=0)
        assert http.get("/livez").json() == "alive"
        for _ in range(6000):
            ready = http.get("/readyz")
            if ready.status_code == 200 and ready.json()[0]["position"] == 0:
                break
        assert ready.json()[0]["lag"] == 0

        async def live() -> None:
            async with cluster.asyncio_client(view=shown.Count()) as client:
                await shown.work_while_it_lives(client, asyncio.sleep(0))

        asyncio.run(live())


@pytest.mark.waltz(partitions=2)
def test_read_your_writes(blocking_waltz_cluster: BlockingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of the page is tried with a database in test_sql_pages.py."""
    cluster = blocking_waltz_cluster
    monkeypatch.setenv("WALTZ_SERVERS", ",".join(cluster.servers))
    with page("how-to/read-your-writes", cluster, after="how-to/sql-views", only=range(2)) as shown:
        with TestClient(shown.app) as here:
            cluster.suspend_feed()
            written = here.post("/notes?text=hello")
            seen = {"Waltz-Seen": written.headers["Waltz-Seen"]}
            assert here.get("/notes", headers=seen).status_code == 503
            cluster.resume_feed()
            with TestClient(shown.app) as there:
                assert there.get("/notes", headers=seen).json() == ["hello"]
                for nonsense in ("nonsense", "0-999"):
                    assert there.get("/notes", headers={"Waltz-Seen": nonsense}).status_code == 400

        async def note() -> list[str]:
            notes = shown.Notes()
            async with cluster.asyncio_client(view=notes) as client:
                return await shown.note(client, notes, "again")  # type: ignore[no-any-return]

        assert "again" in asyncio.run(note())


def test_observe() -> None:
    """What its client tells is tried in tests/unit/waltzd/observe."""
    with page("how-to/observe") as shown:
        assert prometheus_client.REGISTRY.get_sample_value("waltz_client_retries_total", {"client": "client"}) == 0
        asyncio.run(shown.client.close())


def test_one_instance() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/one-instance", cluster) as shown:
            async with shown.only_one(cluster.servers) as client:
                assert isinstance(await client.append(b"hello", partition=0), Committed)

    LocalCluster().run(story)


def test_follow_the_log(tmp_path: Path) -> None:
    added: list[bytes] = []

    async def story(cluster: LocalCluster) -> None:
        with page("how-to/follow-the-log", cluster) as shown:
            async with cluster.client() as client:
                await client.append_many([b"one", b"two"], partition=0)
                for expected in (2, 3):
                    following = asyncio.create_task(
                        shown.follow(cluster.servers, lambda one: added.append(one.payload), tmp_path / "position")
                    )
                    await until(partial(is_enough, expected, following))
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    await client.append(b"three", partition=0)
                assert set(added) == {b"one", b"two", b"three"}
                assert await shown.count_since(client, 0) == 4
                assert await shown.statement(client) == []
                await client.append(b"a transfer", locks=[append_lock("account", 17)])
                assert await shown.statement(client) == [b"a transfer"]
            assert await asyncio.to_thread(read, shown, cluster) == ["one", "two", "three", "three"]

    def is_enough(expected: int, following: asyncio.Task[Any]) -> bool:
        return len(added) >= expected or following.done()

    def read(shown: Any, cluster: LocalCluster) -> list[str]:
        with BlockingClient(cluster.servers, connect=cluster.connect) as client:
            return shown.lines(client)  # type: ignore[no-any-return]

    LocalCluster().run(story)


# -- views -------------------------------------------------------------------------------------------------------------


def test_outbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[tuple[str, str]] = []

    async def story(cluster: LocalCluster) -> None:
        with page("how-to/outbox", cluster) as shown:
            working = asyncio.create_task(shown.main(cluster.servers, lambda address, key: sent.append((address, key))))
            async with cluster.client() as client:
                for name in ("ada", "ben"):
                    await client.append(json.dumps({"mail": name}).encode(), partition=0)
            await until(lambda: len(sent) == 2 or working.done())
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            assert sent == [("ada", "0:0"), ("ben", "0:1")]

    LocalCluster().run(story)


def test_a_transfer_over_two_partitions_is_done_once_also_two_hours_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is repeated when the log has forgotten every idempotency key; and the account that was missing is there."""
    monkeypatch.chdir(tmp_path)

    async def story(cluster: LocalCluster) -> None:
        with page("how-to/transfer", cluster) as shown:
            bank = shown.Bank()
            cluster.set_time(datetime.now(UTC) - timedelta(hours=2))
            async with cluster.client(view=bank) as client:
                names = [f"account {number}" for number in range(40)]
                payer = names[0]
                payee = next(name for name in names if client.partition_of(name) != client.partition_of(payer))
                await shown.open_account(client, payer, 100)
                await shown.open_account(client, payee, 0)
                await shown.prepare(client)
                clearing = asyncio.create_task(shown.clear(cluster.servers))

                def transfer(name: str, to: str, amount: int) -> dict[str, Any]:
                    return {"id": name, "from": payer, "to": to, "amount": amount}

                async def debit(it: dict[str, Any]) -> Any:
                    return await client.submit(shown.Step(bank, shown.DEBIT, it))

                first, second = transfer("t1", payee, 30), transfer("t2", "nobody", 20)
                assert isinstance(await debit(first), Committed)
                assert isinstance(await debit(second), Committed)
                await until(lambda: {("refund", "t2"), ("arrival", "t1")} <= bank.decided or clearing.done())
                assert bank.balances == {payer: 70, payee: 30}
                assert await debit(transfer("t3", payee, 71)) == Declined("not enough money")
                clearing.cancel()
                await asyncio.gather(clearing, return_exceptions=True)

                cluster.set_time(None)
                await shown.open_account(client, "nobody", 0)
                again = Delivered(shown.DEBIT, first), Delivered(shown.DEBIT, second), Delivered(shown.BOUNCE, second)
                late = shown.Bank()  # of a process that has just started
                async with cluster.client(view=late) as other:
                    for delivery in again:
                        await shown.follow_up(other, late, delivery)
                    assert await debit(first) == Declined("done before")
                assert bank.balances == {payer: 70, payee: 30, "nobody": 0}

    LocalCluster().run(story)


class Delivered:
    """A delivery that comes once more."""

    def __init__(self, header: int, transfer: dict[str, Any]) -> None:
        self.kind, self.payload = header, json.dumps(transfer).encode()


def test_event_versions() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/event-versions") as shown:
            purposes = shown.Purposes()
            async with cluster.client(serializer=shown.FIRST) as old:
                await shown.withdraw(old)
                async with cluster.client(view=purposes, serializer=shown.SECOND) as new:
                    outcome = await new.append(shown.WithdrawnFor("alice", 700, "rent"), key="alice")
                    assert isinstance(outcome, Committed)
                    await new.wait_applied(outcome)
                    assert purposes.purposes == ["unknown", "rent"]
                with pytest.raises(EventUnknown):
                    (await old.read(old.partition_of("alice"), 1)).value  # noqa: B018

    LocalCluster().run(story)


def test_your_own_view(tmp_path: Path) -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/your-own-view") as shown:
            file = tmp_path / "index.json"
            for text in (b"to be or not", b"to be"):
                index = shown.Index(file)
                async with cluster.client(view=index) as client:
                    outcome = await client.append(text, partition=0)
                    assert isinstance(outcome, Committed)
                    await client.wait_applied(outcome)
            assert shown.Index(file).words["be"] == ["0:0", "0:1"]
            index.apply(await only(cluster, 1))
            assert index.position(0) == 1

    async def only(cluster: LocalCluster, id: int) -> Any:
        async with cluster.client() as client:
            return await client.read(0, id)

    LocalCluster().run(story)

    async def elsewhere(cluster: LocalCluster) -> None:
        with page("how-to/your-own-view") as shown:
            index = shown.Index(tmp_path / "index.json")
            with pytest.raises(ValueError, match="filled from another cluster"):
                async with cluster.client(view=index):
                    pass
            index.cluster = ""
            async with cluster.client(view=index) as client:
                await client.append(b"x", partition=3)
                await client.append(b"y", partition=1)
                await until(lambda: (index.position(3), index.position(1)) == (0, 0))
            index.apply(await only_in(cluster))

    async def only_in(cluster: LocalCluster) -> Any:
        async with cluster.client() as client:
            return await client.read(3, 0)

    LocalCluster().run(elsewhere)


def test_throughput() -> None:
    async def story(cluster: LocalCluster) -> None:
        with page("how-to/throughput", cluster) as shown:
            largest = shown.Largest()
            async with shown.watch(cluster.servers, largest) as client:
                assert await shown.load(client, [b"x" * size for size in (1, 900, 20)]) == 3
                await until(lambda: largest.position(0) == 2)
            assert largest.payload == b"x" * 900

    LocalCluster().run(story)


def test_rolling_deployment(tmp_path: Path) -> None:
    engine = sqlite(str(tmp_path / "words.db"))

    async def story(cluster: LocalCluster) -> None:
        with page("how-to/rolling-deployment") as shown:
            old, new = shown.view_of(shown.Old, engine), shown.view_of(shown.New, engine)
            async with cluster.client() as writer:
                async with cluster.client(view=old):
                    await old.wait(await committed(writer, b"hello"), partition=0, timeout=60)
                    async with cluster.client(view=new):
                        await new.wait(await committed(writer, b"world"), partition=0, timeout=60)
                        await old.close()
                async with cluster.client(view=new):
                    await new.wait(await committed(writer, b"hola es"), partition=0, timeout=60)
            await new.close()
        with engine.connect() as connection:
            found = connection.execute(sa.text("SELECT word, language FROM words ORDER BY word")).all()
        assert [tuple(row) for row in found] == [("hello", "?"), ("hola", "es"), ("world", "?")]

    async def committed(writer: Any, payload: bytes) -> Committed:
        outcome = await writer.append(payload, partition=0)
        assert isinstance(outcome, Committed)
        return outcome

    LocalCluster().run(story)
    engine.dispose()


def test_retention() -> None:
    with page("how-to/retention") as shown:
        keys = shown.Keys()
        payload = shown.sealed(keys, "p-17", "12 High Street")
        assert b"High" not in payload
        assert shown.opened(keys, payload) == "12 High Street"
        keys.forget("p-17")
        assert shown.opened(keys, payload) is None
        keys.of("p-17")
        assert shown.opened(keys, payload) is None, "a new key does not open what was sealed with the old one"


@pytest.mark.waltz(partitions=2)
def test_testing(waltz_cluster: LocalCluster) -> None:
    """The tests that the page shows pass."""
    with page("how-to/testing") as shown:
        shown.test_a_lock_that_fails_is_tried_again(waltz_cluster)
        with BlockingCluster() as cluster:
            shown.test_what_is_written_while_the_owner_dies(cluster)


# -- consumer groups ----------------------------------------------------------------------------------------------------


def test_consumer_groups() -> None:
    async def story(cluster: LocalCluster) -> None:
        sent: list[tuple[bytes, str]] = []
        with page("groups", cluster) as shown:
            async with cluster.client() as client:

                async def send(payload: bytes, key: str) -> None:
                    sent.append((payload, key))

                await client.append(b"last year", partition=0)
                await shown.prepare(client)
                await shown.prepare(client)
                mailing = asyncio.create_task(shown.mail(cluster.servers, send))
                await client.append_many([b"one", b"two"], partition=0)
                await until(lambda: len(sent) == 2 or mailing.done())
                await cancelled(mailing)
                assert sorted(sent) == [(b"one", "mailer:0:1"), (b"two", "mailer:0:2")]
                await client.append(b"three", partition=1)
                await asyncio.to_thread(shown.mail_some, cluster.servers, lambda *call, key: sent.append((*call, key)), 1)
                assert sent[-1] == (b"three", "mailer:1:0")

                done: list[bytes] = []
                stopping: list[Callable[[], None]] = []

                async def resize(payload: bytes) -> None:
                    done.append(payload)

                await client.create_group("thumbnails", mode="queue")
                await client.append(b"", partition=1)
                working = asyncio.create_task(shown.work(client, resize, stopping))
                await until(lambda: len(done) == 4 or working.done())
                stopping[0]()
                await working
                await client.append(b"four", partition=0)
                await asyncio.to_thread(on_threads, shown, cluster)

                index = Index()
                keeping = asyncio.create_task(shown.keep_index(client, index))
                await until(lambda: len(index.added) == 6 or keeping.done())
                await cancelled(keeping)
                assert [id for partition, id, _ in index.added if partition == 0] == [0, 1, 2, 3]

    class Index:
        def __init__(self) -> None:
            self.added: list[tuple[int, int, bytes]] = []

        async def add_all(self, rows: list[tuple[int, int, bytes]]) -> None:
            self.added += rows

    async def cancelled(task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def on_threads(shown: Any, cluster: LocalCluster) -> None:
        with BlockingClient(cluster.servers, connect=cluster.connect, partitions=[]) as client:
            shown.work_on_threads(client, lambda payload: "the last one" if payload == b"four" else "")

    LocalCluster(partitions=2).run(story)

"""Who may change a replica: only the owner of the promised session, in its latest contact, and no session from nowhere."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.sample import KEY, blank_disk, first_ids, open_directory, run_for
from tests.unit.keeping import with_calls
from waltzd.disk.seam import Buffer
from waltzd.disk.simulated import SimDisk
from waltzd.errors import CannotConnect, NoSuchPartition, WaltzError
from waltzd.errors.operations import NotOpened, SessionTooFar, StaleSession
from waltzd.format.key_index import LockQuery
from waltzd.format.layout import FileHeader
from waltzd.protocol.address import Address
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.peers import Contact, RecordsFrame, secret_of
from waltzd.protocol.timelines import NEVER_FORKED
from waltzd.storage.archiver import Archiver
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.hard_state import FIRST_SESSION_MAX, SESSIONS_MAX
from waltzd.storage.replica.partition import Partition
from waltzd.storage.stream_port import StreamPort
from waltzd.wire.frames import Kind
from waltzd.wire.storages import AppendStream, connect
from waltzd.wire.streams import FileSender, Hello

SESSION = 7
SECRET, OTHER = secret_of(b"a server", 0, SESSION), secret_of(b"another server", 0, SESSION)


def ten_records() -> SimDisk:
    """Written in session 1, and killed."""
    disk = blank_disk()
    replica = open_directory(disk).create_partition(0)
    replica.open_session(1)
    replica.set_low_mark(1, -1)
    replica.append(1, [run_for(0, 0, 10)], -1)
    disk.kill()
    return disk


def opened(session: int = SESSION) -> Partition:
    replica = open_directory(ten_records()).partition(0)
    replica.open_session(session)
    return replica


# -- an earlier contact ------------------------------------------------------------------------------------------------


LATE: dict[str, Callable[[Partition, int], object]] = {
    "append": lambda replica, contact: replica.append(SESSION, [run_for(0, 10, 3)], -1, contact),
    "truncate": lambda replica, contact: replica.truncate(SESSION, 5, contact),
    "set low mark": lambda replica, contact: replica.set_low_mark(SESSION, 9, contact),
    "begin a file": lambda replica, contact: replica.begin_installation(SESSION, 10, 0, contact),
}


@pytest.mark.parametrize("call", LATE)
def test_a_call_of_an_earlier_contact_comes_late(call: str) -> None:
    replica = opened()
    early = replica.status().contact
    replica.open_session(SESSION)
    before = replica.status()
    with pytest.raises(NotOpened, match=r"opened again|was announced"):
        LATE[call](replica, early)
    assert replica.status() == before
    LATE[call](replica, before.contact)


def test_contacts_of_an_earlier_process_are_over() -> None:
    disk = ten_records()
    replica = open_directory(disk).partition(0)
    early = replica.open_session(SESSION).contact
    disk.kill()
    replica = open_directory(disk).partition(0)
    assert replica.open_session(SESSION).contact != early
    with pytest.raises(NotOpened, match=r"opened again|was announced"):
        replica.truncate(SESSION, 5, early)


def file_of(replica: Partition, last_id: int) -> Any:
    """A proven segment file that was begun now, with the ids behind the log's end."""
    first_id = replica.last_id + 1
    installation = replica.begin_installation(SESSION, first_id, 0)
    installation.write(FileHeader(created_ms=0, key=KEY, partition=0, first_id=first_id).encode())
    installation.write(bytes(run_for(0, first_id, last_id - first_id + 1).data))
    installation.prove()
    return installation


BETWEEN: dict[str, Callable[[Partition], object]] = {
    "it was opened again": lambda replica: replica.open_session(SESSION),
    "the session has begun": lambda replica: replica.set_low_mark(SESSION, 15),
    "it was cut": lambda replica: replica.truncate(SESSION, 8),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_a_file_that_was_begun_before_does_not_get_its_place(what: str) -> None:
    replica = opened()
    installation = file_of(replica, 29)
    BETWEEN[what](replica)
    last_id = replica.last_id
    with pytest.raises(NotOpened, match=r"opened again|was announced"):
        replica.install(SESSION, installation)
    installation.abandon()
    assert replica.last_id == last_id <= 9
    assert replica.open_session(SESSION + 1).is_sound


def test_catching_up_in_the_session_that_has_begun_goes_on() -> None:
    replica = opened()
    replica.set_low_mark(SESSION, 9)
    assert replica.install(SESSION, file_of(replica, 29)).last_id == 29


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_an_abandoned_connection_ends_with_its_contact() -> None:
    """The sender has closed it; the replica was opened again, has begun, and only then is the file proven."""
    failed: list[BaseException] = []

    async def story(calls: StorageCalls, turns: list[str]) -> None:
        gate = asyncio.Event()
        changed: Any = calls
        right = changed._run_writing

        async def slow(function: Any, *arguments: Any) -> Any:
            if getattr(function, "__name__", "") == "prove":
                await gate.wait()
            return await right(function, *arguments)

        changed._run_writing = slow
        first = await calls.open_session(0, SESSION, 3, secret=SECRET)
        port = StreamPort(calls, Address("127.0.0.1", 0), None)
        await port.start(failed.append)

        async def pieces() -> AsyncIterator[Buffer]:
            yield FileHeader(created_ms=0, key=KEY, partition=0, first_id=10).encode()
            yield bytes(run_for(0, 10, 20).data)  # more than will be decided

        try:
            hello = Hello(KEY, 0, SESSION, Contact(first.contact, SECRET), first_id=10, file_bytes=0)
            connection = await connect("127.0.0.1", port.address.port, Kind.INSTALL, hello.encode(), tls=None, name=None)
            with pytest.raises(CannotConnect):
                await FileSender(connection, receiver="it", seconds=0.2).send(pieces())
            connection.lose(CannotConnect("the file was given up here"))
            assert (await calls.open_session(0, SESSION, 3, secret=SECRET)).last_id == 9
            assert (await calls.set_low_mark(0, SESSION, 15, contact=Contact(0, SECRET))).last_id == 9
            gate.set()
            await until(lambda: "Installation.abandon" in turns)
            assert calls.directory.partition(0).last_id == 9
        finally:
            await port.stop(0)

    disk = ten_records()
    with_calls(disk, story)
    assert (failed, first_ids(disk)[-1] <= 9) == ([], True)


def test_an_append_stream_of_the_same_session_ends_when_the_replica_is_opened_again() -> None:
    failed: list[BaseException] = []

    async def story(calls: StorageCalls, _: list[str]) -> None:
        contact = (await calls.open_session(0, SESSION, 3, secret=SECRET)).contact
        await calls.set_low_mark(0, SESSION, 9, contact=Contact(contact, SECRET))
        port = StreamPort(calls, Address("127.0.0.1", 0), None)
        await port.start(failed.append)
        try:
            for said in (contact, 0):
                hello = Hello(KEY, 0, SESSION, Contact(said, SECRET))
                stream = AppendStream("127.0.0.1", port.address.port, hello, tls=None, name=None)
                last_id = calls.directory.partition(0).last_id + 1
                await stream.send(run_for(0, last_id, 1), 9)
                assert await stream.receive() == last_id
                contact = (await calls.open_session(0, SESSION, 3, secret=SECRET)).contact
                with pytest.raises(NotOpened, match=r"opened again|was announced"):
                    async with asyncio.timeout(10):  # a stream that is left open says nothing
                        await stream.receive()
                assert calls.directory.partition(0).last_id == last_id
        finally:
            await port.stop(0)

    with_calls(ten_records(), story)
    assert failed == []


# -- who does not know the secret --------------------------------------------------------------------------------------


def test_a_secret_is_of_one_owner_one_partition_and_one_session() -> None:
    said = {secret_of(key, number, session) for key in (b"a", b"b") for number in (0, 1) for session in (7, 8)}
    assert len(said) == 8


class Forgery:
    """An append stream with one record that its owner never wrote."""

    def __init__(self) -> None:
        self.frames = [RecordsFrame(run_for(0, 10, 1), 9)]

    async def receive(self) -> RecordsFrame | None:
        return self.frames.pop() if self.frames else None

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        """Ignore the taker: the frame is received."""

    @property
    def may_post(self) -> bool:
        return False

    def post(self, durable_id: int) -> None:
        raise AssertionError("it may not")

    async def send(self, durable_id: int) -> None:
        raise AssertionError(f"it is acknowledged up to {durable_id}")

    async def refuse(self, error: WaltzError) -> None:
        return None


async def _all(things: Any) -> list[Any]:
    return [thing async for thing in things]


async def _nothing() -> AsyncIterator[Buffer]:
    raise AssertionError("a file is asked for")
    yield b""


FORKED = NEVER_FORKED.forked(identity=UUID(int=2), fork=5, session=SESSION, cause="rescue", began="now", who="me")

FORGED: dict[str, Callable[[StorageCalls, Contact], Any]] = {
    "append": lambda calls, contact: calls.append(0, SESSION, Forgery(), contact=contact),
    "truncate": lambda calls, contact: calls.truncate(0, SESSION, 5, contact=contact),
    "set low mark": lambda calls, contact: calls.set_low_mark(0, SESSION, 9, contact=contact),
    "fork": lambda calls, contact: calls.fork(0, SESSION, FORKED, contact=contact),
    "trim": lambda calls, contact: calls.trim(0, SESSION, 5, contact=contact),
    "install": lambda calls, contact: calls.install_segment(0, SESSION, 10, 0, _nothing(), contact=contact),
    "fetch": lambda calls, contact: _all(calls.fetch_segment(0, SESSION, 0, contact=contact)),
    "read": lambda calls, contact: _all(calls.read(0, SESSION, 0, 9, 0, contact=contact)),
    "read whole": lambda calls, contact: _all(calls.read_whole(0, SESSION, 0, 9, 0, contact=contact)),
    "find marks": lambda calls, contact: calls.find_marks(
        0, SESSION, LockQuery(lock=1, last_id=9, limit=9), contact=contact
    ),
    "read locks": lambda calls, contact: calls.read_locks(0, SESSION, 9, 100, contact=contact),
    "find a time": lambda calls, contact: calls.find_time(0, SESSION, 1, contact=contact),
    "segments": lambda calls, contact: asyncio.to_thread(calls.segments, 0, SESSION, contact=contact),
    "archive": lambda calls, contact: calls.archiver.add(0, SESSION, Archived(), contact=contact),
    "back up": lambda calls, contact: calls.archiver.back_up(0, SESSION, Archived(), 9, 0, contact=contact),
    "check": lambda calls, contact: calls.archiver.check(0, SESSION, Archived(), 0, contact=contact),
}


def test_no_call_that_takes_a_contact_is_left_out() -> None:
    asked = {
        name
        for calls in (StorageCalls, Archiver)
        for name, call in vars(calls).items()
        if not name.startswith("_") and inspect.isfunction(call) and "contact" in inspect.signature(call).parameters
    }
    tried = {name for forged in FORGED.values() for name in forged.__code__.co_names}
    assert asked - {"readable"} <= tried


@pytest.mark.parametrize("when", ["while the owner is there", "after a restart"])
@pytest.mark.parametrize("call", FORGED)
def test_who_does_not_show_the_secret_of_the_session_may_nothing_in_it(call: str, when: str) -> None:
    async def story(calls: StorageCalls, _: list[str]) -> None:
        contact = 0
        if when == "while the owner is there":
            contact = (await calls.open_session(0, SESSION, 3, secret=SECRET)).contact
        else:
            await calls.fence(0, SESSION)  # as a restart leaves it: promised, and nobody has opened it
        before = calls.directory.partition(0).status()
        shown = [Contact(number, secret) for number in (0, contact) for secret in (b"", bytes(32), OTHER)]
        for forged in shown if contact else [*shown, Contact(0, SECRET)]:
            with pytest.raises(NotOpened, match="show the secret"):
                await FORGED[call](calls, forged)
        assert calls.directory.partition(0).status() == before

    with_calls(ten_records(), story)


def test_a_session_is_opened_again_by_its_owner_only_and_whoever_wants_more_fences_it_visibly() -> None:
    async def story(calls: StorageCalls, _: list[str]) -> None:
        first = await calls.open_session(0, SESSION, 3, secret=SECRET)
        with pytest.raises(StaleSession, match="by another owner"):
            await calls.open_session(0, SESSION, 3, caller=5, secret=OTHER)
        assert (await calls.set_low_mark(0, SESSION, 9, contact=Contact(first.contact, SECRET))).session == SESSION
        assert (await calls.open_session(0, SESSION, 3, caller=6, secret=SECRET)).session == SESSION
        assert (await calls.open_session(0, SESSION + 1, 3, secret=OTHER)).promised_session == SESSION + 1
        with pytest.raises(StaleSession):
            await calls.open_session(0, SESSION, 3, secret=SECRET)

    with_calls(ten_records(), story)


# -- sessions from nowhere ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [7 + SESSIONS_MAX + 1, (1 << 63) - 1])
def test_a_session_far_above_every_known_one_is_refused_and_nothing_changes(session: int) -> None:
    replica = opened(7)
    before = replica.status()
    with pytest.raises(SessionTooFar):
        replica.open_session(session)
    assert replica.status() == before
    replica.set_low_mark(7, 9)
    replica.open_session(7 + SESSIONS_MAX)
    with pytest.raises(StaleSession):
        replica.open_session(7)


def test_a_new_replica_takes_the_session_of_an_old_partition_but_not_any() -> None:
    async def story(calls: StorageCalls, _: list[str]) -> None:
        with pytest.raises(SessionTooFar):
            await calls.open_session(1, FIRST_SESSION_MAX + 1, 3, create=True)
        with pytest.raises(NoSuchPartition):
            await calls.open_session(1, 1, 3)  # none was made
        status = await calls.open_session(1, 50 * SESSIONS_MAX, 3, create=True)
        assert status.promised_session == 50 * SESSIONS_MAX

    with_calls(ten_records(), story)


def test_an_operator_takes_back_a_promise_but_no_session_that_has_begun() -> None:
    replica = opened(7)
    replica.set_low_mark(7, 9)
    replica.open_session(500)
    with pytest.raises(StaleSession):
        replica.fence(9)
    replica.fence(9, by_operator=True)
    assert replica.promised_session == 9
    for session in (7, 6):
        with pytest.raises(StaleSession):
            replica.fence(session, by_operator=True)
    assert (replica.promised_session, replica.status().session) == (9, 7)

"""The server process: what it says of itself on the wire, where it can be reached, and what ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn
from uuid import UUID

import pytest

from waltzd.daemon.config import ServerConfig
from waltzd.daemon.expiry import Expiry
from waltzd.daemon.process import Settings, Supervisor
from waltzd.errors.operations import BadMetadata, NameInUse
from waltzd.protocol.address import Address
from waltzd.protocol.descriptions import OwnedPartition, OwnedReplica, ServerDescription
from waltzd.server import command
from waltzd.wire.codec import to_message, to_value
from waltzd.wire.wire_pb2 import ServerDescription as DescriptionMessage

DESCRIPTION = ServerDescription(
    name="one",
    cluster_key=UUID(int=1),
    instance=UUID(int=2),
    version="0.1",
    uptime_ms=3,
    is_connected=True,
    is_draining=False,
    is_leader=True,
    partitions=(
        OwnedPartition(
            partition=4,
            generation=5,
            session=6,
            step="OPEN",
            waiting="for nothing much",
            committed=7,
            last_id=8,
            low_mark=-1,
            mounts=9,
            tail_bytes=10,
            replicas=(
                OwnedReplica(storage="s1", role="member", state="LIVE", durable_id=8, counts=True, story="level"),
                OwnedReplica(storage="s2", role="learner", state="DOWN", durable_id=-1, counts=False, story="gone"),
            ),
        ),
    ),
)


def test_a_description_survives_the_wire() -> None:
    message = DescriptionMessage.FromString(to_message(DescriptionMessage, DESCRIPTION).SerializeToString())
    assert to_value(ServerDescription, message) == DESCRIPTION


@pytest.mark.parametrize(
    ("settings", "listen", "admin_listen"),
    [
        ({}, "127.0.0.1:70", "127.0.0.1:71"),
        ({"advertise": Address("public", 9)}, "public:9", "127.0.0.1:71"),
        (
            {
                "listen": Address("0.0.0.0", 0),
                "admin_listen": Address("::", 0),
                "advertise": Address("fd00::1", 9),
            },
            "[fd00::1]:9",
            "[fd00::1]:71",
        ),
    ],
)
def test_others_are_told_an_address_that_they_can_connect_to(
    settings: dict[str, Address], listen: str, admin_listen: str
) -> None:
    config = ServerConfig(name="one", coordinator="a:1", **settings)  # type: ignore[arg-type]
    assert (str(config.reached_at(70)), str(config.admin_reached_at(71))) == (listen, admin_listen)


def test_the_coordinator_is_named_without_spaces() -> None:
    assert ServerConfig(name="one", coordinator="a:1, b:2 ,c:3").hosts == "a:1,b:2,c:3"


# -- what ends it ------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """Stands for the end of the process."""


def end(error: BaseException) -> NoReturn:
    raise Ended from error


async def never() -> None:
    await asyncio.Event().wait()


def failing(error: Exception) -> Callable[[], Any]:
    async def fail() -> None:
        raise error

    return fail


class Part:
    """Registration, election and host at once: announced, then does what it is told."""

    def __init__(self, work: Callable[[], Any] = never) -> None:
        self.reconciler = self.ids_reconciler = self
        self.run = work

    async def read(self) -> None: ...
    async def announce(self) -> None: ...
    async def withdraw(self) -> None: ...
    async def check_servers(self) -> None: ...
    async def drain(self, seconds: float) -> None: ...
    async def close(self) -> None: ...

    def describe(self) -> tuple[()]:
        return ()

    describe_troubled = describe


def daemon_of(registration: Part, election: Part, host: Part) -> command._Daemon:
    daemon: Any = command._Daemon.__new__(command._Daemon)
    daemon._config = ServerConfig(name="one", coordinator="a:1")
    daemon._tls = None
    daemon.expiry = Expiry(None)
    daemon._server = type("Server", (), {"listen": "a:1", "streams": "", "admin_listen": "a:2", "name": "one"})()
    daemon.registration, daemon.election, daemon.owner = registration, election, host
    daemon._copy_rate, daemon._detector, daemon._policy, daemon._name_recorder = Part(), Part(), Part(), Part()
    daemon._versions = Part()
    daemon._saver = daemon.groups = Part()
    result: command._Daemon = daemon
    return result


def test_a_server_knows_the_policy_before_it_is_found() -> None:
    told: list[str] = []

    class Telling(Part):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def read(self) -> None:
            told.append(f"{self.name} is read")

        async def announce(self) -> None:
            told.append("announced")
            raise NameInUse("that is enough")

    daemon: Any = daemon_of(Telling("registration"), Part(), Telling("assignment"))
    daemon._policy = Telling("policy")
    with pytest.raises(NameInUse):
        asyncio.run(daemon.live(Supervisor(Settings())))
    assert told == ["assignment is read", "policy is read", "announced"]


def test_a_mistake_in_any_part_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "end_at_once", end)
    mistake, parts = ZeroDivisionError("a mistake"), 3
    for broken in range(parts):
        made = [Part(failing(mistake)) if number == broken else Part() for number in range(parts)]
        with pytest.raises(Ended) as caught:
            asyncio.run(daemon_of(*made).live(Supervisor(Settings())))
        assert caught.value.__cause__ is mistake


def test_a_name_that_was_lost_ends_it_with_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "end_at_once", end)
    with pytest.raises(NameInUse, match="taken"):
        asyncio.run(daemon_of(Part(failing(NameInUse("taken"))), Part(), Part()).live(Supervisor(Settings())))


def test_a_mistake_weighs_more_than_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "end_at_once", end)
    mistake = AssertionError("a mistake")
    group = ExceptionGroup("x", [BadMetadata("y"), ExceptionGroup("z", [NameInUse("taken"), mistake])])
    with pytest.raises(Ended) as caught:
        command._end(group)
    assert caught.value.__cause__ is mistake


def test_a_signal_ends_it_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    class PartitionOwner(Part):
        def __init__(self) -> None:
            self.closed = asyncio.Event()
            super().__init__(self.closed.wait)

        async def drain(self, seconds: float) -> None:
            told.append(f"drain {seconds}")
            raise BadMetadata("nobody can be told")

        async def close(self) -> None:
            told.append("close")
            self.closed.set()

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGTERM)
        await daemon_of(Part(), Part(), PartitionOwner()).live(Supervisor(Settings()))

    asyncio.run(asyncio.wait_for(work(), 30))
    assert told == ["drain 30", "close"]
    assert capfd.readouterr().out == "waltzd server is ready: listen=a:1 streams=none admin=a:2 name=one\n"


def test_what_a_server_does_in_one_sentence() -> None:
    (owned,) = DESCRIPTION.partitions

    def told(*partitions: OwnedPartition, is_draining: bool = False, is_alone: bool = False) -> str:
        return command.story(partitions, is_draining=is_draining, is_alone=is_alone)

    assert told() == "owns 0 partitions, 0 of them open"
    assert told(owned) == "owns 1 partitions, 1 of them open; storages that do not answer: s2"
    voting = replace(owned, partition=9, step="VOTING", waiting="waits for s1", replicas=())
    assert told(voting, replace(voting, partition=10)) == (
        "owns 2 partitions, 0 of them open; partition 9 is VOTING: waits for s1"
    )
    assert told(replace(voting, waiting="")).endswith("partition 9 is VOTING: it is being opened")
    assert told(is_draining=True, is_alone=True) == (
        "draining: owns 0 partitions, 0 of them open; the coordinator does not answer, so nothing new is begun"
    )

"""The gRPC service says who calls, at every call: without it a caller would be anonymous."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from tests.process.certificates import Authority
from tests.unit.mounting import KEY, Room, in_room
from waltzd.protocol.audit import DEAF
from waltzd.protocol.policy import Grant, Pattern, Policy, Verb
from waltzd.protocol.role import Role
from waltzd.server.clients.service import LogService
from waltzd.wire import wire_pb2 as wire


class Aborted(Exception):
    pass


class Context:
    """As much of gRPC's as the service asks for."""

    def __init__(self, certificate: Path) -> None:
        self._certificate = certificate.read_bytes()
        self.written: list[Any] = []

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate]}

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object) -> NoReturn:
        raise Aborted(code)

    async def write(self, message: Any) -> None:
        self.written.append(message)

    def done(self) -> bool:
        return False

    def peer(self) -> str:
        return "memory"


CALLS: dict[str, tuple[Callable[[LogService], Callable[..., Awaitable[Any]]], Any]] = {
    "Register": (lambda service: service.Register, wire.RegisterRequest(cluster_key=KEY.bytes)),
    "HighWaterMark": (
        lambda service: service.HighWaterMark,
        wire.PartitionRequest(cluster_key=KEY.bytes, partition=3),
    ),
    "Fetch": (
        lambda service: service.Fetch,
        wire.FetchRecordsRequest(cluster_key=KEY.bytes, partition=3, first_id=0),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_made_in_the_name_of_its_caller(name: str, tmp_path: Path) -> None:
    method, request = CALLS[name]
    contexts = contexts_of(tmp_path)

    async def test(room: Room) -> None:
        room.access.adopt(POLICY)
        service = LogService(room.calls, DEAF)
        await method(service)(request, contexts["app"])
        with pytest.raises(Aborted, match="PERMISSION_DENIED"):
            await method(service)(request, contexts["eve"])

    in_room(test)


def test_a_time_is_asked_for_in_the_name_of_the_caller(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path)

    async def test(room: Room) -> None:
        room.access.adopt(POLICY)
        request = wire.FindTimeRequest(cluster_key=KEY.bytes, partition=3, time=1)
        with pytest.raises(Aborted, match="PERMISSION_DENIED"):
            await LogService(room.calls, DEAF).FindTime(request, contexts["eve"])  # type: ignore[arg-type]
        with pytest.raises(Aborted, match="FAILED_PRECONDITION"):  # format 0 knows no times
            await LogService(room.calls, DEAF).FindTime(request, contexts["app"])  # type: ignore[arg-type]

    in_room(test)


def test_the_right_to_make_a_group_is_asked_before_anything_of_it_is_read(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path)

    async def test(room: Room) -> None:
        room.access.adopt(POLICY)
        request = wire.MakeGroupRequest(cluster_key=KEY.bytes, meta=wire.GroupMeta(name="g", mode="nonsense"))
        with pytest.raises(Aborted, match="PERMISSION_DENIED"):
            await LogService(room.calls, DEAF).MakeGroup(request, contexts["eve"])  # type: ignore[arg-type]

    in_room(test)


def test_who_asks_where_partitions_are_is_told_what_it_may_see(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path)

    async def test(room: Room) -> None:
        room.access.adopt(POLICY)
        for name, context in contexts.items():
            found = await LogService(room.calls, DEAF).Locate(wire.LocateRequest(), context)  # type: ignore[arg-type]
            assert found.places[3].hidden is (name == "eve")
            assert found.places[3].HasField("address") is (name == "app")

    in_room(test)


POLICY = Policy([Grant(names=(Pattern("app"),), may=(Verb.READ,))])


def contexts_of(home: Path) -> dict[str, Context]:
    authority = Authority(home / "ca")
    return {name: Context(authority.issue(KEY, Role.CLIENT, name).certificate) for name in ("app", "eve")}

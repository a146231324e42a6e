"""The gRPC service says who calls, at every call: without it a caller would be anonymous."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.process.certificates import Authority
from tests.unit.mounting import KEY, Room, in_room
from waltzd.errors import NeedsBatches, NotGranted
from waltzd.protocol.policy import Grant, Pattern, Policy, Verb
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.service import LogService
from waltzd.testing import LocalCluster
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import CALLS
from waltzd.wire.servicer import Origin, answered


async def ask(room: Room, name: str, request: Any, origin: Origin) -> Any:
    found = answered(LogService(room.calls), CALLS[f"/waltz.v1.Log/{name}"], request, origin)
    return [one async for one in found] if isinstance(found, AsyncGenerator) else await found


REQUESTS = {
    "Register": wire.RegisterRequest(cluster_key=KEY.bytes),
    "HighWaterMark": wire.PartitionRequest(cluster_key=KEY.bytes, partition=3),
    "Fetch": wire.FetchRecordsRequest(cluster_key=KEY.bytes, partition=3, first_id=0),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_call_is_made_in_the_name_of_its_caller(name: str) -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(POLICY)
        await ask(room, name, REQUESTS[name], APP)
        with pytest.raises(NotGranted):
            await ask(room, name, REQUESTS[name], EVE)

    in_room(test)


def test_a_time_is_asked_for_in_the_name_of_the_caller() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(POLICY)
        request = wire.FindTimeRequest(cluster_key=KEY.bytes, partition=3, time=1)
        with pytest.raises(NotGranted):
            await ask(room, "FindTime", request, EVE)
        with pytest.raises(NeedsBatches):  # format 0 knows no times
            await ask(room, "FindTime", request, APP)

    in_room(test)


@pytest.mark.parametrize("name", ["History", "FetchMarked"])
def test_a_range_that_ends_before_the_log_is_empty(name: str) -> None:
    """Its end has one more below it than a number on the wire may have."""

    async def story(cluster: LocalCluster) -> None:
        service = LogService(cluster._running(cluster.owner()).calls)
        request: Any = getattr(wire, f"{name}Request")(
            cluster_key=cluster.meta.key.bytes, after=-1, before=-(1 << 63), limit=1
        )
        if name == "FetchMarked":
            request.locks.append(1)
            request.group_sizes.append(1)
        call = CALLS[f"/waltz.v1.Log/{name}"]
        assert call.pack(await answered(service, call, request, Origin())).end == -1

    LocalCluster(partitions=1).run(story)


def test_the_right_to_make_a_group_is_asked_before_anything_of_it_is_read() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(POLICY)
        request = wire.MakeGroupRequest(cluster_key=KEY.bytes, meta=wire.GroupMeta(name="g", mode="nonsense"))
        with pytest.raises(NotGranted):
            await ask(room, "MakeGroup", request, EVE)

    in_room(test)


def test_who_asks_where_partitions_are_is_told_what_it_may_see() -> None:
    async def test(room: Room) -> None:
        room.authorizer.adopt(POLICY)
        for origin in (APP, EVE):
            found = await ask(room, "Locate", wire.LocateRequest(), origin)
            assert found.places[3].is_hidden is (origin is EVE)
            assert (found.places[3].address is not None) is (origin is APP)

    in_room(test)


class Context:
    """As much of gRPC's as a call asks for."""

    def __init__(self, certificate: Path) -> None:
        self._certificate = certificate.read_bytes()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate]}

    def invocation_metadata(self) -> None:
        return None


def test_the_caller_of_a_call_is_who_the_certificate_says(tmp_path: Path) -> None:
    context = Context(Authority(tmp_path / "ca").issue(KEY, Role.CLIENT, "app").certificate)
    assert Origin.of(context) == APP  # type: ignore[arg-type]


POLICY = Policy([Grant(names=(Pattern("app"),), may=(Verb.READ,))])
APP, EVE = (Origin(Identity(KEY, Role.CLIENT, name)) for name in ("app", "eve"))

"""What the audit log is told of a gRPC call: who, what, and how it ended."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from waltzd.errors import NoSuchPartition, NotPermitted, WaltzError
from waltzd.protocol.audit import AuditRecord
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import CALLS, Audit
from waltzd.wire.codec import detail_of
from waltzd.wire.servicer import audited_grpc

CHANGES = {
    "Replica/Open", "Replica/SetLowMark", "Replica/Truncate", "Replica/Read", "StorageAdmin/CreatePartitions",
    "StorageAdmin/RemovePartitions", "StorageAdmin/SetAvailable", "StorageAdmin/Verify", "StorageAdmin/Fence",
    "StorageAdmin/DeleteSetAside", "Log/Register", "Log/Fetch", "ServerAdmin/Drain",
}  # fmt: skip


class Ear:
    def __init__(self) -> None:
        self.deeds: list[AuditRecord] = []

    def note(self, deed: AuditRecord) -> None:
        self.deeds.append(deed)


class Context:
    """As much of a call as says who calls, and how it ended."""

    def __init__(self, error: WaltzError | None = None) -> None:
        self._error = error

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv6:%5B::1%5D:55"

    def code(self) -> Any:
        return None if self._error is None else grpc.StatusCode[self._error.status]

    def details(self) -> str:
        return "" if self._error is None else f"{self._error.code} {self._error.message}"


def heard(
    method: str, request: Any, *, reply: Any = None, error: WaltzError | None = None, ends: Any = None
) -> list[AuditRecord]:
    ear, context = Ear(), Context(error)
    try:
        with audited_grpc(ear, f"/waltz.v1.{method}", context) as call:  # type: ignore[arg-type]
            call.request, call.reply = request, reply
            if error is not None:
                raise grpc.aio.AbortError
            if ends is not None:
                raise ends
    except (grpc.aio.AbortError, asyncio.CancelledError, RuntimeError):
        pass
    return ear.deeds


def test_every_change_is_noted_and_every_look_is_not() -> None:
    looks = {path.removeprefix("/waltz.v1.") for path, call in CALLS.items() if call.audit is Audit.LOOK}
    assert not CHANGES & looks
    assert {path.removeprefix("/waltz.v1.") for path in CALLS} - looks >= CHANGES


def test_a_call_that_is_not_declared_is_noted() -> None:
    (deed,) = heard("Log/Nothing", None)
    assert deed.what == "Log/Nothing"


def test_a_line_says_who_what_and_where() -> None:
    request = wire.RemoveRequest(partitions=[0, 1, 2, 7], delete_files=True)
    assert heard("StorageAdmin/RemovePartitions", request) == [
        AuditRecord(
            who="anonymous",
            peer="[::1]:55",
            what="StorageAdmin/RemovePartitions",
            partitions="0-2,7",
            about="files=deleted",
        )
    ]


def test_partitions_that_were_refused_are_those_of_the_line() -> None:
    error = detail_of(NoSuchPartition("nothing there"))
    reply = wire.PartitionsReply(
        results=[wire.PartitionResult(partition=0), wire.PartitionResult(partition=3, error=error)]
    )
    (deed,) = heard("StorageAdmin/RemovePartitions", wire.RemoveRequest(partitions=[0, 3]), reply=reply)
    assert (deed.partitions, deed.code) == ("3", NoSuchPartition.code)


@pytest.mark.parametrize("method", ["StorageAdmin/Describe", "Log/HighWaterMark", "Replica/Read", "Log/Fetch", "Log/Mount"])
def test_what_only_looks_is_noted_where_it_is_denied(method: str) -> None:
    assert heard(method, None) == []
    assert heard(method, None, error=NoSuchPartition("no")) == []
    (deed,) = heard(method, None, error=NotPermitted("no"))
    assert (deed.what, deed.code) == (method, "W2024")


def test_a_replica_that_is_only_asked_where_it_stands_is_no_change() -> None:
    assert heard("Replica/Open", wire.OpenRequest(target=wire.Target(partition=1))) == []
    (deed,) = heard("Replica/Open", wire.OpenRequest(target=wire.Target(partition=1, session=7), create=True))
    assert (deed.partitions, deed.about) == ("1", "session=7 create=true")


def test_a_call_that_is_not_known_is_noted() -> None:
    assert [deed.what for deed in heard("ServerAdmin/New", object())] == ["ServerAdmin/New"]


def test_a_caller_that_has_gone_and_a_mistake_of_ours_are_no_refusals_of_the_caller() -> None:
    request = wire.DrainRequest(draining=True)
    (gone,) = heard("ServerAdmin/Drain", request, ends=asyncio.CancelledError())
    assert (gone.about, gone.code) == ("draining=true caller=gone", None)
    (wrong,) = heard("ServerAdmin/Drain", request, ends=RuntimeError("a bug"))
    assert wrong.code == WaltzError.code


def test_how_much_a_caller_says_is_bounded() -> None:
    (deed,) = heard("StorageAdmin/DeleteSetAside", wire.SetAsideRequest(names=["x" * 1000] * 100))
    assert len(deed.about) < 500

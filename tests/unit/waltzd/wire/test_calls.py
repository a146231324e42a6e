"""The declared calls. Their rights once more and by hand: a line for each call, with the roles that may make it."""

from __future__ import annotations

from typing import Any

import pytest

from waltzd.protocol.role import Role
from waltzd.server.admin_service import ServerAdminService
from waltzd.server.clients.service import LogService
from waltzd.storage.service import ReplicaService, StorageAdminService
from waltzd.wire.calls import CALLS, RIGHTS_OF_TOOLS, allowed
from waltzd.wire.servicer import add_service
from waltzd.wire.wire_pb2 import DESCRIPTOR

RIGHTS = {path: call.roles for path, call in CALLS.items()}
SERVICES = {
    "Replica": ReplicaService, "StorageAdmin": StorageAdminService, "Log": LogService, "ServerAdmin": ServerAdminService,
}  # fmt: skip
TABLE = """
Replica/Open                       server
Replica/Quiet                      server
Replica/SetLowMark                 server
Replica/Truncate                   server
Replica/Read                       server operator
Replica/ReadLocks                  server
Replica/FindMarks                  server
Replica/FindTime                   server
Replica/Archive                    server
Replica/BackUp                     server
Replica/CheckArchive               server
Replica/SaveMetadata               server
Replica/Fork                       server
Replica/Trim                       server
Replica/ListSegments               server operator observer
StorageAdmin/Describe              server operator observer
StorageAdmin/CreatePartitions      operator
StorageAdmin/RemovePartitions      operator
StorageAdmin/SetAvailable          operator
StorageAdmin/Verify                operator
StorageAdmin/Digest                operator
StorageAdmin/Events                operator observer
StorageAdmin/Fence                 operator
StorageAdmin/DeleteSetAside        operator
StorageAdmin/Restore               operator
Log/Locate                         server client operator observer
Log/Register                       server client operator
Log/Mount                          server client operator
Log/HighWaterMark                  server client operator observer
Log/Fetch                          server client operator
Log/FindTime                       client operator observer
Log/FetchMarked                    client operator server
Log/History                        client operator server
Log/Attend                         client operator
Log/MakeGroup                      client operator
Log/GetGroup                       client operator observer
Log/DescribeGroup                  client operator
Log/Parked                         client operator
Log/Replay                         client operator
ServerAdmin/Describe               server operator observer
ServerAdmin/Drain                  operator
ServerAdmin/ExplainLock            operator observer
ServerAdmin/Events                 operator observer
ServerAdmin/ListClients            operator observer
ServerAdmin/DisconnectClient       operator
ServerAdmin/ListGroups             operator observer
ServerAdmin/ListParked             operator observer
ServerAdmin/SetGroup               operator
ServerAdmin/RemoveGroup            operator
ServerAdmin/PassEntry              operator
ServerAdmin/ChangeGroup            operator
"""


def test_every_call_has_its_roles() -> None:
    """What is not listed, nobody may: a new call must not be forgotten, and an old one not left behind."""
    calls = {
        f"/{service.full_name}/{method.name}"
        for service in DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(RIGHTS) == calls
    assert all(RIGHTS.values())
    assert not any(Role.STORAGE in roles for roles in RIGHTS.values()), "storages call nobody"


def test_the_whole_table() -> None:
    rows = [line.split() for line in TABLE.strip().splitlines()]
    assert {f"/waltz.v1.{call}": frozenset(map(Role, roles)) for call, *roles in rows} == RIGHTS


def test_an_observer_may_nothing_that_an_operator_may_not() -> None:
    for roles in (*RIGHTS.values(), *RIGHTS_OF_TOOLS.values()):
        assert Role.OBSERVER not in roles or Role.OPERATOR in roles


@pytest.mark.parametrize("call", ["/waltz.v1.Log/Nothing", "", "/echo"])
def test_what_is_not_in_the_table_nobody_may(call: str) -> None:
    assert allowed(call) == frozenset()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_without_a_declared_call_is_not_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = SERVICES[name]
    paths = [path for path in CALLS if path.split("/")[1] == f"waltz.v1.{name}"]
    assert paths
    server: Any = type("Server", (), {"add_generic_rpc_handlers": lambda self, handlers: None})()
    add_service(server, name, host)
    for path in paths:
        with monkeypatch.context() as patch:
            patch.delitem(CALLS, path)
            with pytest.raises(KeyError):
                add_service(server, name, host)

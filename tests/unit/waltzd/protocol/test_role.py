"""The table of rights, once more and by hand: a line for each call, with the roles that may make it."""

from __future__ import annotations

from uuid import UUID

import pytest

from waltzd.protocol.role import RIGHTS, RIGHTS_OF_TOOLS, Identity, Role, allowed

TABLE = """
Replica/Open                       server
Replica/Quiet                      server
Replica/SetLowMark                 server
Replica/Truncate                   server
Replica/Read                       server operator
Replica/ReadLocks                  server
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
Log/Attend                         client operator
Log/MakeGroup                      client operator
Log/GetGroup                       client operator observer
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


def test_the_whole_table() -> None:
    rows = [line.split() for line in TABLE.strip().splitlines()]
    assert {f"/waltz.v1.{call}": frozenset(map(Role, roles)) for call, *roles in rows} == RIGHTS


def test_an_observer_may_nothing_that_an_operator_may_not() -> None:
    for roles in (*RIGHTS.values(), *RIGHTS_OF_TOOLS.values()):
        assert Role.OBSERVER not in roles or Role.OPERATOR in roles


@pytest.mark.parametrize("call", ["/waltz.v1.Log/Nothing", "", "/echo"])
def test_what_is_not_in_the_table_nobody_may(call: str) -> None:
    assert allowed(call) == frozenset()


def test_an_observer_has_an_identity_of_its_own() -> None:
    assert Identity.among([f"waltz://{UUID(int=7)}/role/observer/eve"]) == Identity(UUID(int=7), Role.OBSERVER, "eve")

"""A real `waltzd server` process for tests, on loopback, that ends with the process that started it."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import UUID

from tests.process.daemon import DaemonProcess
from waltzd.wire.servers import ServerAdminClient


class ServerDaemon(DaemonProcess):
    role = "server"
    ready = re.compile(
        r"waltzd server is ready: listen=(?P<listen>\S+) streams=(?P<stream_listen>\S+) admin=(?P<admin_listen>\S+) "
        r"name=\S+\n"
    )

    def __init__(self, home: Path, *, name: str, hosts: str, cluster: str, **settings: object) -> None:
        own = {"name": name, "coordinator": hosts, "cluster": cluster, "session_seconds": 4, "drain_seconds": 20}
        own["coordinator_open"] = "accepted"  # the ZooKeeper of most tests is open, also where daemons have certificates
        self.stream_listen = ""
        super().__init__(home, name, {**own, **settings}, {})
        self.name = name

    def admin(self, key: UUID) -> ServerAdminClient:
        return ServerAdminClient(self.admin_listen, key)

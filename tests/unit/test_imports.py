"""Imports point one way, and pure modules stay pure. Each rule says what to do when it is broken."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PURE = {
    "assignment",
    "checksum",
    "client_settings",
    "damage",
    "document",
    "errors",
    "fields",
    "finding",
    "flow",
    "frame",
    "histogram",
    "index",
    "layout",
    "lock",
    "meta",
    "mount",
    "outbox",
    "outcome",
    "owner",
    "process",
    "quorum",
    "readiness",
    "record",
    "replica",
    "scan",
    "setting",
    "submission",
    "transaction",
}
"""Modules at the root of waltzd/ that have no clock, file, socket, thread, task or randomness of their own."""

PLAIN = {"control", "origin", "promise", "transplant"}
"""Modules at the root of waltzd/ that are plain synchronous code over an injected Disk."""

PLAIN_STORAGE = {
    "directory",
    "healing",
    "installation",
    "opening",
    "overlap",
    "partition",
    "proof",
    "quarantine",
    "repair",
    "room",
    "segment",
    "shelf",
}
"""Modules of waltzd/storage/ that are plain synchronous code over an injected Disk."""

PURE_SERVER = {"locks", "recovery", "session", "step", "tail"}
"""Modules of waltzd/server/ that only decide."""

PURE_SPARK = {"failure", "manifest", "origin", "plan", "position", "properties", "pushdown", "query", "selection"}
"""Modules of waltz_spark/ that know neither Spark nor Arrow nor the world."""

WORLD = (
    "asyncio", "concurrent", "fcntl", "grpc", "kazoo", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "select", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uvloop",
)  # fmt: skip
EDGES = (
    "waltzd.caller", "waltzd.rpc", "waltzd.rpc_server",
    "waltzd.log_messages", "waltzd.messages", "waltzd.server_admin", "waltzd.servers",
    "waltzd.storage_admin", "waltzd.storages",
)  # fmt: skip
"""Modules at the root that turn messages into plain values, and the callers' sides of the services."""
SPARK = ("waltz_spark", "pyspark_waltz")
WIRE = ("grpc", "google.protobuf", "google.rpc", "grpc_status", "waltzd.wire_pb2", "waltzd.wire_pb2_grpc")


@dataclass(frozen=True)
class Module:
    name: str
    source: str

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def package(self) -> str:
        """waltzd, waltzd.storage, waltzctl, …"""
        return self.name.rpartition(".")[0]

    @property
    def is_generated(self) -> bool:
        return "_pb2" in self.stem


def imports(module: Module) -> Iterator[str]:
    """Everything that is imported anywhere in the module, also inside functions, as full names."""
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")[: -node.level]
                base = ".".join([*parts, base]) if base else ".".join(parts)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def verdicts(module: Module) -> Iterator[str]:
    """What is wrong with the imports of a module, each with what to do instead."""
    if module.is_generated:
        return
    for name in sorted(set(imports(module))):
        for is_broken, advice in rules(module, name):
            if is_broken:
                yield f"{module.name} imports {name}: {advice}"


def rules(module: Module, name: str) -> Iterator[tuple[bool, str]]:
    daemons = ("waltzd.storage", "waltzd.server")
    is_command = module.name == "waltzd.__main__"  # starts the daemons
    yield (
        module.package == "waltzd" and not is_command and is_within(name, daemons),
        "the root of waltzd/ is shared by all; move what is needed up to the root, or the user down into the daemon",
    )
    yield (
        is_within(module.name, ("waltzd",)) and is_within(name, ("waltzctl", *SPARK, "tests")),
        "nothing in waltzd/ knows its users; move what is needed to the root of waltzd/",
    )
    for daemon, other in (daemons, daemons[::-1]):
        yield (
            is_within(module.name, (daemon,)) and is_within(name, (other,)),
            "the two daemons meet on the wire only; share through the root of waltzd/",
        )
    yield (
        is_within(module.name, ("waltzctl", *SPARK)) and is_within(name, daemons),
        "tools use the shared root of waltzd/ or the wire, never the inside of a daemon",
    )
    yield (
        is_within(module.name, ("waltzctl",)) and is_within(name, SPARK),
        "a storage node installs waltzctl without the spark extra; call it through an installed entry point",
    )
    yield (
        is_within(name, WIRE)
        and module.name
        not in (*EDGES, "waltz_spark.payloads.payload_protobuf")  # which decodes the messages of applications
        and "service" not in module.stem,
        f"gRPC and protobuf stop at {', '.join(EDGES)} and the service files; pass plain values inward",
    )
    yield (
        is_within(name, ("kazoo",)) and module.name != "waltzd.zookeeper",
        "only waltzd/zookeeper.py knows kazoo; take a `Coordinator` as an argument",
    )
    yield (
        is_within(name, ("deltalake", "pyarrow", "pyspark")) and not is_within(module.name, ("waltz_spark",)),
        "these come with the spark extra only; keep them in spark/",
    )
    yield (
        is_within(module.name, ("pyspark_waltz",)) and not is_within(name, ("__future__", "waltz_spark.source")),
        "every session of Spark on the machine imports it; what it does belongs in waltz_spark.source",
    )
    yield (
        is_within(name, ("pyspark_waltz",)),
        "only Spark looks for it, by its name; import waltz_spark.source",
    )
    yield (
        is_within(name, ("sqlalchemy",)) and module.name != "waltzd.sql",
        "it comes with the sql extra only; keep it in waltzd/sql.py",
    )
    # waltzd.testing puts both daemons together in one process: the one place above them besides waltzd.__main__.
    in_testing = is_within(module.name, ("waltzd.testing",))
    yield (
        not in_testing and is_within(name, ("waltzd.testing", "pytest")),
        "this is for the tests of applications; nothing that is in production depends on it",
    )
    is_pure = module.package == "waltzd" and module.stem in PURE | PLAIN
    is_plain = module.package == "waltzd.storage" and module.stem in PLAIN_STORAGE
    is_deciding = module.package == "waltzd.server" and module.stem in PURE_SERVER
    is_planning = module.name in ("waltzctl.placement.plan", "waltzctl.placement.rescue")
    yield (
        (is_pure or is_plain or is_deciding or is_planning) and is_within(name, WORLD),
        "this module must stay pure, so that the simulator can run it; take the value, or the Disk, as an argument",
    )
    yield (
        module.package == "waltz_spark"
        and module.stem in PURE_SPARK
        and is_within(name, (*WORLD, "deltalake", "pyarrow", "pyspark")),
        "this module decides; it must not know Spark, Arrow or the world",
    )


def modules() -> list[Module]:
    found = []
    tops = [("waltzd", ""), ("waltzctl", ""), *((f"spark/{name}", "spark/") for name in SPARK)]
    for top, prefix in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / prefix).with_suffix("").parts
            found.append(Module(".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_point_one_way(module: Module) -> None:
    assert list(verdicts(module)) == []


def test_the_modules_that_must_be_pure_are_there() -> None:
    """A rule about a module that was renamed would check nothing."""
    names = {module.name for module in modules()}
    assert {f"waltzd.{name}" for name in PURE | PLAIN} <= names
    assert {f"waltzd.storage.{name}" for name in PLAIN_STORAGE} <= names
    assert {f"waltzd.server.{name}" for name in PURE_SERVER} <= names


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("waltzd.record", "import os.path"),
        ("waltzctl.placement.plan", "import random"),
        ("waltzd.assignment", "import asyncio"),
        ("waltzd.record", "def f():\n    import random"),
        ("waltzd.record", "from waltzd import storage"),
        ("waltzd.record", "from .storage.segment import Segment"),
        ("waltzd.verify", "from waltzctl import render"),
        ("waltzd.storage.segment", "from time import time_ns"),
        ("waltzd.storage.segment", "from grpc import aio"),
        ("waltzd.storage.service", "from waltzd.server import session"),
        ("waltzd.server.session", "import waltzd.storage.segment as s"),
        ("waltzd.server.session", "from waltzd import wire_pb2"),
        ("waltzctl.records.segment", "if TYPE_CHECKING:\n    from waltzd.storage.segment import Segment"),
        ("waltz_spark.log.decode", "import waltzd.server"),
        ("pyspark_waltz", "import pyarrow as pa"),
        ("waltz_spark.engine.session", "import pyspark_waltz"),
        ("waltzctl.main", "import pyspark_waltz"),
        ("waltzd.client", "import sqlalchemy as sa"),
        ("waltzd.client", "from waltzd.testing import LocalCluster"),
        ("waltzd.testing", "from waltzd.server.host import Host"),
        ("waltzd.server.host", "import pytest"),
        ("waltzctl.export", "import pyarrow as pa"),
        ("waltzd.client", "import kazoo.client"),
        ("waltzd.cluster", "import kazoo.client"),
    ],
)
def test_the_rules_notice(name: str, source: str) -> None:
    assert len(list(verdicts(Module(name, source)))) >= 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("waltzd.record", "import struct\nimport numpy as np\nfrom waltzd.checksum import crc32"),
        ("waltzd.__main__", "from waltzd.storage import daemon"),
        ("waltzd.storage.service", "import asyncio\nimport grpc\nfrom waltzd import wire_pb2"),
        ("waltzd.rpc", "import grpc"),
        ("waltzd.sql", "import sqlalchemy as sa"),
        ("waltzd.testing.cluster", "from waltzd.server.host import Host\nfrom waltzd.storage.keeper import Keeper"),
        ("waltzctl.records.segment", "import os\nfrom waltzd import record"),
        ("waltz_spark.log.decode", "import pyarrow as pa\nfrom waltzd.record import heads"),
        ("pyspark_waltz", "from waltz_spark.source import WaltzDataSource as DefaultSource"),
        ("waltzd.wire_pb2_grpc", "import grpc"),
        ("waltzd.zookeeper", "import kazoo.client"),
    ],
)
def test_the_rules_allow_what_is_meant(name: str, source: str) -> None:
    assert list(verdicts(Module(name, source))) == []

"""Which room may import which, and what a pure room may not know. Each verdict says what to do.

Rules are about folders, so a module that is moved or renamed stays under them. What a room may import stands in one table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS: tuple[tuple[str, ...], ...] = (
    ("waltzd.errors",),
    ("waltzd.disk",),
    ("waltzd.format",),
    ("waltzd.protocol",),
    ("waltzd.cluster", "waltzd.archive"),
    ("waltzd.wire", "waltzd.server.core", "waltzd.server.groups", "waltzd.storage.replica"),
    ("waltzd.client", "waltzd.daemon", "waltzd.server.session", "waltzd.storage.offline"),
    ("waltzd.dcb", "waltzd.serializers", "waltzd.sql", "waltzd.observe", "waltzd.server.clients", "waltzd.storage"),
    ("waltzd.server.subscriptions", "waltzd.eventsourcing"),
    ("waltzd.server", "waltzctl.shell.removed"),
    ("waltzd.testing", "waltzctl.shell.options", "waltzctl.shell.safety", "waltzctl.show.terminal"),
    ("waltzctl.show.forms",),
    ("waltzctl.shell",),
    ("waltzctl.snapshot",),
    (
        "waltzctl.placement.replica_assignment",
        "waltzctl.local_cluster.daemon",
    ),
    ("waltzctl.health.facts",),
    ("waltzctl.health.troubles",),
    ("waltzctl.health.rules",),
    ("waltzctl.show",),
    ("waltzctl.placement", "waltzctl.config"),
    ("waltzctl.local_cluster",),
    ("waltzctl.health",),
    ("waltzctl.records", "waltzctl.bench"),
    ("waltzctl.groups",),
    ("waltzctl.console",),
    ("waltz_spark.log", "waltz_spark.engine"),
    ("waltz_spark.table",),
    ("waltz_spark.payloads",),
    ("waltz_spark.export",),
    ("waltz_spark", "waltzctl"),
    ("pyspark_waltz", "waltzd"),
)
"""A room imports itself and rooms of lower floors. `waltzd` by itself is the two doors: `__init__` and `__main__`;
`waltz_spark` by itself is what Spark calls: `source`. What pages show stands below `waltzctl.show`."""

PURE = ("waltzd.format", "waltzd.protocol", "waltzd.server.core", "waltzd.server.groups")
"""No clock, file, socket, thread, task or randomness of their own."""
PLAIN = ("waltzd.storage.replica",)
"""Plain synchronous code over an injected Disk; the simulator passes one that lies."""
TOOLS = ("waltzctl", "waltz_spark", "pyspark_waltz")
DAEMONS = ("waltzd.server", "waltzd.storage")
OFFLINE = ("waltzd.storage.offline", "waltzd.storage.replica")
"""What tools may use of a daemon: files that no daemon holds."""

DECIDING = (
    "waltzctl.snapshot.cluster_snapshot", "waltzctl.placement.replica_moves", "waltzctl.placement.replica_assignment",
    "waltzctl.placement.proof", "waltzctl.shell.safety",
    "waltzctl.health.facts", "waltzctl.health.rates", "waltzctl.health.rules",
    "waltzctl.health.troubles",
    "waltz_spark.engine.properties", "waltz_spark.export.manifest",
    "waltz_spark.log.plan", "waltz_spark.log.selection", "waltz_spark.table.position",
    "waltz_spark.table.pushdown", "waltzd.cluster.assignment", "waltzd.cluster.documents",
    "waltzd.client.mount", "waltzd.client.outbox",
    "waltzd.client.pending",
    "waltzd.archive.manifest", "waltzd.archive.archived_segment",
    "waltzd.daemon.readiness", "waltzd.daemon.settings",
)  # fmt: skip
"""Modules that decide, in rooms that do more than that. Each has to exist."""

WORLD = (
    "asyncio", "concurrent", "fcntl", "grpc", "kazoo", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "select", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uvloop",
)  # fmt: skip
SPARK = ("deltalake", "pyarrow", "pyspark")
GRPC = ("grpc", "google.protobuf", "google.rpc", "grpc_status", "waltzd.wire.wire_pb2")
ONLY_IN = {
    "kazoo": (("waltzd.cluster.zookeeper",), "take a `Coordinator` as an argument"),
    "sqlalchemy": (("waltzd.sql",), "it comes with the sql extra only"),
    "opentelemetry": (("waltzd.observe", "waltzd.daemon.otlp"), "it comes with the otel and otlp extras only"),
    "pydantic": (("waltzd.serializers",), "it comes with the pydantic extra only"),
    "msgspec": (("waltzd.serializers",), "it comes with the msgspec extra only"),
    "eventsourcing": (("waltzd.eventsourcing",), "it comes with the eventsourcing extra only"),
    "pytest": (("waltzd.testing",), "nothing that is in production depends on it"),
    "obstore": (("waltzd.archive.objects",), "it comes with the archive extra only; take a `Store` as an argument"),
    **dict.fromkeys(
        ("starlette", "uvicorn", "jinja2", "markupsafe"),
        (("waltzctl.console",), "it comes with the console extra only"),
    ),
    "typer": (("waltzctl", "waltz_spark", "waltzd.__main__"), "the command line is where commands are"),
    **dict.fromkeys(SPARK, (("waltz_spark", "pyspark_waltz"), "it comes with the spark extra only")),
}
"""A library → the only places that know it, and what to do elsewhere."""


@dataclass(frozen=True)
class Module:
    name: str
    source: str

    @property
    def is_generated(self) -> bool:
        return "_pb2" in self.name


@cache
def imports(module: Module) -> list[str]:
    """Return everything that is imported anywhere in the module, also inside functions, as full names."""
    return list(_imports(module))


def _imports(module: Module) -> Iterator[str]:
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


@cache
def place(name: str) -> tuple[str, int] | None:
    """The room of a module and its floor; None for what is not ours."""
    rooms = [(room, floor) for floor, rooms in enumerate(FLOORS) for room in rooms if is_within(name, (room,))]
    return max(rooms, key=lambda found: len(found[0]), default=None)


def verdicts(module: Module) -> Iterator[str]:
    """What is wrong with the imports of a module, each with what to do instead."""
    if module.is_generated:
        return
    for name in sorted(set(imports(module))):
        for is_broken, advice in rules(module.name, name):
            if is_broken:
                yield f"{module.name} imports {name}: {advice}"


def rules(importer: str, name: str) -> Iterator[tuple[bool, str]]:
    here, there = place(importer), place(name)
    if here is not None and there is not None:
        # `from waltzd import x` names the package, too; tools come in through its door, as applications do.
        is_package = name in ("waltzd", "waltz_spark", *DAEMONS) or (
            there[0] == "waltzd" and is_within(importer, TOOLS) and name != "waltzd.__main__"
        )
        yield (
            here[0] != there[0] and here[1] <= there[1] and not is_package,
            f"{there[0]} is on floor {there[1]}, and {here[0]} is on floor {here[1]}: move what both need further down",
        )
    for daemon, other in (DAEMONS, DAEMONS[::-1]):
        yield (
            is_within(importer, (daemon,)) and is_within(name, (other,)),
            "the two daemons meet on the wire only; share through protocol/",
        )
    yield (
        is_within(importer, TOOLS) and is_within(name, DAEMONS) and name not in DAEMONS and not is_within(name, OFFLINE),
        "tools use the wire, never the inside of a daemon",
    )
    yield (
        is_within(importer, ("waltzctl",)) and is_within(name, ("waltz_spark", "pyspark_waltz")),
        "a storage node installs waltzctl without the spark extra; call it through an installed entry point",
    )
    yield (
        is_within(name, GRPC)
        and not is_within(importer, ("waltzd.wire", "waltz_spark.payloads.payload_protobuf"))
        and "service" not in importer.rpartition(".")[2],
        "gRPC and protobuf stop at wire/ and the services; pass plain values inward",
    )
    for library, (places, advice) in ONLY_IN.items():
        yield is_within(name, (library,)) and not is_within(importer, places), f"{advice}; keep it in {places[0]}"
    yield (
        is_within(importer, ("pyspark_waltz",)) and not is_within(name, ("__future__", "waltz_spark.source")),
        "every session of Spark on the machine imports it; what it does belongs in waltz_spark.source",
    )
    yield is_within(name, ("pyspark_waltz",)), "only Spark looks for it, by its name; import waltz_spark.source"
    yield (
        is_within(importer, (*PURE, *PLAIN)) and is_within(name, WORLD),
        "this room is pure, so that the simulator can run it; take the value, or the Disk, as an argument",
    )
    yield (
        importer in DECIDING and is_within(name, (*WORLD, *SPARK)),
        "this module decides; it must not know Spark, Arrow or the world",
    )


def modules() -> list[Module]:
    found = []
    tops = [("waltzd", ""), ("waltzctl", ""), ("spark/waltz_spark", "spark/"), ("spark/pyspark_waltz", "spark/")]
    for top, prefix in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / prefix).with_suffix("").parts
            found.append(Module(".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")))
    return found


MODULES = modules()


def test_imports_point_down() -> None:
    assert [verdict for module in MODULES for verdict in verdicts(module)] == []


def test_every_room_of_the_table_is_there() -> None:
    """A rule about a folder that was renamed would check nothing."""
    names = {module.name for module in MODULES}
    rooms = {room for floor in FLOORS for room in floor}
    assert rooms | set(PURE) | set(PLAIN) | set(OFFLINE) | set(DECIDING) <= names
    assert set(PURE) | set(PLAIN) <= rooms


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts with more than one member."""
    reached = {name: reach(graph, name) for name in graph}
    parts = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(part) for part in parts if part)


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for name in graph.get(ahead.pop(), ()):
            if name not in seen:
                seen.add(name)
                ahead.append(name)
    return seen


def graph_of(modules: list[Module]) -> dict[str, set[str]]:
    names = {module.name for module in modules}
    return {module.name: {name for name in imports(module) if name in names and name != module.name} for module in modules}


def test_no_module_imports_itself_through_others() -> None:
    found = {name for circle in circles(graph_of(MODULES)) for name in circle}
    assert found == set(), "give what both need a place below both"


def test_a_circle_is_noticed_also_inside_functions() -> None:
    sources = {"a": "import b", "b": "def f():\n    import c, d", "c": "import a", "d": ""}
    assert circles(graph_of([Module(name, source) for name, source in sources.items()])) == [["a", "b", "c"]]


BREACHES = dict.fromkeys((room for floor in FLOORS for room in floor), "import waltzd.testing.cluster") | {
    **dict.fromkeys((room for floor in FLOORS for room in floor if "waltz_spark." in room), "import waltz_spark.source"),
    **dict.fromkeys((room for floor in FLOORS for room in floor if "waltzctl." in room), "import waltzctl.bench"),
    "waltzctl.bench": "import waltz_spark.log",
    "waltzctl.console": "import waltzctl.main",
    "waltzctl.groups": "import waltzctl.main",
    "waltzd.testing": "import waltzd.__main__",
    "waltzctl": "from waltzd.server.core.recovery import Recovery",
    "waltz_spark": "from waltzd.storage.calls import StorageCalls",
    "pyspark_waltz": "import pyarrow as pa",
    "waltzd": "import kazoo.client",
}


@pytest.mark.parametrize("room", [room for floor in FLOORS for room in floor])
def test_a_breach_in_each_room_is_noticed(room: str) -> None:
    assert list(verdicts(Module(f"{room}.planted", BREACHES[room]))) != []


@pytest.mark.parametrize("name", [*(f"{room}.planted" for room in (*PURE, *PLAIN)), *DECIDING])
def test_the_world_in_a_pure_place_is_noticed(name: str) -> None:
    for source in ("import os.path", "def f():\n    import random", "from time import time_ns", "import asyncio"):
        assert list(verdicts(Module(name, source))) != []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("waltzd.format.record", "from waltzd import storage\nimport socket"),
        ("waltzd.format.record", "from ..storage.calls import StorageCalls"),
        ("waltzd.storage.service", "from waltzd.server.session import owned"),
        ("waltzd.storage.append_queue", "from grpc import aio"),
        ("waltzd.server.ownership", "import waltzd.storage.replica.segment as s"),
        ("waltzd.server.ownership", "from waltzd.wire import wire_pb2"),
        ("waltzctl.records.offline", "if TYPE_CHECKING:\n    from waltzd.storage.append_queue import AppendQueue"),
        ("waltz_spark.log.arrow", "import waltzd.server.ownership"),
        ("waltz_spark.engine.session", "import pyspark_waltz"),
        ("waltzctl.main", "import pyspark_waltz"),
        ("waltzd.client.client", "import sqlalchemy as sa"),
        ("waltzd.client.client", "from waltzd.testing import LocalCluster"),
        ("waltzd.testing", "from waltzctl.main import run"),
        ("waltzd.server.ownership", "import pytest"),
        ("waltzctl.export", "import pyarrow as pa"),
        ("waltzctl.health.status", "from starlette.routing import Route"),
        ("waltzd.cluster.cluster", "import kazoo.client"),
    ],
)
def test_the_rules_notice(name: str, source: str) -> None:
    assert list(verdicts(Module(name, source))) != []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("waltzd.format.record", "import struct\nimport numpy as np\nfrom waltzd.format.checksum import crc32"),
        ("waltzd.__main__", "from waltzd.storage import command"),
        ("waltzd.storage.service", "import asyncio\nimport grpc\nfrom waltzd.wire import wire_pb2"),
        ("waltzd.wire.grpc", "import grpc"),
        ("waltzd.sql", "import sqlalchemy as sa"),
        (
            "waltzd.testing.cluster",
            "from waltzd.server.ownership import PartitionOwner\nfrom waltzd.storage.calls import StorageCalls",
        ),
        (
            "waltzctl.records.offline",
            "import os\nfrom waltzd.format import record\nfrom waltzd.storage.offline import verify",
        ),
        ("waltz_spark.log.arrow", "import pyarrow as pa\nfrom waltzd.format.record import heads"),
        ("pyspark_waltz", "from waltz_spark.source import WaltzDataSource as DefaultSource"),
        ("waltzd.cluster.zookeeper", "import kazoo.client"),
    ],
)
def test_the_rules_allow_what_is_meant(name: str, source: str) -> None:
    assert list(verdicts(Module(name, source))) == []

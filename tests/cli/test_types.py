"""What mypy and pyright, both strict, say of an application with types: nothing where it is right, else where it is not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.examples import typed_bank

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
APPLICATIONS = [ROOT / "tests/examples" / f"{name}.py" for name in ("events", "booking", "shop", "indexer")]
"""The example applications, in which pyright finds nothing; mypy looks at them with all the rest."""
BANK = (ROOT / "tests/examples/typed_bank.py").read_text(encoding="utf-8")
MISTAKES = {
    "an outcome without a case": (
        "        case Declined(reason):\n            return reason\n",
        "",
        "assert_never(outcome)",
    ),
    "an event without a case": (
        "        case Withdrawn(account, cents):\n            change = -cents\n",
        "",
        "assert_never(event)",
    ),
    "a payload of another type": ("builder.payload = self._event", 'builder.payload = "rent"', 'builder.payload = "rent"'),
    "an append of another type": ('Deposited("alice", 500), locks', 'b"500", locks', 'b"500"'),
    "a command of another type": ("client.submit(Withdraw(engine", "client.submit(With(engine", "client.submit(With("),
    "a view of another type": ("cluster.client(view=view", "cluster.client(view=other", "cluster.client("),
    "a lock with a fraction": ('write_lock("account", account)', 'write_lock("account", 0.5)', "0.5"),
}
"""The right text, the wrong one, and what stands in the line where a checker must say so."""
EXTRA = """
from waltzd import Command


class With(Command[bytes]):
    def __init__(self, engine: sa.Engine, account: str, cents: int, purpose: str) -> None: ...

    def build(self, builder: Builder) -> bool:
        builder.payload = b"raw"
        return True


def apply_raw(connection: Connection, transaction: Transaction) -> None:
    print(transaction.value.hex())


other = SqlView(sqlite("other.db"), apply_raw)
"""
PLAIN = '''
"""Without asyncio and without SQL: a view in memory, and the serializers that need a package."""

from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

import msgspec
from pydantic import BaseModel

from waltzd import BlockingClient, Builder, Client, Command, Decision, FeedMode, Outcomes, Transaction, write_lock
from waltzd.serializers import EventType, Json, MsgspecEvents, PydanticEvents
from waltzd.testing import BlockingCluster


class Booked(BaseModel):
    seat: UUID


@dataclass
class Cancelled:
    seat: UUID


Event: TypeAlias = Booked | Cancelled
EVENTS = PydanticEvents[Event](EventType(Booked, "booked"), EventType(Cancelled, "cancelled"))


class Moved(msgspec.Struct):
    seat: UUID


MOVES = MsgspecEvents(EventType(Moved, "moved"), form="msgpack")


class Seats:
    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        self.taken: set[UUID] = set()

    def position(self, number: int) -> int:
        return self.positions.get(number, -1)

    def apply(self, fed: Transaction[Event]) -> None:
        event = fed.value
        if isinstance(event, Booked):
            self.taken.add(event.seat)
        else:
            self.taken.discard(event.seat)
        self.positions[fed.partition] = fed.id

    def failed(self, fed: Transaction[Event], error: Exception) -> Decision:
        return Decision.STOP


class Book(Command[Booked]):
    def __init__(self, seats: Seats, seat: UUID) -> None:
        self.seats, self.seat = seats, seat
        self.locks = [write_lock("seat", seat)]

    def build(self, builder: Builder[Booked]) -> bool:
        builder.payload = Booked(seat=self.seat)
        return self.seat not in self.seats.taken


def book(servers: str, seat: UUID) -> list[Event]:
    seats = Seats()
    with BlockingClient(servers, view=seats, serializer=EVENTS, feed=FeedMode.RECORDS) as client:
        client.submit(Book(seats, seat))
        many: Outcomes = client.append_many([Booked(seat=seat), Cancelled(seat)], key=seat)
        print(many.committed)
        return [fed.value for fed in client.read_some(0)]


def move(cluster: BlockingCluster, seat: UUID) -> UUID:
    with cluster.client(serializer=MOVES) as client:
        client.append(Moved(seat), partition=0)
        return client.read(0, 0).value.seat


async def raw(servers: list[str]) -> bytes:
    async with Client(servers) as client, Client(servers, serializer=Json[dict[str, int]]()) as counts:
        await counts.append({"a": 1}, key="a")
        return (await client.read(0, 0)).value
'''


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Path, str]:
    """Each file, with the text of the line where a checker must find something; none where it must not."""
    place = tmp_path_factory.mktemp("typed")
    found = {place / "bank.py": "", place / "plain.py": ""}
    (place / "bank.py").write_text(BANK, encoding="utf-8")
    (place / "plain.py").write_text(PLAIN, encoding="utf-8")
    for name, (right, wrong, where) in MISTAKES.items():
        assert right in BANK, name
        path = place / f"{name.replace(' ', '_')}.py"
        start = BANK.index("\n\nasync def story")
        path.write_text((BANK[:start] + EXTRA + BANK[start:]).replace(right, wrong, 1), encoding="utf-8")
        found[path] = where
    return found


def check(programs: Mapping[Path, str], lines: Mapping[Path, list[tuple[int, str]]]) -> None:
    for path, where in programs.items():
        said = lines.get(path, [])
        if where:
            text = path.read_text(encoding="utf-8").splitlines()
            assert any(where in text[number - 1] for number, _ in said), f"{path.name}: {said}"
        else:
            assert said == [], path.name


def test_mypy(programs: Mapping[Path, str]) -> None:
    place = next(iter(programs)).parent
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(place / "cache"),
        "-O",
        "json",
    ]
    done = subprocess.run([*command, *map(str, programs)], capture_output=True, text=True, cwd=place, env=ENVIRONMENT)
    lines: dict[Path, list[tuple[int, str]]] = {}
    for found in map(json.loads, done.stdout.splitlines()):
        lines.setdefault(place / found["file"], []).append((found["line"], found["message"]))
    assert done.stderr == ""
    check(programs, lines)


@pytest.mark.long  # in short: mypy, with the same programs
def test_pyright(programs: Mapping[Path, str]) -> None:
    place = next(iter(programs)).parent
    files = {**programs, **dict.fromkeys(APPLICATIONS, "")}
    config = {"typeCheckingMode": "strict", "include": [str(path) for path in files], "extraPaths": [str(ROOT)]}
    (place / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=ENVIRONMENT)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files), done.stderr
    lines: dict[Path, list[tuple[int, str]]] = {}
    for found in report["generalDiagnostics"]:
        lines.setdefault(Path(found["file"]), []).append((found["range"]["start"]["line"] + 1, found["message"]))
    check(files, lines)


def test_the_bank_runs(tmp_path: Path) -> None:
    said = asyncio.run(typed_bank.main(str(tmp_path / "bank.db")))
    assert said == ["it is transaction 1", "there is not enough money", "Deposited: 500", "Withdrawn: 300"]

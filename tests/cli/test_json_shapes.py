"""The shape of `-o json` of commands that read or change a cluster, against `tests/golden/outside/json.txt`.

A line of that file has a command, a path within its answer, and the type found there. In a path `[]` stands for each
element of a list and `{}` for each key that is a number or a name of this cluster. Null and empty values stand for any
type: what is optional is not always there. A line that goes or changes breaks scripts of users, and belongs in
CHANGELOG.md; fields may be added. To print today's lines: `.venv/bin/python -m tests.cli.test_json_shapes`.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

from tests.cli.conftest import LASTING
from tests.json_schemas import shape
from waltzctl import main
from waltzctl.local_cluster.local import LocalCluster
from waltzd import BlockingClient, ClientSettings, write_lock
from waltzd.errors import EXIT_FINDINGS, EXIT_UNHEALTHY

GOLDEN = Path(__file__).parents[1] / "golden" / "outside" / "json.txt"
PATIENCE_SECONDS = 120
COMMANDS = (
    "archive status",
    "archive status STORE --timelines",
    "archive verify STORE",
    "archive status --lost-now",
    "channel list",
    "client list",
    "client list anonymous",
    "doctor",
    "events",
    "group describe mails",
    "group list",
    "group parked list mails",
    "health",
    "history",
    "lock explain 0 account 17",
    "partition compare 0",
    "partition describe 0",
    "partition list",
    "policy explain anonymous",
    "policy explain",
    "segment dump SEGMENT",
    "server list",
    "status",
    "storage describe storage-1",
    "storage list",
    "storage verify storage-1",
    "txn get 0 0",
    "txn grep 0 --match 1",
    "txn history account:17 --partition 0",
)
CHANGES = {
    "channel set mail 1": "--yes",
    "client disconnect anonymous": "--yes",
    "cluster finalize": "--confirm local",
    "cluster save-metadata FILE": "",
    "cluster set --keep-local 7d --dry-run": "",
    "cluster set --keep-local 7d": "--yes",
    "group create letters --mode keyed": "--yes",
    "group set letters --tries 3": "--yes",
    "group reset letters --start 2026-01-01": "--yes",
    "group parked replay letters --all": "--yes",
    "group remove letters": "--confirm letters",
    "partition assign 1 --to storage-1,storage-2": "--confirm local",
    "partition auto-assign --replicas 3": "--yes",
    "partition transfer 0 --to server-1": "--yes",
    "partition preferred 0 --server server-1": "--yes",
    "policy set --none": "--yes",
    "server drain server-1": "--yes",
    "server drain server-1 --undo": "--yes",
    "storage set storage-1 --group rack-1": "--yes",
    "storage remove storage-3 --fewer-replicas": "--confirm storage-3",
    "txn append 0 hello": "",
}
"""Commands that change something, in an order in which they work, each with its confirmation."""


def run(arguments: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as told:
        code = main.run(arguments)
    assert code in (0, EXIT_FINDINGS, EXIT_UNHEALTHY), arguments
    return told.getvalue()


def answers(directory: Path) -> dict[str, set[str]]:
    """Bring up a cluster with an archive, a group and a channel; return the shape of every answer."""
    store = directory / "archive"
    settings = {**LASTING, "server": {**LASTING["server"], "segment_bytes_max": 20_000, "backup_seconds": 1}}
    cluster = LocalCluster.make(directory / "cluster", partitions=2, archive=str(store), settings=settings)
    where = ["--directory", str(cluster.directory)]
    try:
        cluster.start()
        run(["channel", "set", "orders", "1", "--yes", *where])
        run(["group", "create", "mails", "--mode", "queue", "--yes", *where])
        with BlockingClient(cluster.server_addresses, settings=ClientSettings(instance="shop")) as client:
            for number in range(40):
                client.append_many([b"%d." % number * 100] * 20, partition=0)
            client.append(b"1", partition=0, locks=[write_lock("account", 17)], position=client.end_position(0))
            ends = time.monotonic() + PATIENCE_SECONDS
            while not any("/segment/" in str(path) for path in store.rglob("*")):
                assert time.monotonic() < ends, "nothing was archived"
                time.sleep(0.1)
            found = {}
            places = {
                "STORE": str(store),
                "FILE": str(directory / "metadata.jsonl"),
                "SEGMENT": str(next(cluster.storage_directories[0].rglob("0/*.seg"))),
            }
            for command, confirmation in {**dict.fromkeys(COMMANDS, ""), **CHANGES}.items():
                words = [places.get(word, word) for word in [*command.split(), *confirmation.split()]]
                text = run([*words, "-o", "json", *([] if {"STORE", "SEGMENT"} & set(command.split()) else where)])
                lines_apart = text.startswith("{") and text.count("\n{")
                values = [json.loads(line) for line in text.splitlines()] if lines_apart else [json.loads(text)]
                found[command] = {line for value in values for line in shape(value)}
            return found
    finally:
        cluster.kill()


def lines(found: dict[str, set[str]]) -> list[str]:
    return [f"{command}: {line}" for command in (*COMMANDS, *CHANGES) for line in sorted(found[command])]


def test_answers_for_scripts_keep_their_shape(tmp_path: Path) -> None:
    found = lines(answers(tmp_path))
    absent = tuple(line.removesuffix(" null") for line in found if line.endswith(" null"))
    missing = set(GOLDEN.read_text(encoding="utf-8").splitlines()) - set(found)
    assert sorted(line for line in missing if not line.startswith(absent) and not line.endswith(" null")) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(*lines(answers(Path(directory))), sep="\n")

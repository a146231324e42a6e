"""What the version before reads of what this one writes, and which numbers of messages it relies on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.process.versions import BEFORE, environment
from tests.release.packages import git
from tests.unit.waltzd.cluster.test_documents import EXAMPLES
from waltzd.cluster.documents import ClusterMeta
from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.document import encode
from waltzd.protocol.groups import KeyedBy, Mode

READ = """
import json, sys
from waltzd.cluster import documents, groups
from waltzd.errors.operations import BadMetadata
from waltzd.protocol.document import decode, encode

for name, kind, text in json.load(sys.stdin):
    try:
        found = decode(getattr(groups if kind == "GroupMeta" else documents, kind), text.encode(), name)
    except BadMetadata as error:
        print(error.message)
    else:
        assert encode(found) == text.encode(), name
"""
"""Program of the version before: it names each document that it refuses, and writes no other document differently."""
OUTSIDE = "tests/golden/outside/messages.txt"


def refused_before(documents: list[tuple[str, str, str]], folder: Path) -> list[str]:
    done = subprocess.run(
        [environment(BEFORE, "0.0.0"), "-P", "-c", READ],
        input=json.dumps(documents), capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_version_before_reads_every_document_until_the_level_is_raised(tmp_path: Path) -> None:
    documents = [(name, type(found).__name__, encode(found).decode()) for name, found in EXAMPLES.items()]
    for key in KeyedBy:
        group = GroupMeta(name="mails", partitions=None, mode=Mode.KEYED, key=key, kinds=(3, 5))
        documents.append((f"group {key.word}", "GroupMeta", encode(group).decode()))
    assert len(documents) > 15
    assert refused_before(documents, tmp_path) == []
    cluster = EXAMPLES["cluster"]
    assert isinstance(cluster, ClusterMeta)
    finalized = json.dumps({**json.loads(encode(cluster)), "level": 1})
    assert refused_before([("/", "ClusterMeta", finalized)], tmp_path) == ["/: level is not known to this version of Waltz"]


def numbers(text: str) -> dict[tuple[str, str], str]:
    """Return the type of each number of each message, and what each call takes and gives."""
    found = {}
    for line in text.splitlines():
        name, is_field, rest = line.partition(" = ")
        message = name.rpartition(".")[0]
        number, _, kind = rest.partition(": ")
        found[(message, number) if is_field else (line.partition(": ")[0], "")] = kind if is_field else rest
    return found


def test_no_number_of_a_message_means_something_else_than_before() -> None:
    before = numbers(git("show", f"{BEFORE}:{OUTSIDE}"))
    now = numbers((Path(__file__).parents[2] / OUTSIDE).read_text(encoding="utf-8"))
    assert len(before) > 400
    assert {key: (kind, now[key]) for key, kind in before.items() if key in now and now[key] != kind} == {}
    assert before.keys() - now.keys() == set()

"""The file with the documents of a cluster: it comes back as it was written, proves itself, and was read at one moment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.unit.timeless import run
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import CLIENT_IDS, Cluster, partition_path, replicas_path, save_channels
from waltzd.cluster.coordinator import Node, Set
from waltzd.cluster.documents import (
    NO_SECRET,
    ChannelsDocument,
    ClusterMeta,
    Counter,
    HistoryEntry,
    Membership,
    Moves,
    PartitionMeta,
    PolicyDocument,
    Preferences,
    ReplicaSet,
    ReplicaSets,
    ReplicaState,
    StorageMeta,
    Unfinished,
    decode_root,
)
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.cluster.metadata import (
    KIND,
    SIGNATURE_LINE,
    SavedDocuments,
    kind_of,
    read,
    read_documents,
    without_secret,
    write,
)
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, MetadataFileDamaged, MetadataUnfinished, UnknownVersion
from waltzd.protocol.channels import Ranges
from waltzd.protocol.document import encode
from waltzd.protocol.policy import Grant

KEY, HOME = UUID(int=7), UUID(int=9)
META = PartitionMeta(
    generation=3, session=5, opened=5, low_mark=2, members=("one",),
    replicas={"one": ReplicaState(session=5, closing=None, incarnation=HOME, acknowledged=8)},
)  # fmt: skip


async def made(tree: MemoryTree) -> Cluster:
    """A cluster with a document of every kind."""
    cluster = await Cluster.create(
        tree.connect(),
        ClusterMeta(name="payments", key=KEY, partitions=2, created="2026-01-01"),
        storages=[StorageMeta(name="one", listen="one:1", admin_listen="one:2", group="größe")],
        replicas=ReplicaSets(partitions={number: {"one": Membership.MEMBER} for number in (0, 1)}),
    )
    await cluster.save_partition(0, META, None)
    await cluster.save_preferences(Preferences(partitions={1: "a"}), -1)
    await cluster.save_moves(Moves(partitions={1: ("one",)}), -1)
    await cluster.save_policy(PolicyDocument(grants=(Grant(names=("app",), may=("read",)),)), -1)  # type: ignore[arg-type]
    await save_channels(cluster.coordinator, ChannelsDocument(channels={"orders": Ranges("0-1")}), -1, policy=0)
    await cluster.begin_history(
        HistoryEntry(
            began="t", ended=None, who="ann", verb="v", subject="s", reason="a\u2028b\r\n", steps=("",), outcome="o"
        )
    )
    await ClientNames(cluster.coordinator, clock=lambda: 5).note_seen("app")
    return cluster


async def saved() -> SavedDocuments:
    return await read_documents(await made(MemoryTree()), moment="2026-11-24T09:00:00+00:00")


def test_every_document_comes_back_as_it_was() -> None:
    found = run(saved())
    assert read(write(found), "file") == found
    assert found.meta.name == "payments"
    assert found.partition(0) == META
    assert (found.partition(1), found.replicas(1)) == (None, ReplicaSet({"one": Membership.MEMBER}))
    assert set(found.storages) == {"one"}
    assert len(found.documents) == 13
    lines = write(found).decode().split("\n")
    assert json.loads(lines[0])["cluster"] == "payments"
    assert all(json.loads(line) for line in lines[:-1])


def test_every_prefix_and_every_changed_byte_is_refused() -> None:
    data = write(run(saved()))
    for end in range(0, len(data), 7):
        with pytest.raises(MetadataFileDamaged):
            read(data[:end], "file")
    for at in range(0, len(data), 3):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((MetadataFileDamaged, UnknownVersion)):
            read(changed, "file")


def signed(*lines: object) -> bytes:
    """A file that proves itself, whatever it says."""

    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    end = {"documents": len(lines) - 1, "sha256": hashlib.sha256(body).hexdigest()}
    return body + json.dumps(end).encode() + b"\n"


ROOT = {"path": "/", "document": json.loads(encode(ClusterMeta(name="a", key=KEY, partitions=1, created="t")))}
HEAD = {"kind": KIND, "version": 1, "cluster": "a", "key": str(KEY), "moment": "t", "left_out": []}


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([HEAD | {"version": 2}, ROOT], UnknownVersion),
        ([HEAD, ROOT, {"path": "/new-kind", "document": {}}], UnknownVersion),
        ([HEAD, ROOT, {"path": "/servers/a", "document": {}}], UnknownVersion),
        ([HEAD, ROOT, {"path": 5}], UnknownVersion),
        ([HEAD, {"path": "/", "document": {**ROOT["document"], "schema": 2}}], BadMetadata),
        ([HEAD, {"path": "/", "document": {**ROOT["document"], "partitions": 0}}], BadMetadata),
        ([HEAD, ROOT, {"path": "/replicas/2", "document": {"schema": 1, "replicas": {}}}], MetadataFileDamaged),
        ([HEAD, ROOT, ROOT], MetadataFileDamaged),
        ([HEAD], MetadataFileDamaged),
        ([HEAD | {"key": str(HOME)}, ROOT], MetadataFileDamaged),
        ([HEAD | {"moment": None}, ROOT], MetadataFileDamaged),
        ([{"kind": KIND, "version": 1}, ROOT], MetadataFileDamaged),
        ([[], ROOT], MetadataFileDamaged),
    ],
)
def test_a_file_that_proves_itself_and_says_what_cannot_be(lines: Sequence[object], error: type[WaltzError]) -> None:
    with pytest.raises(error):
        read(signed(*lines), "file")
    assert read(signed(HEAD, ROOT), "file").meta.name == "a"


def test_what_goes_with_a_session_is_not_in_it() -> None:
    assert kind_of("/servers/a") is kind_of("/election/leader") is kind_of("/copy-rate") is kind_of("/ids") is None
    assert kind_of("/partitions/x") is kind_of("/storages/..") is kind_of("/partitions") is None
    assert kind_of(CLIENT_IDS) is Counter


# -- one moment --------------------------------------------------------------------------------------------------------


class Busy:
    """A coordinator in which something happens between the reads."""

    def __init__(self, inner: MemoryCoordinator, happens: Any, *, at: Sequence[int]) -> None:
        self._inner, self._happens, self._at, self._reads = inner, happens, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, path: str) -> Node | None:
        self._reads += 1
        if self._reads in self._at:
            await self._happens()
        return await self._inner.get(path)


def test_documents_that_change_together_are_read_as_they_stood_together() -> None:
    """A learner becomes a member, in both documents of its partition, at every moment of the reading."""

    async def test(moment: int) -> None:
        tree = MemoryTree()
        cluster = await made(tree)

        async def promote() -> None:
            roles, version = await cluster.replica_set(0)
            meta = replace(META, session=6, opened=6)
            await cluster.save_partition(0, meta, 0, replicas=({**roles, "one": Membership.LEARNER}, version))

        found = await read_documents(Cluster(Busy(tree.connect(), promote, at=[moment])), moment="t")
        is_new = found.replicas(0).replicas["one"] is Membership.LEARNER
        meta = found.partition(0)
        assert meta is not None
        assert (meta.session == 6) == is_new

    for moment in range(1, 30):
        run(test(moment))


def test_what_only_rises_holds_up_nothing_and_what_never_stands_still_is_said() -> None:
    async def test(path: str, change: Any) -> SavedDocuments:
        tree = MemoryTree()
        cluster = await made(tree)
        node = await cluster.coordinator.get(path)
        assert node is not None

        async def write_again() -> None:
            now = await cluster.coordinator.get(path)
            assert now is not None
            with suppress(ChangedMeanwhile):  # another read was faster to do so
                await cluster.coordinator.commit([Set(path, encode(change(now.version)), now.version)])

        return await read_documents(Cluster(Busy(tree.connect(), write_again, at=range(1, 10_000))), moment="t")

    def risen(version: int) -> PartitionMeta:
        return replace(META, replicas={"one": replace(META.replicas["one"], acknowledged=version)})

    assert run(test(CLIENT_IDS, lambda version: Counter(version + 5, KEY))).documents[CLIENT_IDS] != Counter(1, KEY)
    assert run(test(partition_path(0), risen)).partition(0) != META
    with pytest.raises(ChangedMeanwhile):
        run(test(partition_path(0), lambda version: replace(META, session=6 + version)))


def test_a_document_that_cannot_be_understood_is_left_out_by_name_and_a_newer_one_ends_it() -> None:
    async def test(data: bytes) -> SavedDocuments:
        tree = MemoryTree()
        cluster = await made(tree)
        await cluster.coordinator.commit([Set(replicas_path(0), data, 0)])
        return await read_documents(cluster, moment="t")

    found = run(test(b"{oops"))
    assert found.left_out == ("/replicas/0",)
    assert read(write(found), "file") == found
    with pytest.raises(BadMetadata, match="schema 2"):
        run(test(b'{"schema": 2}'))


def test_a_root_that_is_not_whole_is_refused_by_name() -> None:
    mark = Unfinished(key=KEY, unfinished="waltzctl cluster load-metadata", began="2026-11-24")
    with pytest.raises(MetadataUnfinished, match="waltzctl cluster load-metadata began at 2026-11-24"):
        decode_root(encode(mark))
    with pytest.raises(BadMetadata, match="is not a JSON document"):
        decode_root(b"{")

    async def save_it() -> None:
        tree = MemoryTree()
        cluster = await made(tree)
        await cluster.coordinator.commit([Set("/", encode(mark), 0)])
        await read_documents(cluster, moment="t")

    with pytest.raises(MetadataUnfinished):
        run(save_it())


def test_without_its_secret_the_rest_is_as_it_was_and_nobody_proves_an_id_with_what_is_left() -> None:
    """Documents of an archive, put back by a program that does not know of it."""

    async def test() -> None:
        tree = MemoryTree()
        cluster = await made(tree)
        saved = await read_documents(cluster, moment="t")
        bare = without_secret(saved)
        counter = saved.documents[CLIENT_IDS]
        assert isinstance(counter, Counter)
        assert counter.secret.hex not in write(bare).decode().replace("-", "")
        assert bare.documents == {**saved.documents, CLIENT_IDS: Counter(counter.next, NO_SECRET)}
        node = await cluster.coordinator.get(CLIENT_IDS)
        assert node is not None
        await cluster.coordinator.commit([Set(CLIENT_IDS, encode(bare.documents[CLIENT_IDS]), node.version)])
        one, other = Cluster(tree.connect()), Cluster(tree.connect())
        await one.read_counter()
        await other.read_counter()
        assert one.client_secret == other.client_secret != NO_SECRET.bytes
        assert await one.new_client_id() > counter.next

    run(test())


def test_a_line_of_a_signature_behind_the_end_is_left_out() -> None:
    async def test() -> bytes:
        return write(await read_documents(await made(MemoryTree()), moment="t"))

    text = run(test())
    assert read(text + SIGNATURE_LINE + b'"0"}\n', "here") == read(text, "here")

"""The documents of a cluster in one file with a checksum, and a consistent read of them from a coordinator in use.

The file is text with one JSON object per line: a head with the cluster's name and key; one line for each document, by its
path; an end with the number of documents and a hash of all lines before. Any tool can read it, and a file that lost or
changed anything is refused as a whole. Ephemeral documents are not in it: the servers that are up, and the leader.

Documents depend on each other, so they are read as of one moment: they are read repeatedly until none has changed between
two reads. Three values change all the time and are exempt, because they only rise: how far replicas have acknowledged, the
counter of client ids, and the times at which applications were seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from waltzd.cluster.cluster import (
    ARCHIVES,
    ASSIGNMENT,
    CHANNELS,
    CLIENT_IDS,
    CLIENTS,
    EXPECTED,
    HISTORY,
    MOVES,
    PARTITIONS,
    POLICY,
    PREFERRED,
    REPLICAS,
    ROOT,
    STORAGES,
    Cluster,
)
from waltzd.cluster.coordinator import Node
from waltzd.cluster.documents import (
    NO_SECRET,
    ArchiveMeta,
    Assignment,
    ChannelsDocument,
    ClientMeta,
    ClusterMeta,
    Counter,
    HistoryEntry,
    Moves,
    PartitionMeta,
    PolicyDocument,
    Preferences,
    ReplicaSet,
    ServerMeta,
    StorageMeta,
)
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, MetadataFileDamaged, UnknownVersion
from waltzd.protocol.address import is_name
from waltzd.protocol.document import Document, decode, encode

VERSION = 1
KIND = "metadata of a waltz cluster"
SIGNATURE_LINE = b'{"signature":'
"""Start of the line after the end, which is in a file from an archive with a key."""
PASSES_MAX = 50
"""Reads of all documents before `read_documents` gives up, because commands keep changing the cluster."""
_SINGLE: Mapping[str, type[Document]] = {
    ROOT: ClusterMeta,
    ASSIGNMENT: Assignment,
    CLIENT_IDS: Counter,
    PREFERRED: Preferences,
    MOVES: Moves,
    POLICY: PolicyDocument,
    CHANNELS: ChannelsDocument,
}
_NUMBERED: Mapping[str, type[Document]] = {
    REPLICAS: ReplicaSet,
    PARTITIONS: PartitionMeta,
    HISTORY: HistoryEntry,
    ARCHIVES: ArchiveMeta,
}
_NAMED: Mapping[str, type[Document]] = {EXPECTED: ServerMeta, STORAGES: StorageMeta, CLIENTS: ClientMeta}


def kind_of(path: str) -> type[Document] | None:
    """Return the kind of document at a path; None if the path has none that can be restored."""
    folder, _, name = path.rpartition("/")
    if path in _SINGLE:
        return _SINGLE[path]
    if folder in _NUMBERED and name.isascii() and name.isdecimal():
        return _NUMBERED[folder]
    return _NAMED.get(folder) if is_name(name) else None


@dataclass(frozen=True, kw_only=True)
class SavedDocuments:
    """The documents of a cluster as of one moment."""

    moment: str
    documents: Mapping[str, Document]
    """Documents by path."""
    left_out: tuple[str, ...] = ()
    """Paths of the documents that could not be decoded."""

    @property
    def meta(self) -> ClusterMeta:
        found = self.documents[ROOT]
        assert isinstance(found, ClusterMeta)
        return found

    def below(self, folder: str, kind: type[Any]) -> dict[str, Any]:
        """Return the documents of a folder, by their names."""
        found = {
            path.rpartition("/")[2]: document
            for path, document in self.documents.items()
            if path != ROOT and path.rpartition("/")[0] == folder
        }
        assert all(isinstance(document, kind) for document in found.values())
        return found

    @property
    def numbers(self) -> list[int]:
        """Numbers of the logs that have documents of their own."""
        return [int(one) for folder in (REPLICAS, PARTITIONS) for one in self.below(folder, Document)]

    @property
    def logs(self) -> int:
        """Number of logs: the partitions, and the group log if there is one."""
        assignment, partitions = self.assignment, self.meta.partitions
        owners = 0 if assignment is None else len(assignment.owners)
        return partitions + (owners == partitions + 1 or (assignment is None and partitions in self.numbers))

    @property
    def storages(self) -> dict[str, StorageMeta]:
        return self.below(STORAGES, StorageMeta)

    @property
    def servers(self) -> dict[str, ServerMeta]:
        """Servers that should be up, with their last registration."""
        return self.below(EXPECTED, ServerMeta)

    def partition(self, number: int) -> PartitionMeta | None:
        found = self.documents.get(f"{PARTITIONS}/{number}")
        assert found is None or isinstance(found, PartitionMeta)
        return found

    @property
    def archives(self) -> dict[int, ArchiveMeta]:
        """Documents of the archives, by partition."""
        return {int(name): meta for name, meta in self.below(ARCHIVES, ArchiveMeta).items()}

    def replicas(self, number: int) -> ReplicaSet:
        found = self.documents.get(f"{REPLICAS}/{number}", ReplicaSet({}))
        assert isinstance(found, ReplicaSet)
        return found

    @property
    def assignment(self) -> Assignment | None:
        found = self.documents.get(ASSIGNMENT)
        assert found is None or isinstance(found, Assignment)
        return found


# -- the file ----------------------------------------------------------------------------------------------------------


def line_of(path: str, document: Document) -> bytes:
    """Return one document as a line of the file."""
    return _line({"path": path, "document": json.loads(encode(document))})


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def without_secret(saved: SavedDocuments) -> SavedDocuments:
    """Return the documents without the secret of client ids, to be stored where others can read them.

    A restore of these documents makes a new secret."""
    found = saved.documents.get(CLIENT_IDS)
    if not isinstance(found, Counter):
        return saved
    return replace(saved, documents={**saved.documents, CLIENT_IDS: replace(found, secret=NO_SECRET)})


def write(saved: SavedDocuments) -> bytes:
    """Return the documents as a file."""
    head = {
        "kind": KIND,
        "version": VERSION,
        "cluster": saved.meta.name,
        "key": str(saved.meta.key),
        "moment": saved.moment,
        "left_out": list(saved.left_out),
    }
    body = b"".join([_line(head), *(line_of(path, document) for path, document in sorted(saved.documents.items()))])
    return body + _line({"documents": len(saved.documents), "sha256": hashlib.sha256(body).hexdigest()})


def read(data: bytes, name: str) -> SavedDocuments:
    """Return the documents in a file; raise if it is damaged. `name` is the name of the file, for error messages."""
    lines = data.splitlines(keepends=True)
    if lines and lines[-1].startswith(SIGNATURE_LINE):  # the archive checks it, if a key is configured
        lines.pop()
    head = _parse(lines[0] if lines else b"", name, 1)
    if head.get("kind") != KIND:
        raise MetadataFileDamaged(f"{name} holds no metadata of a cluster")
    if type(head.get("version")) is not int or head["version"] > VERSION:
        raise UnknownVersion(f"{name} has version {head.get('version')}; this program knows {VERSION}")
    end = _parse(lines[-1], name, len(lines))
    body = b"".join(lines[:-1])
    if "sha256" not in end or not lines[-1].endswith(b"\n"):
        raise MetadataFileDamaged(f"{name} ends in the middle: its last line is not the one that proves it")
    if end["sha256"] != hashlib.sha256(body).hexdigest() or end.get("documents") != len(lines) - 2:
        raise MetadataFileDamaged(f"{name} was changed since it was written: its lines do not fit the hash at its end")
    documents = dict(_document(_parse(line, name, at), name, at) for at, line in enumerate(lines[1:-1], 2))
    try:
        saved = SavedDocuments(moment=head["moment"], documents=documents, left_out=tuple(head["left_out"]))
        is_whole = str(saved.meta.key) == head["key"] and len(documents) == len(lines) - 2
    except (KeyError, TypeError) as error:
        raise MetadataFileDamaged(f"{name} does not say whose documents it holds") from error
    if not is_whole or not isinstance(saved.moment, str):
        raise MetadataFileDamaged(f"{name} contradicts itself: its head names another cluster, or a document comes twice")
    _check_numbers(saved, name)
    return saved


def _parse(line: bytes, name: str, at: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MetadataFileDamaged(f"{name}: line {at} is not a JSON object") from error
    if not isinstance(found, dict):
        raise MetadataFileDamaged(f"{name}: line {at} is not a JSON object")
    return found


def _document(found: Mapping[str, Any], name: str, at: int) -> tuple[str, Document]:
    path = found.get("path")
    kind = kind_of(path) if isinstance(path, str) else None
    if kind is None or not isinstance(path, str):
        raise UnknownVersion(f"{name}: line {at} has a document {path!r}, which this program does not know")
    return path, decode(kind, json.dumps(found.get("document")).encode(), f"{name}: {path}")


def _check_numbers(saved: SavedDocuments, name: str) -> None:
    assignment, numbers = saved.assignment, saved.numbers
    if max(numbers, default=0) >= saved.logs or (assignment is not None and len(assignment.owners) != saved.logs):
        raise MetadataFileDamaged(f"{name} contradicts itself: it has more or fewer partitions than the cluster")


def _still(document: Document) -> Document:
    """Return the document; that of a partition without how far its replicas have acknowledged."""
    if not isinstance(document, PartitionMeta):
        return document
    return replace(document, replicas={name: replace(one, acknowledged=-1) for name, one in document.replicas.items()})


# -- reading a coordinator ---------------------------------------------------------------------------------------------


async def read_documents(cluster: Cluster, *, moment: str) -> SavedDocuments:
    """Return all documents as of one moment; raise `ChangedMeanwhile` if they keep changing."""
    await cluster.meta()  # refuse a cluster that is being restored
    before = await _look(cluster)
    for _ in range(PASSES_MAX):
        nodes = await _look(cluster)
        if _settled(before) == _settled(nodes):
            break
        before = nodes
    else:
        raise ChangedMeanwhile(
            f"the documents of the cluster changed in each of {PASSES_MAX} looks at them",
            not_done="nothing was saved",
            next_step="wait until no command moves replicas, then try again",
        )
    documents, left_out = dict[str, Document](), list[str]()
    for path, node in nodes.items():
        kind = kind_of(path)
        try:
            if kind is not None:
                documents[path] = decode(kind, node.data, path)
        except BadMetadata as error:
            if "schema" in error.facts or path == ROOT:
                raise
            left_out.append(path)
    return SavedDocuments(moment=moment, documents=documents, left_out=tuple(sorted(left_out)))


async def document_versions(cluster: Cluster) -> Mapping[str, object]:
    """Return a value for each document that differs if the documents have to be saved again.

    One read, not as of one moment. Documents about archives are left out: an archive holds that information itself."""
    found = _settled(await _look(cluster))
    return {path: one for path, one in found.items() if not path.startswith(f"{ARCHIVES}/")}


async def _look(cluster: Cluster) -> dict[str, Node]:
    paths = [path for path in await cluster.paths() if kind_of(path) is not None]
    nodes = await cluster.each(paths, cluster.coordinator.get)
    return {path: node for path, node in zip(paths, nodes, strict=True) if node is not None}


def _settled(nodes: Mapping[str, Node]) -> dict[str, object]:
    """Return the part of the documents that must not change between two reads: all but the values that only rise."""
    return {
        path: _without_marks(node) if path.startswith(f"{PARTITIONS}/") else (node.created, node.version)
        for path, node in nodes.items()
        if path != CLIENT_IDS and not path.startswith(f"{CLIENTS}/")
    }


def _without_marks(node: Node) -> object:
    try:
        meta = decode(PartitionMeta, node.data, "")
    except BadMetadata:
        return node.created, node.version
    return _still(meta)

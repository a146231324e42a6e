"""The values of `waltzd.cluster.meta` as the JSON documents that the coordinator keeps, and back. Pure.

Each document carries the schema version with which it was written, so that an operator can read it with any tool, and an
older Waltz refuses what it does not understand. Reading is strict: a field that is missing, ill-typed, out of its bounds or
not known is `BadMetadata` with the path and the field, never a guess; recovery relies on every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from waltzd.cluster.fields import Fields
from waltzd.cluster.meta import (
    Assignment,
    ClusterMeta,
    CopyRate,
    Counter,
    Decision,
    HistoryEntry,
    Leader,
    Moves,
    Ownership,
    PartitionMeta,
    Preferences,
    ReplicaSet,
    ReplicaSets,
    ReplicaState,
    ServerMeta,
    StorageMeta,
)
from waltzd.errors import BadMetadata
from waltzd.format.layout import PARTITIONS_MAX

SCHEMA = 1
GENERATION_MAX = (1 << 31) - 1
NESTING_MAX = 8
"""Twice as deep as any document is."""

Document: TypeAlias = (
    ClusterMeta
    | ServerMeta
    | Assignment
    | StorageMeta
    | ReplicaSet
    | ReplicaSets
    | PartitionMeta
    | Leader
    | Counter
    | Preferences
    | Moves
    | CopyRate
    | HistoryEntry
)
D = TypeVar("D", ClusterMeta, ServerMeta, Assignment, StorageMeta, ReplicaSet, ReplicaSets, PartitionMeta, Leader, Counter,
            Preferences, Moves, CopyRate, HistoryEntry)  # fmt: skip


def encode(value: Document) -> bytes:
    """The document as it is kept: sorted, one fact a line, for people too. What could not be read again is `BadMetadata`
    here already."""
    kind: type[Any] = type(value)
    fields = {"schema": SCHEMA, **_CODECS[kind][0](value)}
    data = json.dumps(_sorted(fields), indent=1, ensure_ascii=False).encode() + b"\n"
    assert decode(kind, data, "what is to be written") == value
    return data


def decode(kind: type[D], data: bytes, path: str) -> D:
    """The value of a document; `path` is for the message when it cannot be understood."""
    try:
        fields = json.loads(data, object_pairs_hook=_unambiguous, parse_constant=_no_number)
        _check_tellable(fields)
    except (ValueError, RecursionError) as error:
        raise BadMetadata(f"{path} is not a JSON document: {error}", path=path) from error
    document = Fields(fields, path)
    schema = document.integer("schema", least=1)
    if schema != SCHEMA:
        raise BadMetadata(
            f"{path} has schema {schema}; this version of Waltz knows schema {SCHEMA}", path=path, schema=schema
        )
    value: D = _CODECS[kind][1](document)
    document.end()
    return value


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return fields


def _check_tellable(value: object, depth: int = 0) -> None:
    """No half of a character, which could neither be written again nor told, and no more nesting than can be shown."""
    if depth > NESTING_MAX:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, inner in value.items():
            key.encode()
            _check_tellable(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_tellable(inner, depth + 1)


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is not a number of JSON")


def _sorted(value: object) -> object:
    """Names in their order, and numbers as numbers: 2 before 10."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=_place)}
    return value


def _place(key: str) -> tuple[bool, int, str]:
    return (False, len(key), key) if key.isdecimal() else (True, 0, key)


def _cluster_fields(value: ClusterMeta) -> dict[str, object]:
    return {"name": value.name, "key": str(value.key), "partitions": value.partitions, "created": value.created}


def _cluster(fields: Fields) -> ClusterMeta:
    return ClusterMeta(
        name=fields.name("name"),
        key=fields.uuid("key"),
        partitions=fields.integer("partitions", least=1, most=PARTITIONS_MAX),
        created=fields.text("created"),
    )


def _server_fields(value: ServerMeta) -> dict[str, object]:
    return {
        "name": value.name, "listen": value.listen, "admin_listen": value.admin_listen, "instance": str(value.instance),
        "version": value.version, "preferred": list(value.preferred), "is_draining": value.is_draining,
    }  # fmt: skip


def _server(fields: Fields) -> ServerMeta:
    return ServerMeta(
        name=fields.name("name"),
        listen=fields.text("listen"),
        admin_listen=fields.text("admin_listen"),
        instance=fields.uuid("instance"),
        version=fields.text("version"),
        preferred=fields.integers("preferred"),
        is_draining=fields.flag("is_draining"),
    )


def _assignment_fields(value: Assignment) -> dict[str, object]:
    owners = {str(number): {"server": owner.server, "generation": owner.generation}
              for number, owner in enumerate(value.owners)}  # fmt: skip
    return {"partitions": owners}


def _assignment(fields: Fields) -> Assignment:
    partitions = fields.object("partitions")
    numbers = partitions.keys_of_partitions()
    if numbers != list(range(len(numbers))):
        raise partitions.wrong("", "must name every partition from 0 on")
    return Assignment(owners=tuple(_ownership(partitions.object(str(number))) for number in numbers))


def _ownership(fields: Fields) -> Ownership:
    owner = Ownership(fields.name_or_none("server"), fields.integer("generation", most=GENERATION_MAX))
    fields.end()
    return owner


def _storage_fields(value: StorageMeta) -> dict[str, object]:
    return {"name": value.name, "listen": value.listen, "admin_listen": value.admin_listen, "group": value.group}


def _storage(fields: Fields) -> StorageMeta:
    return StorageMeta(
        name=fields.name("name"),
        listen=fields.text("listen"),
        admin_listen=fields.text("admin_listen"),
        group=fields.text("group"),
    )


def _set_fields(value: ReplicaSet) -> dict[str, object]:
    return {"replicas": {name: role.value for name, role in value.roles.items()}}


def _set(fields: Fields) -> ReplicaSet:
    replicas = fields.object("replicas")
    return ReplicaSet({name: replicas.role(name) for name in replicas.keys_of_names()})


def _sets_fields(value: ReplicaSets) -> dict[str, object]:
    return {"partitions": {str(number): {name: role.value for name, role in replicas.items()}
                           for number, replicas in value.partitions.items()}}  # fmt: skip


def _sets(fields: Fields) -> ReplicaSets:
    partitions = fields.object("partitions")
    found = {}
    for number in partitions.keys_of_partitions():
        replicas = partitions.object(str(number))
        found[number] = {name: replicas.role(name) for name in replicas.keys_of_names()}
    return ReplicaSets(partitions=found)


def _partition_fields(value: PartitionMeta) -> dict[str, object]:
    decision = value.decision
    return {
        "generation": value.generation,
        "session": value.session,
        "opened": value.opened,
        "low_mark": value.low_mark,
        "members": list(value.members),
        "replicas": {name: _state_fields(state) for name, state in value.replicas.items()},
        "decision": None if decision is None else {"mark": decision.mark, "session": decision.session},
        "given_up": {str(rescue): mark for rescue, mark in value.given_up.items()},
    }


def _partition(fields: Fields) -> PartitionMeta:
    session, decision = fields.integer("session"), fields.object_or_none("decision")
    replicas, given_up = fields.object("replicas"), fields.object("given_up")
    return PartitionMeta(
        generation=fields.integer("generation", most=GENERATION_MAX),
        session=session,
        opened=fields.integer("opened", most=session),
        low_mark=fields.integer("low_mark", least=-1),
        members=fields.names("members"),
        replicas={name: _state(replicas.object(name)) for name in replicas.keys_of_names()},
        decision=None if decision is None else _decision(decision, session),
        given_up={rescue: given_up.integer(str(rescue), least=-1) for rescue in given_up.keys_of_partitions()},
    )


def _state_fields(value: ReplicaState) -> dict[str, object]:
    return {
        "session": value.session,
        "closing": value.closing,
        "incarnation": str(value.incarnation),
        "acknowledged": value.acknowledged,
        "is_lost": value.is_lost,
    }


def _state(fields: Fields) -> ReplicaState:
    state = ReplicaState(
        session=fields.integer("session", least=-1),
        closing=fields.integer_or_none("closing", least=-1),
        incarnation=fields.uuid("incarnation"),
        acknowledged=fields.integer("acknowledged", least=-1),
        is_lost=fields.flag("is_lost"),
    )
    fields.end()
    return state


def _decision(fields: Fields, session: int) -> Decision:
    decision = Decision(mark=fields.integer("mark", least=-1), session=fields.integer("session", most=session))
    fields.end()
    return decision


def _leader_fields(value: Leader) -> dict[str, object]:
    return {"name": value.name}


def _leader(fields: Fields) -> Leader:
    return Leader(name=fields.name("name"))


def _counter_fields(value: Counter) -> dict[str, object]:
    return {"next": value.next, "secret": str(value.secret)}


def _counter(fields: Fields) -> Counter:
    return Counter(next=fields.integer("next"), secret=fields.uuid("secret"))


def _preferences_fields(value: Preferences) -> dict[str, object]:
    return {"partitions": {str(number): server for number, server in value.partitions.items()}}


def _preferences(fields: Fields) -> Preferences:
    partitions = fields.object("partitions")
    return Preferences(partitions={number: partitions.name(str(number)) for number in partitions.keys_of_partitions()})


def _moves_fields(value: Moves) -> dict[str, object]:
    return {"partitions": {str(number): list(names) for number, names in value.partitions.items()}}


def _moves(fields: Fields) -> Moves:
    partitions = fields.object("partitions")
    return Moves(partitions={number: partitions.names(str(number)) for number in partitions.keys_of_partitions()})


def _copy_rate(fields: Fields) -> CopyRate:
    return CopyRate(bytes_per_second=fields.integer("bytes_per_second", least=1), who=fields.text("who"))


def _history_fields(value: HistoryEntry) -> dict[str, object]:
    return {**vars(value), "steps": list(value.steps)}


def _history(fields: Fields) -> HistoryEntry:
    return HistoryEntry(
        began=fields.text("began"), ended=fields.text_or_none("ended"), who=fields.text("who"), verb=fields.text("verb"),
        subject=fields.text("subject"), reason=fields.text_or_none("reason"), steps=fields.texts("steps"),
        outcome=fields.text("outcome"),
    )  # fmt: skip


_CODECS: dict[type[Any], tuple[Callable[[Any], dict[str, object]], Callable[[Fields], Any]]] = {
    ClusterMeta: (_cluster_fields, _cluster),
    ServerMeta: (_server_fields, _server),
    Assignment: (_assignment_fields, _assignment),
    StorageMeta: (_storage_fields, _storage),
    ReplicaSet: (_set_fields, _set),
    ReplicaSets: (_sets_fields, _sets),
    PartitionMeta: (_partition_fields, _partition),
    Leader: (_leader_fields, _leader),
    Counter: (_counter_fields, _counter),
    Preferences: (_preferences_fields, _preferences),
    Moves: (_moves_fields, _moves),
    CopyRate: (vars, _copy_rate),
    HistoryEntry: (_history_fields, _history),
}

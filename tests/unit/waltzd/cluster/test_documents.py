"""The documents in the coordinator: what they look like, that they come back as they were, what is wrong with others.

Policies of what storages keep.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import together
from waltzd.cluster.documents import (
    GENERATION_MAX,
    ArchiveMeta,
    Assignment,
    ChannelsDocument,
    ClientMeta,
    ClusterMeta,
    CopyRate,
    Counter,
    Decision,
    HistoryEntry,
    Keep,
    Leader,
    Membership,
    Moves,
    Ownership,
    PartitionMeta,
    Preferences,
    ReplicaSets,
    ReplicaState,
    ServerMeta,
    StorageMeta,
    decode_root,
    keep_of,
)
from waltzd.errors.operations import BadMetadata, LevelUnknown
from waltzd.format.layout import ID_MAX, PARTITIONS_MAX
from waltzd.protocol import document as room
from waltzd.protocol.address import is_name
from waltzd.protocol.channels import KeyHash, Ranges
from waltzd.protocol.document import Document, decode, encode

GOLDEN = Path(__file__).parents[3] / "golden" / "meta"
KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
OTHER = UUID("ffeeddcc-bbaa-9988-7766-554433221100")

EXAMPLES: dict[str, Document] = {
    "cluster": ClusterMeta(name="payments", key=KEY, partitions=4, created="2026-01-31T12:00:00Z"),
    "cluster-trimmed": ClusterMeta(
        name="payments", key=KEY, partitions=4, created="2026-01-31T12:00:00Z", format=1, keep_local="7d"
    ),
    "server": ServerMeta(
        name="s1",
        listen="10.0.0.1:55180",
        admin_listen="127.0.0.1:55181",
        instance=KEY,
        version="0.1.0",
        preferred=(0, 3),
        is_draining=True,
        streams="10.0.0.4:55182",
    ),
    "assignment": Assignment(owners=(Ownership("s1", 3), Ownership(None, 0), *[Ownership("s2", 1)] * 9)),
    "storage": StorageMeta(name="b", listen="[fd00::2]:55280", admin_listen="[fd00::2]:55281", group="rack 2"),
    "replicas": ReplicaSets(
        partitions={
            0: {"a": Membership.MEMBER, "b": Membership.MEMBER, "c": Membership.MEMBER},
            2: {"c": Membership.LEARNER, "b": Membership.MEMBER},
            10: {},
        }
    ),
    "partition": PartitionMeta(
        generation=3,
        session=9,
        opened=7,
        low_mark=41,
        members=("a", "b", "c"),
        replicas={
            "a": ReplicaState(session=7, closing=None, incarnation=KEY),
            "b": ReplicaState(session=4, closing=-1, incarnation=OTHER, is_lost=True),
        },
        decision=Decision(mark=57, session=9),
        lease_ms=150,
        given_up={5: 30, 9: -1},
    ),
    "new-partition": PartitionMeta(generation=1, session=1),
    "leader": Leader("s1"),
    "client-ids": Counter(1, KEY),
    "client": ClientMeta(name="billing", first_seen=1_769_860_800, last_seen=1_769_871_600, epoch=1_769_865_000),
    "preferences": Preferences(partitions={0: "s1", 10: "s2", 2: "s1"}),
    "moves": Moves(partitions={3: ("a", "b", "c"), 12: ("c",), 4: ()}),
    "copy-rate": CopyRate(bytes_per_second=50_000_000, who="ada@lovelace"),
    "channels": ChannelsDocument(channels={"orders": Ranges("0-3,7"), "billing": Ranges("8")}),
    "channels-keys": ChannelsDocument(
        channels={"orders": Ranges("0-3,7"), "billing": Ranges("8")}, keys={"orders": KeyHash("blake2b:0-1")}
    ),
    "archive": ArchiveMeta(archive=KEY, number=17, sha256="0123456789abcdef" * 4, last=123_456),
    "archive-trimmed": ArchiveMeta(archive=KEY, number=17, sha256="0123456789abcdef" * 4, last=123_456, floor=99_000),
    "history-entry": HistoryEntry(
        began="2026-01-31T12:00:00+00:00",
        ended="2026-01-31T12:00:02+00:00",
        who="ada@lovelace",
        verb="partition transfer",
        subject="0,3",
        reason="der neue Rechner für s2",
        steps=("move 0, 3 from s1 to s2",),
        outcome="done",
    ),
    "history-entry-begun": HistoryEntry(
        began="2026-01-31T12:00:00+00:00",
        ended=None,
        who="ada@lovelace",
        verb="server drain",
        subject="s1",
        reason=None,
        steps=(),
        outcome="begun",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_document_looks_like_this(name: str) -> None:
    """Clusters hold documents like these: what changes here, changes there, and needs another schema version."""
    data = (GOLDEN / f"{name}.json").read_bytes()
    assert encode(EXAMPLES[name]).decode() == data.decode()
    kind: type[Any] = type(EXAMPLES[name])
    assert decode(kind, data, "/here") == EXAMPLES[name]


def test_there_is_an_example_of_everything() -> None:
    assert sorted(f"{name}.json" for name in EXAMPLES) == sorted(path.name for path in GOLDEN.iterdir())


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8"), min_size=1)
marks = st.integers(-1, ID_MAX)
generations = st.integers(0, GENERATION_MAX)
states = st.builds(
    ReplicaState,
    session=st.integers(0, ID_MAX),
    closing=st.none() | marks,
    incarnation=st.uuids(),
    is_lost=st.booleans(),
    is_diverged=st.booleans(),
)


@st.composite
def partition_metas(draw: st.DrawFn) -> PartitionMeta:
    session = draw(st.integers(0, ID_MAX))
    return PartitionMeta(
        generation=draw(generations),
        session=session,
        opened=draw(st.integers(0, session)),
        low_mark=draw(marks),
        members=tuple(draw(st.lists(names, unique=True, max_size=5))),
        replicas=draw(st.dictionaries(names, states, max_size=5)),
        decision=draw(st.none() | st.builds(Decision, mark=marks, session=st.integers(0, session))),
    )


documents: st.SearchStrategy[Document] = st.one_of(
    st.builds(ClusterMeta, name=names, key=st.uuids(), partitions=st.integers(1, PARTITIONS_MAX), created=texts),
    st.builds(
        ServerMeta,
        name=names,
        listen=texts,
        admin_listen=texts,
        instance=st.uuids(),
        version=texts,
        preferred=st.lists(st.integers(0, ID_MAX)).map(tuple),
        is_draining=st.booleans(),
    ),
    st.builds(
        Assignment, owners=st.lists(st.builds(Ownership, server=st.none() | names, generation=generations)).map(tuple)
    ),
    st.builds(StorageMeta, name=names, listen=texts, admin_listen=texts, group=texts),
    st.builds(
        ReplicaSets,
        partitions=st.dictionaries(st.integers(0, ID_MAX), st.dictionaries(names, st.sampled_from(Membership), max_size=5)),
    ),
    partition_metas(),
    st.builds(Leader, name=names),
    st.builds(Counter, next=st.integers(0, ID_MAX)),
    st.builds(Preferences, partitions=st.dictionaries(st.integers(0, ID_MAX), names)),
    st.builds(
        Moves,
        partitions=st.dictionaries(st.integers(0, ID_MAX), st.lists(names, unique=True, max_size=5).map(tuple)),
    ),
    st.builds(
        HistoryEntry,
        began=texts,
        ended=st.none() | texts,
        who=texts,
        verb=texts,
        subject=texts,
        reason=st.none() | texts,
        steps=st.lists(st.text(st.characters(codec="utf-8"))).map(tuple),
        outcome=texts,
    ),
)


@given(documents)
def test_what_is_written_comes_back(value: Document) -> None:
    kind: type[Any] = type(value)
    data = encode(value)
    assert decode(kind, data, "/here") == value
    assert encode(decode(kind, data, "/here")) == data
    assert json.loads(data)["schema"] == 1


def places(value: object, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of a document, and of the objects in it."""
    if not isinstance(value, dict):
        return []
    return [found for key, inner in value.items() for found in ((*place, key), *places(inner, (*place, key)))]


def at(fields: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        fields = fields[key]
    return fields


FIELDS = [(name, place) for name, value in EXAMPLES.items() for place in places(json.loads(encode(value)))]
FREE_TEXT = {"created", "listen", "streams", "admin_listen", "version", "group"}
FREE_TEXT |= {"began", "ended", "who", "verb", "subject", "reason", "outcome"}


def refusal(name: str, fields: object) -> BadMetadata:
    kind: type[Any] = type(EXAMPLES[name])
    with pytest.raises(BadMetadata, match=r"^/here") as caught:
        decode(kind, json.dumps(fields).encode(), "/here")
    return caught.value


LATER: dict[tuple[str, ...], object] = {("floor",): 0, ("keep_local",): "all", ("keys",): {}}
"""Fields that documents of earlier versions do not have, and what that means."""


def is_a_key(place: tuple[str, ...]) -> bool:
    """The name of a replica or the number of a partition: there may be fewer of them."""
    if len(place) == 3 and place[0] == "partitions":
        return place[2] not in ("server", "generation")
    return len(place) == 2 and place[0] in ("replicas", "partitions", "given_up", "channels", "keys")


@together("field", FIELDS)
def test_every_field_counts(field: tuple[str, tuple[str, ...]]) -> None:
    """One that is missing, of another type, out of bounds or unknown is refused, and the message names it."""
    name, place = field
    whole = encode(EXAMPLES[name])

    def changed(value: object, key: str = place[-1]) -> object:
        fields = json.loads(whole)
        at(fields, place[:-1])[key] = value
        return fields

    if not is_a_key(place):
        fields = json.loads(whole)
        del at(fields, place[:-1])[place[-1]]
        if place in LATER:
            kind: type[Any] = type(EXAMPLES[name])
            found: Any = decode(kind, json.dumps(fields).encode(), "/here")
            whole_one: Any = EXAMPLES[name]
            assert found == replace(whole_one, **{place[-1]: LATER[place]})
            return
        assert refusal(name, fields).message == f"/here: {'.'.join(place)} is missing"
        assert f"{'.'.join(place)}_ is not known" in refusal(name, changed(1, f"{place[-1]}_")).message or (
            place[-1] == "schema"
        )
    old = at(json.loads(whole), place)
    wrong: list[object] = [1.5, True, "", -2, 1 << 63, {"x": 1}, ["x", 1], [None]]
    if isinstance(old, bool):
        wrong.remove(True)
        wrong += [0, 1]
    if place[-1] not in FREE_TEXT:
        wrong += ["x y", "a/b", "..", "Ⅷ"]
    for value in wrong:
        assert place[-1] in refusal(name, changed(value)).message


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\xff", b"null", b"[]", b"1", b'{"schema": 1', b'{"schema": 1, "next": 1} x',
     b'{"schema": 1, "next": NaN}', b'{"schema": 1, "next": 1, "next": 2}', b'{"schema": 1, "next": ' + b"9" * 5000 + b"}",
     b'{"schema": 1, "next": ' + b"[" * 100_000 + b"}", b'{"schema": 1, "next": 1e3}', b'{"schema": null, "next": 1}',
     '{"schema": 1, "next": 1}'.encode("utf-16")[:9]],
)  # fmt: skip
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(BadMetadata, match=r"^/ids/client"):
        decode(Counter, data, "/ids/client")


@given(st.binary(max_size=200))
def test_no_bytes_surprise_it(data: bytes) -> None:
    with pytest.raises(BadMetadata):
        decode(PartitionMeta, data, "/here")


def test_nothing_is_kept_of_a_document_that_was_read() -> None:
    """A daemon reads the same few kinds for years."""
    name = next(iter(EXAMPLES))
    data, kind = encode(EXAMPLES[name]), type(EXAMPLES[name])
    decode(kind, data, "/here")
    known = room._reader.cache_info().currsize
    decode(kind, data, "/here")
    assert room._reader.cache_info().currsize == known


def test_a_newer_schema_is_refused_whatever_else_is_in_it() -> None:
    with pytest.raises(BadMetadata, match="schema 2; this version of Waltz knows schema 1") as caught:
        decode(Counter, b'{"schema": 2, "following": "1"}', "/ids/client")
    assert caught.value.facts == {"path": "/ids/client", "schema": "2"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PartitionMeta(generation=1, session=3, lease_ms=251), "lease_ms must be a whole number from 0 to 250, not 251"),
        (PartitionMeta(generation=1, session=3, opened=4), "opened must be a whole number from 0 to 3, not 4"),
        (PartitionMeta(generation=1, session=3, decision=Decision(mark=0, session=4)), "decision.session must be"),
        (PartitionMeta(generation=1, session=3, members=("a", "a")), "members has a name twice"),
        (Counter(-1, KEY), "next must be"),
        (Leader(".."), "name must be a name"),
        (ChannelsDocument(channels={"all": Ranges("0")}), "channels.all must begin with a letter, and not be all"),
        (ChannelsDocument(channels={"0-3": Ranges("0")}), "channels.0-3 must begin with a letter"),
        (ChannelsDocument(channels={}, keys={"a": KeyHash("blake2b:0")}), "keys.a must be the name of a channel"),
        (ChannelsDocument(channels={"a": Ranges("0")}, keys={"a": KeyHash("0")}), "must be a hash function and numbers"),
        (ChannelsDocument(channels={"a": Ranges("b")}), "must be numbers of partitions"),
        (ChannelsDocument(channels={f"a{n}": Ranges("0") for n in range(1025)}), "at most 1024 names"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(value: Document, message: str) -> None:
    with pytest.raises(BadMetadata, match=message):
        encode(value)


def test_an_assignment_has_every_partition() -> None:
    fields = json.loads(encode(EXAMPLES["assignment"]))
    del fields["partitions"]["1"]
    assert "partitions must name every partition from 0 on" in refusal("assignment", fields).message


@pytest.mark.parametrize("number", ["-1", "01", "1.0", "x", "", "²", "1" * 30])
def test_a_partition_has_a_number(number: str) -> None:
    fields = {"schema": 1, "partitions": {number: {}}}
    assert "is not the number of a partition" in refusal("replicas", fields).message


@pytest.mark.parametrize("name", ["preferences", "moves"])
@pytest.mark.parametrize("number", ["-1", "01", "x", "²"])
def test_wishes_are_for_partitions(name: str, number: str) -> None:
    fields = {"schema": 1, "partitions": {number: "s1" if name == "preferences" else ["a"]}}
    assert "is not the number of a partition" in refusal(name, fields).message


@pytest.mark.parametrize("text", ["a", "A.b-c_9", "0", "x" * 64])
def test_names(text: str) -> None:
    assert is_name(text)


@pytest.mark.parametrize("text", ["", ".", "..", "-a", "a/b", "a b", "ä", "a\n", "x" * 65])
def test_no_names(text: str) -> None:
    assert not is_name(text)


# -- levels ------------------------------------------------------------------------------------------------------------


def test_a_cluster_without_a_level_has_level_0_and_its_document_is_as_before() -> None:
    meta = ClusterMeta(name="payments", key=KEY, partitions=4, created="2026-01-31T12:00:00Z")
    assert decode_root(room.encode(meta)).level == 0
    assert b"level" not in room.encode(meta), "the version before can read it"
    raised = replace(meta, level=1)
    assert decode_root(room.encode(raised)) == raised


def test_a_cluster_of_a_newer_version_is_refused_by_its_level_and_not_by_its_fields() -> None:
    found = json.loads(room.encode(ClusterMeta(name="payments", key=KEY, partitions=4, created="2026")))
    for future in ({"level": 2}, {"level": 2, "colour": "blue"}, {"level": 2, "schema": 2}):
        with pytest.raises(LevelUnknown, match="/there: the cluster has level 2"):
            decode_root(json.dumps(found | future).encode(), "/there")
    for damaged in ({"level": "2"}, {"level": -1}, {"level": 1.5}, {"level": True}):
        with pytest.raises(BadMetadata, match="level must be a whole number"):
            decode_root(json.dumps(found | damaged).encode())


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("all", Keep()),
        ("30m", Keep(seconds=1800)),
        ("12h", Keep(seconds=43_200)),
        ("7d", Keep(seconds=604_800)),
        ("2w", Keep(seconds=1_209_600)),
        ("500GB", Keep(size=500_000_000_000)),
        ("2TiB", Keep(size=2 << 40)),
        ("64KiB", Keep(size=64 << 10)),
        ("1KB", Keep(size=1000)),
    ],
)
def test_a_policy_says_what_stays(text: str, meant: Keep) -> None:
    assert keep_of(text) == meant


@pytest.mark.parametrize(
    "text", ["", "All", "0d", "07d", "7", "d", "7 d", "-1h", "1.5GB", "7D", "500gb", "1000000d", "7dd", "7d\n", "٧d", "1iB"]
)
def test_anything_else_is_no_policy(text: str) -> None:
    assert keep_of(text) is None

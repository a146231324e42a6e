"""Texts from people and from other programs: settings, spellings, documents of the coordinator, names in certificates,
histories. What is accepted is the same after it was written and read again; the rest is refused in a sentence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from tests.checker.history import BadHistory, Observed, Operation, Seen, Writer
from tests.checker.history import load as load_history
from tests.fuzz.mutate import SEED, count, each, little_memory, mutated, mutated_text, nonsense, parsed, told
from waltzctl.placement import creation
from waltzctl.records import offline
from waltzctl.shell import blueprint, numbers
from waltzctl.shell.blueprint import Blueprint, Life
from waltzd.client.routes import addresses_of
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.documents import (
    ArchiveMeta,
    Assignment,
    ChannelsDocument,
    ClusterMeta,
    CopyRate,
    Counter,
    Decision,
    HistoryEntry,
    Leader,
    Membership,
    Moves,
    Ownership,
    PartitionMeta,
    PolicyDocument,
    Preferences,
    ReplicaSets,
    ReplicaState,
    ServerMeta,
    StorageMeta,
)
from waltzd.daemon import config
from waltzd.daemon.config import ServerConfig, StorageConfig
from waltzd.daemon.config_file import TEXT_BYTES_MAX, load, parse, show
from waltzd.daemon.settings import format_size, parse_key, parse_size, sample
from waltzd.errors import BadArgument
from waltzd.errors.operations import BadConfig, BadMetadata, NotesDamaged
from waltzd.format.layout import first_id_of, index_name, segment_name
from waltzd.protocol.address import parse_address
from waltzd.protocol.channels import Parts, Ranges
from waltzd.protocol.document import Document, decode, encode
from waltzd.protocol.policy import Amount, Grant, Pattern, Prefix, Quotas, Verb
from waltzd.protocol.role import Identity, Role
from waltzd.storage.offline.verify import partition_of

TRIES = 50
KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
EXAMPLES = settings(max_examples=count(60), derandomize=False, database=None)

# -- configuration files -----------------------------------------------------------------------------------------------

STORAGE = sample(StorageConfig, "storage").replace("# cluster_key", "cluster_key").replace("# partitions", "partitions")
SERVER = sample(ServerConfig, "server").replace("# preferred", "preferred")


@pytest.mark.parametrize(("kind", "text"), [(StorageConfig, STORAGE), (ServerConfig, SERVER)])
def test_configuration_files(kind: type[Any], text: str) -> None:
    lines = [line for line in text.splitlines() if line and not line.startswith("# A")]
    values = "\n".join(line.removeprefix("# ") for line in lines if ": " in line and not line.startswith("# Set"))
    short = "".join(f"{line}\n" for line in text.splitlines() if line and not line.startswith("#"))
    parse(short, kind)

    def check(chance: random.Random) -> None:
        changed = mutated_text(chance, chance.choice([short, short, text, values]), values)
        found = parsed(BadConfig, parse, changed, kind)
        if found is not None:
            assert parse(show(found), kind) == found

    each(f"settings of {kind.__name__}", TRIES, check)


@seed(SEED)
@EXAMPLES
@given(value=st.text(max_size=40))
@example(value="a\nb")
@example(value="\ud800")
@example(value="\0")
@example(value=" ~ ")
@example(value="\U0007ffff")
def test_any_text_as_the_value_of_a_setting(value: str) -> None:
    for name in ("directory", "listen", "cluster_key", "partitions", "segment_bytes_max"):
        for spelled in (value, json.dumps(value), f"'{value}'"):
            text = "" if name == "directory" else "directory: /d\n"
            found = parsed(BadConfig, parse, f"{text}{name}: {spelled}\n", StorageConfig)
            if found is not None:
                assert parse(show(found), StorageConfig) == found


@pytest.mark.parametrize("value", ['"\\UFFFFFFFF"', '"\\U00110000"', '"\\uD800"', "!<%ff> x", '"a\\0b"'])
def test_escapes_that_mean_no_character(value: str) -> None:
    with pytest.raises(BadConfig):
        parse(f"directory: {value}\n", StorageConfig)
    assert parsed(BadConfig, parse, f"%YAML {'9' * 5000}.1\n---\ndirectory: /d\n", StorageConfig) is None


@pytest.mark.parametrize("piece", ["[", "{", "- ", "? ", "a: ", "&a ", "'", "a: &a [*a]\n", "\t", "x\n", "é: 1\n"])
def test_settings_that_are_one_thing_over_and_over(piece: str) -> None:
    """As long as a file may be; one byte more is refused unread."""
    text = piece * (TEXT_BYTES_MAX // len(piece.encode()))
    with little_memory(64 << 20), pytest.raises(BadConfig):
        parse(text, StorageConfig)


def test_files_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "storage.yml"
    raw = b"directory: /data\n"

    def check(chance: random.Random) -> None:
        changed = chance.choice([mutated(chance, raw), raw + bytes(TEXT_BYTES_MAX), raw.decode().encode("utf-16")])
        path.write_bytes(changed)
        found = parsed(BadConfig, load, str(path), StorageConfig)
        if found is not None:
            assert parse(show(found), StorageConfig) == found

    each("files of settings", TRIES // 4, check)
    with path.open("wb") as file:
        file.truncate(1 << 31)
    with little_memory(1 << 20), pytest.raises(BadConfig, match="larger"):
        load(str(path), StorageConfig)


# -- spellings ---------------------------------------------------------------------------------------------------------


def spelled_storage(meta: StorageMeta) -> str:
    group = "" if meta.group == meta.name else f",{meta.group}"
    return f"{meta.name}={meta.listen},{meta.admin_listen}{group}"


SPELLINGS: dict[str, tuple[Callable[[str], Any], type[Exception], Callable[[Any], str], list[str]]] = {
    "size": (lambda text: min(parse_size(text), 1 << 63), ValueError, format_size, ["64MiB", "1_000 kB", "0", "1" * 99]),
    "address": (parse_address, ValueError, str, ["127.0.0.1:55280", "[::1]:0", "host.example:65535", "[1.2.3.4]:5"]),
    "key": (parse_key, ValueError, str, [str(KEY), "{" + KEY.hex + "}", "urn:uuid:" + KEY.hex]),
    "preferred": (config.partitions_of, ValueError, lambda found: ",".join(map(str, found)), ["0,4-7", "65535", " 1 , 2"]),
    "partitions": (numbers.partitions_of, BadArgument, format_numbers, ["0-3,7", "²", "0-999"]),
    "ids": (offline._id_range, BadArgument, lambda found: "{}-{}".format(*found), ["17-17", "0-9223372036854775807"]),
    "servers": (addresses_of, BadArgument, ",".join, ["a:1,b:2", "[::1]:5 ", "h:65535"]),
    "storage": (creation.storage_of, BadArgument, spelled_storage, ["s1=a:1,b:2", "s1=[::1]:1,b:2,rack"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    read, declared, spell, samples = SPELLINGS[name]

    def check(chance: random.Random) -> None:
        value = parsed(declared, read, mutated_text(chance, *chance.sample(samples, len(samples))))
        if value is not None:
            assert read(spell(value)) == value

    each(name, TRIES, check)


@seed(SEED)
@EXAMPLES
@given(text=st.one_of(st.text(max_size=30), st.from_regex(r"[0-9²٣,\-: _]{0,12}", fullmatch=True)))
@example(text="9" * 5000)
@example(text="0-" + "9" * 5000)
@example(text="²")
@example(text="a:" + "9" * 5000)
@example(text="a=b:" + "9" * 5000 + ",c:1")
def test_any_text_as_a_spelling(text: str) -> None:
    for read, declared, spell, _ in SPELLINGS.values():
        value = parsed(declared, read, text)
        if value is not None:
            assert read(spell(value)) == value


@pytest.mark.parametrize("text", ["0" * 100 + "5", "1" + "_" * 99 + "GB", "1" * 101])
def test_a_number_is_read_to_its_end_or_not_at_all(text: str) -> None:
    """The first hundred characters alone would mean something else."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)
    with pytest.raises(BadConfig):
        parse(f"directory: /d\npartitions: '{text}'\n", StorageConfig)


def test_names_of_files_and_directories() -> None:
    samples = [segment_name(0), index_name((1 << 63) - 1), "0", "17", "promise", "9" * 19 + ".seg"]

    def check(chance: random.Random) -> None:
        name = mutated_text(chance, *chance.sample(samples, len(samples)))[:255]
        first_id, partition = first_id_of(name), partition_of(name)
        assert first_id is None or name in (segment_name(first_id), index_name(first_id))
        assert partition is None or name.rpartition("/")[2] == str(partition), "of a path, its last part"

    each("names of files", TRIES, check)


# -- certificates ------------------------------------------------------------------------------------------------------


def test_names_in_certificates() -> None:
    samples = [Identity(KEY, role, name).uri for role in Role for name in ("s1", "a.b_c-D", "x" * 64)]
    samples += [*Identity(KEY, Role.SERVER, "s1").dns_names, "waltz://" + "-" * 36 + "/role/server/s1"]

    def check(chance: random.Random) -> None:
        names = [mutated_text(chance, *chance.sample(samples, 3)) if chance.random() < 0.6 else chance.choice(samples)
                 for _ in range(chance.randrange(3))]  # fmt: skip
        found = Identity.among(names)
        if found is not None:
            assert found.uri in names
            assert Identity.among([found.uri]) == found

    each("names in certificates", TRIES * 2, check)


@pytest.mark.parametrize("key", ["-" * 36, "0" * 36, "-" * 4 + "0" * 32, str(KEY).replace("-", "f"), KEY.hex + "-" * 4])
def test_a_certificate_without_a_whole_key_is_no_identity(key: str) -> None:
    """Dashes elsewhere mean the same number; there must be one spelling of each identity."""
    assert Identity.among([f"waltz://{key}/role/server/s1"]) is None


# -- documents of the coordinator --------------------------------------------------------------------------------------

DOCUMENTS: list[Document] = [
    ClusterMeta(name="test", key=KEY, partitions=4, created="2026-01-01"),
    ServerMeta(name="s", listen="h:1", admin_listen="h:2", instance=KEY, version="1", preferred=(1, 2), is_draining=False),
    Assignment(owners=(Ownership("one", 3), Ownership(None, 0))),
    StorageMeta(name="s", listen="h:1", admin_listen="h:2", group="g"),
    ReplicaSets(partitions={0: {"a": next(iter(Membership)), "b": list(Membership)[-1]}, 10: {}}),
    PartitionMeta(
        generation=1, session=9, opened=8, low_mark=-1, members=("a", "b"),
        replicas={"a": ReplicaState(session=1, closing=None, incarnation=KEY, is_lost=False),
                  "b": ReplicaState(session=2, closing=-1, incarnation=KEY, is_lost=True)},
        decision=Decision(mark=5, session=9)),
    Leader(name="one"),
    Counter(next=7, secret=KEY),
    Preferences(partitions={0: "s", 7: "t"}),
    Moves(partitions={0: ("a", "b"), 10: ()}),
    CopyRate(bytes_per_second=1, who="a@b"),
    ArchiveMeta(archive=KEY, number=1, sha256=64 * "a", last=5),
    ChannelsDocument(channels={"orders": Ranges("0-3,7"), "all-of-it": Ranges("8")}),
    PolicyDocument(grants=(
        Grant(names=(Pattern("pay-*"), Pattern("*")), may=tuple(Verb)),
        Grant(names=(Pattern("anonymous"),), may=(Verb.APPEND,), partitions=Parts("0-3,orders"), one_instance=True,
              lock_prefixes=(Prefix("account"),), quotas=Quotas(mounts=Amount(3)), groups=(Pattern("mail*"),)))),
    HistoryEntry(began="1", ended=None, who="a@b", verb="c d", subject="e", reason="f", steps=("g", "h"), outcome="begun"),
]  # fmt: skip
TEXTS = [encode(value) for value in DOCUMENTS]


def check_document(kind: type[Any], data: bytes) -> None:
    try:
        value = decode(kind, data, "/path")
    except BadMetadata as error:
        error.message.encode()  # it goes to logs and over the wire
        return
    assert decode(kind, encode(value), "/path") == value


@pytest.mark.parametrize("number", range(len(DOCUMENTS)), ids=[type(value).__name__ for value in DOCUMENTS])
def test_documents(number: int) -> None:
    text, kind = TEXTS[number].decode(), type(DOCUMENTS[number])
    others = [other.decode() for other in TEXTS]

    def check(chance: random.Random) -> None:
        if chance.random() < 0.3:
            check_document(kind, mutated(chance, TEXTS[number], *TEXTS))
        else:
            changed = mutated_text(chance, text, *others)
            check_document(kind, changed.encode("utf-8", chance.choice(["replace", "surrogatepass"])))

    each(f"documents {kind.__name__}", TRIES, check)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(str(KEY)), st.just("a")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@seed(SEED)
@EXAMPLES
@given(number=st.integers(0, len(DOCUMENTS) - 1), data=st.data())
def test_documents_with_other_values(number: int, data: st.DataObject) -> None:
    """The right names, one of them with any value, at any depth."""
    fields = json.loads(TEXTS[number])
    at, name = fields, data.draw(st.sampled_from(sorted(fields)))
    while isinstance(at[name], dict) and at[name] and data.draw(st.booleans()):
        at = at[name]
        name = data.draw(st.sampled_from(sorted(at)))
    if data.draw(st.booleans()):
        at[name] = data.draw(json_values)
    else:
        at[data.draw(st.text(max_size=5))] = at.pop(name)
    check_document(type(DOCUMENTS[number]), json.dumps(fields).encode())


def test_documents_within_documents() -> None:
    """Wherever the interpreter would give up: reading it, or showing it in the refusal."""
    for depth in (*range(1, 20), *range(800, 1000), 5000, 100_000):
        for opening, closing in (("[", "]"), ('{"schema":', "}")):
            inner = opening * depth + "1" + closing * depth
            for text in (inner, f'{{"schema": 1, "name": {inner}}}', f'{{"schema": {inner}, "name": "a"}}'):
                with told(f"depth {depth}"):
                    assert parsed(BadMetadata, decode, Leader, text.encode(), "/path") is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (StorageMeta, TEXTS[3].replace(b'"h:1"', b'"\\ud800"')),
        (StorageMeta, TEXTS[3].replace(b'"listen"', b'"\\udfff"')),
        (Leader, b'{"schema": 1, "name": ["\\ud800"]}'),
        (ReplicaSets, b'{"schema": 1, "partitions": {"' + b"9" * 5000 + b'": {}}}'),
        (Assignment, b'{"schema": 1, "partitions": {"' + b"1" * 5000 + b'": {}}}'),
        (Counter, b'{"schema": 1, "next": ' + b"1" * 5000 + b"}"),
        (Counter, b'{"schema": 1, "next": 1e999}'),
    ],
)
def test_documents_that_could_not_be_written_again(kind: type[Any], text: bytes) -> None:
    with pytest.raises(BadMetadata) as refused:
        decode(kind, text, "/path")
    refused.value.message.encode()


# -- what `waltzctl up` writes down ------------------------------------------------------------------------------------


def test_notes_of_a_local_cluster(tmp_path: Path) -> None:
    ports = {"zookeeper": (1,), "storage-1": (2, 3), "server-1": (4, 5)}
    drawn = Blueprint(key=KEY, partitions=4, replication=1, storages=1, servers=1, ports=ports)
    blueprint.save_blueprint(tmp_path, drawn)
    blueprint.save_lives(tmp_path, {"server-1": Life(7, "birth", 0, True)})
    texts = [(tmp_path / name).read_text() for name in (blueprint.BLUEPRINT, blueprint.STATE)]
    known: list[tuple[str, Callable[[Path], Any], Callable[[Path, Any], None]]] = [
        (blueprint.BLUEPRINT, blueprint.load_blueprint, blueprint.save_blueprint),
        (blueprint.STATE, blueprint.load_lives, blueprint.save_lives),
    ]

    def check(chance: random.Random) -> None:
        number = chance.randrange(2)
        name, read, write = known[number]
        text = mutated_text(chance, texts[number], *texts)
        (tmp_path / name).write_bytes(text.encode("utf-8", chance.choice(["replace", "surrogatepass"])))
        found = parsed(NotesDamaged, read, tmp_path)
        if found is not None:
            write(tmp_path, found)
            assert read(tmp_path) == found

    each("notes of a local cluster", TRIES, check)
    for number in ("1e999", "1" * 12, "-1", "[1]", "1" + "0" * 30):
        (tmp_path / blueprint.BLUEPRINT).write_text(texts[0].replace('"storages": 1', f'"storages": {number}'))
        with little_memory(1 << 20), pytest.raises(NotesDamaged):
            blueprint.load_blueprint(tmp_path)


# -- histories ---------------------------------------------------------------------------------------------------------


def test_histories(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with Writer(path) as writer:
        for number in range(3):
            operation = Operation(f"k{number}", "c", 0, 10, -1, (1,), (2,), (), 0, 5)
            writer.invoked(operation)
            operation.returned, operation.kind, operation.id = 20, "committed", number
            writer.returned(operation)
        writer.seen(Seen("r", 0, -1, [(0, "k0", 5), (1, "k1", 5)]))
        writer.observed(Observed("c", 0, 1, 2, 3))
        writer.log(0, [])
    raw = path.read_bytes()
    assert len(load_history([path]).operations) == 3

    def check(chance: random.Random) -> None:
        text = mutated_text(chance, raw.decode(), raw.decode()).encode("utf-8", "surrogatepass")
        path.write_bytes(chance.choice([text, text, mutated(chance, raw, raw), nonsense(chance, 300, raw)]))
        found = parsed(BadHistory, load_history, [path])
        assert found is None or len(found.operations) <= 20

    each("histories", TRIES, check)
    for line in (
        "1",
        '"x"',
        "[]",
        "{}",
        "[" * 100_000,
        '{"type":"return","key":[]}',
        '{"type":"invoke","key":[]}',
        "\ud800",
    ):
        with told(line[:40]):
            path.write_bytes(f"{line}\n".encode("utf-8", "surrogatepass"))
            with pytest.raises(BadHistory):
                load_history([path])

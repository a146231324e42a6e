"""What the coordinator holds: frozen values, and the JSON documents that they are written as and read from. Pure.

The heart is `PartitionMeta`: which session is the newest, who its members are, and what was decided about the one before.
Everything that recovery may rely on is in there.

Each document carries the schema version with which it was written, so that an operator can read it with any tool, and an
older Waltz refuses what it does not understand. The annotations of a value are the declaration of its document: they say
which JSON each field takes. Reading is strict: a field that is missing, ill-typed, out of its bounds or not known is
`BadMetadata` with the path and the field, never a guess; recovery relies on every one of them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, TypeAlias, TypeVar
from uuid import UUID

from waltzd.errors import BadArgument, BadMetadata, MetadataUnfinished, WaltzError
from waltzd.format.layout import ID_MAX, PARTITIONS_MAX
from waltzd.protocol.address import is_name
from waltzd.protocol.channels import CHANNELS_MAX, Parts, Ranges, is_channel, is_parts, is_ranges
from waltzd.protocol.policy import PREFIX_LENGTH_MAX, Amount, Grant, Pattern, Prefix, Quotas, is_pattern, is_prefix
from waltzd.protocol.retention import is_keep_local
from waltzd.protocol.timelines import FIRST, Fork, Lineage, Timeline, lineage_mistake

SCHEMA = 1
FORMAT = 1
"""What new clusters write where nobody says otherwise."""
LEASE_MS_MAX = 250
"""A fail-over may take twice as long on top."""
GENERATION_MAX = (1 << 31) - 1
NESTING_MAX = 8
"""Twice as deep as any document is."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


# -- fields ------------------------------------------------------------------------------------------------------------


class Document:
    """A value that is a document of its own."""

    def mistake(self) -> tuple[str, str] | None:
        """Fields that are right one by one and cannot stand together: the place, and what is wrong there."""
        return None


@dataclass(frozen=True)
class Rule:
    """Which JSON values a field takes."""

    what: str
    holds: Callable[[Any], bool]


def whole(least: int = 0, most: int = ID_MAX) -> Rule:
    # Of JSON only whole numbers are `int`: neither true and false, which Python counts among them, nor 1.0.
    return Rule(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


_DEFAULTS: dict[Any, Rule] = {
    int: whole(),
    str: Rule("a text", lambda value: isinstance(value, str) and value != ""),
    bool: Rule("true or false", lambda value: isinstance(value, bool)),
    UUID: Rule("a UUID", lambda value: isinstance(value, str) and _UUID.fullmatch(value) is not None),
    Pattern: Rule(
        "a name of letters, digits, dots, dashes and underscores, the beginning of names with a * behind it, or *",
        lambda value: isinstance(value, str) and is_pattern(value),
    ),
    Prefix: Rule(
        f"the beginning of names of locks, up to their first dot, of at most {PREFIX_LENGTH_MAX} characters",
        lambda value: isinstance(value, str) and is_prefix(value),
    ),
    Ranges: Rule("numbers of partitions, as in 0-3,7", lambda value: isinstance(value, str) and is_ranges(value)),
    Parts: Rule(
        "numbers of partitions and names of channels, as in 0-3,orders",
        lambda value: isinstance(value, str) and is_parts(value),
    ),
    Amount: whole(1),
    Fork: whole(-1),
}
"""For a field whose annotation has no rule of its own."""
_IS_NAME = Rule(
    "a name of letters, digits, dots, dashes and underscores", lambda value: isinstance(value, str) and is_name(value)
)
Name: TypeAlias = Annotated[str, _IS_NAME]
Mark: TypeAlias = Annotated[int, whole(-1)]
"""A transaction id, or -1 before the first one."""
Generation: TypeAlias = Annotated[int, whole(0, GENERATION_MAX)]
Sha256: TypeAlias = Annotated[
    str, Rule("a SHA-256 in hexadecimal digits", lambda value: isinstance(value, str) and bool(_SHA256.fullmatch(value)))
]
KeepLocal: TypeAlias = Annotated[
    str, Rule("all, a time as in 7d, or a size as in 500GB", lambda value: isinstance(value, str) and is_keep_local(value))
]
AnyText: TypeAlias = Annotated[str, Rule("a text", lambda value: isinstance(value, str))]
"""An empty one, too."""
NUMBERED = "numbered"
"""In the metadata of a field that is a tuple: the name under which it is written, as an object of number → item."""
ADDED = "added"
"""In the metadata of a field that older documents of the same schema do not have: it is written only where it differs from
its default, so that a cluster that does not use it stays readable for older versions."""


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClusterMeta(Document):
    """<root>"""

    name: Name
    key: UUID
    partitions: Annotated[int, whole(1, PARTITIONS_MAX)]
    created: str
    format: Annotated[int, whole(0, 1)] = 0
    """Of the segments that the next session of each partition writes. It only rises, and a partition that has gone over
    stays there."""
    keep_local: KeepLocal = field(default="all", metadata={ADDED: True})
    """What of the archived log storages keep all the same."""


@dataclass(frozen=True, kw_only=True)
class Unfinished(Document):
    """<root>, in the place of `ClusterMeta` while a tool puts the documents of a cluster back: no daemon and no other tool
    takes what is there for a cluster before all of it is."""

    key: UUID
    unfinished: str
    """The command that began it."""
    began: str


@dataclass(frozen=True, kw_only=True)
class ServerMeta(Document):
    """<root>/servers/<name>, ephemeral"""

    name: Name
    listen: str
    admin_listen: str
    instance: UUID
    """New with every start of the process."""
    version: str
    preferred: tuple[int, ...] = ()
    is_draining: bool = False
    """It gives its partitions away and takes no new ones."""
    streams: str | None = None
    """Where applications may mount without gRPC."""


@dataclass(frozen=True)
class Ownership:
    server: Name | None
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Assignment(Document):
    """<root>/assignment: who owns each partition, in the order of their numbers."""

    owners: tuple[Ownership, ...] = field(metadata={NUMBERED: "partitions"})


@dataclass(frozen=True, kw_only=True)
class StorageMeta(Document):
    """<root>/storages/<name>"""

    name: Name
    listen: str
    admin_listen: str
    group: str
    """Its failure domain."""


@dataclass(frozen=True)
class Leader(Document):
    """<root>/election/leader, ephemeral: the server that assigns partitions to servers."""

    name: Name


NO_SECRET = UUID(int=0)


@dataclass(frozen=True)
class Counter(Document):
    """<root>/ids/client"""

    next: int
    secret: UUID
    """What servers prove client ids with. Without certificates, a process that can read it can be any client. `NO_SECRET`
    in documents that were saved into an archive, which others may read; it proves nothing."""
    written: int = field(default=0, metadata={ADDED: True})
    """Version that the node got when a server wrote this value. A node with another version was put back by somebody."""


@dataclass(frozen=True, kw_only=True)
class ClientMeta(Document):
    """<root>/clients/<name>: an application, by the name in its certificates. Written rarely: not for each mount."""

    name: Name
    first_seen: int
    """Seconds since 1970; within some minutes."""
    last_seen: int
    epoch: int = 0
    """Of the newest instance that is to be the only one of this name that lives. 0: there never was one."""


@dataclass(frozen=True, kw_only=True)
class Preferences(Document):
    """<root>/preferred: which server an operator wants to own a partition, as far as an even distribution permits. It goes
    before what servers prefer by themselves."""

    partitions: Mapping[int, Name]


@dataclass(frozen=True, kw_only=True)
class Moves(Document):
    """<root>/moves: where the replicas of a partition shall be in the end, while they are on their way. A command
    that moves them writes this first, so that any other one can go on from it."""

    partitions: Mapping[int, tuple[Name, ...]]


@dataclass(frozen=True, kw_only=True)
class CopyRate(Document):
    """<root>/copy-rate: the bound that an operator's command sets. For moves it lasts until they have ended; otherwise it
    is ephemeral, and goes away with the command."""

    bytes_per_second: Annotated[int, whole(1)]
    """Of each replica that copies."""
    who: str


@dataclass(frozen=True, kw_only=True)
class ArchiveMeta(Document):
    """<root>/archives/<number>: how far the archive of the partition reaches. It only goes forward."""

    archive: UUID
    """Which one: the label in the store says the same."""
    number: Annotated[int, whole(1)]
    """Of the newest manifest."""
    sha256: Sha256
    """Of the newest manifest."""
    last: int
    """The last id that is archived."""
    floor: int = field(default=0, metadata={ADDED: True})
    """The first id that replicas have to keep: below it storages may remove what is archived. It only rises."""
    timeline: UUID = field(default=FIRST, metadata={ADDED: True})
    """Identity of the timeline whose log the manifest names; that of another timeline does not count for this log."""

    def mistake(self) -> tuple[str, str] | None:
        if self.floor > self.last + 1:
            return "floor", f"must be a whole number from 0 to {self.last + 1}, not {self.floor}"
        return None


@dataclass(frozen=True, kw_only=True)
class HistoryEntry(Document):
    """<root>/history/<number>: who changed what, and why. For people: nothing is decided by it."""

    began: str
    ended: str | None
    """None while it goes on, and after the command was killed: until another one has finished or cancelled its moves."""
    who: str
    verb: str
    subject: str
    reason: str | None
    steps: tuple[AnyText, ...]
    """What was planned."""
    outcome: str
    """"begun", "done", what went wrong, or which command went on with it after it was killed."""
    moves: tuple[int, ...] = field(default=(), metadata={ADDED: True})
    """Partitions whose replicas the command moves: another command may finish that."""


@dataclass(frozen=True, kw_only=True)
class PolicyDocument(Document):
    """<root>/policy: who may do what. Where it is missing, every application may do everything."""

    grants: tuple[Grant, ...]

    def mistake(self) -> tuple[str, str] | None:
        for at, grant in enumerate(self.grants):
            for name, found in (("names", grant.names), ("may", grant.may)):
                if not found:
                    return f"grants[{at}].{name}", "must not be empty: the grant would allow nothing"
                if len(set(found)) != len(found):
                    return f"grants[{at}].{name}", "has an entry twice"
        return None


@dataclass(frozen=True, kw_only=True)
class ChannelsDocument(Document):
    """<root>/channels: names for sets of partitions."""

    channels: Mapping[Name, Ranges]

    def mistake(self) -> tuple[str, str] | None:
        if len(self.channels) > CHANNELS_MAX:
            return "channels", f"must have at most {CHANNELS_MAX} names, not {len(self.channels)}"
        for name in self.channels:
            if not is_channel(name):
                return f"channels.{name}", "must begin with a letter, and not be all"
        return None


class Membership(enum.StrEnum):
    MEMBER = "member"
    LEARNER = "learner"
    """Copies first; becomes a member when a session starts and it is level."""


@dataclass(frozen=True)
class ReplicaSet(Document):
    """<root>/replicas/<number>: which storages hold the partition. A document for each, so that no owner waits for that of
    another partition."""

    replicas: Mapping[Name, Membership]


@dataclass(frozen=True, kw_only=True)
class ReplicaSets(Document):
    """All of them."""

    partitions: Mapping[int, Mapping[Name, Membership]]


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """What is recorded of one replica. It took part in `session` until `closing`; without a closing mark it still may, and
    votes when that session is closed. One that has only copied so far may have begun none: -1."""

    session: Mark
    closing: Mark | None
    incarnation: UUID
    acknowledged: Mark = -1
    """How far it was known to have everything on its disk when this was written. Who holds less has forgotten it."""
    is_lost: bool = False
    """It was seen to have forgotten what it had acknowledged in this session; `acknowledged` says exactly how much that is.
    It does not count before it holds all of it again."""
    is_diverged: bool = False
    """It holds another history than the log. Nothing of it counts, is copied or is cut, until another directory stands in
    its place."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The closing mark of the session `PartitionMeta.opened`: saved before it is acted upon, and never undone."""

    mark: Mark
    session: int
    """The session that decided."""


@dataclass(frozen=True, kw_only=True)
class PartitionMeta(Document):
    """<root>/partitions/<number>"""

    generation: Generation
    session: int
    """The newest session id that was given out, opened or not."""
    opened: int = 0
    """The newest session that was admitted: it may have written. 0: none ever was."""
    low_mark: Mark = -1
    """The mark at which it began."""
    members: tuple[Name, ...] = ()
    """Its members: a majority of them made its transactions committed."""
    replicas: Mapping[Name, ReplicaState] = field(default_factory=dict)
    decision: Decision | None = None
    lease_ms: int = 0
    """For so long after a question the owner of `opened` trusts what its storages answered; a new owner waits until that is
    over. 0: it asks each time, or has closed its session."""
    given_up: Mapping[int, Mark] = field(default_factory=dict)
    """What operators gave up (`waltzctl partition rescue`): session → mark. A replica that has begun no session above that
    one may know of committed transactions above the mark that this log does not have."""
    timelines: tuple[Timeline, ...] = field(default=(), metadata={ADDED: True})
    """Timelines of the log behind the first one; the last one is the current timeline. Written together with the decision
    that ends the log of the one before."""

    def mistake(self) -> tuple[str, str] | None:
        sessions = {"opened": self.opened, "decision.session": 0 if self.decision is None else self.decision.session}
        for place, session in sessions.items():
            if session > self.session:
                return place, f"must be a whole number from 0 to {self.session}, not {session}"
        if self.lease_ms > LEASE_MS_MAX:
            return "lease_ms", f"must be a whole number from 0 to {LEASE_MS_MAX}, not {self.lease_ms}"
        if (mistake := lineage_mistake(self.timelines)) is not None:
            return "timelines", mistake
        if self.timelines and self.timelines[-1].session > self.session:
            return "timelines", f"has session {self.timelines[-1].session}, above the newest one, {self.session}"
        return None

    @functools.cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.timelines)

    @property
    def joined(self) -> tuple[str, ...]:
        """The members whose acknowledgements counted in the opened session."""
        return tuple(
            name
            for name in self.members
            if (state := self.replicas.get(name)) is not None and state.session == self.opened and state.closing is None
        )

    def gave_up(self, session: int, certain: int) -> int | None:
        """Whether an operator gave up what a replica knows to be committed, which has begun no later session than this one:
        the mark above which that was done. It would never cut it, and other transactions have the same ids now."""
        return min((mark for rescue, mark in self.given_up.items() if session < rescue and certain > mark), default=None)


# -- writing -----------------------------------------------------------------------------------------------------------


def encode(value: Document) -> bytes:
    """The document as it is kept: sorted, one fact a line, for people too. What could not be read again is `BadMetadata`
    here already."""
    plain = _sorted([("schema", SCHEMA), *_plain(value).items()])
    data = json.dumps(plain, indent=1, ensure_ascii=False).encode() + b"\n"
    assert decode(type(value), data, "what is to be written") == value
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _sorted((str(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if not dataclasses.is_dataclass(value):
        return str(value) if isinstance(value, UUID) else value
    found = []
    for item in fields(value):
        inner = getattr(value, item.name)
        if ADDED in item.metadata and inner == item.default:
            continue
        if NUMBERED in item.metadata:
            found.append((item.metadata[NUMBERED], _plain(dict(enumerate(inner)))))
        else:
            found.append((item.name, _plain(inner)))
    return _sorted(found)


def _sorted(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Names in their order, and numbers as numbers: 2 before 10."""
    return dict(sorted(pairs, key=lambda pair: (not pair[0].isdecimal(), len(pair[0]) * pair[0].isdecimal(), pair[0])))


# -- reading -----------------------------------------------------------------------------------------------------------


def with_defaults(kind: type[Any], found: Any) -> Any:
    """What a person wrote of a part of a document, with what may be left out: the fields that have a default. What is no
    object stays as it is, for the reader to refuse."""
    if not isinstance(found, Mapping):
        return found
    return {item.name: item.default for item in fields(kind) if item.default is not MISSING} | dict(found)


def whole_grant(found: Any) -> Any:
    whole = with_defaults(Grant, found)
    if isinstance(whole, dict):
        whole["quotas"] = with_defaults(Quotas, whole["quotas"])
        if type(whole["partitions"]) is int:  # as YAML reads `partitions: 7`
            whole["partitions"] = str(whole["partitions"])
    return whole


D = TypeVar("D", bound=Document)
_Reader: TypeAlias = Callable[[Any, str], Any]
"""A JSON value, and the place where it stands in the document → what it means."""


class _Wrong(Exception):
    def __init__(self, place: str, what: str) -> None:
        super().__init__(place, what)
        self.place, self.what = place or "the document", what


def decode(kind: type[D], data: bytes, path: str, refusal: type[WaltzError] = BadMetadata) -> D:
    """The value of a document; `path` and `refusal` are for telling that it cannot be understood."""
    try:
        found = json.loads(data, object_pairs_hook=_unambiguous, parse_constant=_no_number)
        _check_tellable(found)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path} is not a JSON document: {error}", path=path) from error
    try:
        schema = _schema(_member(_members(found, ""), "schema", ""), "schema")
        if schema != SCHEMA:
            what = f"{path} has schema {schema}; this version of Waltz knows schema {SCHEMA}"
            raise refusal(what, path=path, schema=schema)
        del found["schema"]
        reader: _Reader = _reader(typing.cast(Any, kind))
        value: D = reader(found, "")
        if (mistake := value.mistake()) is not None:
            raise _Wrong(*mistake)
    except _Wrong as wrong:
        raise refusal(f"{path}: {wrong.place} {wrong.what}", path=path, field=wrong.place) from None
    return value


def decode_root(data: bytes, path: str = "/") -> ClusterMeta:
    """The cluster at a root; `MetadataUnfinished` where a tool is putting one back, or was killed at that."""
    try:
        return decode(ClusterMeta, data, path)
    except BadMetadata:
        found = unfinished(data)
        if found is None:
            raise
    raise MetadataUnfinished(
        f"{path}: the documents of the cluster {found.key} are not whole: {found.unfinished} began at {found.began} "
        "and did not end",
        path=path,
    )


def unfinished(data: bytes) -> Unfinished | None:
    try:
        return decode(Unfinished, data, "/")
    except BadMetadata:
        return None


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return members


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is not a number of JSON")


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


@functools.cache
def _reader(kind: Any) -> _Reader:
    """What reads a field of this annotation, made once."""
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer is Annotated:
        return _leaf(*inner)
    if NoneType in inner:
        return _optional(_reader(next(part for part in inner if part is not NoneType)))
    if outer is tuple:
        return _list(_reader(inner[0]), may_repeat=inner[0] != Name)
    if outer is Mapping:
        return _mapping(_KEYS[inner[0]], _reader(inner[1]))
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast(type[Any], kind))
    if kind not in _DEFAULTS and issubclass(kind, enum.Enum):
        values = [member.value for member in kind]
        return _leaf(kind, Rule(" or ".join(values), lambda value: value in values))
    return _leaf(kind, _DEFAULTS[kind])


def _leaf(kind: Callable[[Any], Any], rule: Rule) -> _Reader:
    def read(value: Any, place: str) -> Any:
        if not rule.holds(value):
            raise _Wrong(place, f"must be {rule.what}, not {_shown(value)}")
        return kind(value)

    return read


_schema = _reader(Amount)
"""Made once: a rule that is made anew each time would be remembered anew each time."""


def _optional(reader: _Reader) -> _Reader:
    return lambda value, place: None if value is None else reader(value, place)


def _list(reader: _Reader, *, may_repeat: bool) -> _Reader:
    def read(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Wrong(place, f"must be a list, not {_shown(value)}")
        found = tuple(reader(inner, f"{place}[{number}]") for number, inner in enumerate(value))
        if not may_repeat and len(set(found)) != len(found):
            raise _Wrong(place, "has a name twice")
        return found

    return read


def _mapping(keys: Callable[[dict[str, Any], str], Mapping[Any, str]], reader: _Reader) -> _Reader:
    def read(value: Any, place: str) -> dict[Any, Any]:
        members = _members(value, place)
        return {key: reader(members[name], _below(place, name)) for key, name in keys(members, place).items()}

    return read


def _by_name(members: dict[str, Any], place: str) -> Mapping[str, str]:
    return {_reader(Name)(name, _below(place, name)): name for name in members}


def _by_number(members: dict[str, Any], place: str) -> Mapping[int, str]:
    for name in members:
        if not _NUMBER.fullmatch(name) or int(name) > ID_MAX:
            raise _Wrong(_below(place, name), "is not the number of a partition")
    return {int(name): name for name in sorted(members, key=int)}


def _by_text(members: dict[str, Any], place: str) -> Mapping[str, str]:
    return {name: name for name in members}


_KEYS: dict[Any, Callable[[dict[str, Any], str], Mapping[Any, str]]] = {Name: _by_name, int: _by_number, str: _by_text}


def _numbered(reader: _Reader) -> _Reader:
    def read(value: Any, place: str) -> tuple[Any, ...]:
        found = reader(value, place)
        if list(found) != list(range(len(found))):
            raise _Wrong(place, "must name every partition from 0 on")
        return tuple(found.values())

    return read


def _object(kind: type[Any]) -> _Reader:
    hints = typing.get_type_hints(kind, include_extras=True)
    added = {item.name for item in fields(kind) if ADDED in item.metadata}
    readers: dict[str, tuple[str, _Reader]] = {}
    """Name in the document → name of the field, and what reads it."""
    for item in fields(kind):
        hint = hints[item.name]
        if NUMBERED in item.metadata:
            by_number = _mapping(_by_number, _reader(typing.get_args(hint)[0]))
            readers[item.metadata[NUMBERED]] = item.name, _numbered(by_number)
        else:
            readers[item.name] = item.name, _reader(hint)

    def read(value: Any, place: str) -> Any:
        members = _members(value, place)
        found = {
            attribute: reader(_member(members, name, place), _below(place, name))
            for name, (attribute, reader) in readers.items()
            if name in members or name not in added
        }
        for name in members.keys() - readers.keys():
            raise _Wrong(_below(place, name), "is not known to this version of Waltz")
        return kind(**found)

    return read


def _members(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(place, f"must be an object, not {_shown(value)}")
    return value


def _member(members: dict[str, Any], name: str, place: str) -> Any:
    if name not in members:
        raise _Wrong(_below(place, name), "is missing")
    return members[name]


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place and name else place or name


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"


def check_sets(meta: ClusterMeta, storages: Collection[StorageMeta], replicas: ReplicaSets) -> None:
    """Raise `BadArgument` for what a person may have mistyped. The group log has the number after the partitions."""
    names = [storage.name for storage in storages]
    for name in [meta.name, *names]:
        if not is_name(name):
            raise BadArgument(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64")
    if len(set(names)) != len(names):
        raise BadArgument("two storages have the same name")
    for partition, members in replicas.partitions.items():
        if not 0 <= partition <= meta.partitions:
            raise BadArgument(f"there is no partition {partition}: the cluster has {meta.partitions}")
        for name in members:
            if name not in names:
                raise BadArgument(f"partition {partition} cannot have a replica on {name}: there is no such storage")

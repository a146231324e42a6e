"""Values that are written and read as JSON documents, declared once by the annotations of dataclasses. Pure.

The annotations declare the document: which JSON each field accepts. Reading is strict: a field that is missing, has the
wrong type, is out of bounds or is unknown raises an error with the path and the field. Each document contains the version
of its schema, so that an older Waltz refuses a document that it does not understand.

A `DigestFormat` is a JSON object with a digest of itself, as the manifests of archives and exports.

Reading makes three checks. The digest detects bit rot. Strict reading detects invalid fields. The reader then encodes
the decoded value again, and accepts the object only if the result is identical.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Annotated, Any, TypeAlias, TypeVar
from uuid import UUID

from waltzd.errors import WaltzError
from waltzd.errors.operations import BadMetadata, UnknownVersion
from waltzd.format.layout import ID_MAX
from waltzd.protocol.address import is_name
from waltzd.protocol.channels import KeyHash, Parts, Ranges, is_key_hash, is_parts, is_ranges
from waltzd.protocol.policy import PREFIX_LENGTH_MAX, Amount, Pattern, Prefix, is_pattern, is_prefix
from waltzd.protocol.timelines import Fork

SCHEMA = 1
NESTING_MAX = 8
"""Nesting at which a document is refused: twice as deep as any valid one."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_CRC, _SHA256 = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{64}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


# -- fields ------------------------------------------------------------------------------------------------------------


class Document:
    """Base class of documents, and of parts of documents whose fields depend on each other."""

    def mistake(self) -> tuple[str, str] | None:
        """Check fields that depend on each other; return the place and the error, or None."""
        return None


@dataclass(frozen=True)
class Rule:
    """The JSON values that a field accepts."""

    what: str
    """Description of the accepted values, for error messages."""
    holds: Callable[[Any], bool]
    parse: Callable[[Any], Any] | None = None
    """Function from the JSON value to the value of the field; None to use the type of the field."""


def whole(least: int = 0, most: int = ID_MAX) -> Rule:
    """Return the rule for whole numbers within bounds."""
    # `type` excludes true and false, which are instances of `int` in Python, and 1.0.
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
    KeyHash: Rule(
        "a hash function and numbers of partitions, as in blake2b:0-3",
        lambda value: isinstance(value, str) and is_key_hash(value),
    ),
    Amount: whole(1),
    Fork: whole(-1),
}
"""Rules of types whose annotation has no rule."""
_IS_NAME = Rule(
    "a name of letters, digits, dots, dashes and underscores", lambda value: isinstance(value, str) and is_name(value)
)
Name: TypeAlias = Annotated[str, _IS_NAME]
Mark: TypeAlias = Annotated[int, whole(-1)]
"""Transaction id, or -1 for none."""
IS_SHA256 = Rule(
    "a SHA-256 in hexadecimal digits", lambda value: isinstance(value, str) and _SHA256.fullmatch(value) is not None
)
Sha256: TypeAlias = Annotated[str, IS_SHA256]
Crc: TypeAlias = Annotated[
    int,
    Rule(
        "8 hexadecimal digits",
        lambda value: isinstance(value, str) and bool(_CRC.fullmatch(value)),
        functools.partial(int, base=16),
    ),
]
AnyText: TypeAlias = Annotated[str, Rule("a text", lambda value: isinstance(value, str))]
"""Text that may be empty."""
NUMBERED = "numbered"
"""Key in the metadata of a tuple: the name under which it is written, as an object of index → item."""
WRITTEN = "written"
"""Key in the metadata of a field: the name under which it is written, if that is an older one."""
ROW = "row"
"""Annotation of a value that is written as the list of its fields, in their order."""
ADDED = "added"
"""Key in the metadata of a field that older documents of the same schema lack. The field is written only if it differs from
its default, so that older versions can read the documents of a cluster that does not use it."""


# -- writing -----------------------------------------------------------------------------------------------------------


def encode(value: Document) -> bytes:
    """Return the document as JSON text: sorted, with one value a line, so that people can read it.

    Raise `BadMetadata` if the text could not be read again."""
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
        if ADDED in item.metadata:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if inner == default:
                continue
        if NUMBERED in item.metadata:
            found.append((item.metadata[NUMBERED], _plain(dict(enumerate(inner)))))
        else:
            found.append((item.metadata.get(WRITTEN, item.name), _plain(inner)))
    return _sorted(found)


def _sorted(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Sort members by name, with numbers in numeric order: 2 before 10."""
    return dict(sorted(pairs, key=lambda pair: (not pair[0].isdecimal(), len(pair[0]) * pair[0].isdecimal(), pair[0])))


# -- reading -----------------------------------------------------------------------------------------------------------


def with_defaults(kind: type[Any], found: Any) -> Any:
    """Add the defaults of omitted fields to an object that a person wrote; return any other value unchanged."""
    if not isinstance(found, Mapping):
        return found
    return {item.name: item.default for item in fields(kind) if item.default is not MISSING} | dict(found)


D = TypeVar("D", bound=Document)
_Reader: TypeAlias = Callable[[Any, str], Any]
"""Function from a JSON value and its place in the document to the value of a field."""


class _Wrong(Exception):
    def __init__(self, place: str, what: str) -> None:
        super().__init__(place, what)
        self.place, self.what = place or "the document", what


def decode(kind: type[D], data: bytes, path: str, refusal: type[WaltzError] = BadMetadata) -> D:
    """Return the value of a document; raise `refusal`, with the path and the field, if it is invalid."""
    try:
        found = parse(data)
    except ValueError as error:
        raise refusal(f"{path} is not a JSON document: {error}", path=path) from error
    with _refused(path, refusal):
        schema = _schema(_member(_members(found, ""), "schema", ""), "schema")
    if schema != SCHEMA:
        what = f"{path} has schema {schema}; this version of Waltz knows schema {SCHEMA}"
        raise refusal(what, path=path, schema=schema)
    del found["schema"]
    return read(kind, found, path, refusal)


def read(kind: type[D], found: Any, path: str, refusal: type[WaltzError] = BadMetadata) -> D:
    """Return the value for parsed JSON; raise `refusal` as `decode` does."""
    with _refused(path, refusal):
        return typing.cast(D, _reader(typing.cast(Any, kind))(found, ""))


@contextmanager
def _refused(path: str, refusal: type[WaltzError]) -> Iterator[None]:
    try:
        yield
    except _Wrong as wrong:
        raise refusal(f"{path}: {wrong.place} {wrong.what}", path=path, field=wrong.place) from None


def parse(data: bytes) -> Any:
    """Parse a JSON text; raise ValueError if it is invalid, or has a name twice in one object."""
    try:
        found = json.loads(data, object_pairs_hook=_unambiguous, parse_constant=_no_number)
        _check_tellable(found)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return members


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is not a number of JSON")


def _check_tellable(value: object, depth: int = 0) -> None:
    """Raise ValueError for lone surrogates, which cannot be written again, and for too much nesting."""
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
    """Return the cached reader of fields with this annotation."""
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer is Annotated:
        return _row(inner[0]) if inner[1] == ROW else _leaf(*inner)
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
    make = rule.parse or kind

    def read(value: Any, place: str) -> Any:
        if not rule.holds(value):
            raise _Wrong(place, f"must be {rule.what}, not {_shown(value)}")
        return make(value)

    return read


_schema = _reader(Amount)
"""Reader of the schema version. A rule made for each call would fill the cache of `_reader`."""


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
    """Name in the document → name of the field, and its reader."""
    for item in fields(kind):
        hint = hints[item.name]
        if NUMBERED in item.metadata:
            by_number = _mapping(_by_number, _reader(typing.get_args(hint)[0]))
            readers[item.metadata[NUMBERED]] = item.name, _numbered(by_number)
        else:
            readers[item.metadata.get(WRITTEN, item.name)] = item.name, _reader(hint)

    def read(value: Any, place: str) -> Any:
        members = _members(value, place)
        found = {
            attribute: reader(_member(members, name, place), _below(place, name))
            for name, (attribute, reader) in readers.items()
            if name in members or name not in added
        }
        for name in members.keys() - readers.keys():
            raise _Wrong(_below(place, name), "is not known to this version of Waltz")
        return _consistent(kind(**found), place)

    return read


def _row(kind: type[Any]) -> _Reader:
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {item.name: _reader(hints[item.name]) for item in fields(kind)}
    sizes = sorted({len(readers), sum(ADDED not in item.metadata for item in fields(kind))})
    """Lengths of a row: with and without the fields that older documents lack, which come last."""

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, list) or len(value) not in sizes:
            raise _Wrong(place, f"must be a list of {' or '.join(map(str, sizes))} values, not {_shown(value)}")
        found = {
            name: reader(inner, _below(place, name)) for (name, reader), inner in zip(readers.items(), value, strict=False)
        }
        return _consistent(kind(**found), place)

    return read


def _consistent(value: Any, place: str) -> Any:
    if isinstance(value, Document) and (mistake := value.mistake()) is not None:
        raise _Wrong(_below(place, mistake[0]), mistake[1])
    return value


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


def sha256_of(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DigestFormat:
    """A format of JSON objects that have a member with the SHA-256 of all other members."""

    name: str
    version: int
    """Newest version; each version from 1 on can be read."""
    thing: str
    """Noun for one of the objects, with its article, for error messages."""
    damage: type[WaltzError]
    """Class of the error for a damaged object."""

    def with_digest(self, value: Mapping[str, Any], *, version: int | None = None) -> dict[str, Any]:
        """Return the object with its format, its version (the newest by default) and its digest."""
        whole = {"format": self.name, "version": self.version if version is None else version, **value}
        return {**whole, "sha256": _digest(whole)}

    def parse(self, text: bytes, where: str) -> dict[str, Any]:
        """Return the object that was passed to `with_digest`.

        Raises:
            UnknownVersion: A newer Waltz wrote the object.
            WaltzError: The object is damaged; the class is `damage`.
        """
        try:
            value = parse(text)
        except ValueError as error:
            raise self.damage(f"{where} cannot be understood: {error}") from error
        if not isinstance(value, dict) or value.get("format") != self.name:
            raise self.damage(f"{where} is not {self.thing}")
        version = value.get("version")
        if type(version) is int and version > self.version:
            raise UnknownVersion(f"{where} is {self.thing} of version {version}; this program knows {self.version}")
        if value.pop("sha256", None) != _digest(value) or type(version) is not int or version < 1:
            raise self.damage(f"{where} does not have the checksum that it carries")
        del value["format"], value["version"]
        return value


def _digest(value: Mapping[str, Any]) -> str:
    return sha256_of(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())

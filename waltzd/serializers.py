"""Serializers for common values: they turn values of an application into payloads, and back.

`Json` is for plain values. The others are for events: objects of classes that the application declares once, each with
its name and version in the log (`EventType`). A payload is an envelope with `type`, `version` and `data`, in JSON or
MessagePack, so other programs can read it, too. Data of an older version is upgraded to the current version by pure
functions, one version at a time. Data of a newer version raises `EventUnknown`: a view waits there for a newer program.

Several applications can share partitions if each has a prefix for the names of its event types. A serializer with a
`prefix` finds transactions of other applications foreign, and its client passes over them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isfinite
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from waltzd.client.view import E, E_co, checked_kind
from waltzd.errors import BadArgument, EventUnknown, EventUnreadable

if TYPE_CHECKING:
    import msgspec
    import pydantic
    from typing_extensions import TypeVar

    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")

__all__ = ["EventType", "Json", "JsonEvents", "MsgspecEvents", "PydanticEvents"]

Upcast: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that turns the data of one version into that of the next."""
_NAME = re.compile(r"[^\s\"\\]+")
_PLAIN = (bool, int, float, str)


class Json(Generic[V]):
    """Plain values as JSON: whatever `json.dumps` takes. The type V of a `Json[V]` is not checked.

    Example:
        ```python
        client = Client(servers, serializer=Json[dict[str, int]]())
        ```
    """

    def encode(self, value: V) -> bytes:
        """Return the JSON of a value, as UTF-8.

        Raises:
            BadArgument: JSON has no such value.
        """
        return _json(value)

    def decode(self, payload: bytes) -> V:
        """Return the value of a payload.

        Raises:
            EventUnreadable: The payload is no JSON.
        """
        try:
            value: V = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise EventUnreadable(f"this payload is not JSON: {error}") from error
        return value


@dataclasses.dataclass(frozen=True)
class EventType(Generic[E_co]):
    """Class of events, with its name and version in the log.

    The class may be renamed; its name and versions in the log may not. A new version needs a function that upgrades the
    data of the version before: `upcasts={1: one_to_two, 2: two_to_three}` for version 3. These functions are pure, and
    get the data as it was read: dictionaries, lists, texts and numbers.

    Raises:
        BadArgument: The name is empty or has blanks, quotes or backslashes, the version is below 1, `upcasts` does
            not have exactly one function for each earlier version, or the kind does not fit or is reserved.

    Example:
        ```python
        def with_currency(data):
            return {**data, "currency": "EUR"}

        EventType(Deposited, "deposited", version=2, upcasts={1: with_currency})
        ```
    """

    cls: type[E_co]
    """Class in the current program."""
    name: str
    """Name in the log, which never changes."""
    version: int = 1
    """Version in which events are written."""
    upcasts: Mapping[int, Upcast] = dataclasses.field(default_factory=dict)
    """Function for each earlier version that upgrades its data to the next version."""
    kind: int = 0
    """Kind of the transactions that contain such an event: 32 bits with a sign, which a consumer group can select
    (`create_group(types=…)`); 0 for none."""

    def __post_init__(self) -> None:
        if not isinstance(self.cls, type):
            raise BadArgument(f"`cls` of an event type must be a class, not {self.cls!r}")
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise BadArgument(f"an event type needs a name without blanks, quotes and backslashes, not {self.name!r}")
        if type(self.version) is not int or self.version < 1:
            raise BadArgument(f"versions of an event type begin at 1; {self.name} has {self.version!r}")
        checked_kind(self.kind)
        wanted, given = list(range(1, self.version)), list(self.upcasts)
        if sorted(given) != wanted:
            raise BadArgument(
                f"the event type {self.name} has version {self.version}, and upcasts from {sorted(given)}, not {wanted}",
                next_step="give one function for each version before: `upcasts={1: one_to_two, …}`",
            )


class _Events(ABC, Generic[E]):
    """Base of the serializers of events: it has the envelope, a subclass has the encoding."""

    _unreadable: tuple[type[Exception], ...] = (ValueError, RecursionError)
    """Errors that say that a payload cannot be read."""

    def __init__(self, *types: EventType[E], prefix: str = "") -> None:
        if not types:
            raise BadArgument("a serializer of events needs at least one event type")
        self._by_class = {one.cls: one for one in types}
        self._by_name = {one.name: one for one in types}
        kinds = [one.kind for one in types if one.kind]
        if not len(types) == len(self._by_class) == len(self._by_name) or len(kinds) > len(set(kinds)):
            raise BadArgument(
                f"a class, a name or a kind is given twice among the event types {', '.join(one.name for one in types)}"
            )
        strange = [one.name for one in types if not one.name.startswith(prefix)]
        if strange:
            raise BadArgument(
                f"the name of the event type {strange[0]} does not begin with the prefix {prefix!r}",
                next_step="the prefix is part of each name in the log: give names as `bank.deposited`",
            )
        self.prefix = prefix
        """Beginning of the names of all event types of the application; empty if it shares no partition."""

    def kind_of(self, value: E) -> int:
        """Return the kind of an event, as its event type gives it."""
        return self._type_of(value).kind

    def kind_of_type(self, cls: type[E]) -> int:
        """Return the kind of a class of events.

        Raises:
            BadArgument: The class is none of the event types, or its event type has no kind.
        """
        found = self._by_class.get(cls)
        if found is None or not found.kind:
            what = "is none of the event types of the serializer" if found is None else "has no kind in its event type"
            raise BadArgument(f"{cls!r} {what}", next_step="give `EventType(…, kind=N)`, with another N for each type")
        return found.kind

    def is_foreign(self, payload: bytes) -> bool:
        """Return whether a payload is of another application: not an event whose type begins with the prefix. Without a
        prefix no payload is."""
        if not self.prefix:
            return False
        try:
            return not self._open(payload)[0].startswith(self.prefix)
        except self._unreadable:
            return True

    def encode(self, value: E) -> bytes:
        """Return the payload of an event.

        Raises:
            BadArgument: Its class is none of the event types, or it cannot be encoded.
        """
        return self._payload(self._type_of(value), value)

    def _type_of(self, value: E) -> EventType[E]:
        found = self._by_class.get(type(value))
        if found is None:
            known = ", ".join(one.__name__ for one in self._by_class)
            raise BadArgument(f"{type(value).__name__} is none of the event types of this serializer: {known}")
        return found

    def decode(self, payload: bytes) -> E:
        """Return the event of a payload, upgraded to the current version.

        Raises:
            EventUnknown: This program does not know its type or its version: a newer program wrote it.
            EventUnreadable: The payload is no such envelope, or its data does not fit its type.
            Exception: What a function of `upcasts` raises.
        """
        try:
            name, version, content = self._open(payload)
        except self._unreadable as error:
            raise EventUnreadable(f"this payload is not an event: {_first_line(error)}") from error
        kind = self._by_name.get(name)
        if kind is None:
            raise EventUnknown(f"this program has no event type named {name!r}", type=name, version=version)
        if version > kind.version:
            why = f"this event has version {version} of the event type {name}; {kind.version} is the newest here"
            raise EventUnknown(why, type=name, version=version)
        try:
            return self._event(kind, version, content)
        except self._unreadable as error:
            why = f"the data of this event does not fit version {version} of the event type {name}: {_first_line(error)}"
            raise EventUnreadable(why, type=name, version=version) from error

    @abstractmethod
    def _payload(self, kind: EventType[E], value: E) -> bytes: ...

    @abstractmethod
    def _open(self, payload: bytes) -> tuple[str, int, Any]:
        """Return type, version and data of an envelope."""

    @abstractmethod
    def _event(self, kind: EventType[E], version: int, content: Any) -> E: ...


class JsonEvents(_Events[E]):
    """Events as JSON, with the standard library alone.

    Events are dataclasses whose fields are texts, numbers, booleans, None, and lists and dictionaries of these. For
    other types use `PydanticEvents` or `MsgspecEvents`. Values are checked against the types of the fields when they
    are written and read.

    Example:
        ```python
        events = JsonEvents[Deposited | Withdrawn](EventType(Deposited, "deposited"), EventType(Withdrawn, "withdrawn"))
        client = Client(servers, serializer=events)
        ```
    """

    def __init__(self, *types: EventType[E], prefix: str = "") -> None:
        """Create a serializer of these events.

        Args:
            types: Event types.
            prefix: Beginning of the names of all event types of this application, such as `"bank."`. Views, feeds and
                consumer groups of the client pass over each transaction that is no event of this prefix. Without a
                prefix, an event of another application stops a view.

        Raises:
            BadArgument: A class is no dataclass, a field has a type that JSON does not preserve, a class, a name or a
                kind is given twice, there is none, or a name does not begin with the prefix.
        """
        super().__init__(*types, prefix=prefix)
        self._fields = {one.name: _fields_of(one.cls) for one in types}

    def _payload(self, kind: EventType[E], value: E) -> bytes:
        found = {name: getattr(value, name) for name in self._fields[kind.name]}
        wrong = self._misfit(kind, found)
        if wrong:
            raise BadArgument(f"a {type(value).__name__} cannot be written: {wrong}")
        return _json({"type": kind.name, "version": kind.version, "data": found})

    def _open(self, payload: bytes) -> tuple[str, int, Any]:
        return _envelope(json.loads(payload))

    def _event(self, kind: EventType[E], version: int, content: Any) -> E:
        found = _upcast(kind, version, content)
        wrong = self._misfit(kind, found)
        if wrong:
            raise ValueError(wrong)
        try:
            return kind.cls(**found)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def _misfit(self, kind: EventType[E], found: Mapping[str, Any]) -> str:
        fields = self._fields[kind.name]
        for name, value in found.items():
            if name not in fields:
                return f"there is no field {name!r}"
            if not _fits(value, fields[name]):
                return f"its {name} is {value!r}"
        return ""


class PydanticEvents(_Events[E]):
    """Events as JSON, by pydantic: models, and dataclasses with any types that pydantic knows. Needs
    `waltzd[pydantic]`.

    Example:
        ```python
        class Deposited(BaseModel):
            account: UUID
            amount: Decimal

        events = PydanticEvents[Deposited](EventType(Deposited, "deposited"))
        ```
    """

    def __init__(self, *types: EventType[E], prefix: str = "") -> None:
        """Create a serializer of these events.

        Args:
            types: Event types.
            prefix: See `JsonEvents`.

        Raises:
            ModuleNotFoundError: pydantic is not installed.
            BadArgument: A class, a name or a kind is given twice, there is none, or a name does not begin with the
                prefix.
        """
        make = _needed("pydantic").TypeAdapter
        super().__init__(*types, prefix=prefix)
        self._adapters: dict[str, pydantic.TypeAdapter[E]] = {one.name: make(one.cls) for one in types}

    def _payload(self, kind: EventType[E], value: E) -> bytes:
        adapter = self._adapters[kind.name]
        body = adapter.dump_json(value, by_alias=True)
        _check_numbers(value, partial(adapter.dump_python, mode="json", by_alias=True), body)
        return b'{"type":%s,"version":%d,"data":%s}' % (_json(kind.name), kind.version, body)

    def _open(self, payload: bytes) -> tuple[str, int, Any]:
        return _envelope(json.loads(payload))

    def _event(self, kind: EventType[E], version: int, content: Any) -> E:
        # As JSON again: a strict model accepts a text for a date from JSON, but not from Python.
        return self._adapters[kind.name].validate_json(_json(_upcast(kind, version, content)))


class MsgspecEvents(_Events[E]):
    """Events as JSON or MessagePack, by msgspec: structs, and dataclasses with any types that msgspec knows.

    This is the fastest serializer of events. Needs `waltzd[msgspec]`.

    Example:
        ```python
        class Deposited(msgspec.Struct, frozen=True):
            account: UUID
            amount: Decimal

        events = MsgspecEvents[Deposited](EventType(Deposited, "deposited"), form="msgpack")
        ```
    """

    _forms: ClassVar = ("json", "msgpack")

    def __init__(self, *types: EventType[E], form: Literal["json", "msgpack"] = "json", prefix: str = "") -> None:
        """Create a serializer of these events.

        Args:
            types: Event types.
            form: Encoding of the payloads. A log must keep the encoding that it began with.
            prefix: See `JsonEvents`.

        Raises:
            ModuleNotFoundError: msgspec is not installed.
            BadArgument: There is no such form, a class, a name or a kind is given twice, there is none, or a name does
                not begin with the prefix.
        """
        spec: Any = _needed("msgspec")
        if form not in self._forms:
            raise BadArgument(f"form must be one of {', '.join(self._forms)}, not {form!r}")
        super().__init__(*types, prefix=prefix)
        self._unreadable = (spec.MsgspecError, ValueError, RecursionError)
        self._form = form
        self._convert: Callable[[Any, type[E]], E] = spec.convert
        # JSON that an event holds as it is (`Raw`) is the only thing that `encode` takes and `to_builtins` does not.
        self._to_builtins: Callable[[E], Any] = partial(spec.to_builtins, enc_hook=spec.json.decode)
        module = getattr(spec, form)
        self._encode: Callable[[Any], bytes] = module.encode
        self._plain: Callable[[msgspec.Raw], Any] = module.decode
        envelope = spec.defstruct("Envelope", [("type", str), ("version", int), ("data", spec.Raw)])
        self._envelope: msgspec.json.Decoder[Any] = module.Decoder(envelope)
        self._decoders: dict[str, msgspec.json.Decoder[E]] = {one.name: module.Decoder(one.cls) for one in types}

    def _payload(self, kind: EventType[E], value: E) -> bytes:
        payload = self._encode({"type": kind.name, "version": kind.version, "data": value})
        if self._form == "json":
            _check_numbers(value, self._to_builtins, payload)
        return payload

    def _open(self, payload: bytes) -> tuple[str, int, Any]:
        found = self._envelope.decode(payload)
        return _envelope({"type": found.type, "version": found.version, "data": found.data})

    def _event(self, kind: EventType[E], version: int, content: Any) -> E:
        if version == kind.version:
            return self._decoders[kind.name].decode(content)
        return self._convert(_upcast(kind, version, self._plain(content)), kind.cls)


def _needed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"this serializer needs {package}, which is not installed: pip install 'waltzd[{package}]'", name=package
        ) from None


def _check_numbers(value: E, plain: Callable[[E], Any], body: bytes) -> None:
    """Raise `BadArgument` if a number was written as null: libraries do so with NaN and infinity, and the event could not
    be read, or had no value where it has one. `plain` returns an event as dictionaries, lists and numbers."""
    if b"null" not in body:
        return
    leaves = list(_leaves(plain(value)))
    if any(isinstance(leaf, float) and not isfinite(leaf) for leaf in leaves):
        nulls = sum(leaf is None for leaf in _leaves(json.loads(body)))
        if nulls > sum(leaf is None for leaf in leaves):
            raise BadArgument(f"a {type(value).__name__} cannot be written as JSON: it has a number that is not finite")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        yield value
        return
    for one in value:
        yield from _leaves(one)


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise BadArgument(f"this cannot be written as JSON: {error}") from error


def _envelope(found: Any) -> tuple[str, int, Any]:
    if not isinstance(found, dict) or not found.keys() >= {"type", "version", "data"}:
        raise ValueError("it has no `type`, `version` and `data`")
    name, version = found["type"], found["version"]
    if not isinstance(name, str) or type(version) is not int or version < 1:
        raise ValueError(f"its type is {name!r} and its version {version!r}")
    return name, version, found["data"]


def _upcast(kind: EventType[Any], version: int, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("it is not an object with fields")
    data: dict[str, Any] = content
    for number in range(version, kind.version):
        data = kind.upcasts[number](data)
    return data


def _fields_of(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass. Refuse types that JSON does not preserve."""
    if not dataclasses.is_dataclass(cls):
        raise BadArgument(f"{cls.__name__} is not a dataclass; `PydanticEvents` and `MsgspecEvents` take other classes")
    hints = get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    for name, wanted in fields.items():
        if not _is_plain(wanted):
            raise BadArgument(
                f"JSON does not preserve the field {name} of {cls.__name__}, which has the type {wanted}",
                next_step="use `PydanticEvents` or `MsgspecEvents`, or a text or number in its place",
            )
    return fields


def _is_plain(wanted: Any) -> bool:
    if wanted in (*_PLAIN, NoneType, Any):
        return True
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType, list):
        return all(map(_is_plain, parts))
    if origin is Literal:
        return all(type(part) in (*_PLAIN, NoneType) for part in parts)
    return origin is dict and parts[0] is str and _is_plain(parts[1])


def _fits(value: Any, wanted: Any) -> bool:
    """Return whether a value has a type; the type is one that `_is_plain` accepts."""
    if wanted is Any:
        return True
    if wanted is float:
        return type(value) in (float, int)
    if isinstance(wanted, type) and get_origin(wanted) is None:
        return type(value) is wanted
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(type(key) is str and _fits(one, parts[1]) for key, one in value.items())
    if origin is Literal:
        return value in parts
    return any(_fits(value, part) for part in parts)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

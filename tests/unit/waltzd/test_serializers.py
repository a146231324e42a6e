"""Events as payloads: every serializer gives back what it was given, and says what it cannot read, and why."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from waltzd.client.view import Decision, Serializer, Transaction
from waltzd.errors import ApplyFailed, BadArgument, EventUnknown, EventUnreadable
from waltzd.serializers import EventType, Json, JsonEvents, MsgspecEvents, PydanticEvents, Upcast
from waltzd.sql import SqlView, sqlite


@dataclass(frozen=True)
class Deposited:
    account: str
    amount: int
    currency: str = "EUR"
    note: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True)
class Closed:
    account: str


@dataclass
class Timed:
    at: datetime


@dataclass
class Rate:
    by_name: dict[str, float]
    kind: Literal["buy", "sell"]


class DepositedModel(pydantic.BaseModel, strict=True):
    account: UUID
    amount: int
    at: datetime
    currency: str = pydantic.Field(alias="unit")


class DepositedStruct(msgspec.Struct, frozen=True):
    account: UUID
    amount: int
    at: datetime
    currency: str


ACCOUNT, NOON = UUID(int=7), datetime(2026, 1, 1, 12, tzinfo=UTC)


def cents(data: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in data.items() if name != "euros"}, "amount": 100 * data["euros"]}


def with_currency(name: str) -> Upcast:
    return lambda data: {**data, name: "EUR"}


def types_of(cls: type[Any], version: int, name: str = "currency") -> EventType[Any]:
    chain: Mapping[int, Upcast] = {1: cents, 2: with_currency(name)}
    return EventType(cls, "deposited", version=version, upcasts={n: f for n, f in chain.items() if n < version})


def plain(version: int = 3) -> JsonEvents[Any]:
    return JsonEvents[Any](types_of(Deposited, version), EventType(Closed, "closed"))


def pydantic_events(version: int = 3) -> PydanticEvents[Any]:
    return PydanticEvents[Any](types_of(DepositedModel, version, "unit"), EventType(Closed, "closed"))


def msgspec_events(version: int = 3, form: Literal["json", "msgpack"] = "json") -> MsgspecEvents[Any]:
    return MsgspecEvents[Any](types_of(DepositedStruct, version), EventType(Closed, "closed"), form=form)


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "json": (plain, Deposited("a", 700), {"account": "a", "euros": 7}),
    "pydantic": (
        pydantic_events,
        DepositedModel(account=ACCOUNT, amount=700, at=NOON, unit="EUR"),
        {"account": str(ACCOUNT), "euros": 7, "at": "2026-01-01T12:00:00Z"},
    ),
    "msgspec": (
        msgspec_events,
        DepositedStruct(ACCOUNT, 700, NOON, "EUR"),
        {"account": str(ACCOUNT), "euros": 7, "at": "2026-01-01T12:00:00Z"},
    ),
    "msgpack": (
        lambda version=3: msgspec_events(version, "msgpack"),
        DepositedStruct(ACCOUNT, 700, NOON, "EUR"),
        {"account": str(ACCOUNT), "euros": 7, "at": NOON},
    ),
}


def written(form: str, name: str, version: object, data: object) -> bytes:
    envelope = {"data": data, "version": version, "type": name}  # in any order
    return msgspec.msgpack.encode(envelope) if form == "msgpack" else json.dumps(envelope, indent=1).encode()


@pytest.mark.parametrize("form", FORMS)
def test_an_event_comes_back_also_from_an_older_version(form: str) -> None:
    make, event, first = FORMS[form]
    events: Serializer[Any] = make()
    assert events.decode(events.encode(event)) == event
    assert events.decode(events.encode(Closed("a"))) == Closed("a")
    assert events.decode(written(form, "deposited", 1, first)) == event
    second = {**{name: value for name, value in first.items() if name != "euros"}, "amount": 700}
    assert events.decode(written(form, "deposited", 2, second)) == event


@pytest.mark.parametrize("form", FORMS)
def test_what_a_newer_program_wrote_is_told_apart_from_what_is_broken(form: str) -> None:
    make, event, first = FORMS[form]
    events: Serializer[Any] = make()
    with pytest.raises(EventUnknown, match="version 4 of the event type deposited; 3 is the newest") as newer:
        events.decode(written(form, "deposited", 4, first))
    assert newer.value.facts == {"type": "deposited", "version": "4"}
    with pytest.raises(EventUnknown, match="'withdrawn'"):
        events.decode(written(form, "withdrawn", 1, {}))
    with pytest.raises(EventUnknown):
        make(2).decode(events.encode(event))
    for payload in (
        b"",
        b"hello",
        b"\xff",
        b"[1]",
        b'{"type": "deposited"}',
        b"7",
        b"[" * 100_000,
        events.encode(event)[:-1],
    ):
        with pytest.raises(EventUnreadable):
            events.decode(payload)
    for version, data in ((0, {}), ("1", {}), (True, {}), (3, {}), (3, []), (1, None), (3, {"account": 7, "amount": "7"})):
        with pytest.raises(EventUnreadable):
            events.decode(written(form, "deposited", version, data))
    with pytest.raises(BadArgument, match="event types"):
        events.encode("an event")


def test_the_envelope_is_the_same_for_every_program() -> None:
    assert plain().encode(Closed("ä")) == '{"type":"closed","version":1,"data":{"account":"ä"}}'.encode()
    for events in (pydantic_events(), msgspec_events()):
        assert events.encode(Closed("ä")) == plain().encode(Closed("ä"))


def test_a_chain_of_versions_is_whole_or_refused() -> None:
    for version, upcasts in ((2, {}), (3, {1: cents}), (3, {2: cents}), (2, {1: cents, 2: cents}), (1, {0: cents})):
        with pytest.raises(BadArgument, match="upcasts from"):
            EventType(Deposited, "deposited", version, upcasts)
    wrong: list[tuple[Any, ...]] = [
        (Deposited, ""),
        (Deposited, 'a"b'),
        (Deposited, "a", 0),
        (Deposited, "a", "1"),
        ("a", "a"),
    ]
    for arguments in wrong:
        with pytest.raises(BadArgument):
            EventType(*arguments)
    one, other = EventType(Deposited, "one"), EventType(Closed, "one")
    for types in ((), (one, other), (one, EventType(Deposited, "two"))):
        with pytest.raises(BadArgument):
            JsonEvents[Any](*types)


def test_what_json_does_not_give_back_is_refused_where_it_is_seen() -> None:
    with pytest.raises(BadArgument, match="field at of Timed"):
        JsonEvents[Any](EventType(Timed, "timed"))
    with pytest.raises(BadArgument, match="not a dataclass"):
        JsonEvents[Any](EventType(DepositedStruct, "deposited"))
    wrong: Any = "7"
    with pytest.raises(BadArgument, match="its amount is '7'"):
        plain().encode(Deposited("a", wrong))
    rates = JsonEvents[Rate](EventType(Rate, "rate"))
    assert rates.decode(rates.encode(Rate({"eur": 1}, "buy"))) == Rate({"eur": 1}, "buy")
    for by_name, kind in (({"eur": "1"}, "buy"), ({}, "keep"), ([], "buy")):
        with pytest.raises(EventUnreadable):
            rates.decode(written("json", "rate", 1, {"by_name": by_name, "kind": kind}))


class Price(pydantic.BaseModel):
    note: str | None = None
    at_most: float | None = None
    each: dict[str, list[float]] = {}


class Texted(Price, ser_json_inf_nan="strings"):
    pass


class Mapped(Price):
    @pydantic.field_serializer("at_most", when_used="json")
    def _limit(self, value: float | None) -> float | None:
        return None if value == float("inf") else value


class PriceStruct(msgspec.Struct):
    note: str | None = None
    at_most: float | None = None
    each: dict[str, list[float]] = {}


def test_a_number_that_json_has_not_is_refused_before_it_is_in_the_log() -> None:
    types = EventType(Price, "price"), EventType(Texted, "texted")
    models, structs = PydanticEvents[Any](*types), MsgspecEvents[Any](EventType(PriceStruct, "price"))
    each: list[tuple[Any, Any]] = [(Price, models), (PriceStruct, structs)]
    for make, serializer in each:
        for wrong in (make(at_most=float("inf")), make(each={"eur": [1.0, float("nan")]})):
            with pytest.raises(BadArgument, match="a number that is not finite"):
                serializer.encode(wrong)
        for right in (make(), make(note="null", at_most=1.5)):
            assert serializer.decode(serializer.encode(right)) == right
    text = Texted(at_most=float("inf"))
    assert models.decode(models.encode(text)) == text, "a model may write it as a text, and read that"
    packed = MsgspecEvents[Any](EventType(PriceStruct, "price"), form="msgpack")
    assert packed.decode(packed.encode(PriceStruct(at_most=float("inf")))).at_most == float("inf")


def test_a_model_may_write_infinity_as_null_by_itself() -> None:
    serializer = PydanticEvents[Mapped](EventType(Mapped, "mapped"))
    assert serializer.decode(serializer.encode(Mapped(at_most=float("inf")))) == Mapped()
    with pytest.raises(BadArgument, match="a number that is not finite"):
        serializer.encode(Mapped(each={"eur": [float("nan")]}))


class Forwarded(msgspec.Struct):
    content: msgspec.Raw
    at_most: float | None = None


def test_json_that_a_struct_holds_as_it_is_may_have_null() -> None:
    serializer = MsgspecEvents[Forwarded](EventType(Forwarded, "forwarded"))
    content = msgspec.Raw(b'{"note":null}')
    assert serializer.decode(serializer.encode(Forwarded(content))).content == content
    with pytest.raises(BadArgument, match="a number that is not finite"):
        serializer.encode(Forwarded(content, float("nan")))


def test_plain_values() -> None:
    serializer = Json[dict[str, int]]()
    assert serializer.decode(serializer.encode({"ä": 1})) == {"ä": 1}
    with pytest.raises(EventUnreadable):
        serializer.decode(b"{")
    with pytest.raises(BadArgument):
        Json().encode(object())


def test_a_view_waits_for_the_program_that_knows_an_event_and_puts_aside_what_nobody_can_read(tmp_path: Any) -> None:
    metadata = sa.MetaData()
    sums = sa.Table("sums", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("amount", sa.Integer))

    def apply(connection: Connection, transaction: Transaction[Any]) -> None:
        connection.execute(sa.insert(sums).values(id=transaction.id, amount=transaction.value.amount))

    def fed(id: int, payload: bytes, serializer: Serializer[Any]) -> Transaction[Any]:
        return Transaction(0, id, 0, len(payload), 0, (0, 0, 0), payload, None, serializer)

    engine = sqlite(str(tmp_path / "view.db"))
    told: list[Any] = []
    options: dict[str, Any] = {"tables": metadata, "tries": 2, "then": "park", "on_poison": told.append}
    older, newer = SqlView(engine, apply, **options), SqlView(engine, apply, **options)
    for view in (older, newer):
        asyncio.run(view.opened(UUID(int=1)))
        view.read_position(0)

    def feed(view: SqlView[Any], id: int, payload: bytes, version: int) -> Decision | None:
        transaction = fed(id, payload, plain(version))
        try:
            view.apply_all([transaction])
        except ApplyFailed as error:
            return asyncio.run(view.failed(transaction, error))
        return None

    event = plain(3).encode(Deposited("a", 700))
    assert [feed(older, 0, event, 2) for _ in range(5)] == [Decision.RETRY] * 5
    assert feed(newer, 0, event, 3) is None
    assert feed(older, 0, event, 2) is None, "the other program has applied it"
    assert told == []
    assert [feed(older, 1, b"nonsense", 2) for _ in range(2)] == [Decision.RETRY, None]
    assert [type(poison.error.__cause__) for poison in told] == [EventUnreadable]
    assert older.read_position(0) == 1
    engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pydantic", "msgspec"])
def test_what_is_missing_is_named(package: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from waltzd.serializers import EventType, JsonEvents, MsgspecEvents, PydanticEvents
try:
    {package.capitalize()}Events(EventType(int, "a"))
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"pip install 'waltzd[{package}]'" in done.stdout

"""What has to be true in the end, from the log alone and what users were told: nothing twice, nothing lost, and every view
is the log, replayed.

The replay is written for the judgement; it shares no code with the applications but the form of their payloads."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import closing
from typing import TypeAlias, TypeVar

import httpx2
import sqlalchemy as sa

from tests.applications.services import BOOKING, PARTITIONS, PATIENCE_SECONDS, SHOP, Services
from tests.applications.users import ROOMS, STRANGE, Users
from tests.examples import booking, shop
from tests.examples.events import EVENTS, Booked, Event, Moved
from waltzd import Client, PositionFile, Token, Transaction

E = TypeVar("E", Booked, Moved)
Log: TypeAlias = list[Transaction[Event]]


async def judge(services: Services, users: Users) -> list[str]:
    """What is wrong. All is healed, and nobody writes any more."""
    log: Log = []
    async with Client(services.cluster.servers, partitions=[], serializer=EVENTS) as client:
        ends = {partition: await client.end_position(partition) for partition in range(PARTITIONS)}
        for partition in ends:
            log += [transaction async for transaction in client.scan(partition)]
        homes = {room: client.partition_of(room) for room in ROOMS}
    return [
        *_complete(log, ends),
        *users.contradictions,
        *_answered(log, users),
        *_overbooked(log),
        *_oversold(log),
        *await _hotels(services, log, {room: str(Token(home, ends[home])) for room, home in homes.items()}),
        *await _shops(services, log, [str(Token(partition, end)) for partition, end in ends.items()]),
        *await _index(services, log, ends),
    ]


def _all(log: Log, kind: type[E]) -> list[tuple[E, Token]]:
    """The events of a kind, each with its place. `STRANGE` is no event."""
    own = [one for one in log if one.payload != STRANGE]
    return [(one.value, Token(one.partition, one.id)) for one in own if isinstance(one.value, kind)]


def _complete(log: Log, ends: Mapping[int, int]) -> list[str]:
    wanted = [(partition, id) for partition, end in ends.items() for id in range(end + 1)]
    return [] if [(one.partition, one.id) for one in log] == wanted else ["the log was not read as a whole"]


def _answered(log: Log, users: Users) -> list[str]:
    """Each request is in the log once if it was confirmed, and not at all if it was refused."""
    bookings = {event.request: (event.room, event.night, event.guest) for event, _ in _all(log, Booked)}
    movements = {event.request: (event.article, event.quantity) for event, _ in _all(log, Moved)}
    counts = Counter([event.request for event, _ in _all(log, Booked)] + [event.request for event, _ in _all(log, Moved)])
    wrong = [f"{key} is in the log {count} times" for key, count in counts.items() if count > 1]
    for told, found in ((users.booked, bookings), (users.moved, movements)):
        wrong += [f"{key} was confirmed as {what}; the log has {found.get(key)}" for key, what in told.items()
                  if found.get(key) != what]  # fmt: skip
        wrong += [f"{key} is in the log, and was never confirmed" for key in found if key not in told.keys() | users.open]
    return wrong + [f"{key} was refused, and is in the log" for key in users.refused if key in counts]


def _overbooked(log: Log) -> list[str]:
    nights = Counter((event.room, event.night) for event, _ in _all(log, Booked))
    return [f"room {room} was given {count} times for {night}" for (room, night), count in nights.items() if count > 1]


def _oversold(log: Log) -> list[str]:
    stock: Counter[str] = Counter()
    wrong = []
    for event, token in _all(log, Moved):  # an article is in one partition, so this is its order
        stock[event.article] += event.quantity
        if stock[event.article] < 0:
            wrong.append(f"{event}, {token}, sells what is not there")
    return wrong


async def _hotels(services: Services, log: Log, seen: dict[str, str]) -> list[str]:
    """What both instances show. `seen`: by room, what makes them wait until they have all of it."""
    nights: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for event, _ in _all(log, Booked):
        nights[event.room][event.night] = event.guest
    wrong = []
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as web:
        for name in BOOKING:
            for room, where in seen.items():
                answer = await web.get(f"{services.url(name)}/rooms/{room}", headers={booking.SEEN: where})
                if answer.json() != nights[room]:
                    wrong.append(f"{name} shows {answer.json()} for room {room}; the log has {nights[room]}")
    return wrong


async def _shops(services: Services, log: Log, seen: list[str]) -> list[str]:
    """What is in the database that both instances share, when both say that it has everything."""
    stock: Counter[str] = Counter()
    for event, _ in _all(log, Moved):
        stock[event.article] += event.quantity
    movements = {(event.request, event.article, event.quantity) for event, _ in _all(log, Moved)}
    wrong = []
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as web:
        for name in SHOP:
            for where in seen:
                answer = await web.get(f"{services.url(name)}/stock/none", headers={shop.SEEN: where})
                if answer.status_code != 200:
                    wrong.append(f"{name} has not come to {where}: {answer.text}")
    engine = services.engine()
    with engine.connect() as connection:
        in_stock = dict(map(tuple, connection.execute(sa.select(shop.STOCK)).all()))
        moved = {tuple(row) for row in connection.execute(sa.select(shop.MOVEMENTS)).all()}
        letters = {
            tuple(row) for row in connection.execute(sa.text("SELECT partition_id, id FROM waltz_dead_letters")).all()
        }
    engine.dispose()
    strange = {(one.partition, one.id) for one in log if one.payload == STRANGE}
    if letters != strange:
        wrong.append(f"dead letters are {letters}; what is no event is {strange}")
    if in_stock != stock:
        wrong.append(f"the database has a stock of {in_stock}; the log comes to {dict(stock)}")
    if moved != movements:
        wrong.append(f"movements in the log or in the database only: {sorted(moved ^ movements)}")
    return wrong


async def _index(services: Services, log: Log, ends: Mapping[int, int]) -> list[str]:
    """What is in the index, when its positions are those of the log."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while PositionFile(f"{services.index}.position", services.cluster.key).positions != ends:
                await asyncio.sleep(0.05)
    except TimeoutError:
        return [f"the indexer does not come to {ends}"]
    with closing(sqlite3.connect(services.index, timeout=30)) as connection:
        found = connection.execute("SELECT partition, id, text FROM words ORDER BY partition, id").fetchall()
        night = connection.execute("SELECT partition, id FROM words WHERE text MATCH '\"night 0\"'").fetchall()
    words = [(one.partition, one.id, "" if one.payload == STRANGE else text_of(one.value)) for one in log]
    wrong = [] if found == words else [f"in the log or in the index only: {sorted(set(found) ^ set(words))}"]
    first = {(token.partition, token.id) for event, token in _all(log, Booked) if event.night == "night 0"}
    return wrong if set(night) == first else [*wrong, f"the index finds {night} for night 0; the log has {sorted(first)}"]


def text_of(event: Event) -> str:
    match event:
        case Booked():
            return f"{event.request} {event.room} {event.night} {event.guest}"
        case Moved():
            return f"{event.request} {event.article} {event.quantity}"

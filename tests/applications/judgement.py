"""What has to be true in the end, from the log alone and what users were told: nothing twice, nothing lost, and every view
is the log, replayed.

The replay is written for the judgement; it shares no code with the applications but the form of their payloads."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx2
import sqlalchemy as sa

from tests.applications.services import BOOKING, PATIENCE_SECONDS, SHOP, Services
from tests.applications.users import Users
from tests.examples import booking, shop
from waltzd import Client, PositionFile, Token


@dataclass(frozen=True)
class Event:
    partition: int
    id: int
    header: int
    body: dict[str, Any]


async def judge(services: Services, users: Users) -> list[str]:
    """What is wrong. All is healed, and nobody writes any more."""
    log: list[Event] = []
    ends: dict[int, int] = {}
    async with Client(services.cluster.servers) as client:
        for partition in client.partitions:
            ends[partition] = await client.end_position(partition)
            found = await client.read_some(partition, 0, ends[partition]) if ends[partition] >= 0 else []
            log += [Event(partition, one.id, one.header, json.loads(one.payload)) for one in found]
        rooms = {event.body["room"]: client.partition_of(event.body["room"]) for event in _of(log, booking.BOOKED)}
    return [
        *_complete(log, ends),
        *users.unseen,
        *_answered(log, users),
        *_overbooked(log),
        *_oversold(log),
        *await _hotels(services, log, {room: str(Token(partition, ends[partition])) for room, partition in rooms.items()}),
        *await _shops(services, log, [str(Token(partition, end)) for partition, end in ends.items() if end >= 0]),
        *await _index(services, log, {partition: end for partition, end in ends.items() if end >= 0}),
    ]


def _of(log: Iterable[Event], header: int) -> list[Event]:
    return [event for event in log if event.header == header]


def _complete(log: list[Event], ends: dict[int, int]) -> list[str]:
    wanted = [(partition, id) for partition, end in ends.items() for id in range(end + 1)]
    return [] if [(event.partition, event.id) for event in log] == wanted else ["the log was not read as a whole"]


def _answered(log: list[Event], users: Users) -> list[str]:
    """Each request is in the log once if it was confirmed, and not at all if it was refused."""
    bookings = {event.body["request"]: event.body for event in _of(log, booking.BOOKED)}
    movements = {event.body["request"]: event.body for event in _of(log, shop.MOVED)}
    counts = Counter(event.body["request"] for event in log)
    in_log = {key: (found["room"], found["night"], found["guest"]) for key, found in bookings.items()}
    in_shop = {key: (found["article"], found["quantity"]) for key, found in movements.items()}
    wrong = [f"{key} is in the log {count} times" for key, count in counts.items() if count > 1]
    for told, found in ((users.booked, in_log), (users.moved, in_shop)):
        wrong += [f"{key} was confirmed as {what}; the log has {found.get(key)}" for key, what in told.items()
                  if found.get(key) != what]  # fmt: skip
        wrong += [f"{key} is in the log, and was never confirmed" for key in found if key not in told.keys() | users.open]
    return wrong + [f"{key} was refused, and is in the log" for key in users.refused if key in counts]


def _overbooked(log: list[Event]) -> list[str]:
    nights = Counter((event.body["room"], event.body["night"]) for event in _of(log, booking.BOOKED))
    return [f"room {room} was given {count} times for {night}" for (room, night), count in nights.items() if count > 1]


def _oversold(log: list[Event]) -> list[str]:
    stock: Counter[str] = Counter()
    wrong = []
    for event in _of(log, shop.MOVED):  # an article is in one partition, so this is its order
        stock[event.body["article"]] += event.body["quantity"]
        if stock[event.body["article"]] < 0:
            wrong.append(f"{event} sells what is not there")
    return wrong


async def _hotels(services: Services, log: list[Event], seen: dict[str, str]) -> list[str]:
    """What both instances show. `seen`: by room, what makes them wait until they have all of it."""
    nights: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for event in _of(log, booking.BOOKED):
        nights[event.body["room"]][event.body["night"]] = event.body["guest"]
    wrong = []
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as web:
        for name in BOOKING:
            for room, where in seen.items():
                answer = await web.get(f"{services.url(name)}/rooms/{room}", headers={booking.SEEN: where})
                if answer.json() != nights[room]:
                    wrong.append(f"{name} shows {answer.json()} for room {room}; the log has {nights[room]}")
    return wrong


async def _shops(services: Services, log: list[Event], seen: list[str]) -> list[str]:
    """What is in the database that both instances share, when both say that it has everything."""
    events = _of(log, shop.MOVED)
    stock: Counter[str] = Counter()
    for event in events:
        stock[event.body["article"]] += event.body["quantity"]
    movements = {
        (event.body["request"], event.body["article"], event.body["quantity"], str(Token(event.partition, event.id)))
        for event in events
    }
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
    engine.dispose()
    if in_stock != stock:
        wrong.append(f"the database has a stock of {in_stock}; the log comes to {dict(stock)}")
    if moved != movements:
        wrong.append(f"movements in the log or in the database only: {sorted(moved ^ movements)}")
    return wrong


async def _index(services: Services, log: list[Event], ends: dict[int, int]) -> list[str]:
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
    words = [(event.partition, event.id, " ".join(map(str, event.body.values()))) for event in log]
    wrong = [] if found == words else [f"in the log or in the index only: {sorted(set(found) ^ set(words))}"]
    first = {(event.partition, event.id) for event in log if event.body.get("night") == "night 0"}
    return wrong if set(night) == first else [*wrong, f"the index finds {night} for night 0; the log has {sorted(first)}"]

"""A hotel's booking service on asyncio, in as many instances as one likes: nobody gets a room for a night that is taken.

Each instance keeps a view of its own in memory, which the log fills again after every start. The WRITE lock of a room's
night decides between two instances that want it at once; all nights of a room are in one partition, because locks hold
within one partition only. A request that is sent again with the same `Idempotency-Key` is answered as the first time. What
a guest has booked is shown by every instance to who brings the header `Waltz-Seen` of the booking along.

    python -m tests.examples.booking --servers 127.0.0.1:55180 --port 8000
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import typer
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer import Option

from tests.examples.events import EVENTS, Booked, Event
from waltzd import (
    Builder,
    Client,
    Command,
    Committed,
    Declined,
    Rejected,
    Token,
    Transaction,
    Unknown,
    WaltzError,
    write_lock,
)
from waltzd.errors import BadArgument, BeyondLog, EventUnreadable

SEEN = "Waltz-Seen"
WAIT_SECONDS = 5


class Hotel:
    """The view: who has which room in which night."""

    def __init__(self) -> None:
        self.rooms: dict[str, dict[str, str]] = defaultdict(dict)
        """The guest, by room and night."""
        self._positions: dict[int, int] = {}

    def position(self, partition: int) -> int:
        return self._positions.get(partition, -1)

    def apply(self, transaction: Transaction[Event]) -> None:
        with suppress(EventUnreadable):  # somebody else wrote it, say with `waltzctl txn append`
            event = transaction.value
            if isinstance(event, Booked):
                self.rooms[event.room][event.night] = event.guest
        self._positions[transaction.partition] = transaction.id


class Book(Command[Event]):
    """Take the room for the night, unless it is taken."""

    def __init__(self, hotel: Hotel, wanted: Booked) -> None:
        self._hotel = hotel
        self._wanted = wanted
        self.key = wanted.room
        self.locks = [write_lock("night", f"{wanted.room} {wanted.night}")]

    def build(self, builder: Builder[Event]) -> bool:
        builder.payload = self._wanted
        return self._wanted.night not in self._hotel.rooms[self._wanted.room]


class Service:
    """What is asked over HTTP. An answer of 503 says: try it again, with the same key."""

    def __init__(self, client: Client[Event], hotel: Hotel) -> None:
        self._client = client
        self._hotel = hotel

    async def book(self, request: Request) -> Response:
        key = request.headers.get("Idempotency-Key", "")
        try:
            asked: object = await request.json()
        except ValueError:
            asked = None
        match asked:
            case {"room": str(room), "night": str(night), "guest": str(guest)} if key:
                wanted = Booked(request=key, room=room, night=night, guest=guest)
            case _:
                raise HTTPException(400, "say room, night and guest, and by an Idempotency-Key which request it is")
        match await self._client.submit(Book(self._hotel, wanted), idempotency_key=key):
            case Committed() as committed:
                return JSONResponse({}, 201, {SEEN: str(committed.token)})
            case Declined():
                return JSONResponse({}, 409)
            case Rejected() | Unknown() as outcome:
                raise HTTPException(503, f"not known to be booked: {outcome}")

    async def show(self, request: Request) -> Response:
        if SEEN in request.headers:
            await self._client.wait_applied(Token.parse(request.headers[SEEN]), timeout=WAIT_SECONDS)
        return JSONResponse(self._hotel.rooms.get(request.path_params["room"], {}))


async def refuse(_: Request, error: Exception) -> Response:
    """What Waltz raises: what somebody asked for makes no sense, or it can be tried again."""
    status = 400 if isinstance(error, BadArgument | BeyondLog) else 503
    return JSONResponse({"detail": str(error)}, status)


def application(client: Client[Event], hotel: Hotel) -> Starlette:
    """`client` feeds `hotel`; it is opened and closed with the application, on its loop."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with client:
            yield

    service = Service(client, hotel)
    routes = [Route("/bookings", service.book, methods=["POST"]), Route("/rooms/{room}", service.show)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={WaltzError: refuse})


def main(
    *,
    servers: Annotated[str, Option(help="Addresses of servers, with commas between them.")],
    port: Annotated[int, Option(help="Where the service listens.")],
) -> None:
    """Serve until the process is told to end."""
    hotel = Hotel()
    uvicorn.run(application(Client(servers, view=hotel, serializer=EVENTS), hotel), port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)

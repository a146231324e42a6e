"""A hotel's booking service on asyncio, in as many instances as one likes: nobody gets a room for a night that is taken.

Each instance keeps a view of its own in memory, which the log fills again after every start. The WRITE lock of a room's
night decides between two instances that want it at once; all nights of a room are in one partition, because locks hold
within one partition only. A request that is sent again with the same `Idempotency-Key` is answered as the first time. What
a guest has booked is shown by every instance to who brings the header `Waltz-Seen` of the booking along.

    python -m tests.examples.booking --servers 127.0.0.1:55180 --port 8000
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer import Option

from waltzd import Builder, Client, Command, Committed, Declined, Token, Transaction, WaltzError, write_lock
from waltzd.errors import BadArgument, BeyondLog

BOOKED = 1
"""The header of our transactions: other applications write into the same partitions."""
SEEN = "Waltz-Seen"
WAIT_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class Booking:
    room: str
    night: str
    guest: str
    request: str


class Hotel:
    """The view: who has which room in which night."""

    def __init__(self) -> None:
        self.rooms: dict[str, dict[str, tuple[Booking, Token]]] = defaultdict(dict)
        """By room and night, with the token for a guest's next request."""
        self._positions: dict[int, int] = {}

    def position(self, partition: int) -> int:
        return self._positions.get(partition, -1)

    def apply(self, transaction: Transaction) -> None:
        if transaction.header == BOOKED:
            booking = Booking(**json.loads(transaction.payload))
            token = Token(transaction.partition, transaction.id)
            self.rooms[booking.room][booking.night] = booking, token
        self._positions[transaction.partition] = transaction.id


class Book(Command):
    """Take the room for the night, unless it is taken."""

    def __init__(self, hotel: Hotel, booking: Booking) -> None:
        self._hotel = hotel
        self._booking = booking
        self.key = booking.room

    def build(self, builder: Builder) -> bool:
        wanted = self._booking
        if wanted.night in self._hotel.rooms[wanted.room]:
            return False
        builder.header = BOOKED
        builder.payload = json.dumps(asdict(wanted)).encode()
        builder.locks = [write_lock(f"night.{wanted.room}.{wanted.night}")]
        return True


class Service:
    """What is asked over HTTP. An answer of 503 says: try it again, with the same key."""

    def __init__(self, client: Client, hotel: Hotel) -> None:
        self._client = client
        self._hotel = hotel

    async def book(self, request: Request) -> Response:
        key = request.headers.get("Idempotency-Key")
        try:
            asked = await request.json()
            booking = Booking(room=asked["room"], night=asked["night"], guest=asked["guest"], request=key or "")
        except (ValueError, KeyError, TypeError):
            raise HTTPException(400, "a booking is an object with room, night and guest") from None
        if not key or not all(isinstance(text, str) for text in asdict(booking).values()):
            raise HTTPException(400, "room, night and guest are texts, and an Idempotency-Key says which request it is")
        match await self._client.submit(Book(self._hotel, booking), idempotency_key=key):
            case Committed() as committed:
                return JSONResponse({"night": booking.night}, 201, {SEEN: str(committed.token)})
            case Declined():
                found, token = self._hotel.rooms[booking.room][booking.night]
                return JSONResponse({"night": found.night}, 409, {SEEN: str(token)})
            case outcome:
                raise HTTPException(503, f"not known to be booked: {outcome}")

    async def show(self, request: Request) -> Response:
        if SEEN in request.headers:
            await self._client.applied(Token.parse(request.headers[SEEN]), timeout=WAIT_SECONDS)
        nights = self._hotel.rooms.get(request.path_params["room"], {})
        return JSONResponse({night: booking.guest for night, (booking, _) in sorted(nights.items())})


async def refuse(_: Request, error: Exception) -> Response:
    """What Waltz raises: what somebody asked for makes no sense, or it can be tried again."""
    status = 400 if isinstance(error, BadArgument | BeyondLog) else 503
    return JSONResponse({"detail": str(error)}, status)


def application(client: Client, hotel: Hotel) -> Starlette:
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
    uvicorn.run(application(Client(servers, view=hotel), hotel), port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)

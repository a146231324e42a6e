"""Guests of the hotel and customers of the shop, who ask until they are answered, and remember what they were told.

A request keeps its key however often it is sent; some are sent to both instances at once, as by a double click. An instance
that is dead, or answers with a 503, is left for the other one. What was answered is checked at once where it can be: who
was told that something is done sees it, at the other instance, too."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx2

from tests.applications.services import BOOKING, SHOP, Services
from tests.examples import booking, shop
from waltzd import Client, Committed

USERS = 4
"""Of each application."""
ROOMS, ARTICLES = ("101", "102", "103", "201"), ("tea", "milk", "honey")
DOUBLE_CLICKS = 0.2
STRANGE = b"hello"
"""What somebody writes into the log of others."""
SECONDS_MAX = 60
"""Of one HTTP request: longer than a fail-over."""


class Users:
    def __init__(self, services: Services, seed: int) -> None:
        self._services = services
        self._seed = seed
        self.booked: dict[str, tuple[str, str, str]] = {}
        """By key, the room, the night and the guest of what was answered with 201."""
        self.moved: dict[str, tuple[str, int]] = {}
        """By key, the article and the quantity."""
        self.refused: set[str] = set()
        """Keys of what was answered with 409, each time that it was sent."""
        self.open: set[str] = set()
        """Keys of what was answered with 409, and was not answered another time: the answer that is missing may be yes."""
        self.contradictions: list[str] = []
        """What one instance has written and the other one does not show, told where it is; two answers to one request."""
        self.sent = 0
        """HTTP requests that were to write, with those that were sent again."""
        self.shown = 0
        self.pending: dict[str, str] = {}
        """Who waits for which answer."""
        self._stop = asyncio.Event()
        self._nights = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everybody has an answer to the last question at the end."""
        async with httpx2.AsyncClient(timeout=SECONDS_MAX, trust_env=False) as web, asyncio.TaskGroup() as group:
            for number in range(USERS):
                group.create_task(self._live(self._guest, f"guest-{number}", web))
                group.create_task(self._live(self._customer, f"customer-{number}", web))
            try:
                yield
            finally:
                self._stop.set()

    async def _live(self, ask: Any, name: str, web: httpx2.AsyncClient) -> None:
        pick = random.Random(f"{self._seed} {name}")
        count = 0
        while not self._stop.is_set():
            count += 1
            await ask(f"{name}-{count}", pick, web)
            await asyncio.sleep(pick.uniform(0, 0.1))

    async def disturb(self) -> None:
        """Something that is no event comes into each partition."""
        async with Client(self._services.cluster.servers) as client:
            for partition in client.partitions:
                outcome = await client.append(STRANGE, partition=partition)
                assert isinstance(outcome, Committed)

    async def more(self, count: int) -> None:
        """Until so many more bookings and so many more movements were confirmed."""
        bookings, movements = len(self.booked) + count, len(self.moved) + count
        try:
            async with asyncio.timeout(2 * SECONDS_MAX):
                while len(self.booked) < bookings or len(self.moved) < movements:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            told = f"{len(self.booked)} of {bookings} bookings, {len(self.moved)} of {movements} movements; {self.pending}"
            raise AssertionError(f"the applications do not go on: {told}") from None

    async def _guest(self, key: str, pick: random.Random, web: httpx2.AsyncClient) -> None:
        """Often for a night that somebody else wants at the same time."""
        self._nights += pick.random() < 0.3
        room, night = pick.choice(ROOMS), f"night {self._nights - pick.randrange(3)}"
        wish = {"room": room, "night": night, "guest": key}
        if (found := await self._ask(web, key, pick, BOOKING, "/bookings", wish)) is None:
            return
        answer, name = found
        self.booked[key] = room, night, key
        shown = await self._look(web, _other(BOOKING, name), f"/rooms/{room}", booking.SEEN, answer)
        if shown is not None and shown.get(night) != key:
            self.contradictions.append(f"{key} was booked by {name}, and not shown by the other one: {shown}")

    async def _customer(self, key: str, pick: random.Random, web: httpx2.AsyncClient) -> None:
        article, quantity = pick.choice(ARTICLES), pick.choice((5, -1, -2, -3))
        wish = {"quantity": quantity}
        if (found := await self._ask(web, key, pick, SHOP, f"/stock/{article}", wish)) is None:
            return
        answer, name = found
        self.moved[key] = article, quantity
        shown = await self._look(web, _other(SHOP, name), f"/movements/{key}", shop.SEEN, answer)
        if shown is not None and shown != {"article": article, "quantity": quantity}:
            self.contradictions.append(f"{key} was moved by {name}, and not shown by the other one: {shown}")

    async def _ask(
        self,
        web: httpx2.AsyncClient,
        key: str,
        pick: random.Random,
        instances: Sequence[str],
        path: str,
        body: Mapping[str, object],
    ) -> tuple[httpx2.Response, str] | None:
        """The answer that says yes, and who gave it; None when the answer is no."""
        is_all_answered = True
        while True:
            names = pick.sample(instances, 2 if pick.random() < DOUBLE_CLICKS else 1)
            self.pending[key] = " and ".join(names)
            answers = await asyncio.gather(*[self._post(web, key, name, path, body) for name in names])
            is_all_answered &= None not in answers
            yes = [(answer, name) for answer, name in zip(answers, names, strict=True) if answer and answer.is_success]
            if yes or any(answers):
                del self.pending[key]
                is_no_for_ever = instances is BOOKING  # a room that another guest has; tea may be delivered again
                if not yes:
                    (self.refused if is_all_answered or is_no_for_ever else self.open).add(key)
                elif is_no_for_ever and any(answer and not answer.is_success for answer in answers):
                    self.contradictions.append(f"{key} was told yes and no at once, by {' and '.join(names)}")
                return yes[0] if yes else None
            await asyncio.sleep(pick.uniform(0.05, 0.2))

    async def _post(
        self, web: httpx2.AsyncClient, key: str, name: str, path: str, body: Mapping[str, object]
    ) -> httpx2.Response | None:
        """The answer that says yes or no, if there is one."""
        self.sent += 1
        with contextlib.suppress(httpx2.TransportError):
            answer = await web.post(self._services.url(name) + path, json=body, headers={"Idempotency-Key": key})
            assert answer.status_code in (201, 409, 503), f"{name} answers {answer.status_code}: {answer.text}"
            return None if answer.status_code == 503 else answer
        return None

    async def _look(
        self, web: httpx2.AsyncClient, name: str, path: str, header: str, told: httpx2.Response
    ) -> dict[str, Any] | None:
        """What an instance shows; None when it is dead, or says that it has not seen so much yet."""
        with contextlib.suppress(httpx2.TransportError):
            answer = await web.get(self._services.url(name) + path, headers={header: told.headers[header]})
            if answer.status_code != 503:
                self.shown += 1
                found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
                return found
        return None


def _other(instances: Sequence[str], name: str) -> str:
    return next(other for other in instances if other != name)

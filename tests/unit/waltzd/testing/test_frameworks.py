"""Applications of three frameworks under their own test clients, against a cluster in the process of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.examples import booking, shop
from tests.examples.events import EVENTS
from waltzd import Committed, Token
from waltzd.sql import sqlite
from waltzd.testing import BlockingCluster

WISH = {"room": "101", "night": "2026-12-24", "guest": "Ada"}
GUEST = {"Idempotency-Key": "a"}


def test_starlettes_test_client_runs_two_instances(blocking_waltz_cluster: BlockingCluster) -> None:
    """Each on a thread and a loop of its own, with a client that lives there."""
    cluster = blocking_waltz_cluster

    def instance() -> TestClient:
        hotel = booking.Hotel()
        return TestClient(booking.application(cluster.asyncio_client(view=hotel, serializer=EVENTS), hotel))

    with instance() as one, instance() as other:
        first = one.post("/bookings", json=WISH, headers=GUEST)
        assert first.status_code == 201
        seen = {booking.SEEN: first.headers[booking.SEEN]}
        assert other.get("/rooms/101", headers=seen).json() == {"2026-12-24": "Ada"}
        cluster.kill_owner(Token.parse(seen[booking.SEEN]).partition)
        assert other.post("/bookings", json=WISH, headers=GUEST).status_code == 201, "it is the same request"
        late = other.post("/bookings", json={**WISH, "guest": "Bob"}, headers={"Idempotency-Key": "b"})
        assert late.status_code == 409
        assert one.post("/bookings", json=WISH).status_code == 400
        for nonsense in (["101"], {**WISH, "night": ["2026-12-24"]}):
            assert one.post("/bookings", json=nonsense, headers=GUEST).status_code == 400
    with instance() as restarted:
        assert restarted.get("/rooms/101", headers=seen).json() == {"2026-12-24": "Ada"}
    assert sum(len(cluster.log(partition)) for partition in range(4)) == 1


def test_flasks_test_client_runs_two_processes_of_a_shop(blocking_waltz_cluster: BlockingCluster, tmp_path: Path) -> None:
    """The processes share a database, and a client each."""
    cluster = blocking_waltz_cluster
    shops = [shop.Shop(sqlite(str(tmp_path / "shop.db"))) for _ in range(2)]
    clients = [cluster.client(view=each.view, serializer=EVENTS) for each in shops]
    with clients[0] as one, clients[1] as other:
        here, there = (
            shop.application(client, each).test_client() for client, each in zip((one, other), shops, strict=True)
        )

        def move(web: Any, key: str, quantity: object) -> Any:
            return web.post("/stock/tea", json={"quantity": quantity}, headers={"Idempotency-Key": key})

        delivered = move(here, "d", 5)
        assert delivered.status_code == 201
        seen = {shop.SEEN: delivered.headers[shop.SEEN]}
        assert there.get("/stock/tea", headers=seen).json == {"quantity": 5}
        cluster.force_next_lock_failure(Token.parse(seen[shop.SEEN]).partition)
        assert move(there, "s", -3).status_code == 201, "the lock was tried again"
        cluster.kill_owner(Token.parse(seen[shop.SEEN]).partition)
        again = move(here, "s", -3)
        assert again.status_code == 201, "it is the same request"
        told = here.get("/movements/s", headers={shop.SEEN: again.headers[shop.SEEN]})
        assert told.json == {"article": "tea", "quantity": -3}
        assert (move(here, "t", -3).status_code, move(here, "u", "some").status_code) == (409, 400)
        assert there.get("/stock/tea", headers=seen).json == {"quantity": 2}
        for nonsense in ("nonsense", "0-1000000", "99-0"):
            assert there.get("/stock/tea", headers={shop.SEEN: nonsense}).status_code == 400
    for each in shops:
        each.view.close_blocking()
        each.engine.dispose()


@pytest.fixture(scope="module")
def django_settings() -> None:
    """Once in a process: Django can be told only once."""
    import django
    from django.conf import settings

    if not settings.configured:  # a test of a page may have run before in this process
        settings.configure(ALLOWED_HOSTS=["testserver"], ROOT_URLCONF=(), SECRET_KEY="of a test")
    django.setup()


@pytest.mark.slow
@pytest.mark.usefixtures("django_settings")
def test_djangos_test_client(blocking_waltz_cluster: BlockingCluster) -> None:
    from django.http import HttpRequest, HttpResponse
    from django.test import Client as Browser
    from django.test import override_settings
    from django.urls import path

    with blocking_waltz_cluster.client() as client:

        def write(request: HttpRequest, key: str) -> HttpResponse:
            outcome = client.append(request.body, key=key)
            return HttpResponse(str(outcome.id) if isinstance(outcome, Committed) else "", status=201)

        async def write_on_a_loop(request: HttpRequest, key: str) -> HttpResponse:
            return await asyncio.to_thread(write, request, key)

        with override_settings(ROOT_URLCONF=(path("write/<key>", write), path("later/<key>", write_on_a_loop))):
            browser = Browser()
            ids = [
                browser.post(f"/{where}/ada", b"hello", content_type="text/plain").content for where in ("write", "later")
            ]
        assert ids == [b"0", b"1"]
        assert len(blocking_waltz_cluster.log(client.partition_of("ada"))) == 2

"""What calls without records cost a name, and how many client ids it gets."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.unit import timeless
from tests.unit.mounting import KEY, Room, batch_of, in_room
from waltzd.errors import WaltzError
from waltzd.errors.operations import TooManyCallers
from waltzd.protocol.policy import NO_QUOTAS, Amount, Grant, Pattern, Policy, Quotas, Verb
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients import registry
from waltzd.server.clients.registry import QuotaUsage, principal_of

APP = Identity(KEY, Role.CLIENT, "app").uri
OPERATOR = Identity(KEY, Role.OPERATOR, "app").uri


def a_policy(**quotas: int) -> Policy:
    found = Quotas(**{name: Amount(value) for name, value in quotas.items()})
    return Policy([Grant(names=(Pattern("*"),), may=tuple(Verb), quotas=found, groups=(Pattern("*"),))])


class Paid:
    """What each name has paid for, in bytes, and nobody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []

        async def pay(usage: QuotaUsage, size: int) -> None:
            if usage.quotas.bytes_per_second is not None:
                self.sizes.append(size)

        monkeypatch.setattr(QuotaUsage, "pay", pay)


def test_each_call_counts_against_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    paid = Paid(monkeypatch)

    async def test(room: Room) -> None:
        room.authorizer.adopt(a_policy(bytes_per_second=1000))
        for call in (
            room.calls.located,
            lambda who: room.calls.register(KEY, who),
            lambda who: room.calls.high_water_mark(KEY, 3, identity=who),
            lambda who: room.calls.find_time(KEY, 3, 1, identity=who),
            lambda who: room.calls.get_group(KEY, "g", who),
        ):
            before = len(paid.sizes)
            with suppress(WaltzError):
                await call(OPERATOR)
            assert len(paid.sizes) == before, "operators have no quota"
            with suppress(WaltzError):
                await call(APP)
            assert len(paid.sizes) == before + 1

    in_room(test)


def test_what_is_read_by_ids_counts_against_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    paid = Paid(monkeypatch)

    async def test(room: Room) -> None:
        room.authorizer.adopt(a_policy(bytes_per_second=1000))
        reader = await room.mount()
        await reader.say(batch_of(b"x" * 5000))
        await reader.until(lambda reader: bool(reader.committed))
        size = 0
        async for run in room.calls.fetch(KEY, 3, 0, None, identity=APP):
            size += len(run.data)
        assert size > 5000
        assert sum(paid.sizes) >= size

    in_room(test)


def test_a_name_that_is_in_debt_waits_and_its_rate_is_kept() -> None:
    async def test() -> None:
        now = 0.0
        usage = QuotaUsage(principal_of(APP), lambda: now)
        usage.grant(Quotas(bytes_per_second=Amount(100)))

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        usage.sleep = sleep  # type: ignore[method-assign]
        for _ in range(20):
            await usage.pay(500)
        assert 0.9 * 19 * 5 <= now <= 20 * 5
        usage.grant(NO_QUOTAS)
        before = now
        await usage.pay(1 << 30)
        await usage.pay(1)
        assert now == before

    timeless.run(test())


def test_client_ids_are_not_taken_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "IDS_AT_ONCE", 5)
    monkeypatch.setattr(registry, "IDS_PER_SECOND", 1)
    monkeypatch.setattr(registry, "IDS_WAIT_SECONDS", 2.5)

    async def sleep(usage: QuotaUsage, seconds: float) -> None:
        """Others register meanwhile, so no time passes."""

    monkeypatch.setattr(QuotaUsage, "sleep", sleep)

    async def test(room: Room) -> None:
        room.authorizer.adopt(a_policy())
        for _ in range(8):
            await room.calls.register(KEY, APP)
        with pytest.raises(TooManyCallers, match="more than 5 client ids at this server; 1 a second are allowed"):
            await room.calls.register(KEY, APP)
        assert room.registered == 8
        other = Identity(KEY, Role.CLIENT, "other").uri
        assert (await room.calls.register(KEY, other)).client == 9, "another name is not held up"

    in_room(test)

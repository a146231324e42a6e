"""What applications read: the guide does what it says, its table is true, and every public name is explained."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import waltzd
from tests.unit.fake_server import FakeCluster
from tests.unit.timeless import run
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.protocol.locks import Committed, Declined
from waltzd.sql import SqlView, sqlite
from waltzd.testing import LocalCluster

GUIDE = (Path(__file__).parents[4] / "docs/application-guide.md").read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(compile(code, "application-guide.md", "exec"), names)
    return names


def test_the_example_prints_what_the_guide_promises(capsys: pytest.CaptureFixture[str]) -> None:
    names, fake = example(), FakeCluster(partitions=3)
    names["Client"] = partial(Client, connect=fake.connect)
    run(names["main"]("s0:1"))
    assert capsys.readouterr().out.startswith("Committed(id=1, ")
    assert sorted(fake.partitions, key=lambda one: len(one.log))[-1].payloads == [b"7 100", b"7 -30"]


def test_another_instance_reads_what_was_written() -> None:
    names, fake = example(), FakeCluster(partitions=3)

    async def work() -> None:
        here, there = names["Accounts"](), names["Accounts"]()
        async with (
            Client("s0:1", connect=fake.connect, view=here) as client,
            Client("s0:1", connect=fake.connect, view=there) as other,
        ):
            outcome = await client.append(b"7 100", key=7)
            assert isinstance(outcome, Committed)
            assert await names["read"](other, there, 7, str(outcome.token)) == 100
            assert await names["read"](other, there, 8, None) == 0

    run(work())


def test_a_withdrawal_is_built_again_and_never_overdraws() -> None:
    names, fake = example(), FakeCluster()

    async def work() -> None:
        accounts = names["Accounts"]()
        async with Client("s0:1", connect=fake.connect, view=accounts) as client:
            await client.append(b"7 100", key=7)
            await client.caught_up()
            outcomes = await asyncio.gather(*[client.submit(names["Withdraw"](accounts, 7, 30)) for _ in range(5)])
        assert sorted(type(outcome) is Committed for outcome in outcomes) == [False, False, True, True, True]
        assert outcomes.count(Declined()) == 2
        assert accounts.balances == {7: 10}

    run(work())


def test_a_withdrawal_and_its_fee_stand_or_fall_together() -> None:
    names, fake = example(), FakeCluster(format=1)

    async def work() -> None:
        accounts = names["Accounts"]()
        async with Client("s0:1", connect=fake.connect, view=accounts) as client:
            await client.append(b"7 100", key=7)
            await client.caught_up()
            outcomes = await asyncio.gather(*[names["withdraw_with_fee"](client, accounts, 7, 30) for _ in range(5)])
        assert outcomes.count(Declined()) == 2
        assert accounts.balances == {7: 7}

    run(work())


def test_the_settings_are_all_named_with_their_defaults() -> None:
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)?) \| ([^|]+) \|", GUIDE, re.MULTILINE)
    said: dict[str, str] = {}
    for names, values in rows:
        each = re.findall(r"`([a-z_]+)`", names)
        said |= dict(zip(each, re.split(r", (?=\d)", values), strict=True))
    for setting in fields(ClientSettings):
        if isinstance(setting.default, str | bool):
            assert said[setting.name].strip() == (str(setting.default) or "empty")
            continue
        assert isinstance(setting.default, int | float)
        number, _, unit = said[setting.name].strip().partition(" ")
        assert float(number.replace(",", "")) * (1 << 20 if unit == "MiB" else 1) == setting.default, setting.name


NAMES = [*[getattr(waltzd, name) for name in waltzd.__all__], SqlView, sqlite, LocalCluster]
EXPLAINED = [one for one in NAMES if isinstance(one, type | FunctionType)]


def functions_of(thing: Any) -> Iterator[FunctionType]:
    """Of a class, the public ones that it declares itself, and an `__init__` that is explained."""
    if isinstance(thing, FunctionType):
        yield thing
        return
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else member
        is_public = not name.startswith("_") or (name == "__init__" and function.__doc__)
        if isinstance(function, FunctionType) and is_public:
            yield function


@pytest.mark.parametrize(
    "thing", [one for one in NAMES if isinstance(one, type | FunctionType)], ids=lambda one: one.__name__
)
def test_every_public_name_is_explained_with_its_arguments(thing: Any) -> None:
    assert vars(thing).get("__doc__") or isinstance(thing, FunctionType)
    for function in functions_of(thing):
        said = function.__doc__ or ""
        assert said, function.__qualname__
        if "Args:" in said and "those of `Client`" not in said:
            missing = [name for name in signature(function).parameters if name != "self" and f"{name}:" not in said]
            assert missing == [], function.__qualname__

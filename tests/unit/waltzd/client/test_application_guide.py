"""The example in the application guide does what the guide says, and its table of settings is true."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from tests.unit.fake_server import FakeCluster
from tests.unit.timeless import run
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Declined
from waltzd.protocol.locks import Committed

GUIDE = (Path(__file__).parents[4] / "docs/application-guide.md").read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, "application-guide.md", "exec"), names)
    return names


def test_the_example_runs() -> None:
    names, fake = example(), FakeCluster(partitions=3)
    names["Client"] = partial(Client, connect=fake.connect)
    run(names["main"]("s0:1"))
    assert sorted(payload for partition in fake.partitions for payload in partition.payloads)[-1] == b"7 100"


def test_a_withdrawal_is_built_again_and_never_overdraws() -> None:
    names, fake = example(), FakeCluster()

    async def work() -> None:
        accounts = names["Accounts"]()
        async with Client("s0:1", connect=fake.connect, handler=accounts) as client:
            await client.append(b"7 100", key=7)
            while client.mark(0) < 0:
                await asyncio.sleep(0.01)
            outcomes = await asyncio.gather(*[client.submit(names["Withdraw"](accounts, 7, 30)) for _ in range(5)])
        assert sorted(type(outcome) is Committed for outcome in outcomes) == [False, False, True, True, True]
        assert outcomes.count(Declined()) == 2
        assert accounts.balances == {7: 10}

    run(work())


def test_the_settings_are_all_named_with_their_defaults() -> None:
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)?) \| ([^|]+) \|", GUIDE, re.MULTILINE)
    said: dict[str, str] = {}
    for names, values in rows:
        each = re.findall(r"`([a-z_]+)`", names)
        said |= dict(zip(each, re.split(r", (?=\d)", values), strict=True))
    for setting in fields(ClientSettings):
        assert isinstance(setting.default, int | float)
        number, _, unit = said[setting.name].strip().partition(" ")
        assert float(number.replace(",", "")) * (1 << 20 if unit == "MiB" else 1) == setting.default, setting.name

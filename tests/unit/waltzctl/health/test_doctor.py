"""How many days certificates have left, as a handshake shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from tests.process.certificates import Authority
from waltzctl.health.doctor import days_left
from waltzd.protocol.role import Role

KEY = UUID(int=7)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def test_those_of_daemons(authority: Authority) -> None:
    """One that answers, one that does not, one that answers without TLS, and one that is somebody else."""
    ours = authority.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR)
    theirs = authority.issue(KEY, Role.STORAGE, "s1").tls(Role.STORAGE)

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def look() -> dict[str, float | None]:
        secured = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs.answering())
        plain = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with secured, plain:
            address, without = (f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (secured, plain))
            daemons = [
                ("s1", Role.STORAGE, address),
                ("s2", Role.STORAGE, "127.0.0.1:1"),
                ("s3", Role.STORAGE, without),
                ("a", Role.SERVER, address),
                ("b", Role.SERVER, "127.0.0.1:1"),
                ("b", Role.STORAGE, address),
            ]
            return await days_left(ours, daemons, seconds=5)

    found = asyncio.run(look())
    assert found["s1"] == pytest.approx(365, abs=0.1)
    assert (found["s2"], found["s3"], found["a"]) == (None, None, None)
    assert found["server b"] is None, "on one machine they may have one name"
    assert found["storage b"] == pytest.approx(365, abs=0.1)

"""`waltzctl storage` against a real daemon: each verb for people and for scripts, and the exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.replicas import make_replicas
from tests.process.daemon import KEY, PARTITIONS, Daemon
from waltzctl import main
from waltzctl.shell.numbers import partitions_of
from waltzd.client import loop
from waltzd.errors import BadArgument
from waltzd.format.record import encode_payloads


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("storage")) as running:
        yield running


def waltzctl(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main.run(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(text: str) -> Any:
    found = json.loads(text)
    assert found["version"] == 1
    return found


def write_some(daemon: Daemon) -> None:
    async def write() -> None:
        async with daemon.replicas() as replicas:
            await replicas.open(0, 1, partitions=PARTITIONS)
            await replicas.set_low_mark(0, 1, -1)
            stream = replicas.append(0, 1)
            await stream.send(encode_payloads(0, [b"x" * 50] * 20), 9)
            assert await stream.receive() == 19

    loop.run(write())


def test_a_storage_from_the_first_partition_to_the_last(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    address = daemon.admin_listen
    make_replicas(address, 0, 1)
    write_some(daemon)
    code, out, _ = waltzctl("storage", "describe", address, capsys=capsys)
    assert code == 0
    assert out.startswith("sound\n")
    assert str(KEY) in out
    assert "20 records appended in 1 group" in out
    assert all(len(line) <= 80 for line in out.splitlines()[2:-1])
    found = as_json(waltzctl("storage", "describe", address, "-o", "json", capsys=capsys)[1])
    status = found["assigned"][0]["status"]
    assert (status["last_id"], status["committed"], status["is_sound"]) == (19, 9, True)
    code, out, _ = waltzctl("storage", "verify", address, "0", "-o", "json", capsys=capsys)
    assert (code, as_json(out)["partitions"][0]["records"]) == (0, 20)
    assert waltzctl("storage", "availability", address, "1", "--offline", capsys=capsys)[0] == 0
    assert re.search(r"1 +offline", waltzctl("storage", "describe", address, capsys=capsys)[1])
    assert waltzctl("storage", "availability", address, "1", "--online", capsys=capsys)[0] == 0
    damage(daemon.directory / "0" / f"{0:019d}.seg")
    code, out, _ = waltzctl("storage", "verify", address, capsys=capsys)
    assert code == 8
    assert "damaged-record" in out
    assert "id 3" in out


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[128 + 90 * 3 + 60] ^= 1
    path.write_bytes(raw)


def test_what_cannot_be_done_says_so(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, exit_code, said in (
        (("describe", "127.0.0.1:1"), 6, "W4001"),
        (("describe", daemon.admin_listen, "--key", "00000000-0000-0000-0000-000000000001"), 4, "W2002"),
        (("availability", daemon.admin_listen, "1x", "--online"), 2, "'1x' is no partition"),
        (("availability", daemon.admin_listen, "-1", "--online"), 2, "-1"),
        (("availability", daemon.admin_listen, "5-2", "--online"), 2, "'5-2' is no range"),
        (("availability", daemon.admin_listen, "0"), 2, "--online"),
        (("verify", daemon.admin_listen, "3"), 3, "W2007"),
    ):
        code, _, err = waltzctl("storage", *arguments, capsys=capsys)
        assert (code, said in err) == (exit_code, True), (arguments, err)
        assert "Traceback" not in err


def test_partitions_are_numbers_and_ranges() -> None:
    assert partitions_of("0-2,7, 1") == [0, 1, 2, 7]
    for bad in ("", "1-", "-", "a", "1..3", "0-99999999999", "5-2", "65536"):
        with pytest.raises(BadArgument):
            partitions_of(bad)

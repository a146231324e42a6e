"""The bank out of an export: the same balances as applying each transfer by hand, or the first thing that is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.analysis import replay
from waltz_spark.exporting.destination import LocalDestination, the_manifest
from waltz_spark.log.decode import record_batch

from tests.examples.bank import MINT, Bank, Movement, movement_of, payload_of
from tests.spark.exporting import export, storage_with
from tests.spark.telling import run_examples
from waltzctl.main import run
from waltzd.errors import ArchiveUnfit, ReplayDiffers
from waltzd.format.record import encode_payloads
from waltzd.protocol.timelines import FIRST
from waltzd.sql import sqlite


def movements(seed: int, count: int, accounts: int = 4) -> list[Movement]:
    """Nobody overdraws."""
    choose = random.Random(seed)
    balances = dict.fromkeys(range(1, accounts + 1), 0)
    made = []
    for _ in range(count):
        receiver = choose.randrange(1, accounts + 1)
        rich = [number for number, balance in balances.items() if balance > 0 and number != receiver]
        payer = choose.choice([MINT, *rich])
        amount = choose.randrange(1, 50 if payer == MINT else balances[payer] + 1)
        if payer != MINT:
            balances[payer] -= amount
        balances[receiver] += amount
        made.append(Movement(payer=payer, receiver=receiver, amount=amount))
    return made


def payloads_of(made: list[Movement]) -> list[bytes]:
    return [payload_of(movement, by=f"test {number}") for number, movement in enumerate(made)]


def by_hand(made: list[Movement]) -> dict[int, int]:
    balances: dict[int, int] = {}
    for movement in made:
        for number, step in ((movement.payer, -movement.amount), (movement.receiver, movement.amount)):
            balances[number] = balances.get(number, 0) + step
            if balances[number] < 0 and number != MINT:
                raise ReplayDiffers(f"{number}")
    return balances


@dataclass(frozen=True)
class Numbered:
    partition: int
    id: int
    payload: bytes
    header: int = 0
    follows: bool = False
    lineage: None = None
    timeline: UUID = FIRST


def database_with(path: Path, made: dict[int, list[Movement]], marks: dict[int, int]) -> Path:
    """The example's own, after it has applied everything up to these ids."""
    engine = sqlite(str(path))
    bank = Bank(engine)
    bank.view._prepare(UUID(int=1))
    for partition, mark in marks.items():
        assert bank.view.read_position(partition) == -1
        payloads = payloads_of(made[partition][: mark + 1])
        bank.view.apply_all([Numbered(partition, number, payload) for number, payload in enumerate(payloads)])  # type: ignore[misc]
    asyncio.run(bank.view.close())
    engine.dispose()
    return path


def replayed(made: list[Movement], cuts: list[int]) -> replay.Branch:
    """In batches that begin at these numbers."""
    decoder, branch = replay.transfers(), replay.Branch(partition=3)
    whole = encode_payloads(0, payloads_of(made), partition=3)
    bounds = sorted({0, len(made), *(cut for cut in cuts if cut < len(made))})
    for start, stop in pairwise(bounds):
        part = whole.part(start, stop)
        replay.apply(branch, decoder.decode(record_batch(part, 3)))
    return branch


@given(seed=st.integers(0, 999), count=st.integers(1, 120), cuts=st.lists(st.integers(1, 119), max_size=5))
def test_balances_are_those_of_applying_each_transfer_by_hand(seed: int, count: int, cuts: list[int]) -> None:
    made = movements(seed, count)
    branch = replayed(made, cuts)
    assert branch.balances == by_hand(made)
    assert (branch.total, branch.next_id, branch.lowest) == (0, count, 0)


@given(
    made=st.lists(
        st.builds(Movement, payer=st.integers(0, 3), receiver=st.integers(0, 3), amount=st.integers(-3, 9)),
        min_size=1,
        max_size=30,
    ),
    cuts=st.lists(st.integers(1, 29), max_size=4),
)
def test_the_first_overdraft_is_found(made: list[Movement], cuts: list[int]) -> None:
    """Whatever was committed, an account to itself and amounts below zero too."""
    for count in range(1, len(made) + 1):
        try:
            expected = by_hand(made[:count])
        except ReplayDiffers as error:
            with pytest.raises(
                ReplayDiffers, match=f"transaction {count - 1} of partition 3 overdraws account {error.message}"
            ):
                replayed(made, cuts)
            return
    assert replayed(made, cuts).balances == expected


def test_a_payload_is_what_it_says() -> None:
    movement = Movement(payer=1, receiver=2, amount=3)
    assert json.loads(payload_of(movement, by="me")) == {"from": 1, "to": 2, "amount": 3, "by": "me"}
    assert movement_of(payload_of(movement, by="me")) == movement


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"hello", "it is not a JSON object"),
        (b"{}", "it has no from"),
        (b'{"from":1,"to":2}', "it has no amount"),
        (b'{"from":0,"to":2,"amount":1e3}', "couldn't parse"),
        (b'{"from":0,"to":2,"amount":-9223372036854775808}', "nobody has that much"),
    ],
)
def test_what_is_no_transfer_ends_the_replay(payload: bytes, words: str) -> None:
    good = payload_of(Movement(payer=0, receiver=1, amount=5), by="")
    run_ = encode_payloads(40, [good, payload, good])
    with pytest.raises(ArchiveUnfit, match=f"transaction 41 of partition 3 is no transfer of the bank: .*{words}"):
        replay.apply(replay.Branch(partition=3, next_id=40), replay.transfers().decode(record_batch(run_, 3)))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> dict[int, list[Movement]]:
    return {0: movements(1, 150), 2: movements(2, 90)}


@pytest.fixture(scope="module")
def archive(made: dict[int, list[Movement]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not lossless: any export will do."""
    place = tmp_path_factory.mktemp("bank")
    storage = storage_with(place / "storage", {number: payloads_of(one) for number, one in made.items()})
    export(place / "export", storage, is_lossless=False)
    return place / "export"


def test_the_log_and_the_view_agree(
    archive: Path, made: dict[int, list[Movement]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = database_with(tmp_path / "bank.db", made, {0: 149, 2: 89})
    before = database.read_bytes()
    assert run(["analysis", "replay", str(archive), "--view", str(database), "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["agrees"] is True
    assert {number: part["balances"] for number, part in said["partitions"].items()} == {
        str(number): {str(account): balance for account, balance in sorted(by_hand(one).items())}
        for number, one in made.items()
    }
    assert database.read_bytes() == before
    assert run(["analysis", "replay", str(archive), "--view", str(database)]) == 0
    assert "the log and the view agree" in capsys.readouterr().out


def test_a_view_that_is_behind_is_compared_as_far_as_it_is(
    archive: Path, made: dict[int, list[Movement]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = database_with(tmp_path / "bank.db", made, {0: 41, 2: -1})
    assert run(["analysis", "replay", str(archive), "--view", str(database), "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {number: part["last"] for number, part in said["partitions"].items()} == {"0": 41}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE accounts SET balance = balance + 1 WHERE branch = 2 AND number = 3", "branch 2, account 3: the log"),
        ("DELETE FROM accounts WHERE branch = 0 AND number = 1", "the view says no such account"),
        ("INSERT INTO accounts VALUES (0, 99, 5)", "account 99: the log up to id 149 leads to no such account"),
        ("UPDATE waltz_positions SET position = position - 1 WHERE partition_id = 0", "branch 0, account"),
    ],
)
def test_the_first_difference(
    archive: Path,
    made: dict[int, list[Movement]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    words: str,
) -> None:
    database = database_with(tmp_path / "bank.db", made, {0: 149, 2: 89})
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(change)
    assert run(["analysis", "replay", str(archive), "--view", str(database)]) == 8
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("W2244")


def test_a_log_in_which_somebody_overdraws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [Movement(payer=0, receiver=1, amount=5), Movement(payer=1, receiver=2, amount=6)]
    export(tmp_path / "export", storage_with(tmp_path / "s", {0: payloads_of(made)}))
    assert run(["analysis", "replay", str(tmp_path / "export")]) == 8
    assert "transaction 1 of partition 0 overdraws account 1: it has -1 after it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["NOTHING"], 3, "there is no export in"),
        (["ARCHIVE", "--partitions", "7"], 3, "no partition 7"),
        (["ARCHIVE", "--view", "NOTHING"], 2, "does not exist"),
        (["ARCHIVE", "--view", "NO-DATABASE"], 2, "no database of the bank example"),
        (["ARCHIVE", "--view", "AHEAD"], 2, "the view has applied id 150 of partition 0, and the export ends at id 149"),
        (["ARCHIVE", "--view", "ELSEWHERE"], 3, "holds no partition 5"),
    ],
)
def test_mistakes(
    archive: Path, tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("x" * 5000)
    places = {
        "ARCHIVE": archive, "NOTHING": tmp_path / "none", "NO-DATABASE": tmp_path / "text",
        "AHEAD": database_with(tmp_path / "ahead.db", {0: movements(1, 151)}, {0: 150}),
        "ELSEWHERE": database_with(tmp_path / "elsewhere.db", {5: movements(3, 4)}, {5: 3}),
    }  # fmt: skip
    assert run(["analysis", "replay", *[str(places.get(word, word)) for word in arguments]]) == code
    assert words in capsys.readouterr().err


def test_an_export_without_its_beginning(made: dict[int, list[Movement]], tmp_path: Path) -> None:
    storage = storage_with(tmp_path / "s", {0: payloads_of(made[0])})
    found = export(tmp_path / "export", storage, first={0: 10}, is_lossless=False)
    with pytest.raises(ArchiveUnfit, match="begins at id 10 of partition 0"):
        replay.ends_of(found, None, None)


def test_a_file_that_lacks_rows(archive: Path, tmp_path: Path) -> None:
    import shutil

    import pyarrow.parquet as pq

    from waltzd.errors import ExportDamaged

    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    place = LocalDestination(str(copy))
    found = the_manifest(place)
    path = copy / found.pieces[0].path
    table = pq.read_table(path)
    for wrong in (table.slice(1), table.slice(0, 5), table.take(np.arange(table.num_rows)[::-1])):
        pq.write_table(wrong, path)
        with pytest.raises(ExportDamaged, match=r"ids 0 to \d+ of partition 0: "):
            list(replay.replay(place, found, {found.pieces[0].partition: 149}))


def test_the_examples_of_the_help(
    archive: Path, made: dict[int, list[Movement]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database_with(tmp_path / "bank.db", made, {0: 149, 2: 89})
    run_examples(capsys, ["analysis", "replay"], {"/data/export": archive, "/data": tmp_path})

"""The bank example out of an export alone: all transfers, in the order of the log, and what each account has after them.

Transactions are serializable if applying them one after the other, partition by partition, never meets an account that is
overdrawn and leads to what the applications see. Both are looked at here: after each single step, and in the end against
the SQL view, as far as that has come. The steps of a batch are taken by account: sorted by it, and in order within it, a
running sum is the balance after each step.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from waltz_spark.exporting.archive import form_in, records
from waltz_spark.exporting.destination import Destination
from waltz_spark.exporting.manifest import Manifest, check_whole
from waltz_spark.log.decode import record_batch
from waltz_spark.payloads.decoders import decoder_of
from waltz_spark.payloads.payload import ERROR_COLUMN, Decoder
from waltzd.errors import ArchiveUnfit, NoSuchPartition, PathMissing, ReplayDiffers

COLUMNS = {"from": "bigint", "to": "bigint", "amount": "bigint"}
"""The members of a transfer as `tests/examples/bank.py` writes it, a JSON object, and their types as decoders call them."""
MINT = 0
"""Where money comes from: the one account that may be below zero."""
ACCOUNTS, POSITIONS = "accounts", "waltz_positions"
"""The tables of the example's database."""
AMOUNT_MAX = 1 << 40
"""So that no sum of a batch leaves 64 bits."""


@dataclass(frozen=True, kw_only=True)
class View:
    marks: Mapping[int, int]
    """For each partition, the last id that the view has applied; -1 before the first."""
    balances: Mapping[tuple[int, int], int]
    """By branch and account."""


@dataclass(kw_only=True)
class Branch:
    """The state of one partition while it is replayed."""

    partition: int
    next_id: int = 0
    balances: dict[int, int] = field(default_factory=dict)
    lowest: int = 0
    """That any account but the mint ever had."""

    @property
    def total(self) -> int:
        return sum(self.balances.values())


def transfers() -> Decoder:
    return decoder_of("json:" + ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items()))


# -- from an export ----------------------------------------------------------------------------------------------------


def replay(archive: Destination, found: Manifest, ends: Mapping[int, int]) -> Iterator[Branch]:
    """One partition after the other. `ends`: for each, the last id to apply."""
    check_whole(found, archive.place, not_done="nothing was replayed")
    decoder = transfers()
    for partition, end in sorted(ends.items()):
        branch = Branch(partition=partition)
        for piece in found.pieces:
            if piece.partition != partition or piece.span.first > end:
                continue
            for rows in records(archive, form_in(found), piece, not_done="the rest was not replayed"):
                run = rows.run
                wanted = run.part(0, max(0, min(len(run), end - run.first_id + 1)))
                apply(branch, decoder.decode(record_batch(wanted, partition)))
        assert branch.next_id == end + 1
        yield branch


def apply(branch: Branch, batch: pa.RecordBatch) -> None:
    """Decoded rows of one partition, in order."""
    if batch.num_rows == 0:
        return
    ids = batch.column("txid").to_numpy()
    columns = _columns(batch, ids)
    steps = np.empty(2 * len(ids), np.int64)
    accounts = np.empty(2 * len(ids), np.int64)
    accounts[0::2], accounts[1::2] = columns["from"], columns["to"]
    steps[0::2], steps[1::2] = -columns["amount"], columns["amount"]
    numbers, which = np.unique(accounts, return_inverse=True)
    order = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[order], np.arange(len(numbers)))
    sums = np.cumsum(steps[order])
    before = np.array([branch.balances.get(number, 0) for number in numbers.tolist()], np.int64)
    base = before - np.where(starts > 0, sums[starts - 1], 0)
    balances = np.empty_like(sums)
    balances[order] = sums + base[which[order]]
    low = np.where(accounts == MINT, 0, balances)
    if low.min() < 0:
        at = int(np.argmax(low < 0))
        raise ReplayDiffers(
            f"transaction {ids[at // 2]} of partition {branch.partition} overdraws account {accounts[at]}: it has "
            f"{balances[at]} after it",
            next_step="transactions were committed that were decided against a view that was too old: look at their locks",
        )
    branch.lowest = min(branch.lowest, int(low.min()))
    lasts = order[np.append(starts[1:], len(order)) - 1]
    branch.balances.update(zip(numbers.tolist(), balances[lasts].tolist(), strict=True))
    branch.next_id = int(ids[-1]) + 1


def _columns(batch: pa.RecordBatch, ids: NDArray[Any]) -> dict[str, NDArray[np.int64]]:
    """Those of the transfer. A row that is none ends the replay: what it did is not known."""
    wrong = batch.column(ERROR_COLUMN)
    if wrong.null_count < len(wrong):
        at = int(np.argmax(wrong.is_valid().to_numpy(zero_copy_only=False)))
        raise _no_transfer(batch, ids, at, wrong[at].as_py())
    for name in COLUMNS:
        missing = batch.column(name).is_null().to_numpy(zero_copy_only=False)
        if missing.any():
            raise _no_transfer(batch, ids, int(np.argmax(missing)), f"it has no {name}")
    found = {name: batch.column(name).to_numpy() for name in COLUMNS}
    large = (found["amount"] > AMOUNT_MAX) | (found["amount"] < -AMOUNT_MAX)
    if large.any():
        raise _no_transfer(batch, ids, int(np.argmax(large)), "nobody has that much money")
    return found


def _no_transfer(batch: pa.RecordBatch, ids: NDArray[Any], at: int, why: str) -> ArchiveUnfit:
    return _unfit(f"transaction {ids[at]} of partition {batch.column('partition')[at]} is no transfer of the bank: {why}")


def _unfit(message: str, next_step: str = "name the database and the partitions of the bank example") -> ArchiveUnfit:
    return ArchiveUnfit(message, not_done="nothing was compared", next_step=next_step)


# -- against the view --------------------------------------------------------------------------------------------------


def view_of(path: Path) -> View:
    """What a database of the example holds at one moment. Nothing is written to it."""
    if not path.exists():
        raise PathMissing(f"{path} does not exist")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")  # both tables as of one moment
            marks = connection.execute(
                f"SELECT partition_id, position FROM {POSITIONS} WHERE view_name = 'bank'"
            ).fetchall()
            rows = connection.execute(f"SELECT branch, number, balance FROM {ACCOUNTS}").fetchall()
    except sqlite3.Error as error:
        raise _unfit(f"{path} is no database of the bank example: {error}") from error
    return View(marks=dict(marks), balances={(branch, number): balance for branch, number, balance in rows})


def ends_of(found: Manifest, view: View | None, partitions: Iterable[int] | None) -> dict[int, int]:
    """How far to replay each partition: as far as the view has come, or to the end. Pure."""
    totals = found.partitions
    wanted = sorted(totals) if view is None else sorted(number for number, mark in view.marks.items() if mark >= 0)
    if partitions is not None:
        wanted = sorted(partitions)
    ends: dict[int, int] = {}
    for number in wanted:
        if number not in totals:
            raise NoSuchPartition(f"the export holds no partition {number}", not_done="nothing was compared",
                                  next_step=f"it holds {', '.join(map(str, totals)) or 'none at all'}")  # fmt: skip
        span = totals[number].span
        if span.first != 0:
            raise _unfit(
                f"the export begins at id {span.first} of partition {number}, and the balances before it are not known",
                next_step="export the whole partition, from id 0 on",
            )
        mark = span.last if view is None else view.marks.get(number, -1)
        if mark > span.last:
            raise _unfit(
                f"the view has applied id {mark} of partition {number}, and the export ends at id {span.last}",
                next_step="run the export again, which adds what is missing",
            )
        ends[number] = mark
    return ends


def compare(branches: Iterable[Branch], view: View) -> None:
    for branch in branches:
        there = {number: balance for (at, number), balance in view.balances.items() if at == branch.partition}
        for number in sorted(there.keys() | branch.balances.keys()):
            said, found = there.get(number), branch.balances.get(number)
            if said != found:
                raise ReplayDiffers(
                    f"branch {branch.partition}, account {number}: the log up to id {branch.next_id - 1} leads to "
                    f"{_told(found)}, and the view says {_told(said)}"
                )


def _told(balance: int | None) -> str:
    return "no such account" if balance is None else f"{balance}"

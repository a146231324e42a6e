"""Append one or more transactions from the command line: parse payloads and locks, append, report the outcome.

It is appended once, without retry. The outcome is an id, a refusal (the transaction is certainly not in the log), or
unknown because no answer came in time. An atomic append has one outcome."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from waltzd import Client, Lock
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, OutcomeUnknown, TooLarge, TransactionRefused, WaltzError
from waltzd.protocol.locks import AppendOutcome, Committed, Mode, Reason, Rejected, lock_id

PAYLOAD_BYTES_MAX = 1 << 30
"""Maximum size of a payload that is read; servers enforce a lower limit."""
LOCK_FORM = "write it as MODE:NAME:ID with the mode read, write or append, like write:account:17"
_LOCK = re.compile(r"(?P<mode>[a-z]+):(?P<name>.+):(?P<id>[^:]+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Submitted:
    partition: int
    outcome: AppendOutcome
    size: int
    """Bytes of all payloads."""
    client: int
    mark: int
    """Highest id against which the locks were checked."""
    lock: str | None
    """Lock that failed, as `MODE:NAME:ID`; None if none did."""
    seconds: float

    @property
    def id(self) -> int | None:
        return self.outcome.id if isinstance(self.outcome, Committed) else None

    @property
    def count(self) -> int | None:
        """Number of committed transactions; `id` is the first. None if it was not committed."""
        return self.outcome.count if isinstance(self.outcome, Committed) else None

    @property
    def reason(self) -> str | None:
        return self.outcome.reason.name if isinstance(self.outcome, Rejected) else None

    @property
    def conflict_id(self) -> int | None:
        return self.outcome.conflict_id if isinstance(self.outcome, Rejected) and self.lock is not None else None

    @property
    def result(self) -> str:
        return type(self.outcome).__name__.lower()

    @property
    def error(self) -> WaltzError | None:
        """Error if the transaction is not in the log or its outcome is unknown, else None."""
        if isinstance(self.outcome, Committed):
            return None
        if isinstance(self.outcome, Rejected):
            return TransactionRefused(
                f"partition {self.partition} refused it: {self._why(self.outcome)}", next_step=self._advice(self.outcome)
            )
        return OutcomeUnknown(
            f"partition {self.partition} did not report the outcome in time",
            next_step=f"when the partition takes transactions again, look for it with `waltzctl txn grep {self.partition} "
            f"--after {self.mark} --client {self.client}`, before you append it again",
        )

    def _why(self, refused: Rejected) -> str:
        at = f"{refused.conflict_id}, above the mark {self.mark}"
        return (
            f"{refused.reason.name}, "
            + {
                Reason.CONFLICT: f"the lock {self.lock} was marked by transaction {at}",
                Reason.IN_FLIGHT: f"the lock {self.lock} is marked by transaction {at}, which is not decided yet",
                Reason.TOO_FAR_BEHIND: f"the lock {self.lock} was forgotten, and may have been marked up to id {at}",
                Reason.OWNER_CHANGED: f"the owner is new and does not know the lock {self.lock} up to id {at}",
                Reason.NOT_IN_LOG: "a fail-over happened, and the transaction never reached the log",
            }[refused.reason]
        )

    def _advice(self, refused: Rejected) -> str:
        if refused.reason is Reason.NOT_IN_LOG:
            return "append it again"
        return (
            f"read up to id {refused.conflict_id}; if your decision still holds, append with --mark {refused.conflict_id}"
        )


def lock_of(text: str) -> Lock:
    found = _LOCK.fullmatch(text)
    modes = {mode.name.lower(): mode for mode in Mode}
    if found is None or found["mode"] not in modes:
        raise BadArgument(f"--lock {text}: this is not a lock", next_step=LOCK_FORM)
    return Lock(found["name"], lock_id(found["id"]), modes[found["mode"]])


def format_lock(lock: Lock) -> str:
    return f"{lock.mode.name.lower()}:{lock.name}:{lock.id}"


def payloads_of(texts: Sequence[str], file: str | None, *, is_atomic: bool) -> list[bytes]:
    """Return the payloads: one, or for an atomic append one for each text or line of the file."""
    if bool(texts) == (file is not None):
        raise BadArgument("give a text, or --file FILE; `--file -` reads standard input")
    if len(texts) > 1 and not is_atomic:
        raise BadArgument(
            f"{len(texts)} texts are {len(texts)} transactions",
            not_done="nothing was appended",
            next_step="quote a text that has blanks; or use --atomic to append all of them or none",
        )
    if file is None:
        return [text.encode(errors="surrogateescape") for text in texts]
    payload = _content(file)
    if not is_atomic:
        return [payload]
    if not payload:
        raise BadArgument(f"{file} has no line", not_done="nothing was appended")
    return payload.removesuffix(b"\n").split(b"\n")


def _content(file: str) -> bytes:
    try:
        if file == "-":
            payload = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as opened:
                payload = opened.read(PAYLOAD_BYTES_MAX + 1)
    except OSError as error:
        raise translate(error, f"reading {file}") from error
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise TooLarge(f"{file} has more than {PAYLOAD_BYTES_MAX} bytes", next_step="append a smaller payload")
    return payload


async def submit(
    client: Client,
    partition: int,
    payloads: Sequence[bytes],
    *,
    kind: int,
    locks: Sequence[Lock],
    mark: int | None,
    is_atomic: bool,
) -> Submitted:
    """Append, and return the outcome. An atomic append is decided as a whole: the first transaction carries its locks."""
    clock = asyncio.get_running_loop().time
    committed = await client.end_position(partition, confirmed=False)  # an old position can only cause a refusal
    if mark is not None and mark > committed:
        committed = await client.end_position(partition)
    if mark is not None and mark > committed:
        raise BadArgument(
            f"--mark {mark}: no client can have seen that yet; the high-water mark of partition {partition} is {committed}",
            not_done="nothing was appended",
        )
    seen = committed if mark is None else mark
    began = clock()
    if is_atomic:
        each = [locks, *[()] * (len(payloads) - 1)]
        kinds = [kind] * len(payloads)
        outcome = await client.append_atomic(payloads, partition=partition, kinds=kinds, locks=each, position=seen)
    else:
        outcome = await client.append(payloads[0], partition=partition, kind=kind, locks=locks, position=seen)
    failed = next(
        (format_lock(lock) for lock in locks if isinstance(outcome, Rejected) and lock.hash == outcome.lock), None
    )
    return Submitted(
        partition=partition,
        outcome=outcome,
        size=sum(map(len, payloads)),
        client=client.client_id,
        mark=seen,
        lock=failed,
        seconds=clock() - began,
    )

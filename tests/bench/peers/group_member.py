"""One member of a consumer group, in a process of its own that may be killed: of Waltz, or of a consumer of JetStream.

What it does with a delivery follows from its number and its try, so both systems meet the same failures. Each delivery is
written down before anything is said of it, and each acknowledgement when it was answered; a line is one write, so nothing
is lost with the process. Clocks are those of the machine, and so the same in all processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

GROUP = "workers"
SUBJECT = "LOAD.work"
BATCH = 64
WAIT_SECONDS = 1.0
REFUSAL_PAUSE_SECONDS = 0.1
DELIVERED, ACKNOWLEDGED = "d", "k"


@dataclass(frozen=True)
class Task:
    """What one member is told."""

    system: str
    address: tuple[str, ...]
    group: str
    refused: int
    """Of a thousand first tries, so many are refused."""
    forgotten: int
    """And so many are never answered, as by a member that hangs."""

    @staticmethod
    def from_json(words: str) -> Task:
        fields: dict[str, Any] = json.loads(words)
        return Task(**{**fields, "address": tuple(fields["address"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def fate(self, number: int, attempt: int) -> str:
        drawn = crc32(number.to_bytes(8, "big")) % 1000 if attempt == 1 else 1000
        return "refuse" if drawn < self.refused else "forget" if drawn < self.refused + self.forgotten else "do"


def tell(kind: str, numbers: Sequence[tuple[int, int]]) -> None:
    """Each with its try."""
    now = time.monotonic()
    text = "".join(f"{kind} {number} {attempt} {now:.6f}\n" for number, attempt in numbers)
    os.write(sys.stdout.fileno(), text.encode())


async def work_for_waltz(task: Task) -> None:
    from waltzd.client.client import Client

    async with Client(task.address[0]) as client, client.subscribe(task.group, max_in_flight=BATCH) as subscription:
        tell("r", [(0, 0)])
        async for found in subscription.batches(most=BATCH):
            numbered = [(int(one.payload[:20]), one.attempt, one) for one in found]
            tell(DELIVERED, [(number, attempt) for number, attempt, _ in numbered])
            fates = {number: task.fate(number, attempt) for number, attempt, _ in numbered}
            refused = [one for number, _, one in numbered if fates[number] == "refuse"]
            if refused:
                await subscription.nack(refused, delay=REFUSAL_PAUSE_SECONDS)
            done = [(number, attempt, one) for number, attempt, one in numbered if fates[number] == "do"]
            await subscription.ack([one for _, _, one in done])
            tell(ACKNOWLEDGED, [(number, attempt) for number, attempt, _ in done])


async def work_for_jetstream(task: Task, *, is_confirmed: bool) -> None:
    import nats
    from nats.errors import TimeoutError as NothingCameError

    client = await nats.connect(list(task.address))
    pulling = await client.jetstream().pull_subscribe_bind(task.group, "LOAD")
    tell("r", [(0, 0)])
    while True:
        found: list[Any] = []
        with contextlib.suppress(NothingCameError):
            found = await pulling.fetch(BATCH, timeout=WAIT_SECONDS)
        if not found:
            continue
        numbered = [(int(one.data[:20]), one.metadata.num_delivered, one) for one in found]
        tell(DELIVERED, [(number, attempt) for number, attempt, _ in numbered])
        done = []
        for number, attempt, one in numbered:
            match task.fate(number, attempt):
                case "refuse":
                    await one.nak(delay=REFUSAL_PAUSE_SECONDS)
                case "do":
                    done.append((number, attempt, one))
        if is_confirmed:
            await asyncio.gather(*[one.ack_sync(timeout=30) for _, _, one in done])
        else:
            for _, _, one in done:
                await one.ack()
            await client.flush(30)  # the server that the member talks to has read them
        tell(ACKNOWLEDGED, [(number, attempt) for number, attempt, _ in done])


def main(arguments: list[str]) -> int:
    import uvloop

    task = Task.from_json(arguments[0])
    if task.system == "waltz":
        uvloop.run(work_for_waltz(task))
    else:
        uvloop.run(work_for_jetstream(task, is_confirmed=task.system.endswith("confirmed")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A load that goes on while something is done to a cluster: a process that appends numbers, remembers which were
acknowledged, and in the end reads all of these back.

`python -m tests.cli.numbered_load SERVERS` until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from waltzd.client.client import Client
from waltzd.protocol.locks import Committed

PAUSE_SECONDS = 0.01
"""A few hundred transactions a second are enough to be lost, and leave the processors to the others."""
END_SECONDS = 60


class NumberedLoad:
    """In a `with` block: it runs until the block ends, and then nothing of it may be missing."""

    def __init__(self, servers: list[str], home: Path, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._servers = servers
        self._pause_seconds = pause_seconds
        self._log = home / "load.log"
        self.acknowledged = 0

    def __enter__(self) -> NumberedLoad:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.numbered_load", ",".join(self._servers), str(self._pause_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "appending\n", self._log.read_text()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            out, _ = self._process.communicate("", END_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
        if error is None:
            assert self._process.returncode == 0, out + self._log.read_text()
            self.acknowledged = int(out.split()[0])


async def append_numbers(client: Client, partition: int, found: dict[tuple[int, int], bytes], pause_seconds: float) -> None:
    """Until it is cancelled."""
    number = 0
    while True:
        data = f"{partition}:{number}".encode()
        outcome = await client.append(data, partition=partition)
        if isinstance(outcome, Committed):
            assert (partition, outcome.id) not in found, "two transactions under one id"
            found[partition, outcome.id] = data
        number += 1
        await asyncio.sleep(pause_seconds)


async def main(servers: str, pause_seconds: float) -> int:
    found: dict[tuple[int, int], bytes] = {}
    async with Client(servers) as client:
        partitions = range(client.partition_count)
        tasks = [asyncio.create_task(append_numbers(client, number, found, pause_seconds)) for number in partitions]
        print("appending", flush=True)
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
        lost = []
        for (partition, transaction_id), data in sorted(found.items()):
            there = await client.read(partition, transaction_id)
            if there.payload != data:
                lost.append((partition, transaction_id, data, there.payload))
    print(len(found), "acknowledged")
    print(lost, failed, file=sys.stderr)
    return 0 if found and not lost and not failed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], float(sys.argv[2]))))

"""A whole cluster in one process, in no time: clients race while servers die, sleep and lose the coordinator, and storages
hang.

The code is that of the daemons and of the client; the clock is virtual, so an outage of minutes costs nothing, and a wait
that nobody would ever end is an error. One seed decides what happens when. At the end everything is mended, everybody must
go on, and the checker judges.

    ./dev storm --seeds 1..100
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.checker.history import Writer, load
from tests.checker.recorder import Recorder, log_records
from tests.checker.verdict import Verdict, judge
from tests.process.race import Attempt, View
from tests.unit.timeless import run
from waltzd.client_settings import ClientSettings
from waltzd.errors import WaltzError
from waltzd.outcome import Committed
from waltzd.testing import LocalCluster

PARTITIONS = 2
CLIENTS = 3
CALLERS = 2
STEPS = 25
PATIENCE_SECONDS = 120
"""After everything is mended, so much virtual time is enough for everybody."""
TROUBLES = (
    "die", "die", "start", "start", "stop", "hang", "wake", "wake", "cut", "lose", "expire", "part", "join",
)  # fmt: skip


class Storm:
    def __init__(self, seed: int, folder: Path) -> None:
        self.pick = random.Random(seed)
        self.folder = folder
        self.trace: list[str] = []
        self.committed = 0
        self._stop = False

    async def blow(self) -> Verdict:
        servers = self.pick.choice((2, 2, 3))
        with Writer(self.folder / "history.jsonl") as writer:
            async with LocalCluster(partitions=PARTITIONS, servers=servers, storage_seconds=2.0) as cluster:
                racing = [asyncio.create_task(self._client(cluster, writer, number)) for number in range(CLIENTS)]
                for _ in range(STEPS):
                    await asyncio.sleep(self.pick.choice((0.001, 0.01, 0.1, 1.0, 5.0)))
                    await self._trouble(cluster)
                await self._mend(cluster)
                before = self.committed
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while self.committed < before + 20:
                        await asyncio.sleep(0.01)
                self._stop = True
                await asyncio.gather(*racing)
                for partition in range(PARTITIONS):
                    async for found in cluster.runs(partition):
                        writer.log(partition, log_records(found), first=found.first_id)
        return judge(load(self.folder.glob("*.jsonl")))

    async def _client(self, cluster: LocalCluster, writer: Writer, number: int) -> None:
        recorder = Recorder(writer, f"client {number}")
        settings = ClientSettings(close_seconds=30, submit_seconds=600)
        async with cluster.client(handler=recorder.handler(View()), settings=settings) as client:

            async def call(caller: int) -> None:
                pick = random.Random(f"{number}:{caller}")
                count = 0
                while not self._stop:
                    count += 1
                    attempt = Attempt(f"{number}.{caller}", count, pick, pick.randrange(PARTITIONS))
                    try:
                        outcome = await client.submit(recorder.context(attempt))
                    except WaltzError as error:
                        self.trace.append(f"client {number}: {error.code} {error.message}")
                        await asyncio.sleep(0.05)
                        continue
                    self.committed += isinstance(outcome, Committed)
                    await asyncio.sleep(pick.choice((0, 0.02, 0.2, 0.5)))

            await asyncio.gather(*[call(caller) for caller in range(CALLERS)])

    async def _trouble(self, cluster: LocalCluster) -> None:
        pick = self.pick
        what = pick.choice(TROUBLES)
        living = [name for name in cluster.server_names if cluster.is_alive(name)]
        dead = [name for name in cluster.server_names if name not in living]
        self.trace.append(f"{asyncio.get_running_loop().time():.3f} {what}; up: {', '.join(living)}")
        if what == "die" and living:
            await cluster.kill_server(pick.choice(living))
        elif what == "stop" and len(living) > 1:
            name = pick.choice(living)
            if cluster.coordinator_of(name).is_connected:
                await cluster.stop_server(name)
        elif what == "start" and dead:
            await cluster.start_server(pick.choice(dead))
        elif what == "hang":
            cluster.pause_storage(pick.randrange(3))
        elif what == "wake":
            for number in range(3):
                cluster.resume_storage(number)
        elif what == "cut":
            cluster.break_connections(pick.choice((None, 0, 1)))
        elif what == "lose":
            cluster.lose_next_acknowledgement(pick.randrange(PARTITIONS))
        elif living and what in ("expire", "part", "join"):
            coordinator = cluster.coordinator_of(pick.choice(living))
            if what == "expire":
                coordinator.expire()
            elif what == "part":
                coordinator.disconnect()
            else:
                coordinator.reconnect()

    async def _mend(self, cluster: LocalCluster) -> None:
        self.trace.append("everything is mended")
        for number in range(3):
            cluster.resume_storage(number)
        for name in cluster.server_names:
            if cluster.is_alive(name):
                cluster.coordinator_of(name).reconnect()
            else:
                await cluster.start_server(name)
        await cluster.wait_until_ready(seconds=120)


def blow(seed: int) -> tuple[Storm, Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        storm = Storm(seed, Path(folder))
        try:
            return storm, run(storm.blow())
        except BaseException:
            print(f"seed {seed}", *storm.trace[-40:], sep="\n", file=sys.stderr)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev storm", description=__doc__)
    parser.add_argument("--seeds", default="0..20", help="FIRST..LAST")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("..")
    begun = time.perf_counter()
    records = 0
    for seed in range(int(first), int(last or first) + 1):
        storm, verdict = blow(seed)
        records += verdict.counts["records"]
        print(
            f"seed {seed}: {verdict.counts['records']} transactions, {time.perf_counter() - begun:.1f} s", file=sys.stderr
        )
        if not verdict.is_sound:
            print(f"seed {seed}", *storm.trace[-60:], verdict, sep="\n")
            return 1
    print(f"sound: {records} transactions, {time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

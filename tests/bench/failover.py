"""How long partitions are silent when their owner is killed: of two servers with an equal share each, one ends at once.

A transaction waits at each partition of the dead server from that moment on, so its outcome tells when the partition was
open again. All processes share this machine: beside the seconds stand those of a processor that the new owner took for
each partition, which do not depend on what else runs here.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from tests.bench.machine import use_of
from waltzctl.local_cluster.daemon import Daemon
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.protocol.batches import FeedMode

SECONDS_MAX = 300.0


def cpu_seconds(daemon: Daemon) -> float:
    assert daemon.life is not None, f"{daemon.name} has ended"
    use = use_of(daemon.life.pid)
    assert use is not None, f"{daemon.name} has ended"
    return use.cpu_seconds


async def measure(cluster: LocalCluster, partitions: int) -> None:
    dead, new = (cluster.daemons[name] for name in cluster.blueprint.server_names)
    async with Client(",".join(cluster.server_addresses), feed=FeedMode.NONE) as client:
        loop = asyncio.get_running_loop()

        async def append(partition: int) -> tuple[float, float]:
            """Append a transaction; return when it had an outcome, and what the new owner had used by then. A transaction
            that was on its way to the dead server is rejected as soon as the new owner has read the log."""
            await client.append(b"x", partition=partition)
            return loop.time(), cpu_seconds(new)

        for partition in range(partitions):
            await append(partition)
        places = client.topology.places
        lost = [number for number in range(partitions) if places[number].server == dead.name]
        used, begun = cpu_seconds(new), loop.time()
        dead.kill()
        async with asyncio.timeout(SECONDS_MAX):
            opened = sorted(await asyncio.gather(*map(append, lost)))
    print(f"{len(lost)} partitions lost their owner; cores of this machine are shared with everything else on it")
    print(f"{'':8} {'s':>7} {'processor s of the new owner':>30}")
    for name, at in (("first", 0), ("median", len(opened) // 2), ("last", -1)):
        print(f"{name:8} {opened[at][0] - begun:7.2f} {opened[at][1] - used:30.2f}")
    print(f"{1000 * (opened[-1][1] - used) / len(lost):.1f} ms of a processor for each partition")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench failover", description=__doc__)
    parser.add_argument("--partitions", type=int, default=256, help="of the server that is killed")
    options = parser.parse_args(arguments)
    partitions = 2 * options.partitions
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster.make(Path(directory) / "c", partitions=partitions, storages=3, servers=2)
        try:
            cluster.start()
            run(measure(cluster, partitions))
        finally:
            cluster.kill()
    return 0

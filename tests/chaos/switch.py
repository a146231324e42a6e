"""A network switch in user space: packets of the cluster's namespaces go through here, and some of them are lost, late or
doubled.

Each namespace has one TUN device, whose other end is a file of ours. The last byte of its address says where a packet goes.
Between two addresses there is at most one `Trouble`, for one direction; `fate` decides and knows no clock and no file.
Whoever started this process sends all troubles in force as one line of JSON, and gets a line back when they are.

    python -m tests.chaos.switch SEED ADDRESS:FILE...
"""

from __future__ import annotations

import heapq
import json
import os
import random
import selectors
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

PACKET_BYTES_MAX = 65_536
PACKETS_AT_ONCE = 64
DESTINATION_BYTE = 19
"""The last byte of the destination in the header of IPv4; that of the source is four before it."""
QUEUE_MAX = 20_000
"""Packets that are late. What comes when so many wait is lost, as in a switch whose memory is full."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Between one address and another, in this direction."""

    source: int
    destination: int
    loss: float = 0.0
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    doubled: float = 0.0


Troubles = Mapping[tuple[int, int], Trouble]
HEALTHY: tuple[float, ...] = (0.0,)


def fate(troubles: Troubles, source: int, destination: int, pick: random.Random) -> tuple[float, ...]:
    """After how many seconds the packet arrives; not at all, once or twice."""
    trouble = troubles.get((source, destination))
    if trouble is None:
        return HEALTHY
    if pick.random() < trouble.loss:
        return ()
    late = trouble.delay_seconds + pick.random() * trouble.jitter_seconds
    return (late, late + 0.001) if pick.random() < trouble.doubled else (late,)


def spell(troubles: list[Trouble]) -> str:
    return json.dumps([asdict(trouble) for trouble in troubles]) + "\n"


def understand(line: str) -> dict[tuple[int, int], Trouble]:
    found = [Trouble(**fields) for fields in json.loads(line)]
    return {(trouble.source, trouble.destination): trouble for trouble in found}


class Switch:
    def __init__(self, files: Mapping[int, int], seed: int) -> None:
        """`files`: of each address."""
        self._files = dict(files)
        self._pick = random.Random(seed)
        self._troubles: Troubles = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._selector = selectors.DefaultSelector()
        for file in files.values():
            os.set_blocking(file, False)
            self._selector.register(file, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        """Until nobody is there any more who could change anything."""
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait):
                if key.fd == sys.stdin.fileno():
                    if not self._take_orders():
                        return
                else:
                    self._forward(key.fd)
            self._deliver()

    def _take_orders(self) -> bool:
        line = sys.stdin.readline()
        if line:
            self._troubles = understand(line)
            print("done", flush=True)
        return bool(line)

    def _forward(self, file: int) -> None:
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(file, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue
            destination = self._files.get(packet[DESTINATION_BYTE])
            if destination is None:
                continue
            for late in fate(self._troubles, packet[DESTINATION_BYTE - 4], packet[DESTINATION_BYTE], self._pick):
                if late == 0.0:
                    _write(destination, packet)
                elif len(self._late) < QUEUE_MAX:
                    self._number += 1
                    heapq.heappush(self._late, (time.monotonic() + late, self._number, destination, packet))

    def _deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, destination, packet = heapq.heappop(self._late)
            _write(destination, packet)


def _write(file: int, packet: bytes) -> None:
    try:
        os.write(file, packet)
    except BlockingIOError:  # its queue is full: lost, and TCP sends it again
        return


def main() -> None:
    seed, *pairs = sys.argv[1:]
    Switch({int(address): int(file) for address, file in (pair.split(":") for pair in pairs)}, int(seed)).run()


if __name__ == "__main__":
    main()

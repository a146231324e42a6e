"""A network of our own: each daemon in a namespace of its own, all joined by a switch that we can tell to misbehave.

Only inside a sandbox, where names of devices and namespaces are nobody else's, and are gone with it. The clients are at
the address 1; daemons get the next ones. Nothing is ever rejected here, as a firewall would do it: packets are just lost.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import IO

from tests.chaos.switch import Trouble, spell

NETWORK = "10.77.0"
CLIENTS = "clients"
MTU = 16_000
"""Large, so that a batch is few packets: each of them costs the switch some microseconds."""
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DONE = "done\n"


class Network:
    """`cut` and the others add to what is wrong already; `mend` ends all that was added under a name."""

    def __init__(self, daemons: Sequence[str], seed: int) -> None:
        self._seed = seed
        self._numbers = {name: number for number, name in enumerate([CLIENTS, *daemons], 1)}
        self._files: dict[int, int] = {}
        self._switch: subprocess.Popen[str] | None = None
        self._troubles: dict[str, list[Trouble]] = {}

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self._numbers[name]}"

    def inside(self, name: str) -> list[str]:
        """What goes in front of a command that is to run in the namespace of this daemon."""
        return ["/usr/bin/env", "nsenter", f"--net=/run/netns/{name}"]

    def start(self) -> None:
        for name, number in self._numbers.items():
            self._plug(name, number)
        pairs = [f"{number}:{file}" for number, file in self._files.items()]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.switch", str(self._seed), *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=list(self._files.values()),
            start_new_session=True,
        )
        self._tell()

    def _plug(self, name: str, number: int) -> None:
        device = f"tun{number}"
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        self._files[number] = file
        where: list[str] = []
        if name != CLIENTS:
            run("ip", "netns", "add", name)
            run("ip", "link", "set", device, "netns", name)
            where = ["-n", name]
            run("ip", *where, "link", "set", "lo", "up")
        run("ip", *where, "address", "add", f"{self.address(name)}/24", "dev", device)
        run("ip", *where, "link", "set", device, "mtu", str(MTU), "up")

    def close(self) -> None:
        switch, self._switch = self._switch, None
        if switch is not None:
            assert switch.stdin is not None
            assert switch.stdout is not None
            switch.stdin.close()
            try:
                switch.wait(5)
            except subprocess.TimeoutExpired:
                switch.kill()
                switch.wait()
            switch.stdout.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        for name in self._numbers:
            if name != CLIENTS:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    # -- what is wrong with it

    def trouble(
        self,
        why: str,
        sources: Iterable[str],
        destinations: Iterable[str],
        *,
        loss: float = 0.0,
        delay_seconds: float = 0.0,
        jitter_seconds: float = 0.0,
        doubled: float = 0.0,
    ) -> None:
        """From each of the one to each of the other; the last word counts where two speak of the same direction."""
        targets = list(destinations)
        found = self._troubles.setdefault(why, [])
        found += [
            Trouble(
                source=self._numbers[source],
                destination=self._numbers[target],
                loss=loss,
                delay_seconds=delay_seconds,
                jitter_seconds=jitter_seconds,
                doubled=doubled,
            )
            for source in sources
            for target in targets
            if source != target
        ]
        self._tell()

    def cut(self, why: str, one: Iterable[str], other: Iterable[str]) -> None:
        """Both ways."""
        left, right = list(one), list(other)
        self.trouble(why, left, right, loss=1.0)
        self.trouble(why, right, left, loss=1.0)

    def mend(self, why: str) -> None:
        self._troubles.pop(why, None)
        self._tell()

    def others(self, name: str) -> list[str]:
        return [other for other in self._numbers if other != name]

    def reset(self, name: str) -> None:
        """Break every connection that this daemon has at this moment."""
        run(*self.inside(name), "ss", "-K", "state", "established")

    def _tell(self) -> None:
        assert self._switch is not None
        stdin, stdout = _pipes(self._switch)
        stdin.write(spell([trouble for found in self._troubles.values() for trouble in found]))
        stdin.flush()
        answer = stdout.readline()
        assert answer == DONE, f"the switch has ended: {answer!r}"


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout

"""What stands in the way of a cluster on this machine, found before anything is started, with who it is and the cure."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from waltzctl.blueprint import HOST, Blueprint, is_free
from waltzctl.playground.daemon import birth
from waltzd.errors import BadArgument, DiskFull, PortInUse

FREE_BYTES_MIN = 256 << 20
NOTHING_STARTED = "nothing was started"
_LISTENS = "0A"
"""The state of a socket that listens, in the tables of the kernel."""
_COMMAND_CHARACTERS_MAX = 100


def check_machine(directory: Path) -> None:
    """That processes can be told apart, and that there is room. The directory need not be there yet."""
    if birth(os.getpid()) is None:
        raise BadArgument(
            "a cluster on one machine needs Linux: without /proc nobody can tell one process from another",
            not_done=NOTHING_STARTED,
            next_step="run it in a Linux container or a virtual machine",
        )
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < FREE_BYTES_MIN:
        raise DiskFull(
            f"{directory}: {free >> 20} MiB are free there, and a cluster needs at least {FREE_BYTES_MIN >> 20}",
            not_done=NOTHING_STARTED,
            next_step="free some space, or name a directory on another disk",
        )


def check_ports(directory: Path, blueprint: Blueprint, name: str) -> None:
    """Those of a daemon that does not run."""
    for port in blueprint.ports[name]:
        if is_free(port):
            continue
        found = listener_of(port)
        next_step = "stop that program, or begin anew in another directory"
        if found is not None and found.pid is not None and str(directory.absolute()) in found.command:
            next_step = (
                f"it belongs to this very cluster, and nobody wrote its start down: kill {found.pid}, then try again"
            )
        raise PortInUse(
            f"{found or 'another program'} listens on {HOST}:{port}, the address of {name} in {directory}",
            not_done=NOTHING_STARTED,
            next_step=next_step,
        )


@dataclass(frozen=True)
class Listener:
    pid: int | None
    """None when the system does not let us look."""
    user: str
    command: str

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of the user {self.user}"
        is_long = len(self.command) > _COMMAND_CHARACTERS_MAX
        return f"process {self.pid} ({self.command[:_COMMAND_CHARACTERS_MAX]}{'…' if is_long else ''})"


def listener_of(port: int) -> Listener | None:
    """Who listens there, as far as the system tells."""
    for inode, uid in _listening(port):
        pid = _owner(f"socket:[{inode}]")
        return Listener(pid, _user(uid), "" if pid is None else command_of(pid))
    return None


def _listening(port: int) -> Iterator[tuple[str, int]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # a system without IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9], int(fields[7])


def _owner(socket: str) -> int | None:
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return next((pid for pid in numbers if socket in _open_files(pid)), None)


def _open_files(pid: int) -> Iterator[str]:
    """As the kernel names them; nothing of somebody else's process, and of one that ends meanwhile what was still there."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def command_of(pid: int) -> str:
    """What was typed to start a process; its short name when it does not say."""
    for file in ("cmdline", "comm"):
        try:
            words = Path(f"/proc/{pid}", file).read_bytes().decode("utf-8", "replace").replace("\0", " ").strip()
        except OSError:
            return "ended just now"
        if words:
            return "".join(one if one.isprintable() else "?" for one in words)
    return "without a name"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

"""Display of a local cluster: its processes, the screen after a start, and its logs."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import typer

from waltzctl.local_cluster.daemon import Process
from waltzctl.shell.blueprint import (
    APPLICATION,
    ARCHIVE_KEY,
    OPERATOR,
    certificate_files,
    coordinator_files,
    credentials_file,
    operator_files,
)
from waltzctl.shell.cluster_target import LOCAL_DIRECTORY, variable
from waltzctl.shell.merged_log import EVENTS, LogLine
from waltzctl.show.cluster import sentence
from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, objects, pick, put, stream
from waltzctl.show.terminal import console, count, printable
from waltzd.cluster.zookeeper_credentials import Verify
from waltzd.errors.operations import BROUGHT

if TYPE_CHECKING:
    from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot

SERVERS_SHOWN = 3
"""Server addresses shown for a client, which learns the others from them."""
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


PROCESSES: Columns[Process] = (
    Column("process", "name", json="name"),
    Column("address", lambda one: one.addresses[0], json=""),
    Column("admin", lambda one: "".join(one.addresses[1:]), json=""),
    Column("pid"),
    Column("state", lambda one: one.pid is not None, cell=lambda runs: "runs" if runs else "down", json="is_running"),
    Column("", json="addresses"),
    Column("", lambda one: str(one.log), json="log"),
)


def processes(found: Sequence[Process], key: UUID, directory: Path) -> list[Part]:
    return [Table(PROCESSES, found), f"key {key}; logs: {directory}/log"]


def ready(
    directory: Path,
    running: Sequence[Process],
    found: ClusterSnapshot,
    *,
    seconds: float,
    stays: bool,
    is_meant: bool,
    has_tls: bool,
    archive: str | None,
    has_console: bool,
) -> Listing[Process]:
    """Build the screen at the end of `waltzctl up`. `is_meant`: commands without options use this cluster.
    `has_console`: a console is starting, and prints its own address."""
    here = "" if is_meant else f" --directory {shlex.quote(str(directory))}"
    page: list[Part] = [
        Line(f"ready after {seconds:.1f} s: {sentence(found)}", "bold green" if found.is_healthy else "bold yellow"),
        *processes(running, found.meta.key, directory),
        *_archive_lines(directory, archive),
        *_unlisted(running, found, here),
        *_connecting(directory, running, has_tls=has_tls),
        "What to try next:" if stays else "What to try next, in another terminal:",
    ]
    tries = _tries(directory, running, found, here=here, stays=stays, has_console=has_console)
    if archive is not None:
        tries.insert(2, (f"waltzctl archive status{here}", "how far the log is archived"))
    longest = max(len(command) for command, _ in tries)
    fits = longest + max(len(meaning) for _, meaning in tries) + len("    # ") <= console().width
    for command, meaning in tries:
        # A command is copied as a whole: if the comment does not fit beside it, it gets a line of its own.
        page.append(f"  {command:<{longest}}  # {meaning}" if fits else f"  # {meaning}\n  {command}")
    if not stays:
        page.append("Ctrl-C stops everything.")
    content = {
        "directory": str(directory.absolute()),
        "cluster_key": str(found.meta.key),
        "is_healthy": found.is_healthy,
        "seconds": round(seconds, 3),
        "processes": objects(PROCESSES, running),
        "servers": _servers(running),
        "application": _application(directory) if has_tls else None,
        "archive": archive,
    }
    return Listing(kind="processes", columns=PROCESSES, rows=running, page=page, content=content)


def _archive_lines(directory: Path, archive: str | None) -> Iterator[str]:
    if archive is not None:
        yield f"archive: {archive}"
        signing = directory.absolute() / ARCHIVE_KEY
        if signing.exists():
            yield f"  to check signatures: export WALTZ_ARCHIVE_KEY={shlex.quote(str(signing))}"


def _unlisted(running: Sequence[Process], found: ClusterSnapshot, here: str) -> Iterator[Part]:
    """Tell how to add storages that run and do not belong to the cluster."""
    known = {view.meta.name for view in found.storages}
    for one in running:
        if one.kind == "storage" and one.name not in known:
            yield Line(f"{one.name} runs, but is not in the cluster yet. To add it:", "yellow")
            yield f"  waltzctl storage add {one.name}={','.join(one.addresses)}{here}"


def _connecting(directory: Path, running: Sequence[Process], *, has_tls: bool) -> Iterator[str]:
    """Tell how an application connects, and what an operator on another machine needs."""
    servers = json.dumps(_servers(running)[:SERVERS_SHOWN])
    if not has_tls:
        yield "An application connects with:"
        yield f"  Client({servers})"
        return
    certificate, key, ca = map(repr, _application(directory).values())
    yield "An application needs a certificate, and gives it so:"
    yield f"  Client({servers}, tls=Tls("
    yield from (f"      {name}={value}," for name, value in (("ca", ca), ("certificate", certificate), ("key", key)))
    yield "  ))"
    yield "Elsewhere a person gives these; with --directory, waltzctl finds them by itself:"
    yield from (f"  export {name}={shlex.quote(path)}" for name, path in _person(directory).items())


def _servers(running: Sequence[Process]) -> list[str]:
    """Return the addresses of the servers that run."""
    return [one.addresses[0] for one in running if one.kind == "server" and one.pid is not None]


def _application(directory: Path) -> dict[str, str]:
    files = certificate_files(directory, f"client-{APPLICATION}")
    return dict(zip(("tls_certificate", "tls_key", "tls_ca"), files, strict=True))


def _person(directory: Path) -> dict[str, str]:
    files = dict(zip(("tls_certificate", "tls_key", "tls_ca"), operator_files(directory), strict=True))
    shown = coordinator_files(directory, f"operator-{OPERATOR}")
    names = ("coordinator_tls_certificate", "coordinator_tls_key", "coordinator_tls_ca")
    files |= {"coordinator_tls": Verify.HOST.value, **dict(zip(names, shown, strict=True))}
    files |= {"coordinator_credentials": str(credentials_file(directory))}
    return {variable(name): value for name, value in files.items()}


def missing_for_console() -> str:
    """Return a package that `waltzctl console` needs and that is not installed; empty if there is none."""
    return next((name for name in BROUGHT["console"] if importlib.util.find_spec(name) is None), "")


def _tries(
    directory: Path, running: Sequence[Process], found: ClusterSnapshot, *, here: str, stays: bool, has_console: bool
) -> list[tuple[str, str]]:
    """Return commands to try, with the purpose of each."""
    needed = ", with pip install 'waltzd[console]'" if missing_for_console() else ""
    up_here = "" if str(directory) == LOCAL_DIRECTORY else f" {shlex.quote(str(directory))}"
    tries = [
        (f"waltzctl txn append 0 hello{here}", "append to partition 0"),
        (f"waltzctl status{here}", "who owns what, and how it is"),
        (f"waltzctl health{here}", "a probe in every partition"),
        (f"waltzctl top{here}", "what it does, live"),
        *([] if has_console else [(f"waltzctl console{here}", f"all of it in a browser{needed}")]),
        (f"waltzctl logs{up_here} --follow", "what the daemons say"),
    ]
    pids = {one.name: one.pid for one in running if one.pid is not None}
    owner = next((view.owner for view in found.partitions if view.owner in pids), None)
    if owner is not None:
        tries.append((f"kill -9 {pids[owner]}", f"end {owner}, then look again"))
        tries.append((f"waltzctl up{up_here} --detach", "bring back what is missing"))
    if stays:
        tries.append((f"waltzctl down{up_here}", "stop everything; data stays"))
    return tries


def stopped(names: Sequence[str], killed: Sequence[str], directory: str, output: str) -> None:
    reported = f"{count(len(names), 'process', 'processes')} stopped; {directory} keeps everything."
    content = {"directory": os.path.abspath(directory), "stopped": list(names), "killed": list(killed)}
    put(Listing(page=[reported if names else f"Nothing ran in {directory}."], content=content), output)
    if output != "json":
        print_killed(killed)


def print_killed(killed: Sequence[str]) -> None:
    for name in killed:
        typer.echo(f"{name} did not end in time and was killed. What it acknowledged is on the disk.", err=True)


# -- what they wrote ---------------------------------------------------------------------------------------------------


LOGGED = pick(EVENTS, "time", "who", "text")


def log_lines(names: Sequence[str], output: str) -> Callable[[LogLine], None]:
    """Return a function that shows log lines of these daemons. On a terminal each name has a colour."""
    width = max(map(len, names))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def put_line(line: LogLine) -> None:
        head = f"{line.who:<{width}}"
        typer.echo(f"{typer.style(head, fg=colours.get(line.who)) if is_coloured else head} | {printable(line.text)}")

    return stream(LOGGED, output, put_line)

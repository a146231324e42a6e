"""How a cluster on this machine looks: its processes, while they come and go and once they run.

`processes` is for whoever shows such a cluster, like `waltzctl status`: it takes a `LocalCluster`, from
`LocalCluster.find(directory)`, and a console; `processes_json` gives the same for scripts. Progress goes to standard error,
and only to a terminal; the screen at the end is what `waltzctl up` has to say, and goes to standard output.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from waltzctl.blueprint import ZOOKEEPER
from waltzctl.playground.daemon import State
from waltzctl.reach import LOCAL_DIRECTORY
from waltzctl.show.cluster import sentence
from waltzctl.show.terminal import console, count, printable, table
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from waltzctl.picture.picture import Picture
    from waltzctl.playground.local import LocalCluster

REFRESHES_PER_SECOND = 10
FRAMES, FRAMES_ASCII = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
STYLES = {State.READY: "green", State.ENDED: "red", State.STOPPED: "dim", State.WAITS: "dim"}
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


# -- while they come and go --------------------------------------------------------------------------------------------


class _Frail:
    """A terminal that may go away: what cannot be written there any more is not missed by anybody."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass
class _Row:
    state: State
    since: float
    until: float | None = None
    """When it became what it was to become."""


class Board:
    """One line for each process, with its state and its seconds, and one that says what is waited for. It is written over
    while things go on, and gone when they went well; after an error it stays. Nothing of it when standard error is no
    terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._rows: dict[str, _Row] = {}
        self._sentence = "looking at this machine"
        self._live: Live | None = None

    def say(self, sentence: str) -> None:
        self._sentence = sentence

    def show(self, name: str, state: State) -> None:
        now = self._clock()
        before = self._rows.get(name)
        if before is None or state in (State.STARTS, State.ENDS):
            self._rows[name] = _Row(state, now, None if state.is_passing else now)
        elif before.state is not state:
            self._rows[name] = _Row(state, before.since, None if state.is_passing else now)
        if self._live is not None:  # or what lasts for less than a refresh would never be seen
            self._live.refresh()

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        is_plain = not (sys.stderr.encoding or "").lower().startswith("utf")
        frames = FRAMES_ASCII if is_plain else FRAMES
        now = self._clock()
        frame = frames[int(now * REFRESHES_PER_SECOND) % len(frames)]
        marks = {State.READY: "+" if is_plain else "✓", State.ENDED: "x" if is_plain else "✗"}
        board = Table.grid(padding=(0, 2, 0, 0))
        board.add_column(width=1)
        board.add_column(no_wrap=True)
        board.add_column(no_wrap=True, min_width=8)
        board.add_column(justify="right", no_wrap=True, min_width=6)
        for name, row in list(self._rows.items()):
            style = STYLES.get(row.state, "cyan")
            mark = frame if row.state.is_passing else marks.get(row.state, " ")
            seconds = (row.until if row.until is not None else now) - row.since
            shown = f"{seconds:.1f} s" if row.state.is_passing or seconds >= 0.05 else ""
            board.add_row(Text(mark, style), name, Text(row.state.value, style), shown)
        whole = Table.grid()
        whole.add_column(no_wrap=True, overflow="ellipsis")
        if self._rows:
            whole.add_row(board)
        whole.add_row(Text(f"{now - self._started:5.1f} s  {self._sentence}", "dim"))
        return whole

    def __enter__(self) -> Board:
        if sys.stderr.isatty():
            from rich.live import Live

            out = console(to_stderr=True)
            out.file = _Frail(sys.stderr)  # type: ignore[assignment]
            self._live = Live(
                get_renderable=self.__rich__,
                console=out,
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.transient = not isinstance(error, WaltzError)
            self._live.stop()


# -- once they run -----------------------------------------------------------------------------------------------------


def processes(out: Console, cluster: LocalCluster) -> None:
    """The processes as a table."""
    rows = []
    for name, daemon in cluster.daemons.items():
        listen, *admin = cluster.blueprint.addresses(name)
        state = "runs" if daemon.is_running else "down"
        pid = str(daemon.life.pid) if daemon.life is not None and state == "runs" else ""
        rows.append((name, listen, "".join(admin), pid, state))
    table(out, ("process", "address", "admin", "pid", "state"), rows, right=("pid",))
    out.print(f"key {cluster.blueprint.key}; logs: {cluster.directory}/log", soft_wrap=True)


def processes_json(cluster: LocalCluster) -> list[dict[str, Any]]:
    return [
        {
            "name": name, "is_running": daemon.is_running,
            "pid": daemon.life.pid if daemon.life is not None and daemon.is_running else None,
            "addresses": list(cluster.blueprint.addresses(name)), "log": str(daemon.log),
        }
        for name, daemon in cluster.daemons.items()
    ]  # fmt: skip


def ready(cluster: LocalCluster, found: Picture, *, seconds: float, stays: bool, is_meant: bool) -> None:
    """The screen at the end of `waltzctl up`. `is_meant`: commands that are told nothing mean this cluster."""
    out = console()
    style = "bold green" if found.is_healthy else "bold yellow"
    out.print(f"ready after {seconds:.1f} s: {sentence(found)}", style=style, soft_wrap=True)
    processes(out, cluster)
    place = shlex.quote(str(cluster.directory))
    here = "" if is_meant else f" --directory {place}"
    for name in outsiders(cluster, found):
        added = f"{name}={','.join(cluster.blueprint.addresses(name))}"
        out.print(f"{name} runs, and is not in the cluster until you say so:", style="yellow", soft_wrap=True)
        out.print(f"  waltzctl storage add {added}{here}", soft_wrap=True)
    out.print("What to try next:" if stays else "What to try next, in another terminal:")
    tries = _tries(cluster, found, place=place, here=here, stays=stays)
    longest = max(len(command) for command, _ in tries)
    fits = longest + max(len(meaning) for _, meaning in tries) + len("    # ") <= out.width
    for command, meaning in tries:
        # A command is copied whole: where both do not fit, what it is for goes to a line of its own.
        out.print(f"  {command:<{longest}}  # {meaning}" if fits else f"  # {meaning}\n  {command}", soft_wrap=True)
    if not stays:
        out.print("Ctrl-C stops everything.")


def outsiders(cluster: LocalCluster, found: Picture) -> list[str]:
    """Storages of this machine that the cluster does not know: brought up later, or taken out."""
    known = {view.meta.name for view in found.storages}
    return [name for name in cluster.blueprint.storage_names if name not in known]


def _tries(cluster: LocalCluster, found: Picture, *, place: str, here: str, stays: bool) -> list[tuple[str, str]]:
    up_here = "" if str(cluster.directory) == LOCAL_DIRECTORY else f" {place}"
    tries = [
        (f"waltzctl txn append 0 hello{here}", "append to partition 0"),
        (f"waltzctl status{here}", "who owns what, and how it is"),
        (f"waltzctl health{here}", "a probe in every partition"),
        (f"waltzctl top{here}", "what it does, live"),
        (f"waltzctl logs{up_here} --follow", "what the daemons say"),
    ]
    owner = next((view.owner for view in found.partitions if view.owner in cluster.daemons), None)
    life = cluster.daemons[owner].life if owner is not None else None
    if life is not None:
        tries.append((f"kill -9 {life.pid}", f"end {owner}, then look again"))
        tries.append((f"waltzctl up{up_here} --detach", "bring back what is missing"))
    if stays:
        tries.append((f"waltzctl down{up_here}", "stop everything; data stays"))
    return tries


def stopped(names: Sequence[str], killed: Sequence[str], directory: str) -> None:
    typer.echo(f"{count(len(names), 'process', 'processes')} stopped; {directory} keeps everything." if names
               else f"Nothing ran in {directory}.")  # fmt: skip
    told_killed(killed)


def told_killed(killed: Sequence[str]) -> None:
    for name in killed:
        typer.echo(f"{name} did not end in time and was killed. What it acknowledged is on the disk.", err=True)


# -- what they wrote ---------------------------------------------------------------------------------------------------


class Lines:
    """Log lines with the names of those who wrote them; each name has its colour on a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        self._width = max((len(name) for name in names), default=len(ZOOKEEPER))
        self._colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}

    def put(self, name: str, text: str) -> None:
        head = f"{name:<{self._width}}"
        if _is_coloured():
            head = typer.style(head, fg=self._colours.get(name))
        typer.echo(f"{head} | {printable(text)}")


def _is_coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")

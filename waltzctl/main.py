"""From what was typed to an exit code.

Commands are listed here and imported only when they run, so that `--help` is quick. A command returns its exit code or
raises an error of `waltzd.errors`; this module alone turns either into what the shell sees, and never shows a traceback
for something that a user or a machine did.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from waltzctl.interruption import Interrupted, deaf
from waltzctl.render import printable
from waltzd.errors import EXIT_ERROR, EXIT_MEANING, EXIT_OK, EXIT_USAGE, NotInstalled, WaltzError

EXIT_INTERRUPTED = 130

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "": {
        "analysis": ("", "What a log says when all of it is looked at."),
        "archive": ("", "What was exported, back as files of a log."),
        "bench": ("", "Measure what a cluster does under load."),
        "certificate": ("", "Make certificates for trials and a first cluster."),
        "cluster": ("", "Look at a cluster as a whole, and change it."),
        "config": ("", "Check and explain configuration files."),
        "context": ("", "Give clusters names."),
        "create-cluster": ("waltzctl.placement.cluster:create", "Make a cluster of storages that run."),
        "doctor": ("waltzctl.watching.doctor:doctor", "Look for what will go wrong next, with the cure."),
        "down": ("waltzctl.playground.up:down", "Stop a cluster that `up` started."),
        "errors": ("", "Explain the error codes that Waltz prints."),
        "events": ("waltzctl.watching.event:events", "What the daemons said lately, in one order."),
        "export": ("", "What `spark-export` wrote: look, and check."),
        "health": ("waltzctl.watching.health:health", "Commit a probe in every partition, and say how long it took."),
        "history": ("waltzctl.placement.cluster:history", "Who changed what, and why."),
        "lock": ("", "Why a transaction was refused."),
        "moves": ("", "Moves of replicas that are under way."),
        "logs": ("waltzctl.playground.up:logs", "What the daemons of a cluster on this machine wrote."),
        "partition": ("", "Replicas and owners of partitions."),
        "rebuild-index": ("waltzctl.records.index:rebuild_index", "Make index files again from the data."),
        "reset": ("waltzctl.playground.up:reset", "Stop a cluster on this machine and remove all that it holds."),
        "segment": ("", "Look into single files of a storage."),
        "server": ("", "Servers, and which of them take partitions."),
        "spark": ("", "What exports run on, and how to make them start faster."),
        "spark-export": (
            "waltz_spark.exporting.export_command:spark_export",
            "Export the log to Parquet, Delta, ORC, JSON or CSV.",
        ),
        "status": ("waltzctl.watching.status:status", "Whether a cluster is well, and what is wrong."),
        "storage": ("", "Storages: add, remove, replace, look."),
        "support": ("", "Collect what somebody who helps wants to see."),
        "top": ("waltzctl.watching.top:top", "What a cluster is doing, live."),
        "txn": ("", "Read, follow and append transactions."),
        "up": ("waltzctl.playground.up:up", "Bring up a real cluster on this machine, to try Waltz out."),
        "verify-segments": ("waltzctl.records.verify:verify_segments", "Check all files of a storage, offline."),
    },
    "analysis": {
        "replay": (
            "waltz_spark.analysis.analysis_command:replay_",
            "Make an application's view again from an export, and compare.",
        ),
        "report": (
            "waltz_spark.analysis.analysis_command:report_",
            "Transactions, bytes, hot partitions, sizes and clients.",
        ),
    },
    "archive": {
        "restore": (
            "waltz_spark.restoring.archive_command:restore_",
            "Make segments again from a lossless export, byte for byte.",
        ),
    },
    "bench": {
        "append": ("waltzctl.bench.command:append", "Append transactions."),
        "feed": ("waltzctl.bench.command:feed", "Read what was written, from memory and from disks."),
        "locks": ("waltzctl.bench.command:locks", "Append against each other."),
        "mixed": ("waltzctl.bench.command:mixed", "Append while others read."),
        "recovery": ("waltzctl.bench.command:recovery", "Take an owner and a storage away."),
    },
    "certificate": {
        "issue": ("waltzctl.config.certificates:issue", "Certificates of one role, from an authority in a directory."),
    },
    "cluster": {
        "delete": ("waltzctl.placement.cluster:delete", "Take the documents of a cluster out of ZooKeeper."),
        "describe": ("waltzctl.placement.cluster:describe", "Show servers, storages and partitions."),
        "set": ("waltzctl.placement.cluster:set_", "Change how many replicas partitions have."),
        "status": ("waltzctl.watching.status:status", "Whether a cluster is well, and what is wrong."),
    },
    "config": {
        "explain": ("waltzctl.config.configuration:explain", "What a setting means, or where a value came from."),
        "show": ("waltzctl.config.configuration:show", "The settings in force of a configuration file."),
        "validate": ("waltzctl.config.configuration:validate", "Check configuration files."),
    },
    "context": {
        "add": ("waltzctl.context:add", "Give a cluster a name."),
        "list": ("waltzctl.context:list_", "The clusters that have names."),
        "remove": ("waltzctl.context:remove", "Forget a name; the cluster is not touched."),
        "show": ("waltzctl.context:show", "Which cluster is meant here, and who said so."),
        "use": ("waltzctl.context:use", "Mean this cluster from now on."),
        "validate": ("waltzctl.context:validate", "Whether a cluster answers at its addresses."),
    },
    "errors": {
        "list": ("waltzctl.error:list_errors", "List all error codes."),
        "lookup": ("waltzctl.error:lookup", "Explain one error code."),
    },
    "export": {
        "status": ("waltz_spark.exporting.manifest_command:status", "What an export holds, as its manifest says."),
        "verify": (
            "waltz_spark.exporting.manifest_command:verify",
            "Check all files of an export, alone or against the log.",
        ),
    },
    "lock": {
        "explain": ("waltzctl.records.lock:explain", "Who holds a lock, and what to wait for."),
    },
    "moves": {
        "cancel": ("waltzctl.placement.partition:moves_cancel", "Take back moves that are not over."),
        "list": ("waltzctl.placement.partition:moves_list", "Moves of replicas that are not over, a line each."),
        "resume": ("waltzctl.placement.partition:moves_resume", "Go on with moves that nobody carries out any more."),
    },
    "partition": {
        "assign": ("waltzctl.placement.partition:assign", "Give partitions replicas on these storages."),
        "auto-assign": ("waltzctl.placement.partition:auto_assign", "Spread replicas evenly over storages and groups."),
        "compare": ("waltzctl.records.compare:compare", "Whether replicas hold the same, and where they differ first."),
        "describe": ("waltzctl.placement.partition:describe", "One partition: owner, session, replicas."),
        "list": ("waltzctl.placement.partition:list_", "All partitions, a line each."),
        "preferred": ("waltzctl.placement.ownership:preferred", "Which server should own a partition."),
        "rescue": ("waltzctl.placement.rescuing:rescue", "Go on from the copies at hand, where no owner can decide."),
        "transfer": ("waltzctl.placement.ownership:transfer", "Move partitions to another server."),
        "unassign": ("waltzctl.placement.partition:unassign", "Take replicas away."),
    },
    "segment": {
        "dump": ("waltzctl.records.segment:dump_segment", "Show what a segment or another file holds, damaged or not."),
    },
    "server": {
        "drain": ("waltzctl.placement.server:drain", "Let a server give its partitions away."),
        "list": ("waltzctl.placement.server:list_", "The servers, and which of them are up."),
        "remove": ("waltzctl.placement.server:remove", "Do not expect a server any more that was stopped for good."),
        "undrain": ("waltzctl.placement.server:undrain", "Let a server take partitions again."),
    },
    "spark": {
        "status": ("waltz_spark.exporting.spark_command:status", "Which Java and which Spark an export here would run on."),
        "warmup": ("waltz_spark.exporting.spark_command:warmup", "Make exports start faster."),
    },
    "storage": {
        "add": ("waltzctl.placement.membership:add", "Take a storage into the cluster."),
        "availability": (
            "waltzctl.placement.replica:availability",
            "Take partitions of a storage offline, or back online.",
        ),
        "clean": ("waltzctl.placement.clean:clean", "Delete what was set aside on a storage."),
        "create-partition": ("waltzctl.placement.replica:create_partition", "Create empty replicas on a storage."),
        "describe": ("waltzctl.placement.storage:describe", "Show a storage, its partitions and what it has done."),
        "list": ("waltzctl.placement.storage:list_", "The storages of a cluster."),
        "partitions": ("waltzctl.placement.storage:partitions", "The replicas on a storage."),
        "recover": ("waltzctl.placement.recover:recover", "Bring replicas back whose disk was lost or damaged."),
        "remove": ("waltzctl.placement.membership:remove", "Move everything off a storage, and take it out."),
        "remove-partition": ("waltzctl.placement.replica:remove_partition", "Take replicas off a storage."),
        "replace": ("waltzctl.placement.membership:replace_", "Move everything from one storage to another."),
        "set": ("waltzctl.placement.membership:set_", "Write down other addresses or another group."),
        "verify": ("waltzctl.placement.storage:verify", "Check a storage's files while it runs."),
    },
    "support": {
        "bundle": ("waltzctl.watching.support:bundle", "One archive without payloads and secrets."),
    },
    "txn": {
        "append": ("waltzctl.records.txn:append", "Append a transaction."),
        "get": ("waltzctl.records.txn:get", "Show transactions by their ids."),
        "grep": ("waltzctl.records.txn:grep", "Show the transactions that match."),
        "tail": ("waltzctl.records.txn:tail", "Show the newest transactions, and those that come."),
    },
}
"""Command or group, where it is defined ("" for a group), and its line in the help."""

SPARK_PACKAGES = ("waltz_spark", "pyarrow", "pyspark", "py4j")
"""Of the extra `spark`."""

GENERAL_FAILURES = frozenset({"verify-segments"})
"""Commands whose exit codes tell three things apart: clean, findings, could not run; a mistake of the user stays 2."""


def exit_codes() -> str:
    """The exit codes as a paragraph of a help text; the form feed keeps click from joining its lines."""
    lines = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_MEANING.items()]
    lines.append(f"  {EXIT_INTERRUPTED:>3}  interrupted")
    return "\b\nExit codes:\n" + "\n".join(lines)


class LazyGroup(click.Group):
    """A group that knows its commands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS[self._table])

    @property
    def _table(self) -> str:
        return "" if self.name == "waltzctl" else str(self.name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = COMMANDS[self._table].get(cmd_name)
        if found is None:
            return None
        where, help_line = found
        if not where:
            return LazyGroup(name=cmd_name, help=help_line, epilog=exit_codes())
        module, _, name = where.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS[self._table].items())])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads our output has seen enough
            silence_stdout()
            return EXIT_OK
        return result


def silence_stdout() -> None:
    """The reader is gone: nothing more can be said there, not even by the flush at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _show_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"waltzctl {version('waltz')}")
        ctx.exit(EXIT_OK)


cli = LazyGroup(
    name="waltzctl",
    help="Operate a Waltz log. Data goes to standard output; progress, notes and errors go to standard error.",
    epilog=exit_codes(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
            help="Show the version and exit.",
        )
    ],
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """One command line; the exit code."""
    try:
        try:
            result = cli.main(list(arguments), prog_name="waltzctl", standalone_mode=False)
        except ModuleNotFoundError as error:  # a storage node does not have what exports and analyses need
            package = (error.name or "").partition(".")[0]
            if package not in SPARK_PACKAGES:
                raise
            raise NotInstalled(f"the package {package} is not installed", extra="spark") from error
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except click.Abort as error:
        with suppress(OSError):  # told to end by a terminal that went away
            said = f"\n{error}" if isinstance(error, Interrupted) else "Interrupted. Data files are as they were."
            click.echo(said, err=True)
        return EXIT_INTERRUPTED
    except WaltzError as error:
        for line in error.lines():
            click.echo(printable(line), err=True)
        return exit_code_of(error, arguments)
    except OSError as error:  # our own output, a terminal that went away: files of a storage have errors of their own
        click.echo(f"waltzctl could not go on: {error.strerror or error}", err=True)
        return EXIT_ERROR
    return result if isinstance(result, int) else EXIT_OK


def exit_code_of(error: WaltzError, arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in GENERAL_FAILURES and error.exit_code != EXIT_USAGE:
        return EXIT_ERROR
    return error.exit_code


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would write each failed handshake onto the terminal
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # or the start of another program ends it, while calls run
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    if code == EXIT_INTERRUPTED:
        deaf()
    sys.exit(code)


if __name__ == "__main__":
    main()

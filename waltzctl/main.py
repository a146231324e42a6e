"""Entry point of `waltzctl`: parse a command line, run the command, return an exit code.

`COMMANDS` lists all commands; the module of a command is imported only when it runs, so that `--help` is quick. A command
returns its exit code or raises an error of `waltzd.errors`. Only this module turns either into output and an exit code. A
mistake of a user or a failure of a machine never shows a traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from waltzd.disk.standard_streams import open_standard_streams
from waltzd.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, BadArgument, WaltzError
from waltzd.errors.operations import not_installed

try:
    import typer
    from typer import Option
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:  # an application installs this program without the extra `tools`
    sys.exit("\n".join(not_installed(error, "tools").lines()))

from waltzctl.shell.interruption import EXIT_INTERRUPTED, Interrupted, ignore_signals
from waltzctl.shell.options import HELP, command_of
from waltzctl.shell.removed import check_command
from waltzctl.show.terminal import printable, silence_stdout

COMPLETE = "_WALTZCTL_COMPLETE"
"""Environment variable through which a shell requests completions: `bash_source`, `zsh_source`, `fish_source`."""

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "": {
        "archive": ("", "Inspect, verify and repair the archive of the log."),
        "backup": ("", "Test that a backup can be restored."),
        "bench": ("", "Measure a cluster under load."),
        "certificate": ("", "Issue certificates for trials and a first cluster."),
        "channel": ("", "List and set channels: names for sets of partitions."),
        "client": ("", "List and disconnect applications."),
        "cluster": ("", "Change, save and restore a cluster."),
        "config": ("", "Validate configuration files."),
        "console": ("waltzctl.console.command:console", "Serve a read-only web page that shows the cluster."),
        "context": ("", "Name clusters, and select one."),
        "create-cluster": ("waltzctl.placement.creation:create", "Create a cluster from running storages."),
        "doctor": ("waltzctl.health.doctor:doctor", "Check for coming problems, and show how to fix each."),
        "down": ("waltzctl.local_cluster.up:down", "Stop a cluster that `up` started."),
        "errors": ("", "Explain error codes and exit codes."),
        "events": ("waltzctl.health.events:events", "Show recent log lines of all daemons, by time."),
        "export": ("", "Describe and verify the output of `spark-export`."),
        "group": ("", "Manage consumer groups and their dead letters."),
        "health": ("waltzctl.health.probe:health", "Commit a probe in every partition, and show the latency."),
        "history": ("waltzctl.placement.cluster:history", "List changes of the cluster: who, what, when and why."),
        "lock": ("", "Explain why a lock failed."),
        "logs": ("waltzctl.local_cluster.up:logs", "Show the log files of a cluster on this machine."),
        "partition": ("", "Assign, describe and compare partitions."),
        "policy": ("", "Set and explain the access policy."),
        "rebuild-index": ("waltzctl.records.offline:rebuild_index", "Rebuild the index files of a storage, offline."),
        "reset": ("waltzctl.local_cluster.up:reset", "Stop a cluster on this machine and delete its data."),
        "segment": ("", "Dump single files of a storage."),
        "server": ("", "List, drain and remove servers."),
        "spark-export": (
            "waltz_spark.export.commands:spark_export",
            "Export the log to Parquet, or to a Delta table.",
        ),
        "status": ("waltzctl.health.status:status", "Show whether a cluster is healthy, and what is wrong."),
        "storage": ("", "Add, describe, recover and remove storages."),
        "support": ("", "Collect diagnostics for a support request."),
        "top": ("waltzctl.health.top:top", "Show live throughput and latency of a cluster."),
        "txn": ("", "Read, follow and append transactions."),
        "up": ("waltzctl.local_cluster.up:up", "Start a real cluster on this machine, to try Waltz."),
        "verify-segments": ("waltzctl.records.offline:verify_segments", "Check all files of a storage, offline."),
    },
    "archive": {
        "heal": ("waltzctl.records.archive:heal", "Restore lost objects of an archive, or delete leftovers."),
        "sign": ("waltzctl.records.archive:sign", "Create an archive key, or sign an unsigned archive."),
        "status": ("waltzctl.records.archive:status", "Show how far each partition is archived or backed up."),
        "verify": ("waltzctl.records.archive:verify", "Check all objects of an archive."),
    },
    "backup": {
        "drill": (
            "waltzctl.records.backup:drill",
            "Restore a backup into a scratch directory and check it.",
        ),
    },
    "bench": {
        "append": ("waltzctl.bench.command:append", "Measure appends."),
        "feed": ("waltzctl.bench.command:feed", "Measure reads from memory and from disk."),
    },
    "certificate": {
        "issue": ("waltzctl.config.certificates:issue", "Issue certificates of one role."),
    },
    "channel": {
        "list": ("waltzctl.config.channel:list_", "List channels and their partitions."),
        "set": ("waltzctl.config.channel:set_", "Set the partitions of a channel, or delete it."),
    },
    "client": {
        "disconnect": ("waltzctl.health.client:disconnect", "Close the mounts of an application."),
        "list": ("waltzctl.health.client:list_", "List connected applications, or describe one."),
    },
    "cluster": {
        "delete": ("waltzctl.placement.cluster:delete", "Delete the documents of a cluster from ZooKeeper."),
        "finalize": ("waltzctl.placement.cluster:finalize", "End an upgrade; older versions are refused from then on."),
        "load-metadata": ("waltzctl.placement.metadata:load", "Load saved documents of a cluster into ZooKeeper."),
        "rebuild-metadata": (
            "waltzctl.placement.metadata:rebuild",
            "Rebuild the documents of a cluster from its storages.",
        ),
        "restore": ("waltzctl.placement.restore:restore", "Create a cluster from an archive, at a point in time."),
        "save-metadata": ("waltzctl.placement.metadata:save", "Save the documents of a cluster to a file."),
        "set": ("waltzctl.placement.cluster:set_", "Set replicas, format or retention; close ZooKeeper."),
        "wait": ("waltzctl.health.status:wait", "Wait until a cluster is healthy or can spare a storage."),
    },
    "config": {
        "validate": ("waltzctl.config.configuration:validate", "Validate configuration files."),
    },
    "context": {
        "add": ("waltzctl.shell.context:add", "Name a cluster."),
        "list": ("waltzctl.shell.context:list_", "List named clusters."),
        "use": ("waltzctl.shell.context:use", "Select or delete a name, or show the selected cluster."),
    },
    "errors": {
        "lookup": ("waltzctl.shell.error:lookup", "Explain an error code, or list all codes."),
    },
    "export": {
        "status": ("waltz_spark.export.commands:status", "Describe an export by its manifest."),
        "verify": (
            "waltz_spark.export.commands:verify",
            "Check all files of an export, alone or against the log.",
        ),
    },
    "group": {
        "create": ("waltzctl.groups.changes:create", "Create a group."),
        "describe": ("waltzctl.groups.command:describe", "Describe a group: position, lag and members."),
        "list": ("waltzctl.groups.command:list_", "List groups."),
        "parked": ("", "List and replay the dead letters of a group."),
        "remove": ("waltzctl.groups.changes:remove", "Delete a group; the log stays."),
        "reset": ("waltzctl.groups.position:reset", "Reset the position of a group, or skip ids."),
        "resume": ("waltzctl.groups.position:resume", "Resume a stopped group."),
        "set": ("waltzctl.groups.changes:set_", "Set the settings of a group."),
    },
    "group parked": {
        "list": ("waltzctl.groups.parked:list_", "List dead letters, with member and reason."),
        "replay": ("waltzctl.groups.parked:replay", "Deliver dead letters again, or discard them."),
    },
    "lock": {
        "explain": ("waltzctl.records.lock:explain", "Show the holder of a lock, and what to wait for."),
    },
    "partition": {
        "assign": ("waltzctl.placement.partition:assign", "Move replicas, resume moves, or cancel them."),
        "auto-assign": ("waltzctl.placement.partition:auto_assign", "Spread replicas evenly over storages and groups."),
        "compare": ("waltzctl.records.compare:compare", "Compare replicas, and show the first difference."),
        "describe": ("waltzctl.placement.partition:describe", "Describe a partition: owner, session, replicas."),
        "list": ("waltzctl.placement.partition:list_", "List partitions."),
        "preferred": ("waltzctl.placement.ownership:preferred", "Set or list preferred owners of partitions."),
        "rescue": ("waltzctl.placement.rescue:rescue", "Resume a partition that lost its majority, from the copies left."),
        "transfer": ("waltzctl.placement.ownership:transfer", "Move partitions to another server, once."),
    },
    "policy": {
        "explain": ("waltzctl.config.policy:explain", "Show the grants, or the rights of an application."),
        "set": ("waltzctl.config.policy:set_", "Set the policy from a file, check it, or delete it."),
    },
    "segment": {
        "dump": ("waltzctl.records.offline:dump_segment", "Dump a segment or another file, damaged or not."),
    },
    "server": {
        "drain": ("waltzctl.placement.ownership:drain", "Move partitions off a server, or allow them again."),
        "list": ("waltzctl.placement.ownership:list_", "List servers."),
        "remove": ("waltzctl.placement.ownership:remove", "Remove a server that was stopped for good."),
    },
    "storage": {
        "add": ("waltzctl.placement.storage:add", "Add a storage to the cluster."),
        "availability": (
            "waltzctl.placement.storage:availability",
            "Take replicas of a storage offline, or back online.",
        ),
        "describe": ("waltzctl.placement.storage:describe", "Describe a storage, its replicas and counters."),
        "list": ("waltzctl.placement.storage:list_", "List storages."),
        "recover": ("waltzctl.placement.storage:recover", "Rebuild replicas whose disk was lost or damaged."),
        "remove": ("waltzctl.placement.storage:remove", "Move all replicas off a storage, and remove it."),
        "set": ("waltzctl.placement.storage:set_", "Set the addresses or the group of a storage."),
        "verify": ("waltzctl.placement.storage:verify", "Check the files of a running storage."),
    },
    "support": {
        "bundle": ("waltzctl.health.support:bundle", "Write a diagnostics archive, without payloads and secrets."),
    },
    "txn": {
        "append": ("waltzctl.records.txn:append", "Append a transaction."),
        "get": ("waltzctl.records.txn:get", "Show transactions by id."),
        "grep": ("waltzctl.records.txn:grep", "Show matching transactions."),
        "history": ("waltzctl.records.txn:history", "Show the transactions that marked a lock."),
        "tail": ("waltzctl.records.txn:tail", "Show the newest transactions, and follow the log."),
    },
}
"""Words of a group → its commands and subgroups: each with `module:function` ("" for a group) and its line in the help."""

GENERAL_FAILURES = frozenset({"verify-segments"})
"""Commands with three outcomes: clean, findings, could not run (`EXIT_ERROR` for every error but a usage error)."""


class LazyGroup(TyperGroup):
    """Group that imports the module of a command only when the command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS[self._table])

    @property
    def _table(self) -> str:
        return "" if self.name == "waltzctl" else str(self.name)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        found = COMMANDS[self._table].get(cmd_name)
        if found is None:
            return None
        where, help_line = found
        if not where:
            words = f"{self._table} {cmd_name}".strip()
            return LazyGroup(name=words, help=help_line, rich_markup_mode=None, no_args_is_help=True)
        module, _, name = where.partition(":")
        return command_of(cmd_name, getattr(importlib.import_module(module), name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS[self._table].items())])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS[self._table]:
            import difflib

            check_command(f"{self._table} {args[0]}".strip())
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(self.list_commands(ctx))}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. If the reader of lines that are printed as they arrive is gone, as in `waltzctl txn get … | head`,
        it had enough of them. A whole result is printed by `put`, which lets the command return its exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            silence_stdout()
            return EXIT_OK
        return result


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"waltzctl {version('waltzd')}")
        raise typer.Exit


app = typer.Typer(name="waltzctl", cls=LazyGroup, rich_markup_mode=None, no_args_is_help=True, context_settings=HELP)


@app.callback(epilog="Exit codes: waltzctl errors lookup")
def waltzctl(
    *,
    _version: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Operate a Waltz log. Data goes to standard output; progress, notes and errors go to standard error."""


cli = typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit code."""
    try:
        try:
            with cli.make_context("waltzctl", list(arguments)) as context:
                result = cli.invoke(context)
        except ModuleNotFoundError as error:  # an extra, such as spark, is not installed
            raise not_installed(error, "tools", "spark", "console") from error
        except UnicodeEncodeError as error:  # bytes that are not UTF-8 may name a file, and nothing else
            wrong = next((one for one in arguments if any("\udc80" <= letter <= "\udcff" for letter in one)), None)
            if wrong is None:
                raise
            raise BadArgument(f"{printable(wrong)} is not UTF-8") from error
    except typer.TyperException as error:  # a usage error; those that typer raises have a method `show`
        error.show()  # type: ignore[attr-defined]
        return EXIT_USAGE
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt) as error:
        with suppress(OSError):  # the terminal may have gone away
            message = f"\n{error}" if isinstance(error, Interrupted) else "Interrupted. Data files are as they were."
            typer.echo(message, err=True)
        return EXIT_INTERRUPTED
    except WaltzError as error:
        code = exit_code_of(error, arguments)
        if wants_json(arguments):
            typer.echo(json.dumps({"version": 1, "error": {**whole_error(error), "exit_code": code}}), err=True)
        else:
            for line in error.lines():
                typer.echo(printable(line), err=True)
        return code
    except OSError as error:  # writing to standard output failed: errors of files are translated to `WaltzError`
        typer.echo(f"waltzctl failed: {error.strerror or error}", err=True)
        return EXIT_ERROR
    return result if isinstance(result, int) else EXIT_OK


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether `-o json` was typed. Reads the raw arguments: parsing the options may be what failed."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any(one in ("-ojson", "--output=json") or (one in ("-o", "--output") and two == "json") for one, two in pairs)


def whole_error(error: WaltzError) -> dict[str, str]:
    return {
        "code": error.code,
        "message": error.message,
        "not_done": error.detail_not_done,
        "next_step": error.detail_next_step,
    }


def exit_code_of(error: WaltzError, arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in GENERAL_FAILURES and error.exit_code != EXIT_USAGE:
        return EXIT_ERROR
    return error.exit_code


def main() -> None:
    open_standard_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print each failed handshake
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # gRPC would fail when a subprocess is started
    if asked := os.environ.get(COMPLETE):
        shell, _, verb = asked.partition("_")
        if verb in ("source", "complete"):  # typer expects `source_bash`
            os.environ[COMPLETE] = f"{verb}_{shell}"
        cli.main(prog_name="waltzctl")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    if code == EXIT_INTERRUPTED:
        ignore_signals()
    sys.exit(code)


if __name__ == "__main__":
    main()

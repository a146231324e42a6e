"""From what was typed to an exit code.

Commands are listed here and imported only when they run, so that `--help` is quick. A command returns its exit code or
raises an error of `waltzd.errors`; this module alone turns either into what the shell sees, and never shows a traceback
for something that a user or a machine did.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from waltzd.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, WaltzError, not_installed

try:
    import typer
    from typer import Option
    from typer._click.exceptions import ClickException  # what typer raises for a mistake of the user; it has no other name
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:  # an application has this program, too
    sys.exit("\n".join(not_installed(error, "tools").lines()))

from waltzctl.shell.interruption import EXIT_INTERRUPTED, Interrupted, deaf, silence_stdout
from waltzctl.shell.options import HELP, command_of
from waltzctl.shell.removed import check_command
from waltzctl.show.terminal import printable

COMPLETE = "_WALTZCTL_COMPLETE"
"""The variable by which a shell asks: `bash_source`, and so for zsh and fish."""

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "": {
        "archive": ("", "The log in a store: how far, and whole or not."),
        "backup": ("", "How much would be lost now; and whether all of it comes back."),
        "bench": ("", "Measure what a cluster does under load."),
        "certificate": ("", "Make certificates for trials and a first cluster."),
        "channel": ("", "Names for sets of partitions."),
        "client": ("", "Which applications are connected, and who is slowed."),
        "cluster": ("", "Look at a cluster as a whole, and change it."),
        "config": ("", "Check configuration files."),
        "console": ("waltzctl.console.command:console", "The cluster in a browser."),
        "context": ("", "Give clusters names."),
        "create-cluster": ("waltzctl.placement.creation:create", "Make a cluster of storages that run."),
        "doctor": ("waltzctl.health.doctor:doctor", "Look for what will go wrong next, with the cure."),
        "down": ("waltzctl.local_cluster.up:down", "Stop a cluster that `up` started."),
        "errors": ("", "Explain the error codes that Waltz prints."),
        "events": ("waltzctl.health.events:events", "What the daemons said lately, in one order."),
        "export": ("", "What `spark-export` wrote: look, and check."),
        "group": ("", "Consumer groups: members that share work, and what they put aside."),
        "health": ("waltzctl.health.health:health", "Commit a probe in every partition, and say how long it took."),
        "history": ("waltzctl.placement.cluster:history", "Who changed what, and why."),
        "lock": ("", "Why a transaction was refused."),
        "logs": ("waltzctl.local_cluster.up:logs", "What the daemons of a cluster on this machine wrote."),
        "partition": ("", "Replicas and owners of partitions."),
        "policy": ("", "Who may do what."),
        "rebuild-index": ("waltzctl.records.offline:rebuild_index", "Make index files again from the data."),
        "reset": ("waltzctl.local_cluster.up:reset", "Stop a cluster on this machine and remove all that it holds."),
        "segment": ("", "Look into single files of a storage."),
        "server": ("", "Servers, and which of them take partitions."),
        "spark-export": (
            "waltz_spark.export.export_command:spark_export",
            "Export the log to Parquet, or to a Delta table.",
        ),
        "status": ("waltzctl.health.status:status", "Whether a cluster is well, and what is wrong."),
        "storage": ("", "Storages: add, remove, replace, look."),
        "support": ("", "Collect what a person who helps needs to see."),
        "top": ("waltzctl.health.top:top", "What a cluster is doing, live."),
        "txn": ("", "Read, follow and append transactions."),
        "up": ("waltzctl.local_cluster.up:up", "Bring up a real cluster on this machine, to try Waltz out."),
        "verify-segments": ("waltzctl.records.offline:verify_segments", "Check all files of a storage, offline."),
    },
    "archive": {
        "heal": ("waltzctl.records.archive:heal", "Put back what an archive lost, or remove leftovers."),
        "sign": ("waltzctl.records.archive:sign", "Make the key of an archive; sign what is older."),
        "status": ("waltzctl.records.archive:status", "How far each partition is archived, or can be restored."),
        "timelines": ("waltzctl.records.archive:timelines", "List the timelines of each partition in a store."),
        "verify": ("waltzctl.records.archive:verify", "Check an archive in its store."),
    },
    "backup": {
        "drill": (
            "waltzctl.records.drill:drill",
            "Restore into a scratch directory, and check it all.",
        ),
        "status": ("waltzctl.records.backup:status", "How far each partition is backed up."),
    },
    "bench": {
        "append": ("waltzctl.bench.command:append", "Append transactions."),
        "feed": ("waltzctl.bench.command:feed", "Read what was written, from memory and from disks."),
    },
    "certificate": {
        "issue": ("waltzctl.config.certificates:issue", "Certificates of one role, from an authority in a directory."),
    },
    "channel": {
        "list": ("waltzctl.config.channel:list_", "The channels and their partitions."),
        "remove": ("waltzctl.config.channel:remove", "Take a name away; its partitions stay."),
        "set": ("waltzctl.config.channel:set_", "Give partitions a name, or a channel other partitions."),
    },
    "client": {
        "describe": ("waltzctl.health.client:describe", "One application: its instances, and what it uses."),
        "disconnect": ("waltzctl.health.client:disconnect", "End the mounts of an application."),
        "list": ("waltzctl.health.client:list_", "The instances of applications, a line each."),
    },
    "cluster": {
        "delete": ("waltzctl.placement.cluster:delete", "Take the documents of a cluster out of ZooKeeper."),
        "describe": ("waltzctl.placement.cluster:describe", "Show servers, storages and partitions."),
        "load-metadata": ("waltzctl.placement.metadata:load", "Put the documents of a cluster back into ZooKeeper."),
        "rebuild-metadata": (
            "waltzctl.placement.metadata:rebuild",
            "Make the documents of a cluster anew from its storages.",
        ),
        "restore": ("waltzctl.placement.restore:restore", "Make a cluster out of an archive, at one moment."),
        "save-metadata": ("waltzctl.placement.metadata:save", "Write the documents of a cluster to a file."),
        "secure": ("waltzctl.placement.cluster:secure", "Close the documents of a cluster in ZooKeeper."),
        "set": ("waltzctl.placement.cluster:set_", "Change how many replicas partitions have, or their format."),
        "wait": ("waltzctl.health.gate:wait", "Wait until a cluster is well."),
    },
    "config": {
        "validate": ("waltzctl.config.configuration:validate", "Check configuration files."),
    },
    "context": {
        "add": ("waltzctl.shell.context:add", "Give a cluster a name."),
        "list": ("waltzctl.shell.context:list_", "The clusters that have names."),
        "remove": ("waltzctl.shell.context:remove", "Forget a name; the cluster is not touched."),
        "use": ("waltzctl.shell.context:use", "Mean a cluster from now on; or say which one is meant."),
    },
    "errors": {
        "lookup": ("waltzctl.shell.error:lookup", "Explain an error code, or list all codes."),
    },
    "export": {
        "status": ("waltz_spark.export.manifest_command:status", "What an export holds, as its manifest says."),
        "verify": (
            "waltz_spark.export.manifest_command:verify",
            "Check all files of an export, alone or against the log.",
        ),
    },
    "group": {
        "create": ("waltzctl.groups.changes:create", "Make a group."),
        "describe": ("waltzctl.groups.command:describe", "One group: where it stands, and its members."),
        "list": ("waltzctl.groups.command:list_", "The groups, a line each."),
        "parked": ("", "What a group has put aside."),
        "pass-over": ("waltzctl.groups.changes:pass_over", "Let groups go on without an entry that cannot be read."),
        "remove": ("waltzctl.groups.changes:remove", "Take a group away; the log stays."),
        "reset": ("waltzctl.groups.position:reset", "Reset the position of a group, or skip ids."),
        "resume": ("waltzctl.groups.position:resume", "Let a group go on that has stopped."),
        "set": ("waltzctl.groups.changes:set_", "Give a group other settings."),
    },
    "group parked": {
        "list": ("waltzctl.groups.parked:list_", "What is parked, with member and reason."),
        "replay": ("waltzctl.groups.parked:replay", "Let what is parked be done again, once, or leave it for good."),
    },
    "lock": {
        "explain": ("waltzctl.records.lock:explain", "Who holds a lock, and what to wait for."),
    },
    "partition": {
        "assign": ("waltzctl.placement.partition:assign", "Move replicas, go on with moves, or take them back."),
        "auto-assign": ("waltzctl.placement.partition:auto_assign", "Spread replicas evenly over storages and groups."),
        "compare": ("waltzctl.records.compare:compare", "Whether replicas hold the same, and where they differ first."),
        "describe": ("waltzctl.placement.partition:describe", "One partition: owner, session, replicas."),
        "list": ("waltzctl.placement.partition:list_", "All partitions, a line each."),
        "preferred": ("waltzctl.placement.ownership:preferred", "Which server should own a partition."),
        "rescue": ("waltzctl.placement.rescue:rescue", "Go on from the copies at hand, where no owner can decide."),
        "transfer": ("waltzctl.placement.ownership:transfer", "Move partitions to another server."),
    },
    "policy": {
        "explain": ("waltzctl.config.policy:explain", "What a name may do, and which grants say so."),
        "set": ("waltzctl.config.policy:set_", "Put the policy of a file in force, check it, or take it away."),
        "show": ("waltzctl.config.policy:show", "The grants that count."),
    },
    "segment": {
        "dump": ("waltzctl.records.offline:dump_segment", "Show what a segment or another file holds, damaged or not."),
    },
    "server": {
        "drain": ("waltzctl.placement.ownership:drain", "Let a server give its partitions away, or take some again."),
        "list": ("waltzctl.placement.ownership:list_", "The servers, and which of them are up."),
        "remove": ("waltzctl.placement.ownership:remove", "Take a server that was stopped for good off the list."),
    },
    "storage": {
        "add": ("waltzctl.placement.membership:add", "Take a storage into the cluster."),
        "availability": (
            "waltzctl.placement.storage:availability",
            "Take partitions of a storage offline, or back online.",
        ),
        "describe": ("waltzctl.placement.storage:describe", "Show a storage, its partitions and what it has done."),
        "list": ("waltzctl.placement.storage:list_", "The storages of a cluster."),
        "may-stop": ("waltzctl.health.gate:may_stop", "Whether a storage may be stopped without harm."),
        "recover": ("waltzctl.placement.recover:recover", "Bring replicas back whose disk was lost or damaged."),
        "remove": ("waltzctl.placement.membership:remove", "Move everything off a storage, and take it out."),
        "replace": ("waltzctl.placement.membership:replace_", "Move everything from one storage to another."),
        "set": ("waltzctl.placement.membership:set_", "Write down other addresses or another group."),
        "verify": ("waltzctl.placement.storage:verify", "Check a storage's files while it runs."),
    },
    "support": {
        "bundle": ("waltzctl.health.support:bundle", "One archive without payloads and secrets."),
    },
    "txn": {
        "append": ("waltzctl.records.txn:append", "Append a transaction."),
        "get": ("waltzctl.records.txn:get", "Show transactions by their ids."),
        "grep": ("waltzctl.records.txn:grep", "Show the transactions that match."),
        "tail": ("waltzctl.records.txn:tail", "Show the newest transactions, and those that come."),
    },
}
"""The words of a group → its commands and groups, where each is defined ("" for a group), and its line in the help."""

GENERAL_FAILURES = frozenset({"verify-segments"})
"""Commands whose exit codes tell three things apart: clean, findings, could not run; a mistake of the user stays 2."""


class LazyGroup(TyperGroup):
    """A group that knows its commands by name only."""

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
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of our output has seen enough
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
    """One command line; the exit code."""
    try:
        try:
            with cli.make_context("waltzctl", list(arguments)) as context:
                result = cli.invoke(context)
        except ModuleNotFoundError as error:  # a storage node does not have what exports and analyses need
            raise not_installed(error, "tools", "spark", "console") from error
    except ClickException as error:
        error.show()
        return EXIT_USAGE
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt) as error:
        with suppress(OSError):  # told to end by a terminal that went away
            said = f"\n{error}" if isinstance(error, Interrupted) else "Interrupted. Data files are as they were."
            typer.echo(said, err=True)
        return EXIT_INTERRUPTED
    except WaltzError as error:
        code = exit_code_of(error, arguments)
        if wants_json(arguments):
            typer.echo(json.dumps({"version": 1, "error": {**whole_error(error), "exit_code": code}}), err=True)
        else:
            for line in error.lines():
                typer.echo(printable(line), err=True)
        return code
    except OSError as error:  # our own output, a terminal that went away: files of a storage have errors of their own
        typer.echo(f"waltzctl could not go on: {error.strerror or error}", err=True)
        return EXIT_ERROR
    return result if isinstance(result, int) else EXIT_OK


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether `-o json` was typed, however it was: what failed may have failed before the options were understood."""
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
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would write each failed handshake onto the terminal
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # or the start of another program ends it, while calls run
    if asked := os.environ.get(COMPLETE):
        shell, _, verb = asked.partition("_")
        if verb in ("source", "complete"):  # typer, and the scripts that it makes, have it the other way round
            os.environ[COMPLETE] = f"{verb}_{shell}"
        cli.main(prog_name="waltzctl")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    if code == EXIT_INTERRUPTED:
        deaf()
    sys.exit(code)


if __name__ == "__main__":
    main()
